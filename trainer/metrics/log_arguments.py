"""Check the arguments of `self.log`."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import torch

from trainer.errors import ConfigError

_FUNCTIONS = {
    torch.mean: "mean",
    torch.sum: "sum",
    torch.min: "min",
    torch.amin: "min",
    min: "min",
    torch.max: "max",
    torch.amax: "max",
    max: "max",
    sum: "sum",
}


def reduction_named(reduction: Any) -> Any:
    """Return the name of a reduction that is given as a function, or in capital letters."""
    return reduction.lower() if isinstance(reduction, str) else _FUNCTIONS.get(reduction, reduction)


RESERVED_NAMES = ("step", "epoch")
"""Names of the trainer's own values, which every logger has."""


def check_name(name: Any, disabled_reason: str | None) -> None:
    """Raise `ConfigError` if `name` is one of `RESERVED_NAMES`, or if there is a `disabled_reason`."""
    if disabled_reason is not None:
        raise ConfigError(f"self.log({name!r}): {disabled_reason}")
    if name in RESERVED_NAMES:
        raise ConfigError(
            f"self.log({name!r}): every logger already gets the trainer's count of {name}s under this name. Leave the "
            f"call out, or rename the value to 'my_{name}'."
        )


def check_value(name: str, value: Any) -> None:
    """Raise `ConfigError` for a complex number and for a sharded tensor."""
    if isinstance(value, torch.Tensor) and value.is_complex():
        raise ConfigError(f"self.log({name!r}) got a complex number: log value.abs(), or value.real.")
    if hasattr(value, "full_tensor"):
        raise ConfigError(f"self.log({name!r}) got a sharded tensor: log value.full_tensor(), on all processes.")


def as_number(name: str, value: Any) -> float:
    """Return a numpy scalar or the like as a float.

    Raises:
        ConfigError: `value` is not a number.
    """
    with suppress(TypeError, ValueError):
        if not isinstance(value, (str, bytes)):
            return float(value)
    raise ConfigError(
        f"self.log({name!r}) got a {type(value).__name__}: give a number, a tensor with one element, or a "
        "torchmetrics.Metric object; for a dict of values or a MetricCollection use self.log_dict."
    )


def checked_weight(name: str, weight: Any) -> Any:
    """Return the weight; raise `ConfigError` if it is not a number of at least 0."""
    if isinstance(weight, torch.Tensor) and weight.numel() == 1:
        return weight.clone()  # it may change before it is read
    if isinstance(weight, (int, float)) and weight >= 0:
        return weight
    raise ConfigError(
        f"self.log({name!r}): batch_size or weight is a {type(weight).__name__} that is not one number from 0. Give "
        "len(batch), for example."
    )
