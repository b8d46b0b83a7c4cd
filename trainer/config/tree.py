"""A configuration as a tree in which every value knows where it was written, and how trees are laid over each other."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from trainer.errors import raise_problems

Scalar: TypeAlias = "str | int | float | bool | None"
KeyPath: TypeAlias = "tuple[str | int, ...]"


@dataclass(frozen=True)
class Source:
    """Where something was written."""

    name: str
    """The file as the user named it, or "command line"."""
    line: int | None = None
    folder: Path | None = None
    """The file's folder; None for the command line."""

    def __str__(self) -> str:
        return self.name if self.line is None else f"{self.name}:{self.line}"


COMMAND_LINE = Source("command line")


@dataclass
class Node:
    """A value: a scalar, a mapping of nodes or a list of nodes."""

    value: Scalar | dict[Any, Node] | list[Node]
    source: Source
    text: str | None = None
    """The value as it was typed, on the command line only: there nobody can be asked to quote twice."""

    def plain(self) -> Any:
        """The value without its sources."""
        if isinstance(self.value, dict):
            return {key: child.plain() for key, child in self.value.items()}
        if isinstance(self.value, list):
            return [child.plain() for child in self.value]
        return self.value


@dataclass(frozen=True)
class Problem:
    """Something that the user has to change."""

    source: Source | None
    message: str

    def __str__(self) -> str:
        return self.message if self.source is None else f"{self.source}: {self.message}"


