"""Read files and command line into one tree, and check in it what needs no torch, whose import takes seconds."""

from __future__ import annotations

import copy
import typing
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Literal, NotRequired, Required, get_args, get_origin, is_typeddict

from trainer.arguments import LISTS, MAPPINGS, hints_of, options_of, whole_number
from trainer.checkpoint.storage import as_storage_path, checkpoint_may_exist
from trainer.config.classes import check_short_name, extend_sys_path, find_file
from trainer.config.files import read_file
from trainer.config.plug_names import (
    arguments_of,
    callbacks,
    optimizers,
    precisions,
    schedulers,
    strategies,
    strategy_classes,
)
from trainer.config.references import with_references
from trainer.config.tree import (
    CLASS_ROOTS,
    COMMAND_LINE,
    KEYS,
    Diagnostics,
    KeyPath,
    Node,
    OfData,
    canonical,
    dotted,
    entries,
    from_override,
    is_numbered,
    merge,
    repr_value,
    sources_of,
    with_source,
)
from trainer.config.types import (
    TypeMismatchError,
    accepts,
    allowed,
    as_written,
    constructor_parameters,
    member_named,
    reads_as_number,
    validate,
    wants_text,
)
from trainer.distributed.accelerators import accelerator_problem
from trainer.errors import ConfigError, did_you_mean, unknown_name_error
from trainer.names.added import added_names
from trainer.names.aliases import SHORT_PRECISIONS
from trainer.names.misses import is_default, words_for
from trainer.settings import ARGUMENTS, NONE_IS_DEFAULT, Settings

SCHEDULER_OPTIONS = {
    "interval": Literal["epoch", "step"],
    "frequency": int,
    "monitor": str | None,
    "strict": bool,
    "name": str | None,
}
"""Settings of a scheduler that are the trainer's, next to the scheduler's own arguments."""
OTHER_KEYS = {"datamodule": "data", "model": "module", "seed_everything": "trainer.seed", "_target_": "class_path"}
"""Keys of LightningCLI and Hydra, and those that stand for them here."""
QUALIFIERS = {Required, NotRequired, getattr(typing, "ReadOnly", Required)}
"""The words of a TypedDict around the type of an entry; Python has had the last one since 3.13."""
INVALID = object()
"""Placeholder of a value that does not fit."""


def read(files: Sequence[str], overrides: Sequence[tuple[str, Node]], findings: Diagnostics) -> Node:
    """Lay the files over each other in order, and the command line over them; return the tree in canonical form.

    Args:
        overrides: dotted names and values, such as `("trainer.max_epochs", Node(3, COMMAND_LINE))`.
        findings: problems found before, reported with those found here.

    Raises:
        ConfigError: lists all problems that can be found without importing any class, each with file and line.
    """
    tree = merged(files, overrides, findings)
    before = len(findings.problems)
    tree = with_references(tree, findings, [name for name, _ in overrides])
    if len(findings.problems) == before:  # values that are not there would be reported as wrong ones
        _check(tree, findings)
    findings.report()
    return tree


def merged(files: Sequence[str], overrides: Sequence[tuple[str, Node]], findings: Diagnostics) -> Node:
    """Return the configuration in canonical form, with its references as they were written.

    Raises:
        ConfigError: lists all problems, if a file cannot be read.
    """
    trees = [tree for name in files if (tree := read_file(name, findings)) is not None]
    unread = len(trees) < len(files)
    extend_sys_path([tree.source for tree in trees])
    # The shallow ones first, so that --module.lr 0.1 --module Other means the same as the other way round.
    trees += [from_override(name, value) for name, value in sorted(overrides, key=lambda item: item[0].count("."))]
    tree = Node({}, trees[0].source if trees else COMMAND_LINE)
    for one in trees:
        tree = merge(tree, canonical(one, findings), findings)
    _check_names(tree, findings)
    if unread:  # what the unread files hold would be reported as missing
        findings.report()
    return tree


