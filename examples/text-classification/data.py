"""The texts: docstrings of Python's standard library labelled with their package, or your own CSV file."""

from __future__ import annotations

import ast
import csv
import os
import re
import zlib
from pathlib import Path

import torch
from torch.utils.data import DataLoader, Dataset

from trainer import DataModule

Batch = tuple[torch.Tensor, torch.Tensor]
"""Word numbers (batch, words) int64, 0 where there is none; and labels (batch,) int64."""

PACKAGES = ("asyncio", "email", "http", "logging", "multiprocessing", "unittest", "urllib", "xml")
VOCABULARY = 8192
"""A word's number is a hash of it: 1 to VOCABULARY - 1."""


def library_docstrings() -> list[tuple[str, str]]:
    """Return about 1500 pairs of text and label, without the package's name in the text, to make the task harder."""
    found = []
    for package in PACKAGES:
        for file in sorted((Path(os.__file__).parent / package).rglob("*.py")):
            for node in ast.walk(ast.parse(file.read_bytes())):
                if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                    text = re.sub(package, "", ast.get_docstring(node) or "", flags=re.IGNORECASE)
                    if len(text.split()) >= 6:
                        found.append((text, package))
    return found


def read_csv(path: str) -> list[tuple[str, str]]:
    """Read the pairs of text and label from a file with the columns `text` and `label`."""
    with open(path, newline="", encoding="utf-8") as file:
        return [(row["text"], row["label"]) for row in csv.DictReader(file)]


def numbers_of(text: str, length: int) -> torch.Tensor:
    """Return the first words of a text as ids, padded with 0: (length,) int64."""
    words = re.findall(r"\w+", text.lower())[:length]
    numbers = [zlib.crc32(word.encode()) % (VOCABULARY - 1) + 1 for word in words]
    return torch.tensor(numbers + [0] * (length - len(numbers)))


class Texts(Dataset[Batch]):
    """Texts and labels as numbers."""

    def __init__(self, pairs: list[tuple[str, str]], labels: list[str], length: int) -> None:
        self.words = torch.stack([numbers_of(text, length) for text, _ in pairs])
        self.labels = torch.tensor([labels.index(label) for _, label in pairs])

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> Batch:
        return self.words[index], self.labels[index]


class TextData(DataModule):
    """Texts and labels: every fifth text is for validation, the others are for training.

    Args:
        path: your own CSV file, with the columns `text` and `label`; None: docstrings of Python's library.
        length: number of words read from a text.
        batch_size: texts per micro-batch and process.
    """

    def __init__(self, path: str | None = None, length: int = 64, batch_size: int = 32) -> None:
        super().__init__()
        self.path, self.length, self.batch_size = path, length, batch_size

    def setup(self, stage: str) -> None:
        pairs = library_docstrings() if self.path is None else read_csv(self.path)
        # In alphabetical order, so that a label has the same number in every run.
        self.labels = sorted({label for _, label in pairs})
        self.train = Texts([pair for i, pair in enumerate(pairs) if i % 5], self.labels, self.length)
        self.val = Texts(pairs[::5], self.labels, self.length)

    def train_dataloader(self) -> DataLoader[Batch]:
        return DataLoader(self.train, self.batch_size, shuffle=True)

    def val_dataloader(self) -> DataLoader[Batch]:
        return DataLoader(self.val, self.batch_size)
