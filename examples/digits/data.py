"""scikit-learn's handwritten digits: 1797 grey images of 8 x 8 pixels, included in the package."""

from __future__ import annotations

import torch
from torch.nn.functional import pad
from torch.utils.data import DataLoader, Dataset, TensorDataset

from trainer import DataModule

Batch = tuple[torch.Tensor, ...]
"""Two tensors: images (batch, 1, 8, 8) float32 in 0..1, and their digits (batch,) int64."""


def load_images() -> TensorDataset:
    """Return all 1797 images and their digits, in the order of the original.

    Put your own data here: any Dataset of images (channels, height, width) and numbers works.
    """
    from sklearn.datasets import load_digits

    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).div(16).unsqueeze(1)
    return TensorDataset(images, torch.tensor(digits.target, dtype=torch.long))


class Shifted(Dataset[Batch]):
    """The same images, each shifted at random by at most one pixel every time it is loaded.

    A dataset may draw random numbers from any global generator. The trainer seeds them, so that a resumed run, or one
    with another number of workers, draws the same numbers.
    """

    def __init__(self, data: TensorDataset) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Batch:
        image, digit = self.data[index]
        down, right = torch.randint(0, 3, (2,)).tolist()
        return pad(image, (1, 1, 1, 1))[:, down : down + 8, right : right + 8], digit


class DigitsData(DataModule):
    """1197 images to train on, 300 to validate, 300 to test: always the same ones, each digit equally often in all.

    Args:
        batch_size: images per micro-batch and process.
        num_workers: processes that load images; 0: none, which is best for data in memory.
    """

    def __init__(self, batch_size: int = 64, num_workers: int = 0) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.batch_size = batch_size
        self.num_workers = num_workers

    def setup(self, stage: str) -> None:
        """Split the images; called on every process before the loaders are. `stage`: fit, validate, test or predict."""
        from sklearn.model_selection import train_test_split

        data = load_images()
        images, digits = data.tensors
        train, held_out = train_test_split(torch.arange(len(digits)), test_size=600, stratify=digits, random_state=0)
        val, test = train_test_split(held_out, test_size=300, stratify=digits[held_out], random_state=0)
        self.train = Shifted(TensorDataset(images[train], digits[train]))
        self.val = TensorDataset(images[val], digits[val])
        self.test = TensorDataset(images[test], digits[test])

    def train_dataloader(self) -> DataLoader[Batch]:
        # A plain DataLoader: the trainer splits it over processes and shuffles each epoch by the run's seed.
        return DataLoader(self.train, self.batch_size, shuffle=True, num_workers=self.num_workers)

    def val_dataloader(self) -> DataLoader[Batch]:
        return DataLoader(self.val, self.batch_size, num_workers=self.num_workers)

    def test_dataloader(self) -> DataLoader[Batch]:
        return DataLoader(self.test, self.batch_size, num_workers=self.num_workers)

    def predict_dataloader(self) -> DataLoader[Batch]:
        return DataLoader(self.test, self.batch_size, num_workers=self.num_workers)
