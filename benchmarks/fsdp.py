"""FSDP2 on two processes over gloo, against torch's fully_shard in a hand-written loop."""

from __future__ import annotations

from pathlib import Path

from benchmarks._task import Task, optimizer_of
from benchmarks._together import Sized, compare, loop_over, ours, step_with
from benchmarks._turns import Clock, Contender


def loop(task: Task, net_of: Sized, clock: Clock, folder: Path) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    net = net_of(clock)
    mesh = init_device_mesh("cpu", (2,))
    # The blocks that the strategy finds automatically.
    from trainer.model.blocks import find_blocks

    for block in find_blocks(net).values():
        fully_shard(block, mesh=mesh)
    fully_shard(net, mesh=mesh)
    loop_over(task, step_with(net, optimizer_of(net)))


def contenders(task: Task, net_of: Sized) -> list[Contender]:
    return ours(task, net_of, lambda: "fsdp")


def main(arguments: list[str]) -> int:
    return compare("fsdp", __doc__, arguments, loop, contenders)