def _check(tree: Node, findings: Diagnostics) -> None:
    given, values = entries(tree), Values(findings)
    module, optimizer, scheduler = (given.get(key, Node(None, tree.source)) for key in ("module", *CLASS_ROOTS[2:]))
    if module.value is None and not findings.problems:  # a misspelt option or key may be what should give it
        words = "Add 'module: package.module.Class' (or file.py:Class) to the file, or --module NAME."
        findings.add(module.source, f"there is no module. {words}")
    if scheduler.value is not None and optimizer.value is None:
        words = "lr_scheduler: there is no optimizer in the configuration. Add optimizer: AdamW."
        findings.add(scheduler.source, words)
    for path, node in _class_choices(tree):
        _check_class_name(path, node, findings)
    for key in (key for key in ("ckpt_path", "weights", "name") if key in given and given[key].value == ""):
        findings.add(given[key].source, f"{key}: the text is empty, as of a variable that is not set. Leave {key} out.")
    values.path(given.get("ckpt_path"), "ckpt_path", has_to_be_there=True)
    values.path(given.get("weights"), "weights", has_to_be_there=False)
    if "name" in given:
        values.value(given["name"], str | None, ("name",))
    trainer = given.get("trainer")
    arguments = values.arguments(trainer, Settings, ("trainer",))
    valid = {name: value for name, value in arguments.items() if value is not INVALID}
    problems = Settings(**valid).problems()
    precision = valid.get("precision", "32")
    known = [*precisions(), *SHORT_PRECISIONS]
    if str(precision) not in known and str(precision) not in added_names("trainer.precisions"):
        problems.append(
            str(unknown_name_error("precision", precision, known, words_for("precision", [str(precision)])))
        )
    problems += filter(None, [accelerator_problem(valid.get("accelerator"))])
    findings.problems += with_source(problems, sources_of(trainer))


def _check_names(tree: Node, findings: Diagnostics) -> None:
    """Check the names of a configuration's keys, and of the trainer's arguments."""
    for key in [key for key in entries(tree) if key not in KEYS]:
        close = did_you_mean(str(key), KEYS, OTHER_KEYS)
        hint = f" Write it under trainer: (--trainer.{key})." if key in ARGUMENTS else close
        words = f"unknown key {key!r}.{hint} Top-level keys: {', '.join(KEYS)}."
        findings.add(entries(tree)[key].source, words)
    parameters = constructor_parameters(Settings)
    for name, child in entries(entries(tree).get("trainer")).items():
        if name not in parameters.named and not is_default("Trainer", name, child.value):
            findings.add(child.source, no_argument("trainer", name, parameters.named, ("trainer",)))


def _class_choices(tree: Node) -> Iterator[tuple[KeyPath, Node]]:
    """Yield each place of a configuration where a class is chosen, apart from arguments of other classes."""
    given = entries(tree)
    yield from (((key,), given[key]) for key in CLASS_ROOTS if key in given)
    for name, node in entries(given.get("trainer")).items():
        if isinstance(node.value, list):
            yield from ((("trainer", name, number), item) for number, item in enumerate(node.value))
        else:
            yield ("trainer", name), node


CHOICES: dict[str, tuple[str, Callable[[], Iterable[str]], str | None]] = {
    "strategy": ("strategy", lambda: [*strategies(), "auto"], "strategies"),
    "callbacks": ("callback", lambda: callbacks("Callback"), "callbacks"),
    "logger": ("logger", lambda: callbacks("Logger"), "callbacks"),
    "optimizer": ("optimizer", optimizers, None),
    "lr_scheduler": ("scheduler", schedulers, None),
}
"""The places where a class has a short name: what it is called, the names, and the package whose classes these are."""


def _check_class_name(path: KeyPath, node: Node, findings: Diagnostics) -> None:
    """Check the name of a class as far as that needs no import: a short one of a table, or that there is the file."""
    name = entries(node).get("class_path")
    if name is None or not isinstance(name.value, str):
        return
    if name.unreadable is not None:
        findings.add(name.source, name.unreadable)
        return
    key = str(path[1] if path[0] == "trainer" else path[0])
    kind, names, package = CHOICES.get(key, (key, list, None))
    try:
        if (known := [*names()]) and name.value not in known:
            of_class = {cls: repr(short) for cls, short in strategy_classes().items()}
            others = of_class | words_for("strategy", [name.value]) if key == "strategy" else None
            check_short_name(name.value, kind, [*known, *added_names(f"trainer.{package}")], others)
        location, colon, _ = name.value.rpartition(":")
        if location.endswith(".py") or (not colon and name.value.endswith(".py")):
            find_file(location or name.value, name.source)
    except ConfigError as error:
        findings.add(name.source, f"{dotted(path)}: {error}")
    else:
        if package is not None and (found := arguments_of(package, name.value)) is not None:
            _check_arguments(path, *found, node, findings)


