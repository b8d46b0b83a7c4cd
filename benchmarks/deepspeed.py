"""ZeRO-2 on two processes over gloo, against DeepSpeed's engine in a hand-written loop."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812

from benchmarks._task import BATCH, Task, optimizer_of
from benchmarks._together import Sized, compare, loop_over, ours
from benchmarks._turns import Clock, Contender
from trainer.strategies.deepspeed.engine import import_deepspeed

CONFIG = {
    "train_micro_batch_size_per_gpu": BATCH,
    "gradient_accumulation_steps": 1,
    "zero_optimization": {"stage": 2},
    "zero_allow_untested_optimizer": True,
    "zero_force_ds_cpu_optimizer": False,
    "steps_per_print": 10**9,
    "wall_clock_breakdown": False,
}


def loop(task: Task, net_of: Sized, clock: Clock, folder: Path) -> None:
    import deepspeed

    net: Any = net_of(clock)
    engine, *_ = deepspeed.initialize(model=net, optimizer=optimizer_of(net), config=CONFIG, dist_init_required=False)

    def update(x: torch.Tensor, y: torch.Tensor) -> None:
        loss = F.mse_loss(engine(x), y)
        engine.backward(loss)
        engine.step()

    loop_over(task, update)
    engine.destroy()


def strategy() -> Any:
    from trainer.strategies.deepspeed.strategy import DeepSpeedStrategy

    return DeepSpeedStrategy(stage=2)


def contenders(task: Task, net_of: Sized) -> list[Contender]:
    return ours(task, net_of, strategy)


def main(arguments: list[str]) -> int:
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
        # For both, without the operator for shared memory, which DeepSpeed would compile for minutes.
        import_deepspeed("cpu").init_distributed(auto_mpi_discovery=False, verbose=False)
    return compare("deepspeed", __doc__, arguments, loop, contenders)
