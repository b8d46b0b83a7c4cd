"""Run it with: pytest"""

from __future__ import annotations

from pathlib import Path

import torch
from data import TextData, numbers_of
from module import TextClassifier

from trainer import Trainer


def test_it_learns_from_a_file_of_the_user(tmp_path: Path) -> None:
    rows = ["text,label"]
    for number in range(60):
        rows += [f"the cat number {number} sleeps,animal", f'"a train, number {number}, is late",machine']
    (tmp_path / "my.csv").write_text("\n".join(rows))
    data = TextData(str(tmp_path / "my.csv"), length=8)
    trainer = Trainer(max_epochs=8, seed=1, default_root_dir=tmp_path, enable_progress_bar=False, logger=False)
    trainer.fit(TextClassifier(classes=2), datamodule=data)
    assert data.labels == ["animal", "machine"]
    assert trainer.callback_metrics["val_acc"] == 1


def test_the_docstrings_of_the_library_have_every_label() -> None:
    data = TextData()
    data.setup("fit")
    assert set(data.train.labels.tolist()) == set(range(len(data.labels)))
    assert len(data.val) > 100


def test_padding_changes_nothing() -> None:
    module = TextClassifier().eval()
    text = "a future is like a promise"
    short, long = numbers_of(text, 6), numbers_of(text, 20)
    assert torch.allclose(module(short[None]), module(long[None]), atol=1e-6)
