"""Check every value of a configuration against the signature that takes it, and collect all problems."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, get_args, get_origin, is_typeddict

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from trainer.arguments import hints_of, whole_number
from trainer.callback import Callback, available_callbacks
from trainer.checkpoint.directory import POINTERS
from trainer.checkpoint.storage import as_storage_path, checkpoint_may_exist
from trainer.config.classes import find_class
from trainer.config.plug_names import optimizers, schedulers
from trainer.config.read import SCHEDULER_OPTIONS, no_argument
from trainer.config.specs import INVALID, ClassSpec, ValueOfData, has_spec, instantiate, reference_to_data
from trainer.config.tree import (
    Diagnostics,
    KeyPath,
    Node,
    Source,
    canonical_class,
    children_of,
    dotted,
    entries,
    repr_value,
    sources_of,
    with_source,
)
from trainer.config.types import (
    Forms,
    TypeMismatchError,
    accepts,
    allowed,
    as_written,
    constructor_parameters,
    forms_of,
    is_structured,
    makes_callables,
    member_named,
    validate,
    wants_text,
)
from trainer.errors import ConfigError
from trainer.logger import Logger
from trainer.module import TrainModule
from trainer.names.misses import is_default
from trainer.runs.changes_since_checkpoint import allowed_problems
from trainer.runs.resolved_config import settings_problems
from trainer.settings import NONE_IS_DEFAULT, Settings
from trainer.strategy import Strategy, available_strategies
from trainer.trainer import Trainer


class Checker:
    """Checks a configuration: its values against annotations, arguments against signatures. Problems go to `findings`.

    Nodes get the names and paths that mean the same from any folder.
    """

    has_checkpoint = False
    """True where the hyperparameters of a checkpoint stand for what the module is not given."""
    data_spec: ClassSpec | None = None
    """The data module, for values that refer to its attributes."""

    def __init__(self, findings: Diagnostics, given: Mapping[str, Node] = {}) -> None:
        self.findings = findings
        self.given = {key: node for key, node in given.items() if node.value is not None}
        """The keys of the configuration that are not null."""

    # -- the keys of a configuration ----------------------------------------------------------------------------------

    def chosen(self, key: str, base: type, provided: Sequence[str] = ()) -> ClassSpec | None:
        """Return the class at a key of the configuration, if there is one; `provided` as in `class_spec`."""
        return self.class_spec(self.given[key], (base,), (key,), provided) if key in self.given else None

    def optimizer(self, module: type) -> ClassSpec | None:
        """Return the optimizer of a module that has no `configure_optimizers`."""
        if module.configure_optimizers is TrainModule.configure_optimizers:  # type: ignore[attr-defined]
            return self.chosen("optimizer", Optimizer, provided=("params",))
        if "optimizer" in self.given:
            words = f"optimizer: module ({module.__name__}) defines configure_optimizers. Keep one of them."
            self.findings.add(self.given["optimizer"].source, words)
        return None

    def allow_changes(self) -> list[str]:
        """Return the names of what may differ from the run that wrote the checkpoint."""
        if "allow_changes" not in self.given:
            return []
        node = self.given["allow_changes"]
        names = self.value(node, list[str], ("allow_changes",))
        if not isinstance(names, list):  # a problem, or a reference to a value of the data module
            return []
        for problem in allowed_problems(names):
            self.findings.add(node.source, problem)
        return names

    def path(self, key: str, has_to_be_there: bool) -> None:
        """Make the path of a checkpoint, or of weights, absolute; "last" and "best" are words.

        Weights need not be there: only a `fit` without a checkpoint reads them.
        """
        value = self.text(key)
        if value is None or (has_to_be_there and value in POINTERS):
            return
        node = self.given[key]
        try:
            node.value = str(as_storage_path(value).absolute())
            if has_to_be_there and not checkpoint_may_exist(value):
                raise ConfigError(f"there is no {value!r}. Give last, best, or a checkpoint's folder.")
        except ConfigError as error:
            self.findings.add(node.source, f"{key}: {error}")

    def text(self, key: str) -> str | None:
        """Return the text at a key of the configuration, if there is one."""
        if key not in self.given:
            return None
        node = self.given[key]
        if node.value == "":
            self.findings.add(node.source, f"{key}: the text is empty, as of a variable that is not set.")
        value = self.value(node, str, (key,))
        return value if isinstance(value, str) else None

    def trainer(self) -> dict[str, Any]:
        """Return the arguments of Trainer that were given: each fits its type, then its value is checked.

        Objects are not made yet: `Trainer` checks them, and with them all that the command adds to these arguments.
        """
        node = self.given.get("trainer")
        values = self.arguments(node, Trainer, ("trainer",))
        valid = {name: value for name, value in values.items() if value is not INVALID}
        plain = {name: value for name, value in valid.items() if not has_spec(value)}
        self.findings.problems += with_source(settings_problems(Settings(**plain)), sources_of(node))
        return valid

    def strategy(self, node: Node) -> Any:
        """Return a short name unchanged, and a spec for a class with arguments or a user's class."""
        chosen = entries(node)
        name = chosen["class_path"].value if chosen.keys() == {"class_path"} else None
        if isinstance(name, str) and not re.search(r"[.:]", name):
            return name
        return self.class_spec(node, (Strategy,), ("trainer", "strategy"))

    # -- classes ------------------------------------------------------------------------------------------------------

    def class_spec(self, node: Node, bases: tuple[type, ...], path: KeyPath, provided: Sequence[str] = ()) -> Any:
        """Return the spec of a choice of class in canonical form; `INVALID` when something is wrong with it.

        Args:
            provided: arguments that are given when the object is made, and not in the configuration.
        """
        where, chosen = dotted(path), entries(node)
        nested, name = chosen.get("init_args"), chosen.get("class_path")
        if name is None or not isinstance(name.value, str):
            words = "allowed: 'class_path: package.module.Class' (or file.py:Class, or a short name), and init_args."
            self.findings.add(node.source, f"{where}: given {repr_value(name or node)}, {words}")
            return INVALID
        functions = path[0] != "trainer" and path not in (("module",), ("data",))
        made_by = self.named_class(name, bases, table_of(bases, name.value), path, functions)
        if made_by is INVALID:
            return INVALID
        if LRScheduler in bases:  # one of the configuration, or of several in a SequentialLR
            provided = ("optimizer",)
        return replace(self.spec_of(made_by, nested, path, node.source, name.source, provided), bases=bases)

    def named_class(
        self, node: Node, bases: tuple[type, ...], table: Mapping[str, type], path: KeyPath, functions: bool = False
    ) -> Any:
        """Return the class, or function, with a name (see `find_class`); `INVALID` if there is no such class."""
        try:
            found = find_class(str(node.value), bases, table, node.source, functions)
        except ConfigError as error:
            self.findings.add(node.source, f"{dotted(path)}: {error}", error)
            return INVALID
        node.value = found.name
        return found.cls

    def spec_of(
        self, cls: Any, node: Node | None, path: KeyPath, source: Source, named_at: Source, provided: Sequence[str] = ()
    ) -> ClassSpec:
        """Return the spec of a class with the arguments in a mapping; missing ones without a default are a problem."""
        arguments, given = self.arguments(node, cls, path), entries(node)
        missing = missing_arguments(cls, {*given, *provided})
        if missing and not (self.has_checkpoint and path == ("module",)):
            self.findings.add(named_at, needs_arguments(cls, path, missing))
        takes = [name for name in provided if name in constructor_parameters(cls).named]
        return ClassSpec(cls, arguments, source, dotted(path), given, takes)

    def callable_spec(self, node: Node, signature: Any, path: KeyPath) -> Any:
        """Return a function, an object that can be called, or what makes objects of the class that a call returns."""
        name = entries(node).get("class_path")
        if name is None:
            return self.class_spec(node, (object,), path)
        made_by = self.named_class(name, (object,), {}, path, functions=True)
        if made_by is INVALID:
            return INVALID
        takes, returns = get_args(signature) or (..., Any)
        is_class = isinstance(made_by, type)
        if not is_class or (returns is not Any and isinstance(returns, type) and issubclass(made_by, returns)):
            names = [*constructor_parameters(made_by).named]
            called_with = names[: len(takes)] if is_class and takes is not ... else names
            nested = entries(node).get("init_args")
            spec = self.spec_of(made_by, nested, path, node.source, name.source, called_with)
            return replace(spec, is_factory=True, provided=())
        if not makes_callables(made_by):
            words = f"objects of {made_by.__qualname__} cannot be called. Name a function, or a class with __call__."
            self.findings.add(name.source, f"{dotted(path)}: {words}")
            return INVALID
        return self.class_spec(node, (object,), path)

    # -- values -------------------------------------------------------------------------------------------------------

    def arguments(self, node: Node | None, cls: type, path: KeyPath) -> dict[str, Any]:
        """Return the values given to a class as a mapping, checked; names that it does not take are problems."""
        parameters = constructor_parameters(cls)
        annotations = {name: one.annotation for name, one in parameters.named.items()} | _FILE_ANNOTATIONS.get(path, {})
        values = {}
        for name, child in entries(node).items():
            if path == ("trainer",) and child.value is None and name in NONE_IS_DEFAULT:
                continue
            if name in annotations or parameters.open:
                values[name] = self.value(child, annotations.get(name, Any), (*path, name))
            elif not is_default(cls.__name__, name, child.value):
                problem = no_argument(f"{dotted(path)} ({cls.__name__})", name, parameters.named)
                self.findings.add(child.source, problem)
        return values

    def value(self, node: Node, annotation: Any, path: KeyPath) -> Any:
        """Return a value as its annotation wants it, with specs for objects; `INVALID` when it does not fit."""
        if path == ("trainer", "strategy"):
            return self.strategy(node)
        if annotation is Any and _names_a_class(node):
            return self.class_spec(node, (object,), path)
        if node.text is not None and wants_text(node.plain(), annotation):  # as it was written
            node.value, node.text, node.unreadable = node.text, None, None
        if isinstance(node.value, str) and (member := member_named(node.value, annotation)) is not None:
            node.value = as_written(member)
            return member
        if isinstance(node.value, (dict, list)) and (ways := self.ways(node, forms_of(annotation), annotation, path)):
            found = self._first_fitting(node, ways)
            fits = has_spec(found) or self._checked(node, found, annotation, path) is not INVALID
            return found if fits else INVALID
        if (reference := reference_to_data(node)) is not None:
            if path[0] not in ("trainer", "data"):
                return ValueOfData(node, annotation, dotted(path), lambda: instantiate(self.data_spec))
            words = f"{reference} is an attribute of the data's object, which is made later. Write the value here."
            self.findings.add(node.source, f"{dotted(path)}: {words}")
            return INVALID
        if node.unreadable is not None and (accepts({}, annotation) or not accepts(node.text, annotation)):
            self.findings.add(node.source, node.unreadable)
            return INVALID
        value = self._checked(node, node.plain(), annotation, path)
        return value if self._keep_paths(node, value, path) else INVALID

    def _keep_paths(self, node: Node, value: Any, path: KeyPath) -> bool:
        """Write paths, also those in pydantic's models, so that they mean the same from any folder; False for a URL."""
        if isinstance(value, Path):
            if "://" in str(node.value):
                words = f"{node.value} is a URL, which a Path changes. Annotate it as str | Path."
                self.findings.add(node.source, f"{dotted(path)}: {words}")
                return False
            if value.parts[:1] != ("~",):  # a path from ~ means the same from any folder
                node.value = str(value.absolute())
        parts = children_of(node).items()
        return all(self._keep_paths(child, _part_of(value, name), (*path, name)) for name, child in parts)

    def _checked(self, node: Node, given: Any, annotation: Any, path: KeyPath) -> Any:
        try:
            return validate(given, annotation)
        except TypeMismatchError as mismatch:
            return self.coerce(node, annotation, path, mismatch)

    def _first_fitting(self, node: Node, ways: Sequence[Callable[[Node], Any]]) -> Any:
        """Read a value in the first of several ways that finds no problem, or else the fewest."""
        before = self.findings

        def problems(way: Callable[[Node], Any]) -> int:
            self.findings = Diagnostics()
            way(copy.deepcopy(node))
            return len(self.findings.problems)

        best = min(ways, key=problems) if len(ways) > 1 else ways[0]
        self.findings = before
        return best(node)

    def ways(self, node: Node, forms: Forms, annotation: Any, path: KeyPath) -> list[Callable[[Node], Any]]:
        """Return the ways to read a mapping or a list, also as an object, by the members of a union."""
        if isinstance(node.value, list):
            return [partial(self._items, annotation=one, path=path) for one in forms.lists]
        parts = [partial(self._entries, annotation=one, path=path) for one in forms.mappings]
        if not (forms.objects or forms.calls):
            return [*parts]
        if node.named is not None and not wants_text(node.named.value, annotation):
            node.value = {"class_path": node.named, **entries(node)}
        structured = [
            partial(self.spec_of, cls, path=path, source=node.source, named_at=node.source)
            for cls in forms.objects
            if is_structured(cls)
        ]
        if "class_path" not in entries(node) and (parts or structured or forms.takes_mapping):
            return [*structured, *parts]
        node.value = canonical_class(node, path, self.findings).value
        return [partial(self._object, forms=forms, path=path)]

    def _object(self, node: Node, forms: Forms, path: KeyPath) -> Any:
        """Return the function or object that a choice of class in canonical form means."""
        if forms.calls:
            return self.callable_spec(node, forms.calls[0], path)
        return self.class_spec(node, tuple(forms.objects), path)

    def _items(self, node: Node, annotation: Any, path: KeyPath) -> Any:
        assert isinstance(node.value, list)
        of_each, several = get_args(annotation), get_origin(annotation) is not tuple or ... in get_args(annotation)
        if not several and len(of_each) != len(node.value):
            reason = f" ({len(of_each)} of them, and there are {len(node.value)})"
            return self.coerce(node, annotation, path, TypeMismatchError((), reason))
        annotations = of_each[:1] * len(node.value) if several else of_each
        pairs = zip(node.value, annotations, strict=True)
        values = [self.value(item, one, (*path, index)) for index, (item, one) in enumerate(pairs)]
        kind: Any = {tuple: tuple, set: set, frozenset: frozenset}.get(get_origin(annotation), list)
        return values if has_spec(values) and kind is not tuple else kind(values)

    def _entries(self, node: Node, annotation: Any, path: KeyPath) -> Any:
        if is_typeddict(annotation):
            hints, given = hints_of(annotation, annotation, extras=False), entries(node)
            needed = annotation.__required_keys__
            if not needed <= given.keys() <= hints.keys():
                words = f"given the keys {[*given]}, needed: {sorted(needed)}, allowed: {[*hints]}."
                self.findings.add(node.source, f"{dotted(path)}: {words}")
            return {key: self.value(child, hints.get(key, Any), (*path, key)) for key, child in given.items()}
        of_key, of_value = get_args(annotation)
        keys: dict[Any, Any] = {}
        for key, child in entries(node).items():
            # Neither JSON nor TOML nor the command line has numbers for keys.
            number = None if accepts(key, of_key) else whole_number(str(key))
            keys[key] = self.value(Node(key if number is None else number, child.source), of_key, (*path, key))
        return {keys[key]: self.value(child, of_value, (*path, key)) for key, child in entries(node).items()}

    def coerce(self, node: Node, annotation: Any, path: KeyPath, mismatch: TypeMismatchError) -> Any:
        """Return the class that a text names, or what was typed as text; if it is neither, report the mismatch."""
        if isinstance(node.value, str):
            forms = forms_of(annotation)
            for kind in FROM_TEXT.keys() & {*forms.objects}:
                with suppress(RuntimeError, KeyError):
                    return FROM_TEXT[kind](node.value)
            forms.objects = [one for one in forms.objects if one not in FROM_TEXT]
            if forms.objects or forms.calls:
                node.value = {"class_path": Node(node.value, node.source, node.text)}
                return self._object(node, forms, path)
            if forms.classes:
                return self.named_class(node, tuple(forms.classes), {}, path)
        if node.text is not None:
            with suppress(TypeMismatchError):
                value = validate(node.text, annotation)
                node.value, node.text = node.text, None
                return value
        part, inner = node, path  # the part that does not fit
        for step in mismatch.path:
            if step in children_of(part):  # others are the names of union members
                part, inner = children_of(part)[step], (*inner, step)
        inside = f" in {dotted(path)}" if inner != path else ""
        words = f"given {repr_value(part)}, allowed{inside}: {allowed(annotation)}{mismatch.reason}."
        self.findings.add(part.source, f"{dotted(inner)}: {words}")
        return INVALID


