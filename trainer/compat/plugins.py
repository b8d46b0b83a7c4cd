"""Values of Lightning's `Trainer(plugins=)`: a precision, SyncBatchNorm, and the environments that are found anyway."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class PrecisionOf:
    """A precision plugin of Lightning's: `name` is the value of `Trainer(precision=)` that means the same."""

    name: str

    def __init__(self, name: str) -> None:
        self.name = name


class MixedPrecision(PrecisionOf):
    """`precision="16-mixed"` or `"bf16-mixed"`."""

    def __init__(self, precision: Any, device: str | None = None, scaler: Any = None) -> None:
        super().__init__({"16": "16-mixed", "bf16": "bf16-mixed"}.get(str(precision), str(precision)))
        if scaler is not None:
            raise TypeError("MixedPrecision(scaler=...): leave it out, precision='16-mixed' has its own scaler.")


class DoublePrecision(PrecisionOf):
    """`precision="64-true"`."""

    def __init__(self) -> None:
        super().__init__("64-true")


class HalfPrecision(PrecisionOf):
    """`precision="16-true"` or `"bf16-true"`."""

    def __init__(self, precision: str = "16-true") -> None:
        super().__init__(precision)


class FSDPPrecision(PrecisionOf):
    """The precision of `strategy="fsdp"`."""

    def __init__(self, precision: str, scaler: Any = None) -> None:
        super().__init__(precision)


class DeepSpeedPrecision(PrecisionOf):
    """The precision of `strategy="deepspeed"`."""

    def __init__(self, precision: str) -> None:
        super().__init__(precision)


class TorchSyncBatchNorm:
    """`Trainer(sync_batchnorm=True)`."""


class ClusterEnvironment:
    """Base class of environments. Those of this module are found without being given; others have to use torchrun's
    variables (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT)."""

    def __init__(self, *args: Any, **options: Any) -> None: ...


class LightningEnvironment(ClusterEnvironment):
    """The processes that the trainer itself starts."""


class SLURMEnvironment(ClusterEnvironment):
    """The processes that srun has started."""

    def __init__(self, auto_requeue: bool = True, requeue_signal: Any = None) -> None:
        super().__init__()


class TorchElasticEnvironment(ClusterEnvironment):
    """The processes that torchrun has started."""


FOUND = (LightningEnvironment, SLURMEnvironment, TorchElasticEnvironment)


def read_plugins(plugins: Any, default_precision: Callable[[Any], bool], precision: Any) -> tuple[Any, bool, list[str]]:
    """Return the precision that plugins ask for (or `precision`), whether one is SyncBatchNorm, and the problems.

    Args:
        plugins: the argument of Trainer.
        default_precision: tells whether a precision is that of a Trainer without the argument.
        precision: the argument of that name.
    """
    problems, sync_batchnorm = [], False
    for plugin in plugins if isinstance(plugins, (list, tuple)) else [] if plugins is None else [plugins]:
        if isinstance(plugin, PrecisionOf):
            if not default_precision(precision):
                problems.append(f"precision={precision!r} and plugins={type(plugin).__name__}(...): give one of them.")
            precision = plugin.name
        elif isinstance(plugin, TorchSyncBatchNorm):
            sync_batchnorm = True
        elif type(plugin) not in FOUND:
            problems.append(_problem(plugin))
    return precision, sync_batchnorm, problems


def _problem(plugin: Any) -> str:
    name = plugin if isinstance(plugin, str) else plugin.__name__ if isinstance(plugin, type) else type(plugin).__name__
    if isinstance(plugin, type):
        return f"plugins: {name} is a class; give an object: {name}(...)."
    if isinstance(plugin, ClusterEnvironment):
        return (
            f"plugins=[{name}(...)]: environments of your own are not asked. Set RANK, WORLD_SIZE, LOCAL_RANK, "
            "MASTER_ADDR and MASTER_PORT in each process, as torchrun does, and leave the plugin out."
        )
    return (
        f"plugins={name!r}: a precision, a cluster environment or SyncBatchNorm can be given. For another way to write "
        "checkpoints use ModelCheckpoint(dirpath=, async_save=); for others precision= and strategy=."
    )