@dataclass
class Diagnostics:
    """What was noticed on the way: problems stop the run, notes are only shown."""

    problems: list[Problem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    files: list[str] = field(default_factory=list)
    """The files in the order in which they were read."""

    def add(self, source: Source, message: str) -> None:
        """Note a problem, once."""
        if Problem(source, message) not in self.problems:
            self.problems.append(Problem(source, message))

    def report(self) -> None:
        """Raise what was found, if anything was.

        Raises:
            ConfigError: lists all problems: those of the command line, then file by file, from top to bottom.
        """

        def position(problem: Problem) -> tuple[int, int]:
            source = problem.source or COMMAND_LINE
            file = self.files.index(source.name) if source.name in self.files else -1
            return file, source.line or 0

        raise_problems([str(problem) for problem in sorted(self.problems, key=position)], "the configuration")


def dotted(place: KeyPath) -> str:
    """A place as it is written on the command line: `trainer.callbacks.0.patience`."""
    return ".".join(str(part) for part in place)


# -- class choices ----------------------------------------------------------------------------------------------------
# In five places a class is chosen. Whatever short form was written there becomes {class_path: ..., init_args: {...}}.


LISTS_OF_CLASSES = (("trainer", "callbacks"), ("trainer", "logger"))


def holds_class(place: KeyPath) -> bool:
    """Whether the value at this place of a configuration is a choice of class."""
    return place in (("module",), ("data",), ("trainer", "strategy"), ("trainer", "logger")) or (
        len(place) == 3 and place[:2] in LISTS_OF_CLASSES and is_index(place[2])
    )


def is_index(key: Any) -> bool:
    """Whether a key is a position in a list: 0, "0", 1, ..."""
    return (type(key) is int and key >= 0) or (isinstance(key, str) and key.isdecimal())


def canonical(tree: Node, findings: Diagnostics) -> Node:
    """A whole configuration with every choice of class in its long form."""
    if not isinstance(tree.value, dict):
        return tree
    children = dict(tree.value)
    for name in ("module", "data"):
        if name in children:
            children[name] = canonical_class(children[name], (name,), findings)
    trainer = children.get("trainer")
    if trainer is not None and isinstance(trainer.value, dict):
        settings = dict(trainer.value)
        for name in ("strategy", "callbacks", "logger"):
            if name in settings:
                settings[name] = _canonical_setting(settings[name], name, findings)
        children["trainer"] = Node(settings, trainer.source, trainer.text)
    return Node(children, tree.source)


def _canonical_setting(node: Node, name: str, findings: Diagnostics) -> Node:
    place: KeyPath = ("trainer", name)
    if name != "strategy" and isinstance(node.value, dict) and node.value and all(map(is_index, node.value)):
        changed = {key: canonical_class(child, (*place, key), findings) for key, child in node.value.items()}
        return Node(changed, node.source)
    if name != "strategy" and isinstance(node.value, list):
        items = [canonical_class(item, (*place, index), findings) for index, item in enumerate(node.value)]
        return Node(items, node.source)
    if name == "callbacks" and node.value is not None:
        return Node([canonical_class(node, (*place, 0), findings)], node.source)
    return canonical_class(node, place, findings)


def canonical_class(node: Node, place: KeyPath, findings: Diagnostics) -> Node:
    """`Name` or `{class_path: Name, lr: 1}` as `{class_path: Name, init_args: {lr: 1}}`; other values as they are."""
    if isinstance(node.value, str):
        return Node({"class_path": node}, node.source)
    if not isinstance(node.value, dict):
        return node
    given = dict(node.value)
    chosen: dict[Any, Node] = {}
    if "class_path" in given:
        chosen["class_path"] = given.pop("class_path")
    elif place == ("trainer", "strategy") and "name" in given:
        chosen["class_path"] = given.pop("name")
    arguments: dict[Any, Node] = {}
    nested = given.pop("init_args", None)
    if nested is not None and isinstance(nested.value, dict):
        arguments.update(nested.value)
    elif nested is not None and nested.value is not None:
        findings.add(
            nested.source, f"{dotted((*place, 'init_args'))}: given {repr_value(nested)}, allowed: arguments by name."
        )
    for key, child in given.items():
        if key in arguments:
            findings.add(
                child.source,
                f"{dotted((*place, key))} is given twice: here, and under init_args at "
                f"{arguments[key].source}. Keep one.",
            )
        arguments[key] = child
    if arguments:
        chosen["init_args"] = Node(arguments, nested.source if nested is not None else node.source)
    return Node(chosen, node.source)


def repr_value(node: Node) -> str:
    """Return a value as a message shows it."""
    text = json.dumps(node.plain(), default=str, ensure_ascii=False)
    return text if len(text) <= 60 else text[:57] + "..."


# -- one over the other -----------------------------------------------------------------------------------------------


def merge(below: Node, above: Node, findings: Diagnostics, place: KeyPath = ()) -> Node:
    """`above` laid over `below`: mappings deeply, everything else replaced.

    Another class at a place of choice starts from its own defaults: what was given to the first class is left out,
    with a note. Numbered keys over a list change its elements. Both trees are in the canonical form.
    """
    if isinstance(above.value, dict) and all(map(is_index, above.value)):
        if isinstance(below.value, list):
            return _merge_elements(below, above, findings, place)
        if above.value and place in LISTS_OF_CLASSES:
            for key, child in above.value.items():
                where = dotted((*place, key))
                findings.add(child.source, f"{where}: there is no such element; no file has a list of {place[1]}.")
            return Node([], below.source)
    if not isinstance(below.value, dict) or not isinstance(above.value, dict):
        _note_left_out(below, above, findings, place)
        return above
    if holds_class(place) and _other_class(below, above):
        if "init_args" in below.value:
            findings.notes.append(
                f"{above.source}: {dotted(place)} is now {above.value['class_path'].value}; the arguments given to "
                f"{below.value['class_path'].value} at {below.source} are left out."
            )
        return above
    merged = dict(below.value)
    for key, child in above.value.items():
        # The command line knows text only: --x.4 means the entry 4 that a file wrote as a number.
        number = int(key) if isinstance(key, str) and key.isdecimal() else key
        known = number if number in merged and key not in merged else key
        inside = place if key == "init_args" else (*place, key)
        nothing = Node({} if isinstance(child.value, dict) else None, child.source)
        merged[known] = merge(merged.get(known, nothing), child, findings, inside)
    return Node(merged, above.source if "class_path" in above.value else below.source)


def _note_left_out(below: Node, above: Node, findings: Diagnostics, place: KeyPath) -> None:
    """One file's list of classes takes the place of another's: easily done unawares, with callbacks."""
    if above.source == COMMAND_LINE or not isinstance(below.value, list) or not isinstance(above.value, list):
        return
    named = (item.value.get("class_path") for item in below.value if isinstance(item.value, dict))
    classes = [str(name.value) for name in named if name is not None]
    if classes and below.plain() != above.plain():
        findings.notes.append(
            f"{above.source}: {dotted(place)} takes the place of the list at {below.source} "
            f"({', '.join(classes)}), which is left out. Put all of them into one file."
        )


def _other_class(below: Node, above: Node) -> bool:
    assert isinstance(below.value, dict)
    assert isinstance(above.value, dict)
    old, new = below.value.get("class_path"), above.value.get("class_path")
    return old is not None and new is not None and _without_folder(old.value) != _without_folder(new.value)


def _without_folder(class_path: Any) -> Any:
    """`/project:package.Class`, as resolved configurations have it, names the same class as `package.Class`."""
    if isinstance(class_path, str) and ":" in class_path and not class_path.partition(":")[0].endswith(".py"):
        return class_path.partition(":")[2]
    return class_path


def _merge_elements(below: Node, above: Node, findings: Diagnostics, place: KeyPath) -> Node:
    assert isinstance(below.value, list)
    assert isinstance(above.value, dict)
    items = list(below.value)
    for key, child in above.value.items():
        index = int(key)
        if index < len(items):
            items[index] = merge(items[index], child, findings, (*place, index))
        else:
            has = f"has {len(items)}, numbered 0 to {len(items) - 1}" if items else "is an empty list"
            findings.add(child.source, f"{dotted((*place, key))}: there is no such element; {dotted(place)} {has}.")
    return Node(items, below.source)


def from_override(name: str, value: Node) -> Node:
    """The tree that has nothing but this value: `trainer.max_epochs` gives `{trainer: {max_epochs: value}}`."""
    for part in reversed(name.split(".")):
        value = Node({part: value}, value.source)
    return value
