"""Batches are moved to CUDA on a side stream during computation, and directly on other devices."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from trainer.data.transfer import CudaPrefetchCopy, make_transfer


class OwnKind:
    """A user's batch class with a `to` method."""

    def __init__(self, x: torch.Tensor) -> None:
        self.x = x

    def to(self, device: Any) -> OwnKind:
        return OwnKind(self.x.to(device))


def test_elsewhere_a_batch_is_moved_in_the_plain_way() -> None:
    move = make_transfer(torch.device("cpu"))
    assert not isinstance(move, CudaPrefetchCopy)
    x = torch.ones(2)
    assert move({"x": [x], "name": "a"}) == {"x": [x], "name": "a"}


@pytest.mark.gpu
def test_everything_arrives_as_by_the_plain_way() -> None:
    device = torch.device("cuda", 0)
    x, own, there = torch.randn(1000), OwnKind(torch.randn(3)), torch.randn(2, device=device)
    moved = CudaPrefetchCopy(device)(
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
    move, sums = CudaPrefetchCopy(device), []
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
    move, x = CudaPrefetchCopy(device), torch.randn(1 << 20).pin_memory()
    move(x)
    torch.cuda.set_sync_debug_mode("error")
    try:
        move(x)
    finally:
        torch.cuda.set_sync_debug_mode("default")
