"""Check collectives between processes: the rendezvous, the results, and the speed."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

from trainer.cli.doctor.results import CheckResult
from trainer.config.classes import one_line_error
from trainer.errors import ConfigError, TrainerError

MEGABYTES = 16
REPEATS = 3
PATIENCE_S = 120.0


def exchange(megabytes: int = MEGABYTES, timeout_seconds: float = PATIENCE_S) -> dict[str, Any]:
    """Join the other processes as a run does, and compare the results of collectives with the known ones.

    Returns:
        `world_size`, `device`, `backend`; `wrong`: the collectives with wrong results; `all_reduce` and
        `all_gather`: the bandwidth in bytes per second (the bus bandwidth of nccl-tests).
    """
    import torch
    import torch.distributed as dist

    from trainer.distributed.environment import detect_environment
    from trainer.distributed.rendezvous import join_store

    environment = detect_environment()
    rank, world = environment.rank, environment.world_size
    cuda = torch.cuda.is_available() and torch.cuda.device_count() >= environment.local_world_size
    device, backend = torch.device("cpu"), "gloo"
    if cuda:
        device, backend = torch.device("cuda", environment.local_rank), "cpu:gloo,cuda:nccl"
        torch.cuda.set_device(device)
    timeout = timedelta(seconds=timeout_seconds)
    dist.init_process_group(
        backend, store=join_store(environment, timeout), rank=rank, world_size=world, timeout=timeout
    )
    elements = megabytes * 2**20 // 4
    mine = torch.full((elements,), float(rank + 1), device=device)
    total = mine.clone()
    gathered = torch.empty(world, elements, device=device)
    rows = list(gathered)
    dist.all_reduce(total)
    dist.all_gather(rows, mine)
    right = {
        "all_reduce": torch.all(total == world * (world + 1) / 2),
        "all_gather": torch.all(gathered == torch.arange(1.0, world + 1, device=device)[:, None]),
    }
    wrong = [name for name, is_right in right.items() if not is_right]
    reduce_s = _seconds(lambda: dist.all_reduce(total), device)
    gather_s = _seconds(lambda: dist.all_gather(rows, mine), device)
    slowest = torch.tensor([reduce_s, gather_s])
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    # A process that ends with its group's threads running can be aborted by them.
    dist.destroy_process_group()
    share, size = (world - 1) / world, elements * 4
    return {
        "world_size": world,
        "device": device.type,
        "backend": backend,
        "wrong": wrong,
        "all_reduce": 2 * share * size / slowest[0].item(),
        "all_gather": share * size * world / slowest[1].item(),
    }


def _seconds(collective: Any, device: Any) -> float:
    """Return the seconds that one collective takes, including the device's work."""
    import torch
    import torch.distributed as dist

    dist.barrier()
    began = time.perf_counter()
    for _ in range(REPEATS):
        collective()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return (time.perf_counter() - began) / REPEATS


def collectives(number: int) -> CheckResult:
    """Run `exchange` in `number` new processes, or, when this process was started as one of several, in it."""
    from trainer.distributed.environment import detect_environment
    from trainer.launchers.notebook import launch

    try:
        if detect_environment().source != "single process":
            found = exchange()
        elif number == 1:
            return CheckResult("OK", "collectives", "not tried with one process: --devices 2 tries them")
        else:
            found = launch(exchange, devices=number)[0]
    except ConfigError as error:
        return CheckResult("FAIL", "collectives", f"{error}")
    except (TrainerError, RuntimeError) as error:
        fix = "Look at NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME (the name of a network in `ip link`) and at firewalls."
        return CheckResult(
            "FAIL", "collectives", f"{number} processes cannot exchange tensors: {one_line_error(error)}", fix
        )
    subject = f"{found['world_size']} processes on {found['device']} ({found['backend']})"
    if found["wrong"]:
        fix = "Hardware or driver: run nccl-tests and `nvidia-smi -q`; NCCL_P2P_DISABLE=1 tells whether it is the link."
        return CheckResult("FAIL", "collectives", f"{subject}: wrong numbers from {' and '.join(found['wrong'])}.", fix)
    speeds = ", ".join(f"{name} {found[name] / 1e9:.2f} GB/s" for name in ("all_reduce", "all_gather"))
    return CheckResult("OK", "collectives", f"{subject}: right numbers, {speeds} ({MEGABYTES} MiB)")
