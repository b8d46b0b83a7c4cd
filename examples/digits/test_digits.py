"""Run it with: pytest"""

from __future__ import annotations

from pathlib import Path

import torch
from data import DigitsData
from module import Digits

from trainer import Trainer


def test_it_learns(tmp_path: Path) -> None:
    trainer = Trainer(max_epochs=5, seed=1, default_root_dir=tmp_path, enable_progress_bar=False, logger=False)
    module, data = Digits(), DigitsData()
    trainer.fit(module, datamodule=data)
    assert trainer.test(module, datamodule=data)[0]["test_acc"] > 0.8

    again = Digits.load_from_checkpoint(next(trainer.run_dir.glob("checkpoints/epoch=*")))
    images = torch.rand(4, 1, 8, 8)
    assert torch.equal(again.eval()(images), module.cpu().eval()(images))


def test_every_image_is_in_one_part_the_same_every_time() -> None:
    one, other = DigitsData(), DigitsData()
    one.setup("fit")
    other.setup("test")
    assert [len(part) for part in (one.train, one.val, one.test)] == [1197, 300, 300]
    assert torch.equal(one.test.tensors[0], other.test.tensors[0])
    images = torch.cat([part.tensors[0] for part in (one.train.data, one.val, one.test)])
    assert images.shape == (1797, 1, 8, 8)
    assert images.min() == 0
    assert images.max() == 1
