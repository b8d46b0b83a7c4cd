"""Parse and check the optimizers and schedulers that `configure_optimizers` returns."""

from __future__ import annotations

import inspect
import logging
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import (
    ConstantLR,
    ExponentialLR,
    LinearLR,
    MultiStepLR,
    ReduceLROnPlateau,
    StepLR,
)

from trainer.errors import ConfigError, did_you_mean

log = logging.getLogger("trainer")


_ANY_GROUPS = (StepLR, MultiStepLR, ConstantLR, LinearLR, ExponentialLR)
"""Schedulers that multiply the rate of each group that the optimizer has."""
_DEEPEST = 4
"""Optimizers are searched in attributes of attributes, down to this depth."""
_LIBRARIES = frozenset({"torch", "trainer", *sys.stdlib_module_names} - {"types"})
"""Packages whose objects are not looked into, but for namespaces, which are of `types`."""


@dataclass
class TimedScheduler:
    """A learning-rate scheduler and its stepping schedule."""

    scheduler: Any
    interval: str = "epoch"
    """Step after every "epoch", or after every "step" (of the optimizer, not of a process or micro-batch)."""
    frequency: int = 1
    """Number of epochs or steps from one scheduler step to the next."""
    monitor: str | None = None
    """Name of the logged value that is passed to `scheduler.step`, for ReduceLROnPlateau."""
    strict: bool = True
    """Raise when the monitored name was not logged; with False, skip that scheduler step."""
    name: str | None = None
    """Name of the scheduler in the logs of LearningRateMonitor."""
    reduce_on_plateau: bool = False
    """True if `scheduler.step` takes the monitored value; set for ReduceLROnPlateau."""
    rests: bool = field(default=False, init=False)
    known_groups: int = field(default=0, init=False)
    """The groups that the scheduler changes; 0: all."""
    value_step: int = field(default=-1, init=False)
    """The step of the last value that the scheduler was given: each value is given once."""

    def __post_init__(self) -> None:
        self.reduce_on_plateau = self.reduce_on_plateau or isinstance(self.scheduler, ReduceLROnPlateau)

    def leave_new_groups(self) -> None:
        """Have `step` leave the rates of groups alone that were added to the optimizer after the scheduler was made.

        Those of torch's schedulers that have a rate for each group would refuse the others.
        """
        first = getattr(self.scheduler, "_schedulers", [self.scheduler])[0]
        owner, rates = getattr(self.scheduler, "optimizer", None), getattr(first, "base_lrs", ())
        if owner is not None and not isinstance(self.scheduler, _ANY_GROUPS) and len(rates) < len(owner.param_groups):
            self.known_groups = len(rates)

    def step_known_groups(self, step: Callable[[Any, Any], Any], value: float | None) -> None:
        """Call `step(scheduler, value)` while the optimizer has the groups only that the scheduler knows."""
        groups = self.scheduler.optimizer.param_groups
        added = groups[self.known_groups :]
        del groups[self.known_groups :]
        try:
            step(self.scheduler, value)
        finally:
            groups.extend(added)

    def is_due(self, interval: str, count: int) -> bool:
        """Whether the scheduler steps after `count` epochs or steps."""
        return self.interval == interval and count % self.frequency == 0 and not self.rests

    def rest(self) -> None:
        """Step no more in this run: a callback sets the learning rates."""
        self.rests = True


