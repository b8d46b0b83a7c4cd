"""Values of Lightning's `Trainer(plugins=)`: a precision, SyncBatchNorm, a CheckpointIO, and environments."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from inspect import getattr_static
from pathlib import Path
from types import FunctionType
from typing import Any, ClassVar

import torch

from trainer.checkpoint.lightning_file import save_file


class _Placeholder:
    """Base of objects that stand for a setting, and have no other attributes of Lightning's class."""

    _words: ClassVar[str]
    """The end of the error for another attribute."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}: {self._words}")


class PrecisionOf(_Placeholder):
    """A precision plugin of Lightning's: `name` is the value of `Trainer(precision=)` that means the same."""

    _words = "it only stands for Trainer(precision=...). Use trainer.precision during a run."
    name: str

    def __init__(self, precision: str) -> None:
        self.name = precision


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


class TorchSyncBatchNorm:
    """`Trainer(sync_batchnorm=True)`."""


class ClusterEnvironment(_Placeholder):
    """Base class of environments. Those of this module are found without being given; others have to use torchrun's
    variables (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT)."""

    _words = "environments are found by the run. Use trainer.global_rank, local_rank, node_rank and world_size."

    def __init__(self, *args: Any, **options: Any) -> None: ...


class LightningEnvironment(ClusterEnvironment):
    """The processes that the trainer itself starts."""


class SLURMEnvironment(ClusterEnvironment):
    """The processes that srun has started."""

    def __init__(self, auto_requeue: bool = True, requeue_signal: Any = None) -> None:
        super().__init__()


class TorchElasticEnvironment(ClusterEnvironment):
    """The processes that torchrun has started."""


class CheckpointIO(ABC):
    """Base class of what reads and writes files of checkpoints, and removes them, in place of torch.

    It is called on rank 0, with the path of the file beside a checkpoint's folder. The folder is written in any case.
    """

    @abstractmethod
    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        """Write the entries of a checkpoint."""

    @abstractmethod
    def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: bool | None = None) -> dict[str, Any]:
        """Return the entries of a checkpoint."""

    @abstractmethod
    def remove_checkpoint(self, path: Any) -> None:
        """Remove a checkpoint."""

    def teardown(self) -> None:
        """Act at the end of a run."""


class TorchCheckpointIO(CheckpointIO):
    """Reads and writes by `torch.load` and `torch.save`."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        """Write a file that `torch.load` reads.

        Raises:
            TypeError: `storage_options` are given.
        """
        if storage_options is not None:
            raise TypeError("storage_options: leave it out, or override save_checkpoint.")
        save_file(checkpoint, Path(path))

    def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: bool | None = None) -> dict[str, Any]:
        """Return the entries of a file; by default only data and tensors are read."""
        restricted = weights_only is not False
        entries: dict[str, Any] = torch.load(path, map_location=map_location or "cpu", weights_only=restricted)
        return entries

    def remove_checkpoint(self, path: Any) -> None:
        """Remove a file, if it is there."""
        Path(path).unlink(missing_ok=True)


class AsyncCheckpointIO(CheckpointIO):
    """Hands all calls to another CheckpointIO, at once: `ModelCheckpoint(async_save=True)` writes in the background."""

    def __init__(self, checkpoint_io: CheckpointIO | None = None) -> None:
        self.checkpoint_io = checkpoint_io or TorchCheckpointIO()

    def save_checkpoint(self, *args: Any, **options: Any) -> None:
        """Write the entries of a checkpoint."""
        self.checkpoint_io.save_checkpoint(*args, **options)

    def load_checkpoint(self, *args: Any, **options: Any) -> dict[str, Any]:
        """Return the entries of a checkpoint."""
        return self.checkpoint_io.load_checkpoint(*args, **options)

    def remove_checkpoint(self, *args: Any, **options: Any) -> None:
        """Remove a checkpoint."""
        self.checkpoint_io.remove_checkpoint(*args, **options)


FOUND = (LightningEnvironment, SLURMEnvironment, TorchElasticEnvironment)


def read_plugins(
    plugins: Any, default_precision: Callable[[Any], bool], precision: Any
) -> tuple[Any, bool, CheckpointIO | None, list[str]]:
    """Return the precision that plugins ask for (or `precision`), whether one is SyncBatchNorm, the CheckpointIO, and
    the problems.

    Args:
        plugins: the argument of Trainer.
        default_precision: tells whether a precision is the default of a Trainer.
        precision: the argument of that name.
    """
    problems, sync_batchnorm, checkpoint_io = [], False, None
    for plugin in plugins if isinstance(plugins, (list, tuple)) else [plugins]:
        if isinstance(plugin, PrecisionOf):
            if own := [name for name in dir(plugin) if _is_own(plugin, name)]:
                problems.append(
                    f"plugins=[{type(plugin).__name__}(...)]: {', '.join(own)} would never be called. Give "
                    "Trainer(precision=) an object of trainer.Precision, or override the module's hooks."
                )
            if not default_precision(precision):
                problems.append(f"precision={precision!r} and plugins={type(plugin).__name__}(...): give one of them.")
            precision = plugin.name
        elif isinstance(plugin, TorchSyncBatchNorm):
            sync_batchnorm = True
        elif isinstance(plugin, CheckpointIO):
            if checkpoint_io is not None:
                problems.append(f"plugins=[{type(plugin).__name__}(...)]: there is another CheckpointIO. Give one.")
            checkpoint_io = plugin
        elif type(plugin) not in FOUND:
            problems.append(_problem(plugin))
    return precision, sync_batchnorm, checkpoint_io, problems


def _is_own(plugin: PrecisionOf, name: str) -> bool:
    """Whether a public method is defined by a user's class."""
    method = getattr_static(plugin, name)
    return isinstance(method, FunctionType) and method.__module__ != __name__ and not name.startswith("_")


def _problem(plugin: Any) -> str:
    if isinstance(plugin, ClusterEnvironment):
        return (
            f"plugins=[{type(plugin).__name__}(...)]: an environment is not used. Set RANK, WORLD_SIZE, LOCAL_RANK, "
            "MASTER_ADDR and MASTER_PORT in each process, as torchrun does, and leave the plugin out."
        )
    return (
        f"plugins={plugin!r}: give an object of a precision, a CheckpointIO, a cluster environment or SyncBatchNorm. "
        "For others use precision= and strategy=."
    )
