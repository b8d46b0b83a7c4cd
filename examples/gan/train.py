"""The GAN example from Python: train it, measure it, and print some of its images.

Run it with: python train.py
"""

from __future__ import annotations

import argparse

import torch
from data import Images, load_images
from module import GAN

from trainer import Trainer


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--max-epochs", type=int, default=60)
    parser.add_argument("--max-steps", type=int, default=None)
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--root", default="runs/gan", help="run directories are made here")
    options = parser.parse_args()

    trainer = Trainer(
        max_epochs=options.max_epochs,
        max_steps=options.max_steps,
        devices=options.devices,
        default_root_dir=options.root,
        seed=42,
        log_every_n_steps=20,
    )
    module = GAN()
    images = load_images()
    before = frechet_distance(images, invent(module, len(images)))
    trainer.fit(module, datamodule=Images(options.batch_size))
    after = frechet_distance(images, invent(module, len(images)))

    # Two halves of the real images are 1.2 apart: the best possible result.
    trainer.print(f"steps: {trainer.global_step}")
    trainer.print(f"Fréchet distance to the real images: {before:.1f} before training, {after:.1f} after")
    trainer.print(drawn(invent(module, 8)))


@torch.no_grad()
def invent(module: GAN, count: int) -> torch.Tensor:
    """Return `count` images of the generator, (count, 1, 8, 8), from the same noise every time."""
    noise = torch.randn(count, module.hparams.noise, generator=torch.Generator().manual_seed(0))
    images: torch.Tensor = module(noise.to(module.device)).cpu()
    return images


def frechet_distance(a: torch.Tensor, b: torch.Tensor) -> float:
    """Return the Fréchet distance of two sets of images, assuming normally distributed pixels (Heusel et al., 2017)."""
    a, b = a.flatten(1).double(), b.flatten(1).double()
    cov_a, cov_b = torch.cov(a.T), torch.cov(b.T)
    # The trace of the square root of a matrix is the sum of the square roots of its eigenvalues.
    trace_of_root = torch.linalg.eigvals(cov_a @ cov_b).real.clamp(min=0).sqrt().sum()
    means = (a.mean(0) - b.mean(0)).square().sum()
    return float(means + cov_a.trace() + cov_b.trace() - 2 * trace_of_root)


def drawn(images: torch.Tensor) -> str:
    """Draw images (count, 1, 8, 8) in -1..1 side by side as text: dark pixels are dense characters."""
    shades = " .:-=+*#%@"
    levels = ((images[:, 0] + 1) / 2 * (len(shades) - 1)).round().long().clamp(0, len(shades) - 1)
    rows = levels.permute(1, 0, 2).tolist()
    return "\n".join("  ".join("".join(shades[level] * 2 for level in line) for line in row) for row in rows)


if __name__ == "__main__":
    main()
