"""The mean of gradients over processes, in buckets, and the backends that a group needs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader

from tests.helpers.compare import QUIET
from tests.helpers.processes import run_distributed
from tests.messages import raises_recorded
from trainer import ConfigError, Trainer, TrainModule
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


def averaged_sparse() -> list[torch.Tensor]:
    """Return the gradients of two embeddings, of which rank 1 uses one, and of a layer."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    first, second = (nn.Embedding(6, 2, sparse=True) for _ in range(2))
    used = torch.tensor([rank, 3, 3])
    (first(used).square().sum() + (second(used).sum() if rank == 0 else 0)).backward()
    layer = nn.Parameter(torch.zeros(2))
    layer.grad = torch.full((2,), float(rank))
    parameters = [first.weight, layer, second.weight]
    average_gradients(parameters, 2, {first.weight, second.weight})
    dist.destroy_process_group()
    return [p.grad.to_dense() for p in parameters if p.grad is not None]


def test_means_of_sparse_gradients(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    weight = nn.Embedding(6, 2).weight.detach()
    expected = torch.zeros(6, 2)
    expected[0], expected[1], expected[3] = weight[0], weight[1], 4 * weight[3]
    of_second = torch.zeros(6, 2)
    of_second[0], of_second[3] = 0.5, 1.0
    for found in run_distributed(averaged_sparse, 2):
        torch.testing.assert_close(found, [expected, torch.full((2,), 0.5), of_second])


def test_a_group_without_a_backend_for_gpus_is_refused_or_made_anew() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with raises_recorded(ConfigError):
        check_backends(world_size=2)
    assert dist.is_initialized()
    check_backends(world_size=1)
    assert not dist.is_initialized()


class Words(TrainModule):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(6, 2, sparse=True)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor | None:
        return self.embedding(batch).square().mean() if batch_idx + self.global_rank < 2 else None

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def skipped() -> None:
    trainer = Trainer(accelerator="cpu", devices=2, strategy="ddp", max_epochs=1, **QUIET)
    trainer.fit(Words(), DataLoader(torch.arange(12) % 6, 2))


def test_a_batch_without_a_loss_is_refused_where_gradients_are_sparse(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(AssertionError, match="ConfigError: training_step returned None to leave out a batch"):
        run_distributed(skipped, 2)
