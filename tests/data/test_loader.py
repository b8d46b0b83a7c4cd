from __future__ import annotations

import copy
import itertools
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    SubsetRandomSampler,
    TensorDataset,
)

from tests.helpers.toy import Toy, quiet
from tests.messages import raises_recorded
from trainer.data.adapters import make_batch_loader, named_loaders
from trainer.data.loader import Batch, BatchLoader
from trainer.data.sharded_loader import ShardedDataLoader
from trainer.errors import ConfigError


def loader_of(loader: Any, rank: int = 0, world: int = 1, **options: Any) -> BatchLoader:
    options = {"seed": 1, "training": True, **options}
    return make_batch_loader(loader, rank=rank, world_size=world, **options)


def values(batches: Iterator[Batch]) -> list[Any]:
    return [batch.data.tolist() if isinstance(batch.data, torch.Tensor) else batch.data for batch in batches]


class Numbers(Dataset[int]):
    def __init__(self, n: int) -> None:
        self.n = n
        self.read: list[int] = []

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> int:
        self.read.append(index)
        return index


class Stream(IterableDataset[int]):
    def __init__(self, n: int) -> None:
        self.n = n
        self.read = 0

    def __iter__(self) -> Iterator[int]:
        for index in range(self.n):
            self.read += 1
            yield index


class Subclass(DataLoader[Any]):
    pass


class Counter:
    """A loader with a state, like torchdata's StatefulDataLoader."""

    def __init__(self, n: int = 5) -> None:
        self.n = n
        self.next = 0
        self.calls: list[Any] = []

    def __iter__(self) -> Iterator[int]:
        while self.next < self.n:
            self.next += 1
            yield self.next - 1
        self.next = 0

    def set_epoch(self, epoch: int) -> None:
        self.calls.append(epoch)

    def state_dict(self) -> dict[str, int]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.calls.append(state)
        self.next = state["next"]


# -- plain loaders -----------------------------------------------------------------------------------------------------


def test_batches_with_their_counts() -> None:
    loader = DataLoader(Numbers(9), batch_size=4)
    ranks = [list(loader_of(loader, r, 2).iterate(0)) for r in range(2)]
    assert [(b.data.tolist(), b.samples, b.total) for b in ranks[0]] == [([0, 1, 2, 3], 4, 8), ([8], 0, 1)]
    assert [(b.data.tolist(), b.samples, b.total) for b in ranks[1]] == [([4, 5, 6, 7], 4, 8), ([8], 1, 1)]


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("limit", [None, 1.0, 0.5, 1, 2, 100, 0])
def test_lengths(training: bool, limit: int | float | None) -> None:
    for n in (1, 2, 7, 8, 9, 24, 25):
        for world in (1, 2, 3):
            if limit == 0.5 and n <= 4 * world:
                continue
            loader = DataLoader(Numbers(n), batch_size=4, shuffle=True)
            feeds = [loader_of(loader, r, world, training=training, limit=limit) for r in range(world)]
            ranks = [list(batch_loader.iterate(0)) for batch_loader in feeds]
            assert [batch_loader.length for batch_loader in feeds] == [len(rank) for rank in ranks]
            assert {batch_loader.max_length for batch_loader in feeds} == {max(map(len, ranks))}
            counted = sum(b.samples or 0 for rank in ranks for b in rank)
            assert {batch_loader.samples_per_epoch for batch_loader in feeds} == {counted}
            assert {batch_loader.batch_size for batch_loader in feeds} == {4}
            assert [values(feeds[0].iterate(0, k)) for k in range(len(ranks[0]))] == [
                values(iter(ranks[0][k:])) for k in range(len(ranks[0]))
            ]
            if training:
                assert len({len(rank) for rank in ranks}) == 1


