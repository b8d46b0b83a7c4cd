"""Compare a resumed run with the one that wrote its checkpoint, and report what has changed."""

from __future__ import annotations

import logging
import platform
from collections.abc import Collection, Mapping
from functools import partial
from types import FunctionType, MethodType
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer

from trainer import __version__
from trainer.callback import AccumulationSchedule
from trainer.data.fingerprints import functions_of, globals_fingerprints, is_plain, read_values_fingerprints
from trainer.data.loader import BatchLoader
from trainer.errors import ConfigError, did_you_mean, first_of, printable, shown
from trainer.hyperparameters import flat_names, with_paths
from trainer.model.reachable import attributes
from trainer.module import TrainModule
from trainer.optimizers import SchedulerConfig
from trainer.precision import Precision
from trainer.runs.agreement_at_start import describe_layer, optimizer_facts
from trainer.runs.callback_states import callbacks_by_state_key, owners_of_states
from trainer.runs.compare_ranks import as_text

if TYPE_CHECKING:
    from trainer.loop.run import Run

log = logging.getLogger("trainer")

CHANGES = {
    "dataset": "the samples of the training dataset",
    "loader": "the kind of the training loader",
    "sampler": "the sampler of the training loader",
    "shuffle": "the order of the samples",
    "batch_size": "the samples of a batch, over all processes",
    "drop_last": "what happens to the last, shorter batch",
    "contents": "samples that the training dataset keeps in memory",
    "collate_fn": "the function that makes a batch of samples",
    "seed": "the Trainer's seed",
    "optimizers": "the optimizers' options",
    "schedulers": "the schedulers' options",
    "module": "the layers, which parameters are frozen, and the dtypes of parameters and buffers",
    "hyperparameters": "the hyperparameters of the module and the data module",
    "settings": "arguments of the Trainer that change a step",
    "callbacks": "the options of callbacks",
    "versions": "torch, Python and this package",
}
"""The names that `fit(..., allow_changes=[...])` takes, with their meaning."""

_BREAK_AN_EPOCH = ("dataset", "loader", "sampler", "shuffle")
"""Changes that give the rest of an epoch other samples than those that are still unused."""

_OF_LOADERS = (*_BREAK_AN_EPOCH, "batch_size", "drop_last", "contents", "collate_fn")

_OF_OBJECTS = ("dataset", "sampler", "contents", "collate_fn")
"""Facts of objects that may keep counters, caches and the like in themselves, or grow while training."""

_SETTINGS = (
    "accumulate_grad_batches",
    "gradient_clip_val",
    "gradient_clip_algorithm",
    "limit_train_batches",
    "overfit_batches",
    "seed_per_sample",
)
_LEFT_OUT = frozenset({"parameters", "initial_lr", "base_lrs", "last_epoch", "optimizer"})
"""Options that derive from others, that change while training, or that are compared where they are restored."""
_OF_THE_CODE = (" lr_lambdas", " lr_lambda", ".lr_lambdas", ", interval", ", frequency", ", monitor")
"""Suffixes of the options that a checkpoint does not restore: the code's values are used."""
_PARAMETERS = ", parameters"
"""Suffix of the facts that are names of the parameters in a group of several."""
_DTYPE = ", dtype"
"""Suffix of the facts that are dtypes of parameters and buffers."""
_DTYPES = {str(one): one for one in vars(torch).values() if isinstance(one, torch.dtype)}
_OTHER_SPLIT = (
    "\nAfter another random_split, samples of the validation are trained on. Seed it: "
    "random_split(..., generator=torch.Generator().manual_seed(0))."
)

_MOST_LINES, _MOST_CHARACTERS = 12, 100

Facts = dict[str, dict[str, str]]
"""Descriptions that are equal if nothing has changed: by the names of `CHANGES`, then by option or layer."""


def allowed_problems(allow_changes: Any) -> list[str]:
    """Return a message for each problem of the argument `allow_changes` of `fit`."""
    if isinstance(allow_changes, (list, tuple, set, frozenset)):
        wrong = [name for name in allow_changes if not isinstance(name, str) or name not in CHANGES]
        hints = "".join(did_you_mean(name, CHANGES) for name in wrong[:1] if isinstance(name, str))
        return [f"allow_changes={shown(wrong)}: give names out of {', '.join(CHANGES)}.{hints}"] if wrong else []
    return [f"allow_changes={shown(allow_changes)}: give a list of names, such as ['dataset']."]


