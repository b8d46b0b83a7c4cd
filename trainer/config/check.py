"""Check every value of a configuration against the signature that takes it, and collect all problems."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from operator import attrgetter
from typing import Any, get_args

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from trainer.arguments import with_python_numbers
from trainer.callback import Callback, available_callbacks
from trainer.config.classes import find_class, one_line_error
from trainer.config.read import INVALID, Spec, Values, has_spec, reference_to_data
from trainer.config.tree import (
    KeyPath,
    Node,
    OfData,
    Problem,
    Source,
    canonical_class,
    dotted,
    entries,
    named_source,
    repr_value,
    sources_of,
    with_source,
)
from trainer.config.types import (
    TypeMismatchError,
    allowed,
    callables_in,
    classes_in,
    constructor_parameters,
    for_isinstance,
    is_named_tuple,
    is_protocol,
    is_structured,
    makes_callables,
    objects_in,
    takes_mapping,
    validate,
    wants_text,
)
from trainer.data.datamodule import DataModule
from trainer.errors import ConfigError, TrainerError
from trainer.hyperparameters import construct
from trainer.logger import Logger
from trainer.module import TrainModule
from trainer.runs.changes_since_checkpoint import allowed_problems
from trainer.runs.resolved_config import settings_problems
from trainer.settings import Settings
from trainer.strategy import Strategy, available_strategies
from trainer.trainer import Trainer


@dataclass
class ClassSpec(Spec):
    """A class, or a function, with arguments that fit its signature; among them may be other specs."""

    cls: Any
    arguments: dict[str, Any]
    source: Source
    path: str
    nodes: dict[str, Node] = field(default_factory=dict)
    """Each argument as it was given."""
    provided: Sequence[str] = ()
    """Arguments that no file can hold, such as an optimizer's parameters."""
    bases: tuple[type, ...] = (object,)
    """The classes of one of which the object has to be."""
    is_factory: bool = False
    """True where a function that makes such objects is wanted."""
    complete: Callable[..., None] | None = None
    """A function that completes the object; it also gets the values that no file can hold."""
    from_checkpoint: bool = False
    """True where the arguments are a checkpoint's, among which are those that are taken by position alone."""

    def __repr__(self) -> str:
        return f"{self.cls.__qualname__}({', '.join(f'{name}={value!r}' for name, value in self.arguments.items())})"

    def build(self, **provided: Any) -> Any:
        """Return the object.

        Args:
            provided: the values of arguments that no file can hold.

        Raises:
            ConfigError: the constructor refused its arguments, or failed: says what, and where in the user's code.
        """
        arguments = {name: value for name, value in provided.items() if name in self.provided}
        arguments |= {name: instantiate(value, **provided) for name, value in self.arguments.items()}
        if self.is_factory:
            return partial(self.cls, **arguments) if arguments else self.cls
        try:
            made = construct(self.cls, arguments) if self.from_checkpoint else self.cls(**arguments)
            if not isinstance(made, tuple(map(for_isinstance, self.bases))):
                wanted = " or ".join(base.__name__ for base in self.bases)
                raise TypeError(f"it returned a {type(made).__name__}, which is no {wanted}")
        except TrainerError as error:
            sources = {name: node.source for name, node in self.nodes.items()}
            source = named_source(str(error), sources) or self.source
            raise ConfigError(str(Problem(source, f"{self.path}: {error}"))) from error
        except Exception as error:
            message = f"{self.path}: making {self.cls.__qualname__} failed: {one_line_error(error)}"
            raise ConfigError(str(Problem(self.source, message))) from error
        if self.complete is not None:
            self.complete(made, **provided)
        return made


@dataclass
class ValueOfData(Spec):
    """A value that is, or in which are, attributes of the data module's object."""

    node: Node
    annotation: Any
    path: str
    data: Callable[[], Any]
    """Returns a data module, for those who make the module alone."""

    def __repr__(self) -> str:
        return str(reference_to_data(self.node))

    def build(self, **provided: Any) -> Any:
        """Return the value; `data` among the provided ones returns the object in place of the field.

        Raises:
            ConfigError: the object has no such attribute, or its value does not fit.
        """
        data = provided.get("data", self.data)()
        value = self._filled(self.node.plain(), data)
        try:
            return validate(with_python_numbers(value), self.annotation)
        except (TypeMismatchError, TypeError):
            given = f"{self} is {value!r}, allowed: {allowed(self.annotation)}."
            raise ConfigError(str(Problem(self.node.source, f"{self.path}: {given}"))) from None

    def _filled(self, value: Any, data: Any) -> Any:
        if isinstance(value, dict):
            return {key: self._filled(item, data) for key, item in value.items()}
        if isinstance(value, list):
            return [self._filled(item, data) for item in value]
        if not isinstance(value, OfData):
            return value
        name = value.removeprefix("${data.").removesuffix("}")
        try:
            return attrgetter(name)(data)
        except Exception as error:
            parameter = constructor_parameters(type(data)).named.get(name)
            if isinstance(error, AttributeError) and parameter is not None and parameter.default is not parameter.empty:
                return parameter.default
            known = sorted(one for one in {*dir(type(data)), *vars(data)} - {*dir(DataModule)} if one[0] != "_")
            has = f"The data ({type(data).__name__}) has: {', '.join(known) or 'no attributes'}."
            message = f"{self.path}: {value}: {one_line_error(error)}. {has}"
            raise ConfigError(str(Problem(self.node.source, message))) from error


