"""The facts of a run as texts: what has to be the same on all ranks, and in the checkpoint that it resumes."""

from __future__ import annotations

import dataclasses
import json
import platform
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import torch
from torch.optim import Optimizer

from trainer import __version__
from trainer.arguments import flat_names, local_path
from trainer.callback import AccumulationSchedule, Callback, Checkpoint
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
from trainer.runs.resolved_config import ResolvedConfig
from trainer.settings import Settings

Facts = Mapping[str, Mapping[str, str]]
"""Texts that are equal if nothing has changed: by the names of `GROUPS`, then by option or layer."""


OF_LOADER = ("dataset", "loader", "sampler", "shuffle", "batch_size", "drop_last", "contents", "collate_fn")
"""The kinds of facts of the training loader, which may depend on the number of processes."""
BREAKS_EPOCH = ("dataset", "loader", "sampler", "shuffle")
"""The kinds whose change gives the rest of an epoch other samples than the unused ones."""
OF_OBJECTS = ("dataset", "sampler", "contents", "collate_fn")
"""The kinds that describe objects which may keep counters and caches in themselves, or grow while training."""
NEED_BOTH = (*OF_LOADER, "callbacks")
"""The kinds of which a fact that only the checkpoint or only the run has is not compared."""
GROUPS = (
    *OF_LOADER,
    "seed",
    "optimizers",
    "schedulers",
    "module",  # the layers, which parameters are frozen, and the dtypes of parameters and buffers
    "hyperparameters",  # of the module and the data module
    "settings",  # the arguments of the Trainer that change a step
    "callbacks",
    "versions",
)
"""The kinds of facts that a resumed run compares; `fit(..., allow_changes=[...])` takes their names."""
REMARKS = {
    "dataset": "After another random_split, samples of the validation are trained on. Seed it: "
    "random_split(..., generator=torch.Generator().manual_seed(0)).",
    "optimizers": "The checkpoint's options of optimizers are used.",
    "schedulers": "The checkpoint's options of schedulers are used, but the code's functions, interval, frequency and "
    "monitor.",
}
"""A sentence on what the resumed run does about a difference."""

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


# -- settings ----------------------------------------------------------------------------------------------------------


def facts_of_settings(stage: str, config: ResolvedConfig, callbacks: list[Callback]) -> Iterator[tuple[str, object]]:
    """Yield the call, the settings, the callbacks and the versions, which all processes have to share."""
    yield "stage", stage
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
    yield from _facts_of_shared_callbacks(callbacks, config.strategy.shards_state)
    yield "torch", torch.__version__
    yield "python", ".".join(map(str, sys.version_info[:2]))
    yield "this package", __version__


def _json_content(value: object) -> Any:
    """Return the content of the JSON file at a path; None if `value` is something else."""
    if str(value).endswith(".json"):
        with suppress(OSError, ValueError):  # the strategy reports it
            return json.loads(local_path(str(value)).read_text())
    return None


def _facts_of_shared_callbacks(callbacks: list[Callback], shards_state: bool) -> Iterator[tuple[str, object]]:
    """Yield the callbacks that all processes must have, with their options and the folders of shards."""
    shared = [callback for callback in callbacks if callback.agree_on is not None]
    yield "callbacks", [type(callback) for callback in shared]
    for name, value in _options_of_callbacks(named(shared)).items():
        yield name, value
        yield f"{name}, fingerprint of its code and values", function_fingerprint(value)
    for where, one in named(shared):
        if isinstance(one, Checkpoint) and shards_state:  # all processes write into it
            yield f"{where}.dirpath", f"folder {one.dirpath}"


def _options_of_callbacks(named: Iterable[tuple[str, Callback]]) -> dict[str, object]:
    return {f"{where}.{name}": getattr(one, name) for where, one in named for name in one.agree_on or ()}


