"""Compare, at the start of a run, what has to be equal on all its processes; name what differs, and on which ranks."""

from __future__ import annotations

import dataclasses
import json
import logging
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer

from trainer import __version__
from trainer.arguments import local_path
from trainer.callback import Callback
from trainer.checkpoint.format import FileTensor
from trainer.checkpoint.pretrained import samples_of
from trainer.data.fingerprints import function_fingerprint, name_of
from trainer.data.loader import BatchLoader
from trainer.distributed.process_group import SingleProcess
from trainer.hyperparameters import is_scalar
from trainer.model.blocks import class_of
from trainer.module import TrainModule
from trainer.optimizers import SchedulerConfig
from trainer.runs.compare_ranks import compare, describe_tensor, differing

if TYPE_CHECKING:
    from trainer.loop.run import Run

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

_MOST_OPTIONS = 100
_MOST_LINES = 6
_HOOKS = (
    "_forward_pre_hooks",
    "_forward_hooks",
    "_backward_pre_hooks",
    "_backward_hooks",
    "_post_accumulate_grad_hooks",
)

log = logging.getLogger("trainer")


# -- what is compared --------------------------------------------------------------------------------------------------


def check_settings(run: Run) -> None:
    """Check that all processes make the same call with the same settings, callbacks and versions; see `compare`."""
    fix = "Give Trainer the same arguments on all processes; loggers and progress bars may be on rank 0 only."
    compare(run.strategy.processes, _settings(run), fix)


def check_module(processes: SingleProcess, module: TrainModule, training: bool) -> None:
    """Check that all processes have the same layers, parameters and buffers in the same order, apart from values.

    Strategies send tensors in this order. See `compare` for the error. Other hooks of layers are a warning: they may
    only look at values.
    """
    facts, fix = _tensors(module, training), "Build the same module on all processes."
    hooks = compare(processes, facts, fix, also=hooks_of(module))
    _warn(processes, hooks, "hooks differ between processes", "One that changes values has to be on all of them.")
    # By itself, because a parameter that only some have changes the order, too.
    fix = "Register layers in the same order on all processes: the order of a set differs from process to process."
    orders = [
        ("the order of the parameters", [name for name, _ in module.named_parameters()]),
        ("the order of the buffers", [name for name, _ in module.named_buffers()]),
    ]
    compare(processes, iter(orders), fix)


def check_weights(run: Run, pretrained: Mapping[str, FileTensor]) -> None:
    """Check that the pretrained weights, which each process reads itself, are the same. Collective.

    Raises:
        ConfigError: they differ, as when the machines have copies of their own.
    """
    compare(run.strategy.processes, samples_of(pretrained), "Have the same pretrained weights on all machines.")


def check_loaders(run: Run) -> None:
    """Check that the loaders are alike where they have to be, and set the length of a training epoch. Collective.

    Raises:
        ConfigError: as `compare`.
    """
    run.loaders.needed()
    loaders: dict[str, BatchLoader] = {} if run.train_loader is None else {"the training loader": run.train_loader}
    loaders |= {f"the evaluation loader{f' {n!r}' if n else ''}": one for n, one in run.loaders.evaluated.items()}
    compare_loaders(run.strategy.processes, loaders, run.train_loader)


def compare_loaders(processes: SingleProcess, loaders: dict[str, BatchLoader], training: BatchLoader | None) -> None:
    """Do what `check_loaders` does, with loaders by their names in messages, one of which may be for training."""
    fix = "Give every process the full dataset: the trainer splits it."
    length = None if training is None else training.length
    several = processes.world_size > 1
    orders, contents = (_orders_of_samples(loaders), _contents(loaders)) if several else ({}, {})
    gathered = compare(processes, _facts_of_loaders(loaders), fix, also=(length, orders, contents))
    # A process that could not try its sampler has no part in this.
    known = [name for name in orders if all(name in of_rank for _, of_rank, _ in gathered)]
    if known:
        fix = "Samplers have to give the same order on all processes, which the trainer splits."
        compare(processes, ((name, orders[name]) for name in known), fix)
    fix = "Make them from a seed (trainer.seed_everything before), or load them: the trainer splits one dataset."
    _warn(processes, [of_rank for *_, of_rank in gathered], "samples differ between processes", fix)
    if training is not None:
        training.shorten([length for length, *_ in gathered])


def check_optimizers(run: Run, optimizers: list[Optimizer], schedulers: list[SchedulerConfig]) -> None:
    """Check that all processes have the same optimizers and schedulers; see `compare`."""
    facts = optimizer_facts(run.module, optimizers, schedulers)
    compare(run.strategy.processes, facts, "Give the optimizers the same options on all processes.")


