"""The texts: docstrings of Python's standard library labelled with their package, as token ids."""

from __future__ import annotations

import ast
import os
import re
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers
from torch.utils.data import DataLoader, Dataset
from transformers import AutoTokenizer, DataCollatorWithPadding, PreTrainedTokenizerFast

from trainer import DataModule

LABELS = ("asyncio", "email", "http", "logging", "multiprocessing", "unittest", "urllib", "xml")


def library_docstrings() -> list[tuple[str, str]]:
    """Return about 1500 pairs of text and label, without the package's name in the text, to make the task harder."""
    found = []
    for package in LABELS:
        for file in sorted((Path(os.__file__).parent / package).rglob("*.py")):
            for node in ast.walk(ast.parse(file.read_bytes())):
                if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                    text = re.sub(package, "", ast.get_docstring(node) or "", flags=re.IGNORECASE)
                    if len(text.split()) >= 6:
                        found.append((text, package))
    return found


def make_tokenizer(texts: list[str], vocabulary: int) -> Any:
    """Return a tokenizer with the most common words of the texts."""
    words = Tokenizer(models.WordLevel(unk_token="[UNK]"))
    words.normalizer = normalizers.Lowercase()
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    special = ["[PAD]", "[UNK]"]
    words.train_from_iterator(texts, trainers.WordLevelTrainer(vocab_size=vocabulary, special_tokens=special))
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="[PAD]", unk_token="[UNK]")


class Texts(Dataset[dict[str, Any]]):
    """Tokens and labels; the collator pads them."""

    def __init__(self, pairs: list[tuple[str, str]], tokenizer: Any, length: int) -> None:
        self.tokens = tokenizer([text for text, _ in pairs], truncation=True, max_length=length)["input_ids"]
        self.labels = [LABELS.index(label) for _, label in pairs]

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"input_ids": self.tokens[index], "labels": self.labels[index]}


class TextData(DataModule):
    """Texts and labels: every fifth text is for validation, the others are for training.

    Args:
        tokenizer: a folder or name for `AutoTokenizer.from_pretrained`; None: build one from the training texts.
        vocabulary: number of words in a new tokenizer.
        length: tokens read from a text.
        batch_size: texts per micro-batch and process.
    """

    def __init__(
        self, tokenizer: str | None = None, vocabulary: int = 4096, length: int = 64, batch_size: int = 32
    ) -> None:
        super().__init__()
        self.folder, self.vocabulary, self.length, self.batch_size = tokenizer, vocabulary, length, batch_size

    def setup(self, stage: str) -> None:
        pairs = library_docstrings()
        train = [pair for i, pair in enumerate(pairs) if i % 5]
        if self.folder is None:
            self.tokenizer = make_tokenizer([text for text, _ in train], self.vocabulary)
        else:
            self.tokenizer = AutoTokenizer.from_pretrained(self.folder)
        self.train = Texts(train, self.tokenizer, self.length)
        self.val = Texts(pairs[::5], self.tokenizer, self.length)

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.train, self.batch_size, shuffle=True, collate_fn=DataCollatorWithPadding(self.tokenizer))

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.val, self.batch_size, collate_fn=DataCollatorWithPadding(self.tokenizer))