# -- what is compared --------------------------------------------------------------------------------------------------


def facts_of_module(module: TrainModule, precision: Precision) -> dict[str, str]:
    """Return the layers with their options, the frozen parameters, and the dtypes of parameters and buffers.

    Call it before a strategy wraps the module. A dtype is the one after `precision.convert_module`.
    """
    layers = {name or type(module).__name__: describe_layer(layer) for name, layer in module.named_modules()}
    frozen = {f"{name}, frozen": "yes" for name, p in module.named_parameters() if not p.requires_grad}
    tensors, dtype_of = (*module.named_parameters(), *module.named_buffers()), precision.stored_dtypes(module)
    return layers | frozen | {f"{name}{_DTYPE}": str(dtype_of(one)) for name, one in tensors}


def facts_of_training(run: Run, optimizers: list[Optimizer], schedulers: list[SchedulerConfig]) -> Facts:
    """Return the facts of optimizers and settings, before anything is restored from a checkpoint.

    Args:
        optimizers: the user's, before the strategy prepares them.
    """
    kinds = {type(config.scheduler).__name__ for config in schedulers}
    of_optimizers: dict[str, str] = {}
    of_schedulers: dict[str, str] = {}
    for name, value in optimizer_facts(run.module, optimizers, schedulers):
        owner, _, option = name.rpartition(", ")
        own_name = option.rpartition(".")[2]  # of a scheduler inside of another
        if own_name == "parameters" and ", group " in owner and isinstance(value, list):
            of_optimizers[name] = as_text(sorted(map(str, value)))
        if own_name not in _LEFT_OUT and not own_name.startswith("_"):
            is_scheduler = name == "schedulers" or owner.split(" number ")[0] in kinds
            (of_schedulers if is_scheduler else of_optimizers)[name] = as_text(value)
        if own_name in ("lr_lambdas", "lr_lambda"):
            functions = value if isinstance(value, list) else [value]
            of_schedulers |= {
                f"{owner}, {what}": text for what, text in _facts_of_functions(functions, own_name).items()
            }
    return {
        "optimizers": of_optimizers,
        "schedulers": of_schedulers,
        "settings": {
            **{name: as_text(getattr(run.settings, name)) for name in _SETTINGS},
            "precision": run.strategy.precision.name,
            "schedule of accumulation": as_text(
                [c.scheduling for c in run.callbacks if isinstance(c, AccumulationSchedule)]
            ),
        },
        # What a ModelCheckpoint is stands in its key.
        "callbacks": {
            f"{key}.{name}": as_text(getattr(callback, name))
            for key, callback in callbacks_by_state_key(run.callbacks).items()
            for name in callback.agree_on or ()
            if callback not in run.checkpoint_callbacks
        },
        "versions": {
            "torch": str(torch.__version__),
            "Python": platform.python_version(),
            "exact-trainer": __version__,
        },
    }


def record_data(run: Run) -> None:
    """Record the facts of the training data, of loaders that were just made."""
    assert run.train_loader is not None
    readers, size = run.strategy.processes.readers, run.train_loader.batch_size
    of_batch = {"": str(None if size is None else size * readers)}
    run.replace_changing_facts({**_facts_of_data(run.train_loader, readers), "micro_batch": of_batch}, None)


def _facts_of_functions(functions: list[Any], option: str) -> dict[str, str]:
    """Return what a schedule's functions read, and the attributes of objects that are called instead of a function."""
    read = globals_fingerprints(one for function in functions for one in functions_of(function))
    read |= {what: text for function in functions for what, text in read_values_fingerprints(function).items()}
    found = {f"{what} in {option}": text for what, text in read.items()}
    for one in functions:
        if not isinstance(one, (FunctionType, MethodType, partial)):  # torch restores these attributes
            options = {name: repr(value) for name, value in attributes(one).items() if is_plain(value)}
            found |= {f"{type(one).__name__}.{name}": text for name, text in options.items()}
    return found


def _facts_of_data(loader: BatchLoader, readers: int) -> Facts:
    described = {name: {"": words} for name, words in loader.identity(readers).items()}
    numbers = loader.numbers()
    return {name: described.get(name, {}) | numbers.get(name, {}) for name in {**described, **numbers}}


