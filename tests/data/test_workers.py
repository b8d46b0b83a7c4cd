from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, Subset, get_worker_info

from trainer.data.adapters import make_batch_loader
from trainer.data.loader import BatchLoader


class Augmented(Dataset[Any]):
    """Samples with a random number from each generator, and a mark that `worker_init_fn` may set."""

    mark = 0

    def __len__(self) -> int:
        return 22

    def __getitem__(self, index: int) -> tuple[int, float, float, float, int]:
        info = get_worker_info()
        assert info is not None
        assert info.dataset is self
        return index, float(torch.rand(())), float(np.random.rand()), random.random(), self.mark


class Fetching(Augmented):
    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self[index] for index in indices]


def set_mark(worker_id: int) -> None:
    info: Any = get_worker_info()
    info.dataset.mark = 7


def draw_mark(worker_id: int) -> None:
    info: Any = get_worker_info()
    info.dataset.mark = int(torch.randint(10**9, ()))


def keep(samples: list[Any]) -> list[Any]:
    return samples


def read(batch_loader: BatchLoader, epoch: int = 0, start: int = 0) -> list[Any]:
    return [batch.data for batch in batch_loader.iterate(epoch, start)]


def loader_of(data: Dataset[Any], workers: int, rank: int = 0, **options: Any) -> BatchLoader:
    loader = DataLoader(data, 4, shuffle=True, num_workers=workers, collate_fn=keep, **options)
    return make_batch_loader(loader, rank=rank, world_size=2, seed=1, training=True)


@pytest.mark.parametrize("kind", [Augmented, Fetching])
def test_augmentation_does_not_depend_on_the_workers(kind: type[Augmented]) -> None:
    one = read(loader_of(kind(), 1))
    two = read(loader_of(kind(), 2))
    assert one == two
    assert len({sample[1:] for batch in one for sample in batch}) == 11
    assert read(loader_of(kind(), 2), start=1) == one[1:]
    assert read(loader_of(kind(), 1), epoch=1) != one
    other = read(loader_of(kind(), 1, rank=1))
    assert not {sample[1] for batch in one for sample in batch} & {sample[1] for batch in other for sample in batch}


def test_worker_start_is_seeded_too() -> None:
    """The numbers of a `worker_init_fn` depend on the seed, the worker, and, unless workers persist, the epoch."""

    def drawn(epoch: int, persistent: bool = False) -> Any:
        batch_loader = loader_of(Augmented(), 1, worker_init_fn=draw_mark, persistent_workers=persistent)
        return read(batch_loader, epoch)[0][0][4]

    first = drawn(0)
    torch.manual_seed(99)
    assert drawn(0) == first
    assert drawn(1) != first
    # Persistent workers start once: a run that resumes in epoch 1 must start them as epoch 0 did.
    assert drawn(1, persistent=True) == first


def test_persistent_workers_over_epochs_and_starts() -> None:
    batch_loader = loader_of(Augmented(), 2, persistent_workers=True)
    fresh = loader_of(Augmented(), 1)
    for epoch, start in [(0, 0), (1, 0), (1, 2), (0, 1), (5, 3)]:
        assert read(batch_loader, epoch, start) == read(fresh, epoch, start)
    # The iterator is left in the middle, while batches of the old epoch are being loaded.
    batches = batch_loader.iterate(2)
    next(batches)
    assert read(batch_loader, 3) == read(fresh, 3)


def test_the_users_worker_init_fn_sees_its_dataset() -> None:
    marks = {sample[4] for batch in read(loader_of(Augmented(), 1, worker_init_fn=set_mark)) for sample in batch}
    assert marks == {7}


def test_subsets_and_single_indices() -> None:
    class Pairs(Dataset[Any]):
        def __len__(self) -> int:
            return 5

        def __getitem__(self, index: int) -> tuple[int, float]:
            return index, float(torch.rand(()))

    subset = DataLoader(Subset(Pairs(), [4, 2, 0]), batch_size=2, num_workers=1, collate_fn=keep)
    batch_loader = make_batch_loader(subset, rank=0, world_size=1, seed=1, training=False)
    assert [[i for i, _ in batch] for batch in read(batch_loader)] == [[4, 2], [0]]
    single = DataLoader(Pairs(), batch_size=None, num_workers=1, collate_fn=keep)
    batch_loader = make_batch_loader(single, rank=0, world_size=1, seed=1, training=False)
    assert [i for i, _ in read(batch_loader)] == [0, 1, 2, 3, 4]
    assert read(batch_loader, start=2) == read(batch_loader)[2:]


def test_spawned_workers() -> None:
    spawned = read(loader_of(Augmented(), 1, multiprocessing_context="spawn", worker_init_fn=set_mark))
    forked = read(loader_of(Augmented(), 1, worker_init_fn=set_mark))
    assert spawned == forked


def test_an_error_in_a_worker_names_the_users_line() -> None:
    class Broken(Augmented):
        def __getitem__(self, index: int) -> Any:
            raise RuntimeError("broken sample")

    with pytest.raises(RuntimeError, match="broken sample"):
        read(loader_of(Broken(), 1))


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """Silence torch's warning about two workers on a machine with one core."""
    import warnings

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="This DataLoader will create")
        yield
