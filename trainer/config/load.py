"""Load a configuration from files and command line, check all of it, and build trainer, module and data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from trainer.arguments import local_path
from trainer.callback import Callback
from trainer.config.check import Checker, ClassSpec, instantiate, sources_of, with_source
from trainer.config.classes import extend_sys_path, find_class
from trainer.config.files import read_file, to_yaml
from trainer.config.optimizers import with_optimizer
from trainer.config.references import with_references
from trainer.config.tree import (
    COMMAND_LINE,
    KEYS,
    Diagnostics,
    Node,
    Problem,
    Source,
    canonical,
    entries,
    from_override,
    merge,
)
from trainer.data.datamodule import DataModule
from trainer.errors import ConfigError, did_you_mean
from trainer.module import TrainModule
from trainer.settings import ARGUMENTS, Settings
from trainer.trainer import Trainer


@dataclass
class Configuration:
    """The trainer, module and data of a command, checked as far as can be without building anything."""

    trainer: dict[str, Any]
    """The arguments of Trainer that were given."""
    module: ClassSpec
    data: ClassSpec | None
    ckpt_path: str | None
    allow_changes: list[str]
    weights: str | None
    resolved: str
    """YAML that gives the same configuration from any folder."""
    notes: list[str]
    sources: dict[str, Source]
    """The source of each of the trainer's arguments."""

    def add_callback(self, cls: type[Callback]) -> None:
        """Add a callback of this class, unless there is one already."""
        callbacks = self.trainer.setdefault("callbacks", None) or []
        if not any(isinstance(item, ClassSpec) and issubclass(item.cls, cls) for item in callbacks):
            self.trainer["callbacks"] = [*callbacks, ClassSpec(cls, {}, COMMAND_LINE, cls.__name__)]

    def build(self) -> tuple[Trainer, TrainModule, DataModule | None]:
        """Return the trainer, the module and the data; with `trainer.seed`, weights are drawn from that seed.

        Raises:
            ConfigError: everything that constructors refused.
        """
        found = Diagnostics()
        arguments = {name: _try(value, found) for name, value in self.trainer.items()}
        found.report()
        try:
            trainer = Trainer(**arguments)
        except ConfigError as error:
            found.problems += with_source(error.problems, self.sources)
            found.report()
            raise
        trainer.record_config(self.resolved)
        # After the trainer, whose seed the weights are drawn from.
        module, data = _try(self.module, found), _try(self.data, found)
        found.report()
        return trainer, module, data


def _try(value: Any, found: Diagnostics) -> Any:
    try:
        return instantiate(value)
    except ConfigError as error:
        found.problems.append(Problem(None, str(error)))
        return None


def chosen_class(files: Sequence[str], overrides: Sequence[tuple[str, Node]], key: str) -> type:
    """Return the class of the module or data in a configuration whose other values need not be right.

    Raises:
        ConfigError: there is no such class.
    """
    findings = Diagnostics()
    merged = _merged(files, overrides, findings)
    name = entries(entries(merged).get(key)).get("class_path")
    if name is None:
        raise ConfigError(f"no {key} is chosen: give a configuration, or --{key} file.py:Class, before --{key}.help.")
    base = {"module": TrainModule, "data": DataModule}[key]
    return find_class(str(name.value), (base,), {}, name.source).cls


def load(
    files: Sequence[str], overrides: Sequence[tuple[str, Node]] = (), findings: Diagnostics | None = None
) -> Configuration:
    """Read the files, lay them over each other in order, lay the command line over them, and check everything.

    Args:
        overrides: dotted names and values, such as `("trainer.max_epochs", Node(3, COMMAND_LINE))`.
        findings: problems found before, reported with those found here.

    Raises:
        ConfigError: lists all problems, each with file and line.
    """
    findings = findings or Diagnostics()
    merged = _merged(files, overrides, findings)
    before = len(findings.problems)
    merged = with_references(merged, findings)
    if len(findings.problems) > before:  # values that are not there would be reported as wrong ones
        findings.report()
    return _checked(merged, findings)


def _merged(files: Sequence[str], overrides: Sequence[tuple[str, Node]], findings: Diagnostics) -> Node:
    """Return the configuration in canonical form."""
    trees = [tree for name in files if (tree := read_file(name, findings)) is not None]
    if len(trees) < len(files):  # what the unread files hold would be reported as missing
        findings.report()
    extend_sys_path([tree.source for tree in trees])
    # The shallow ones first, so that --module.lr 0.1 --module Other means the same as the other way round.
    trees += [from_override(name, value) for name, value in sorted(overrides, key=lambda item: item[0].count("."))]
    merged = Node({}, trees[0].source if trees else COMMAND_LINE)
    for tree in trees:
        merged = merge(merged, canonical(tree, findings), findings)
    return merged


def _checked(tree: Node, findings: Diagnostics) -> Configuration:
    """Return the configuration in a tree of canonical form."""
    assert isinstance(tree.value, dict)
    given, checker = dict(tree.value), Checker(findings)
    for key in [key for key in given if key not in KEYS]:
        hint = f" Write it under trainer: (--trainer.{key})." if key in ARGUMENTS else did_you_mean(str(key), KEYS)
        findings.add(given.pop(key).source, f"unknown key {key!r}.{hint} Top-level keys: {', '.join(KEYS)}.")
    trainer = checker.trainer(given.get("trainer"))
    module = checker.module(given.get("module"), tree.source)
    optimizer, scheduler = given.get("optimizer"), given.get("lr_scheduler")
    if module is not None:
        module = with_optimizer(
            module, checker.optimizer(optimizer, module.cls), checker.scheduler(scheduler, optimizer)
        )
    data, ckpt_path = checker.data(given.get("data")), checker.ckpt_path(given.get("ckpt_path"))
    allow_changes = checker.allow_changes(given.get("allow_changes"))
    weights = checker.weights(given.get("weights"))
    findings.report()
    assert module is not None
    sources = sources_of(given.get("trainer"))
    return Configuration(
        trainer, module, data, ckpt_path, allow_changes, weights, to_yaml(_resolved(tree)), findings.notes, sources
    )


def _resolved(tree: Node) -> dict[str, Any]:
    """Return the checked tree as plain data. A class without arguments is given by its name alone; default_root_dir is
    always there, because its meaning depends on where the command was typed."""
    data = tree.plain()
    resolved = {key: _single_name(data[key]) for key in KEYS if key in data}
    trainer = resolved["trainer"] = resolved.get("trainer") or {}
    for name in ("strategy", "callbacks", "logger"):
        if isinstance(trainer.get(name), list):
            trainer[name] = [_single_name(item) for item in trainer[name]]
        elif name in trainer:
            trainer[name] = _single_name(trainer[name])
    root = local_path(trainer.get("default_root_dir", Settings.default_root_dir))
    trainer["default_root_dir"] = str(root.absolute())
    return resolved


def _single_name(value: Any) -> Any:
    return value["class_path"] if isinstance(value, dict) and list(value) == ["class_path"] else value
