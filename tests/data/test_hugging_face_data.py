"""Batches of tokenizers and collators, and datasets of the datasets library, with their own state."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from tests.helpers.toy import quiet
from trainer import TrainModule
from trainer.callbacks import ModelCheckpoint

transformers = pytest.importorskip("transformers", reason='needs transformers: pip install "exact-trainer[dev]"')
tokenizers = pytest.importorskip("tokenizers")

TEXTS = ["a b c d", "e f", "g h i j k", "l m", "n o a", "b c", "d e f g", "h"] * 4


def make_tokenizer() -> Any:
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel(unk_token="[UNK]"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    words.train_from_iterator(TEXTS, tokenizers.trainers.WordLevelTrainer(special_tokens=["[PAD]", "[UNK]"]))
    return transformers.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="[PAD]", unk_token="[UNK]")


class Sums(TrainModule):
    """Remember the tokens of each batch."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1))
        self.seen: list[list[list[int]]] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        assert isinstance(batch, transformers.BatchEncoding)
        assert batch["labels"].device == self.device
        self.seen.append(batch["input_ids"].tolist())
        return (self.weight * batch["input_ids"].float()).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Stream(IterableDataset[Any]):
    """Encoded texts, with a place that can be saved."""

    def __init__(self) -> None:
        self.place, self.reads = 0, 0
        self.tokenizer = make_tokenizer()

    def __iter__(self) -> Any:
        while self.place < len(TEXTS):
            self.place += 1
            self.reads += 1
            yield self.tokenizer(TEXTS[self.place - 1])
        self.place = 0

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.place = state["place"]


def mapped() -> Any:
    tokenizer = make_tokenizer()
    dataset = pytest.importorskip("datasets").Dataset.from_dict({"text": TEXTS})
    return dataset.map(lambda row: tokenizer(row["text"]), remove_columns=["text"])


def buffered() -> Any:
    return mapped().to_iterable_dataset(num_shards=4).shuffle(seed=3, buffer_size=8)


DATASETS = {"map": mapped, "iterable": lambda: mapped().to_iterable_dataset(num_shards=4), "own": Stream}


def fit(dataset: Any, steps: int, folder: Path, **options: Any) -> Sums:
    module = Sums()
    collate = transformers.DataCollatorForLanguageModeling(make_tokenizer(), mlm=False)
    loader: DataLoader[Any] = DataLoader(dataset, 4, shuffle=options.pop("shuffle"), collate_fn=collate)
    trainer = quiet(max_steps=steps, enable_checkpointing=True, callbacks=[ModelCheckpoint(folder)])
    trainer.fit(module, loader, **options)
    assert trainer.progress.samples == 4 * steps
    return module


@pytest.mark.parametrize("kind", [*DATASETS, "buffered"])
@pytest.mark.parametrize("steps", [3, 8], ids=["inside an epoch", "at its end"])
def test_a_resumed_run_goes_on_at_the_next_batch(kind: str, steps: int, tmp_path: Path) -> None:
    make = DATASETS.get(kind, buffered)
    shuffle = True if kind == "map" else None
    full = fit(make(), 12, tmp_path / "full", shuffle=shuffle)
    first = fit(make(), steps, tmp_path / "broken", shuffle=shuffle)
    dataset = make()
    second = fit(dataset, 12, tmp_path / "broken", shuffle=shuffle, ckpt_path="last")
    assert first.seen + second.seen == full.seen
    if kind == "own":
        assert dataset.reads <= 4 * (12 - steps) + 4  # no sample is read again; one batch to see if the epoch ends


def test_a_shuffle_buffer_is_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "trainer"):
        fit(buffered(), 1, tmp_path, shuffle=None)
    assert "resume will not be exact: the DataLoader over IterableDataset has no state_dict" in caplog.text
