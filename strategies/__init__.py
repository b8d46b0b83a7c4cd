"""The table of strategies: name -> class."""

if __name__ != "trainer.strategies":
    raise ImportError(
        f"this folder is the package 'trainer.strategies', and it was imported as {__name__!r}. "
        "Import 'trainer.strategies'. If you meant a folder of your own, it is hidden by this repository's root on "
        "sys.path: run your script from its own folder."
    )

from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any

from trainer.errors import ConfigError, unknown_name_error
from trainer.strategy import Strategy

if TYPE_CHECKING:
    from trainer.strategies.ddp import DDPStrategy
    from trainer.strategies.deepspeed.strategy import DeepSpeedStrategy
    from trainer.strategies.fsdp.strategy import FSDPStrategy
    from trainer.strategies.single import SingleDeviceStrategy
    from trainer.strategies.xla.strategy import XlaFsdpStrategy, XlaStrategy

__all__ = [
    "STRATEGIES",
    "DDPStrategy",
    "DeepSpeedStrategy",
    "FSDPStrategy",
    "SingleDeviceStrategy",
    "Strategy",
    "XlaFsdpStrategy",
    "XlaStrategy",
    "resolve_strategy",
]


class StrategyTable(Mapping[str, type[Strategy]]):
    """The classes by name. One is imported when it is asked for, because what they need takes torch a second."""

    HOMES = {
        "single_device": "single.SingleDeviceStrategy",
        "ddp": "ddp.DDPStrategy",
        "fsdp": "fsdp.strategy.FSDPStrategy",
        "deepspeed": "deepspeed.strategy.DeepSpeedStrategy",
        "deepspeed_stage_1": "deepspeed.strategy.DeepSpeedStage1Strategy",
        "deepspeed_stage_2": "deepspeed.strategy.DeepSpeedStage2Strategy",
        "deepspeed_stage_3": "deepspeed.strategy.DeepSpeedStage3Strategy",
        "deepspeed_stage_2_offload": "deepspeed.strategy.DeepSpeedStage2OffloadStrategy",
        "deepspeed_stage_3_offload": "deepspeed.strategy.DeepSpeedStage3OffloadStrategy",
        "xla": "xla.strategy.XlaStrategy",
        "xla_fsdp": "xla.strategy.XlaFsdpStrategy",
    }

    def __getitem__(self, name: str) -> type[Strategy]:
        file, kind = self.HOMES[name].rsplit(".", 1)
        strategy: type[Strategy] = getattr(import_module(f"trainer.strategies.{file}"), kind)
        return strategy

    def __iter__(self) -> Iterator[str]:
        return iter(self.HOMES)

    def __len__(self) -> int:
        return len(self.HOMES)

    def __contains__(self, name: object) -> bool:
        return name in self.HOMES


STRATEGIES = StrategyTable()


def __getattr__(name: str) -> Any:
    for home in StrategyTable.HOMES.values():
        file, kind = home.rsplit(".", 1)
        if kind == name:
            return getattr(import_module(f"trainer.strategies.{file}"), kind)
    raise AttributeError(f"module 'trainer.strategies' has no attribute {name!r}")


LIGHTNING_EQUIVALENTS = {
    "dp": "'ddp'",
    "ddp_spawn": "'ddp': it starts its processes itself",
    "ddp_notebook": "'ddp', in a script: several processes cannot be started from a notebook",
    "ddp_find_unused_parameters_true": "DDPStrategy(find_unused_parameters=True) from trainer.strategies",
    "ddp_find_unused_parameters_false": "'ddp'",
}
"""Names of other trainers, and what to give here."""


def needed_device(strategy: str | Strategy) -> str | None:
    """The type of device that a strategy is made for; None: it runs on several, or is not known."""
    kind = strategy if isinstance(strategy, Strategy) else STRATEGIES.get(strategy)
    return None if kind is None else kind.required_device


def resolve_strategy(strategy: str | Strategy, num_processes: int, device_type: str = "cpu") -> tuple[Strategy, str]:
    """The strategy for a name or an instance, and why it was chosen.

    Raises:
        ConfigError: the name is not known.
    """
    if isinstance(strategy, Strategy):
        return strategy, "given as an object"
    if strategy == "auto" and device_type == "xla":
        return STRATEGIES["xla"](), "auto: torch_xla's devices"
    if strategy == "auto":
        name = "ddp" if num_processes > 1 else "single_device"
        return STRATEGIES[name](), f"auto: {num_processes} process{'es' if num_processes > 1 else ''}"
    if strategy not in STRATEGIES:
        if strategy in LIGHTNING_EQUIVALENTS:
            raise ConfigError(f"unknown strategy {strategy!r}. Use {LIGHTNING_EQUIVALENTS[strategy]}.")
        raise unknown_name_error("strategy", strategy, [*STRATEGIES, "auto"])
    return STRATEGIES[strategy](), "given by name"
