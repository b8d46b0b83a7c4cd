"""The elements that a process has of a distributed tensor, against those that torch gives it."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from tests.helpers.processes import once_per_module, run_distributed
from trainer.precision import PRECISIONS
from trainer.strategies import FSDPStrategy
from trainer.strategies.fsdp.dtensors import local_slice

SHAPES = [(8,), (7,), (1,), (8, 6), (7, 5), (3, 8), (12, 4, 2)]
PLACEMENTS = {
    "rows": (Shard(0), Replicate()),
    "columns": (Replicate(), Shard(-1)),
    "rows and columns": (Shard(0), Shard(-1)),
    "rows twice": (Shard(0), Shard(0)),
    "rows twice, from the right": (_StridedShard(0, split_factor=2), Shard(0)),
    "packed rows": (Replicate(), _StridedShard(0, split_factor=3)),
    "packed columns": (Replicate(), _StridedShard(-1, split_factor=2)),
}


def compare() -> dict[str, list[str]]:
    """Return, for each placement, the shapes of which this process has other elements than `local_slice` says."""
    FSDPStrategy().setup_environment("cpu", PRECISIONS["32-true"])
    mesh = DeviceMesh("cpu", torch.arange(4).reshape(2, 2))
    wrong: dict[str, list[str]] = {name: [] for name in PLACEMENTS}
    understood = 0
    for (name, placements), shape in itertools.product(PLACEMENTS.items(), SHAPES):
        full = torch.arange(math.prod(shape)).reshape(shape)
        tensor: Any = distribute_tensor(full, mesh, [Replicate(), Replicate()])
        try:
            tensor = redistributed(full, mesh, placements)
        except (RuntimeError, NotImplementedError, AssertionError):
            continue  # torch does not divide it
        try:
            found = local_slice(tensor).take(full)
        except ValueError:
            continue  # refused, not wrong
        understood += 1
        if not torch.equal(found, tensor.to_local().reshape(-1)):
            wrong[name].append(str(shape))
    assert understood > 40
    return wrong


def part_of(tensor: torch.Tensor, mesh: DeviceMesh, along: int, dim: int) -> torch.Tensor:
    """Return this process's part of a dimension, split along a dimension of the mesh."""
    parts, here = torch.chunk(tensor, mesh.size(along), dim), mesh.get_local_rank(along)
    return parts[here] if here < len(parts) else tensor.narrow(dim, 0, 0)


def redistributed(full: torch.Tensor, mesh: DeviceMesh, placements: Any) -> DTensor:
    """Divide a tensor as torch does; packed ones by hand: each of the packed parts is split by itself."""
    if isinstance(placements[0], _StridedShard):
        local = part_of(part_of(full, mesh, 1, 0), mesh, 0, 0)
    elif isinstance(placements[1], _StridedShard):
        dim = placements[1].dim
        parts = torch.chunk(full, placements[1].split_factor, dim)
        local = torch.cat([part_of(part, mesh, 1, dim) for part in parts], dim)
    else:
        return distribute_tensor(full, mesh, placements)
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=full.shape, stride=full.stride())


wrong = once_per_module(lambda: run_distributed(compare, 4))


@pytest.mark.parametrize("name", PLACEMENTS)
def test_the_elements_are_those_that_torch_gives(name: str, wrong: list[dict[str, list[str]]]) -> None:
    if name == "packed columns" and torch.__version__.startswith("2.9."):
        pytest.skip("torch 2.9 reads a packed placement of the last dimension as a plain one")
    assert [of_rank[name] for of_rank in wrong] == [[]] * 4
