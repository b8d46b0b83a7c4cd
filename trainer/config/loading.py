"""Check a configuration that was read against its classes, and build trainer, module and data."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import yaml
from torch.optim.lr_scheduler import LRScheduler

from trainer.arguments import local_path
from trainer.callback import Callback
from trainer.checkpoint.directory import CHECKPOINTS, POINTERS, CheckpointDirectory
from trainer.checkpoint.storage import StoragePath, as_storage_path
from trainer.config.check import Checker
from trainer.config.classes import find_class
from trainer.config.files import to_yaml
from trainer.config.optimizers import with_optimizer
from trainer.config.references import escaped
from trainer.config.specs import INVALID, ClassSpec, instantiate
from trainer.config.tree import COMMAND_LINE, KEYS, Diagnostics, Node, Source, entries, sources_of, with_source
from trainer.data.datamodule import DataModule
from trainer.errors import CheckpointError, ConfigError
from trainer.module import TrainModule
from trainer.runs.run_directory import saved_run_dir
from trainer.settings import Settings
from trainer.trainer import Trainer


@dataclass
class Recipe:
    """The trainer, module and data of a command, checked as far as can be without building anything."""

    trainer: dict[str, Any]
    """The arguments of Trainer that were given."""
    module: ClassSpec
    data: ClassSpec | None
    optimizer: ClassSpec | None
    lr_scheduler: ClassSpec | None
    ckpt_path: str | None
    allow_changes: list[str]
    weights: str | None
    name: str | None
    """That of the run."""
    resolved: str
    """YAML that gives the same configuration from any folder."""
    recorded: str
    """That of the run directory: without "last" and "best", which would be others when the file is read again."""
    notes: list[str]
    sources: dict[str, Source]
    """The source of each of the trainer's arguments."""
    run_dir: Path | None = None
    """The directory of the run whose own configuration this is."""
    trainer_class: Callable[..., Trainer] = Trainer

    def add_callback(self, cls: type[Callback]) -> None:
        """Add a callback of this class, unless there is one already."""
        callbacks = self.trainer.setdefault("callbacks", None) or []
        if not any(isinstance(item, ClassSpec) and issubclass(item.cls, cls) for item in callbacks):
            self.trainer["callbacks"] = [*callbacks, ClassSpec(cls, {}, COMMAND_LINE, cls.__name__)]

    def work_in(self, run: Path, command: str) -> None:
        """Work in the directory of a run: "last" and "best" are its own; `fit` continues its last one in place."""
        self.run_dir = run
        if (command, self.ckpt_path) != ("fit", "last"):
            self.take_checkpoint(run)

    def take_checkpoint(self, run: Path) -> bool:
        """Take the checkpoint of a run that "last" or "best" means; False if there is none."""
        found = checkpoint_of(run, self.ckpt_path) if self.ckpt_path in POINTERS else None
        self.ckpt_path = self.ckpt_path if found is None else str(found)
        return found is not None

    def build(self) -> tuple[Trainer, TrainModule, DataModule | None]:
        """Return the trainer, the module and the data; with `trainer.seed`, weights are drawn from that seed.

        Raises:
            ConfigError: everything that constructors refused.
        """
        found = Diagnostics()
        arguments = {name: _try(partial(instantiate, value), found) for name, value in self.trainer.items()}
        found.report()
        try:
            trainer = self.trainer_class(**arguments)
        except ConfigError as error:
            found.problems += with_source(error.problems, self.sources)
            found.report()
            raise
        trainer.record_config(self.recorded, self.run_dir)
        # After the trainer, whose seed the weights are drawn from.
        made = cache(partial(instantiate, self.data))  # first, where the module refers to the object
        module, data = _try(partial(instantiate, self.module, data=made), found), _try(made, found)
        found.report()
        return trainer, module, data


