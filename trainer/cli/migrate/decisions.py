"""List what a person must decide in a Python file of Lightning's, each with what to do."""

from __future__ import annotations

import re
from ast import literal_eval
from collections.abc import Collection
from typing import NamedTuple

import libcst as cst
from libcst.helpers import get_full_name_for_node
from libcst.metadata import MetadataWrapper, PositionProvider, QualifiedNameProvider, QualifiedNameSource

from trainer.cli.migrate import former_names
from trainer.cli.migrate.names import NAMES, NOT_THERE, argument_words, lightning_root
from trainer.compat.names import FORMER_HOOKS, KEEP_OUTPUTS, WORDS
from trainer.metrics.log_arguments import RESERVED_NAMES

OPTIMIZER_IDX = (
    "automatic_optimization = False in __init__; in training_step take self.optimizers() apart, and for each do "
    "zero_grad, self.manual_backward(loss) and step"
)
STEPS = frozenset(
    f"{stage}_{end}" for stage in ("training", "validation", "test") for end in ("step", "step_end", "end", "epoch_end")
)
"""Hooks that returned values for the loggers and the progress bar."""
RETURNED = {
    "log": "self.log(name, value), or self.log_dict: a dict that a step returns is not logged",
    "progress_bar": "self.log(name, value, prog_bar=True): a dict that a step returns is not shown",
}
"""Keys of these returned dicts -> what to use instead."""

PARAMETERS: dict[tuple[str, str], str] = {
    ("training_step", "optimizer_idx"): OPTIMIZER_IDX,
    ("training_step", "hiddens"): "automatic_optimization = False, and a loop over the parts in training_step",
    ("backward", "optimizer_idx"): "backward(self, loss)",
    ("optimizer_step", "optimizer_idx"): "optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure)",
    ("optimizer_zero_grad", "optimizer_idx"): "optimizer_zero_grad(self, epoch, batch_idx, optimizer)",
    ("lr_scheduler_step", "optimizer_idx"): "lr_scheduler_step(self, scheduler, metric)",
    ("configure_gradient_clipping", "optimizer_idx"): (
        "configure_gradient_clipping(self, optimizer, gradient_clip_val, gradient_clip_algorithm)"
    ),
    ("on_before_optimizer_step", "optimizer_idx"): "the hook without this parameter",
    ("on_train_epoch_end", "outputs"): f"the hook without this parameter: {KEEP_OUTPUTS}",
    ("on_train_batch_start", "dataloader_idx"): "the hook without this parameter",
    ("on_train_batch_end", "dataloader_idx"): "the hook without this parameter",
}
"""A hook and a parameter of earlier versions -> what to use instead."""

MEMBERS = {kind: {**WORDS.get(kind, {}), **former_names.MEMBERS.get(kind, {})} for kind in WORDS}
"""Lightning's class -> attributes that are not here -> what to use instead."""
OF_THE_TRAINER = MEMBERS["Trainer"]
OF_A_MODULE = {name: words for name, words in MEMBERS["LightningModule"].items() if name not in FORMER_HOOKS}

MODULE_NAME = re.compile(r"(pytorch_lightning|lightning_fabric|lightning\.(pytorch|fabric))(\.\w+)*")


class Finding(NamedTuple):
    """A place that a person must decide about."""

    line: int
    what: str
    todo: str


def decisions(wrapper: MetadataWrapper, rewritten: Collection[tuple[int, str]]) -> list[Finding]:
    """Return what a person must decide.

    Args:
        rewritten: line and name of arguments that are rewritten, and line and text of annotations.
    """
    finder = _DecisionFinder(rewritten)
    wrapper.visit(finder)
    return finder.findings


