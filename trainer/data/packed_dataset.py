"""PackedDataset: documents of tokens packed into rows of one length, without attention from one to another."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.utils.data import Dataset

from trainer.errors import ConfigError

IGNORED = -100
"""The label that losses ignore."""
_OPEN_ROWS = 64
"""Rows that may still get a document; with more of them less room is lost, and the order of documents changes more."""


class PackedDataset(Dataset[dict[str, torch.Tensor]]):
    """Rows of `length` tokens with complete documents, as dicts of tensors of shape [length], dtype int64:

    - `input_ids`: the tokens, then `pad_token_id`.
    - `position_ids`: from 0 in each document, and in the padding.
    - `labels`: the tokens; -100 for the first token of each document, which nothing predicts, and for padding.
    - `document_ids`: the number of the document in the row, from 0; -1 for padding.

    Hugging Face's models attend within documents when they get `position_ids` that begin again, no attention mask and
    no cache: `model(input_ids=..., position_ids=..., use_cache=False)`, in batches of any size. For other models there
    is `attention_mask(document_ids)`. The rows depend on the lengths alone, so that a resumed
    run has the same rows.

    Args:
        documents: sequences of tokens, or dicts that have them under "input_ids", such as a Hugging Face dataset. A
            document that is longer than `length` becomes several documents.
        length: tokens in a row.
        pad_token_id: the token of the padding.
        lengths: the lengths of the documents, if they are known; else all documents are read once.

    Raises:
        ConfigError: `length` is less than 2, or there are more or fewer lengths than documents.
    """

    def __init__(
        self, documents: Sequence[Any], length: int, pad_token_id: int = 0, lengths: Sequence[int] | None = None
    ) -> None:
        number = len(documents)
        if length < 2 or (lengths is not None and len(lengths) != number):
            raise ConfigError(
                f"PackedDataset({length=}): give rows of at least 2 tokens, and lengths for all {number} documents or "
                "none."
            )
        self.documents, self.length, self.pad_token_id = documents, length, pad_token_id
        found = [len(_tokens(document)) for document in documents] if lengths is None else [int(n) for n in lengths]
        self.rows = _pack(found, length)
        """The pieces of each row: document, first token, number of tokens."""

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens: list[int] = []
        positions: list[int] = []
        documents: list[int] = []
        for number, (document, start, count) in enumerate(self.rows[index]):
            piece = list(_tokens(self.documents[document])[start : start + count])
            tokens += map(operator.index, piece)
            positions += range(count)
            documents += [number] * count
        padding = self.length - len(tokens)
        labels = [IGNORED if position == 0 else token for token, position in zip(tokens, positions, strict=True)]
        return {
            "input_ids": torch.tensor(tokens + [self.pad_token_id] * padding),
            "position_ids": torch.tensor([*positions, *range(padding)]),
            "labels": torch.tensor(labels + [IGNORED] * padding),
            "document_ids": torch.tensor(documents + [-1] * padding),
        }


def attention_mask(document_ids: torch.Tensor) -> torch.Tensor:
    """Return the causal mask within documents, bool, of shape [batch, 1, length, length], True where a token attends.

    Args:
        document_ids: shape [batch, length].
    """
    same = document_ids[:, None, :, None] == document_ids[:, None, None, :]
    causal = torch.ones(document_ids.shape[-1], document_ids.shape[-1], dtype=torch.bool, device=document_ids.device)
    return same & causal.tril()


def _tokens(document: Any) -> Any:
    return document["input_ids"] if isinstance(document, Mapping) else document


def _pack(lengths: Iterable[int], length: int) -> list[list[tuple[int, int, int]]]:
    """Return the rows: each piece of a document goes into the first open row with room."""
    rows: list[list[tuple[int, int, int]]] = []
    room: list[int] = []
    first_open = 0
    for document, tokens in enumerate(lengths):
        for start in range(0, tokens, length):
            count = min(length, tokens - start)
            first_open = max(first_open, len(rows) - _OPEN_ROWS)
            row = next((number for number in range(first_open, len(rows)) if room[number] >= count), len(rows))
            if row == len(rows):
                rows.append([])
                room.append(length)
            rows[row].append((document, start, count))
            room[row] -= count
    return rows
