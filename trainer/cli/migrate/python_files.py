"""Rewrite the imports, names and arguments of a Python file, keeping everything else as it is written."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import libcst as cst
from libcst.helpers import get_full_name_for_node
from libcst.metadata import MetadataWrapper, PositionProvider, QualifiedNameProvider, QualifiedNameSource

from trainer.cli.migrate.decisions import Finding, decisions
from trainer.cli.migrate.names import (
    ARGUMENTS,
    RENAMED,
    ROOTS,
    VALUES,
    lightning_root,
    module_here,
    name_here,
)
from trainer.compat.names import EXPORTS

WITH_ALL = ("trainer", "trainer.callbacks", "trainer.strategies")
"""Packages from which `import *` takes what Lightning's exports, as from those in `EXPORTS`."""


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
    rewriter = _Rewriter(names, kept)
    changed = wrapper.visit(rewriter)
    found = [*rewriter.findings, *decisions(wrapper, rewriter.rewritten)]
    return changed.bytes, sorted(set(found))


class _NamesOfTheFile(cst.CSTVisitor):
    """Collects the names that a file uses by themselves (not after a dot), and the modules that it imports as such."""

    def __init__(self) -> None:
        self.used: set[str] = set()
        self.exported: set[str] = set()
        """Names in `__all__`."""
        self.modules: list[str] = []
        """Modules of `import a.b`, without `as`."""
        self.packages: set[str] = set()
        """Names of Lightning's packages, as in `import pytorch_lightning as pl`."""

    def visit_Name(self, node: cst.Name) -> None:
        self.used.add(node.value)

    def visit_Attribute(self, node: cst.Attribute) -> bool:
        node.value.visit(self)
        return False

    def visit_Arg(self, node: cst.Arg) -> bool:
        node.value.visit(self)
        return False

    def visit_ImportFrom(self, node: cst.ImportFrom) -> bool:
        self.used |= {alias.evaluated_alias or "" for alias in _aliases(node.names)}
        module = get_full_name_for_node(node.module) if node.module else None
        self._add_packages((f"{module}.{alias.evaluated_name}", alias) for alias in _aliases(node.names))
        return False

    def visit_Import(self, node: cst.Import) -> bool:
        self.modules += [alias.evaluated_name for alias in node.names if alias.asname is None]
        self.used |= {alias.evaluated_alias or "" for alias in node.names}
        self._add_packages((alias.evaluated_name, alias) for alias in node.names)
        return False

    def _add_packages(self, imported: Iterable[tuple[str, cst.ImportAlias]]) -> None:
        self.packages |= {alias.evaluated_alias or path.partition(".")[0] for path, alias in imported if path in ROOTS}

    def visit_Assign(self, node: cst.Assign) -> None:
        if any(isinstance(one.target, cst.Name) and one.target.value == "__all__" for one in node.targets):
            elements = node.value.elements if isinstance(node.value, cst.List | cst.Tuple) else ()
            self.exported |= {one.value.raw_value for one in elements if isinstance(one.value, cst.SimpleString)}


