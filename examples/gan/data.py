"""The real images: scikit-learn's handwritten digits, included in the package. Load your own in `load_images`."""

from __future__ import annotations

import torch
from torch.utils.data import DataLoader, TensorDataset

from trainer import DataModule

Batch = tuple[torch.Tensor, ...]
"""One tensor: images (batch, 1, 8, 8) float32 in -1..1."""


def load_images() -> torch.Tensor:
    """Return all 1797 images: (1797, 1, 8, 8).

    Put your own here. For images of another size, change the last layer of the generator and the first layer
    of the discriminator.
    """
    from sklearn.datasets import load_digits

    images = torch.tensor(load_digits().images, dtype=torch.float32).unsqueeze(1)
    return images / 8 - 1  # 0..16 to the -1..1 of the generator's last layer


class Images(DataModule):
    """All images, to train on.

    Args:
        batch_size: images per micro-batch and process.
    """

    def __init__(self, batch_size: int = 64) -> None:
        super().__init__()
        self.batch_size = batch_size

    def setup(self, stage: str) -> None:
        self.train = TensorDataset(load_images())

    def train_dataloader(self) -> DataLoader[Batch]:
        return DataLoader(self.train, self.batch_size, shuffle=True)
