"""Run it with: pytest"""

from __future__ import annotations

from pathlib import Path

import torch
from data import Pieces, Text
from module import GPT

from trainer import Trainer

SMALL = {"context": 16, "layers": 1, "heads": 2, "width": 32}


def test_it_learns(tmp_path: Path) -> None:
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "one.txt").write_text("the quick brown fox jumps over the lazy dog. " * 200)
    data = Text(str(tmp_path / "texts"), "*.txt", context=16, batch_size=16)
    trainer = Trainer(max_steps=80, seed=1, default_root_dir=tmp_path, enable_progress_bar=False, logger=False)
    trainer.fit(GPT(**SMALL, warmup_steps=10), datamodule=data)
    assert trainer.callback_metrics["val_loss"] < 3  # that of a guess is log 256 = 5.5


def test_each_byte_is_followed_by_its_target() -> None:
    pieces = Pieces(b"abcdefghi", length=4)
    assert len(pieces) == 2
    inputs, targets = pieces[1]
    assert bytes(inputs.tolist()) == b"efgh"
    assert bytes(targets.tolist()) == b"fghi"


def test_no_byte_sees_what_comes_after_it() -> None:
    module = GPT(**SMALL)
    module.configure_model()
    one = torch.randint(0, 256, (1, 8))
    other = one.clone()
    other[0, -1] = (other[0, -1] + 1) % 256
    with torch.no_grad():
        assert torch.allclose(module.net(one)[:, :-1], module.net(other)[:, :-1], atol=1e-6)
