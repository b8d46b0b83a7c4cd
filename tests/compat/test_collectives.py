"""`trainer.strategy.reduce` and the like do over processes what Lightning's strategies do."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.helpers.processes import run_distributed
from trainer.precision import resolve_precision
from trainer.strategies import DDPStrategy, SingleDeviceStrategy


def asked() -> dict[str, Any]:
    strategy = DDPStrategy()
    strategy.setup_environment("cpu", resolve_precision("32-true"))
    rank = strategy.global_rank
    strategy.barrier("all are here")
    value = torch.tensor([1.0 + rank, 4.0])
    return {
        "mean": strategy.reduce(value).tolist(),
        "sum": strategy.reduce(value, reduce_op=torch.distributed.ReduceOp.SUM).tolist(),
        "unchanged": value.tolist(),
        "of 0": strategy.broadcast({"rank": rank}),
        "of 1": strategy.broadcast({"rank": rank}, src=1),
        "all": strategy.reduce_boolean_decision(rank == 0),
        "any": strategy.reduce_boolean_decision(rank == 0, all=False),
        "ranks": (strategy.global_rank, strategy.local_rank, strategy.world_size, strategy.is_global_zero),
    }


def test_two_processes() -> None:
    for rank, found in enumerate(run_distributed(asked, 2)):
        assert found == {
            "mean": [1.5, 4.0],
            "sum": [3.0, 8.0],
            "unchanged": [1.0 + rank, 4.0],
            "of 0": {"rank": 0},
            "of 1": {"rank": 1},
            "all": False,
            "any": True,
            "ranks": (rank, rank, 2, rank == 0),
        }


def test_one_process() -> None:
    strategy = SingleDeviceStrategy()
    strategy.setup_environment("cpu", resolve_precision("32-true"))
    value = torch.ones(2)
    assert strategy.reduce(value) is value
    assert (strategy.reduce("text"), strategy.broadcast([3]), strategy.reduce_boolean_decision(True)) == (
        "text",
        [3],
        True,
    )
    with pytest.raises(ValueError, match="the mean or the sum over all processes"):
        strategy.reduce(value, reduce_op="max")
