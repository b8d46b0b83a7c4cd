"""The ways to run that the suites over strategies compare, and starting each set of processes once for all of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import pytest

from tests.helpers.compare import QUIET
from tests.helpers.processes import DEVICE, processes_share_a_gpu, run_distributed
from trainer import Callback, Trainer, TrainModule
from trainer.precision import PRECISIONS
from trainer.strategies import STRATEGIES
from trainer.testing.processes import TIMEOUT

GLOBAL_MICRO_BATCH = 8
"""Samples of a micro-batch over all processes, on any number of them."""


@dataclass(frozen=True)
class Way:
    """A strategy with its options, on a number of processes."""

    strategy: str
    processes: int = 1
    options: tuple[tuple[str, Any], ...] = ()

    @property
    def engine(self) -> str:
        """The engine; ways with the same engine and number of processes share a start of processes."""
        return self.strategy.split("_")[0] if self.strategy.startswith("deepspeed") else "torch"

    @property
    def micro_batch(self) -> int:
        """The micro-batch size of one process."""
        return GLOBAL_MICRO_BATCH * self.processes_of_a_model // self.processes

    @property
    def processes_of_a_model(self) -> int:
        """Number of processes that hold one model together, and read the same samples."""
        options = dict(self.options)
        return math.prod(options.get(f"{name}_parallel", 1) for name in ("tensor", "context", "pipeline"))

    def missing(self, precision: str = "32-true") -> str:
        """The reason why the way cannot run here; empty if it can."""
        if self.strategy not in STRATEGIES:
            return f"there is no strategy {self.strategy!r} in the table"
        strategy = STRATEGIES[self.strategy](**dict(self.options))
        return " ".join(strategy.problems(PRECISIONS[precision], DEVICE, self.processes))

    def trainer(self, **settings: Any) -> Trainer:
        strategy = STRATEGIES[self.strategy](**dict(self.options))
        devices, machines = (1, self.processes) if processes_share_a_gpu(self.processes) else (self.processes, 1)
        place = {"accelerator": DEVICE, "devices": devices, "num_nodes": machines}
        return Trainer(strategy=strategy, **{**place, **QUIET, **settings})


SINGLE = "single"
SHARD_SMALL = (("config", {"zero_optimization": {"stage3_param_persistence_threshold": 0, "sub_group_size": 1000}}),)
"""Without these, ZeRO-3 would not shard the weights of a small model."""

WAYS = {
    SINGLE: Way("single_device"),
    "DDP x1": Way("ddp", 1),
    "DDP x2": Way("ddp", 2),
    "FSDP x1": Way("fsdp", 1),
    "FSDP x2": Way("fsdp", 2),
    "FSDP x2, SHARD_GRAD_OP": Way("fsdp", 2, (("sharding_strategy", "SHARD_GRAD_OP"),)),
    "FSDP x2, CPU offload": Way("fsdp", 2, (("cpu_offload", True),)),
    "FSDP x2, communicating always": Way("fsdp", 2, (("accumulate_unsharded", False),)),
    "FSDP x4": Way("fsdp", 4),
    "FSDP 2x2": Way("fsdp", 4, (("sharding_strategy", "HYBRID_SHARD"), ("device_mesh", (2, 2)))),
    "TP x2": Way("fsdp", 2, (("tensor_parallel", 2),)),
    "TP 2 x FSDP 2": Way("fsdp", 4, (("tensor_parallel", 2),)),
    "CP x2": Way("fsdp", 2, (("context_parallel", 2),)),
    "CP x2, keys": Way("fsdp", 2, (("context_parallel", 2), ("context_exchange", "keys"))),
    "CP 2 x FSDP 2": Way("fsdp", 4, (("context_parallel", 2),)),
    "CP 2 x TP 2": Way("fsdp", 4, (("context_parallel", 2), ("tensor_parallel", 2))),
    "PP x2": Way("fsdp", 2, (("pipeline_parallel", 2),)),
    "PP 2 x FSDP 2": Way("fsdp", 4, (("pipeline_parallel", 2),)),
    "PP 2 x TP 2": Way("fsdp", 4, (("pipeline_parallel", 2), ("tensor_parallel", 2))),
    "PP 2 x CP 2": Way("fsdp", 4, (("pipeline_parallel", 2), ("context_parallel", 2))),
    "EP x2": Way("fsdp", 2, (("expert_parallel", 2),)),
    "EP 2 x FSDP 2": Way("fsdp", 4, (("expert_parallel", 2),)),
    "EP 2 x TP 2": Way("fsdp", 4, (("expert_parallel", 2), ("tensor_parallel", 2))),
    "EP 2 x CP 2": Way("fsdp", 4, (("expert_parallel", 2), ("context_parallel", 2))),
    "PP 2 x EP 2": Way("fsdp", 4, (("expert_parallel", 2), ("pipeline_parallel", 2))),
    "HYBRID 2 x EP 2": Way(
        "fsdp", 4, (("expert_parallel", 2), ("sharding_strategy", "HYBRID_SHARD"), ("device_mesh", (2, 2)))
    ),
    "HYBRID 2 x TP 2": Way(
        "fsdp", 4, (("tensor_parallel", 2), ("sharding_strategy", "HYBRID_SHARD"), ("device_mesh", (2, 1)))
    ),
    "EP 2 x CP 2, SHARD_GRAD_OP": Way(
        "fsdp", 4, (("expert_parallel", 2), ("context_parallel", 2), ("sharding_strategy", "SHARD_GRAD_OP"))
    ),
    "TP 2 x FSDP 2, SHARD_GRAD_OP": Way("fsdp", 4, (("tensor_parallel", 2), ("sharding_strategy", "SHARD_GRAD_OP"))),
    "EP 2 x TP 2, CPU offload": Way("fsdp", 4, (("expert_parallel", 2), ("tensor_parallel", 2), ("cpu_offload", True))),
    "PP 2 x FSDP 2, CPU offload": Way("fsdp", 4, (("pipeline_parallel", 2), ("cpu_offload", True))),
    "PP 2 x TP 2 x FSDP 2": Way("fsdp", 8, (("pipeline_parallel", 2), ("tensor_parallel", 2))),
    "CP 2 x TP 2 x FSDP 2": Way("fsdp", 8, (("context_parallel", 2), ("tensor_parallel", 2))),
    "PP 2 x CP 2 x TP 2": Way("fsdp", 8, (("pipeline_parallel", 2), ("context_parallel", 2), ("tensor_parallel", 2))),
    "EP 2 x TP 2 x FSDP 2": Way("fsdp", 8, (("expert_parallel", 2), ("tensor_parallel", 2))),
    "PP 2 x EP 2 x FSDP 2": Way("fsdp", 8, (("pipeline_parallel", 2), ("expert_parallel", 2))),
    "PP 2 x CP 2 x FSDP 2": Way("fsdp", 8, (("pipeline_parallel", 2), ("context_parallel", 2))),
    "PP 2 x EP 2 x TP 2": Way("fsdp", 8, (("pipeline_parallel", 2), ("expert_parallel", 2), ("tensor_parallel", 2))),
    "PP 2 x EP 2 x CP 2": Way("fsdp", 8, (("pipeline_parallel", 2), ("expert_parallel", 2), ("context_parallel", 2))),
    "EP 2 x CP 2 x TP 2": Way("fsdp", 8, (("expert_parallel", 2), ("context_parallel", 2), ("tensor_parallel", 2))),
    "EP 2 x CP 2 x FSDP 2": Way("fsdp", 8, (("expert_parallel", 2), ("context_parallel", 2))),
    "HYBRID 2 x PP 2 x TP 2": Way(
        "fsdp",
        8,
        (
            ("pipeline_parallel", 2),
            ("tensor_parallel", 2),
            ("sharding_strategy", "HYBRID_SHARD"),
            ("device_mesh", (2, 1)),
        ),
    ),
    "HYBRID 2 x TP 2 x FSDP 2": Way(
        "fsdp", 8, (("tensor_parallel", 2), ("sharding_strategy", "HYBRID_SHARD"), ("device_mesh", (2, 2)))
    ),
    "ZeRO-1 x1": Way("deepspeed_stage_1", 1),
    "ZeRO-2 x1": Way("deepspeed_stage_2", 1),
    "ZeRO-1 x2": Way("deepspeed_stage_1", 2),
    "ZeRO-2 x2": Way("deepspeed_stage_2", 2),
    "ZeRO-3 x2": Way("deepspeed_stage_3", 2, SHARD_SMALL),
    "ZeRO-3 x1": Way("deepspeed_stage_3", 1, SHARD_SMALL),
    "ZeRO-2 x2, CPU offload": Way("deepspeed_stage_2_offload", 2),
    "ZeRO-3 x2, CPU offload": Way("deepspeed_stage_3_offload", 2, SHARD_SMALL),
}
"""Every way that a suite over strategies may ask for, by the name that it has in the docs."""


SPLIT = tuple(name for name, way in WAYS.items() if any(option.endswith("_parallel") for option, _ in way.options))
"""The ways in which several processes compute one model together."""
IN_THREE = tuple(name for name in SPLIT if WAYS[name].processes == 8)
"""Products of three divisions."""


class StepLosses(Callback):
    """Record the loss of each step as the trainer logs it: over the window and all processes."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_train_step_end(self, trainer: Trainer, module: TrainModule) -> None:
        self.losses.append(trainer.read_metrics()["loss"])


def run_each(function: Callable[..., Any], names: Iterable[str], *args: Any) -> dict[str, list[Any]]:
    """Call `function(name, *args)` for each way that can run here, on its processes; return the ranks' results by way.

    Ways that share a set of processes run in it one after the other; `function` is on the top level of a module.
    """
    starts: dict[tuple[str, int], list[str]] = {}
    for name in names:
        if not WAYS[name].missing():
            starts.setdefault((WAYS[name].engine, WAYS[name].processes), []).append(name)
    results = {}
    for (engine, processes), together in starts.items():
        if processes == 1 and engine == "torch":
            ranks = [one_after_the_other(function, together, args)]
        else:
            timeout = TIMEOUT * len(together)
            ranks = run_distributed(one_after_the_other, processes, function, together, args, timeout=timeout)
        results.update({name: [rank[name] for rank in ranks] for name in together})
    return results


def one_after_the_other(function: Callable[..., Any], names: list[str], args: tuple[Any, ...]) -> dict[str, Any]:
    return {name: function(name, *args) for name in names}


def skip_if_missing(name: str, precision: str = "32-true") -> None:
    """Skip the test, with the reason, if this way cannot run here."""
    if reason := WAYS[name].missing(precision):
        pytest.skip(f"{name}: {reason}")
