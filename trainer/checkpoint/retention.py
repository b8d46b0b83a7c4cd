"""Decide which checkpoints to keep and which to delete, and format their names."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from trainer.errors import ConfigError, did_you_mean

Kept = Mapping[str, "float | None"]
"""Names of checkpoints, oldest first, with the monitored value at the time of each."""

_FIELD = re.compile(r"\{([^{}:]+)(?::([^{}]*))?\}")
"""A placeholder and its format."""

_SMALLER_IS_BETTER = ("loss", "error", "err", "perplexity", "ppl", "mae", "mse", "rmse", "wer", "cer", "fid")
_LARGER_IS_BETTER = ("acc", "accuracy", "f1", "auc", "auroc", "iou", "map", "precision", "recall", "bleu", "psnr", "r2")


@dataclass(frozen=True)
class Retention:
    """How many checkpoints to keep.

    Args:
        by_value: keep the best instead of the newest; a missing value or nan ranks last.
        mode: "min" or "max", the better value.
        top_k: number of checkpoints to keep; -1: all.
        last: also keep the newest one.
    """

    by_value: bool
    mode: Literal["min", "max"]
    top_k: int
    last: bool

    def best(self, kept: Kept) -> str | None:
        """Return the checkpoint with the best value, the newest among equals; None if none has a value."""
        newest_first = reversed(list(kept.items()))
        known = {name: value for name, value in newest_first if value is not None and value == value}
        if not known:
            return None
        return (min if self.mode == "min" else max)(known, key=known.__getitem__)

    def to_delete(self, kept: Kept) -> list[str]:
        """Return the checkpoints that are not kept, oldest first."""
        if self.top_k == -1:
            return []
        newest_first = list(reversed(list(kept)))
        if self.by_value:
            sign = 1 if self.mode == "min" else -1
            known = [name for name in newest_first if (value := kept[name]) is not None and value == value]
            wanted = sorted(known, key=lambda name: sign * (kept[name] or 0.0))[: self.top_k]
        else:
            wanted = newest_first[: self.top_k]
        if self.last:
            wanted.append(newest_first[0])
        return [name for name in kept if name not in wanted]


def mode_of(monitor: str) -> Literal["min", "max"]:
    """Infer from a metric's name which value is better: the smaller loss, the larger accuracy.

    Raises:
        ConfigError: the name does not tell.
    """
    words = re.split(r"[^a-z0-9]+", monitor.lower())
    smaller = any(word.endswith(known) for word in words for known in _SMALLER_IS_BETTER)
    larger = any(word.endswith(known) for word in words for known in _LARGER_IS_BETTER)
    if smaller == larger:
        raise ConfigError(
            f"ModelCheckpoint(monitor={monitor!r}): it is not clear whether smaller or larger is better. "
            "Give mode='min' or mode='max'."
        )
    return "min" if smaller else "max"


def format_name(template: str, values: Mapping[str, float], with_names: bool) -> str:
    """Format the name of a checkpoint: "{epoch}-{val_loss:.2f}" -> "epoch=3-val_loss=0.17", or "3-0.17" without names.

    Raises:
        ConfigError: the template asks for a value that is not there.
    """

    def fill(match: re.Match[str]) -> str:
        name, form = match[1], match[2] or ""
        if name not in values:
            raise ConfigError(
                f"ModelCheckpoint(filename={template!r}): {name!r} was not logged.{did_you_mean(name, values)} "
                f"Known: {', '.join(sorted(values))}."
            )
        text = format(values[name], form)
        return f"{name}={text}" if with_names else text

    return _FIELD.sub(fill, template).replace("/", "_")


def template_problems(template: Any) -> list[str]:
    """Return the mistakes in a template, to be reported before the first checkpoint is written."""
    if template is None:
        return []
    if not isinstance(template, str):
        return [f"filename={template!r}: give a text such as '{{epoch}}-{{val_loss:.2f}}'."]
    rest = _FIELD.sub("", template)
    if "{" in rest or "}" in rest:
        return [f"filename={template!r}: a brace has no partner. Write '{{epoch}}-{{val_loss:.2f}}' or the like."]
    problems = []
    for name, form in _FIELD.findall(template):
        try:
            format(0 if name in ("epoch", "step") else 0.0, form)
        except ValueError as error:
            problems.append(f"filename={template!r}: {name!r} cannot be written as {form!r} ({error}). Use '.2f'.")
    return problems