def _part_of(value: Any, name: Any) -> Any:
    """Return an element, an entry or an attribute of a value; None if it has no such part."""
    with suppress(LookupError, TypeError):
        return value[name]
    return getattr(value, str(name), None)


def missing_arguments(cls: Any, given: Collection[str]) -> list[str]:
    """Return the arguments without a default that are not given."""
    needed = [name for name, p in constructor_parameters(cls).named.items() if p.default is p.empty]
    return [name for name in needed if name not in given]


def needs_arguments(cls: Any, path: KeyPath, missing: Sequence[str]) -> str:
    """Return the problem of a class whose arguments without a default are not given."""
    fix = f"give them in the file under init_args, or --{dotted((*path, missing[0]))} VALUE."
    return f"{dotted(path)} ({cls.__name__}) needs {', '.join(map(repr, missing))}: {fix}"


def _names_a_class(node: Node) -> bool:
    given = entries(node)
    name = given.get("class_path")
    return name is not None and bool(re.search(r"[.:]", str(name.value))) and given.keys() <= _KEYS_OF_CLASS


_KEYS_OF_CLASS = {"class_path", "init_args"}
_FILE_ANNOTATIONS: dict[KeyPath, dict[str, Any]] = {
    ("lr_scheduler",): SCHEDULER_OPTIONS,
    ("trainer",): {"precision": str | int},  # no file can hold a Precision
}
"""Annotations of arguments that files give in another way, or in addition, by the path of their class."""
DTYPES = {name: one for name, one in vars(torch).items() if isinstance(one, torch.dtype)}
FROM_TEXT: dict[type, Callable[[str], Any]] = {
    torch.dtype: lambda text: DTYPES[text.removeprefix("torch.")],
    torch.device: torch.device,
}
"""Classes whose objects a file holds as texts: `float16`, `cuda:0`."""


def table_of(bases: tuple[type, ...], name: str = "") -> dict[str, type]:
    """Return the short names for classes of these kinds; with `name`, if an installed package has added it."""
    table: dict[str, type] = {}
    if Optimizer in bases:
        table |= {one: getattr(torch.optim, one) for one in optimizers()}
    if LRScheduler in bases:
        table |= {one: getattr(torch.optim.lr_scheduler, one) for one in schedulers()}
    plugs = {Strategy: available_strategies, Callback: available_callbacks, Logger: available_callbacks}
    for base in (base for base in plugs if base in bases):
        known = plugs[base]()
        named = {name: known[name]} if name in known else {}  # it imports the class, if it is not one of ours
        table |= {one: cls for one, cls in {**known, **named}.items() if issubclass(cls, base)}
    return table