def test_skipping_reads_no_sample() -> None:
    data = Numbers(100)
    batch_loader = loader_of(DataLoader(data, batch_size=4, shuffle=True))
    full = values(batch_loader.iterate(2))
    data.read.clear()
    assert values(batch_loader.iterate(2, start=20)) == full[20:]
    assert data.read == [index for batch in full[20:] for index in batch]


def test_two_iterations_at_once_do_not_mix() -> None:
    batch_loader = loader_of(DataLoader(Numbers(10), batch_size=4))
    first = batch_loader.iterate(0)
    assert next(first).samples == 4
    assert [batch.samples for batch in batch_loader.iterate(0)] == [4, 4, 2]
    assert [batch.samples for batch in first] == [4, 2]


def test_the_global_generators_are_not_drawn_from() -> None:
    loader = DataLoader(Numbers(50), batch_size=4, shuffle=True, num_workers=1)
    random.seed(3)
    np.random.seed(3)
    torch.manual_seed(3)
    before = torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()
    assert len(list(loader_of(loader).iterate(0))) == 13
    assert (torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()) == before


def test_options_of_the_loader_are_kept() -> None:
    def pair(samples: list[int]) -> tuple[str, list[int]]:
        return "mine", samples

    assert values(loader_of(DataLoader(Numbers(3), batch_size=2, collate_fn=pair)).iterate(0)) == [
        ("mine", [0, 1]),
        ("mine", [2]),
    ]
    made = DataLoader(
        Numbers(8), batch_size=2, num_workers=1, prefetch_factor=3, timeout=20, multiprocessing_context="fork"
    )
    sharded = loader_of(made)
    assert isinstance(sharded, ShardedDataLoader)
    again = sharded._loader
    for name in ("num_workers", "prefetch_factor", "timeout", "persistent_workers"):
        assert getattr(again, name) == getattr(made, name)
    assert again.multiprocessing_context.get_start_method() == "fork"


def test_without_automatic_batching_every_index_is_a_batch() -> None:
    loader = DataLoader(Numbers(5), batch_size=None)
    ranks = [list(loader_of(loader, r, 2).iterate(0)) for r in range(2)]
    assert ranks[0] == [Batch(0, 1, 2), Batch(2, 1, 2), Batch(4, 0, 1)]
    assert ranks[1] == [Batch(1, 1, 2), Batch(3, 1, 2), Batch(4, 1, 1)]
    assert loader_of(loader).batch_size is None


def test_notes_say_what_is_replaced_or_ignored() -> None:
    data = Numbers(10)
    assert loader_of(DataLoader(data, batch_size=2, shuffle=True)).note is None
    distributed = DataLoader(data, batch_size=2, sampler=DistributedSampler(data, 2, 0))
    assert "DistributedSampler is replaced" in (loader_of(distributed).note or "")
    generator = DataLoader(data, batch_size=2, shuffle=True, generator=torch.Generator())
    assert "the order comes from the trainer's seed" in (loader_of(generator).note or "")
    in_order = DataLoader(data, batch_size=2)
    assert loader_of(in_order).note is None
    assert "its samples come in order" in (loader_of(in_order, world=2).note or "")
    assert loader_of(in_order, world=2, training=False).note is None
    subset = DataLoader(data, batch_size=2, sampler=SubsetRandomSampler([1, 2]))
    assert "SubsetRandomSampler gives the order of epoch 0" in (loader_of(subset, shuffle=False).note or "")
    unordered = DataLoader(data, batch_size=2, in_order=False)
    assert "in_order=False is ignored" in (loader_of(unordered).note or "")
    assert all(loader_of(loader).exact for loader in (distributed, generator, subset, unordered))


# -- everything else ---------------------------------------------------------------------------------------------------