def _facts_of_call(seed: int | None, hyperparameters: Mapping[str, Any] | None) -> Facts:
    """Return the seed and the hyperparameters, by names such as `lr` and, of the data module, `data, lr`."""
    facts: Facts = {"seed": {"": str(seed)}}
    if hyperparameters is not None:
        facts["hyperparameters"] = {
            name if owner == "module" else f"{owner}, {name}": as_text(value)
            for owner in ("module", "data")
            for name, value in flat_names(with_paths(hyperparameters, owner)).items()
        }
    return facts


def leave_out_changing_facts(run: Run) -> None:
    """Leave out of the run's facts what datasets, samplers and collate functions have changed in themselves.

    In the same process the next run begins with the changed ones, and in another one with what a data module restores.
    Looked for at the first checkpoint, and when the data have another length.
    """
    if run.train_loader is None or not run.facts:
        return
    identity = run.train_loader.identity(run.strategy.processes.readers)
    if identity == run.identity_of_facts:
        return
    now = _facts_of_data(run.train_loader, run.strategy.processes.readers)
    run.replace_changing_facts(
        {
            name: {fact: text for fact, text in run.facts.get(name, {}).items() if now.get(name, {}).get(fact) == text}
            for name in _OF_OBJECTS
        },
        identity,
    )


# -- comparing ---------------------------------------------------------------------------------------------------------


def report_changes(run: Run, checkpoint: Mapping[str, Any] | None, allowed: Collection[str]) -> None:
    """Compare the run with the checkpoint from which it was restored; log one warning with all changes. Collective.

    Without "facts" in the checkpoint, as in those of earlier versions, only seed and hyperparameters are compared.

    Raises:
        ConfigError: samples would be used twice in an epoch, or never; a scheduler is of another class; or a buffer or
            parameter cannot hold the checkpoint's values. The names in `allowed` are exempt.
    """
    if run.stage != "fit" and checkpoint is not None:
        _report_other_hyperparameters(run, checkpoint)
    if run.stage != "fit" or checkpoint is None:
        return
    saved = (checkpoint.get("facts") or {}) | _facts_of_call(checkpoint["seed"], checkpoint.get("hyperparameters"))
    saved |= {"callbacks": _facts_of_same_callbacks(run, checkpoint, saved.get("callbacks"))}
    same_size = len(checkpoint.get("reporters", range(checkpoint["world_size"]))) == run.strategy.processes.readers
    assert run.train_loader is not None
    if "dataset" in allowed:
        run.train_loader.forget_sizes()
    if run.epoch_of_loaders(checkpoint["progress"]["epoch"]) != run.epoch_of_loaders(run.progress.epoch):
        allowed = [*allowed, *_OF_LOADERS]  # these loaders were made for a later epoch
    else:
        # What was left out is left out from now on, too: a cache that is full by now is empty in the next process.
        run.record_facts(
            {
                name: {fact: text for fact, text in run.facts.get(name, {}).items() if fact in saved[name]}
                for name in _OF_OBJECTS
                if isinstance(saved.get(name), dict)
            }
        )
    now = _facts_now(run, run.train_loader)
    changed = {name: lines for name, lines in _changed(now, saved, same_size).items() if name not in allowed}
    problem = None
    if run.strategy.processes.is_global_zero:
        # Without facts the order was another library's, or an earlier version's.
        draws = "facts" in checkpoint and now.get("shuffle", {}).get("") == "shuffled"
        broken = _breaking_the_epoch(run, changed, now, draws)
        shown = _listed(changed)
        if broken:
            problem = (
                f"this run differs from the one that wrote {run.resumed_from}, before the end of an epoch (after batch "
                f"{run.progress.batch} of epoch {run.progress.epoch}), so that samples would be used twice in it, or "
                f"not at all:\n  {shown}\nGive the same data, or resume from a checkpoint written at the end of an "
                f"epoch. To continue anyway: {_allowing(run, broken)}."
            )
        elif kinds := _replaced_schedulers(changed, now, saved):
            problem = (
                f"the checkpoint {run.resumed_from} holds the states of {kinds[0]}, but configure_optimizers returned "
                f"{kinds[1]}, whose options they would replace. Use the same schedulers to resume, or "
                "load_from_checkpoint to start a new training from these weights. To continue anyway: "
                f"{_allowing(run, ['schedulers'])}."
            )
        elif cut := _cut_off(changed, now, saved, checkpoint["model"]):
            problem = (
                f"the checkpoint {run.resumed_from} has values that {cut} To continue anyway: "
                f"{_allowing(run, ['module'])}."
            )
        elif changed:
            log.warning(
                "changed since %s was written:\n  %s\nIf that is intended, %s silences this warning.",
                run.resumed_from,
                shown,
                _allowing(run, list(changed)),
            )
    problem = run.strategy.processes.broadcast_object(problem)
    if problem is not None:
        raise ConfigError(problem)


