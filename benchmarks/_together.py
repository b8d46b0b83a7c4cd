"""Contenders on two processes over gloo, started by torchrun: each between two runs of the loop."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812

from benchmarks._report import Report
from benchmarks._task import BATCH, Net, Task
from benchmarks._turns import Clock, Contender, take_turns

WIDTHS = {"tiny": (64, 1), "mid": (1024, 2)}
"""Width and number of hidden layers: 2,177 and 1,084,417 parameters."""
STEPS = {"tiny": 600, "mid": 150}
BAR = 1 / 0.97

Update = Callable[[torch.Tensor, torch.Tensor], None]


class Sized:
    """Build the net, the same on every process."""

    def __init__(self, model: str) -> None:
        self.width, self.layers = WIDTHS[model]

    def __call__(self, clock: Clock) -> Net:
        torch.manual_seed(0)
        return Net(clock, width=self.width, layers=self.layers)


def loop_over(task: Task, update: Update) -> None:
    """Return this process's half of the rows, shuffled, in batches of 32."""
    from torch.utils.data import DataLoader, DistributedSampler

    sampler: Any = DistributedSampler(task.rows(), shuffle=True)
    for x, y in DataLoader(task.rows(), batch_size=BATCH, sampler=sampler):
        update(x, y)


def step_with(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Update:
    def update(x: torch.Tensor, y: torch.Tensor) -> None:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()

    return update


def ours(task: Task, net_of: Sized, strategy: Callable[[], Any]) -> list[Contender]:
    """Return the contenders under a strategy: everything off, and everything on."""
    from benchmarks import _ours
    from trainer.distributed.process_group import TorchProcessGroup

    def run(clock: Clock, folder: Path, on: bool) -> None:
        # Rank 0's folder, as on a cluster.
        rank = dist.get_rank()
        shared = TorchProcessGroup(rank, rank, dist.get_world_size()).broadcast_object(str(folder))
        options = _ours.all_on() if on else _ours.OFF
        module = (_ours.LoggedRegression if on else _ours.Regression)(net_of(clock))
        trainer = _ours.trainer(task, Path(shared), **{"devices": 2, **options, "strategy": strategy()})
        trainer.fit(module, task.data())
        dist.barrier()

    return [
        Contender("ours, everything off", partial(run, on=False), bar=BAR),
        Contender("ours, all on: bar, CSV, TensorBoard, checkpoints, self.log", partial(run, on=True)),
    ]


def compare(
    name: str,
    text: str | None,
    arguments: list[str],
    loop: Callable[[Task, Sized, Clock, Path], None],
    contenders: Callable[[Task, Sized], list[Contender]],
) -> int:
    """Start two processes of this command, or run as one of them."""
    parser = argparse.ArgumentParser(f"python -m benchmarks {name}", description=text)
    parser.add_argument("--model", choices=[*WIDTHS], default="mid", help="2 thousand or a million parameters")
    parser.add_argument("--steps", type=int, default=None)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", nargs="+", default=[], metavar="TEXT")
    parser.add_argument("--save", type=Path, default=None)
    options = parser.parse_args(arguments)
    if "RANK" not in os.environ:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        env = {**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
        return subprocess.run([*command, "-m", "benchmarks", name, *arguments], env=env, check=False).returncode
    torch.set_num_threads(1)
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    rank, steps = dist.get_rank(), options.steps or STEPS[options.model]
    # Both processes together have twice the rows.
    task, net_of = Task(2 * steps, loader=True), Sized(options.model)
    report = Report(
        name if options.model == "mid" else f"{name}_{options.model}",
        f"{(text or '').splitlines()[0]} CPU time of rank 0 and wall time per step; two processes, one thread each, "
        f"a perceptron of {sum(p.numel() for p in net_of(Clock(1)).parameters()):,} parameters, batches of {BATCH} on "
        "each through a DataLoader. The bar, 0.97 of the throughput, is a ratio of 1.031.",
    )
    take_turns(
        report,
        Contender("hand-written loop", partial(loop, task, net_of)),
        contenders(task, net_of),
        steps,
        options.rounds,
        options.only,
    )
    if rank == 0:
        report.save(options.save)
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # gloo's threads may abort a process that ends in the usual way
