"""Text as bytes: Python's standard library, which is always installed, or your own files."""

from __future__ import annotations

import os
from bisect import bisect_right
from itertools import accumulate
from pathlib import Path

import torch
from torch.utils.data import DataLoader, Dataset

from trainer import DataModule

IGNORED = -100
"""The target where there is no next byte (cross_entropy's `ignore_index`)."""

Example = tuple[torch.Tensor, torch.Tensor]


def read_files(folder: str | None, pattern: str) -> list[bytes]:
    """Return the text of every file of a folder, in alphabetical order of names.

    Four spaces become one tab, so a level of indentation is one byte to predict instead of four.

    Args:
        folder: folder of text files; None: Python's standard library.
        pattern: pattern for the names of the files.

    Raises:
        FileNotFoundError: fewer than two files; one is needed for validation.
    """
    root = Path(os.__file__).parent if folder is None else Path(folder)
    files = (path.read_bytes().replace(b"    ", b"\t") for path in sorted(root.glob(pattern)))
    texts = [text for text in files if len(text) >= 2]
    if len(texts) < 2:
        raise FileNotFoundError(f"fewer than two files {pattern} with text in {root}: one is to validate on")
    return texts


class Crops(Dataset[Example]):
    """`count` pieces of text, each starting at a random position of a file and ending at its end at the latest.

    Piece i depends only on `seed` and i, not on the order or the process that loads it. So a resumed run, or a run on
    more processes, sees the same pieces.
    """

    def __init__(self, files: list[bytes], length: int, count: int, seed: int) -> None:
        self.text = torch.frombuffer(bytearray(b"".join(files)), dtype=torch.uint8)
        self.ends = list(accumulate(len(file) for file in files))
        self.length = length
        self.count = count
        self.seed = seed

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Example:
        """Return the bytes of a piece, and for each the byte that follows; both (length,) int64, padded at the end."""
        chance = torch.Generator().manual_seed(self.seed * 1_000_003 + index)
        start = int(torch.randint(len(self.text), (), generator=chance))
        end_of_file = self.ends[bisect_right(self.ends, start)]
        start = min(start, end_of_file - 2)  # at least one byte and its target
        piece = self.text[start : min(start + self.length + 1, end_of_file)].long()

        inputs = torch.zeros(self.length, dtype=torch.long)
        targets = torch.full((self.length,), IGNORED)
        inputs[: len(piece) - 1] = piece[:-1]
        targets[: len(piece) - 1] = piece[1:]
        return inputs, targets


class Text(DataModule):
    """Text files: every tenth is for validation (with fewer files, the last), the others are for training.

    Args:
        folder: folder of your own text files; None: Python's standard library.
        pattern: pattern for the names of the files.
        context: the length of a piece in bytes; the model's `context`.
        batch_size: pieces per micro-batch and process.
        train_pieces: pieces in an epoch; None: as many as fit into the text.
        val_pieces: pieces to validate on.
        seed: seed for choosing the pieces.
    """

    def __init__(
        self,
        folder: str | None = None,
        pattern: str = "*.py",
        context: int = 64,
        batch_size: int = 32,
        train_pieces: int | None = None,
        val_pieces: int = 512,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.folder = folder
        self.pattern = pattern
        self.context = context
        self.batch_size = batch_size
        self.train_pieces = train_pieces
        self.val_pieces = val_pieces
        self.seed = seed

    def setup(self, stage: str) -> None:
        files = read_files(self.folder, self.pattern)
        every = min(10, len(files))
        train_files = [file for number, file in enumerate(files, start=1) if number % every]
        val_files = files[every - 1 :: every]
        train_pieces = self.train_pieces or sum(len(file) for file in train_files) // self.context
        self.train = Crops(train_files, self.context, train_pieces, self.seed)
        self.val = Crops(val_files, self.context, self.val_pieces, self.seed)

    def train_dataloader(self) -> DataLoader[Example]:
        # No shuffling: the pieces are already in random order.
        return DataLoader(self.train, batch_size=self.batch_size)

    def val_dataloader(self) -> DataLoader[Example]:
        return DataLoader(self.val, batch_size=self.batch_size)
