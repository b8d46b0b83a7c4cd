"""LengthGroupedSampler: batches of similar lengths, in an order that a resumed run goes on with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from tests.helpers.compare import assert_same_bits
from tests.helpers.processes import run_distributed
from tests.helpers.toy import Toy, quiet
from tests.messages import raises_recorded
from trainer import Callback, ConfigError, Trainer, TrainModule, seed_everything
from trainer.callbacks import ModelCheckpoint
from trainer.data.length_grouped_sampler import LengthGroupedSampler

LENGTHS = torch.randint(1, 100, (96,), generator=torch.Generator().manual_seed(0)).tolist()


class Texts(Dataset[Any]):
    def __len__(self) -> int:
        return len(LENGTHS)

    def __getitem__(self, index: int) -> Any:
        return torch.full((4,), LENGTHS[index] / 100), torch.tensor([float(index)])


class Seen(Callback):
    def __init__(self) -> None:
        self.batches: list[tuple[int, list[int]]] = []

    def on_train_batch_end(self, trainer: Trainer, module: TrainModule, outputs: Any, batch: Any, index: int) -> None:
        self.batches.append((trainer.current_epoch, batch[1][:, 0].int().tolist()))


def test_each_sample_once_and_little_padding() -> None:
    sampler = LengthGroupedSampler(LENGTHS, 8, group_batches=4)
    order = list(sampler)
    assert sorted(order) == list(range(96))
    assert len(sampler) == 96
    assert LENGTHS[order[0]] == max(LENGTHS)

    def padded(indices: list[int]) -> int:
        return sum(8 * max(LENGTHS[i] for i in indices[k : k + 8]) for k in range(0, 96, 8))

    assert padded(order) < 0.8 * padded(torch.randperm(96).tolist())
    assert list(sampler) != order


def _run(folder: str, steps: tuple[int, ...], size: int = 8, **settings: Any) -> dict[str, Any]:
    batches = []
    for number in steps:
        seed_everything(1)
        module, seen = Toy(), Seen()
        callbacks = [seen, ModelCheckpoint(dirpath=folder)]
        trainer = quiet(max_steps=number, enable_checkpointing=True, callbacks=callbacks, **settings)
        loader = DataLoader(Texts(), batch_size=size, sampler=LengthGroupedSampler(LENGTHS, 8, group_batches=4))
        trainer.fit(module, loader, ckpt_path="last")
        batches += seen.batches
    return {"batches": batches, "weights": {k: v.tolist() for k, v in module.state_dict().items()}}


def test_a_resumed_run_has_the_same_order(tmp_path: Path) -> None:
    unbroken = _run(str(tmp_path / "unbroken"), (30,))
    assert _run(str(tmp_path / "broken"), (5, 17, 30)) == unbroken
    epochs = [[batch for epoch, batch in unbroken["batches"] if epoch == number] for number in (0, 1)]
    assert epochs[0] != epochs[1]
    assert sorted(index for batch in epochs[0] for index in batch) == list(range(96))


def test_two_processes_split_its_batches(tmp_path: Path) -> None:
    one = _run(str(tmp_path / "one"), (30,))
    ranks = run_distributed(_two, 2, str(tmp_path / "two"))
    both = [(a[0], a[1] + b[1]) for a, b in zip(ranks[0]["batches"], ranks[1]["batches"], strict=True)]
    assert both == one["batches"]
    assert_same_bits(ranks[0]["weights"], ranks[1]["weights"])


def _two(folder: str) -> dict[str, Any]:
    return _run(folder, (7, 30), size=4, devices=2, strategy="ddp")


def test_lengths_of_a_dataset() -> None:
    given = [{"input_ids": [0] * length} for length in (3, 1, 2)]
    assert LengthGroupedSampler(given, 3).lengths.tolist() == [3, 1, 2]
    assert list(LengthGroupedSampler([[0] * 3, [0], [0] * 2], 3)) == [0, 2, 1]


@pytest.mark.parametrize("arguments", [([1, 2], 0), ([1, 2], 2, 0)], ids=str)
def test_wrong_arguments_are_refused(arguments: tuple[Any, ...]) -> None:
    with raises_recorded(ConfigError):
        LengthGroupedSampler(*arguments)
