"""Load a configuration from files and command line, check all of it, and build trainer, module and data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.callback import Callback
from trainer.config.check import (
    INVALID,
    Checker,
    ClassSpec,
    ClassSpecError,
    entries,
    has_spec,
    instantiate,
    sources_of,
    with_source,
)
from trainer.config.classes import extend_sys_path
from trainer.config.files import read_file, to_yaml
from trainer.config.tree import (
    COMMAND_LINE,
    Diagnostics,
    KeyPath,
    Node,
    Source,
    canonical,
    from_override,
    merge,
    repr_value,
)
from trainer.data.datamodule import DataModule
from trainer.errors import ConfigError, did_you_mean
from trainer.loop.resolved_config import settings_problems
from trainer.module import TrainModule
from trainer.settings import ARGUMENTS, Settings
from trainer.strategy import Strategy, available_strategies
from trainer.trainer import Trainer

KEYS = ("module", "data", "trainer", "ckpt_path")


@dataclass
class Configuration:
    """The trainer, module and data of a command, checked as far as can be without building anything."""

    trainer: dict[str, Any]
    """The arguments of Trainer that were given."""
    module: ClassSpec
    data: ClassSpec | None
    ckpt_path: str | None
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
    except ClassSpecError as error:
        found.problems.append(error.problem)
        return None


class RunChecker(Checker):
    """Checks a full configuration: its keys, and the values of the trainer's arguments."""

    def configuration(self, tree: Node) -> Configuration | None:
        """Return the configuration in a tree of canonical form; None when something is wrong."""
        assert isinstance(tree.value, dict)
        given = dict(tree.value)
        for key in [key for key in given if key not in KEYS]:
            hint = f" Write it under trainer: (--trainer.{key})." if key in ARGUMENTS else did_you_mean(str(key), KEYS)
            self.findings.add(given.pop(key).source, f"unknown key {key!r}.{hint} Top-level keys: {', '.join(KEYS)}.")
        trainer = self.trainer(given.get("trainer"))
        module = self.required_module(given.get("module"), tree.source)
        data = None
        if "data" in given and given["data"].value is not None:
            data = self.class_spec(given["data"], (DataModule,), ("data",))
        ckpt_path = self.ckpt_path(given.get("ckpt_path"))
        if module is None or self.findings.problems:
            return None
        return Configuration(
            trainer=trainer,
            module=module,
            data=data,
            ckpt_path=ckpt_path,
            resolved=to_yaml(_resolved(tree)),
            notes=self.findings.notes,
            sources=sources_of(given.get("trainer")),
        )

    def required_module(self, node: Node | None, source: Source) -> ClassSpec | None:
        if node is not None and node.value is not None:
            return self.class_spec(node, (TrainModule,), ("module",))
        self.findings.add(
            source if node is None else node.source,
            "there is no module. Add 'module: package.module.Class' (or file.py:Class) to the file, or --module NAME.",
        )
        return None

    def ckpt_path(self, node: Node | None) -> str | None:
        if node is None:
            return None
        value = self.value(node, str | None, ("ckpt_path",))
        if not isinstance(value, str) or value in ("last", "best"):
            return value if isinstance(value, str) else None
        path = Path(value).expanduser().absolute()
        if not path.exists():
            close = did_you_mean(value, ["last", "best"])
            self.findings.add(
                node.source, f"ckpt_path: there is no {value!r}.{close} Allowed: last, best, or a checkpoint's folder."
            )
        node.value = str(path)
        return node.value

    # -- the trainer's arguments --------------------------------------------------------------------------------------

    def trainer(self, node: Node | None) -> dict[str, Any]:
        """Return the arguments of Trainer that were given: each fits its type, then its value is checked."""
        if node is None or node.value is None:
            return {}
        if not isinstance(node.value, dict):
            self.findings.add(
                node.source, f"trainer: given {repr_value(node)}, allowed: the trainer's arguments by name."
            )
            return {}
        values = self.arguments(node, Trainer, ("trainer",))
        valid = {name: value for name, value in values.items() if value is not INVALID}
        plain = {name: value for name, value in valid.items() if not has_spec(value)}
        self.findings.problems += with_source(settings_problems(Settings(**plain)), sources_of(node))
        return valid

    def value(self, node: Node, annotation: Any, place: KeyPath) -> Any:
        if place == ("trainer", "strategy"):
            return self.strategy(node)
        # No file can hold a Precision; `Settings` knows the names.
        return super().value(node, str | int if place == ("trainer", "precision") else annotation, place)

    def strategy(self, node: Node) -> Any:
        """Return a name of the table as it is; with arguments, or for a class of the user's, a spec."""
        name, arguments = entries(node).get("class_path"), entries(node).get("init_args")
        if name is not None and name.value == "auto":
            if arguments is not None:
                self.findings.add(
                    node.source, "trainer.strategy: 'auto' takes no arguments. Name the strategy that they are for."
                )
            return "auto"
        spec = self.class_spec(node, (Strategy,), ("trainer", "strategy"))
        if spec is None:
            return INVALID
        return name.value if name and arguments is None and name.value in [*available_strategies()] else spec


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
    trees = [tree for name in files if (tree := read_file(name, findings)) is not None]
    if len(trees) < len(files):  # what the unread files hold would be reported as missing
        findings.report()
    extend_sys_path([tree.source for tree in trees])
    # The shallow ones first, so that --module.lr 0.1 --module Other means the same as the other way round.
    trees += [from_override(name, value) for name, value in sorted(overrides, key=lambda item: item[0].count("."))]
    merged = Node({}, trees[0].source if trees else COMMAND_LINE)
    for tree in trees:
        merged = merge(merged, canonical(tree, findings), findings)
    configuration = RunChecker(findings).configuration(merged)
    findings.report()
    assert configuration is not None
    return configuration


def _resolved(tree: Node) -> dict[str, Any]:
    """Return the checked tree as plain data. A class without arguments is given by its name alone; default_root_dir is
    always there, because its meaning depends on where the command was typed."""
    data = tree.plain()
    resolved = {key: _name_alone(data[key]) for key in KEYS if key in data}
    trainer = resolved["trainer"] = resolved.get("trainer") or {}
    for name in ("strategy", "callbacks", "logger"):
        if isinstance(trainer.get(name), list):
            trainer[name] = [_name_alone(item) for item in trainer[name]]
        elif name in trainer:
            trainer[name] = _name_alone(trainer[name])
    root = Path(trainer.get("default_root_dir", Settings.default_root_dir))
    trainer["default_root_dir"] = str(root.expanduser().absolute())
    return resolved


def _name_alone(value: Any) -> Any:
    return value["class_path"] if isinstance(value, dict) and list(value) == ["class_path"] else value
