"""Represent a configuration as a tree whose values know their sources, and merge such trees."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import NoneType
from typing import Any, TypeAlias

from trainer.arguments import local_path, whole_number
from trainer.errors import raise_problems, shortened

Scalar: TypeAlias = "str | int | float | bool | None"
KeyPath: TypeAlias = "tuple[str | int, ...]"

KEYS = (
    "module",
    "data",
    "trainer",
    "optimizer",
    "lr_scheduler",
    "ckpt_path",
    "allow_changes",
    "weights",
    "name",
    "vars",
)
"""The keys of a configuration; "name" is the run's name, and "vars" has values for references."""


MAX_DEPTH = 100
"""Levels of nesting that a configuration may have."""


@dataclass(frozen=True)
class Source:
    """The place where a value was written."""

    name: str
    """The file as the user named it, or "command line"."""
    line: int | None = None
    folder: Path | None = None
    """The file's folder; None for the command line."""

    def at(self, line: int) -> Source:
        """Return the source of a line. The command line has no lines."""
        return self if self.folder is None else replace(self, line=line)

    def __str__(self) -> str:
        return self.name if self.line is None else f"{self.name}:{self.line}"


COMMAND_LINE = Source("command line")


class OfData(str):
    """A reference to an attribute of the data module's object: `${data.num_classes}`, which the configuration keeps."""


@dataclass
class Node:
    """A value: a scalar, a mapping of nodes or a list of nodes."""

    value: Scalar | dict[Any, Node] | list[Node]
    source: Source
    text: str | None = None
    """The text of a value of the command line, or of a number of YAML (0042 for 42), for where a text is wanted."""
    unreadable: str | None = None
    """The problem with a value of the command line that is not valid YAML; none where a text is wanted."""
    append: bool = False
    """True for a list that is added to the list below: `--trainer.callbacks+=NAME`."""
    named: Node | None = None
    """The text below this mapping: if a class is wanted here, the text names it, and these are its arguments."""

    def plain(self) -> Any:
        """Return the value without its sources."""
        if isinstance(self.value, dict):
            return {key: child.plain() for key, child in self.value.items()}
        if isinstance(self.value, list):
            return [child.plain() for child in self.value]
        return self.value


@dataclass(frozen=True)
class Problem:
    """Something that the user has to change, and where."""

    source: Source | None
    message: str
    cause: Exception | None = field(default=None, compare=False)
    """The error in the user's code that was the reason: `--traceback` shows it."""

    def __str__(self) -> str:
        return self.message if self.source is None else f"{self.source}: {self.message}"


