"""Rewrite the imports, names and arguments of a Python file, keeping everything else unchanged."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence

import libcst as cst
from libcst.helpers import get_full_name_for_node
from libcst.metadata import MetadataWrapper, PositionProvider, QualifiedNameProvider

from trainer.cli.migrate.decisions import OF_A_TRAINER, decisions, imported_path
from trainer.cli.migrate.names import ARGUMENTS, RENAMED, VALUES, Finding, lightning_root, module_here, name_here

_WITH_ALL = ("callbacks", "strategies", "loggers", "profilers", "utilities", "utilities.types", "utilities.rank_zero")
WITH_ALL = ("trainer", *(f"trainer.{name}" for name in _WITH_ALL))
"""Packages whose `import *` gives the names that Lightning's exports."""


def migrate_python(source: bytes, kept: Collection[str] = ()) -> tuple[bytes, list[Finding]]:
    """Return a Python file in this package's names, and what a person must decide in it.

    Args:
        kept: names that other files import from this one, or that a package exports: they are not renamed.

    Raises:
        cst.ParserSyntaxError, UnicodeDecodeError: the file is no Python, or not in its encoding.
    """
    wrapper = MetadataWrapper(cst.parse_module(source))
    names = _NamesOfTheFile()
    wrapper.module.visit(names)
    rewriter = _Rewriter(names.used | names.exported | {*kept})
    changed = wrapper.visit(rewriter)
    found = [*rewriter.findings, *decisions(wrapper, rewriter.rewritten)]
    return changed.bytes, sorted(set(found))


class _NamesOfTheFile(cst.CSTVisitor):
    """Collects the new names of classes that a file uses already, and the old ones in its `__all__`."""

    def __init__(self) -> None:
        self.used: set[str] = set()
        self.exported: set[str] = set()

    def visit_Name(self, node: cst.Name) -> None:
        self.used |= {old for old, new in RENAMED.items() if new == node.value}

    def visit_Assign(self, node: cst.Assign) -> None:
        if get_full_name_for_node(node.targets[0].target) == "__all__":
            elements = node.value.elements if isinstance(node.value, cst.List | cst.Tuple) else ()
            self.exported |= {one.value.raw_value for one in elements if isinstance(one.value, cst.SimpleString)}