class NoOptimizer(Optimizer):
    """Takes the place of the optimizer if `configure_optimizers` returns None: without parameters, its step changes
    nothing."""

    def __init__(self) -> None:
        super().__init__([torch.zeros(1)], {})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add nothing."""

    def step(self, closure: Any = None) -> Any:
        """Return the result of the closure."""
        return None if closure is None else closure()


def optimizer_like(optimizer: Optimizer, parameters: list[nn.Parameter]) -> Optimizer:
    """Return a new optimizer of the class and options of `optimizer`, for other parameters.

    Its learning rate is that before a schedule changed it. Raises whatever the class does if it takes other arguments.
    """
    options = {name: option for name, option in optimizer.param_groups[0].items() if name != "params"}
    if "initial_lr" in options:
        options["lr"] = options.pop("initial_lr")
    known = inspect.signature(type(optimizer)).parameters
    given = {name: option for name, option in {**optimizer.defaults, **options}.items() if name in known}
    make: Any = type(optimizer)
    fresh: Optimizer = make(parameters, **given)
    return fresh


def parse_optimizers(
    configured: Any, module_name: str, automatic: bool = True, calls_step: bool = True
) -> tuple[list[Optimizer], list[TimedScheduler]]:
    """Return the optimizers and schedulers from any form that `configure_optimizers` may return.

    Args:
        automatic: the trainer steps the schedulers; False: the module does.
        calls_step: they are stepped by their method `step`; False: by an override of `lr_scheduler_step`.

    Raises:
        ConfigError: the value has another form or an unknown key, or a scheduler cannot be stepped or stored.
    """
    optimizers, schedulers = _read(NoOptimizer() if configured is None else configured, module_name)
    for optimizer in optimizers:
        if not isinstance(optimizer, Optimizer):
            raise ConfigError(
                f"{module_name}.configure_optimizers gave a {type(optimizer).__name__} where an optimizer is expected: "
                'return torch.optim.AdamW(...), {"optimizer": optimizer, "lr_scheduler": scheduler}, or two lists: '
                "[optimizer], [scheduler]."
            )
    if not optimizers and automatic:
        raise ConfigError(
            f"{module_name}.configure_optimizers returned no optimizer. Return torch.optim.AdamW(...), or None for a "
            "training without one."
        )
    for config in schedulers:
        _check_scheduler(config, automatic, calls_step)
        # Schedulers of other libraries may lack the attribute `optimizer`.
        owner = getattr(config.scheduler, "optimizer", None)
        if isinstance(owner, Optimizer) and not any(owner is optimizer for optimizer in optimizers):
            raise ConfigError(
                f"the {type(config.scheduler).__name__} of {module_name}.configure_optimizers was made for another "
                f"{type(owner).__name__} than the one returned. Make one optimizer, and give the same object to both."
            )
    return optimizers, schedulers


def _check_scheduler(config: TimedScheduler, automatic: bool, calls_step: bool) -> None:
    kind = type(config.scheduler).__name__
    methods = ("state_dict", "load_state_dict", *(["step"] if automatic and calls_step else []))
    is_other = isinstance(config.scheduler, type | Optimizer)
    if is_other or not all(hasattr(config.scheduler, method) for method in methods):
        raise ConfigError(
            f"configure_optimizers gave a {kind} as lr_scheduler: give a scheduler, for example "
            f"torch.optim.lr_scheduler.StepLR(optimizer, 10), or another object with {', '.join(methods)}."
        )
    if config.interval not in ("epoch", "step"):
        raise ConfigError(f"interval={config.interval!r} for {kind}: allowed are 'epoch' and 'step'.")
    if type(config.frequency) is not int or config.frequency < 1:
        raise ConfigError(f"frequency={config.frequency!r} for {kind}: give an integer from 1.")
    if automatic and config.reduce_on_plateau and config.monitor is None:
        raise ConfigError(
            f"{kind} needs the name of a logged value: return "
            '{"optimizer": ..., "lr_scheduler": {"scheduler": ..., "monitor": "val_loss"}}.'
        )


def trains_something(optimizer: Optimizer) -> bool:
    """Whether a parameter of an optimizer requires a gradient."""
    return any(parameter.requires_grad for parameter in parameters_of([optimizer]))


def require_trainable(optimizers: Iterable[Optimizer], module_name: str) -> None:
    """Raise ConfigError if nothing in an optimizer requires a gradient, when hooks have unfrozen what they will."""
    for optimizer in optimizers:
        if not trains_something(optimizer) and not isinstance(optimizer, NoOptimizer):
            raise ConfigError(
                f"the {type(optimizer).__name__} of {module_name}.configure_optimizers has no parameter that requires "
                "a gradient: all of its parameters are frozen, or it was given an empty list."
            )


def check_parameters(optimizers: list[Optimizer], module: nn.Module, shared: bool) -> None:
    """Check that every parameter belongs to the module (else no checkpoint would contain it).

    Unless `shared`, also check that no parameter is in two optimizers.

    Raises:
        ConfigError: a check fails; the message names the optimizer.
    """
    inside = {id(parameter) for parameter in module.parameters()}
    taken: dict[int, str] = {}
    for optimizer in optimizers:
        kind, parameters = type(optimizer).__name__, parameters_of([optimizer])
        for parameter in parameters:
            if id(parameter) not in inside:
                raise ConfigError(
                    f"{kind} has a parameter of shape {tuple(parameter.shape)} that is not in {type(module).__name__}, "
                    "so it would not be moved or saved. Make it, or what it is in, an attribute: self.<name> = ..."
                )
            if id(parameter) in taken and not shared:
                raise ConfigError(
                    f"a parameter of shape {tuple(parameter.shape)} is in two optimizers ({taken[id(parameter)]} and "
                    f"{kind}), and both would step it. Give each its own, or set automatic_optimization = False."
                )
        taken.update(dict.fromkeys(map(id, parameters), kind))


def _read(configured: Any, module_name: str) -> tuple[list[Any], list[TimedScheduler]]:
    """Return the optimizers and schedulers of two lists, or of one or several dicts and optimizers."""
    parts = list(configured) if isinstance(configured, list | tuple) else [configured]
    if len(parts) == 2 and all(isinstance(part, list | tuple) for part in parts):
        return list(parts[0]), [_scheduler(scheduler) for scheduler in parts[1]]
    optimizers, schedulers = [], []
    known = ("optimizer", "lr_scheduler", "monitor")
    for part in parts:
        if not isinstance(part, Mapping):
            optimizers.append(part)
            continue
        _check_keys(part, f"{module_name}.configure_optimizers returned a dict", "optimizer", known)
        optimizers.append(part["optimizer"])
        if part.get("lr_scheduler") is not None:
            schedulers.append(_scheduler(part["lr_scheduler"], part.get("monitor")))
    return optimizers, schedulers


def _scheduler(configured: Any, monitor: str | None = None) -> TimedScheduler:
    options = configured if isinstance(configured, Mapping) else {"scheduler": configured}
    known = [one.name for one in fields(TimedScheduler) if one.init]
    _check_keys(options, "lr_scheduler is a dict", "scheduler", known)
    return TimedScheduler(**{"monitor": monitor, **options})


def _check_keys(given: Mapping[str, Any], subject: str, needed: str, known: Sequence[str]) -> None:
    """Raise a ConfigError if a dict has an unknown key, or lacks the needed one."""
    for key in given:
        if key not in known:
            raise ConfigError(
                f"{subject} with the unknown key {key!r}.{did_you_mean(str(key), known)} Allowed: {', '.join(known)}."
            )
    if needed not in given:
        raise ConfigError(f"{subject} without {needed!r}.")


def zero_grad_fast(optimizer: Optimizer) -> None:
    """Set gradients to None as `optimizer.zero_grad()` does, without its 12 microseconds of overhead."""
    if type(optimizer).zero_grad is not Optimizer.zero_grad or "zero_grad" in vars(optimizer):
        optimizer.zero_grad()
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = None


def copy_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Copy gradients whose memory the next forward may overwrite, as CUDA graphs do with the results of a backward."""
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad = parameter.grad.clone()


