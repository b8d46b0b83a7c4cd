"""List what a person must decide in a Python file of Lightning's, each with what to do."""

from __future__ import annotations

import re
from ast import literal_eval
from collections.abc import Collection, Iterable
from typing import Any

import libcst as cst
from libcst.helpers import get_full_name_for_node
from libcst.metadata import MetadataWrapper, PositionProvider, QualifiedNameProvider, QualifiedNameSource

from trainer.cli.migrate import former_names
from trainer.cli.migrate.names import NOT_THERE, Finding, argument_words, lightning_root, mode_words, name_words
from trainer.compat.names import FORMER_HOOKS, KEEP_OUTPUTS, WORDS
from trainer.settings import ARGUMENTS

OPTIMIZER_IDX = (
    "automatic_optimization = False in __init__; in training_step take self.optimizers() apart, and for each do "
    "zero_grad, self.manual_backward(loss) and step"
)
HOOKS = {**FORMER_HOOKS, **former_names.HOOKS}
RETURNED = {
    "log": "self.log(name, value), or self.log_dict: a dict that a step returns is not logged",
    "progress_bar": "self.log(name, value, prog_bar=True): a dict that a step returns is not shown",
}
"""Keys of the dicts that steps returned -> what to use instead."""

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

OF_A_TRAINER = re.compile(r"((self|cli|(self\.)?\w*(model|module|net))\.)?\w*trainer")
"""Names of trainers: variables, and attributes of modules, callbacks and the like, but not of configurations."""

A_CHECKPOINT = re.compile(
    r"(best|last)_model_path|\.ckpt\b|(ckpt|checkpoint)s?(_?(path|file|name|filename))?s?\b(?!\(|\.(txt|json|ya?ml|csv))",
    re.IGNORECASE,
)
"""Texts in an expression for the path of a checkpoint."""
USE_OF_A_FILE = re.compile(
    r"((\w+\.)*(\w*load|open)|os\.(remove|unlink|rename|replace|link|symlink|stat|path\.(isfile|getsize))"
    r"|shutil\.(copy\w*|move)|glob|endswith|(.*\.)?(unlink|is_file|read_bytes|rename|\w*glob|endswith"
    r"|\w*upload\w*|log_artifacts?|log_model|log_asset|add_file))"
)
"""Functions that read, copy, move, remove, test or find a file."""
ONE_FILE = (
    "a checkpoint is a folder here: use ModelCheckpoint(single_file=True), or save_checkpoint(path, single_file=True), "
    "to write one file that torch.load reads"
)
CAN_BE_SET = {"accumulate_grad_batches", "callbacks"}
NOT_SET = {*ARGUMENTS, "model", "optimizers", "datamodule", "loggers", "ckpt_path"} - CAN_BE_SET
"""Attributes of a Trainer that cannot be set here."""
KEPT_IN_MEMORY = "values that are not data, such as classes and modules, are not in checkpoints: make them again there"
LOGS = re.compile(r"(\S*/)?lightning_logs(/\S*)?")
LOGS_HERE = "the runs are in runs/ here, or below the logger's save_dir and name: use trainer.log_dir, or that folder"
FIRST_ARGUMENT = {"EarlyStopping": "monitor"}

MODULE_NAME = re.compile(r"(pytorch_lightning|lightning_fabric|lightning\.(pytorch|fabric))(\.\w+)*")


