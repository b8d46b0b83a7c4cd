"""The text: Python's own library, or your own files. Read byte by byte."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from torch.utils.data import DataLoader, Dataset

from trainer import DataModule

Example = tuple[torch.Tensor, torch.Tensor]
"""Bytes, and for each of them the byte that follows; both (batch, length) int64."""


def read_text(folder: str | None, pattern: str) -> bytes:
    """All files of a folder, one after the other; None: Python's standard library."""
    root = Path(os.__file__).parent if folder is None else Path(folder)
    files = sorted(root.glob(pattern))
    if not files:
        raise FileNotFoundError(f"no {pattern} in {root}")
    return b"\n".join(file.read_bytes() for file in files)


class Pieces(Dataset[Example]):
    """A text, cut into pieces of the same length."""

    def __init__(self, text: bytes, length: int) -> None:
        self.text = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self.length = length

    def __len__(self) -> int:
        return (len(self.text) - 1) // self.length

    def __getitem__(self, index: int) -> Example:
        start = index * self.length
        piece = self.text[start : start + self.length + 1].long()
        return piece[:-1], piece[1:]


class Text(DataModule):
    """The last tenth of the text validates, the rest trains.

    Args:
        folder: of your own text files; None: Python's standard library, which is always there.
        pattern: which files of the folder.
        context: length of a piece in bytes; the model's `context`.
        batch_size: pieces per micro-batch and process.
    """

    def __init__(
        self, folder: str | None = None, pattern: str = "*.py", context: int = 64, batch_size: int = 32
    ) -> None:
        super().__init__()
        self.folder, self.pattern = folder, pattern
        self.context, self.batch_size = context, batch_size

    def setup(self, stage: str) -> None:
        text = read_text(self.folder, self.pattern)
        end = len(text) * 9 // 10
        self.train, self.val = Pieces(text[:end], self.context), Pieces(text[end:], self.context)

    def train_dataloader(self) -> DataLoader[Example]:
        return DataLoader(self.train, self.batch_size, shuffle=True)

    def val_dataloader(self) -> DataLoader[Example]:
        return DataLoader(self.val, self.batch_size)