def kept_facts_of_settings(settings: Settings, precision: Precision, callbacks: list[Callback]) -> Facts:
    """Return what a checkpoint keeps: the settings that change a step, the options of callbacks, and the versions."""
    accumulating = [one.scheduling for one in callbacks if isinstance(one, AccumulationSchedule)]
    # The key of a ModelCheckpoint has its options.
    others = [(key, one) for key, one in callbacks_by_state_key(callbacks).items() if not isinstance(one, Checkpoint)]
    return {
        "settings": {
            **{name: as_text(getattr(settings, name)) for name in _SETTINGS},
            "precision": precision.name,
            "schedule of accumulation": as_text(accumulating),
        },
        "callbacks": as_texts(_options_of_callbacks(others)),
        "versions": {
            "torch": str(torch.__version__),
            "Python": platform.python_version(),
            "exact-trainer": __version__,
        },
    }


def as_texts(facts: Mapping[str, object]) -> dict[str, str]:
    """Return facts as texts."""
    return {name: as_text(value) for name, value in facts.items()}


# -- the module --------------------------------------------------------------------------------------------------------


def facts_of_module(module: TrainModule, precision: Precision) -> dict[str, str]:
    """Return the layers with their options, the frozen parameters, and the dtypes of parameters and buffers.

    Call it before a strategy wraps the module. A dtype is the one after `precision.convert_module`.
    """
    layers = {name or type(module).__name__: describe_layer(layer) for name, layer in module.named_modules()}
    frozen = {f"{name}, frozen": "yes" for name, p in module.named_parameters() if not p.requires_grad}
    tensors, dtype_of = (*module.named_parameters(), *module.named_buffers()), precision.stored_dtypes(module)
    return layers | frozen | {f"{name}{DTYPE}": str(dtype_of(one)) for name, one in tensors}


def facts_of_tensors(module: TrainModule, training: bool) -> Iterator[tuple[str, object]]:
    """Yield the facts of a module that all processes have to share in addition to `facts_of_module`.

    Parameters and buffers come in the order in which strategies send them; tied parameters count once.
    """
    yield "automatic_optimization", module.automatic_optimization
    if training:
        yield "layers in eval mode", [name for name, layer in module.named_modules() if not layer.training]
    for name, parameter in module.named_parameters():
        yield f"parameter {name}", f"{describe_tensor(parameter)}, {'trained' if parameter.requires_grad else 'frozen'}"
    for name, buffer in module.named_buffers():
        owner, _, own = name.rpartition(".")
        saved = own not in module.get_submodule(owner)._non_persistent_buffers_set
        yield f"buffer {name}", f"{describe_tensor(buffer)}{'' if saved else ', not in the state_dict'}"


def describe_layer(layer: torch.nn.Module) -> str:
    """Return a layer's class and options as text."""
    options = ""
    with suppress(Exception):  # code of the user
        options = layer.extra_repr()
    return f"{class_of(layer).__name__}({re.sub(r' at 0x[0-9a-f]+', '', options)[:_MOST_OPTIONS]})"


def hooks_of(module: torch.nn.Module) -> dict[str, str]:
    """Return the names of the hooks of layers and parameters, by kind and place.

    Without the hooks of wandb, which are for rank 0 alone.
    """
    found = {}
    for name, place in [*module.named_modules(), *module.named_parameters()]:
        for kind in _HOOKS:
            hooks = [*(getattr(place, kind, None) or {}).values()]
            names = [name_of(hook) for hook in hooks if not str(getattr(hook, "__module__", "")).startswith("wandb")]
            if names:
                found[f"{kind.strip('_').replace('_', ' ')} of {name or type(place).__name__}"] = ", ".join(names)
    return found


# -- optimizers and schedulers -----------------------------------------------------------------------------------------


def facts_of_optimizers(module: torch.nn.Module, optimizers: list[Optimizer]) -> dict[str, object]:
    """Return the classes of optimizers, and their options by group."""
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    facts: dict[str, object] = {"optimizers": [type(optimizer) for optimizer in optimizers]}
    for where, optimizer in named(optimizers):
        several = len(optimizer.param_groups) > 1
        for number, group in enumerate(optimizer.param_groups):
            owner = f"{where}, group {number}" if several else where
            facts[f"{owner}, parameters"] = [names.get(id(parameter)) for parameter in group["params"]]
            facts |= {f"{owner}, {option}": group[option] for option in sorted(group.keys() - {"params"})}
        own = {name: value for name, value in vars(optimizer).items() if is_scalar(value)}
        facts |= {f"{where}, {name}": value for name, value in own.items() if not name.startswith("_")}
    return facts


