"""Monitored values: the step that each was measured at, and which of two is better."""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from trainer.errors import ConfigError

log = logging.getLogger("trainer")

Mode = Literal["min", "max"]
Kind = Literal["step", "interim", "epoch"]
"""Of a single step; of a single step or a part of an epoch, with the mean of the epoch still to come; of a full epoch
or evaluation."""


@dataclass(frozen=True)
class Measured:
    """The latest value of a logged name, and the state of the run that it belongs to."""

    value: float
    step: int
    """Completed steps when it was measured; -1: of no state, as for a mean that is not complete."""
    kind: Kind


_LARGER_IS_BETTER = {
    *("acc", "accuracy", "f1", "auc", "auroc", "roc", "ap", "map", "iou", "miou", "dice", "jaccard", "precision"),
    *("recall", "sensitivity", "specificity", "kappa", "mcc", "ndcg", "mrr", "bleu", "rouge", "psnr", "ssim", "r2"),
    "reward",
}
_SMALLER_IS_BETTER = {
    *("loss", "error", "err", "perplexity", "ppl", "mae", "mse", "rmse", "nll", "wer", "cer", "fid", "divergence"),
    *("regret",),
}
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+")


def resolve_mode(mode: Mode | None, monitor: str, owner: str) -> Mode:
    """Return `mode`, or "min" if it is None.

    Raises:
        ConfigError: `mode` is None, but a word of the name says that larger is better.
    """
    if mode is not None:
        return mode
    if implied_mode(monitor) == "max":
        raise ConfigError(
            f"{owner}(monitor={monitor!r}) without mode takes the smallest value for the best, and this name says that "
            "larger is better: give mode='max' (or mode='min', if smaller is meant)."
        )
    return "min"


def tell_mode(monitor: str, owner: str) -> None:
    """Log which values of a monitor without a mode are better, if its name does not say so."""
    if implied_mode(monitor) is None:
        log.warning("%s(monitor=%r): smaller is better; give mode='max' if larger is, or mode='min'.", owner, monitor)


def implied_mode(name: str) -> Mode | None:
    """Return which values are better by a word of the name, such as "loss" or "acc"; None if no word says it."""
    words = _words(name)
    if words & _SMALLER_IS_BETTER:
        return "min"
    return "max" if words & _LARGER_IS_BETTER else None


def _words(name: str) -> set[str]:
    """Return the words of a name in small letters: "val_top5Accuracy" has "val", "top5", "top", "5", "accuracy"."""
    parts = re.split(r"[^A-Za-z0-9]+", name)
    words = {*parts, *(part.rstrip("0123456789") for part in parts)}
    for part in parts:
        pieces = _WORD.findall(part)
        words |= {*pieces, *(a + b for a, b in pairwise(pieces) if b.isdigit())}
    return {word.lower() for word in words if word}