class _DecisionFinder(cst.CSTVisitor):
    METADATA_DEPENDENCIES = (QualifiedNameProvider, PositionProvider)

    def __init__(self, rewritten: Collection[tuple[int, str]]) -> None:
        super().__init__()
        self.findings: list[Finding] = []
        self.rewritten = rewritten
        self.classes: list[set[str] | None] = []
        """Names that each enclosing class defines; None for a class that does not derive from Lightning's."""
        self.functions: list[str] = []
        """Names of the enclosing functions in classes of Lightning's."""
        self.steps: list[Collection[str]] = []
        """Of each enclosing class: the methods whose dicts the trainer gets."""
        self.known: set[str] = set()
        """Classes of this file that derive from one of Lightning's."""

    def visit_ImportFrom(self, node: cst.ImportFrom) -> None:
        module = get_full_name_for_node(node.module) if node.module else ""
        if not node.relative and f"{module}.".startswith("trainer.") and not isinstance(node.names, cst.ImportStar):
            for alias in node.names:  # rewritten before
                self._report_name(alias, alias.evaluated_name)

    def visit_ClassDef(self, node: cst.ClassDef) -> None:
        ours = any(self._path(base.value) or self._derived(base.value) for base in node.bases)
        own = _own_names(node)
        if ours or {"training_step", "configure_optimizers"} <= own:
            self.known.add(node.name.value)
            self.classes.append(own)
        else:
            self.classes.append(None)
        self.steps.append(_returning(node) if self.classes[-1] is not None else ())

    def leave_ClassDef(self, original_node: cst.ClassDef) -> None:
        self.classes.pop()
        self.steps.pop()

    def visit_FunctionDef(self, node: cst.FunctionDef) -> None:
        if not self.classes or self.classes[-1] is None:
            return
        name = node.name.value
        self.functions.append(name)
        if name in FORMER_HOOKS:
            self._add(node.name, name, f"use {FORMER_HOOKS[name]}")
        for parameter in (*node.params.params, *node.params.kwonly_params):
            if (name, parameter.name.value) in PARAMETERS:
                self._add(parameter, f"{name}({parameter.name.value})", f"use {PARAMETERS[name, parameter.name.value]}")

    def leave_FunctionDef(self, original_node: cst.FunctionDef) -> None:
        if self.classes and self.classes[-1] is not None:
            self.functions.pop()

    def visit_DictElement(self, node: cst.DictElement) -> None:
        self._report_key(node, _text(node.key))

    def visit_Tuple(self, node: cst.Tuple) -> None:
        if len(node.elements) == 2:  # of OrderedDict([("log", ...)])
            self._report_key(node, _text(node.elements[0].value))

    def visit_Assign(self, node: cst.Assign) -> None:
        for target in node.targets:
            if isinstance(target.target, cst.Subscript) and isinstance(target.target.value, cst.Name):
                self._report_key(node, _text(getattr(target.target.slice[0].slice, "value", None)))
            all_of_it = not isinstance(target.target, cst.Subscript)
            if self.classes and self.classes[-1] is not None and all_of_it and _is(target.target, "self.hparams"):
                self._add(node, "self.hparams = ...", "use self.save_hyperparameters(...), which fills self.hparams")
            if isinstance(target.target, cst.Name) and target.target.value == "truncated_bptt_steps" and self.classes:
                self._add(node, "truncated_bptt_steps", f"use {OF_A_MODULE['truncated_bptt_steps']}")

    def visit_Attribute(self, node: cst.Attribute) -> None:
        name, path = node.attr.value, self._path(node)
        if path is not None:
            self._report_path(node, path)
            return
        written = get_full_name_for_node(node.value) or ""
        if name in OF_THE_TRAINER and re.fullmatch(
            r"(?!(self\.)?(cfg|conf|config|args|opt|hparams)\.)(.*\.)?_?trainer", written
        ):
            self._add(node, f"{written}.{name}", f"use {OF_THE_TRAINER[name]}")
        own = self.classes[-1] if self.classes else None
        if written == "self" and own is not None and name in OF_A_MODULE and name not in own:
            self._add(node, f"self.{name}", f"use {OF_A_MODULE[name]}")

    def visit_Call(self, node: cst.Call) -> None:
        called = get_full_name_for_node(node.func) or ""
        if called.rpartition(".")[2] in ("dict", "OrderedDict") or called.endswith(".update"):
            for arg in node.args:
                self._report_key(arg, arg.keyword.value if arg.keyword else "")
        first = node.args[0].value if called.endswith(".log") and node.args else None
        if isinstance(first, cst.SimpleString) and first.evaluated_value in RESERVED_NAMES:
            instead = "another name: values have their step and epoch already, by which loggers and plots order them"
            self._add(node, f"{called}({first.value})", f"use {instead}")
        if called.endswith(".link_arguments"):
            instead = "a reference in the configuration, ${data.NAME}, to a value in it or an attribute of the object"
            self._add(node, "link_arguments", f"use {instead}")
        path = self._path(node.func)
        kind = path.rpartition(".")[2] if path else ""
        for arg in node.args if path else ():
            name, line = arg.keyword.value if arg.keyword else "", self.get_metadata(PositionProvider, arg).start.line
            words = argument_words(kind, name, _literal(arg.value))
            if words is not None and (line, name) not in self.rewritten:
                self._add(arg, f"{kind}({name}=)", f"use {words}")

    def visit_Subscript(self, node: cst.Subscript) -> None:
        index = node.slice[0].slice
        if isinstance(node.value, cst.Call) and _is(node.value.func, "torch.load") and isinstance(index, cst.Index):
            key = index.value.raw_value if isinstance(index.value, cst.SimpleString) else ""
            if key in ("state_dict", "hyper_parameters", "optimizer_states"):
                words = "Module.load_from_checkpoint(path), or `trainer checkpoint export` for one file of weights"
                self._add(node, f"torch.load(...)[{key!r}]", f"a checkpoint is a folder here: use {words}")

    def visit_SimpleString(self, node: cst.SimpleString) -> None:
        line = self.get_metadata(PositionProvider, node).start.line
        if MODULE_NAME.fullmatch(node.raw_value) and (line, node.value) not in self.rewritten:
            self._add(
                node, node.value, "the name of a package in a string: write the one of this package if it is meant"
            )

    def _report_key(self, node: cst.CSTNode, key: str) -> None:
        """Report a key of a dict that a step returns, or may return."""
        if key in RETURNED and self.functions and self.steps and self.functions[-1] in self.steps[-1]:
            self._add(node, f"{self.functions[-1]}: {{{key!r}: ...}}", f"use {RETURNED[key]}")

    def _path(self, node: cst.CSTNode) -> str | None:
        """Return the path in Lightning or in this package that an expression has been imported from."""
        for one in self.get_metadata(QualifiedNameProvider, node, ()):
            ours = lightning_root(one.name) or one.name.startswith("trainer.")
            if one.source is QualifiedNameSource.IMPORT and ours:
                path: str = one.name
                return path
        return None

    def _derived(self, base: cst.BaseExpression) -> bool:
        return isinstance(base, cst.Name) and base.value in self.known

    def _report_path(self, node: cst.CSTNode, path: str) -> None:
        before, _, name = path.rpartition(".")
        owner = before.rpartition(".")[2]
        if name == "__version__":
            self._add(node, path, "the version of this package: keep the branch for Lightning 2")
        elif name in MEMBERS.get(owner, {}):
            self._add(node, f"{owner}.{name}", f"use {MEMBERS[owner][name]}")
        elif (root := lightning_root(before)) and (package := before.removeprefix(f"{root}.")) in NOT_THERE:
            self._add(node, path, f"use {NOT_THERE[package]}")
        else:
            self._report_name(node, name)

    def _report_name(self, node: cst.CSTNode, name: str) -> None:
        target = NAMES.get(name, "")
        if target and (" " in target or ":" not in target):
            self._add(node, name, f"use {target}")

    def _add(self, node: cst.CSTNode, what: str, todo: str) -> None:
        self.findings.append(Finding(self.get_metadata(PositionProvider, node).start.line, what, todo))