def needs_closure(optimizer: Optimizer) -> bool:
    """Return True if `optimizer.step` requires a closure, as LBFGS's does."""
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


def optimizers_inside(optimizer: Optimizer) -> dict[str, Optimizer]:
    """Return an optimizer, under the name "", and those that it holds, by the way to them.

    They are in its attributes, in lists, tuples and dicts there, and in the attributes of users' objects there.
    """
    waiting: list[tuple[tuple[Any, ...], Any]] = [((), optimizer)]
    seen = {id(optimizer)}
    for path, outer in waiting:
        held: list[tuple[tuple[Any, ...], Any]] = []
        for name, value in vars(outer).items():
            held.append(((name,), value))
            several = dict(enumerate(value)) if isinstance(value, (list, tuple)) else value
            for key, one in several.items() if isinstance(several, dict) else ():
                held.append(((name, key), one))
        for way, one in held:
            if id(one) in seen or not hasattr(one, "__dict__"):
                continue
            if isinstance(one, Optimizer) or (len(path) < _DEEPEST and _is_users(one)):
                seen.add(id(one))
                waiting.append((path + way, one))
    # A name is made here, and not of each key, which may be a parameter: words for a tensor take long.
    return {".".join(map(str, path)): one for path, one in waiting if isinstance(one, Optimizer)}


def _is_users(one: Any) -> bool:
    """Whether an object with attributes is of a class that is not a library's, and no module."""
    package = type(one).__module__.partition(".")[0]
    return package not in _LIBRARIES and not isinstance(one, nn.Module)


def with_modes(optimizers: Iterable[Optimizer]) -> list[Optimizer]:
    """Return the optimizers, and those in them, with `train()` and `eval()`: they have two sets of weights."""
    every = [one for optimizer in optimizers for one in optimizers_inside(optimizer).values()]
    return [one for one in every if all(callable(getattr(one, mode, None)) for mode in ("train", "eval"))]


def parameters_of(optimizers: Iterable[Any]) -> list[Any]:
    """Return the parameters in the groups of optimizers."""
    groups = chain.from_iterable(optimizer.param_groups for optimizer in optimizers)
    return [*chain.from_iterable(group["params"] for group in groups)]
