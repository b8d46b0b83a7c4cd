"""The facts of a run as texts: what has to be the same on all ranks, and in the checkpoint that it resumes."""

from __future__ import annotations

import dataclasses
import json
import platform
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from types import FunctionType, MethodType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.optim import Optimizer

from trainer import __version__
from trainer.arguments import flat_names, local_path
from trainer.callback import AccumulationSchedule
from trainer.data.fingerprints import (
    function_fingerprint,
    functions_of,
    globals_fingerprints,
    is_plain,
    name_of,
    read_values_fingerprints,
)
from trainer.data.loader import BatchLoader
from trainer.hyperparameters import is_scalar, with_paths
from trainer.model.blocks import class_of
from trainer.model.reachable import attributes
from trainer.module import TrainModule
from trainer.optimizers import TimedScheduler
from trainer.precision import Precision
from trainer.runs.callback_states import callbacks_by_state_key
from trainer.runs.compare_ranks import as_text, describe_tensor

if TYPE_CHECKING:
    from trainer.loop.run import Run

Facts = Mapping[str, Mapping[str, str]]
"""Texts that are equal if nothing has changed: by the names of `GROUPS`, then by option or layer."""


class FactGroup(NamedTuple):
    """The way in which the facts of one kind are compared with a checkpoint."""

    meaning: str
    of_loader: bool = False
    """They describe the training loader, and may depend on the number of processes."""
    breaks_epoch: bool = False
    """Another value gives the rest of an epoch other samples than those that are still unused."""
    of_objects: bool = False
    """They describe objects that may keep counters and caches in themselves, or grow while training."""
    needs_both: bool = False
    """A fact that only the checkpoint or only the run has is not compared."""
    remark: str = ""
    """A sentence on what the resumed run does about a difference."""


_of_loader = partial(FactGroup, of_loader=True, needs_both=True)
_of_order = partial(_of_loader, breaks_epoch=True)

GROUPS = {
    "dataset": _of_order(
        "the samples of the training dataset",
        of_objects=True,
        remark="After another random_split, samples of the validation are trained on. Seed it: "
        "random_split(..., generator=torch.Generator().manual_seed(0)).",
    ),
    "loader": _of_order("the kind of the training loader"),
    "sampler": _of_order("the sampler of the training loader", of_objects=True),
    "shuffle": _of_order("the order of the samples"),
    "batch_size": _of_loader("the samples of a batch, over all processes"),
    "drop_last": _of_loader("what happens to the last, shorter batch"),
    "contents": _of_loader("samples that the training dataset keeps in memory", of_objects=True),
    "collate_fn": _of_loader("the function that makes a batch of samples", of_objects=True),
    "seed": FactGroup("the Trainer's seed"),
    "optimizers": FactGroup("the optimizers' options", remark="The checkpoint's options of optimizers are used."),
    "schedulers": FactGroup(
        "the schedulers' options",
        remark="The checkpoint's options of schedulers are used, but the code's functions, interval, frequency and "
        "monitor.",
    ),
    "module": FactGroup("the layers, which parameters are frozen, and the dtypes of parameters and buffers"),
    "hyperparameters": FactGroup("the hyperparameters of the module and the data module"),
    "settings": FactGroup("arguments of the Trainer that change a step"),
    "callbacks": FactGroup("the options of callbacks", needs_both=True),
    "versions": FactGroup("torch, Python and this package"),
}
"""The kinds of facts that a resumed run compares; `fit(..., allow_changes=[...])` takes their names."""

MAY_DIFFER = (
    "accelerator",  # of these three the choices are compared
    "devices",
    "num_nodes",
    "strategy",  # compared with its options
    "precision",
    "callbacks",  # those compared that have `agree_on`
    "profiler",
    "plugins",  # the precision that they choose is compared
    "logger",  # these work on rank 0
    "enable_progress_bar",
    "enable_model_summary",
    "default_root_dir",
    "deadline",  # the first process to reach it stops all
    "deadline_margin",
    "watchdog_seconds",
    "max_restarts",
)
"""The Trainer's arguments that need not be equal on all processes."""

DTYPE = ", dtype"
"""Suffix of the facts that are dtypes of parameters and buffers."""
_SETTINGS = (
    "accumulate_grad_batches",
    "gradient_clip_val",
    "gradient_clip_algorithm",
    "limit_train_batches",
    "overfit_batches",
    "seed_per_sample",
)
"""The Trainer's arguments that change a step."""
_DERIVED = frozenset({"parameters", "initial_lr", "base_lrs", "last_epoch", "optimizer"})
"""Options of optimizers and schedulers that follow from others, or change while training."""
_MOST_OPTIONS = 100
_HOOKS = (
    "_forward_pre_hooks",
    "_forward_hooks",
    "_backward_pre_hooks",
    "_backward_hooks",
    "_post_accumulate_grad_hooks",
)


# -- what a run is -----------------------------------------------------------------------------------------------------


