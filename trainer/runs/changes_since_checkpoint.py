"""Compare a resumed run with the one that wrote its checkpoint, and report the changes."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch

from trainer.arguments import flat_names
from trainer.data.loader import BatchLoader
from trainer.errors import ConfigError, first_of, printable, shown
from trainer.runs.callback_states import keys_here
from trainer.runs.compare_ranks import differences, listed
from trainer.runs.facts import BREAKS_EPOCH, DTYPE, GROUPS, NEED_BOTH, OF_LOADER, REMARKS, Facts, facts_of_call

if TYPE_CHECKING:
    from trainer.loop.run import Run, Session

log = logging.getLogger("trainer")

_THEN_AND_NOW = ("in the checkpoint", "here")
_PER_PROCESS = "on each process"
"""Words in a loader's fact that describes one process, so that it depends on the number of processes."""
_DTYPES = {str(one): one for one in vars(torch).values() if isinstance(one, torch.dtype)}


def allowed_problems(allow_changes: Any) -> list[str]:
    """Return a message for each problem of the argument `allow_changes` of `fit`."""
    names = allow_changes if isinstance(allow_changes, Iterable) else [allow_changes]
    if {*map(str, names)} <= {*GROUPS}:
        return []
    return [f"allow_changes={shown(allow_changes)}: give a list with some of {', '.join(GROUPS)}."]


def report_changes(run: Run, checkpoint: Mapping[str, Any] | None, allowed: Collection[str]) -> None:
    """Compare the run with the checkpoint from which it was restored; log one warning with all changes. Collective.

    Raises:
        ConfigError: samples would be used twice in an epoch, or never; a scheduler is of another class; or a buffer or
            parameter cannot hold the checkpoint's values. The names in `allowed` are exempt.
    """
    if checkpoint is None:
        return
    if run.stage != "fit":
        _report_other_hyperparameters(run, checkpoint)
        return
    assert run.train_loader is not None
    if "dataset" in allowed:
        run.train_loader.forget_sizes()
    saved = _facts_to_compare(run, checkpoint)
    run.facts.leave_out_missing(saved)
    now = _facts_now(run, run.train_loader)
    same_size = len(checkpoint["reporters"]) == run.strategy.processes.readers
    changed = {name: lines for name, lines in _changed(saved, now, same_size).items() if name not in allowed}
    problem = run.strategy.processes.broadcast_object(_refusal(run, checkpoint, saved, now, changed, allowed))
    if problem is not None:
        raise ConfigError(problem)
    if changed and run.strategy.processes.is_global_zero:
        log.warning(
            "changed since %s was written:%s\nIf that is intended, %s silences this warning.",
            run.origin,
            printable(_listed(changed)),
            _allowing(run.session, list(changed)),
        )


def _facts_to_compare(run: Run, checkpoint: Mapping[str, Any]) -> Facts:
    """Return the facts of a checkpoint, without its loaders if this run's loaders were made for a later epoch."""
    of_call = facts_of_call(checkpoint["seed"], checkpoint["hyperparameters"])
    saved: Facts = {**checkpoint["facts"], **of_call, "callbacks": _facts_of_same_callbacks(run, checkpoint)}
    if run.loader_epochs.same_loaders(checkpoint["progress"]["epoch"]):
        return saved
    return {name: facts for name, facts in saved.items() if name not in OF_LOADER}


def _facts_of_same_callbacks(run: Run, checkpoint: Mapping[str, Any]) -> dict[str, str]:
    """Return the options of the checkpoint's callbacks under the keys of the callbacks that take their states here."""
    keys, facts = keys_here(run.callbacks, checkpoint), {}
    for fact, text in checkpoint["facts"].get("callbacks", {}).items():
        key, _, option = fact.rpartition(".")
        if key in keys:
            facts[f"{keys[key]}.{option}"] = text
    return facts


def _facts_now(run: Run, loader: BatchLoader) -> Facts:
    """Return the facts of this run, without the attributes of its sampler that the checkpoint has restored."""
    facts, numbers = run.facts.kept, loader.numbers().get("sampler", {})
    sampler = {fact: text for fact, text in facts.get("sampler", {}).items() if fact in {"", *numbers}}
    return {**facts, "sampler": sampler, **facts_of_call(run.session.seed, run.hyperparameters())}


def _changed(saved: Facts, now: Facts, same_size: bool) -> dict[str, list[str]]:
    """Return a line for each difference, by the names of `GROUPS`.

    Args:
        same_size: the number of data-parallel ranks is the checkpoint's.
    """
    same_precision = saved.get("settings", {}).get("precision") == now["settings"]["precision"]
    changed = {}
    for name in GROUPS:
        of_any_size = not same_size and name in OF_LOADER
        both = [_comparable(facts.get(name, {}), of_any_size, same_precision) for facts in (saved, now)]
        lines = differences(both, _THEN_AND_NOW, name in NEED_BOTH)
        if lines and name in saved:
            changed[name] = [f"{name}: {line.removeprefix(': ')}" for line in lines]
    if saved.get("versions") != now["versions"]:  # a fingerprint of code depends on Python and on what it calls
        changed.pop("collate_fn", None)
    if "loader" in changed:  # the other differences of the data follow from it
        changed = {name: lines for name, lines in changed.items() if name == "loader" or name not in OF_LOADER}
    return changed


