"""Batches are moved to CUDA on a side stream during computation, and directly on other devices."""

from __future__ import annotations

import copy
from collections import OrderedDict, UserDict, UserList, defaultdict, deque
from collections.abc import Iterator, Mapping
from dataclasses import InitVar, dataclass, field
from types import MappingProxyType, SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from trainer.data.transfer import PrefetchCopy, make_transfer, map_leaves, move_to


class OwnKind:
    """A user's batch class with a `to` method."""

    def __init__(self, x: torch.Tensor) -> None:
        self.x = x

    def to(self, device: Any) -> OwnKind:
        return OwnKind(self.x.to(device))


def test_elsewhere_a_batch_is_moved_in_the_plain_way() -> None:
    move = make_transfer(torch.device("cpu"))
    assert not isinstance(move, PrefetchCopy)
    x = torch.ones(2)
    assert move({"x": [x], "name": "a"}) == {"x": [x], "name": "a"}


class Recorded(torch.Tensor):
    """A tensor that records how it is asked to move."""

    asked: list[bool]

    def to(self, *args: Any, non_blocking: bool = False) -> Any:
        self.asked.append(non_blocking)
        return self


@pytest.mark.parametrize(("target", "expected"), [("cuda", True), ("cpu", False), ("mps", False)])
def test_only_copies_to_cuda_are_asynchronous(target: str, expected: bool) -> None:
    """On MPS, and into host memory, such a copy is read before it is complete."""
    tensor = torch.ones(2).as_subclass(Recorded)
    tensor.asked = []
    move_to({"x": [tensor]}, torch.device(target))
    assert tensor.asked == [expected]


@pytest.mark.skipif(not torch.backends.mps.is_available(), reason="the race of asynchronous copies needs MPS")
def test_copies_to_mps_are_complete() -> None:
    for number in range(200):
        there = move_to([torch.full((1000,), float(number))], torch.device("mps"))
        assert float(there[0].sum()) == 1000.0 * number


@pytest.mark.parametrize("enforce_sorted", [True, False])
def test_the_batch_sizes_of_a_packed_sequence_stay_on_the_cpu(enforce_sorted: bool) -> None:
    packed = pack_sequence([torch.randn(3, 2), torch.randn(2, 2)], enforce_sorted)
    moved = move_to({"x": packed}, torch.device("meta"))["x"]
    assert isinstance(moved, PackedSequence)
    assert moved.data.is_meta
    assert torch.equal(moved.batch_sizes, packed.batch_sizes)
    assert enforce_sorted or moved.sorted_indices.is_meta
    half = map_leaves(packed, in_bfloat16)
    assert half.data.dtype is torch.bfloat16


def in_bfloat16(leaf: Any) -> Any:
    return leaf.bfloat16() if torch.is_tensor(leaf) and leaf.is_floating_point() else leaf


class Pair(NamedTuple):
    x: torch.Tensor
    sizes: torch.Tensor


class PairWithTo(NamedTuple):
    """A namedtuple that knows what has to move."""

    x: torch.Tensor
    sizes: torch.Tensor

    def to(self, device: Any) -> PairWithTo:
        return self._replace(x=self.x.to(device))


def test_a_namedtuple_moves_as_it_says() -> None:
    x, sizes = torch.ones(2), torch.ones(1)
    assert [part.is_meta for part in move_to(Pair(x, sizes), torch.device("meta"))] == [True, True]
    assert [part.is_meta for part in move_to(PairWithTo(x, sizes), torch.device("meta"))] == [True, False]


class Edge(NamedTuple):
    """A field of this name is no method."""

    start: torch.Tensor
    to: torch.Tensor


class Inside:
    """A batch class that moves its `x` and leaves its `sizes`, and makes a note of that."""

    moves: list[str]

    def to(self: Any, device: Any) -> Any:
        same = copy.copy(self)
        if isinstance(self, dict | UserDict):
            same["x"] = self["x"].to(device)
        elif isinstance(self, list):
            same[0] = self[0].to(device)
        else:
            object.__setattr__(same, "x", self.x.to(device))
        object.__setattr__(same, "moves", [type(self).__name__])
        return same


class OwnDict(Inside, dict):  # type: ignore[type-arg]
    pass


class OwnUserDict(Inside, UserDict):  # type: ignore[type-arg]
    pass


class OwnList(Inside, list):  # type: ignore[type-arg]
    pass


@dataclass
class OwnDataclass(Inside):
    x: torch.Tensor
    sizes: torch.Tensor


@dataclass(frozen=True)
class OwnFrozen(Inside):
    x: torch.Tensor
    sizes: torch.Tensor


def items_of(batch: Any) -> list[Any]:
    if isinstance(batch, dict | UserDict):
        return list(batch.values())
    return list(batch) if isinstance(batch, list) else [batch.x, batch.sizes]


@pytest.mark.parametrize("kind", [OwnDict, OwnUserDict, OwnList, OwnDataclass, OwnFrozen])
@pytest.mark.parametrize("nested", [False, True])
def test_a_class_with_a_method_to_moves_as_that_says(kind: Any, nested: bool) -> None:
    x, sizes = torch.ones(2), torch.ones(1)
    of_entries = OwnDict, OwnUserDict
    own = kind(x=x, sizes=sizes) if kind in of_entries else kind([x, sizes]) if kind is OwnList else kind(x, sizes)
    moved = move_to({"a": [own]}, torch.device("meta"))["a"][0] if nested else move_to(own, torch.device("meta"))
    assert type(moved) is kind
    assert moved.moves == [kind.__name__]
    assert [part.is_meta for part in items_of(moved)] == [True, False]
    # Casting to a dtype is the precision's, which a method `to` may not know.
    assert [part.dtype for part in items_of(map_leaves(own, in_bfloat16))] == [torch.bfloat16] * 2