def decisions(wrapper: MetadataWrapper, rewritten: Collection[tuple[int, str]]) -> list[Finding]:
    """Return what a person must decide.

    Args:
        rewritten: line and name of arguments that are rewritten.
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
        self.classes: list[set[str] | None] = [None]
        """Names that each enclosing class defines; None for a class that does not derive from Lightning's."""
        self.function = ""
        """The method of a class of Lightning's that is being read."""
        self.trainers: set[str | None] = set()
        """Names to which a Trainer is assigned."""
        self.checkpoints: set[str | None] = set()
        """Names for the path of a checkpoint, or for what has been read of one."""
        self.of_loggers: set[cst.CSTNode] = set()
        """Arguments of loggers, which may be any folder."""

    def visit_ImportFrom(self, node: cst.ImportFrom) -> None:
        module = get_full_name_for_node(node.module) if node.module else ""
        for alias in () if isinstance(node.names, cst.ImportStar) else node.names:
            if f"{module}.".startswith("trainer.") and not node.relative:  # rewritten before
                self._report_name(alias, str(module), alias.evaluated_name)

    def visit_ClassDef(self, node: cst.ClassDef) -> None:
        names = _NamesOfAClass()
        node.body.visit(names)
        ours = any(self._path(base.value) for base in node.bases)
        ours = ours or {"training_step", "configure_optimizers"} <= names.found
        self.classes.append(names.found if ours else None)

    def leave_ClassDef(self, original_node: cst.ClassDef) -> None:
        self.classes.pop()

    def visit_FunctionDef(self, node: cst.FunctionDef) -> None:
        self.checkpoints.clear()  # another function's names
        if self.classes[-1] is None:
            return
        self.function = node.name.value
        if self.function in HOOKS:
            self._add(node.name, self.function, f"use {HOOKS[self.function]}")
        for parameter in (*node.params.params, *node.params.kwonly_params):
            named = self.function, parameter.name.value
            if named in PARAMETERS:
                self._add(parameter, f"{self.function}({parameter.name.value})", f"use {PARAMETERS[named]}")

    def visit_DictElement(self, node: cst.DictElement) -> None:
        key = node.key.raw_value if isinstance(node.key, cst.SimpleString) else ""
        if key in RETURNED and self.function.endswith(("_step", "_end")):
            self._add(node, f"{self.function}: {{{key!r}: ...}}", f"use {RETURNED[key]}")

    def visit_Assign(self, node: cst.Assign) -> None:
        targets = {get_full_name_for_node(one.target) for one in node.targets}
        if isinstance(node.value, cst.Call) and self._path(node.value.func).endswith(".Trainer"):
            self.trainers |= targets
        if get_full_name_for_node(node.value) == "torch.load" or self._names_checkpoint(node.value):
            self.checkpoints |= targets

    def visit_AssignTarget(self, node: cst.AssignTarget) -> None:
        owner, _, name = (get_full_name_for_node(node.target) or "").rpartition(".")
        if (owner, name) == ("", "truncated_bptt_steps"):
            self._report_member(node, "LightningModule", "self", "truncated_bptt_steps")
        if name in NOT_SET and self._is_trainer(owner):
            self._add(node, f"{owner}.{name} = ...", "give it as an argument, of Trainer, fit or Tuner")

    def visit_Attribute(self, node: cst.Attribute) -> None:
        name, path = node.attr.value, self._path(node)
        written = get_full_name_for_node(node.value) or ""
        own = self.classes[-1]
        if path:
            self._report_path(node, path)
        elif self._is_trainer(written):
            self._report_member(node, "Trainer", written, name)
        elif written == "self" and own is not None and name not in {*own, *HOOKS}:
            self._report_member(node, "LightningModule", written, name)

    def visit_Call(self, node: cst.Call) -> None:
        called, path = get_full_name_for_node(node.func) or "", self._path(node.func)
        kind = path.rpartition(".")[2]
        given: dict[str, object] = {}
        self.of_loggers |= {arg.value for arg in node.args if kind.endswith("Logger")}
        for arg in node.args:
            name, line = arg.keyword.value if arg.keyword else "", self.get_metadata(PositionProvider, arg).start.line
            value = given.setdefault(name or FIRST_ARGUMENT.get(kind, ""), _literal(arg.value))
            words = argument_words(kind, name, value)
            if words is not None and (line, name) not in self.rewritten:
                self._add(arg, f"{kind}({name}=)", f"use {words}")
        if called.endswith("hparams.update"):
            self._add(node, called, KEPT_IN_MEMORY)
        if called.endswith(".link_arguments") and "compute_fn" in given:
            self._add(node, "link_arguments(compute_fn=)", "use a property of the data module, linked without it")
        if (words := mode_words(kind, given)) is not None:
            self._add(node, f"{kind}(monitor=)", f"use {words}")
        if called.endswith(".save_checkpoint"):
            self.checkpoints |= {get_full_name_for_node(arg.value) for arg in node.args}
        elif USE_OF_A_FILE.fullmatch(called) and self._names_checkpoint(node):
            self._add(node, f"{called.removeprefix('None.')}(...)", ONE_FILE)

    def visit_Subscript(self, node: cst.Subscript) -> None:
        read = get_full_name_for_node(node.value)
        if read in {"torch.load", *self.checkpoints} and _code(node).endswith(("'state_dict']", '"state_dict"]')):
            self._add(node, f"{read}['state_dict']", ONE_FILE)

    def visit_SimpleString(self, node: cst.SimpleString) -> None:
        if MODULE_NAME.fullmatch(str(node.raw_value)):
            words = "the name of a package in a string: write the one of this package if it is meant"
            self._add(node, node.value, words)
        self._report_folder(node, str(node.raw_value))

    def visit_FormattedStringText(self, node: cst.FormattedStringText) -> None:
        self._report_folder(node, node.value)

    def visit_Annotation(self, node: cst.Annotation) -> bool:
        return not isinstance(node.annotation, cst.SimpleString)  # whose names are still bound

    def _path(self, node: cst.CSTNode) -> str:
        """Return the path in Lightning or in this package that an expression has been imported from."""
        return imported_path(self.get_metadata(QualifiedNameProvider, node, ()))

    def _is_trainer(self, name: str) -> bool:
        return name in self.trainers or OF_A_TRAINER.fullmatch(name) is not None

    def _names_checkpoint(self, node: cst.CSTNode) -> bool:
        """Whether an expression has the path of a checkpoint in it."""
        code = _code(node)
        return bool(A_CHECKPOINT.search(code)) or not self.checkpoints.isdisjoint(re.findall(r"\w+", code))

    def _report_folder(self, node: cst.CSTNode, text: str) -> None:
        if LOGS.fullmatch(text) and node not in self.of_loggers:
            self._add(node, repr(text), LOGS_HERE)

    def _report_path(self, node: cst.CSTNode, path: str) -> None:
        before, _, name = path.rpartition(".")
        owner, root = before.rpartition(".")[2], lightning_root(before)
        package = before.removeprefix(f"{root}.")
        if name == "__version__":
            self._add(node, path, "the version of this package: keep the branch for Lightning 2")
        elif name in MEMBERS.get(owner, {}):
            self._report_member(node, owner, owner, name)
        elif root and package in NOT_THERE:
            self._add(node, path, f"use {NOT_THERE[package]}")
        else:
            self._report_name(node, before, name)

    def _report_member(self, node: cst.CSTNode, kind: str, owner: str, name: str) -> None:
        if name in MEMBERS[kind]:
            self._add(node, f"{owner}.{name}", f"use {MEMBERS[kind][name]}")

    def _report_name(self, node: cst.CSTNode, owner: str, name: str) -> None:
        if words := name_words(owner, name):
            self._add(node, name, f"use {words}")

    def _add(self, node: cst.CSTNode, what: str, todo: str) -> None:
        self.findings.append(Finding(self.get_metadata(PositionProvider, node).start.line, what, todo))


def imported_path(names: Iterable[Any]) -> str:
    """Return the path in Lightning or in this package among the qualified names of a node; empty if it has none."""
    paths = sorted(one.name for one in names if one.source is QualifiedNameSource.IMPORT)  # Lightning's first
    return next((path for path in paths if lightning_root(path) or path.startswith("trainer.")), "")


def _code(node: cst.CSTNode) -> str:
    return cst.Module([]).code_for_node(node)


def _literal(node: cst.BaseExpression) -> object:
    """Return the value of a literal; an ellipsis for any other expression."""
    try:
        return literal_eval(f"({_code(node)})")  # in brackets, because it may have several lines
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