def test_a_list_of_batches() -> None:
    batches = [torch.tensor([float(i)]) for i in range(5)]
    batch_loader = loader_of(batches, limit=4)
    assert (
        batch_loader.length,
        batch_loader.max_length,
        batch_loader.exact,
        batch_loader.note,
        batch_loader.one_shot,
    ) == (4, 4, True, None, False)
    assert values(batch_loader.iterate(0)) == values(batch_loader.iterate(1)) == [[0.0], [1.0], [2.0], [3.0]]
    assert list(batch_loader.iterate(0, 3)) == [Batch(batches[3], None, None)]
    assert list(batch_loader.iterate(0, 4)) == []
    assert "each process iterates the list itself" in (loader_of(batches, 0, 2).note or "")
    assert "datasets.distributed.split_dataset_by_node" in (loader_of(batches, 0, 2).note or "")


def test_a_list_of_arrays() -> None:
    batches = [np.arange(3), np.arange(3, 6)]
    assert [batch.data.tolist() for batch in loader_of(batches).iterate(0)] == [[0, 1, 2], [3, 4, 5]]


def test_an_iterable_dataset_is_used_as_it_is() -> None:
    data = Stream(10)
    batch_loader = loader_of(DataLoader(data, batch_size=4))
    assert (batch_loader.length, batch_loader.max_length, batch_loader.exact, batch_loader.samples_per_epoch) == (
        None,
        None,
        False,
        None,
    )
    assert batch_loader.note == (
        "the training loader: resume will not be exact: the DataLoader over Stream has no state_dict and "
        "load_state_dict (torchdata's StatefulDataLoader has them), so a resumed run reads the batches already used "
        "again and skips them."
    )
    assert values(batch_loader.iterate(0)) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert values(batch_loader.iterate(0, 2)) == [[8, 9]]
    assert loader_of(DataLoader(data, batch_size=4), training=False).note is None
    assert loader_of(DataLoader(data, batch_size=4), limit=2).length == 2


