"""Compare a resumed run with the one that wrote its checkpoint, and report what has changed."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from trainer.arguments import flat_names
from trainer.data.loader import BatchLoader
from trainer.errors import ConfigError, first_of, printable, shown
from trainer.runs.callback_states import callbacks_by_state_key, owners_of_states
from trainer.runs.compare_ranks import differences, listed
from trainer.runs.facts import DTYPE, GROUPS, FactGroup, Facts, facts_of_call, facts_of_data

if TYPE_CHECKING:
    from trainer.loop.run import Run, Session

log = logging.getLogger("trainer")

_THEN_AND_NOW = ("in the checkpoint", "here")
_PER_PROCESS = "on each process"
"""The words of a loader's fact that is of one process alone, so that it depends on the number of processes."""
_DTYPES = {str(one): one for one in vars(torch).values() if isinstance(one, torch.dtype)}


def allowed_problems(allow_changes: Any) -> list[str]:
    """Return a message for each problem of the argument `allow_changes` of `fit`."""
    names = allow_changes if isinstance(allow_changes, Iterable) else [allow_changes]
    if {*map(str, names)} <= GROUPS.keys():
        return []
    return [f"allow_changes={shown(allow_changes)}: give a list with some of {', '.join(GROUPS)}."]


# -- the run's own facts -----------------------------------------------------------------------------------------------


def record_data(run: Run) -> None:
    """Record the facts of the training data, of loaders that were just made."""
    assert run.train_loader is not None
    readers, size = run.strategy.processes.readers, run.train_loader.batch_size
    of_batch = {"": str(None if size is None else size * readers)}
    run.replace_changing_facts({**facts_of_data(run.train_loader, readers), "micro_batch": of_batch}, None)


def leave_out_changing_facts(run: Run) -> None:
    """Leave out of the run's facts what datasets, samplers and collate functions have changed in themselves.

    In the same process the next run begins with the changed ones, and in another one with what a data module restores.
    Looked for at the first checkpoint, and when the data have another length.
    """
    if run.train_loader is None or not run.facts:
        return
    readers = run.strategy.processes.readers
    identity = run.train_loader.identity(readers)
    if identity != run.identity_of_facts:
        run.replace_changing_facts(
            _common_of_objects(run.facts, facts_of_data(run.train_loader, readers), True), identity
        )


def _common_of_objects(facts: Facts, others: Facts, equal: bool = False) -> Facts:
    """Return the facts of objects that `others` have too; with the same texts if they have to be `equal`."""
    found = {}
    for name in (name for name, group in GROUPS.items() if group.of_objects):
        mine, there = facts.get(name, {}), others.get(name, {})
        found[name] = {fact: mine[fact] for fact in mine if fact in there and (mine[fact] == there[fact] or not equal)}
    return found


def _facts_now(run: Run, loader: BatchLoader) -> Facts:
    """Return the facts of this run, whose sampler has the attributes that a checkpoint restores."""
    recorded, numbers = run.facts.get("sampler", {}), loader.numbers().get("sampler", {})
    sampler = {fact: text for fact, text in recorded.items() if fact in numbers or fact == ""}
    return {**run.facts, "sampler": sampler, **facts_of_call(run.session.seed, run.hyperparameters())}


# -- comparing ---------------------------------------------------------------------------------------------------------


def report_changes(run: Run, checkpoint: Mapping[str, Any] | None, allowed: Collection[str]) -> None:
    """Compare the run with the checkpoint from which it was restored; log one warning with all changes. Collective.

    Without "facts" in the checkpoint, as in those of other libraries, only seed and hyperparameters are compared.

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
    saved = _facts_to_compare(run, checkpoint)
    if "dataset" in allowed:
        run.train_loader.forget_sizes()
    # What was left out is left out from now on, too: a cache that is full by now is empty in the next process.
    common = _common_of_objects(run.facts, saved)
    run.record_facts({name: facts for name, facts in common.items() if name in saved})
    now = _facts_now(run, run.train_loader)
    same_size = len(checkpoint.get("reporters", range(checkpoint["world_size"]))) == run.strategy.processes.readers
    changed = {name: lines for name, lines in _changed(saved, now, same_size).items() if name not in allowed}
    problem = _refusal(run, checkpoint, saved, now, changed, allowed) if run.strategy.processes.is_global_zero else None
    problem = run.strategy.processes.broadcast_object(problem)
    if problem is not None:
        raise ConfigError(problem)
    if changed and run.strategy.processes.is_global_zero:
        log.warning(
            "changed since %s was written:%s\nIf that is intended, %s silences this warning.",
            run.resumed_from,
            printable(_listed(changed)),
            _allowing(run.session, list(changed)),
        )


def _facts_to_compare(run: Run, checkpoint: Mapping[str, Any]) -> Facts:
    """Return the facts of a checkpoint; without those of its loaders where this run's were made for a later epoch."""
    saved: Facts = {**checkpoint.get("facts", {})}
    of_call = facts_of_call(checkpoint["seed"], checkpoint.get("hyperparameters"))
    saved = {**saved, **of_call, "callbacks": _facts_of_same_callbacks(run, checkpoint, saved.get("callbacks", {}))}
    if run.loader_epochs.same_loaders(checkpoint["progress"]["epoch"]):
        return saved
    return {name: facts for name, facts in saved.items() if not GROUPS.get(name, FactGroup("")).of_loader}


