"""A name without a mode means "min", unless a word of it says otherwise."""

from __future__ import annotations

import logging

import pytest

from trainer import ConfigError
from trainer.metrics.monitor import resolve_mode, tell_mode

LARGER = ["val_acc", "top5_accuracy", "bbox_mAP", "valAcc", "acc1", "acc@5", "F1Score", "val/f1", "BinaryAUROC"]
LARGER += ["precision", "train.recall", "mAP50", "mean-IoU", "psnr_db", "r2"]
SMALLER = ["val_loss", "train/WER", "f1_loss", "valLoss", "loss2", "rmse", "prediction error"]
NEITHER = ["val_answer", "power", "tower", "dancer", "heatmap", "bitmap", "score", "accordion", "step", "mapping", "x"]


@pytest.mark.parametrize("name", LARGER)
def test_a_name_that_says_larger_needs_a_mode(name: str) -> None:
    with pytest.raises(ConfigError, match=r"^Owner\(monitor='.*larger is better: give mode='max'"):
        resolve_mode(None, name, "Owner")
    assert [resolve_mode("max", name, "Owner"), resolve_mode("min", name, "Owner")] == ["max", "min"]


@pytest.mark.parametrize("name", [*SMALLER, *NEITHER])
def test_any_other_name_means_smaller(name: str, caplog: pytest.LogCaptureFixture) -> None:
    assert resolve_mode(None, name, "Owner") == "min"
    with caplog.at_level(logging.WARNING, logger="trainer"):
        tell_mode(name, "Owner")
    assert (f"Owner(monitor={name!r}): smaller is better" in caplog.text) == (name in NEITHER)
