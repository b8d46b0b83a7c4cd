"""Run it with: pytest"""

from __future__ import annotations

from pathlib import Path

import torch
from data import DigitsData
from module import Digits

from trainer import Trainer


def test_it_learns(tmp_path: Path) -> None:
    trainer = Trainer(max_epochs=3, seed=1, default_root_dir=tmp_path, enable_progress_bar=False, logger=False)
    module, data = Digits(), DigitsData()
    trainer.fit(module, datamodule=data)
    assert trainer.test(module, datamodule=data)["test_acc"] > 0.8

    again = Digits.load_from_checkpoint(next(trainer.run_dir.glob("checkpoints/epoch=*")))
    images = torch.rand(4, 1, 8, 8)
    assert torch.equal(again.eval()(images), module.cpu().eval()(images))


def test_no_image_is_in_two_parts() -> None:
    data = DigitsData()
    data.setup("fit")
    assert len(data.train) + len(data.val) + len(data.test) == 1797
