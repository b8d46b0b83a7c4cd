"""The mean of gradients over processes, in buckets, and the backends that a group needs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.helpers.processes import run_distributed
from trainer import ConfigError
from trainer.strategies import distributed
from trainer.strategies.distributed import average_gradients, check_backends

SHAPES = ((3, 2), (), (5,), (4, 4), (0,), (1,))
LACKING = {0: (2, 4), 1: (0, 2)}
"""By rank: parameters without a gradient; none has that of number 2."""


def gradient(rank: int, number: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(SHAPES[number], generator=torch.Generator().manual_seed(10 * rank + number)).to(dtype)


def averaged(bucket_bytes: int) -> list[torch.Tensor | None]:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    distributed._BUCKET_BYTES = bucket_bytes
    parameters = []
    for number, shape in enumerate(SHAPES):
        parameters.append(nn.Parameter(torch.zeros(shape, dtype=torch.float64 if number % 2 else torch.float32)))
        if number not in LACKING[rank]:
            parameters[-1].grad = gradient(rank, number, parameters[-1].dtype)
    average_gradients(parameters, 2)
    average_gradients([], 2)
    dist.destroy_process_group()
    return [parameter.grad for parameter in parameters]


@pytest.mark.parametrize("bucket_bytes", [1, 40, 2**20])
def test_means(bucket_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for found in run_distributed(averaged, 2, bucket_bytes):
        for number, mean in enumerate(found):
            if number == 2:
                assert mean is None
                continue
            dtype = torch.float64 if number % 2 else torch.float32
            parts = [gradient(rank, number, dtype) for rank in range(2) if number not in LACKING[rank]]
            torch.testing.assert_close(mean, sum(parts) / 2)


def test_a_group_without_a_backend_for_gpus_is_refused_or_made_anew() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with pytest.raises(ConfigError, match=r"has the backends .*gloo.*, and a run on GPUs needs cpu:gloo,cuda:nccl"):
        check_backends(world_size=2)
    assert dist.is_initialized()
    check_backends(world_size=1)
    assert not dist.is_initialized()
