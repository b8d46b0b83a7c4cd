"""A run with sharded state that is interrupted anywhere and resumed ends with the same bits."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.processes import run_distributed
from tests.helpers.resume_runs import Cell, break_points, matrix
from trainer.strategies import STRATEGIES

OPTIMIZERS = {
    "fsdp": ("adamw", "sgd"),
    # DeepSpeed refuses float16 on CPUs, in which the other cell computes.
    "deepspeed_stage_1": ("adamw",),
    "deepspeed_stage_2": ("adamw",),
    "deepspeed_stage_3": ("adamw",),
}
"""Optimizers with which each strategy is tested; `test_contract.py` stops and resumes all of the table."""


def test_every_strategy_that_shards_the_state_is_tested_here() -> None:
    multiple = {name for name, strategy in STRATEGIES.items() if strategy.shards_state and strategy.multi_process}
    assert {name.removesuffix("_offload") for name in multiple} - {"deepspeed"} == OPTIMIZERS.keys()


@pytest.mark.parametrize(("strategy", "optimizer"), [(name, one) for name, all_ in OPTIMIZERS.items() for one in all_])
def test_a_broken_run_ends_with_the_same_bits(strategy: str, optimizer: str, tmp_path: Path) -> None:
    cell = Cell(optimizer, 0, strategy)
    wanted = {cell: break_points(cell)}
    results = run_distributed(matrix, 2, str(tmp_path), wanted)
    for result in results:
        assert len(result) == len(wanted[cell])
        assert not any(result.values()), "\n".join(f"{key}: {line}" for key, lines in result.items() for line in lines)