def _changed(saved: Facts, now: Facts, same_size: bool) -> dict[str, list[str]]:
    """Return a line for each difference, by the names of `GROUPS`.

    Args:
        same_size: the number of data-parallel ranks is that of the checkpoint; otherwise facts that depend on it are
            not compared.
    """
    found = {}
    for name in GROUPS:
        both = _comparable(name, saved, now, same_size) if name in saved else []
        found[name] = [f"{name}: {line.removeprefix(': ')}" for line in differences(both, _THEN_AND_NOW)]
    if saved.get("versions") != now.get("versions"):  # a fingerprint of code depends on Python and on what it calls
        found["collate_fn"] = []
    if found["loader"]:  # the other differences of the data follow from this one
        found |= {name: [] for name, group in GROUPS.items() if group.of_loader and name != "loader"}
    return {name: lines for name, lines in found.items() if lines}


def _comparable(name: str, saved: Facts, now: Facts, same_size: bool) -> list[dict[str, str]]:
    """Return the facts of a group that can be compared: of the checkpoint, and of this run.

    Without those that depend on the number of processes, or on the precision, where that is another.
    """
    group, precisions = GROUPS[name], [facts.get("settings", {}).get("precision") for facts in (saved, now)]
    both = [dict(facts.get(name, {})) for facts in (saved, now)]
    if group.of_loader and not same_size:
        both = [*map(_of_all_processes, both)]
    if precisions[0] != precisions[1]:
        both = [{fact: text for fact, text in one.items() if not fact.endswith(DTYPE)} for one in both]
    if group.needs_both:
        both = [{fact: one[fact] for fact in both[0] if fact in both[1]} for one in both]
    return both


def _of_all_processes(facts: Mapping[str, str]) -> dict[str, str]:
    """Return the description of a loader alone, unless it is of each process: numbers may depend on the world size."""
    return {fact: text for fact, text in facts.items() if fact == "" and _PER_PROCESS not in text}


def _refusal(
    run: Run,
    checkpoint: Mapping[str, Any],
    saved: Facts,
    now: Facts,
    changed: Mapping[str, list[str]],
    allowed: Collection[str],
) -> str | None:
    """Return the message for changes with which the training cannot go on; None if it can."""
    if broken := _breaking_the_epoch(run, "facts" in checkpoint, now, changed):
        return (
            f"this run differs from the one that wrote {run.resumed_from}, before the end of an epoch (after batch "
            f"{run.progress.batch} of epoch {run.progress.epoch}), so that samples would be used twice in it, or "
            f"not at all:{_listed(changed)}\nGive the same data, or resume from a checkpoint written at the end of an "
            f"epoch. To continue anyway: {_allowing(run.session, broken)}."
        )
    kinds = [facts.get("schedulers", {}).get("schedulers") for facts in (saved, now)]
    if "schedulers" in changed and kinds[0] != kinds[1]:
        return (
            f"the checkpoint {run.resumed_from} holds the states of {kinds[0]}, but configure_optimizers returned "
            f"{kinds[1]}, whose options they would replace. Use the same schedulers to resume, or "
            "load_from_checkpoint to start a new training from these weights. To continue anyway: "
            f"{_allowing(run.session, ['schedulers'])}."
        )
    cut = [] if "module" in allowed else _cut_off(saved.get("module", {}), now.get("module", {}), checkpoint["model"])
    if cut:
        return (
            f"the checkpoint {run.resumed_from} has values that would be cut off by the module's dtypes: "
            f"{first_of(cut)}. Give the module the dtypes of the checkpoint. To continue anyway: "
            f"{_allowing(run.session, ['module'])}."
        )
    return None


def _breaking_the_epoch(run: Run, is_known: bool, now: Facts, changed: Collection[str]) -> list[str]:
    """Return the changes by which samples of the epoch in progress would be used twice, or never.

    Args:
        is_known: the checkpoint has facts; without them the order was another library's.
    """
    breaking = {name for name, group in GROUPS.items() if group.breaks_epoch}
    if is_known and now.get("shuffle", {}).get("") == "shuffled":
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


def _facts_of_same_callbacks(run: Run, checkpoint: Mapping[str, Any], saved: Mapping[str, str]) -> dict[str, str]:
    """Return the options of the checkpoint's callbacks under the keys of those that go on with their states here."""
    own = {id(callback): key for key, callback in callbacks_by_state_key(run.callbacks).items()}
    keys = {key: own[id(callback)] for key, callback in owners_of_states(run.callbacks, checkpoint).owners.items()}
    split = {tuple(fact.rpartition(".")): text for fact, text in saved.items()}
    return {f"{keys[key]}.{option}": text for (key, _, option), text in split.items() if key in keys}


def _allowing(session: Session, names: list[str]) -> str:
    """Return what to type so that a run may differ in these."""
    if session.config_text is None:
        return f"fit(..., allow_changes={names})"
    option = session.argument("allow_changes", names)
    return f"{option}, or allow_changes: [{', '.join(names)}] in the configuration"


def _listed(changed: Mapping[str, list[str]]) -> str:
    """Return the changes, a line each, and what is done about them."""
    lines = [line for lines in changed.values() for line in lines]
    return "\n".join([listed(lines), *filter(None, (GROUPS[name].remark for name in changed))])


def _report_other_hyperparameters(run: Run, checkpoint: Mapping[str, Any]) -> None:
    """Log the hyperparameters that a module which is evaluated has otherwise than the checkpoint says."""
    saved, now = checkpoint.get("hyperparameters", {}), run.hyperparameters()
    both = [kept.get("module", {}) for kept in (saved, now)]
    if all(both) and run.strategy.processes.is_global_zero:  # else one of the two has no names to compare
        named = [{f"module.{name}": repr(value) for name, value in flat_names(one).items()} for one in both]
        for line in differences(named, ("in the checkpoint", "in the module, which keeps it")):
            log.warning("%s", printable(line))
