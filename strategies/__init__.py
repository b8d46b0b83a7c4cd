"""The table of strategies: name -> class."""

if __name__ != "trainer.strategies":
    raise ImportError(
        f"this folder is the package 'trainer.strategies', and it was imported as {__name__!r}. "
        "Import 'trainer.strategies'. If you meant a folder of your own, it is hidden by this repository's root on "
        "sys.path: run your script from its own folder."
    )

from trainer.errors import unknown
from trainer.strategies.base import Strategy
from trainer.strategies.ddp import DDPStrategy
from trainer.strategies.single import SingleDeviceStrategy

__all__ = ["STRATEGIES", "DDPStrategy", "SingleDeviceStrategy", "Strategy", "resolve_strategy"]

STRATEGIES: dict[str, type[Strategy]] = {
    "single_device": SingleDeviceStrategy,
    "ddp": DDPStrategy,
}


def resolve_strategy(strategy: str | Strategy, num_processes: int) -> tuple[Strategy, str]:
    """The strategy for a name or an instance, and why it was chosen.

    Raises:
        ConfigError: the name is not known.
    """
    if isinstance(strategy, Strategy):
        return strategy, "given as an object"
    if strategy == "auto":
        name = "ddp" if num_processes > 1 else "single_device"
        return STRATEGIES[name](), f"auto: {num_processes} process{'es' if num_processes > 1 else ''}"
    if strategy not in STRATEGIES:
        raise unknown("strategy", strategy, [*STRATEGIES, "auto"])
    return STRATEGIES[strategy](), "given by name"
