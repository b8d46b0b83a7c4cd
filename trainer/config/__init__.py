"""Turn configuration files and command-line options into objects."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import trainer
from trainer.errors import refuse_other_package

if TYPE_CHECKING:
    from trainer.data.datamodule import DataModule
    from trainer.module import TrainModule
    from trainer.trainer import Trainer

refuse_other_package(trainer)


class Objects(NamedTuple):
    """The objects that a configuration describes."""

    trainer: Trainer
    module: TrainModule
    data: DataModule | None
    ckpt_path: str | None
    """That of the configuration, for `trainer.fit`, with "last" and "best" of the run that `trainer fit` takes."""


def load(*files: str | Path, overrides: Mapping[str, Any] | None = None) -> Objects:
    """Return the trainer, module and data of configuration files, as `trainer fit` makes them; nothing is run.

    Args:
        files: the later ones override the earlier ones.
        overrides: values by dotted names, such as `{"trainer.max_epochs": 3}`, over all files: numbers, texts, lists
            and dicts of these.

    Raises:
        ConfigError: lists all problems of the files, each with file and line, or what a constructor has refused.
    """
    from trainer.config import loading
    from trainer.config.chosen_run import choose_run
    from trainer.config.files import as_node
    from trainer.config.read import read
    from trainer.config.tree import COMMAND_LINE, Diagnostics

    findings = Diagnostics()
    typed = [(name, as_node(value, COMMAND_LINE)) for name, value in (overrides or {}).items()]
    names = [*map(str, files)]
    configuration = loading.load(read(names, typed, findings), findings)
    for line in [*configuration.notes, *choose_run(configuration, names, "fit")]:
        logging.getLogger("trainer").info("%s", line)
    return Objects(*configuration.build(), configuration.ckpt_path)
