"""What `self.log` accepts: names, numbers, weights; and what to write for options that it does not have."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from trainer.errors import ConfigError, did_you_mean

OPTIONS = ("prog_bar", "logger", "on_step", "on_epoch", "reduction", "batch_size", "weight")

OTHER_NAMES = {
    "sync_dist": "Leave it out: values are always reduced over all processes.",
    "sync_dist_group": "Leave it out: values are always reduced over all processes.",
    "rank_zero_only": "Leave it out, and log on every process: loggers are only on rank 0 anyway.",
    "reduce_fx": "Use reduction='mean', 'sum', 'min' or 'max'.",
    "add_dataloader_idx": "Leave it out: with several loaders a name is 'name/loader', and 'name' is over all of them.",
    "metric_attribute": "Leave it out: the metric is found among the module's attributes.",
    "enable_graph": "Leave it out: values are logged without their graph.",
}
"""Options of other trainers, and what to do here."""


def refuse_options(options: Iterable[str]) -> None:
    """Raise `ConfigError` for options that `self.log` does not have."""
    for option in options:
        hint = OTHER_NAMES.get(option) or did_you_mean(option, OPTIONS).strip()
        raise ConfigError(f"self.log has no option {option!r}. {hint} Options: {', '.join(OPTIONS)}.")


def check_first(name: Any, refusal: str | None) -> None:
    """The first value of a name: raise `ConfigError` if it is no name, or for the given reason."""
    if not isinstance(name, str):
        raise ConfigError(
            f"self.log got a {type(name).__name__} as the name: write self.log('loss', value), the name first."
        )
    if refusal is not None:
        raise ConfigError(f"self.log({name!r}): {refusal}")


def as_number(name: str, value: Any) -> float:
    """numpy scalars and the like, as a number; anything else is refused."""
    try:
        if not isinstance(value, (str, bytes)):
            return float(value)
    except (TypeError, ValueError):
        pass
    what = f"the class {value.__name__}" if isinstance(value, type) else f"a {type(value).__name__}"
    raise ConfigError(
        f"self.log({name!r}) got {what}: give a number, a tensor with one element, or a torchmetrics.Metric object; "
        "for a dict of values or a MetricCollection use self.log_dict."
    )


def checked_weight(name: str, weight: Any) -> Any:
    """A weight as it is, if it is one."""
    if isinstance(weight, torch.Tensor):
        if weight.numel() == 1:
            return weight
        raise ConfigError(
            f"self.log({name!r}): batch_size or weight is a tensor of shape {tuple(weight.shape)}; give one number, "
            "for example len(batch)."
        )
    if not isinstance(weight, (int, float)) or weight < 0:
        raise ConfigError(f"self.log({name!r}): batch_size or weight is {weight!r}; give a number from 0.")
    return weight
