"""Short runs that write checkpoints, and callbacks that interfere with them or record them."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

from tests.helpers.toy import Toy, loader, quiet
from trainer import Callback, Trainer
from trainer.callbacks import ModelCheckpoint
from trainer.checkpoint.directory import CheckpointDirectory


class At(Callback):
    """Call a function after some steps, before their checkpoints are written."""

    def __init__(self, **what: Any) -> None:
        self.what = {int(name.removeprefix("step")): function for name, function in what.items()}

    def on_train_batch_end(self, trainer: Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step in self.what:
            self.what[trainer.global_step](trainer)


class SavedPaths(Callback):
    """Record each checkpoint's name and the step of the hook, which runs on the main thread with the pointer set."""

    def __init__(self) -> None:
        self.paths: list[tuple[str, int]] = []

    def on_checkpoint_saved(self, trainer: Trainer, module: Any, path: str) -> None:
        assert threading.current_thread() is threading.main_thread()
        directory = CheckpointDirectory(str(path).rpartition("/")[0])
        assert str(directory.pointer("last")) == path
        self.paths.append((path.rpartition("/")[2], trainer.global_step))


def steps(**more: Any) -> ModelCheckpoint:
    return ModelCheckpoint(**{"filename": "{step}", "every_n_train_steps": 1, "save_top_k": 2, **more})


def fit(callbacks: list[Callback], batches: int = 6, module: Toy | None = None, **settings: Any) -> Trainer:
    ckpt_path = settings.pop("ckpt_path", None)
    trainer = quiet(max_epochs=1, enable_checkpointing=True, callbacks=callbacks, **settings)
    trainer.fit(module or Toy(), loader(batches), ckpt_path=ckpt_path)
    return trainer


def there(folder: Path | str) -> list[str]:
    return [path.name for path in CheckpointDirectory(folder).list()]
