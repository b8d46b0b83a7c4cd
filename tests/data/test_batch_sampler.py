from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import islice, pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from trainer.data.batch_sampler import DistributedBatchSampler
from trainer.data.loader import Reading


class Numbers(Dataset[int]):
    def __init__(self, n: int) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> int:
        return index


def batch_sampler_of(loader: DataLoader[Any], rank: int = 0, world: int = 1, **options: Any) -> DistributedBatchSampler:
    options = {"seed": 1, "training": True, **options}
    return DistributedBatchSampler(loader, Reading(rank, world, **options))


def read(
    batch_sampler: DistributedBatchSampler, epoch: int = 0, start: int = 0
) -> list[tuple[list[int], int, int | None]]:
    batch_sampler.seek(epoch, start)
    return [
        (one.indices if batch_sampler.automatic_batching else [one.indices], one.samples, one.total)
        for one in batch_sampler
    ]


def shapes() -> Iterator[tuple[int, int, int]]:
    return ((n, size, world) for n in range(1, 24) for size in range(1, 6) for world in range(1, 5))


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("drawn", [False, True])
def test_evaluation_counts_every_sample_once(shuffle: bool, drawn: bool) -> None:
    for n, size, world in shapes():
        sampler = SubsetRandomSampler(range(n)) if drawn else None
        loader = DataLoader(Numbers(n), size, shuffle=shuffle and not drawn, sampler=sampler)
        batch_samplers = [batch_sampler_of(loader, r, world, training=False) for r in range(world)]
        ranks = [read(batch_sampler) for batch_sampler in batch_samplers]
        assert sorted(i for rank in ranks for batch, _, _ in rank for i in batch) == list(range(n))
        assert all(own == len(batch) > 0 for rank in ranks for batch, own, _ in rank)
        assert [batch_sampler.num_local_batches() for batch_sampler in batch_samplers] == [len(rank) for rank in ranks]
        assert {batch_sampler.num_global_batches for batch_sampler in batch_samplers} == {max(map(len, ranks))}
        assert batch_samplers[0].samples_in(batch_samplers[0].num_global_batches or 0) == n
        for k in range(max(map(len, ranks))):
            present = [rank[k] for rank in ranks if k < len(rank)]
            assert {total for _, _, total in present} == {sum(own for _, own, _ in present)}


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("drawn", [False, True])
def test_training_forms_the_global_batches_of_one_process(drop_last: bool, drawn: bool) -> None:
    for n, size, world in shapes():

        def loader(size: int, n: int = n) -> DataLoader[Any]:
            if drawn:
                return DataLoader(Numbers(n), size, sampler=SubsetRandomSampler(range(n)), drop_last=drop_last)
            return DataLoader(Numbers(n), size, shuffle=True, drop_last=drop_last)

        batch_samplers = [batch_sampler_of(loader(size), r, world) for r in range(world)]
        ranks = [read(batch_sampler, epoch=3) for batch_sampler in batch_samplers]
        alone = read(batch_sampler_of(loader(size * world)), epoch=3)
        assert (
            {len(rank) for rank in ranks}
            == {len(alone)}
            == {batch_samplers[0].num_global_batches}
            == {batch_samplers[-1].num_local_batches()}
        )
        for k, (full, _, total) in enumerate(alone):
            assert [i for rank in ranks for i in rank[k][0][: rank[k][1]]] == full
            for rank in ranks:
                batch, own, same = rank[k]
                assert same == total == len(full)
                assert (own, batch) == (0, full[:1]) if own == 0 else own == len(batch)
        assert batch_samplers[0].samples_in(len(alone)) == sum(len(full) for full, _, _ in alone)
        if drop_last:
            assert len(alone) == n // (size * world)


def test_last_short_batch_is_split_evenly() -> None:
    loader = DataLoader(Numbers(11), 4)
    assert [read(batch_sampler_of(loader, r, 2))[-1] for r in range(2)] == [([8], 1, 3), ([9, 10], 2, 3)]
    loader = DataLoader(Numbers(9), 4)
    assert [read(batch_sampler_of(loader, r, 2))[-1] for r in range(2)] == [([8], 0, 1), ([8], 1, 1)]
    assert [len(read(batch_sampler_of(loader, r, 2, training=False))) for r in range(2)] == [1, 2]


def test_drop_last_in_evaluation_drops_the_same_on_any_number_of_processes() -> None:
    for n, size, world in shapes():
        loader = DataLoader(Numbers(n), size, shuffle=True, drop_last=True)
        batch_samplers = [batch_sampler_of(loader, r, world, training=False) for r in range(world)]
        ranks = [read(batch_sampler) for batch_sampler in batch_samplers]
        alone = read(batch_sampler_of(loader, training=False))
        assert sorted(b for rank in ranks for b, _, _ in rank) == sorted(batch for batch, _, _ in alone)
        assert [batch_sampler.num_local_batches() for batch_sampler in batch_samplers] == [len(rank) for rank in ranks]
        assert batch_samplers[0].num_global_batches == len(ranks[0])


