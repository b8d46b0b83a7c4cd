from __future__ import annotations

import random
from collections import Counter, UserDict
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset, TensorDataset, default_collate

from tests.messages import raises_recorded
from trainer.data.adapters import make_batch_loader
from trainer.data.seeded_dataset import draws_nothing
from trainer.errors import ConfigError


class Noisy(Dataset[Any]):
    """Samples with a random number from every generator."""

    def __len__(self) -> int:
        return 27

    def __getitem__(self, index: int) -> tuple[int, float, float, float]:
        return index, float(torch.randn(())), float(np.random.normal()), random.gauss(0, 1)


class NoisyBatches(Noisy):
    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self[index] for index in indices]


def keep(samples: Any) -> Any:
    return samples


def mixed_up(samples: list[Any]) -> Any:
    """Collate a batch, and draw random numbers, too."""
    return samples, random.random(), float(torch.rand(())), float(np.random.beta(0.5, 0.5))


def read(data: Dataset[Any], workers: int = 0, world: int = 1, rank: int = 0, start: int = 0, **options: Any) -> Any:
    per_sample = options.pop("seed_per_sample", False)
    options = {"batch_size": 6 // world, "shuffle": True, "collate_fn": keep, **options}
    loader = DataLoader(data, num_workers=workers, **options)
    batch_loader = make_batch_loader(
        loader, rank=rank, world_size=world, seed=1, training=True, seed_per_sample=per_sample
    )
    return [batch.data for batch in batch_loader.iterate(3, start)]


@pytest.fixture
def numbers_of_the_model() -> Iterator[None]:
    """Assert that the global generators continue as if the block had not run."""
    random.gauss(0, 1)
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()  # type: ignore[index,union-attr]
    yield
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    assert np.random.get_state()[1].tolist() == before[2]  # type: ignore[index,union-attr]


@pytest.mark.usefixtures("numbers_of_the_model")
@pytest.mark.parametrize("per_sample", [False, True])
@pytest.mark.parametrize("collate", [keep, mixed_up])
@pytest.mark.parametrize("kind", [Noisy, NoisyBatches])
def test_no_workers_load_what_workers_load(kind: type[Noisy], collate: Any, per_sample: bool) -> None:
    options = {"collate_fn": collate, "seed_per_sample": per_sample}
    alone = read(kind(), 0, **options)
    assert len(alone) == 5
    for workers in (1, 2):
        assert read(kind(), workers, **options) == alone
    for start in (1, 4):
        assert read(kind(), start=start, **options) == alone[start:]


class Drawing(Dataset[int]):
    """A dataset that counts how often each sample is loaded."""

    def __init__(self, draw: Callable[[], Any]) -> None:
        self.draw = draw
        self.loaded: Counter[int] = Counter()

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> int:
        self.loaded[index] += 1
        self.draw()
        return index


DRAWS: dict[str, Callable[[], Any]] = {
    "nothing": lambda: None,
    "torch": lambda: torch.rand(()),
    "numpy": lambda: np.random.rand(),
    "random": random.random,
}


@pytest.mark.usefixtures("numbers_of_the_model")
@pytest.mark.parametrize("options", [{}, {"seed_per_sample": True}, {"batch_size": None, "collate_fn": None}])
@pytest.mark.parametrize("draws", DRAWS)
def test_every_sample_is_loaded_once(draws: str, options: dict[str, Any]) -> None:
    data = Drawing(DRAWS[draws])
    read(data, **options)
    assert data.loaded == dict.fromkeys(range(10), 1)


def test_what_draws_nothing_is_not_seeded() -> None:
    tensors = TensorDataset(torch.arange(4.0))
    assert draws_nothing(tensors, default_collate)
    assert draws_nothing(Subset(Subset(tensors, [0, 1]), [1]), default_collate)
    assert not draws_nothing(tensors, keep)
    assert not draws_nothing(Noisy(), default_collate)
    assert not draws_nothing(Subset(Noisy(), [1]), default_collate)
    assert not draws_nothing(ConcatDataset([tensors, Noisy()]), default_collate)


@pytest.mark.usefixtures("numbers_of_the_model")
def test_single_samples_without_batches() -> None:
    options = {"batch_size": None, "collate_fn": None}
    assert read(Noisy(), 0, **options) == read(Noisy(), 1, **options)
    options["seed_per_sample"] = True
    assert read(Noisy(), 0, **options) == read(Noisy(), 1, **options)


@pytest.mark.usefixtures("numbers_of_the_model")
def test_an_error_puts_the_numbers_back() -> None:
    class Broken(Noisy):
        def __getitem__(self, index: int) -> Any:
            if index == 20:
                raise RuntimeError("broken sample")
            return super().__getitem__(index)

    with pytest.raises(RuntimeError, match="broken sample"):
        read(Broken())


@pytest.mark.parametrize("own_sampler", [False, True])
def test_seeds_per_sample_are_the_same_on_any_number_of_processes(own_sampler: bool) -> None:
    options: dict[str, Any] = {"seed_per_sample": True}
    if own_sampler:
        options |= {"shuffle": False, "sampler": [*range(21), *range(21)]}
    one = sorted(sample for batch in read(Noisy(), **options) for sample in batch)
    assert len({sample[1] for sample in one}) == len(one) == (42 if own_sampler else 27)
    for world in (2, 3):
        ranks = [read(Noisy(), 0, world, rank, **options) for rank in range(world)]
        assert sorted(sample for batches in ranks for batch in batches for sample in batch) == one
    # Seeds per batch differ between processes.
    options["seed_per_sample"] = False
    full = {sample for batch in read(Noisy(), **options) for sample in batch}
    assert not full & {sample for batch in read(Noisy(), 0, 2, 1, **options) for sample in batch}


def test_seeds_per_sample_in_batches_of_a_users_sampler() -> None:
    batches = [[0, 1, 2], [3], [4, 5], [0, 1], [9]]
    options: dict[str, Any] = {"batch_size": 1, "shuffle": False, "batch_sampler": batches, "seed_per_sample": True}
    one = read(Noisy(), **options)
    two = [read(Noisy(), 0, 2, rank, **options) for rank in (0, 1)]
    assert [two[0][0], two[1][0], two[0][1], two[1][1], two[0][2]] == one
    assert one[0][0] != one[3][0]


def test_another_bit_generator_of_numpy_stays_in_place() -> None:
    before = np.random.get_bit_generator()
    mine = np.random.MT19937(7)
    np.random.set_bit_generator(mine)
    try:
        state = mine.state["state"]["key"].tolist()
        batches = read(Noisy())
        assert np.random.get_bit_generator() is mine
        assert mine.state["state"]["key"].tolist() == state
    finally:
        np.random.set_bit_generator(before)
    assert read(Noisy()) == batches


@pytest.mark.parametrize("data", [Noisy(), TensorDataset(torch.arange(27.0))])
def test_the_models_numbers_do_not_depend_on_the_workers(data: Dataset[Any]) -> None:
    """This includes normals of numpy's legacy functions, which are drawn in pairs."""

    def drawn(workers: int) -> list[float]:
        np.random.seed(4)
        loader = DataLoader(data, 4, num_workers=workers)
        batch_loader = make_batch_loader(loader, rank=0, world_size=1, seed=1, training=True)
        return [float(np.random.normal()) for _ in batch_loader.iterate(0)]

    assert drawn(0) == drawn(1)


@pytest.mark.parametrize(("world", "training"), [(1, True), (2, True), (2, False)])
def test_samples_that_a_collate_fn_leaves_out_are_told_where_they_count(
    world: int, training: bool, caplog: pytest.LogCaptureFixture
) -> None:
    def collate(samples: list[Any]) -> Any:
        return torch.stack([number for (number,) in samples if number % 2])

    loader = DataLoader(TensorDataset(torch.arange(16)), batch_size=4, collate_fn=collate)
    batches = [*make_batch_loader(loader, rank=0, world_size=world, seed=1, training=training).iterate(0)]
    told = [record.message for record in caplog.records if "collate_fn" in record.message]
    if world == 2 and training:
        assert [(batch.samples, batch.total) for batch in batches] == [(4, 8)] * 2
        assert len(told) == 1
    else:
        assert [batch.samples for batch in batches] == [2] * (4 // world)
        assert told == []


def kept(samples: list[Any]) -> list[Any]:
    return [one for one in samples if one is not None and one["number"] != 9]


def padded(samples: list[Any]) -> Any:
    return pad_sequence([one["text"] for one in kept(samples)], batch_first=True)


COLLATED: dict[str, tuple[Callable[[list[Any]], Any], list[int]]] = {
    "pairs": (lambda all: torch.stack([one["x"] for one in all]).reshape(-1, 2, 3), [4, 4, 2]),
    "two views": (lambda all: torch.cat([torch.stack([one["x"]] * 2) for one in all]), [4, 4, 2]),
    "left out": (lambda all: {"x": torch.stack([one["x"] for one in kept(all)])}, [4, 4, 1]),
    "left out, beside another tensor": (
        lambda all: {"x": torch.stack([one["x"] for one in kept(all)]), "of classes": torch.ones(3, 2)},
        [4, 4, 1],
    ),
    "left out, beside a mask": (
        lambda all: (torch.stack([one["x"] for one in kept(all)]), torch.ones(len(all), 2)),
        [4, 4, 1],
    ),
    "left out, with a label": (
        lambda all: (padded(all), torch.tensor([one["number"] for one in kept(all)])),
        [4, 4, 1],
    ),
    "in a mapping of one's own": (lambda all: UserDict(x=torch.stack([one["x"] for one in kept(all)])), [4, 4, 1]),
    "time first": (lambda all: pad_sequence([one["text"] for one in all]), [4, 4, 2]),
    "in one row": (lambda all: torch.cat([one["text"] for one in all])[None], [4, 4, 2]),
    "time first, left out": (lambda all: pad_sequence([one["text"] for one in kept(all)]), [4, 4, 2]),
    "other rows, left out": (padded, [4, 4, 2]),
}
"""Functions that collate ten samples, of which one is broken, and the samples by which the batches weigh."""


@pytest.mark.parametrize("case", COLLATED)
def test_samples_are_counted_where_the_batch_tells_them(case: str, caplog: pytest.LogCaptureFixture) -> None:
    data = [{"x": torch.full((3,), float(n)), "text": torch.ones(5 + n % 3), "number": n} for n in range(10)]
    loader: Any = DataLoader(data, batch_size=4, collate_fn=COLLATED[case][0])  # type: ignore[arg-type]
    batches = [*make_batch_loader(loader, rank=0, world_size=1, seed=1, training=True).iterate(0)]
    assert [batch.samples for batch in batches] == COLLATED[case][1]
    told = [record.message for record in caplog.records if "gave a batch of None samples" in record.message]
    assert len(told) == (case in ("pairs", "in one row", "time first, left out", "other rows, left out"))


def test_samples_that_are_none_are_left_out(caplog: pytest.LogCaptureFixture) -> None:
    data = [None if n == 9 else {"text": torch.ones(5 + n % 3), "number": n} for n in range(10)]
    loader: Any = DataLoader(data, batch_size=4, collate_fn=padded)  # type: ignore[arg-type]
    batches = [*make_batch_loader(loader, rank=0, world_size=1, seed=1, training=False).iterate(0)]
    assert [batch.samples for batch in batches] == [4, 4, 1]
    assert not caplog.records


@pytest.mark.parametrize("batch", [torch.tensor, lambda indices: {"x": torch.tensor(indices)}])
def test_a_seed_per_sample_needs_samples(batch: Any) -> None:
    class Whole(Noisy):
        def __getitems__(self, indices: list[int]) -> Any:
            return batch(indices)

    read(Whole())
    with raises_recorded(ConfigError):
        read(Whole(), seed_per_sample=True)
