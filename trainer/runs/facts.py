"""RunFacts: compare a run with the other processes when it starts, and keep its facts in checkpoints for a resume."""

from __future__ import annotations

import dataclasses
import json
import logging
import platform
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from itertools import chain
from types import FunctionType, MethodType
from typing import Any, TypeVar

import torch
from torch.optim import Optimizer

from trainer import __version__
from trainer.arguments import flat_names, local_path
from trainer.callback import AccumulationSchedule, Callback, Checkpoint
from trainer.checkpoint.format import FileTensor
from trainer.checkpoint.pretrained import samples_of
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
from trainer.runs.compare_ranks import MOST_LINES, as_text, compare, describe_tensor, differences, disagreement, listed
from trainer.runs.resolved_config import ResolvedConfig
from trainer.settings import Settings
from trainer.strategy import Strategy

log = logging.getLogger("trainer")

T = TypeVar("T")

Facts = Mapping[str, Mapping[str, str]]
"""Texts that are equal if nothing has changed: by the names of `GROUPS`, then by option or layer."""

OF_LOADER = ("dataset", "loader", "sampler", "shuffle", "batch_size", "drop_last", "contents", "collate_fn")
"""The kinds of facts of the training loader, which may depend on the number of processes."""
BREAKS_EPOCH = ("dataset", "loader", "sampler", "shuffle")
"""The kinds whose change gives the rest of an epoch other samples than the unused ones."""
OF_OBJECTS = ("dataset", "sampler", "contents", "collate_fn")
"""The kinds that describe objects which may keep counters and caches in themselves, or grow while training."""
NEED_BOTH = (*OF_LOADER, "callbacks")
"""The kinds whose facts are not compared if only the checkpoint or only the run has them."""
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
    for where, one in named(callbacks):
        if isinstance(one, Checkpoint) and shards_state:  # all processes write into it
            yield f"{where}.dirpath", f"folder {one.dirpath}"


def _options_of_callbacks(callbacks: Iterable[tuple[str, Callback]]) -> dict[str, object]:
    return {f"{where}.{name}": getattr(one, name) for where, one in callbacks for name in one.agree_on or ()}


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
            modules = [str(getattr(hook, "__module__", "")).partition(".")[0] for hook in hooks]
            names = [name_of(hook) for hook, package in zip(hooks, modules, strict=True) if package != "wandb"]
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
            parameters = [names.get(id(parameter)) for parameter in group["params"]]
            options = {option: group[option] for option in sorted(group.keys() - {"params"})}
            facts |= _under(owner, {"parameters": parameters, **options})
        own = {name: value for name, value in vars(optimizer).items() if is_scalar(value) and name[0] != "_"}
        facts |= _under(where, own)
    return facts


def facts_of_schedulers(schedulers: list[TimedScheduler]) -> dict[str, object]:
    """Return the classes of schedulers, and their options."""
    facts: dict[str, object] = {"schedulers": [type(config.scheduler) for config in schedulers]}
    for (where, scheduler), config in zip(named(c.scheduler for c in schedulers), schedulers, strict=True):
        options = {"interval": config.interval, "frequency": config.frequency, "monitor": config.monitor}
        facts |= _under(where, {**_options(scheduler), **options})
    return facts


def _options(scheduler: Any) -> dict[str, Any]:
    """Return the attributes of a scheduler, and of the schedulers inside it."""
    own = dict(getattr(scheduler, "__dict__", {}))
    if "_milestones" in own:
        own["milestones"] = own.pop("_milestones")
    for where, inner in named(own.pop("_schedulers", ())):
        own |= {f"{where}.{option}": value for option, value in _options(inner).items()}
    return own


def _under(owner: str, facts: Mapping[str, T]) -> dict[str, T]:
    """Return facts with the name of their owner."""
    return {f"{owner}, {name}": value for name, value in facts.items()}


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
    kept = {}
    for name, value in facts.items():
        option = re.split(r", |\.", name)[-1]
        if option not in _DERIVED and option[0] != "_":
            kept[name] = as_text(value)
    return kept


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
    return {"seed": {"": str(seed)}, "hyperparameters": as_texts(of_module | _under("data", of_data))}


# -- the run's facts ---------------------------------------------------------------------------------------------------