def facts_of_schedulers(schedulers: list[TimedScheduler]) -> dict[str, object]:
    """Return the classes of schedulers, and their options."""
    facts: dict[str, object] = {"schedulers": [type(config.scheduler) for config in schedulers]}
    for (where, scheduler), config in zip(named(c.scheduler for c in schedulers), schedulers, strict=True):
        options = {"interval": config.interval, "frequency": config.frequency, "monitor": config.monitor}
        facts |= {f"{where}, {option}": value for option, value in {**_options(scheduler), **options}.items()}
    return facts


def _options(scheduler: Any) -> dict[str, Any]:
    """Return the attributes of a scheduler, and of the schedulers inside it."""
    own = dict(getattr(scheduler, "__dict__", {}))
    if "_milestones" in own:
        own["milestones"] = own.pop("_milestones")
    for where, inner in named(own.pop("_schedulers", ())):
        own |= {f"{where}.{option}": value for option, value in _options(inner).items()}
    return own


def named(objects: Iterable[Any]) -> Iterator[tuple[str, Any]]:
    """Yield the objects with the names of their classes, numbered where there are several of one class."""
    seen: Counter[str] = Counter()
    for one in objects:
        kind = type(one).__name__
        seen[kind] += 1
        yield kind if seen[kind] == 1 else f"{kind} number {seen[kind]}", one


def kept_facts_of_optimizers(of_optimizers: Mapping[str, object], of_schedulers: Mapping[str, object]) -> Facts:
    """Return what a checkpoint keeps: options, the parameters of several groups, and values that functions read."""
    of_groups = {
        name: as_text(sorted(map(str, names)))
        for name, names in of_optimizers.items()
        if isinstance(names, list) and ", group " in name
    }
    return {
        "optimizers": _kept(of_optimizers) | of_groups,
        "schedulers": _kept(of_schedulers) | _facts_of_functions(of_schedulers),
    }


def _kept(facts: Mapping[str, object]) -> dict[str, str]:
    """Return the facts of optimizers or schedulers as texts, but for options that are private or follow from others."""
    options = {name: re.split(r", |\.", name)[-1] for name in facts}
    kept = (name for name, option in options.items() if option not in _DERIVED and option[0] != "_")
    return {name: as_text(facts[name]) for name in kept}


def _facts_of_functions(of_schedulers: Mapping[str, Any]) -> dict[str, str]:
    """Return the values that a schedule's functions read, and the attributes of objects in place of functions."""
    found: dict[str, str] = {}
    for name, functions in of_schedulers.items():
        if not name.endswith("lr_lambdas"):
            continue
        owner = name.rpartition(", ")[0]
        for one in functions:
            read = globals_fingerprints(functions_of(one)) | read_values_fingerprints(one)
            found |= {f"{owner}, {what} in lr_lambdas": text for what, text in read.items()}
            if not isinstance(one, (FunctionType, MethodType, partial)):  # torch restores these attributes
                plain = {what: inner for what, inner in attributes(one).items() if is_plain(inner)}
                found |= {f"{owner}, {type(one).__name__}.{what}": repr(inner) for what, inner in plain.items()}
    return found


# -- data and call -----------------------------------------------------------------------------------------------------


def facts_of_data(loader: BatchLoader, readers: int) -> dict[str, dict[str, str]]:
    """Return the facts of the training loader, on so many data-parallel ranks."""
    facts = {name: {"": text} for name, text in loader.identity(readers).items()}
    for name, numbers in loader.numbers().items():
        facts[name] = {**facts.get(name, {}), **numbers}
    return facts


def facts_of_call(seed: int, hyperparameters: Mapping[str, Any]) -> dict[str, dict[str, str]]:
    """Return the seed and the hyperparameters, by names such as `lr` and, of the data module, `data, lr`."""
    of_module, of_data = (flat_names(with_paths(hyperparameters, owner)) for owner in ("module", "data"))
    named = of_module | {f"data, {name}": value for name, value in of_data.items()}
    return {"seed": {"": str(seed)}, "hyperparameters": as_texts(named)}