class Own(Sampler[int]):
    """A sampler that draws from all three global generators and its own, and has `set_epoch`."""

    def __init__(self, n: int) -> None:
        self.n = n
        self.epoch = -1
        self.generator = torch.Generator()

    def __len__(self) -> int:
        return self.n

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        for _ in range(self.n):
            drawn = random.randrange(97) + int(abs(np.random.normal()) * 97) + int(torch.randint(97, ()))
            yield (drawn + int(torch.randint(97, (), generator=self.generator)) + self.epoch) % 1000


class OwnBatches(Sampler[list[int]]):
    """A batch sampler of unequal batches in random order."""

    def __init__(self, sizes: list[int]) -> None:
        edges = np.cumsum([0, *sizes])
        self.batches = [list(range(low, high)) for low, high in pairwise(edges)]

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[list[int]]:
        return (self.batches[i] for i in torch.randperm(len(self.batches)).tolist())


DATA = Numbers(23)
LOADERS: dict[str, DataLoader[Any]] = {
    "sequential": DataLoader(DATA, 4),
    "shuffled": DataLoader(DATA, 4, shuffle=True),
    "drop_last": DataLoader(DATA, 4, shuffle=True, drop_last=True),
    "replacement": DataLoader(DATA, 4, sampler=RandomSampler(DATA, replacement=True)),
    "num_samples": DataLoader(DATA, 4, sampler=RandomSampler(DATA, num_samples=50)),
    "weighted": DataLoader(DATA, 4, sampler=WeightedRandomSampler([1.0] * 11 + [0.0] * 12, 30)),
    "weighted_generator": DataLoader(
        DATA, 4, sampler=WeightedRandomSampler([1.0] * 23, 30, generator=torch.Generator())
    ),
    "subset": DataLoader(DATA, 4, sampler=SubsetRandomSampler([5, 3, 8, 13, 21, 2, 1])),
    "own": DataLoader(DATA, 4, sampler=Own(30)),
    "list": DataLoader(DATA, 4, sampler=[4, 3, 2, 1, 0]),
    "torch_batches": DataLoader(DATA, batch_sampler=BatchSampler(Own(30), 4, True)),
    "own_batches": DataLoader(DATA, batch_sampler=OwnBatches([3, 1, 4, 1, 5, 2, 6])),
    "distributed": DataLoader(DATA, 4, sampler=DistributedSampler(DATA, num_replicas=2, rank=1)),
    "distributed_plain": DataLoader(DATA, 4, sampler=DistributedSampler(DATA, 2, 1, shuffle=False)),
    "no_batches": DataLoader(DATA, batch_size=None, shuffle=True),
}


@pytest.mark.parametrize("name", LOADERS)
@pytest.mark.parametrize("training", [True, False])
def test_resume_at_every_start_gives_the_tail(name: str, training: bool) -> None:
    for world in (1, 2, 3):
        for rank in range(world):
            batch_sampler = batch_sampler_of(LOADERS[name], rank, world, training=training)
            for epoch in (0, 2):
                full = read(batch_sampler, epoch)
                assert batch_sampler.num_local_batches() == len(full)
                for start in range(len(full) + 2):
                    again = batch_sampler_of(LOADERS[name], rank, world, training=training)
                    assert read(again, epoch, start) == full[start:]


@pytest.mark.parametrize("name", LOADERS)
def test_order_is_a_function_of_seed_and_epoch(name: str) -> None:
    def order(seed: int, epoch: int) -> list[Any]:
        return [batch for batch, _, _ in read(batch_sampler_of(LOADERS[name], seed=seed), epoch)]

    expected = order(1, 0)
    torch.manual_seed(123)
    assert order(1, 0) == expected
    fixed = name in ("sequential", "list", "distributed_plain")
    assert (order(1, 1) == expected) == fixed
    assert (order(2, 0) == expected) == fixed


@pytest.mark.parametrize("name", LOADERS)
def test_global_generators_are_left_alone(name: str) -> None:
    sampler: Any = LOADERS[name].sampler
    own = getattr(sampler, "generator", None)
    random.seed(5)
    np.random.seed(5)
    torch.manual_seed(5)
    before = (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist())
    generator = own.get_state().tolist() if own is not None else None
    for _ in read(batch_sampler_of(LOADERS[name])):
        after = (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist())
        assert after == before
    if own is not None:
        assert own.get_state().tolist() == generator


