"""ZeRO-2 on two processes over gloo, against DeepSpeed's engine in a hand-written loop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812

from benchmarks._task import BATCH, Task, optimizer_of
from benchmarks._together import Sized, compare, loop_over, ours
from benchmarks._turns import Clock, Contender

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
    from trainer.strategies.deepspeed import DeepSpeedStrategy

    return DeepSpeedStrategy(stage=2)


def contenders(task: Task, net_of: Sized) -> list[Contender]:
    return ours(task, net_of, strategy)


def main(arguments: list[str]) -> int:
    import deepspeed.comm

    # Its communication wants to be brought up once, before any engine; the group is torch's.
    deepspeed.comm.init_distributed("gloo", verbose=False) if _is_rank() else None
    return compare("deepspeed", __doc__, arguments, loop, contenders)


def _is_rank() -> bool:
    import os

    return "RANK" in os.environ