class Streamed(IterableDataset[Any]):
    """Five samples of features and a target, one by one."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        self.x = torch.randn(5, 4, generator=generator)
        self.y = torch.randn(5, 1, generator=generator)

    def __iter__(self) -> Iterator[Any]:
        yield from zip(self.x, self.y, strict=True)


def test_a_short_batch_of_an_iterable_dataset_weighs_by_its_samples() -> None:
    data, module = Streamed(), Toy()
    by_hand = Toy()
    by_hand.load_state_dict(module.state_dict())
    quiet(max_epochs=1, accumulate_grad_batches=3).fit(module, DataLoader(data, batch_size=2))
    optimizer = by_hand.configure_optimizers()
    torch.nn.functional.mse_loss(by_hand.layer(data.x), data.y).backward()
    optimizer.step()
    for ours, theirs in zip(module.parameters(), by_hand.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)


def pairs(rows: list[Any]) -> Any:
    return torch.tensor(rows), torch.zeros(2, len(rows))


@pytest.mark.parametrize(
    ("loader", "samples"),
    [
        (lambda: DataLoader(Stream(5), batch_size=2), [2, 2, 1]),
        (lambda: Subclass(Numbers(5), batch_size=2), [2, 2, 1]),
        (lambda: DataLoader(Stream(5), batch_size=2, collate_fn=list), [None, None, None]),
        (lambda: DataLoader(Stream(6), batch_size=3, collate_fn=pairs), [None, None]),  # which dimension is it?
        (lambda: DataLoader(Stream(2), batch_size=None), [None, None]),
        (lambda: [torch.ones(3), torch.ones(2)], [None, None]),
    ],
)
def test_the_samples_of_a_batch_that_others_have_made(loader: Any, samples: list[int | None]) -> None:
    assert [batch.samples for batch in loader_of(loader()).iterate(0)] == samples
    assert [batch.total for batch in loader_of(loader()).iterate(0)] == samples
    # A subclass of DataLoader is cut: of its batches each process takes every second one.
    of_one = len(samples) if type(loader()) is not Subclass else len(samples) // 2
    assert [batch.total for batch in loader_of(loader(), 1, 2).iterate(0)] == [None] * of_one


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # which torchdata calls
@pytest.mark.parametrize("limit", [None, 3])
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_stateful_subclass_is_cut_and_keeps_its_place(rank: int, workers: int, limit: int | None) -> None:
    torchdata = pytest.importorskip("torchdata.stateful_dataloader")

    def made() -> Any:
        return loader_of(torchdata.StatefulDataLoader(Numbers(22), 2, num_workers=workers), rank, 2, limit=limit)

    own = [2 * number for number in range(11) if number % 2 == rank][:limit]
    firsts = [int(batch[0]) for batch in values(made().iterate(0))]
    assert firsts == own
    for taken in range(1, len(own) + 1):
        before, after = made(), made()
        iterator = before.iterate(0)
        for _ in range(taken):
            next(iterator)
        after.load_state_dict(before.state_dict())
        assert [int(batch[0]) for batch in values(after.iterate(0, taken))] == own[taken:]
        assert [int(batch[0]) for batch in values(after.iterate(1))] == own
        before.close()
        after.close()


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # which torchdata calls
def test_a_shuffling_stateful_loader_is_exact_and_nothing_is_said() -> None:
    torchdata = pytest.importorskip("torchdata.stateful_dataloader")
    before, after = (loader_of(torchdata.StatefulDataLoader(Numbers(22), 2, shuffle=True)) for _ in range(2))
    assert before.note is None
    values(before.iterate(0))
    iterator = before.iterate(1)
    for _ in range(4):
        next(iterator)
    after.load_state_dict(before.state_dict())
    assert values(after.iterate(1, 4)) == values(iterator)


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # which torchdata calls
def test_an_epoch_that_ended_at_its_limit_is_not_continued() -> None:
    torchdata = pytest.importorskip("torchdata.stateful_dataloader")
    before, after = (loader_of(torchdata.StatefulDataLoader(Numbers(22), 2), limit=3) for _ in range(2))
    firsts = values(before.iterate(0))
    after.load_state_dict(before.state_dict())
    assert values(after.iterate(1)) == values(before.iterate(1)) == firsts


def _shuffled_by_torchdata(limit: int | None) -> Any:
    torchdata = pytest.importorskip("torchdata.stateful_dataloader")
    torch.manual_seed(0)  # from which the loader seeds its sampler
    return loader_of(torchdata.StatefulDataLoader(Numbers(22), 2, shuffle=True), limit=limit)


def _nodes(limit: int | None) -> Any:
    nodes = pytest.importorskip("torchdata.nodes")
    node = nodes.MapStyleWrapper(map_dataset=Numbers(22), sampler=torch.utils.data.RandomSampler(range(22)))
    return loader_of(nodes.Loader(nodes.Mapper(nodes.Batcher(node, 2), torch.tensor)), limit=limit)


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # which torchdata calls
@pytest.mark.parametrize(("limit", "taken"), [(None, 11), (3, 3), (None, 3)], ids=["to its end", "limit", "left"])
@pytest.mark.parametrize("made", [_shuffled_by_torchdata, _nodes])
def test_the_epoch_after_a_restart_is_the_one_that_comes_next(made: Any, limit: int | None, taken: int) -> None:
    before, after = made(limit), made(limit)
    batches = before.iterate(0)
    for _ in range(taken):
        next(batches)
    after.load_state_dict(before.state_dict())
    batches, third = after.iterate(1), made(limit)
    begun = values(itertools.islice(batches, 2))
    third.load_state_dict(copy.deepcopy(after.state_dict()))
    resumed = [begun + values(batches), values(after.iterate(2))]
    assert begun + values(third.iterate(1, 2)) == resumed[0]
    assert resumed == [values(before.iterate(epoch)) for epoch in (1, 2)]
    assert limit is not None or all(sorted(itertools.chain.from_iterable(epoch)) == [*range(22)] for epoch in resumed)


def test_each_part_of_a_shuffling_subclass_is_the_same_after_a_restart() -> None:
    def made(rank: int) -> Any:
        generator = torch.Generator().manual_seed(rank)  # seeded anew for each epoch, alike on all processes
        return loader_of(Subclass(Numbers(20), batch_size=2, shuffle=True, generator=generator), rank, 2)

    parts = [values(made(rank).iterate(3)) for rank in (0, 1)]
    assert sorted(int(number) for part in parts for batch in part for number in batch) == list(range(20))
    assert values(made(1).iterate(3, 2)) == parts[1][2:]


def test_the_limit_takes_nothing_more() -> None:
    data = Stream(100)
    batch_loader = loader_of(iter(data), limit=3)
    assert values(batch_loader.iterate(0)) == [0, 1, 2]
    assert data.read == 3
    assert values(batch_loader.iterate(1)) == [3, 4, 5]
    assert values(batch_loader.iterate(1, 3)) == []
    assert data.read == 6


@pytest.mark.parametrize("endless", [lambda: iter(Stream(100)), lambda: itertools.cycle(range(100))])
def test_an_endless_iterator_is_resumed_behind_all_epochs(endless: Any) -> None:
    """The limit ends each epoch, so a new iterator gives those before again."""
    for start in (0, 2):
        resumed = loader_of(endless(), limit=3)
        assert values(resumed.iterate(2, start)) == [6, 7, 8][start:]
        assert values(resumed.iterate(3)) == [9, 10, 11]


@pytest.mark.parametrize("start", [0, 1, 2, 5])
def test_a_shuffling_subclass_gives_the_same_order_after_a_restart(start: int) -> None:
    loader = Subclass(Numbers(20), batch_size=4, shuffle=True)
    torch.manual_seed(1)
    batch_loader = loader_of(loader)
    full = values(batch_loader.iterate(0))
    assert not batch_loader.exact
    torch.manual_seed(2)
    before = torch.get_rng_state().tolist()
    assert values(loader_of(loader).iterate(0, start)) == full[start:]
    assert torch.get_rng_state().tolist() == before
    assert values(batch_loader.iterate(1)) != full


def test_an_iterable_with_state_goes_on_by_itself() -> None:
    batch_loader = loader_of(Counter())
    assert batch_loader.exact
    assert batch_loader.note is None
    batches = batch_loader.iterate(0)
    assert [next(batches).data, next(batches).data] == [0, 1]
    state = batch_loader.state_dict()

    loader = Counter()
    resumed = loader_of(loader)
    resumed.load_state_dict(state)
    assert resumed.state_dict() == state  # a checkpoint before the first batch has the same position
    assert values(resumed.iterate(0, start=2)) == [2, 3, 4]
    assert loader.calls == [0, {"next": 2}]
    assert values(resumed.iterate(1)) == [0, 1, 2, 3, 4]
    # A loader without a state is read up to the start.
    assert values(loader_of(Counter()).iterate(0, start=2)) == [2, 3, 4]
    assert loader_of(DataLoader(Numbers(3))).state_dict()["samples"] == 3


def test_a_state_of_the_end_of_an_epoch_means_the_next_epoch() -> None:
    loader = Counter()
    batch_loader = loader_of(loader)
    batch_loader.load_state_dict({"loader": {"next": 5}})
    assert values(batch_loader.iterate(1)) == [0, 1, 2, 3, 4]


def test_set_epoch_reaches_the_sampler_of_another_kind_of_loader() -> None:
    data = Numbers(20)
    sampler = DistributedSampler(data, 1, 0)
    batch_loader = loader_of(Subclass(data, batch_size=4, sampler=sampler))
    assert values(batch_loader.iterate(0)) != values(batch_loader.iterate(1))
    assert sampler.epoch == 1


def test_a_generator_lasts_one_epoch() -> None:
    batch_loader = loader_of(i for i in range(3))
    assert batch_loader.one_shot
    assert "the generator can be iterated only once" in (batch_loader.note or "")
    assert values(batch_loader.iterate(0)) == [0, 1, 2]
    with raises_recorded(ConfigError):
        list(batch_loader.iterate(1))


# -- mistakes ----------------------------------------------------------------------------------------------------------


def empty_cases() -> dict[str, Any]:
    few = Numbers(5)
    return {
        "dataset": DataLoader(Numbers(0)),
        "sampler": DataLoader(few, sampler=SubsetRandomSampler([])),
        "batch_sampler": DataLoader(few, batch_sampler=[]),
        "drop_last": DataLoader(few, batch_size=4, drop_last=True),
        "list": [],
        "subclass": Subclass(Numbers(0)),
    }


@pytest.mark.parametrize("case", empty_cases())
def test_an_empty_loader_is_refused_at_once(case: str) -> None:
    loader = empty_cases()[case]
    with raises_recorded(ConfigError):
        loader_of(loader, 1, 2, name="mine")
    loader_of(loader, 1, 2, limit=0)


def test_an_empty_stream_is_refused_when_it_is_read() -> None:
    with raises_recorded(ConfigError):
        list(loader_of(DataLoader(Stream(0)), training=False).iterate(0))
    # One of several processes may have nothing to evaluate.
    assert list(loader_of(DataLoader(Stream(0)), 0, 2, training=False).iterate(0)) == []


def test_a_fraction_needs_a_length_and_at_least_one_batch() -> None:
    with raises_recorded(ConfigError):
        loader_of(DataLoader(Stream(5)), limit=0.5)
    with raises_recorded(ConfigError):
        loader_of(DataLoader(Numbers(4)), limit=0.1)
    assert loader_of(DataLoader(Numbers(100)), limit=0.29).length == 29
    assert loader_of(DataLoader(Stream(5)), limit=1.0).length is None
    assert loader_of(DataLoader(Stream(5)), limit=0.0).length == 0


@pytest.mark.parametrize("make", [list, tuple, lambda two: dict(zip("ab", two, strict=True))])
def test_training_takes_a_batch_of_each_of_several_loaders(make: Any) -> None:
    loaders = make([DataLoader(Numbers(3)), DataLoader(Numbers(2))])
    batches = [batch.data for batch in loader_of(loaders).iterate(0)]
    assert [type(batch) for batch in batches] == [type(loaders)] * 3
    pairs = [batch.values() if isinstance(batch, dict) else batch for batch in batches]
    assert [[int(item) for item in pair] for pair in pairs] == [[0, 0], [1, 1], [2, 0]]


def test_what_cannot_be_iterated_is_refused() -> None:
    with raises_recorded(ConfigError):
        loader_of(5)
    with raises_recorded(ConfigError):
        loader_of(None)


def test_named_loaders() -> None:
    one, two = DataLoader(Numbers(3)), DataLoader(Numbers(4))
    assert named_loaders(None) == {}
    assert named_loaders(one) == {"": one}
    assert named_loaders([one, two]) == named_loaders((one, two)) == {"dataloader_idx_0": one, "dataloader_idx_1": two}
    assert named_loaders({"a": one, "b": two}) == {"a": one, "b": two}
    assert named_loaders([Counter(), Counter()]).keys() == {"dataloader_idx_0", "dataloader_idx_1"}
    for batches in (
        [torch.zeros(2), torch.zeros(2)],
        [(torch.zeros(2), torch.zeros(2))],
        [{"x": torch.zeros(2)}],
        [[torch.zeros(2)], [torch.zeros(2)]],
        [np.zeros(2)],
        [],
    ):
        assert named_loaders(batches) == {"": batches}


def test_tensor_dataset_batches_equal_the_loaders() -> None:
    data = TensorDataset(torch.arange(10.0), torch.arange(10))
    loader = DataLoader(data, batch_size=3)
    for mine, theirs in zip(loader_of(loader).iterate(0), loader, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine.data, theirs, strict=True))