def _check_arguments(path: KeyPath, kind: str, known: list[str], node: Node, findings: Diagnostics) -> None:
    """Check the names of the arguments of a class."""
    for name, child in entries(entries(node).get("init_args")).items():
        if name not in known and not is_default(kind, name, child.value):
            findings.add(child.source, no_argument(f"{dotted(path)} ({kind})", name, known, path))


class Spec:
    """A description of a value that is made later."""


class Values:
    """Checks values against annotations. Problems go to `findings`."""

    has_checkpoint = False
    """True where the hyperparameters of a checkpoint stand for what the module is not given."""

    def __init__(self, findings: Diagnostics) -> None:
        self.findings = findings

    def arguments(self, node: Node | None, cls: type, path: KeyPath) -> dict[str, Any]:
        """Return the values given to a class as a mapping, checked; names that it does not take are problems."""
        who = f"{dotted(path)} ({cls.__name__})"
        parameters = constructor_parameters(cls)
        values = {}
        for name, child in entries(node).items():
            if path == ("trainer",) and child.value is None and name in NONE_IS_DEFAULT:
                continue
            if path == ("lr_scheduler",) and name in SCHEDULER_OPTIONS:
                values[name] = self.value(child, SCHEDULER_OPTIONS[name], (*path, name))
            elif name in parameters.named:
                values[name] = self.value(child, parameters.named[name].annotation, (*path, name))
            elif parameters.open:
                values[name] = self.value(child, Any, (*path, name))
            elif path != ("trainer",) and not is_default(cls.__name__, name, child.value):
                self.findings.add(child.source, no_argument(who, name, parameters.named, path))
        return values

    def value(self, node: Node, annotation: Any, path: KeyPath) -> Any:
        """Return a value as its annotation wants it; `INVALID` when it does not fit."""
        if path == ("trainer", "precision"):
            annotation = str | int  # no file can hold a Precision
        take_text(node, annotation)
        if isinstance(node.value, str) and (member := member_named(node.value, annotation)) is not None:
            node.value = as_written(member)
            return member
        if isinstance(node.value, (dict, list)) and (ways := self.ways(node, annotation, path)):
            found = self._first_fitting(node, ways)
            limits = has_spec(found) or self._checked(node, found, annotation, path) is not INVALID
            return found if limits else INVALID
        if (reference := reference_to_data(node)) is not None:
            return self.of_data(node, annotation, path, reference)
        if node.unreadable is not None and (accepts({}, annotation) or not accepts(node.text, annotation)):
            self.findings.add(node.source, node.unreadable)
            return INVALID
        value = self._checked(node, node.plain(), annotation, path)
        return value if self._keep_paths(node, value, path) else INVALID

    def _keep_paths(self, node: Node, value: Any, path: KeyPath) -> bool:
        """Write paths, also those in pydantic's models, so that they mean the same from any folder; False for a URL."""
        if isinstance(value, Path) and "://" in str(node.value):
            words = f"{dotted(path)}: {node.value} is a URL, which a Path changes. Annotate it as str | Path."
            self.findings.add(node.source, words)
            return False
        if isinstance(value, Path) and value.parts[:1] != ("~",):  # one from ~ means the same from any folder
            node.value = str(value.absolute())
        inside = value if isinstance(value, dict) else getattr(value, "__dict__", {})
        parts = [(child, inside.get(name), name) for name, child in entries(node).items()]
        if isinstance(node.value, list) and isinstance(value, (list, tuple, deque)):
            parts = [*zip(node.value, value, range(len(value)), strict=True)]
        return False not in [self._keep_paths(child, part, (*path, name)) for child, part, name in parts]

    def _checked(self, node: Node, given: Any, annotation: Any, path: KeyPath) -> Any:
        try:
            return validate(given, annotation)
        except TypeMismatchError as mismatch:
            return self.coerce(node, annotation, path, mismatch)

    def _first_fitting(self, node: Node, ways: Sequence[Callable[[Node], Any]]) -> Any:
        """Return a value in the first of several ways in which it has no problems, or the fewest."""
        before, tried = self.findings, []
        for way in ways if len(ways) > 1 else ():
            self.findings = Diagnostics()
            way(copy.deepcopy(node))
            tried.append(len(self.findings.problems))
        self.findings = before
        return ways[tried.index(min(tried)) if tried else 0](node)

    def ways(self, node: Node, annotation: Any, path: KeyPath) -> list[Callable[[Node], Any]]:
        """Return the ways to read a mapping or a list part by part, by the members of a union."""
        is_list = isinstance(node.value, list)
        kinds = (*LISTS, tuple) if is_list else MAPPINGS
        return [
            partial(self._items if is_list else self._entries, annotation=option, path=path)
            for option in options_of(annotation)
            if (get_origin(option) in kinds and get_args(option)) or (is_typeddict(option) and not is_list)
        ]

    def _items(self, node: Node, annotation: Any, path: KeyPath) -> Any:
        assert isinstance(node.value, list)
        of_each, several = get_args(annotation), get_origin(annotation) is not tuple or ... in get_args(annotation)
        if not several and len(of_each) != len(node.value):
            reason = f"{len(of_each)} of them, and there are {len(node.value)}"
            return self.coerce(node, annotation, path, TypeMismatchError((), reason))
        annotations = of_each[:1] * len(node.value) if several else of_each
        pairs = zip(node.value, annotations, strict=True)
        values = [self.value(item, one, (*path, index)) for index, (item, one) in enumerate(pairs)]
        kind: Any = {tuple: tuple, set: set, frozenset: frozenset}.get(get_origin(annotation), list)
        return values if has_spec(values) and kind is not tuple else kind(values)

    def _entries(self, node: Node, annotation: Any, path: KeyPath) -> Any:
        if is_typeddict(annotation):
            hints, given = hints_of(annotation, annotation), entries(node)
            hints = {key: get_args(one)[0] if get_origin(one) in QUALIFIERS else one for key, one in hints.items()}
            of_checkpoint = self.has_checkpoint and path[0] == "module"
            missing = [] if of_checkpoint else sorted(annotation.__required_keys__ - given.keys())
            for name in (*missing, *(key for key in given if key not in hints)):
                problem = "is missing" if name in hints else f"is none of its keys: {', '.join(hints)}"
                self.findings.add(node.source, f"{dotted((*path, name))}: {problem}.")
            return {key: self.value(child, hints.get(key, Any), (*path, key)) for key, child in given.items()}
        of_key, of_value = get_args(annotation)
        keys: dict[Any, Any] = {}
        for key, child in entries(node).items():
            # Neither JSON nor TOML nor the command line has numbers for keys.
            number = whole_number(key) if isinstance(key, str) and not accepts(key, of_key) else None
            keys[key] = self.value(Node(key if number is None else number, child.source), of_key, (*path, key))
        return {keys[key]: self.value(child, of_value, (*path, key)) for key, child in entries(node).items()}

    def of_data(self, node: Node, annotation: Any, path: KeyPath, reference: OfData) -> Any:
        """Refuse a value that only the data module's object knows; it is made after the trainer."""
        words = f"{dotted(path)}: {reference} refers to an attribute of the data's object, which is made after this."
        self.findings.add(node.source, f"{words} Write the value here, or as an argument of data.")
        return INVALID

    def coerce(self, node: Node, annotation: Any, path: KeyPath, mismatch: TypeMismatchError) -> Any:
        """Return what was typed as text; if that does not fit either, report the mismatch."""
        if node.text is not None:
            with suppress(TypeMismatchError):
                value = validate(node.text, annotation)
                node.value, node.text = node.text, None
                return value
        part, inner = node, path  # the part that does not fit
        for step in mismatch.path:
            children: dict[Any, Node] = dict(enumerate(part.value)) if isinstance(part.value, list) else entries(part)
            if step in children:  # others are the names of union members
                part, inner = children[step], (*inner, step)
        inside = f" in {dotted(path)}" if inner != path else ""
        self.findings.add(
            part.source,
            f"{dotted(inner)}: given {repr_value(part)}{unseen_type(part.value)}, "
            f"allowed{inside}: {allowed(annotation)}{mismatch.reason and f' ({mismatch.reason})'}."
            f"{fix_for(node, annotation)}",
        )
        return INVALID

    def path(self, node: Node | None, key: str, has_to_be_there: bool) -> None:
        """Make the path of a checkpoint, or of weights, absolute; "last" and "best" are words.

        Weights need not be there: only a `fit` without a checkpoint reads them.
        """
        value = None if node is None else self.value(node, str | None, (key,))
        if node is None or not isinstance(value, str) or (has_to_be_there and value in ("last", "best")):
            return
        try:
            node.value = str(as_storage_path(value).absolute())
            there = not has_to_be_there or checkpoint_may_exist(value)
        except ConfigError as error:
            self.findings.add(node.source, f"{key}: {error}")
            return
        if not there:
            close = did_you_mean(value, ["last", "best"])
            allowed = "Allowed: last, best, or a checkpoint's folder."
            self.findings.add(node.source, f"{key}: there is no {value!r}.{close} {allowed}")