def _listed(changed: Mapping[str, list[str]]) -> str:
    """Return the changes, a line each, and advice where they may come from another random split."""
    listed = [f"{name}: {line}" for name, lines in changed.items() for line in lines]
    shown = printable("\n  ".join([*listed[:_MOST_LINES], *(["and more"] if len(listed) > _MOST_LINES else [])]))
    return shown + _OTHER_SPLIT * any(line.startswith("indices:") for line in changed.get("dataset", ()))


def _report_other_hyperparameters(run: Run, checkpoint: Mapping[str, Any]) -> None:
    """Log the hyperparameters that a module which is evaluated has otherwise than the checkpoint says."""
    both = checkpoint.get("hyperparameters", {}).get("module", {}), run.hyperparameters().get("module", {})
    saved, now = map(flat_names, both)
    if all(both) and run.strategy.processes.is_global_zero:  # else one of the two has no names to compare
        for name in (
            name for name in {**saved, **now} if (name in saved, saved.get(name)) != (name in now, now.get(name))
        ):
            values = [repr(one[name]) if name in one else "nothing" for one in (saved, now)]
            words = f"module.{name}: {values[0]} in the checkpoint; the module keeps its own, {values[1]}"
            log.warning("%s", printable(words))


def _facts_now(run: Run, loader: BatchLoader) -> dict[str, Any]:
    """Return the facts of this run, whose sampler has the attributes that a checkpoint restores."""
    restored = run.facts.get("sampler", {}).keys() - loader.numbers().get("sampler", {}).keys() - {""}
    sampler = {fact: text for fact, text in run.facts.get("sampler", {}).items() if fact not in restored}
    return {**run.facts, "sampler": sampler, **_facts_of_call(run.session.seed, run.hyperparameters())}


def _breaking_the_epoch(run: Run, changed: Collection[str], now: Mapping[str, Any], draws: bool) -> list[str]:
    """Return the changes by which samples of the epoch in progress would be used twice, or never.

    Args:
        draws: whether the order of the samples depends on the seed.
    """
    breaking = (*_BREAK_AN_EPOCH, *["batch_size"] * _counts_batches(now), *["seed"] * draws)
    broken = [name for name in breaking if name in changed] if run.progress.batch > 0 else []
    of_order = {*broken} <= {"shuffle", "seed"} and "settings" not in changed
    return [] if of_order and run.progress.batch == run.num_training_batches else broken  # it has no batch left


def _facts_of_same_callbacks(run: Run, checkpoint: Mapping[str, Any], saved: Any) -> dict[str, str]:
    """Return the options of the checkpoint's callbacks under the keys of those that go on with their states here."""
    own = {id(callback): key for key, callback in callbacks_by_state_key(run.callbacks).items()}
    keys = {key: own[id(callback)] for key, callback in owners_of_states(run.callbacks, checkpoint).owners.items()}
    split = {tuple(fact.rpartition(".")): text for fact, text in (saved if isinstance(saved, dict) else {}).items()}
    return {f"{keys[key]}.{option}": text for (key, _, option), text in split.items() if key in keys}


def _allowing(run: Run, names: list[str]) -> str:
    """Return what to type so that a run may differ in these."""
    if run.session.config_text is None:
        return f"fit(..., allow_changes={names})"
    option = run.session.argument("allow_changes", names)
    return f"{option}, or allow_changes: [{', '.join(names)}] in the configuration"