def facts_of_settings(run: Run) -> Iterator[tuple[str, object]]:
    """Yield the call, the settings, callbacks and versions, which all processes have to share."""
    config = run.config
    yield "stage", run.stage
    for field in dataclasses.fields(config.settings):
        if field.name not in MAY_DIFFER:
            yield field.name, getattr(config.settings, field.name)
    yield "device", config.device_type
    yield "precision", [config.precision.name, config.precision.weights, config.precision.autocast]
    kind = type(config.strategy)
    yield "strategy", kind
    for name, value in config.strategy._arguments.items():
        yield f"{kind.__name__}, {name}", value
        yield f"{kind.__name__}, content of {name}", _json_content(value)
    needed = [callback for callback in run.callbacks if callback.agree_on is not None]
    yield "callbacks", [type(callback) for callback in needed]
    for where, callback in _named(needed):
        for name in callback.agree_on or ():
            value = getattr(callback, name)
            yield f"{where}.{name}", value
            yield f"{where}.{name}, fingerprint of its code and values", function_fingerprint(value)
    yield "torch", torch.__version__
    yield "python", ".".join(map(str, sys.version_info[:2]))
    yield "this package", __version__


def _json_content(value: object) -> Any:
    """Return the content of the JSON file at a path; None if `value` is something else."""
    if not str(value).endswith(".json"):
        return None
    try:
        return json.loads(local_path(str(value)).read_text())
    except (OSError, ValueError):  # the strategy says so
        return None


def facts_of_module(module: TrainModule, precision: Precision) -> dict[str, str]:
    """Return the layers with their options, the frozen parameters, and the dtypes of parameters and buffers.

    Call it before a strategy wraps the module. A dtype is the one after `precision.convert_module`.
    """
    layers = {name or type(module).__name__: describe_layer(layer) for name, layer in module.named_modules()}
    frozen = {f"{name}, frozen": "yes" for name, p in module.named_parameters() if not p.requires_grad}
    tensors, dtype_of = (*module.named_parameters(), *module.named_buffers()), precision.stored_dtypes(module)
    return layers | frozen | {f"{name}{DTYPE}": str(dtype_of(one)) for name, one in tensors}


def facts_of_tensors(module: TrainModule, training: bool) -> Iterator[tuple[str, object]]:
    """Yield what the processes have to share of a module beside `facts_of_module`.

    Parameters and buffers come in the order in which strategies send them; tied parameters count once.
    """
    yield "automatic_optimization", module.automatic_optimization
    if training:
        yield "layers in eval mode", [name for name, layer in module.named_modules() if not layer.training]
    for name, parameter in module.named_parameters():
        yield f"parameter {name}", f"{describe_tensor(parameter)}, {'trained' if parameter.requires_grad else 'frozen'}"
    for name, buffer in module.named_buffers():
        owner, _, own = name.rpartition(".")
        persistent = own not in module.get_submodule(owner)._non_persistent_buffers_set
        yield f"buffer {name}", f"{describe_tensor(buffer)}{'' if persistent else ', not in the state_dict'}"


def describe_layer(layer: torch.nn.Module) -> str:
    """Return a layer's class and options as text."""
    try:
        options = layer.extra_repr()
    except Exception:  # the user's
        options = ""
    return f"{class_of(layer).__name__}({re.sub(r' at 0x[0-9a-f]+', '', options)[:_MOST_OPTIONS]})"


def hooks_of(module: torch.nn.Module) -> dict[str, str]:
    """Return the names of the hooks of layers and parameters, by kind and place.

    Without the hooks of wandb, which are for rank 0 alone.
    """
    found: dict[str, list[str]] = {}
    for name, place in [*module.named_modules(), *module.named_parameters()]:
        for kind in _HOOKS:
            for hook in (getattr(place, kind, None) or {}).values():
                if str(getattr(hook, "__module__", "")).partition(".")[0] != "wandb":
                    where = f"{kind.strip('_').replace('_', ' ')} of {name or type(place).__name__}"
                    found.setdefault(where, []).append(name_of(hook))
    return {where: ", ".join(names) for where, names in found.items()}


def facts_of_optimizers(module: TrainModule, optimizers: list[Optimizer]) -> Iterator[tuple[str, object]]:
    """Yield the classes of optimizers, and their options by group, as pairs of a name and a value."""
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    yield "optimizers", [type(optimizer) for optimizer in optimizers]
    for where, optimizer in _named(optimizers):
        for number, group in enumerate(optimizer.param_groups):
            owner = f"{where}, group {number}" if len(optimizer.param_groups) > 1 else where
            yield f"{owner}, parameters", [names.get(id(parameter)) for parameter in group["params"]]
            for option in sorted(group.keys() - {"params"}):
                yield f"{owner}, {option}", group[option]
        for name, value in vars(optimizer).items():
            if is_scalar(value) and not name.startswith("_"):
                yield f"{where}, {name}", value