class _Rewriter(cst.CSTTransformer):
    """Rewrites a file. `kept`: the names that stay unchanged."""

    METADATA_DEPENDENCIES = (QualifiedNameProvider, PositionProvider)

    def __init__(self, kept: Collection[str]) -> None:
        super().__init__()
        self.findings: list[Finding] = []
        self.rewritten: set[tuple[int, str]] = set()
        """Line and name of each argument that has another name or value now."""
        self.renamed = {old: new for old, new in RENAMED.items() if old not in kept}
        """Classes that are imported under their new names."""
        self.annotations = 0

    # ------------------------------------------------------------------ imports

    def leave_Import(self, original_node: cst.Import, updated_node: cst.Import) -> cst.Import:
        return updated_node.with_changes(names=[self._module_alias(original_node, one) for one in updated_node.names])

    def _module_alias(self, line: cst.Import, alias: cst.ImportAlias) -> cst.ImportAlias:
        path = alias.evaluated_name
        if lightning_root(path) is None:
            return alias
        here, instead = module_here(path)
        if not here:
            self._add(line, path, instead)
            return alias
        if alias.asname is not None:
            return alias.with_changes(name=_dotted(here))
        # `lightning.pytorch.callbacks` is found behind `import trainer as lightning`, too.
        top, space = cst.Name(path.partition(".")[0]), cst.SimpleWhitespace(" ")
        return alias.with_changes(name=cst.Name("trainer"), asname=cst.AsName(top, space, space))

    def leave_ImportFrom(self, original_node: cst.ImportFrom, updated_node: cst.ImportFrom) -> cst.BaseSmallStatement:
        module = get_full_name_for_node(original_node.module) if original_node.module else None
        if original_node.relative or lightning_root(str(module)) is None:
            return updated_node
        module = str(module)
        home, instead = module_here(module)
        if isinstance(updated_node.names, cst.ImportStar):
            if home in WITH_ALL:
                return updated_node.with_changes(module=_dotted(home))
            self._add(original_node, f"from {module} import *", "an import of the names that are used")
            return updated_node
        found = [name_here(module, alias.evaluated_name) for alias in _aliases(original_node)]
        for alias, here in zip(_aliases(original_node), found, strict=True):
            if not here.path or not home:
                self._add(alias, alias.evaluated_name, here.instead or instead)
        if not home:
            return updated_node
        if [here.path for here in found] == ["trainer"]:  # from lightning import pytorch as pl
            alias = updated_node.names[0].with_changes(name=cst.Name("trainer"), comma=cst.MaybeSentinel.DEFAULT)
            return cst.Import([alias], updated_node.semicolon, updated_node.whitespace_after_from)
        homes = {here.path.rpartition(".")[0] for here in found}
        names = [self._imported(alias) for alias in updated_node.names]
        return updated_node.with_changes(module=_dotted((len(homes) == 1 and homes.pop()) or home), names=names)

    def _imported(self, alias: cst.ImportAlias) -> cst.ImportAlias:
        names = RENAMED if alias.asname else self.renamed
        return alias.with_changes(name=cst.Name(names.get(alias.evaluated_name, alias.evaluated_name)))

    # ------------------------------------------------------------------ names

    def leave_Name(self, original_node: cst.Name, updated_node: cst.Name) -> cst.BaseExpression:
        name = original_node.value
        if name in self.renamed and self._is_lightnings(original_node, name):
            return updated_node.with_changes(value=self.renamed[name])
        return updated_node

    def leave_Attribute(self, original_node: cst.Attribute, updated_node: cst.Attribute) -> cst.BaseExpression:
        name = original_node.attr.value
        if name in RENAMED and self._is_lightnings(original_node, name):
            return updated_node.with_changes(attr=updated_node.attr.with_changes(value=RENAMED[name]))
        return updated_node

    def visit_Annotation(self, node: cst.Annotation) -> None:
        self.annotations += 1

    def leave_Annotation(self, original_node: cst.Annotation, updated_node: cst.Annotation) -> cst.Annotation:
        self.annotations -= 1
        return updated_node

    def leave_SimpleString(self, original_node: cst.SimpleString, updated_node: cst.SimpleString) -> cst.SimpleString:
        if not self.annotations:
            return updated_node
        names = "|".join(self.renamed) or "(?!)"
        value = re.sub(rf"(?<![\w.])({names})\b", lambda found: self.renamed[found[0]], updated_node.value)
        return updated_node.with_changes(value=value)

    # ------------------------------------------------------------------ arguments

    def leave_Call(self, original_node: cst.Call, updated_node: cst.Call) -> cst.Call:
        owner, _, method = str(get_full_name_for_node(original_node.func)).rpartition(".")
        kind = method if OF_A_TRAINER.fullmatch(owner) else self._path(original_node.func).rpartition(".")[2]
        if kind not in ARGUMENTS:
            return updated_node
        given = {arg.keyword.value for arg in updated_node.args if arg.keyword}
        args: list[cst.Arg] = []
        for original, arg in zip(original_node.args, updated_node.args, strict=True):
            new = [arg] if original.keyword is None else _argument(kind, arg, original.keyword.value, given)
            if new != [arg]:
                line = self.get_metadata(PositionProvider, original).start.line
                self.rewritten.add((line, cst.ensure_type(original.keyword, cst.Name).value))
            args += new
        return updated_node.with_changes(args=args)

    # ------------------------------------------------------------------ helpers

    def _path(self, node: cst.CSTNode) -> str:
        return imported_path(self.get_metadata(QualifiedNameProvider, node, ()))

    def _is_lightnings(self, node: cst.CSTNode, name: str) -> bool:
        """Whether a node is the name `name`, imported from Lightning."""
        path = self._path(node)
        return lightning_root(path) is not None and path.endswith(f".{name}")

    def _add(self, node: cst.CSTNode, what: str, instead: str) -> None:
        self.findings.append(Finding(self.get_metadata(PositionProvider, node).start.line, what, f"use {instead}"))


def _argument(kind: str, arg: cst.Arg, name: str, given: Collection[str]) -> list[cst.Arg]:
    """Return the arguments that mean the same here, if they are known; else the argument itself."""
    value = cst.Module([]).code_for_node(arg.value)
    if name == "gpus" and value.strip("0").isdigit() and {"accelerator", "devices"}.isdisjoint(given):
        comma = cst.Comma(whitespace_after=cst.SimpleWhitespace(" "))
        first = arg.with_changes(keyword=cst.Name("accelerator"), value=cst.SimpleString('"gpu"'), comma=comma)
        return [first, arg.with_changes(keyword=cst.Name("devices"))]
    new, text = ARGUMENTS[kind].get(name, name), value
    if kind == "Trainer":
        new, text = VALUES.get((name, value), (new, text))
    if (new, text) == (name, value) or new in {*given} - {name}:
        return [arg]
    return [arg.with_changes(keyword=cst.Name(new), value=arg.value if text == value else cst.parse_expression(text))]


def _aliases(node: cst.ImportFrom) -> Sequence[cst.ImportAlias]:
    return () if isinstance(node.names, cst.ImportStar) else node.names


def _dotted(path: str) -> cst.Name | cst.Attribute:
    node = cst.parse_expression(path)
    assert isinstance(node, cst.Name | cst.Attribute)
    return node