def _changed(now: Mapping[str, Mapping[str, str]], saved: Mapping[str, Any], same_size: bool) -> dict[str, list[str]]:
    """Return a line for each difference, by the names of `CHANGES`.

    Args:
        same_size: the world size is that of the checkpoint; otherwise facts that depend on it are not compared.
    """
    found: dict[str, list[str]] = {}
    same_precision = (saved.get("settings") or {}).get("precision") == now.get("settings", {}).get("precision")
    for name in CHANGES:
        before, here = saved.get(name), now.get(name, {})
        if not isinstance(before, dict) or (not same_size and name in _OF_LOADERS and _is_per_process(before, here)):
            continue
        facts: Collection[str] = {**before, **here}
        if name == "collate_fn" and saved.get("versions") != now.get("versions"):
            continue  # a fingerprint of code depends on Python and on what it calls
        if name in (*_OF_LOADERS, "settings", "callbacks"):
            # A fact that only one of them has was restored, or is missing in checkpoints of earlier versions.
            facts = [
                fact for fact in facts if fact in before and fact in here and (same_size or not _is_number(name, fact))
            ]
        if name == "optimizers":  # of groups earlier versions did not save the parameters
            facts = [fact for fact in facts if not fact.endswith(_PARAMETERS) or (fact in before and fact in here)]
        if name == "module":
            facts = [fact for fact in facts if _is_compared(fact, before, here, same_precision)]
        lines = [
            f"{f'{fact}: ' if fact else ''}{_short(before.get(fact))} then, {_short(here.get(fact))} now"
            + _restored_remark(name, fact)
            for fact in facts
            if before.get(fact) != here.get(fact)
        ]
        if lines:
            found[name] = lines
    if "loader" in found:  # the other differences of the data follow from this one
        return {name: lines for name, lines in found.items() if name == "loader" or name not in _OF_LOADERS}
    return found


def _replaced_schedulers(
    changed: Collection[str], now: Mapping[str, Mapping[str, str]], saved: Mapping[str, Any]
) -> tuple[str, str] | None:
    """Return the schedulers' classes in the checkpoint and in this run, if they differ and that is not allowed."""
    if "schedulers" not in changed:
        return None
    then, here = str(saved["schedulers"].get("schedulers")), now["schedulers"]["schedulers"]
    return (then, here) if then != here else None


def _is_compared(fact: str, before: Mapping[str, str], here: Mapping[str, str], same_precision: bool) -> bool:
    """Whether a fact of the module is compared: a dtype only where both have it, which earlier versions did not save.

    Under another precision other dtypes of floating-point numbers are no change of the module.
    """
    if not fact.endswith(_DTYPE):
        return True
    then, now = (_DTYPES.get(str(facts.get(fact))) for facts in (before, here))
    if then is None or now is None:
        return False
    return same_precision or not (then.is_floating_point and now.is_floating_point)


def _cut_off(
    changed: Collection[str], now: Mapping[str, Mapping[str, str]], saved: Mapping[str, Any], weights: Collection[str]
) -> str:
    """Return the end of a message, if dtypes of the module cannot hold numbers of the kind in the checkpoint."""
    cut = []
    for name in weights if "module" in changed else ():
        then, here = (_DTYPES.get(str(facts["module"].get(f"{name}{_DTYPE}"))) for facts in (saved, now))
        if then is not None and here is not None and not torch.can_cast(then, here):
            cut.append(f"{name} ({then} then, {here} now)")
    if not cut:
        return ""
    return f"would be cut off by the module's dtypes: {first_of(cut)}. Give the module the dtypes of the checkpoint."


def _is_number(name: str, fact: str) -> bool:
    """Whether a fact is a number in a sampler or dataset, which may depend on the world size."""
    return name in _OF_LOADERS and fact != ""


def _restored_remark(name: str, fact: str) -> str:
    """Return the remark on a fact that is restored from the checkpoint, whatever the code sets."""
    restored = name in ("optimizers", "schedulers") and not fact.endswith(_OF_THE_CODE)
    return " (the checkpoint's is used)" if restored else ""


def _counts_batches(now: Mapping[str, Mapping[str, str]]) -> bool:
    """Whether the position in the data is a number of batches, not of samples, so that their size has to stay."""
    return "on each process" in now.get("batch_size", {}).get("", "")


def _is_per_process(before: Mapping[str, str], here: Mapping[str, str]) -> bool:
    """Whether one of these facts is of each process alone, and so depends on the world size."""
    return any("on each process" in str(facts.get("")) for facts in (before, here))


def _short(text: object) -> str:
    if text is None:
        return "none"
    words = str(text)
    return words if len(words) <= _MOST_CHARACTERS else f"{words[:_MOST_CHARACTERS]}..."
