"""The strategies, a line for each: the file, and the class as users import it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if __name__ != "trainer.strategies":
    raise ImportError(
        f"this folder is the package 'trainer.strategies', and it was imported as {__name__!r}. "
        "Import 'trainer.strategies'. If you meant a folder of your own, it is hidden by this repository's root on "
        "sys.path: run your script from its own folder."
    )

from trainer.names.added import Table as _Table
from trainer.names.paths import answer_further_names as _answer_further_names
from trainer.strategies.ddp import DDPStrategy as DDPStrategy
from trainer.strategies.deepspeed.strategy import DeepSpeedStage1Strategy as DeepSpeedStage1Strategy
from trainer.strategies.deepspeed.strategy import DeepSpeedStage2OffloadStrategy as DeepSpeedStage2OffloadStrategy
from trainer.strategies.deepspeed.strategy import DeepSpeedStage2Strategy as DeepSpeedStage2Strategy
from trainer.strategies.deepspeed.strategy import DeepSpeedStage3OffloadStrategy as DeepSpeedStage3OffloadStrategy
from trainer.strategies.deepspeed.strategy import DeepSpeedStage3Strategy as DeepSpeedStage3Strategy
from trainer.strategies.deepspeed.strategy import DeepSpeedStrategy as DeepSpeedStrategy
from trainer.strategies.fsdp.strategy import FSDPStrategy as FSDPStrategy
from trainer.strategies.single import SingleDeviceStrategy as SingleDeviceStrategy
from trainer.strategies.xla.strategy import XlaFsdpStrategy as XlaFsdpStrategy
from trainer.strategies.xla.strategy import XlaStrategy as XlaStrategy
from trainer.strategy import Strategy as Strategy

STRATEGIES: _Table[type[Strategy]] = _Table(
    {
        kind.name: kind
        for kind in list(globals().values())
        if isinstance(kind, type) and issubclass(kind, Strategy) and kind is not Strategy
    },
    "trainer.strategies",
)
"""Every strategy by the name that `Trainer(strategy=)` takes. All are imported with the first `Trainer`, so they import
heavy packages, torch.distributed.fsdp too, inside the functions that need them."""

_answer_further_names("trainer.strategies", "ddp", "deepspeed", "fsdp", "parallel", "xla")

if not TYPE_CHECKING:  # with it, a type checker would accept every name

    def __dir__() -> list[str]:
        import sys

        from trainer.errors import public_names

        return sorted(public_names(sys.modules[__name__]))
