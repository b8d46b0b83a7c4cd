"""A name without a mode means "min", unless a word of it says otherwise."""

from __future__ import annotations

import importlib
import logging
from typing import Any

import pytest
import torch

from tests.helpers.toy import Toy, loader, quiet
from tests.messages import raises_recorded
from trainer import ConfigError
from trainer.metrics.monitor import implied_mode, log_assumed_mode, resolve_mode

ROOMS = ("audio", "classification", "clustering", "image", "regression", "retrieval", "text")
"""Modules of torchmetrics."""
LARGER = ["val_acc", "top5_accuracy", "bbox_mAP", "valAcc", "acc1", "acc@5", "F1Score", "val/f1", "BinaryAUROC"]
LARGER += [
    "precision",
    "train.recall",
    "mAP50",
    "mean-IoU",
    "meanIoU",
    "psnr_db",
    "r2",
    "valid_top1",
    "val_bleu",
]
LARGER += ["val/rougeL", "chrf", "exact_match", "hits@10", "ndcg@5", "val_spearman", "SI_SNR", "elbo", "mean_reward"]
SMALLER = [
    "val_loss",
    "train/WER",
    "f1_loss",
    "valLoss",
    "loss2",
    "rmse",
    "prediction error",
    "top1_error",
    "brier_score",
    "bits_per_byte",
]
NEITHER = [
    "val_answer",
    "power",
    "tower",
    "dancer",
    "heatmap",
    "bitmap",
    "neg_mean_squared_error",
    "neg_loss",
    "score",
    "scoreboard",
    "accordion",
    "step",
    "mapping",
    "x",
]


@pytest.mark.parametrize("name", LARGER)
def test_a_name_that_says_larger_needs_a_mode(name: str) -> None:
    with raises_recorded(ConfigError):
        resolve_mode(None, name, "Owner")
    assert [resolve_mode("max", name, "Owner"), resolve_mode("min", name, "Owner")] == ["max", "min"]


@pytest.mark.parametrize("name", [*SMALLER, *NEITHER])
def test_any_other_name_means_smaller(name: str, caplog: pytest.LogCaptureFixture) -> None:
    assert resolve_mode(None, name, "Owner") == "min"
    with caplog.at_level(logging.WARNING, logger="trainer"):
        log_assumed_mode(name, "Owner")
    assert (f"Owner(monitor={name!r}): smaller is better" in caplog.text) == (name in NEITHER)


CLAIMS_OTHERWISE = {
    "DeepImageStructureAndTextureSimilarity",  # a similarity by its name
    "LearnedPerceptualImagePatchSimilarity",
    "WordInfoPreserved",  # torchmetrics says that smaller is better, its own documentation the opposite
}


def test_the_names_of_torchmetrics_say_what_its_classes_say() -> None:
    pytest.importorskip("torchmetrics")
    says = {
        name: {True: "max", False: "min"}[kind.higher_is_better]
        for room in map(importlib.import_module, ["torchmetrics", *(f"torchmetrics.{name}" for name in ROOMS)])
        for name, kind in vars(room).items()
        if isinstance(kind, type) and isinstance(getattr(kind, "higher_is_better", None), bool)
    }
    wrong = {name for name, mode in says.items() if implied_mode(name) not in (mode, None)}
    assert wrong <= CLAIMS_OTHERWISE
    unknown = {name for name in says if implied_mode(name) is None}
    assert len(unknown) < len(says) / 5, sorted(unknown)


class Clashing(Toy):
    def __init__(self, other: str, on_step: bool) -> None:
        super().__init__()
        self.other, self.on_step = other, on_step

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.log("x", 1.0, on_step=True, on_epoch=True)
        self.log(self.other, 2.0, on_step=self.on_step, on_epoch=not self.on_step)
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize(("other", "on_step"), [("x_step", True), ("x_epoch", False)])
def test_two_values_of_one_full_name_are_refused(other: str, on_step: bool) -> None:
    with raises_recorded(ConfigError):
        quiet(max_epochs=1, log_every_n_steps=1).fit(Clashing(other, on_step), loader(2))
