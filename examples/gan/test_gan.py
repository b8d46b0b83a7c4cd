"""Run it with: pytest"""

from __future__ import annotations

from pathlib import Path

import torch
from data import Images, load_images
from module import GAN

from trainer import Trainer


@torch.no_grad()
def distance(module: GAN) -> float:
    """Return the distance between the mean real image and the mean generated one."""
    noise = torch.randn(500, module.hparams.noise, generator=torch.Generator().manual_seed(0))
    return float((module.cpu()(noise).mean(0) - load_images().mean(0)).norm())


def test_invented_images_become_more_like_the_real_ones(tmp_path: Path) -> None:
    trainer = Trainer(max_epochs=8, seed=1, default_root_dir=tmp_path, enable_progress_bar=False, logger=False)
    module = GAN()
    before = distance(module)
    trainer.fit(module, datamodule=Images())
    assert distance(module) < before / 2
