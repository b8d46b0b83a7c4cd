"""The images: scikit-learn's handwritten digits, which come with the package. Yours go into `load_images`."""

from __future__ import annotations

import torch
from torch.utils.data import DataLoader, TensorDataset

from trainer import DataModule

Batch = tuple[torch.Tensor, ...]
"""Two tensors: images (batch, 1, 8, 8) float32 in 0..1, and their digits (batch,) int64."""


def load_images() -> TensorDataset:
    """All 1797 images of 8 x 8 pixels, and which digit each one shows.

    Put your own data here: any Dataset whose items are an image (channels, height, width) and a number will do.
    """
    from sklearn.datasets import load_digits

    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).div(16).unsqueeze(1)
    return TensorDataset(images, torch.tensor(digits.target, dtype=torch.long))


class DigitsData(DataModule):
    """Every sixth image validates, another sixth tests, the others train.

    Args:
        batch_size: images per micro-batch and process.
    """

    def __init__(self, batch_size: int = 64) -> None:
        super().__init__()
        self.batch_size = batch_size

    def setup(self, stage: str) -> None:
        """Called on every process before the loaders are asked for."""
        images, digits = load_images().tensors
        part = torch.arange(len(digits)) % 6
        self.train = TensorDataset(images[part > 1], digits[part > 1])
        self.val = TensorDataset(images[part == 0], digits[part == 0])
        self.test = TensorDataset(images[part == 1], digits[part == 1])

    def train_dataloader(self) -> DataLoader[Batch]:
        # A plain DataLoader: the trainer divides it among processes, and shuffles each epoch by the run's seed.
        return DataLoader(self.train, self.batch_size, shuffle=True)

    def val_dataloader(self) -> DataLoader[Batch]:
        return DataLoader(self.val, self.batch_size)

    def test_dataloader(self) -> DataLoader[Batch]:
        return DataLoader(self.test, self.batch_size)
