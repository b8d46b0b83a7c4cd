"""Run it with: pytest"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
import torch
from data import IGNORED, Crops, Text
from module import GPT, warmup_then_cosine

from trainer import Trainer


def test_it_learns_from_files_of_the_user(tmp_path: Path) -> None:
    (tmp_path / "texts").mkdir()
    for name in ("one", "two"):
        (tmp_path / "texts" / f"{name}.txt").write_text("the quick brown fox jumps over the lazy dog. " * 200)
    data = Text(str(tmp_path / "texts"), "*.txt", context=16, batch_size=16, val_pieces=64)
    trainer = Trainer(max_steps=80, seed=1, default_root_dir=tmp_path, enable_progress_bar=False, logger=False)
    trainer.fit(GPT(context=16, layers=1, heads=2, width=32, warmup_steps=10), datamodule=data)
    assert trainer.callback_metrics["val_loss"] < 3  # guessing gives log 256 = 5.5


def test_one_file_is_not_enough(tmp_path: Path) -> None:
    (tmp_path / "one.txt").write_text("alone")
    with pytest.raises(FileNotFoundError, match=r"fewer than two files \*.txt"):
        Text(str(tmp_path), "*.txt").setup("fit")


def test_a_piece_depends_on_its_number_alone() -> None:
    files = [bytes(range(10)), b"xy" * 20]
    one, other = Crops(files, length=8, count=50, seed=3), Crops(files, length=8, count=50, seed=3)
    different = Crops(files, length=8, count=50, seed=4)
    in_order = [one[i] for i in range(50)]
    backwards = [other[i] for i in reversed(range(50))][::-1]
    for (x, y), (same_x, same_y) in zip(in_order, backwards, strict=True):
        assert torch.equal(x, same_x)
        assert torch.equal(y, same_y)
    assert any(not torch.equal(in_order[i][0], different[i][0]) for i in range(50))
    for x, y in in_order:
        length = int((y != IGNORED).sum())
        assert 1 <= length <= 8
        # Each target is the byte after its input, and a piece never extends into the next file.
        assert torch.equal(x[1:length], y[: length - 1])
        assert len({byte < 10 for byte in [*x[:length].tolist(), int(y[length - 1])]}) == 1


def test_no_byte_sees_the_bytes_after_it_and_the_weights_are_tied() -> None:
    gpt = GPT(context=16, layers=2, heads=2, width=8)
    gpt.configure_model()
    gpt.eval()
    assert gpt.net is not None
    assert gpt.net.head.weight is gpt.net.token_embedding.weight
    tokens = torch.randint(256, (1, 16))
    changed = tokens.clone()
    changed[0, 10:] = 0
    difference = (gpt(tokens) - gpt(changed)).abs().amax(dim=(0, 2))
    assert difference[:10].max() < 1e-6
    assert difference[10:].min() > 1e-6


def test_the_learning_rate_rises_and_falls() -> None:
    rates = [warmup_then_cosine(step, 10, 100) for step in range(101)]
    assert rates[0] == pytest.approx(0.1)
    assert rates[10] == max(rates) == 1.0
    assert rates[100] == pytest.approx(0.1)
    assert all(a > b for a, b in pairwise(rates[10:]))
