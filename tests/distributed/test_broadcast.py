"""Tensors of any dtype and layout are sent whole: those that are views, and of dtypes that gloo does not know."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate

from tests.helpers.processes import run_distributed
from trainer.distributed.all_gather import gather_nested
from trainer.distributed.process_group import TorchProcessGroup

DTYPES = (torch.int16, torch.uint16, torch.float8_e4m3fn, torch.bool, torch.complex64, torch.bfloat16, torch.float64)
VIEWS = {
    "columns": lambda t: t[:, :2],
    "transposed": lambda t: t.t(),
    "every second row": lambda t: t[::2],
    "one row in several places": lambda t: t[:1].expand(3, -1),
    "no rows": lambda t: t[:0],
    "one number": lambda t: t[1, 1],
}


def exchange() -> dict[Any, Any]:
    """Return what is broadcast from rank 0, each with what is around it; and what is gathered."""
    dist.init_process_group("gloo")
    rank, found = dist.get_rank(), {}
    group = TorchProcessGroup(rank, rank, 2)
    for name, view in VIEWS.items():
        base = torch.arange(16.0).view(4, 4) + 100 * rank
        group.broadcast([view(base)])
        found[name] = base
    for dtype in DTYPES:
        tensor = torch.tensor([rank, 1, 1]).to(dtype)
        found["gathered", dtype] = gather_nested(tensor[::2], tensor.device, None, sync_grads=False).to(torch.complex64)
        group.broadcast_over_readers([tensor])
        found[dtype] = tensor.to(torch.complex64)
    mesh = init_device_mesh("cpu", (2,))
    found["distributed"] = DTensor.from_local(torch.full((2,), float(rank)), mesh, [Replicate()], run_check=False)
    group.broadcast_over_readers([found["distributed"]])
    found["distributed"] = found["distributed"].to_local()
    dist.destroy_process_group()
    return found


def test_every_tensor_has_the_values_of_rank_0(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for rank, found in enumerate(run_distributed(exchange, 2)):
        for name, view in VIEWS.items():
            expected = torch.arange(16.0).view(4, 4) + 100 * rank
            places = torch.zeros(4, 4)
            for place in view(torch.arange(16).view(4, 4)).flatten().tolist():
                places.view(-1)[place] = 1
            expected = torch.where(places == 1, torch.arange(16.0).view(4, 4), expected)
            torch.testing.assert_close(found[name], expected, rtol=0, atol=0)
        assert found["distributed"].tolist() == [0, 0]
        for dtype in DTYPES:
            assert found[dtype].tolist() == [0, 1, 1]
            assert found["gathered", dtype].tolist() == [[0, 1], [1, 1]]