def reference_to_data(node: Node) -> OfData | None:
    """Return the first reference to an attribute of the data in a value; None where there is none."""
    if isinstance(node.value, (dict, list)):
        items = node.value.values() if isinstance(node.value, dict) else node.value
        return next(filter(None, map(reference_to_data, items)), None)
    return node.value if isinstance(node.value, OfData) else None


def take_text(node: Node, annotation: Any) -> None:
    """Let a value be as it was written where its annotation wants a text."""
    if node.text is not None and wants_text(node.plain(), annotation):
        node.value, node.text, node.unreadable = node.text, None, None


def has_spec(value: Any) -> bool:
    """Whether an object is still to be made for this value (or it is an invalid one)."""
    inside = [*value, *value.values()] if type(value) is dict else value if type(value) in (list, tuple) else ()
    return value is INVALID or isinstance(value, Spec) or any(map(has_spec, inside))


def no_argument(who: str, name: Any, known: Iterable[str], path: KeyPath) -> str:
    """Return the problem of an argument that does not exist, with a suggestion; without a close one, those that do."""
    known = sorted(known)
    equivalents = words_for("Trainer()", [str(name)]) if path == ("trainer",) else None
    hint = did_you_mean(str(name), [*known, "class_path", "init_args"], equivalents)
    if not hint and known:
        hint = f" It takes: {', '.join(known)}." if len(known) <= 12 else " See trainer fit --help."
    return f"{who} has no argument {name!r}.{hint or ' It takes none.'}"


def fix_for(node: Node, annotation: Any) -> str:
    """Return what to type where quotes make the difference, or numbers have no list below them."""
    if is_numbered(node) and any((get_origin(option) or option) in LISTS for option in options_of(annotation)):
        return " Elements have numbers only over a list of a file: give the whole list, or add to it with +=."
    if isinstance(node.value, str) and reads_as_number(node.value):
        if (name := node.value.lower().lstrip("+-")[:3]) in ("inf", "nan"):
            return f" YAML's number is .{name}."
        return " Remove the quotes." if node.text is None else ""
    if node.text is None and type(node.value) in (int, float) and str in options_of(annotation):
        return " Put it in quotes."
    if isinstance(node.value, float) and node.value.is_integer() and int in options_of(annotation):
        return f" Write {int(node.value)}."
    return ""


def unseen_type(value: Any) -> str:
    """Return the type of a value where it cannot be seen from the value: " (text)" and the like."""
    if isinstance(value, str):
        return " (text)"
    return " (a mapping)" if isinstance(value, dict) else ""
