"""Batches are moved to CUDA on a side stream during computation, and directly on other devices."""

from __future__ import annotations

from collections import OrderedDict, UserDict, defaultdict
from typing import Any, NamedTuple

import pytest
import torch
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from trainer.data.transfer import PrefetchCopy, make_transfer, move_to


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
    half = move_to(packed, lambda leaf: leaf.bfloat16() if torch.is_tensor(leaf) and leaf.is_floating_point() else leaf)
    assert half.data.dtype is torch.bfloat16


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


class Encoding(UserDict):  # type: ignore[type-arg]
    """Hugging Face's BatchEncoding in small: its `to` waits for the device."""

    def __init__(self, data: dict[str, Any], encodings: str) -> None:
        super().__init__(data)
        self.encodings = encodings

    def to(self, device: Any) -> Encoding:
        raise AssertionError("moved on the computing stream")


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