def _literal(node: cst.BaseExpression) -> object:
    """Return the value of a literal; an ellipsis for any other expression."""
    try:
        return literal_eval(cst.Module([]).code_for_node(node))
    except ValueError:
        return ...


def _own_names(node: cst.ClassDef) -> set[str]:
    """Return the names that a class defines: methods, attributes of the class, and of `self` in its methods."""
    names = _Own()
    node.body.visit(names)
    return names.found


def _returning(node: cst.ClassDef) -> set[str]:
    """Return the steps of a class, and the methods whose values a step returns as they are."""
    returns = _Returns()
    node.body.visit(returns)
    found = set(STEPS)
    while more := {called for name in found for called in returns.found.get(name, ())} - found:
        found |= more
    return found


class _Returns(cst.CSTVisitor):
    """Collects which methods of its own each method returns the value of, also by way of a variable."""

    def __init__(self) -> None:
        self.found: dict[str, set[str]] = {}
        self._functions: list[str] = []
        self._variables: dict[str, str] = {}
        """Variable -> the method whose value it has."""

    def visit_FunctionDef(self, node: cst.FunctionDef) -> None:
        self._functions.append(node.name.value)
        self._variables = {}

    def leave_FunctionDef(self, original_node: cst.FunctionDef) -> None:
        self._functions.pop()

    def visit_Assign(self, node: cst.Assign) -> None:
        method = _method_called(node.value)
        for target in node.targets if method else ():
            self._variables[get_full_name_for_node(target.target) or ""] = method

    def visit_Return(self, node: cst.Return) -> None:
        if node.value is not None and self._functions:
            written = get_full_name_for_node(node.value) if isinstance(node.value, cst.Name) else None
            method = _method_called(node.value) or self._variables.get(written or "", "")
            self.found.setdefault(self._functions[-1], set()).add(method)


def _method_called(node: cst.BaseExpression) -> str:
    """Return the name of a method that an expression calls on `self`; empty for others."""
    called = get_full_name_for_node(node.func) if isinstance(node, cst.Call) else None
    return (called or "").removeprefix("self.") if (called or "").startswith("self.") else ""


def _text(node: cst.CSTNode | None) -> str:
    return str(node.raw_value) if isinstance(node, cst.SimpleString) else ""


class _Own(cst.CSTVisitor):
    def __init__(self) -> None:
        self.found: set[str] = set()

    def visit_FunctionDef(self, node: cst.FunctionDef) -> None:
        self.found.add(node.name.value)

    def visit_AssignTarget(self, node: cst.AssignTarget) -> None:
        name = get_full_name_for_node(node.target) or ""
        self.found.add(name.removeprefix("self."))

    def visit_AnnAssign(self, node: cst.AnnAssign) -> None:
        name = get_full_name_for_node(node.target) or ""
        self.found.add(name.removeprefix("self."))


def _is(node: cst.CSTNode, written: str) -> bool:
    return get_full_name_for_node(node) == written