def test_drawing_in_chunks_keeps_the_private_numbers() -> None:
    """There are more items than one chunk, and the global generators are used in between."""
    loader = DataLoader(Numbers(1000), 3, sampler=Own(9000))
    quiet = read(batch_sampler_of(loader))
    batch_sampler = batch_sampler_of(loader)
    noisy = []
    for batch in batch_sampler:
        torch.rand(1)
        random.random()
        noisy.append(batch.indices)
    assert noisy == [batch for batch, _, _ in quiet]
    # At an odd index, since numpy draws normals in pairs.
    for start in (1365, 2991):
        assert read(batch_sampler_of(loader), 0, start) == quiet[start:]


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("training", [True, False])
def test_own_batches_are_not_split(world: int, training: bool) -> None:
    loader = LOADERS["own_batches"]
    every = [batch for batch, _, _ in read(batch_sampler_of(loader))]
    batch_samplers = [batch_sampler_of(loader, r, world, training=training) for r in range(world)]
    ranks = [read(batch_sampler) for batch_sampler in batch_samplers]
    num_global_batches = -(-7 // world)
    assert batch_samplers[0].num_global_batches == num_global_batches
    for k in range(num_global_batches):
        here = every[k * world : (k + 1) * world]
        total = sum(map(len, here))
        for rank in range(world):
            if rank < len(here):
                assert ranks[rank][k] == (here[rank], len(here[rank]), total)
            elif training:
                assert ranks[rank][k] == (here[0], 0, total)
            else:
                assert len(ranks[rank]) == k
    assert batch_samplers[0].samples_in(1) is None


class Sharding(DistributedSampler[Any]):
    pass


def test_a_sampler_that_shards_is_left_to_it() -> None:
    ranks = []
    for rank in range(2):
        loader = DataLoader(DATA, 4, sampler=Sharding(DATA, 2, rank, shuffle=True))
        batch_sampler = batch_sampler_of(loader, rank, 2)
        assert batch_sampler.shards_itself
        ranks.append(read(batch_sampler, epoch=1))
        assert batch_sampler.num_global_batches == len(ranks[-1]) == 3
    assert {i for rank in ranks for batch, _, _ in rank for i in batch} == set(range(23))
    assert all((own, total) == (len(batch), None) for rank in ranks for batch, own, total in rank)
    nested = DataLoader(DATA, batch_sampler=_Wrapping(DistributedSampler(DATA, 2, 1)))
    assert batch_sampler_of(nested, 1, 2).shards_itself
    assert not batch_sampler_of(DataLoader(DATA, 4, sampler=DistributedSampler(DATA, 2, 1)), 1, 2).shards_itself


class _Wrapping(Sampler[list[int]]):
    def __init__(self, sampler: Sampler[int]) -> None:
        self.sampler = sampler

    def __iter__(self) -> Iterator[list[int]]:
        return ([index] for index in self.sampler)


def test_shuffle_override() -> None:
    sequential = [list(range(low, min(low + 4, 23))) for low in range(0, 23, 4)]
    for name in ("shuffled", "sequential", "distributed"):
        batch_sampler = batch_sampler_of(LOADERS[name], shuffle=False)
        assert [batch for batch, _, _ in read(batch_sampler, 5)] == sequential
    assert [batch for batch, _, _ in read(batch_sampler_of(LOADERS["sequential"], shuffle=True), 5)] != sequential
    batch_sampler = batch_sampler_of(LOADERS["subset"], shuffle=False)
    assert read(batch_sampler, 5) == read(batch_sampler, 0) == read(batch_sampler_of(LOADERS["subset"]), 0)


@pytest.mark.parametrize("nested", [False, True])
def test_set_epoch_is_called(nested: bool) -> None:
    own = Own(8)
    sampler: Any = {"batch_sampler": _Wrapping(own)} if nested else {"sampler": own}
    for epoch in (4, 2):
        read(batch_sampler_of(DataLoader(DATA, **sampler)), epoch)
        assert own.epoch == epoch


class Endless(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        while True:
            yield from torch.randperm(23).tolist()


def test_endless_sampler() -> None:
    batch_sampler = batch_sampler_of(DataLoader(DATA, 4, sampler=Endless()), 1, 2)
    assert batch_sampler.num_global_batches is None
    assert batch_sampler.num_local_batches() is None
    first = list(islice(iter(batch_sampler), 100))
    batch_sampler.seek(0, 90)
    assert list(islice(iter(batch_sampler), 10)) == first[90:]
    batch_sampler.seek(0, 90, 95)
    assert list(batch_sampler) == first[90:95]


def test_sequential_starts_at_any_index_in_a_billion() -> None:
    batch_sampler = batch_sampler_of(DataLoader(Numbers(10**9), 32, sampler=SequentialSampler(Numbers(10**9))), 1, 2)
    batch_sampler.seek(0, 10**7)
    assert next(iter(batch_sampler)).indices[0] == 10**7 * 64 + 32