class _Rewriter(cst.CSTTransformer):
    METADATA_DEPENDENCIES = (QualifiedNameProvider, PositionProvider)

    def __init__(self, names: _NamesOfTheFile, kept: Collection[str]) -> None:
        super().__init__()
        self.findings: list[Finding] = []
        self.rewritten: set[tuple[int, str]] = set()
        """Line and name of each argument that has another name or value now, and line and text of each annotation."""
        kept = names.exported | set(kept)
        self.renamed = {old: new for old, new in RENAMED.items() if new not in names.used and old not in kept}
        """Classes that are imported under their new names."""
        whole = [path for path in names.modules if lightning_root(path)]
        absent = {path.partition(".")[0] for path in whole if not module_here(path).path}
        self.imported_roots = {path.partition(".")[0] for path in whole} - absent
        """Packages that are imported under their own names, and that are here."""
        self.as_trainer = "trainer" not in names.used
        """The file has no name `trainer` of its own, so that the package may have it."""
        self.packages, self.bound = names.packages, names.used | self.imported_roots
        self.annotations = 0

    # ------------------------------------------------------------------ imports

    def leave_Import(self, original_node: cst.Import, updated_node: cst.Import) -> cst.Import:
        return updated_node.with_changes(names=[self._alias(original_node, alias) for alias in updated_node.names])

    def _alias(self, line: cst.Import, alias: cst.ImportAlias) -> cst.ImportAlias:
        path = alias.evaluated_name
        if lightning_root(path) is None:
            return alias
        here = module_here(path)
        top = path.partition(".")[0]
        if not here.path:
            self._add(line, path, here.instead)
        elif alias.asname is None and top not in self.imported_roots:
            self._add(line, path, f"`import trainer` for what is here, since another import of {top} has to stay")
        if not here.path or (alias.asname is None and top not in self.imported_roots):
            return alias
        if alias.asname is not None:
            return alias.with_changes(name=_dotted(here.path))
        if self.as_trainer:
            return alias.with_changes(name=_dotted(here.path))
        name = cst.AsName(cst.Name(top), cst.SimpleWhitespace(" "), cst.SimpleWhitespace(" "))
        return alias.with_changes(name=_dotted(ROOTS[top]), asname=name)

    def leave_ImportFrom(self, original_node: cst.ImportFrom, updated_node: cst.ImportFrom) -> cst.BaseSmallStatement:
        module = get_full_name_for_node(original_node.module) if original_node.module else None
        if original_node.relative or module is None or lightning_root(module) is None:
            return updated_node
        if isinstance(original_node.names, cst.ImportStar):
            home = module_here(module).path
            if home in WITH_ALL or home.partition(".")[2] in EXPORTS:
                return updated_node.with_changes(module=_dotted(home))
            self._add(original_node, f"from {module} import *", "an import of the names that are used")
            return updated_node
        aliases = _aliases(original_node.names)
        found = [name_here(module, alias.evaluated_name) for alias in aliases]
        home, instead = module_here(module)
        for alias, here in zip(aliases, found, strict=True):
            if not here.path or not home:
                self._add(alias, alias.evaluated_name, here.instead or instead)
        if not home:
            return updated_node
        if len(aliases) == 1 and aliases[0].asname and (whole := module_here(f"{module}.{aliases[0].evaluated_name}")):
            alias = _aliases(updated_node.names)[0]
            if whole.path == "trainer":  # from lightning import pytorch as pl
                words = updated_node.whitespace_after_from
                name = alias.with_changes(name=cst.Name("trainer"), comma=cst.MaybeSentinel.DEFAULT)
                return cst.Import([name], semicolon=updated_node.semicolon, whitespace_after_import=words)
        homes = {here.path.rpartition(".")[0] for here in found}
        if (
            len(homes) == 1
            and homes != {""}
            and (homes == {"trainer"} or home.count(".") > 1 or home.endswith(".core"))
        ):
            (home,) = homes
        names = [self._imported(alias) for alias in _aliases(updated_node.names)]
        return updated_node.with_changes(module=_dotted(home), names=names)

    def _imported(self, alias: cst.ImportAlias) -> cst.ImportAlias:
        name = alias.evaluated_name
        new = RENAMED.get(name, name) if alias.asname else self.renamed.get(name, name)
        return alias.with_changes(name=cst.Name(new)) if new != name else alias

    # ------------------------------------------------------------------ names

    def leave_Name(self, original_node: cst.Name, updated_node: cst.Name) -> cst.BaseExpression:
        name = original_node.value
        if name in self.imported_roots and self.as_trainer and self._imported_as(original_node) == {name}:
            return _dotted(ROOTS[name])
        if name in self.renamed and any(
            path.endswith(f".{name}") and lightning_root(path) for path in self._imported_as(original_node)
        ):
            return updated_node.with_changes(value=self.renamed[name])
        return updated_node

    def leave_Attribute(self, original_node: cst.Attribute, updated_node: cst.Attribute) -> cst.BaseExpression:
        paths = self._imported_as(original_node)
        written = get_full_name_for_node(original_node)
        top = (written or "").partition(".")[0]
        if written in ROOTS and top in self.imported_roots and self.as_trainer and paths == {written}:
            return _dotted(ROOTS[written]).with_changes(lpar=updated_node.lpar, rpar=updated_node.rpar)
        name = original_node.attr.value
        ours = {path for path in paths if lightning_root(path) and path.endswith(f".{name}")}
        if name in RENAMED and ours:
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
        value = re.sub(r"(?<![\w.])[a-zA-Z_][\w.]*", lambda found: self._quoted(found[0]), updated_node.value)
        if value != updated_node.value or updated_node.raw_value.partition(".")[0] in self.bound:
            self.rewritten.add((self.get_metadata(PositionProvider, original_node).start.line, updated_node.value))
        return updated_node.with_changes(value=value)

    def _quoted(self, written: str) -> str:
        """Return a name in a quoted annotation as it is here."""
        top, dot, _ = written.partition(".")
        if not dot:
            return self.renamed.get(written, written)
        if top in self.imported_roots and self.as_trainer and (root := lightning_root(written)):
            written = ROOTS[root] + written.removeprefix(root)
        before, _, name = written.rpartition(".")
        return f"{before}.{RENAMED.get(name, name)}" if top in self.packages | self.imported_roots else written

    # ------------------------------------------------------------------ arguments

    def leave_Call(self, original_node: cst.Call, updated_node: cst.Call) -> cst.Call:
        names = {path.rpartition(".")[2] for path in self._imported_as(original_node.func) if is_known(path)}
        kind = next((name for name in names if name in ARGUMENTS), None)
        if kind is None:
            return updated_node
        given = {arg.keyword.value for arg in updated_node.args if arg.keyword}
        args: list[cst.Arg] = []
        for original, arg in zip(original_node.args, updated_node.args, strict=True):
            new = _argument(kind, arg, given)
            if new is not None and original.keyword is not None:
                line = self.get_metadata(PositionProvider, original).start.line
                self.rewritten.add((line, original.keyword.value))
            args += new or [arg]
        return updated_node.with_changes(args=args)

    # ------------------------------------------------------------------ helpers

    def _imported_as(self, node: cst.CSTNode) -> set[str]:
        return imported_as(self.get_metadata(QualifiedNameProvider, node, set()))

    def _add(self, node: cst.CSTNode, what: str, instead: str) -> None:
        self.findings.append(Finding(self.get_metadata(PositionProvider, node).start.line, what, f"use {instead}"))