def checkpoint_of(run: Path, which: str) -> StoragePath | None:
    """Return the last or best checkpoint of a run, also in a `dirpath` of its configuration; None if there is none."""
    with suppress(OSError, CheckpointError):
        return CheckpointDirectory(run / CHECKPOINTS).resolve(which)
    callbacks = record_of(run)["trainer"].get("callbacks") or ()
    chosen = [(one.get("init_args") or {}).get("dirpath") for one in callbacks if isinstance(one, dict)]
    for folder in filter(None, chosen):
        with suppress(OSError, CheckpointError):
            found = CheckpointDirectory(as_storage_path(folder)).resolve(which)
            if Path(saved_run_dir(found)).absolute() == run.absolute():
                return found
    return None


def record_of(run: Path) -> dict[str, Any]:
    """Return the configuration of a run; where there is none, one without a module."""
    with suppress(OSError, ValueError, yaml.YAMLError):
        record = yaml.safe_load((run / "config.yaml").read_text("utf-8"))
        if isinstance(record, dict) and isinstance(record.get("trainer"), dict):
            return record
    return {"trainer": {}}


def _try(make: Callable[[], Any], found: Diagnostics) -> Any:
    try:
        return make()
    except ConfigError as error:
        found.add(None, str(error), error)
        return None


def chosen_class(tree: Node, key: str) -> type:
    """Return the class of the module or data in a configuration whose other values need not be right.

    Raises:
        ConfigError: there is no such class.
    """
    name = entries(entries(tree).get(key)).get("class_path")
    if name is None:
        raise ConfigError(f"no {key} is chosen: give a configuration, or --{key} file.py:Class, before --{key}.help.")
    base = {"module": TrainModule, "data": DataModule}[key]
    cls: type = find_class(str(name.value), (base,), {}, name.source).cls
    return cls


def load(tree: Node, findings: Diagnostics, command: str = "fit") -> Recipe:
    """Import the classes of a configuration that `read` has returned, and check everything against them.

    The module of an evaluation may lack arguments that the hyperparameters of its checkpoint give.

    Raises:
        ConfigError: lists all problems, each with file and line.
    """
    given = entries(tree)
    checker = Checker(findings, given)
    checker.has_checkpoint = command != "fit" and "ckpt_path" in checker.given
    trainer, module = checker.trainer(), checker.chosen("module", TrainModule)
    optimizer = scheduler = None
    if module not in (None, INVALID):
        optimizer = checker.optimizer(module.cls)
        scheduler = checker.chosen("lr_scheduler", LRScheduler)
        module = with_optimizer(module, optimizer, scheduler)
    data = checker.data_spec = checker.chosen("data", DataModule)
    allow_changes = checker.allow_changes()
    checker.path("ckpt_path", has_to_be_there=True)
    checker.path("weights", has_to_be_there=False)
    name = checker.text("name")
    findings.report()
    assert module is not None
    sources, plain = sources_of(given.get("trainer")), tree.plain()
    resolved = escaped(_resolved(plain))
    return Recipe(
        trainer,
        module,
        data,
        optimizer,
        scheduler,
        plain.get("ckpt_path"),
        allow_changes,
        plain.get("weights"),
        name,
        to_yaml(resolved),
        to_yaml({key: value for key, value in resolved.items() if key != "ckpt_path" or value not in POINTERS}),
        findings.notes,
        sources,
    )


def _resolved(data: dict[str, Any]) -> dict[str, Any]:
    """Return checked data with classes without arguments as names, and always with default_root_dir, whose meaning
    depends on where the command was typed."""
    resolved = {key: _single_name(data[key]) for key in KEYS if key in data and key != "vars"}
    trainer = resolved["trainer"] = resolved.get("trainer") or {}
    for name in trainer.keys() & {"strategy", "callbacks", "logger"}:
        trainer[name] = _single_name(trainer[name])
    root = local_path(trainer.get("default_root_dir", Settings.default_root_dir))
    trainer["default_root_dir"] = str(root.absolute())
    return resolved


def _single_name(value: Any) -> Any:
    if isinstance(value, list):
        return [_single_name(item) for item in value]
    return value["class_path"] if isinstance(value, dict) and list(value) == ["class_path"] else value
