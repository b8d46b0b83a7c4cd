"""scikit-learn's handwritten digits: 1797 images of 8 x 8 pixels, prepared by a transformers image processor."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset
from transformers import AutoImageProcessor, ViTImageProcessor

from trainer import DataModule


class Digits(Dataset[dict[str, Any]]):
    """Images (8, 8, 3) uint8 with their digits. Put your own images here: the processor resizes them."""

    def __init__(self, images: np.ndarray, digits: np.ndarray) -> None:
        self.images = np.repeat((images * 15.9375).astype(np.uint8)[..., None], 3, axis=-1)
        self.digits = digits

    def __len__(self) -> int:
        return len(self.digits)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"image": self.images[index], "label": int(self.digits[index])}


class DigitsData(DataModule):
    """Digits: every fifth image is for validation, the others are for training.

    Args:
        processor: a folder or name for `AutoImageProcessor.from_pretrained`; None: one for images of 16 x 16 pixels.
        batch_size: images per micro-batch and process.
        num_workers: processes that load and prepare images; 0: none.
    """

    def __init__(self, processor: str | None = None, batch_size: int = 32, num_workers: int = 0) -> None:
        super().__init__()
        self.batch_size, self.num_workers = batch_size, num_workers
        if processor is None:
            self.processor = ViTImageProcessor(size={"height": 16, "width": 16})
        else:
            self.processor = AutoImageProcessor.from_pretrained(processor)

    def setup(self, stage: str) -> None:
        from sklearn.datasets import load_digits

        data = load_digits()
        held_out = np.arange(len(data.target)) % 5 == 0
        self.train = Digits(data.images[~held_out], data.target[~held_out])
        self.val = Digits(data.images[held_out], data.target[held_out])

    def prepare(self, samples: list[dict[str, Any]]) -> Any:
        """Return the batch that the model takes: `pixel_values` (batch, 3, height, width) and `labels`."""
        images, labels = [one["image"] for one in samples], [one["label"] for one in samples]
        return self.processor(images, return_tensors="pt", input_data_format="channels_last") | {
            "labels": torch.tensor(labels)
        }

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.train, self.batch_size, True, num_workers=self.num_workers, collate_fn=self.prepare)

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.val, self.batch_size, num_workers=self.num_workers, collate_fn=self.prepare)