class InPlace(dict[str, Any]):
    """Hugging Face's older habit: `to` returns nothing."""

    def to(self, device: Any) -> None:
        self["x"] = self["x"].to(device)


def test_a_method_to_that_returns_nothing_has_moved_in_place() -> None:
    batch = InPlace(x=torch.ones(2))
    assert move_to([batch], torch.device("meta"))[0]["x"].is_meta


def test_a_field_called_to_is_no_method() -> None:
    edge = move_to(Edge(torch.ones(2), torch.ones(2)), torch.device("meta"))
    assert edge.start.is_meta
    assert edge.to.is_meta
    named = SimpleNamespace(to=torch.ones(1))
    assert move_to([named], torch.device("meta"))[0] is named


@dataclass
class WithMore:
    """Fields that the constructor does not take, or takes without keeping them."""

    x: torch.Tensor
    scale: InitVar[float]
    late: Any = field(init=False, default=None)
    made: list[str] = field(default_factory=list, init=False)
    unset: torch.Tensor = field(init=False)

    def __post_init__(self, scale: float) -> None:
        self.x = self.x * scale
        self.made.append("made")


def test_a_dataclass_is_copied_without_making_it_again() -> None:
    batch = WithMore(torch.ones(2), 3.0)
    batch.late = torch.ones(1)
    moved = move_to(batch, torch.device("meta"))
    assert moved.x.is_meta
    assert moved.late.is_meta
    assert moved.made == ["made"]
    same = map_leaves(batch, in_bfloat16)
    assert same.x.tolist() == [3.0, 3.0]
    assert not batch.late.is_meta


class Extended(list[Any]):
    """A list with an attribute and a constructor of its own."""

    def __init__(self, items: Any, name: str) -> None:
        super().__init__(items)
        self.name = name


class ReadOnly(Mapping[str, Any]):
    def __init__(self, entries: Mapping[str, Any]) -> None:
        self.entries = entries

    def __getitem__(self, key: str) -> Any:
        return self.entries[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)


def test_containers_keep_their_class_and_attributes() -> None:
    x = torch.ones(2)
    meta = torch.device("meta")
    extended = move_to(Extended([x], "a"), meta)
    assert (type(extended), extended.name, extended[0].is_meta) == (Extended, "a", True)
    for kind in (deque, UserList):
        moved = move_to(kind([x, "text"]), meta)
        assert (type(moved), moved[0].is_meta, moved[1]) == (kind, True, "text")
    read_only = move_to(ReadOnly({"x": x}), meta)
    assert (type(read_only), read_only["x"].is_meta) == (ReadOnly, True)
    assert move_to(MappingProxyType({"x": x}), meta)["x"].is_meta
    assert not x.is_meta


class Encoding(UserDict):  # type: ignore[type-arg]
    """Hugging Face's BatchEncoding in small: its `to` waits for the device."""

    def __init__(self, data: dict[str, Any], encodings: str) -> None:
        super().__init__(data)
        self.encodings = encodings

    def to(self, device: Any) -> Encoding:
        raise AssertionError("moved on the computing stream")

    to.__module__ = "transformers.tokenization_utils_base"


def test_mappings_keep_their_class_and_move_entry_by_entry() -> None:
    x = torch.ones(2)
    encoding = Encoding({"ids": x, "text": ["a"]}, "fast")
    moved = move_to(encoding, torch.device("meta"))
    assert type(moved) is Encoding
    assert (moved.encodings, moved["text"], moved["ids"].is_meta) == ("fast", ["a"], True)
    assert encoding["ids"] is x
    lists = defaultdict(list, {"x": x})
    for original in (OrderedDict(x=x), lists):
        there = move_to(original, torch.device("meta"))
        assert type(there) is type(original)
        assert there["x"].is_meta
        assert original["x"] is x


@pytest.mark.gpu
def test_everything_arrives_as_by_the_plain_way() -> None:
    device = torch.device("cuda", 0)
    x, own, there = torch.randn(1000), OwnKind(torch.randn(3)), torch.randn(2, device=device)
    moved = PrefetchCopy(device)(
        {"x": (x, x.pin_memory()), "own": own, "there": there, "sparse": torch.eye(3).to_sparse()}
    )
    assert torch.equal(moved["x"][0].cpu(), x)
    assert torch.equal(moved["x"][1].cpu(), x)
    assert torch.equal(moved["own"].x.cpu(), own.x)
    assert moved["there"] is there
    assert torch.equal(moved["sparse"].to_dense().cpu(), torch.eye(3))


@pytest.mark.gpu
def test_a_batch_is_complete_when_it_is_used_and_is_not_overwritten_by_the_next() -> None:
    device = torch.device("cuda", 0)
    move, sums = PrefetchCopy(device), []
    busy = torch.randn(2048, 2048, device=device)
    for number in range(50):
        batch = move(torch.full((1 << 20,), float(number)).pin_memory())
        busy = (busy @ busy).clamp(-1, 1)  # the device lags behind the host
        sums.append(batch.sum(dtype=torch.float64))
        del batch
    assert [float(total) for total in sums] == [number * float(1 << 20) for number in range(50)]


@pytest.mark.gpu
def test_copies_from_pinned_memory_do_not_wait() -> None:
    device = torch.device("cuda", 0)
    move, x = PrefetchCopy(device), torch.randn(1 << 20).pin_memory()
    move(x)
    torch.cuda.set_sync_debug_mode("error")
    try:
        move(x)
    finally:
        torch.cuda.set_sync_debug_mode("default")
