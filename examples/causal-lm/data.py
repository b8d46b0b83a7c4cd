"""The text: the source files of Python's standard library, or your own text files, as bytes."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from torch.utils.data import DataLoader, Dataset

from trainer import DataModule

Batch = dict[str, torch.Tensor]
"""`input_ids` and `labels`, both (batch, length) int64: the model shifts the labels by itself."""


class Pieces(Dataset[Batch]):
    """Pieces of a text with equal length; each byte is a token."""

    def __init__(self, text: bytes, length: int) -> None:
        tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
        self.pieces = tokens[: len(tokens) // length * length].view(-1, length)

    def __len__(self) -> int:
        return len(self.pieces)

    def __getitem__(self, index: int) -> Batch:
        return {"input_ids": self.pieces[index], "labels": self.pieces[index]}


class Text(DataModule):
    """Text in pieces: every twentieth file is for validation, the others are for training.

    Args:
        folder: a folder with your own text files; None: the files of Python's library.
        pattern: the names of its files to read.
        length: bytes of a piece.
        batch_size: pieces per micro-batch and process.
    """

    def __init__(
        self, folder: str | None = None, pattern: str = "*.py", length: int = 128, batch_size: int = 16
    ) -> None:
        super().__init__()
        self.folder = Path(os.__file__).parent if folder is None else Path(folder)
        self.pattern, self.length, self.batch_size = pattern, length, batch_size

    def setup(self, stage: str) -> None:
        files = [path.read_bytes() for path in sorted(self.folder.glob(self.pattern)) if path.is_file()]
        self.train = Pieces(b"".join(text for number, text in enumerate(files) if number % 20), self.length)
        self.val = Pieces(b"".join(files[::20]), self.length)

    def train_dataloader(self) -> DataLoader[Batch]:
        return DataLoader(self.train, self.batch_size, shuffle=True)

    def val_dataloader(self) -> DataLoader[Batch]:
        return DataLoader(self.val, self.batch_size)
