"""The table of strategies: name -> class."""

if __name__ != "trainer.strategies":
    raise ImportError(
        f"this folder is the package 'trainer.strategies', and it was imported as {__name__!r}. "
        "Import 'trainer.strategies'. If you meant a folder of your own, it is hidden by this repository's root on "
        "sys.path: run your script from its own folder."
    )

from trainer.errors import ConfigError, unknown
from trainer.strategies.base import Strategy
from trainer.strategies.ddp import DDPStrategy
from trainer.strategies.fsdp import FSDPStrategy
from trainer.strategies.single import SingleDeviceStrategy
from trainer.strategies.xla import XlaFsdpStrategy, XlaStrategy

__all__ = [
    "STRATEGIES",
    "DDPStrategy",
    "FSDPStrategy",
    "SingleDeviceStrategy",
    "Strategy",
    "XlaFsdpStrategy",
    "XlaStrategy",
    "resolve_strategy",
]

STRATEGIES: dict[str, type[Strategy]] = {
    "single_device": SingleDeviceStrategy,
    "ddp": DDPStrategy,
    "fsdp": FSDPStrategy,
    "xla": XlaStrategy,
    "xla_fsdp": XlaFsdpStrategy,
}


OTHER_NAMES = {
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
    return None if kind is None else kind.only_on


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
        if strategy in OTHER_NAMES:
            raise ConfigError(f"unknown strategy {strategy!r}. Use {OTHER_NAMES[strategy]}.")
        raise unknown("strategy", strategy, [*STRATEGIES, "auto"])
    return STRATEGIES[strategy](), "given by name"
