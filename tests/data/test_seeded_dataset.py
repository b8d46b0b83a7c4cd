from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset, TensorDataset, default_collate

from trainer.data.adapters import make_batch_loader
from trainer.data.seeded_dataset import draws_nothing


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
