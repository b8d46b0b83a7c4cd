"""Monitored values: the step that each was measured at, and which of two is better."""

from __future__ import annotations

import logging
import re
from collections.abc import Collection
from itertools import pairwise
from typing import Literal, NamedTuple

from trainer.errors import ConfigError, did_you_mean

log = logging.getLogger("trainer")

Mode = Literal["min", "max"]
ValueKind = Literal["step", "past", "interim", "epoch", "validation"]
"""Part of the training that a value covers:

- "step": a single step
- "past": a single step, earlier than the one at which the value is read
- "interim": a step or part of an epoch, whose mean is still to come
- "epoch": a full epoch
- "validation": no part, but a full validation
"""


class Measured(NamedTuple):
    """The latest value of a logged name, and the state of the run that it belongs to."""

    value: float
    step: int
    """Completed steps when it was measured; -1: of no state, as for a mean that is not complete."""
    kind: ValueKind


_LARGER = """
    acc accs accuracy top f1 f2 fbeta fscore fmeasure auc auroc auprc aupr logauc roc ap map precision recall
    sensitivity specificity tpr tnr ppv npv kappa mcc matthews iou miou giou diou ciou union dice jaccard panoptic
    pq mota hota idf1 pck pckh match correct success
    r2 rsquared explained corr correlation corrcoef pearson spearman kendall concordance similarity likelihood elbo
    ndcg dcg mrr hit hits rand nmi ami ari silhouette homogeneity completeness mutual dunn calinski fowlkes
    bleu sacrebleu rouge meteor chrf cider spice squad em preserved psnr ssim vif quality snr sdr sisnr
    sisdr signal pesq stoi mos reward rewards return returns win winrate elo sharpe profit pnl
"""
"""Words that say that larger is better: of classification, regression and ranking, text, images, sound and games."""
_SMALLER = """
    loss losses error errors err errs mae mse rmse msle rmsle mape smape wmape mase l1 l2 huber hinge tweedie
    residual deviation nll ce bce xent entropy logloss kl kld divergence perplexity ppl bpb bpc bits brier ranked
    crps ece mce calibration wer cer mer ter wil lost edit edits frechet fid kid mifid lpips hausdorff chamfer hamming
    minkowski disparity variation mpjpe ade fde epe eer fpr fnr false fallout regret cost penalty
"""
_LARGER_IS_BETTER, _SMALLER_IS_BETTER = frozenset(_LARGER.split()), frozenset(_SMALLER.split())
_OPPOSITE = frozenset(("neg", "negated", "minus"))
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


def not_logged(owner: str, name: str, logged: Collection[str]) -> str:
    """Return the message for a monitored name that was not logged; `logged` are the names that were."""
    known = ", ".join(sorted(logged)) or "nothing"
    close = did_you_mean(name, logged)
    return f"{owner}: {name!r} was not logged.{close} Logged so far: {known}. Log it, or change monitor."


def log_assumed_mode(monitor: str, owner: str) -> None:
    """Log which values of a monitor without a mode are better, if its name does not say so."""
    if implied_mode(monitor) is None:
        log.warning("%s(monitor=%r): smaller is better; give mode='max' if larger is, or mode='min'.", owner, monitor)


def implied_mode(name: str) -> Mode | None:
    """Return the mode that a word of the name implies, such as "loss" or "acc"; None if no word does.

    None also for negated names, such as scikit-learn's "neg_mean_squared_error".
    """
    words = _words(name)
    if words & _OPPOSITE:
        return None
    if words & _SMALLER_IS_BETTER:
        return "min"
    return "max" if words & _LARGER_IS_BETTER else None


def _words(name: str) -> set[str]:
    """Return the words of a name in small letters: "val_top5Acc" has "val", "top5", "top", "acc", ..."""
    parts = re.split(r"[^A-Za-z0-9]+", name)
    words = {*parts, *(part.rstrip("0123456789") for part in parts)}
    for part in parts:
        pieces = _WORD.findall(part)
        words |= {*pieces, *(a + b for a, b in pairwise(pieces))}
    return {word.lower() for word in words if word}