def instantiate(value: Any, **provided: Any) -> Any:
    """Return a value with the objects that its specs describe; `provided` as in `ClassSpec.build`."""
    if isinstance(value, (ClassSpec, ValueOfData)):
        return value.build(**provided)
    if type(value) in (list, tuple):
        return type(value)(instantiate(item, **provided) for item in value)
    return {key: instantiate(item, **provided) for key, item in value.items()} if type(value) is dict else value


def is_data(value: Any) -> bool:
    """Whether the objects of a value are dataclasses, which a checkpoint may hold."""
    if isinstance(value, ClassSpec):
        return is_structured(value.cls) and all(map(is_data, value.arguments.values()))
    inside = value.values() if type(value) is dict else value if type(value) in (list, tuple) else ()
    return value is not INVALID and not isinstance(value, Spec) and all(map(is_data, inside))


class Checker(Values):
    """Checks a configuration: its values against annotations, arguments against signatures. Problems go to `findings`.

    Nodes get the names and paths that mean the same from any folder.
    """

    # -- the keys of a configuration ----------------------------------------------------------------------------------

    def chosen(self, node: Node | None, base: type, key: str, provided: Sequence[str] = ()) -> ClassSpec | None:
        """Return the class at a key of the configuration, if there is one; `provided` as in `class_spec`."""
        return None if node is None or node.value is None else self.class_spec(node, (base,), (key,), provided)

    data_spec: ClassSpec | None = None

    def data(self, node: Node | None) -> ClassSpec | None:
        """Return the data module, if there is one."""
        self.data_spec = self.chosen(node, DataModule, "data")
        return self.data_spec

    def optimizer(self, node: Node | None, module: type) -> ClassSpec | None:
        """Return the optimizer of a module that has no `configure_optimizers`."""
        if node is None or module.configure_optimizers is TrainModule.configure_optimizers:  # type: ignore[attr-defined]
            return self.chosen(node, Optimizer, "optimizer", provided=("params",))
        if node.value is not None:
            words = f"module ({module.__name__}) defines configure_optimizers, which would be replaced."
            self.findings.add(node.source, f"optimizer: {words} Keep one of them.")
        return None

    def scheduler(self, node: Node | None) -> ClassSpec | None:
        """Return the learning-rate scheduler of the optimizer; `interval` and the like are among its arguments."""
        return self.chosen(node, LRScheduler, "lr_scheduler", provided=("optimizer",))

    def allow_changes(self, node: Node | None) -> list[str]:
        """Return the names of what may differ from the run that wrote the checkpoint."""
        names = [] if node is None else self.value(node, list[str], ("allow_changes",))
        if node is None or not isinstance(names, list):
            return []
        for problem in allowed_problems(names):
            self.findings.add(node.source, problem)
        return names

    def trainer(self, node: Node | None) -> dict[str, Any]:
        """Return the arguments of Trainer that were given: each fits its type, then its value is checked.

        Objects are not made yet: `Trainer` checks them, and with them all that the command adds to these arguments.
        """
        if node is None or node.value is None:
            return {}
        values = self.arguments(node, Trainer, ("trainer",))
        valid = {name: value for name, value in values.items() if value is not INVALID}
        plain = {name: value for name, value in valid.items() if not has_spec(value)}
        self.findings.problems += with_source(settings_problems(Settings(**plain)), sources_of(node))
        return valid

    def strategy(self, node: Node) -> Any:
        """Return a name of the table as it is; with arguments, or for a class of the user's, a spec."""
        name, arguments = entries(node).get("class_path"), entries(node).get("init_args")
        if name is not None and name.value == "auto":
            if arguments is not None:
                words = "trainer.strategy: 'auto' takes no arguments. Name the strategy that they are for."
                self.findings.add(node.source, words)
            return "auto"
        spec = self.class_spec(node, (Strategy,), ("trainer", "strategy"))
        short = spec is not INVALID and name and arguments is None and name.value in available_strategies()
        return name.value if short else spec  # type: ignore[union-attr]

    # -- classes ------------------------------------------------------------------------------------------------------

    def class_spec(self, node: Node, bases: tuple[type, ...], path: KeyPath, provided: Sequence[str] = ()) -> Any:
        """Return the spec of a choice of class in canonical form; `INVALID` when something is wrong with it.

        Args:
            provided: arguments that are given when the object is made, and not in the configuration.
        """
        where = dotted(path)
        nested = entries(node).get("init_args")
        name = entries(node).get("class_path")
        table = table_of(bases, "" if name is None else str(name.value))
        if name is None or not isinstance(name.value, str):
            likely = [*entries(nested), "ModelCheckpoint", "CSVLogger", *table, "package.module.Class"]
            example = next(key for key in likely if key in table or key == likely[-1])
            given = "no class_path" if isinstance(node.value, dict) and name is None else repr_value(name or node)
            words = f"{where}: given {given}, allowed: 'class_path: {example}' (or file.py:Class), and init_args."
            if nested is not None and len(path) == 3:
                words += f" Elements of a list are numbered: {dotted((*path[:2], 0))}.NAME."
            self.findings.add(node.source, words)
            return INVALID
        functions = path[0] != "trainer" and path not in (("module",), ("data",))
        made_by = self.named_class(name, bases, table, path, functions)
        if made_by is INVALID:
            return INVALID
        if path[0] == "lr_scheduler" and LRScheduler in bases:  # also one of several in a SequentialLR
            provided = ("optimizer",)
        return replace(self.spec_of(made_by, nested, path, node.source, name.source, provided), bases=bases)

    def named_class(
        self, node: Node, bases: tuple[type, ...], table: Mapping[str, type], path: KeyPath, functions: bool = False
    ) -> Any:
        """Return the class, or function, with a name (see `find_class`); `INVALID` if there is no such class."""
        try:
            nominal = tuple(object if is_protocol(base) else base for base in bases)
            found = find_class(str(node.value), nominal, table, node.source, functions)
        except ConfigError as error:
            self.findings.add(node.source, f"{dotted(path)}: {error}", error)
            return INVALID
        node.value = found.name
        return found.cls

    def spec_of(
        self,
        cls: Any,
        node: Node | None,
        path: KeyPath,
        source: Source,
        named_at: Source,
        provided: Sequence[str] = (),
    ) -> ClassSpec:
        """Return the spec of a class with the arguments in a mapping; those that it cannot do without are asked for."""
        arguments = self.arguments(node, cls, path)
        of_checkpoint = self.has_checkpoint and path[0] == "module" and (len(path) == 1 or is_structured(cls))
        missing = missing_arguments(cls, {*entries(node), *provided})
        if missing and not of_checkpoint:
            self.findings.add(named_at, needs_arguments(cls, path, missing))
        takes = [name for name in provided if name in constructor_parameters(cls).named]
        return ClassSpec(cls, arguments, source, dotted(path), entries(node), takes)

    def callable_spec(self, node: Node, signature: Any, path: KeyPath) -> Any:
        """Return a function, an object that can be called, or what makes objects of the class that a call returns."""
        name = entries(node).get("class_path")
        if name is None:
            return self.class_spec(node, (object,), path)
        made_by = self.named_class(name, (object,), {}, path, functions=True)
        if made_by is INVALID:
            return INVALID
        takes, returns = get_args(signature) or (..., Any)
        if not isinstance(made_by, type) or (
            isinstance(returns, type) and returns is not Any and issubclass(made_by, returns)
        ):
            names = [*constructor_parameters(made_by).named]
            called_with = names if takes is ... or not isinstance(made_by, type) else names[: len(takes)]
            nested = entries(node).get("init_args")
            return replace(
                self.spec_of(made_by, nested, path, node.source, name.source, called_with), is_factory=True, provided=()
            )
        if not makes_callables(made_by):
            wanted = f", or one that makes {returns.__name__}" if isinstance(returns, type) else ""
            words = f"objects of {made_by.__qualname__} cannot be called: name a function{wanted}."
            self.findings.add(name.source, f"{dotted(path)}: {words}")
            return INVALID
        return self.class_spec(node, (object,), path)

    # -- values -------------------------------------------------------------------------------------------------------

    def of_data(self, node: Node, annotation: Any, path: KeyPath, reference: OfData) -> Any:
        """Return a spec of the value of an attribute of the data, for what is made after these."""
        if path[0] in ("trainer", "data"):
            return super().of_data(node, annotation, path, reference)
        return ValueOfData(node, annotation, dotted(path), lambda: instantiate(self.data_spec))

    def value(self, node: Node, annotation: Any, path: KeyPath) -> Any:
        """Return a value as its annotation wants it, with specs for objects; `INVALID` when it does not fit."""
        if path == ("trainer", "strategy"):
            return self.strategy(node)
        if annotation is Any and _names_a_class(node):
            return self.class_spec(node, (object,), path)
        return super().value(node, annotation, path)

    def ways(self, node: Node, annotation: Any, path: KeyPath) -> list[Callable[[Node], Any]]:
        """Return the ways to read a mapping or a list, also as an object, by the members of a union."""
        objects, calls, parts = (
            tuple(objects_in(annotation)),
            callables_in(annotation),
            super().ways(node, annotation, path),
        )
        structured = [partial(self._structured, cls=cls, path=path) for cls in objects if is_structured(cls)]
        if isinstance(node.value, list):
            return parts + [way for way in structured if is_named_tuple(way.keywords["cls"])]
        if not (objects or calls):
            return parts
        if node.named is not None and not wants_text(node.named.value, annotation):
            node.value = {"class_path": node.named, **entries(node)}
        if "class_path" not in entries(node) and (parts or structured or takes_mapping(annotation)):
            return [*structured, *parts]
        node.value = canonical_class(node, path, self.findings).value
        if calls:
            return [lambda node: self.callable_spec(node, calls[0], path)]
        return [lambda node: self.class_spec(node, objects, path)]

    def _structured(self, node: Node, cls: Any, path: KeyPath) -> Any:
        if isinstance(node.value, list):  # of a NamedTuple; one too many has a number for a name
            names = [*cls._fields, *range(len(cls._fields), len(node.value))]
            node.value = dict(zip(names, node.value, strict=False))
        return self.spec_of(cls, node, path, node.source, node.source)

    def coerce(self, node: Node, annotation: Any, path: KeyPath, mismatch: TypeMismatchError) -> Any:
        """Return the class that a text names, or what was typed as text; if it is neither, report the mismatch."""
        objects, classes, calls = tuple(objects_in(annotation)), tuple(classes_in(annotation)), callables_in(annotation)
        for kind in (kind for kind in FROM_TEXT if kind in objects and isinstance(node.value, str)):
            with suppress(RuntimeError, AttributeError):
                if isinstance(found := FROM_TEXT[kind](str(node.value)), kind):
                    return found
            objects = tuple(one for one in objects if one is not kind)
        if isinstance(node.value, str) and (objects or calls):
            node.value = {"class_path": Node(node.value, node.source, node.text)}
            return self.callable_spec(node, calls[0], path) if calls else self.class_spec(node, objects, path)
        if isinstance(node.value, str) and classes:
            return self.named_class(node, classes, {}, path)
        return super().coerce(node, annotation, path, mismatch)