def _settings(run: Run) -> Iterator[tuple[str, object]]:
    config = run.config
    yield "stage", run.stage
    for field in dataclasses.fields(config.settings):
        if field.name not in MAY_DIFFER:
            yield field.name, getattr(config.settings, field.name)
    yield "device", config.device_type
    yield "precision", [config.precision.name, config.precision.weights, config.precision.autocast]
    yield "strategy", type(config.strategy)
    for name, value in config.strategy._arguments.items():
        yield f"{type(config.strategy).__name__}, {name}", value
        if (content := _json_content(value)) is not None:
            yield f"{type(config.strategy).__name__}, content of {name}", content
    needed = [callback for callback in run.callbacks if callback.agree_on is not None]
    yield "callbacks", [type(callback) for callback in needed]
    for name, value in options_of(needed):
        yield name, value
        if (computed := function_fingerprint(value)) is not None:
            yield f"{name}, fingerprint of its code and values", computed
    yield "torch", torch.__version__
    yield "python", ".".join(map(str, sys.version_info[:2]))
    yield "this package", __version__


def options_of(callbacks: Iterable[Callback]) -> Iterator[tuple[str, object]]:
    """Yield the options in `agree_on` of callbacks, by names such as "EarlyStopping.patience"."""
    for where, callback in _named(callbacks):
        for name in callback.agree_on or ():
            yield f"{where}.{name}", getattr(callback, name)


def _json_content(value: object) -> Any:
    """Return the content of the JSON file at a path; None if `value` is something else."""
    if not isinstance(value, (str, Path)) or not str(value).endswith(".json"):
        return None
    try:
        return json.loads(local_path(value).read_text())
    except (OSError, ValueError):  # the strategy says so
        return None


def _tensors(module: TrainModule, training: bool) -> Iterator[tuple[str, object]]:
    yield "automatic_optimization", module.automatic_optimization
    for name, parameter in module.named_parameters(remove_duplicate=False):
        yield f"parameter {name}", f"{describe_tensor(parameter)}, {'trained' if parameter.requires_grad else 'frozen'}"
    for name, buffer in module.named_buffers():
        owner, _, own = name.rpartition(".")
        persistent = own not in module.get_submodule(owner)._non_persistent_buffers_set
        yield f"buffer {name}", f"{describe_tensor(buffer)}{'' if persistent else ', not in the state_dict'}"
    for name, layer in module.named_modules():
        # Those with parameters of other shapes are named above already.
        yield f"layer {name}", describe_layer(layer)
    if training:
        yield "layers in eval mode", [name for name, layer in module.named_modules() if not layer.training]


def describe_layer(layer: torch.nn.Module) -> str:
    """Return a layer's class and options as text."""
    try:
        options = layer.extra_repr()
    except Exception:  # the user's
        options = ""
    return f"{class_of(layer).__name__}({re.sub(r' at 0x[0-9a-f]+', '', options)[:_MOST_OPTIONS]})"


def hooks_of(module: torch.nn.Module) -> dict[str, str]:
    """Return the names of the hooks of layers and parameters, by kind and place.

    Without those of wandb, which are for rank 0 alone.
    """
    places = [*module.named_modules(), *module.named_parameters()]
    found = {
        f"{kind.strip('_').replace('_', ' ')} of {name or type(place).__name__}": [
            name_of(hook)
            for hook in (getattr(place, kind, None) or {}).values()
            if str(getattr(hook, "__module__", "")).partition(".")[0] != "wandb"
        ]
        for name, place in places
        for kind in _HOOKS
    }
    return {where: ", ".join(names) for where, names in found.items() if names}


def _contents(loaders: dict[str, BatchLoader]) -> dict[str, str]:
    return {f"{name}, {what}": text for name, loader in loaders.items() for what, text in loader.contents().items()}


def _warn(processes: SingleProcess, by_rank: list[dict[str, str]], what: str, fix: str) -> None:
    """Log a warning if texts of the processes differ."""
    lines = differing(by_rank)
    if lines and processes.is_global_zero:
        more = ["and more"] if len(lines) > _MOST_LINES else []
        log.warning("%s", "\n  ".join([f"{what}:", *lines[:_MOST_LINES], *more]) + f"\n{fix}")


def _facts_of_loaders(loaders: dict[str, BatchLoader]) -> Iterator[tuple[str, object]]:
    yield "loaders", list(loaders)
    for name, loader in loaders.items():
        for fact, value in loader.equal_everywhere().items():
            yield f"{name}, {fact}", value


def _orders_of_samples(loaders: dict[str, BatchLoader]) -> dict[str, str]:
    return {f"{name}, {what}": order for name, loader in loaders.items() for what, order in loader.orders().items()}


def optimizer_facts(
    module: TrainModule, optimizers: list[Optimizer], schedulers: list[SchedulerConfig]
) -> Iterator[tuple[str, object]]:
    """Yield the classes of optimizers and schedulers, and their options, as pairs of a name and a value."""
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    yield "optimizers", [type(optimizer) for optimizer in optimizers]
    for where, optimizer in _named(optimizers):
        for number, group in enumerate(optimizer.param_groups):
            owner = f"{where}, group {number}" if len(optimizer.param_groups) > 1 else where
            yield f"{owner}, parameters", [names.get(id(parameter)) for parameter in group["params"]]
            for option in group.keys() - {"params"}:
                yield f"{owner}, {option}", group[option]
        for name, value in getattr(optimizer, "__dict__", {}).items():
            if is_scalar(value) and not name.startswith("_"):
                yield f"{where}, {name}", value
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