def imported_as(names: Iterable[Any]) -> set[str]:
    """Return the imported paths among the qualified names of a node."""
    return {one.name for one in names if one.source is QualifiedNameSource.IMPORT}


def is_known(path: str) -> bool:
    """Whether a dotted path is one of Lightning's or of this package."""
    return lightning_root(path) is not None or path.startswith("trainer.")


def _argument(kind: str, arg: cst.Arg, given: Collection[str]) -> list[cst.Arg] | None:
    """Return what an argument is here, if that is known to be the same."""
    if arg.keyword is None:
        return None
    name = arg.keyword.value
    value = arg.value.value if isinstance(arg.value, cst.Name | cst.Integer | cst.Float | cst.SimpleString) else ""
    if kind == "Trainer" and name == "gpus" and isinstance(arg.value, cst.Integer) and value.strip("0"):
        if {"accelerator", "devices"} & set(given):
            return None
        comma = cst.Comma(whitespace_after=cst.SimpleWhitespace(" "))
        first = arg.with_changes(keyword=cst.Name("accelerator"), value=cst.SimpleString('"gpu"'), comma=comma)
        return [first, arg.with_changes(keyword=cst.Name("devices"))]
    new = ARGUMENTS[kind].get(name)
    if new is not None and new not in given:
        return [arg.with_changes(keyword=cst.Name(new))]
    if kind == "Trainer" and (name, value) in VALUES:
        new, text = VALUES[name, value]
        if new == name or new not in given:
            return [arg.with_changes(keyword=cst.Name(new), value=cst.parse_expression(text))]
    return None


def _aliases(names: Sequence[cst.ImportAlias] | cst.ImportStar) -> Sequence[cst.ImportAlias]:
    return () if isinstance(names, cst.ImportStar) else names


def _dotted(path: str) -> cst.Name | cst.Attribute:
    node = cst.parse_expression(path)
    assert isinstance(node, cst.Name | cst.Attribute)
    return node