class RunFacts:
    """The facts of a run, which its set-up adds in running order.

    The methods `agree_on_...` compare facts between the processes. They are collective, and raise ConfigError on all
    processes if the facts differ.
    """

    def __init__(self, strategy: Strategy) -> None:
        self._strategy = strategy
        self.kept: dict[str, Mapping[str, str]] = {}
        """The facts that checkpoints keep, by the names of `GROUPS`, then by option or layer."""
        self._identity: Mapping[str, str] | None = None
        """The training loader's identity when the facts that changed while training were last left out."""

    # -- the same on all processes -------------------------------------------------------------------------------------

    def agree_on_settings(self, stage: str, config: ResolvedConfig, callbacks: list[Callback]) -> None:
        """Check that all processes make the same call with the same settings, callbacks and versions."""
        if stage == "fit":
            self.kept |= kept_facts_of_settings(config.settings, self._strategy.precision, callbacks)
        fix = "Give Trainer the same arguments on all processes; loggers and progress bars may be on rank 0 only."
        compare(self._strategy.processes, facts_of_settings(stage, config, callbacks), fix)

    def agree_on_module(self, module: TrainModule, training: bool) -> None:
        """Check that all processes have the same layers, parameters and buffers in the same order, apart from values.

        Different hooks of layers are a warning: they may only look at values.
        """
        facts = facts_of_module(module, self._strategy.precision)
        if training:
            self.kept["module"] = facts
        if self._strategy.processes.world_size > 1:
            fix = "Build the same module on all processes, in the same order (the order of a set differs)."
            shared = chain(facts_of_tensors(module, training), facts.items())
            hooks = compare(self._strategy.processes, shared, fix, also=hooks_of(module), in_order=True)
            self._warn(hooks, "hooks", "A hook that changes values has to be on all of them.")

    def agree_on_weights(self, pretrained: Mapping[str, FileTensor]) -> None:
        """Check that the pretrained weights, which each process reads from its own disk, are the same."""
        compare(self._strategy.processes, samples_of(pretrained), "Have the same pretrained weights on all machines.")

    def agree_on_loaders(self, loaders: list[BatchLoader], training: BatchLoader | None) -> None:
        """Check that the loaders are alike where they have to be, and set the length of a training epoch."""
        if self._strategy.processes.world_size == 1:
            return
        equal: dict[str, object] = {"loaders": [loader.label for loader in loaders]}
        orders, contents = dict[str, str](), dict[str, str]()
        for loader in loaders:
            found = loader.facts_for_ranks()
            equal |= _under(loader.label, found.equal)
            orders |= _under(loader.label, found.orders)
            contents |= _under(loader.label, found.contents)
        length = None if training is None else training.length
        fix = "Give every process the full dataset: the trainer splits it."
        gathered = compare(self._strategy.processes, equal.items(), fix, also=(length, orders, contents))
        lengths, orders_by_rank, contents_by_rank = (list(of_ranks) for of_ranks in zip(*gathered, strict=True))
        # A process that could not try its sampler has no order.
        if lines := differences(orders_by_rank, only_common=True):
            fix = "Samplers have to give the same order on all processes, which the trainer splits."
            raise disagreement(lines, fix)
        fix = "Make them from a seed (trainer.seed_everything before), or load them: the trainer splits one dataset."
        self._warn(contents_by_rank, "samples", fix)
        if training is not None:
            training.shorten(lengths)

    def agree_on_optimizers(
        self, module: TrainModule, optimizers: list[Optimizer], schedulers: list[TimedScheduler]
    ) -> None:
        """Check that all processes have the same optimizers and schedulers, which the strategy has not prepared yet."""
        of_optimizers, of_schedulers = facts_of_optimizers(module, optimizers), facts_of_schedulers(schedulers)
        self.kept |= kept_facts_of_optimizers(of_optimizers, of_schedulers)
        self.agree_on(of_optimizers | of_schedulers, "Give the optimizers the same options on all processes.")

    def agree_on(self, facts: Mapping[str, object], fix: str) -> None:
        """Check that further facts are the same; `fix` is a sentence of the message."""
        compare(self._strategy.processes, facts.items(), fix)

    def _warn(self, by_rank: list[dict[str, str]], what: str, fix: str) -> None:
        """Log a warning on rank 0 if facts of the processes differ."""
        lines = differences(by_rank)
        if lines and self._strategy.processes.is_global_zero:
            log.warning("%s differ between processes:%s\n%s", what, listed(lines, MOST_LINES // 2), fix)

    # -- the same as in a checkpoint -----------------------------------------------------------------------------------

    def record_data(self, loader: BatchLoader) -> None:
        """Record the facts of the training data, of a loader that was just made."""
        readers, size = self._strategy.processes.readers, loader.batch_size
        samples = None if size is None else size * readers
        self.kept |= {**facts_of_data(loader, readers), "micro_batch": {"": str(samples)}}
        self._identity = None

    def leave_out_changing(self, loader: BatchLoader | None) -> None:
        """Leave out the facts that datasets, samplers and collate functions have changed in themselves.

        In the same process the next run begins with the changed objects, and in another process with the objects that
        a data module restores. Looked for at the first checkpoint, and when the data have another length.
        """
        if loader is None:
            return
        readers = self._strategy.processes.readers
        identity = loader.identity(readers)
        if identity == self._identity:
            return
        self._identity, now = identity, facts_of_data(loader, readers)
        for name in OF_OBJECTS:
            before, there = self.kept.get(name, {}), now.get(name, {})
            self.kept[name] = {fact: text for fact, text in before.items() if there.get(fact) == text}

    def leave_out_missing(self, saved: Facts) -> None:
        """Leave out the facts of objects that a checkpoint lacks: a cache may be empty in the next process."""
        for name in OF_OBJECTS:
            facts = self.kept.get(name, {})
            self.kept[name] = {fact: text for fact, text in facts.items() if fact in saved.get(name, facts)}
