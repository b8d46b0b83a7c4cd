"""The sections "optimizer" and "scheduler" of a DeepSpeed configuration, beside what the module configures."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from torch.optim import Optimizer

from trainer.errors import did_you_mean
from trainer.strategies.deepspeed_checks import AUTO

FAMILIES = {
    # DeepSpeed's "Adam" is AdamW unless the section says "adam_w_mode": false.
    "adam": ("Adam", "AdamW", "FusedAdam", "DeepSpeedCPUAdam"),
    "adamw": ("AdamW", "FusedAdam", "DeepSpeedCPUAdam"),
    "adagrad": ("Adagrad", "DeepSpeedCPUAdagrad"),
    "lion": ("Lion", "FusedLion", "DeepSpeedCPULion"),
    "lamb": ("Lamb", "FusedLamb"),
}
"""Which classes of optimizer are what DeepSpeed makes of a type; a type that is not here is the class's own name."""

SCHEDULES = {
    "LRRangeTest": {"lr_range_test_min_lr": "min_lr", "lr_range_test_step_size": "step_size"},
    "OneCycle": {},
    "WarmupLR": {"warmup_min_lr": "min_lrs", "warmup_max_lr": "max_lrs"},
    "WarmupDecayLR": {"warmup_min_lr": "min_lrs", "warmup_max_lr": "max_lrs"},
    "WarmupCosineLR": {},
}
"""DeepSpeed's schedules, and where their objects keep a parameter under another name."""


def optimizer_section(config: dict[str, Any], optimizer: Optimizer | None) -> tuple[list[str], list[str]]:
    """Fill the "auto" values of the section "optimizer" from the module's; returns contradictions and remarks."""
    section = config.get("optimizer")
    if not isinstance(section, dict) or optimizer is None:
        return [], []
    kind = type(optimizer).__name__
    given = section.get("type", AUTO)
    if given == AUTO:
        section["type"] = given = kind
    family = FAMILIES.get(str(given).lower(), (str(given),))
    if kind.lower() not in [name.lower() for name in family]:
        return [
            f"optimizer.type={given!r} in the DeepSpeed configuration, but configure_optimizers returned a {kind}. "
            f'Return a {family[0]} there, or write "auto" here.'
        ], []
    parameters = section.get("params", {})
    if parameters == AUTO:
        parameters = section["params"] = dict.fromkeys(_SAVED & set(optimizer.defaults), AUTO)
    problems = []
    others = []
    for name, value in parameters.items():
        actual = _hyperparameters(optimizer, name)
        if not actual:
            others.append(name)
        elif value == AUTO:
            parameters[name] = actual[0]
        elif not any(_equal(value, one) for one in actual):
            problems.append(
                f"optimizer.params.{name}={value!r} in the DeepSpeed configuration, but the {kind} of "
                f'configure_optimizers has {actual[0]!r}. Make them the same, or write "auto" here.'
            )
    for name in [name for name in others if parameters[name] == AUTO]:
        del parameters[name]
    notes = [f"the {kind} has no {', '.join(others)}: without effect in the section 'optimizer'"] if others else []
    return problems, notes


def scheduler_problems(
    config: Mapping[str, Any], optimizer: Optimizer | None, schedulers: Sequence[object] | None
) -> list[str]:
    """What contradicts in the section "scheduler". The loop steps the module's schedule, and only that.

    A section is fine beside a schedule of the module when all its values are "auto", or the schedule is DeepSpeed's own
    of that name with those values.
    """
    section = config.get("scheduler")
    if not isinstance(section, Mapping):
        return []
    kind = section.get("type", AUTO)
    if kind not in (AUTO, *SCHEDULES):
        return [f"scheduler.type={kind!r} is not a schedule of DeepSpeed.{did_you_mean(str(kind), SCHEDULES)}"]
    if schedulers is None:
        return []
    given = section.get("params") or {}
    values = {} if given == AUTO else {name: value for name, value in given.items() if value != AUTO}
    if schedulers and not values:
        return []
    if any(type(schedule).__name__ == kind and _has(schedule, values) for schedule in schedulers):
        return []
    have = " and ".join(type(schedule).__name__ for schedule in schedulers) or "no schedule"
    if kind == AUTO:
        return [f'scheduler.type="auto", but configure_optimizers returned {have}. Return one there.']
    return [
        f"the DeepSpeed configuration asks for the schedule {kind}, but configure_optimizers returned {have}, and the "
        f"trainer steps the module's. Return it there: {_to_write(kind, given, optimizer)}. "
        "Or remove the section 'scheduler'."
    ]


def _to_write(kind: str, given: Any, optimizer: Optimizer | None) -> str:
    """The line of configure_optimizers that makes DeepSpeed's own schedule."""
    rate = _hyperparameters(optimizer, "lr") if optimizer is not None else []
    known = {
        "total_num_steps": "self.trainer.estimated_stepping_batches",
        "warmup_min_lr": "0.0",
        "warmup_max_lr": repr(rate[0]) if rate else "lr",
    }
    arguments = []
    for name, value in ({} if given == AUTO else given).items():
        if value != AUTO:
            arguments.append(f"{name}={value!r}")
        elif name in known:
            arguments.append(f"{name}={known[name]}")
    return (
        f"from deepspeed.runtime.lr_schedules import {kind}; schedule = {kind}(optimizer"
        f"{''.join(', ' + argument for argument in arguments)}); "
        'return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}'
    )


def _has(schedule: object, values: Mapping[str, Any]) -> bool:
    """Whether an object of DeepSpeed's schedule was made with these values, as far as it still has them."""
    names = SCHEDULES[type(schedule).__name__]
    kept = vars(schedule)
    return all(
        _equal(value, kept[names.get(name, name)]) for name, value in values.items() if names.get(name, name) in kept
    )


_SAVED = {"lr", "betas", "eps", "weight_decay", "momentum"}


def _hyperparameters(optimizer: Optimizer, name: str) -> list[Any]:
    """The values of a hyperparameter that an optimizer was made with: its default, and those of its groups."""
    values = [optimizer.defaults[name]] if name in optimizer.defaults else []
    for group in optimizer.param_groups:
        # A schedule has already changed the learning rate; torch's schedulers keep the one before.
        value = group.get("initial_lr", group.get("lr")) if name == "lr" else group.get(name)
        if value is not None:
            values.append(value)
    return [list(value) if isinstance(value, tuple) else _plain(value) for value in values]


def _plain(value: Any) -> Any:
    return value.item() if hasattr(value, "item") else value


def _equal(given: Any, actual: Any) -> bool:
    """Whether two hyperparameters are the same; one number stands for a list of it."""
    if isinstance(actual, (list, tuple)):
        several = given if isinstance(given, (list, tuple)) else [given] * len(actual)
        return len(several) == len(actual) and all(map(_equal, several, actual))
    try:
        return math.isclose(float(given), float(actual), rel_tol=1e-9)
    except (TypeError, ValueError):
        return bool(given == actual)