def facts_of_schedulers(schedulers: list[TimedScheduler]) -> Iterator[tuple[str, object]]:
    """Yield the classes of schedulers, and their options, as pairs of a name and a value."""
    yield "schedulers", [type(config.scheduler) for config in schedulers]
    for (where, scheduler), config in zip(_named([c.scheduler for c in schedulers]), schedulers, strict=True):
        options = {"interval": config.interval, "frequency": config.frequency, "monitor": config.monitor}
        for option, value in {**_options(scheduler), **options}.items():
            yield f"{where}, {option}", value


def _options(scheduler: Any) -> dict[str, Any]:
    """Return the attributes of a scheduler, and those of the schedulers in it."""
    own = dict(getattr(scheduler, "__dict__", {}))
    if "_milestones" in own:
        own["milestones"] = own.pop("_milestones")
    for where, inner in _named(own.pop("_schedulers", ())):
        own |= {f"{where}.{option}": value for option, value in _options(inner).items()}
    return own


def _named(objects: Iterable[Any]) -> Iterator[tuple[str, Any]]:
    """Yield the objects with the names of their classes, numbered where there are several of one class."""
    seen: Counter[str] = Counter()
    for one in objects:
        kind = type(one).__name__
        seen[kind] += 1
        yield kind if seen[kind] == 1 else f"{kind} number {seen[kind]}", one


# -- what a checkpoint keeps of it -------------------------------------------------------------------------------------


def facts_of_training(run: Run, optimizers: list[Optimizer], schedulers: list[TimedScheduler]) -> Facts:
    """Return the facts of optimizers and settings, before anything is restored from a checkpoint.

    Args:
        optimizers: the user's, before the strategy prepares them.
    """
    of_optimizers = dict(facts_of_optimizers(run.module, optimizers))
    of_schedulers = dict(facts_of_schedulers(schedulers))
    of_groups = {
        name: as_text(sorted(map(str, names)))
        for name, names in of_optimizers.items()
        if isinstance(names, list) and ", group " in name
    }
    accumulating = [c.scheduling for c in run.callbacks if isinstance(c, AccumulationSchedule)]
    return {
        "optimizers": _kept(of_optimizers) | of_groups,
        "schedulers": _kept(of_schedulers) | _facts_of_functions(of_schedulers),
        "settings": {
            **{name: as_text(getattr(run.settings, name)) for name in _SETTINGS},
            "precision": run.strategy.precision.name,
            "schedule of accumulation": as_text(accumulating),
        },
        # What a ModelCheckpoint is stands in its key.
        "callbacks": {
            f"{key}.{name}": as_text(getattr(callback, name))
            for key, callback in callbacks_by_state_key(run.callbacks).items()
            if callback not in run.checkpoint_callbacks
            for name in callback.agree_on or ()
        },
        "versions": {
            "torch": str(torch.__version__),
            "Python": platform.python_version(),
            "exact-trainer": __version__,
        },
    }


def _kept(facts: Mapping[str, object]) -> dict[str, str]:
    """Return the facts of optimizers or schedulers as texts, but for options that are private or follow from others."""
    options = {name: re.split(r", |\.", name)[-1] for name in facts}
    kept = (name for name, option in options.items() if option not in _DERIVED and option[0] != "_")
    return {name: as_text(facts[name]) for name in kept}


def _facts_of_functions(of_schedulers: Mapping[str, Any]) -> dict[str, str]:
    """Return what a schedule's functions read, and the attributes of objects that are called instead of a function."""
    found: dict[str, str] = {}
    for name in of_schedulers:
        owner, _, option = name.rpartition(", ")
        for one in of_schedulers[name] if option.endswith("lr_lambdas") else ():
            read = globals_fingerprints(functions_of(one)) | read_values_fingerprints(one)
            found |= {f"{owner}, {what} in lr_lambdas": text for what, text in read.items()}
            if not isinstance(one, (FunctionType, MethodType, partial)):  # torch restores these attributes
                plain = {what: inner for what, inner in attributes(one).items() if is_plain(inner)}
                found |= {f"{owner}, {type(one).__name__}.{what}": repr(inner) for what, inner in plain.items()}
    return found


def facts_of_data(loader: BatchLoader, readers: int) -> Facts:
    """Return the facts of the training loader, on so many data-parallel ranks."""
    described = {name: {"": text} for name, text in loader.identity(readers).items()}
    numbers = loader.numbers()
    return {name: described.get(name, {}) | numbers.get(name, {}) for name in {**described, **numbers}}


def facts_of_call(seed: int | None, hyperparameters: Mapping[str, Any] | None) -> Facts:
    """Return the seed and the hyperparameters, by names such as `lr` and, of the data module, `data, lr`."""
    facts = {"seed": {"": str(seed)}}
    if hyperparameters is not None:
        of_module, of_data = (flat_names(with_paths(hyperparameters, owner)) for owner in ("module", "data"))
        values = of_module | {f"data, {name}": value for name, value in of_data.items()}
        facts["hyperparameters"] = {name: as_text(value) for name, value in values.items()}
    return facts
