"""Run it with: pytest"""

from __future__ import annotations

from pathlib import Path

import torch
from data import DigitsData
from module import ImageClassifier
from transformers import AutoImageProcessor, AutoModelForImageClassification

from trainer import Trainer


def fit(tmp_path: Path, data: DigitsData, **options: object) -> ImageClassifier:
    module = ImageClassifier(width=16, layers=1, heads=2, **options)  # type: ignore[arg-type]
    Trainer(
        max_steps=3,
        limit_val_batches=2,
        seed=1,
        default_root_dir=tmp_path,
        enable_progress_bar=False,
        logger=False,
        accelerator="cpu",
        devices=1,
    ).fit(module, datamodule=data)
    return module


def test_from_pretrained_reads_what_was_trained_and_a_training_goes_on_with_it(tmp_path: Path) -> None:
    folder = str(tmp_path / "model")
    data = DigitsData(batch_size=4)
    trained = fit(tmp_path, data, save_to=folder)
    model = AutoModelForImageClassification.from_pretrained(folder)
    values = trained.net.state_dict()
    assert all(torch.equal(value, values[name]) for name, value in model.state_dict().items())
    batch = data.prepare([data.val[0]])
    again = AutoImageProcessor.from_pretrained(folder)(data.val[0]["image"], return_tensors="pt")
    assert torch.equal(batch["pixel_values"], again["pixel_values"])
    tuned = fit(tmp_path, DigitsData(processor=folder, batch_size=4), folder=folder, classes=12)
    assert tuned.net.classifier.out_features == 12
