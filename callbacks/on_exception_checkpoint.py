"""OnExceptionCheckpoint: write a checkpoint when an error ends the training."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from trainer.callback import Callback
from trainer.checkpoint.storage import as_storage_path, kept_storage_path, require_writable
from trainer.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from trainer.module import TrainModule
    from trainer.trainer import Trainer

log = logging.getLogger("trainer")


class OnExceptionCheckpoint(Callback):
    """Write a checkpoint when an error ends `fit`, in a run of one process.

    A resume from it is not exact if the error came from inside a step: the step has drawn random numbers and updated
    BatchNorms, and its batches come again.

    Args:
        dirpath: folder or URL of the checkpoint.
        filename: its name.

    Raises:
        ConfigError: `filename` is empty.
    """

    runs_last: ClassVar[bool] = True
    """The checkpoint has the states of the other callbacks as their `on_exception` leaves them."""

    def __init__(self, dirpath: str | Path, filename: str = "on_exception") -> None:
        super().__init__()
        if not filename:
            raise ConfigError("OnExceptionCheckpoint(filename=''): give the checkpoint a name.")
        self.dirpath = str(kept_storage_path(dirpath, "dirpath"))
        self.filename = filename

    @property
    def ckpt_path(self) -> str:
        """The path of the checkpoint."""
        return str(as_storage_path(self.dirpath) / self.filename)

    def on_fit_start(self, trainer: Trainer, pl_module: TrainModule) -> None:
        if trainer.world_size == 1 and not trainer.settings.fast_dev_run:
            require_writable(as_storage_path(self.dirpath), f"OnExceptionCheckpoint(dirpath={self.dirpath!r})")

    def on_exception(self, trainer: Trainer, pl_module: TrainModule, exception: BaseException) -> None:
        if trainer.stage != "fit" or trainer.settings.fast_dev_run or not can_save_after_error(trainer.world_size):
            return
        try:
            trainer.save_checkpoint(self.ckpt_path)
        except CheckpointError as error:
            log.error("%s", error)


def can_save_after_error(world_size: int) -> bool:
    """Return True in a run of one process; else log that nothing is written, as that would need the others."""
    if world_size > 1:
        log.warning("no checkpoint is written on an exception with several processes: the others may be anywhere")
    return world_size == 1
