"""Read the arguments of `fit` and the like, which may come in Lightning's further forms."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from trainer.data.datamodule import DataModule
from trainer.errors import ArgumentError, ConfigError, did_you_mean

if TYPE_CHECKING:
    from trainer.loop.run import Run

log = logging.getLogger("trainer")


class Call(NamedTuple):
    """A call of `fit`, `validate`, `test` or `predict`."""

    stage: str
    module: Any
    data: dict[str, Any]
    """The user's loaders, by stage."""
    datamodule: Any
    ckpt_path: Any


LIGHTNING_ARGUMENTS = {
    "model": "module",
    "train_dataloader": "train",
    "test_dataloaders": "test",
    "val_dataloader": "val",
}
"""Lightning's names of arguments, also of its first versions -> the part of the call."""


def read_call(
    stage: str,
    module: Any,
    data: dict[str, Any],
    datamodule: Any,
    ckpt_path: str | Path | None,
    others: dict[str, Any],
    last: Run | None,
    best: str,
) -> Call:
    """Return the call that the arguments mean.

    Args:
        others: further arguments by Lightning's names.
        last: the last run of the trainer.
        best: path of its best checkpoint; empty without one.

    Raises:
        ConfigError: an argument is unknown or given twice, or there is no module.
    """
    data = dict(data)
    for name, value in others.items():
        part = LIGHTNING_ARGUMENTS.get(name)
        if part == "module":
            if module is not None:
                raise ArgumentError(f"{stage}() got the module twice, by position and as model=: give it once.")
            module = value
        elif part in data:
            data[part] = value if data[part] is None else data[part]
        else:
            known = [
                "module",
                "model",
                "datamodule",
                "ckpt_path",
                "dataloaders",
                "train_dataloaders",
                "val_dataloaders",
            ]
            raise ArgumentError(f"{stage}() got an unexpected keyword argument {name!r}.{did_you_mean(name, known)}")
    first = next(iter(data))
    if isinstance(data[first], DataModule) and datamodule is None:
        datamodule, data[first] = data[first], None
    if module is None:
        if stage == "fit" or last is None:
            raise ConfigError(f"{stage}() needs a module: {stage}(module, ...).")
        module = last.module
        if datamodule is None and all(loaders is None for loaders in data.values()):
            datamodule = last.datamodule
        if ckpt_path is None and best and last.stage == "fit":
            log.info("%s() without a module: the best checkpoint of the last fit is used, %s", stage, best)
            ckpt_path = "best"
    return Call(stage, module, data, datamodule, ckpt_path)
