"""Read files and command line into one tree, and check the names in it, without torch, whose import takes seconds."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

from trainer.config.classes import extend_sys_path
from trainer.config.files import read_file
from trainer.config.references import with_references
from trainer.config.tree import COMMAND_LINE, KEYS, Diagnostics, Node, canonical, entries, from_override, merge
from trainer.errors import did_you_mean, first_of
from trainer.names.misses import is_default, words_for
from trainer.settings import ARGUMENTS

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


def read(files: Sequence[str], overrides: Sequence[tuple[str, Node]], findings: Diagnostics) -> Node:
    """Lay the files over each other in order, and the command line over them; return the tree in canonical form.

    Args:
        overrides: dotted names and values, such as `("trainer.max_epochs", Node(3, COMMAND_LINE))`.
        findings: problems found before, reported with those found here.

    Raises:
        ConfigError: lists the problems of names and references, each with file and line.
    """
    tree = merged(files, overrides, findings)
    tree = with_references(tree, findings, [name for name, _ in overrides])
    given = entries(tree)
    module = given.get("module", Node(None, tree.source))
    if module.value is None and not findings.problems:
        words = "Add 'module: package.module.Class' (or file.py:Class) to the file, or --module NAME."
        findings.add(module.source, f"there is no module. {words}")
    if given.get("lr_scheduler") and "optimizer" not in given:
        words = "lr_scheduler: there is no optimizer in the configuration. Add optimizer: AdamW."
        findings.add(given["lr_scheduler"].source, words)
    findings.report()
    return tree


def merged(files: Sequence[str], overrides: Sequence[tuple[str, Node]], findings: Diagnostics) -> Node:
    """Return the configuration in canonical form, with its references unchanged.

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


def _check_names(tree: Node, findings: Diagnostics) -> None:
    """Check the names of a configuration's keys, and of the trainer's arguments."""
    given = entries(tree)
    for key in sorted(given.keys() - {*KEYS}, key=str):
        close = did_you_mean(str(key), KEYS, OTHER_KEYS)
        hint = f" Write it under trainer: (--trainer.{key})." if key in ARGUMENTS else close
        words = f"unknown key {key!r}.{hint} Top-level keys: {', '.join(KEYS)}."
        findings.add(given[key].source, words)
    for name, child in entries(given.get("trainer")).items():
        if name not in ARGUMENTS and not is_default("Trainer", name, child.value):
            findings.add(child.source, no_argument("trainer", name, ARGUMENTS))


def no_argument(who: str, name: object, known: Iterable[str]) -> str:
    """Return the problem of an argument that does not exist, with a suggestion; without a close one, those that do."""
    known = sorted(known)
    equivalents = words_for("Trainer()", [str(name)]) if who == "trainer" else None
    hint = did_you_mean(str(name), [*known, "class_path", "init_args"], equivalents)
    takes = f" It takes: {first_of(known, 12) or 'nothing'}."
    return f"{who} has no argument {name!r}.{hint or takes}"
