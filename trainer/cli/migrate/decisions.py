"""List what a person must decide in a Python file of Lightning's, each with what to do."""

from __future__ import annotations

import re
from ast import literal_eval
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import libcst as cst
from libcst.helpers import get_full_name_for_node
from libcst.metadata import MetadataWrapper, PositionProvider, QualifiedNameProvider, QualifiedNameSource

from trainer.cli.migrate.names import NAME_HERE, NOT_THERE, argument_words, lightning_root
from trainer.compat.names import FORMER_HOOKS, NAMES, WORDS

OF_A_TRAINER = re.compile(r"(?!(self\.)?(cfg|conf|config|args|opt|hparams)\.)(.*\.)?_?trainer")
"""The names under which a script has its trainer: the last word, but for the entries of configurations."""

MODULE_NAME = re.compile(r"(pytorch_lightning|lightning_fabric|lightning\.(pytorch|fabric))(\.\w+)*")


class Finding(NamedTuple):
    """A place that a person must decide about."""

    line: int
    what: str
    todo: str


def decisions(wrapper: MetadataWrapper) -> list[Finding]:
    """Return what a person must decide."""
    finder = _DecisionFinder()
    wrapper.visit(finder)
    return finder.findings


class _DecisionFinder(cst.CSTVisitor):
    METADATA_DEPENDENCIES = (QualifiedNameProvider, PositionProvider)

    def __init__(self) -> None:
        super().__init__()
        self.findings: list[Finding] = []
        self.classes: list[set[str] | None] = [None]
        """Names that each enclosing class defines; None for a class that does not derive from Lightning's."""

    def visit_ImportFrom(self, node: cst.ImportFrom) -> None:
        if f"{module_of(node)}.".startswith("trainer."):  # rewritten before
            for alias in aliases_of(node):
                self._report_name(alias, alias.evaluated_name)

    def visit_ClassDef(self, node: cst.ClassDef) -> None:
        names = _NamesOfAClass()
        node.body.visit(names)
        ours = any(self._path(base.value) for base in node.bases)
        ours = ours or {"training_step", "configure_optimizers"} <= names.found
        self.classes.append(names.found if ours else None)

    def leave_ClassDef(self, original_node: cst.ClassDef) -> None:
        self.classes.pop()

    def visit_FunctionDef(self, node: cst.FunctionDef) -> None:
        name = node.name.value
        if name in FORMER_HOOKS and self.classes[-1] is not None:
            self._add(node.name, name, f"use {FORMER_HOOKS[name]}")

    def visit_Attribute(self, node: cst.Attribute) -> None:
        name, path = node.attr.value, self._path(node)
        written = get_full_name_for_node(node.value) or ""
        own = self.classes[-1]
        if path:
            self._report_path(node, path)
        elif OF_A_TRAINER.fullmatch(written):
            self._report_member(node, "Trainer", written, name)
        elif written == "self" and own is not None and name not in {*own, *FORMER_HOOKS}:
            self._report_member(node, "LightningModule", written, name)

    def visit_Call(self, node: cst.Call) -> None:
        called, path = get_full_name_for_node(node.func) or "", self._path(node.func)
        if called.endswith(".link_arguments"):
            instead = "a reference in the configuration, ${data.NAME}, to a value in it or an attribute of the object"
            self._add(node, "link_arguments", f"use {instead}")
        kind = path.rpartition(".")[2]
        for arg in node.args:
            name = arg.keyword.value if arg.keyword else ""
            words = argument_words(kind, name, _literal(arg.value))
            if words is not None:
                self._add(arg, f"{kind}({name}=)", f"use {words}")

    def visit_Subscript(self, node: cst.Subscript) -> None:
        read = get_full_name_for_node(node.value.func) if isinstance(node.value, cst.Call) else None
        if read == "torch.load" and cst.Module([]).code_for_node(node).endswith(("'state_dict']", '"state_dict"]')):
            words = "Module.load_from_checkpoint(path), or `trainer checkpoint export` for one file of weights"
            self._add(node, "torch.load(...)['state_dict']", f"a checkpoint is a folder here: use {words}")

    def visit_SimpleString(self, node: cst.SimpleString) -> None:
        if MODULE_NAME.fullmatch(str(node.raw_value)):
            self._add(node, node.value, "names Lightning in a string: write this package's name if that is meant")

    def visit_Annotation(self, node: cst.Annotation) -> bool:
        return not isinstance(node.annotation, cst.SimpleString)  # whose names are still bound

    def _path(self, node: cst.CSTNode) -> str:
        """Return the path in Lightning or in this package that an expression has been imported from."""
        return imported_path(self.get_metadata(QualifiedNameProvider, node, ()))

    def _report_path(self, node: cst.CSTNode, path: str) -> None:
        before, _, name = path.rpartition(".")
        owner, root = before.rpartition(".")[2], lightning_root(before)
        package = before.removeprefix(f"{root}.")
        if name == "__version__":
            self._add(node, path, "the version of this package: keep the branch for Lightning 2")
        elif name in WORDS.get(owner, {}):
            self._report_member(node, owner, owner, name)
        elif root and package in NOT_THERE:
            self._add(node, path, f"use {NOT_THERE[package]}")
        else:
            self._report_name(node, name)

    def _report_member(self, node: cst.CSTNode, kind: str, owner: str, name: str) -> None:
        if name in WORDS[kind]:
            self._add(node, f"{owner}.{name}", f"use {WORDS[kind][name]}")

    def _report_name(self, node: cst.CSTNode, name: str) -> None:
        target = NAMES.get(name, "")
        if not NAME_HERE.fullmatch(target):
            self._add(node, name, f"use {target}")

    def _add(self, node: cst.CSTNode, what: str, todo: str) -> None:
        self.findings.append(Finding(self.get_metadata(PositionProvider, node).start.line, what, todo))


def module_of(node: cst.ImportFrom) -> str:
    """Return the module that names are imported from; empty for a relative one."""
    return "" if node.relative or node.module is None else str(get_full_name_for_node(node.module))


def aliases_of(node: cst.ImportFrom) -> Sequence[cst.ImportAlias]:
    """Return the names that are imported; none of `import *`."""
    return () if isinstance(node.names, cst.ImportStar) else node.names


def imported_path(names: Iterable[Any]) -> str:
    """Return the path in Lightning or in this package among the qualified names of a node; empty if it has none."""
    paths = sorted(one.name for one in names if one.source is QualifiedNameSource.IMPORT)  # Lightning's first
    return next((path for path in paths if lightning_root(path) or path.startswith("trainer.")), "")


def _literal(node: cst.BaseExpression) -> object:
    """Return the value of a literal; an ellipsis for any other expression."""
    try:
        return literal_eval(cst.Module([]).code_for_node(node))
    except ValueError:
        return ...


class _NamesOfAClass(cst.CSTVisitor):
    """Collects the names that a class defines: methods, attributes of the class, and of `self` in its methods."""

    def __init__(self) -> None:
        self.found: set[str] = set()

    def visit_FunctionDef(self, node: cst.FunctionDef) -> None:
        self.found.add(node.name.value)

    def visit_AssignTarget(self, node: cst.AssignTarget) -> None:
        self.found.add(str(get_full_name_for_node(node.target)).removeprefix("self."))

    def visit_AnnAssign(self, node: cst.AnnAssign) -> None:
        self.found.add(str(get_full_name_for_node(node.target)).removeprefix("self."))
