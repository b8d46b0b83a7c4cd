"""Numbers that decide which samples a loader gives are compared by their values, whatever holds them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    DistributedSampler,
    Sampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from trainer.data.adapters import make_batch_loader
from trainer.data.fingerprints import contents_fingerprints, fingerprint, indices_fingerprint, name_of


def data(samples: int = 16) -> TensorDataset:
    return TensorDataset(torch.zeros(samples))


class OfOnePart(Sampler[int]):
    """Gives a process its part by itself, under attribute names of its own."""

    def __init__(self, part: int) -> None:
        self.part, self.epoch = part, 3 * part

    def __len__(self) -> int:
        return 8

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.part, 16, 2))


class Batches(OfOnePart):
    def __len__(self) -> int:
        return 4

    def __iter__(self) -> Iterator[Any]:
        return iter([[2 * one + self.part] for one in range(4)])


def test_the_same_numbers_are_the_same_in_a_list_an_array_and_a_tensor() -> None:
    same = [range(5), [0, 1, 2, 3, 4], (0, 1, 2, 3, 4), np.arange(5, dtype=np.int32), torch.arange(5)]
    assert len({fingerprint(one) for one in same}) == 1
    assert fingerprint([0, 1, 2, 4, 3]) != fingerprint(range(5))
    assert fingerprint([0.0, 0.5]) == fingerprint(torch.tensor([0.0, 0.5])) == fingerprint(np.float32([0, 0.5]))
    assert (fingerprint(3), fingerprint(True)) == ("3", "True")
    for other in ("a", None, 0.5, ["a"], [[1], [2, 3]], {1}, object(), torch.zeros(2, device="meta"), [2**70]):
        assert fingerprint(other) is None


LOADERS: dict[str, tuple[Callable[[int], Any], str]] = {
    "subset": (lambda rank: DataLoader(Subset(data(32), range(rank, 32, 2)), 4), "indices of its dataset"),
    "subset of a subset": (
        lambda rank: DataLoader(Subset(Subset(data(32), [*range(rank, 32, 2)]), range(16)), 4),
        "indices of its dataset",
    ),
    "concatenated": (
        lambda rank: DataLoader(ConcatDataset([data(4 + 8 * rank), data(12 - 8 * rank)]), 4),
        "indices of its dataset",
    ),
    "indices": (
        lambda rank: DataLoader(data(), 4, sampler=SubsetRandomSampler([*range(rank, 16, 2)])),
        "indices of its SubsetRandomSampler",
    ),
    "weights": (
        lambda rank: DataLoader(data(), 4, sampler=WeightedRandomSampler([1.0 + rank * one for one in range(16)], 16)),
        "weights of its WeightedRandomSampler",
    ),
    "sampler": (lambda rank: DataLoader(data(), 4, sampler=OfOnePart(rank)), "part of its OfOnePart"),
    "batch sampler": (lambda rank: DataLoader(data(), batch_sampler=Batches(rank)), "part of its Batches"),
}


def facts(loader: Any, rank: int) -> dict[str, object]:
    return make_batch_loader(loader, rank=rank, world_size=2, seed=1, training=True).facts_for_ranks().equal


@pytest.mark.parametrize("case", LOADERS)
def test_processes_whose_numbers_differ_do_not_agree(case: str) -> None:
    make, name = LOADERS[case]
    first, second = facts(make(0), 0), facts(make(1), 1)
    assert {fact for fact in first | second if first.get(fact) != second.get(fact)} == {name}
    assert first == facts(make(0), 1)


def test_a_sampler_that_is_replaced_or_shards_by_itself_may_differ() -> None:
    class Mine(DistributedSampler[Any]):
        """Used as it is."""

    for kind in (DistributedSampler, Mine):
        of_ranks = [facts(DataLoader(data(), 4, sampler=kind(data(), 2, rank)), rank) for rank in (0, 1)]
        assert of_ranks[0] == of_ranks[1]


def test_nothing_is_chosen_without_a_subset() -> None:
    assert indices_fingerprint(data()) is None
    assert indices_fingerprint([1, 2]) is None


class Kept(TensorDataset):
    """A dataset that keeps its samples in another attribute, too."""

    def __init__(self, kept: Any) -> None:
        super().__init__(torch.zeros(40))
        self.kept = kept


KEPT: dict[str, Callable[[torch.Tensor], Any]] = {
    "a tensor": lambda x: x,
    "a view": lambda x: x.t().contiguous().t(),
    "an array": lambda x: x.numpy(),
    "low precision": lambda x: x.bfloat16(),
    "complex numbers": lambda x: torch.complex(x, x).conj(),
    "a list of tensors": list,
    "pairs": lambda x: [(one, number) for number, one in enumerate(x)],
    "dicts": lambda x: [{"x": one, "id": number} for number, one in enumerate(x)],
    "numbers": lambda x: x[:, 0].tolist(),
    "a dict of columns": lambda x: {"x": x, "name": "y"},
    "columns": lambda x: (x, x.int()),
}
NOT_COMPARED: dict[str, Callable[[torch.Tensor], Any]] = {
    "another size": lambda x: x[:3],
    "texts": lambda x: [f"/rank/{float(one.sum())}.png" for one in x],
    "objects": lambda x: [object() for _ in x],
    "one number": lambda x: float(x.sum()),
    "no values": lambda x: x.to("meta"),
    "a sparse tensor": lambda x: x.to_sparse(),
}


@pytest.mark.parametrize("kind", [*KEPT, *NOT_COMPARED])
def test_a_few_of_the_samples_in_memory_are_compared(kind: str) -> None:
    make = {**KEPT, **NOT_COMPARED}[kind]
    values = torch.arange(120.0).view(40, 3)
    first, same, other = (contents_fingerprints(Kept(make(one))) for one in (values, values.clone(), values + 1))
    assert first == same
    assert (first != other) == (kind in KEPT)
    assert contents_fingerprints(Subset(Kept(make(values)), range(3))) == first


def test_functions_are_compared_by_name_and_place() -> None:
    same = [partial(data, 3), partial(data, 4), data]
    assert len({name_of(one) for one in same}) == 1
    assert name_of(data).startswith("data (test_fingerprints.py:")
    assert name_of(lambda: 1) != name_of(  # in another line
        lambda: 1
    )
    assert (name_of(Batches(0)), name_of(Batches(0).__iter__)[:16]) == ("Batches", "Batches.__iter__")
    assert name_of(torch.utils.data.default_collate) == name_of(torch.utils.data.default_collate)
