"""Run it with: pytest"""

from __future__ import annotations

from pathlib import Path

import torch
from data import LABELS, TextData
from module import TextClassifier
from transformers import pipeline

from trainer import Trainer


def fit(tmp_path: Path, data: TextData, **options: object) -> TextClassifier:
    module = TextClassifier(vocabulary=256, width=16, layers=1, heads=2, **options)  # type: ignore[arg-type]
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


def test_a_pipeline_reads_what_was_trained_and_a_training_goes_on_with_it(tmp_path: Path) -> None:
    folder = str(tmp_path / "model")
    trained = fit(tmp_path, TextData(vocabulary=256, batch_size=4), save_to=folder)
    classify = pipeline("text-classification", folder, device="cpu")
    assert classify("Send a request to the server.")[0]["label"] in LABELS
    values = trained.net.state_dict()
    assert all(torch.equal(value, values[name]) for name, value in classify.model.state_dict().items())
    tuned = fit(tmp_path, TextData(tokenizer=folder, batch_size=4), folder=folder)
    assert tuned.net.config.id2label == dict(enumerate(LABELS))