def missing_arguments(cls: Any, given: Collection[str]) -> list[str]:
    """Return the arguments without a default that are not given."""
    needed = [name for name, p in constructor_parameters(cls).named.items() if p.default is p.empty]
    return [name for name in needed if name not in given]


def needs_arguments(cls: Any, path: KeyPath, missing: Sequence[str]) -> str:
    """Return the problem of a class that cannot do without arguments that are not given."""
    needs = f"needs the argument{'s' if len(missing) > 1 else ''} {', '.join(map(repr, missing))}"
    fix = f"give it in the file under init_args, or --{dotted((*path, missing[0]))} VALUE."
    return f"{dotted(path)} ({cls.__name__}) {needs}: {fix}"


def _names_a_class(node: Node) -> bool:
    name = entries(node).get("class_path")
    return name is not None and bool(re.search(r"[.:]", str(name.value))) and entries(node).keys() <= _OF_A_CHOICE


_OF_A_CHOICE = {"class_path", "init_args"}
FROM_TEXT: dict[type, Callable[[str], Any]] = {
    torch.dtype: lambda text: getattr(torch, text.removeprefix("torch.")),
    torch.device: torch.device,
}
"""Classes whose objects a file holds as texts: `float16`, `cuda:0`."""


def table_of(bases: tuple[type, ...], name: str = "") -> dict[str, type]:
    """Return the short names for classes of these kinds; with `name`, if an installed package has added it."""
    table: dict[str, type] = {}
    for kind, package in ((Optimizer, torch.optim), (LRScheduler, torch.optim.lr_scheduler)):
        if kind in bases:
            table |= {one: cls for one, cls in vars(package).items() if _is_derived(cls, kind) and one[0] != "_"}
    plugs = {Strategy: available_strategies, Callback: available_callbacks, Logger: available_callbacks}
    for base in (base for base in plugs if base in bases):
        known = plugs[base]()
        named = {name: known[name]} if name in known else {}  # it imports the class, if it is not one of ours
        table |= {one: cls for one, cls in {**known, **named}.items() if issubclass(cls, base)}
    return table


def _is_derived(cls: Any, base: type) -> bool:
    return isinstance(cls, type) and issubclass(cls, base) and cls is not base