def _comparable(facts: Mapping[str, str], of_any_size: bool, with_dtypes: bool) -> dict[str, str]:
    """Return the facts that can be compared.

    Args:
        of_any_size: without facts that depend on the number of processes, as further numbers of a loader may.
        with_dtypes: with the dtypes, which follow from the precision.
    """
    found = dict(facts)
    if of_any_size:
        found = {fact: text for fact, text in found.items() if fact == "" and _PER_PROCESS not in text}
    if not with_dtypes:
        found = {fact: text for fact, text in found.items() if not fact.endswith(DTYPE)}
    return found


def _refusal(
    run: Run,
    checkpoint: Mapping[str, Any],
    saved: Facts,
    now: Facts,
    changed: Mapping[str, list[str]],
    allowed: Collection[str],
) -> str | None:
    """Return the message for changes that prevent a resume; None if the training can continue."""
    if broken := _breaking_the_epoch(run, now, changed):
        return (
            f"{run.origin} was written inside an epoch (after batch {run.progress.batch} of epoch "
            f"{run.progress.epoch}), and with these changes its samples would be used twice or never:{_listed(changed)}"
            f"\nGive the same data, or a checkpoint of an epoch's end. Or allow it: {_allowing(run.session, broken)}."
        )
    kinds = [facts.get("schedulers", {}).get("schedulers") for facts in (saved, now)]
    if "schedulers" in changed and kinds[0] != kinds[1]:
        return (
            f"{run.origin} has the states of {kinds[0]}, which would replace the options of {kinds[1]} from "
            "configure_optimizers. Use the same schedulers, or load_from_checkpoint to take the weights alone. "
            f"Or allow it: {_allowing(run.session, ['schedulers'])}."
        )
    cut = [] if "module" in allowed else _cut_off(saved.get("module", {}), now.get("module", {}), checkpoint["model"])
    if cut:
        return (
            f"values of {run.origin} would lose precision in the module's dtypes: {first_of(cut)}. "
            f"Give the module the checkpoint's dtypes. Or allow it: {_allowing(run.session, ['module'])}."
        )
    return None


def _breaking_the_epoch(run: Run, now: Facts, changed: Collection[str]) -> list[str]:
    """Return the changes that would use samples of the epoch in progress twice, or never."""
    breaking = {*BREAKS_EPOCH}
    if now.get("shuffle", {}).get("") == "shuffled":
        breaking.add("seed")
    if _PER_PROCESS in now.get("batch_size", {}).get("", ""):  # the position is a number of batches
        breaking.add("batch_size")
    broken = [name for name in changed if name in breaking]
    is_over = run.progress.batch == run.num_training_batches and "settings" not in changed
    if run.progress.batch == 0 or (is_over and {*broken} <= {"shuffle", "seed"}):
        return []
    return broken


def _cut_off(saved: Mapping[str, str], now: Mapping[str, str], weights: Collection[str]) -> list[str]:
    """Return the weights whose dtype here cannot hold numbers of the kind in the checkpoint."""
    cut = []
    for name in weights:
        then, here = (_DTYPES.get(facts.get(f"{name}{DTYPE}", "")) for facts in (saved, now))
        if then and here and not torch.can_cast(then, here):
            cut.append(f"{name} ({then} in the checkpoint, and {here} here)")
    return cut


def _allowing(session: Session, names: list[str]) -> str:
    """Return the argument that lets a run differ in these."""
    if session.config_text is None:
        return f"fit(..., allow_changes={names})"
    option = session.argument("allow_changes", names)
    return f"{option}, or allow_changes: [{', '.join(names)}] in the configuration"


def _listed(changed: Mapping[str, list[str]]) -> str:
    """Return the changes, a line each, and what the run does about them."""
    lines = [*chain.from_iterable(changed.values())]
    return "\n".join([listed(lines), *(REMARKS[name] for name in changed if name in REMARKS)])


def _report_other_hyperparameters(run: Run, checkpoint: Mapping[str, Any]) -> None:
    """Log the hyperparameters of an evaluated module that differ from the checkpoint's."""
    stored = checkpoint["hyperparameters"], run.hyperparameters()
    # With the paths, unlike facts: another vocabulary gives other results.
    both = [{name: repr(value) for name, value in flat_names(kept.get("module", {})).items()} for kept in stored]
    if all(both) and run.strategy.processes.is_global_zero:  # else there is nothing to compare
        for line in differences(both, ("in the checkpoint", "in the module, which keeps it")):
            log.warning("module.%s", printable(line))