@dataclass
class Diagnostics:
    """Problems, which stop the run, and notes, which are only shown."""

    problems: list[Problem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    files: list[str] = field(default_factory=list)
    """The files in the order of reading."""

    def add(self, source: Source | None, message: str, cause: Exception | None = None) -> None:
        """Add a problem."""
        self.problems.append(Problem(source, message, cause))

    def report(self) -> None:
        """Raise all problems, each once, as one error, if there are any.

        Raises:
            ConfigError: lists all problems: first the command line's, then file by file, from top to bottom.
        """

        order = dict(zip(self.files, range(len(self.files)), strict=True))

        def position(problem: Problem) -> tuple[int, int]:
            source = problem.source or COMMAND_LINE
            return order.get(source.name, -1), source.line or 0

        found = sorted(dict.fromkeys(self.problems), key=position)
        causes = [problem.cause for problem in found if problem.cause is not None]
        cause = ExceptionGroup("the causes", causes) if len(causes) > 1 else next(iter(causes), None)
        raise_problems([*map(str, found)], "the configuration", cause)


def mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    """Return nested plain data with `change` applied to each value in it."""
    if isinstance(value, dict):
        return {key: mapped(item, change) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [mapped(item, change) for item in value]
    return change(value)


def dotted(path: KeyPath) -> str:
    """Return a path in the form of the command line: `trainer.callbacks.0.patience`."""
    return ".".join(str(part) for part in path)


# -- class choices ----------------------------------------------------------------------------------------------------
# In some places a class is chosen. Whatever short form was written there becomes {class_path: ..., init_args: {...}}.


CLASS_ROOTS = ("module", "data", "optimizer", "lr_scheduler")
LISTS_OF_CLASSES = (("trainer", "callbacks"), ("trainer", "logger"))


def is_index(key: Any) -> bool:
    """Whether a key is a position in a list: 0, "0", 1, ..."""
    return whole_number(str(key)) is not None


def canonical(node: Node, findings: Diagnostics) -> Node:
    """Return a configuration with every choice of class in its long form."""
    given = dict(entries(node))
    for key in (key for key in CLASS_ROOTS if key in given):
        given[key] = canonical_class(given[key], (key,), findings)
    if "trainer" in given:
        given["trainer"] = _canonical_trainer(given["trainer"], findings)
    return Node(given, node.source)


def _canonical_trainer(node: Node, findings: Diagnostics) -> Node:
    if node.value is None:
        return node
    if not isinstance(node.value, dict):
        findings.add(node.source, f"trainer: given {repr_value(node)}, allowed: the trainer's arguments by name.")
    given = dict(entries(node))
    for name in given.keys() & {"strategy", "callbacks", "logger"}:
        made_canonical = canonical_class if name == "strategy" else _canonical_list
        given[name] = made_canonical(given[name], ("trainer", name), findings)
    return Node(given, node.source)


def _canonical_list(node: Node, path: KeyPath, findings: Diagnostics) -> Node:
    """Return callbacks or loggers in the long form: a list, positions with what changes there, or a single one."""
    if isinstance(node.value, list):
        items = [canonical_class(item, (*path, i), findings) for i, item in enumerate(node.value)]
        return Node(items, node.source, append=node.append)
    if is_numbered(node):
        children = {key: canonical_class(child, (*path, key), findings) for key, child in entries(node).items()}
        return Node(children, node.source)
    one = canonical_class(node, path, findings)
    return Node([one], node.source) if path == LISTS_OF_CLASSES[0] and node.value is not None else one


def is_numbered(node: Node) -> bool:
    """Whether a value is a mapping of positions in a list, which changes elements of it."""
    return isinstance(node.value, dict) and bool(node.value) and all(map(is_index, node.value))


def canonical_class(node: Node, path: KeyPath, findings: Diagnostics) -> Node:
    """Return `Name` or `{class_path: Name, lr: 1}` as `{class_path: Name, init_args: {lr: 1}}`; others unchanged."""
    if isinstance(node.value, str):
        return Node({"class_path": node}, node.source)
    if not isinstance(node.value, dict):
        return node
    given = dict(node.value)
    named, nested = given.pop("class_path", None), given.pop("init_args", None)
    if nested is not None and not isinstance(nested.value, (dict, NoneType)):
        where = dotted((*path, "init_args"))
        findings.add(nested.source, f"{where}: given {repr_value(nested)}, allowed: arguments by name.")
    arguments = dict(entries(nested))
    for key in sorted(given.keys() & arguments.keys(), key=str):
        there = f"here, and under init_args at {arguments[key].source}"
        findings.add(given[key].source, f"{dotted((*path, key))} is given twice: {there}. Keep one.")
    arguments.update(given)
    inner = Node(arguments, node.source if nested is None else nested.source) if arguments else None
    chosen = {"class_path": named, "init_args": inner}
    return Node({key: child for key, child in chosen.items() if child is not None}, node.source)


def entries(node: Node | None) -> dict[Any, Node]:
    """Return the entries of a mapping; none for anything else."""
    return node.value if node is not None and isinstance(node.value, dict) else {}


def children_of(node: Node) -> dict[Any, Node]:
    """Return the entries of a mapping, or the elements of a list by their positions; none for a single value."""
    return dict(enumerate(node.value)) if isinstance(node.value, list) else entries(node)


def sources_of(node: Node | None) -> dict[Any, Source]:
    """Return the source of each entry of a mapping."""
    return {name: child.source for name, child in entries(node).items()}


def named_source(message: str, sources: Mapping[str, Source]) -> Source | None:
    """Return where the argument was given that a message is about: the first one that it names."""
    return next((sources[name] for name in re.findall(r"\w+", message) if name in sources), None)


def with_source(problems: Iterable[str], sources: Mapping[str, Source]) -> list[Problem]:
    """Return problems with the trainer's arguments, each with the place where the argument that it names was given."""
    return [Problem(named_source(message, sources), f"trainer: {message}") for message in problems]


def relative(path: Path) -> str:
    """Return a path relative to the current folder where it lies in that, else the absolute one."""
    path = path.absolute()
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


def repr_value(node: Node) -> str:
    """Return a value as a message shows it."""
    return shortened(json.dumps(node.plain(), default=str, ensure_ascii=False), 60)


# -- one over the other -----------------------------------------------------------------------------------------------


def merge(below: Node, above: Node, findings: Diagnostics, path: KeyPath = ()) -> Node:
    """Merge `above` over `below`: mappings deeply, everything else replaced.

    Another class at a place of choice starts from its own defaults: what was given to the first class is left out,
    with a note. Numbered keys over a list change its elements. Both trees are in the canonical form.
    """
    if above.append:
        return _with_appended(below, above)
    if is_numbered(above) and (isinstance(below.value, list) or path in LISTS_OF_CLASSES):
        return _merge_elements(below, above, findings, path)
    if "class_path" in entries(below) and isinstance(above.value, str) and re.search(r"[.:]", above.value):
        above = Node({"class_path": above}, above.source)
    if not isinstance(below.value, dict) or not isinstance(above.value, dict):
        _note_left_out(below, above, findings, path)
        is_name = isinstance(below.value, str) and re.fullmatch(r"[^${}]+[.:]\w+", below.value)
        return replace(above, named=below) if is_name else above
    if below.value and "class_path" in (*below.value, *above.value):  # of an argument, not in canonical form yet
        below, above = canonical_class(below, path, findings), canonical_class(above, path, findings)
    old, new = entries(below), entries(above)
    if not _other_class(below, above):
        return _merge_entries(below, above, findings, path)
    if "init_args" in old:
        without = f"without the arguments given to {old['class_path'].value} at {below.source}"
        findings.notes.append(f"{above.source}: {dotted(path)} is now {new['class_path'].value}, {without}.")
    return above


def _merge_entries(below: Node, above: Node, findings: Diagnostics, path: KeyPath) -> Node:
    merged = dict(entries(below))
    for key, child in entries(above).items():
        # The command line knows text only: --x.4 means the entry 4 that a file wrote as a number.
        known = next((one for one in merged if str(one) == str(key)), key)
        inside = path if key == "init_args" else (*path, key)
        if child.value is None and (*path, key) in (("trainer",), ("module",)) and entries(merged.get(known)):
            words = f"{key} is empty, and replaces the values at {merged[known].source}. Remove it."
            findings.add(child.source, words)  # all settings would be the defaults
        merged[known] = merge(merged.get(known, Node({}, child.source)), child, findings, inside)
    source = above.source if "class_path" in entries(above) else below.source
    return Node(merged, source, None if entries(below) else above.text, named=below.named)


def appended(node: Node) -> Node:
    """Return a list, or a single value, as a node that is added to the list below it."""
    items = node.value if isinstance(node.value, list) else [node]
    return Node(items, node.source, append=True)


def _with_appended(below: Node, above: Node) -> Node:
    """Return the elements of both; a single value below is the first element."""
    assert isinstance(above.value, list)
    if isinstance(below.value, list):
        was_typed = below.source == COMMAND_LINE and not below.append  # as a whole
        return Node([*below.value, *above.value], below.source, append=not was_typed)
    nothing = below.value is None or below.value == {} or below.value is True
    return Node(above.value if nothing else [below, *above.value], above.source, append=True)


def _note_left_out(below: Node, above: Node, findings: Diagnostics, path: KeyPath) -> None:
    """Note that a list of callbacks or loggers replaces another, which is easily done unawares."""
    if path not in LISTS_OF_CLASSES or not isinstance(below.value, list) or below.plain() == above.plain():
        return
    fix = f"To keep it and add to it, write --{dotted(path)}+=NAME, or put all of them into one file."
    classes = ", ".join(str(item["class_path"]) for item in below.plain())
    findings.notes.append(f"{above.source}: {dotted(path)} replaces the list at {below.source} ({classes}). {fix}")


def _other_class(below: Node, above: Node) -> bool:
    old, new = entries(below).get("class_path"), entries(above).get("class_path")
    return old is not None and new is not None and _spelling(old) != _spelling(new)


def _spelling(class_path: Node) -> str:
    """Return the name of a class with the full path of its file: `/project/model.Net`, also for `model.py:Net`."""
    name, folder = str(class_path.value), class_path.source.folder or Path.cwd()
    location, _, cls = name.rpartition(":")
    if location.endswith(".py"):
        return f"{os.path.abspath(folder / local_path(location)).removesuffix('.py')}.{cls}".replace(".", "/")
    if location:  # `/project:package.model.Net`
        return f"{location}/{cls}".replace(".", "/")
    return name.removeprefix("trainer.callbacks.")


def _merge_elements(below: Node, above: Node, findings: Diagnostics, path: KeyPath) -> Node:
    items = list(below.value) if isinstance(below.value, list) else []
    for key, child in entries(above).items():
        if int(key) < len(items):
            items[int(key)] = merge(items[int(key)], child, findings, (*path, int(key)))
        else:
            there = f"the list of the files has {len(items)}, numbered from 0"
            findings.add(child.source, f"{dotted((*path, key))}: there is no such element; {there}.")
    return Node(items, below.source, append=below.append)


def from_override(name: str, value: Node) -> Node:
    """Return the tree with this value alone: `trainer.max_epochs` gives `{trainer: {max_epochs: value}}`."""
    for part in reversed(name.split(".")):
        value = Node({part: value}, value.source)
    return value
