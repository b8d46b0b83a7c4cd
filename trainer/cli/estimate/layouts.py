"""The layouts of the strategies, read from their options, and those that fit into the memory of some GPUs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from inspect import signature
from itertools import product
from typing import TYPE_CHECKING, Any

from trainer.model.memory import Layout, ModelSize, Setup, Transformer, estimate_memory, stages_of
from trainer.model.parallel_cost import collectives, reach
from trainer.model.pipeline_stages import bubble

if TYPE_CHECKING:
    from trainer.precision import Precision
    from trainer.strategy import Strategy

VARIANTS: tuple[dict[str, Any], ...] = (
    {"sharding_strategy": "SHARD_GRAD_OP"},
    {"sharding_strategy": "HYBRID_SHARD"},
    {"cpu_offload": True},
)
"""Options that get a separate row, for every strategy that takes them."""
SPLITS = ("tensor", "context", "pipeline", "expert")
"""Ways to split one model over processes: the attributes of a strategy's `layout`."""


def layout_of(strategy: Strategy) -> Layout:
    """Return what a strategy shards and offloads, by its attributes of the names below.

    By default nothing is offloaded, and everything is sharded if the state is, or if there is a choice of blocks.
    """
    options = vars(strategy)
    shards = strategy.shards_state or "auto_wrap_policy" in options
    sharding, mesh = options.get("sharding_strategy"), options.get("device_mesh") or (None, None)
    degrees = {name: getattr(options.get("layout"), name, 1) for name in SPLITS}
    keeps = sharding == "SHARD_GRAD_OP" or degrees["pipeline"] > 1
    reshard, offload = options.get("reshard_after_forward"), {True: "cpu"}.get(options.get("cpu_offload", False))
    return Layout(
        stage=options.get("stage", 3 if shards else 0),
        master_weights="master_weights" in options,
        by_machine=sharding == "HYBRID_SHARD",
        readers=mesh[1],
        keep_gathered=keeps if reshard is None else reshard is False,
        reduce_each=options.get("accumulate_unsharded") is False,
        offload_weights=options.get("offload_parameters", offload) in ("cpu", "nvme"),
        offload_optimizer=options.get("offload_optimizer", offload) in ("cpu", "nvme"),
        keys=options.get("context_exchange") == "keys",
        **degrees,
    )


def planned_devices(arguments: Mapping[str, Any]) -> int | None:
    """Return the processes of a machine that arguments of a Trainer ask for; None where this machine would decide."""
    devices = arguments.get("devices")
    devices = len(devices) if isinstance(devices, list) else devices
    return devices if isinstance(devices, int) and devices > 0 else None


def planned_window(arguments: Mapping[str, Any]) -> int:
    """Return the micro-batches of a step by a Trainer's arguments; 1 for "auto", which a run finds out."""
    window = arguments.get("accumulate_grad_batches", 1)
    return window if isinstance(window, int) else 1


def takes(kind: type[Strategy], *options: str) -> bool:
    """Return True for a class of strategies that takes these options."""
    return signature(kind).parameters.keys() >= {*options}


def strategy_rows() -> dict[str, Layout]:
    """Return the layouts of all strategies; the label of a layout names every strategy that has it."""
    from trainer.strategy import available_strategies

    names: dict[Layout, list[str]] = {}
    for name, kind in sorted(available_strategies().items()):
        for options in ({}, *VARIANTS):
            if takes(kind, *options):
                words = [value if isinstance(value, str) else option for option, value in options.items()]
                names.setdefault(layout_of(kind(**options)), []).append(" ".join([name, *words]))
    return {", ".join(several): layout for layout, several in names.items()}


def fitting(
    model: Transformer, size: ModelSize, setup: Setup, precision: Precision, available: float
) -> tuple[list[dict[str, Any]], int]:
    """Return the layouts that fit, and the least memory of all layouts.

    First come those that send least between machines, then those that send least, then those that need least memory.

    Args:
        setup: of the layout whose processes are all readers; layouts with fewer readers have more micro-batches.
    """
    from trainer.strategy import available_strategies

    kind: Any = next(kind for kind in available_strategies().values() if takes(kind, "tensor_parallel"))
    found, needed = [], []
    for options in _splits(model, size, setup):
        reduced: tuple[dict[str, Any], ...] = ({}, {"accumulate_unsharded": False})
        for more, checkpointing in product(reduced, sorted({model.checkpointing, True})):
            strategy = kind(**options, **more)
            if strategy.problems(precision, "cuda", setup.processes):
                break
            layout, computed = layout_of(strategy), replace(model, checkpointing=checkpointing)
            work = replace(setup, window=setup.window * setup.processes // layout.all_readers(setup))
            needed.append(estimate_memory(layout, size, work, computed).total)
            if needed[-1] <= available:
                between, sent = _sent(computed, layout, size, work)
                one = {"strategy": {**options, **more}, "checkpointing": checkpointing, "window": work.window}
                one |= {"bubble": bubble(layout.pipeline, work.window), "memory": needed[-1]}
                found.append(one | {"between": between, "sent": sent})
                break
    return sorted(found, key=lambda one: (one["between"], one["sent"], one["memory"])), min(needed, default=0)


def _splits(model: Transformer, size: ModelSize, setup: Setup) -> Iterator[dict[str, Any]]:
    """Yield the options of the divisions of the GPUs that a model of these sizes allows."""
    per_machine, experts = setup.per_machine, max(1, model.experts)
    assert per_machine is not None
    heads = math.gcd(model.heads, model.kv_heads)
    divisors = [number for number in range(1, setup.processes + 1) if setup.processes % number == 0]
    tensors = [number for number in divisors if number <= per_machine and heads % number == 0]
    contexts = [number for number in divisors if model.sequence % number == 0 and model.sequence > number]
    pipelines = [number for number in divisors if number <= len(size.blocks)]
    for tensor, context, pipeline, expert in product(tensors, contexts, pipelines, divisors):
        readers, rest = divmod(setup.processes, tensor * context * pipeline)
        if rest or experts % expert or experts % (tensor * expert if experts > 1 else 1):
            continue
        sizes = {"tensor": tensor, "context": context, "pipeline": pipeline, "expert": expert}
        options = {f"{name}_parallel": number for name, number in sizes.items() if number > 1}
        yield options
        yield from _hybrid(options, readers, per_machine // (tensor * context))


def _hybrid(options: dict[str, Any], readers: int, here: int) -> Iterator[dict[str, Any]]:
    """Yield the options with shards among those readers that are `here`, on one machine, if there are several."""
    if 1 < here < readers and readers % here == 0:
        yield {**options, "sharding_strategy": "HYBRID_SHARD", "device_mesh": (readers // here, here)}


def _sent(model: Transformer, layout: Layout, size: ModelSize, setup: Setup) -> tuple[int, int]:
    """Return the bytes that a process sends to other machines and in all, in the stage with most."""
    found, per_machine = [], setup.per_machine
    assert per_machine is not None
    for stage in stages_of(size, layout, setup):
        sent = collectives(model, layout, setup, stage)
        between = [one for one in sent if reach(layout, setup, one.along) > per_machine]
        found.append((round(sum(one.sent for one in between)), round(sum(one.sent for one in sent))))
    return max(found)
