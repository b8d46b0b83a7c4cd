"""Rank the ways to split a model over GPUs by the time of a step, and say why others are not possible."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from trainer.model.memory import DtypeSizes
from trainer.model.parallel_cost import (
    Architecture,
    Collective,
    Layout,
    ProcessMemory,
    Stage,
    Work,
    collectives,
    process_memory,
    stages_of,
    step_flops,
)
from trainer.model.pipeline_stages import bubble

LARGEST_MICRO_BATCH = 16
LATENCY = 1e-5
"""Seconds of a collective of a few bytes."""


@dataclass(frozen=True)
class Cluster:
    """The GPUs, and how fast they compute and send."""

    gpus: int
    per_machine: int
    memory: float
    """Bytes of a GPU that may be used."""
    flops: float
    """Floating-point operations of a GPU in a second, as trainings reach them."""
    link: float
    """Bytes that a GPU sends in a second within its machine."""
    network: float
    """Bytes that a GPU sends in a second to other machines."""


@dataclass(frozen=True)
class GlobalBatch:
    """The sequences of a step, over all readers."""

    samples: int
    sequence: int
    numbers: DtypeSizes
    precision: str


@dataclass(frozen=True)
class Candidate:
    """A layout with the best choices for it, and what a step costs on the process that needs most."""

    layout: Layout
    work: Work
    memory: ProcessMemory
    stage: int
    """The stage that needs most memory."""
    sent: dict[str, float]
    """Bytes that a process sends in a step, by dimension of the mesh; of the stage that sends most."""
    seconds: float
    spent: dict[str, float]
    """Seconds of a step by what they are spent on."""

    @property
    def bubble(self) -> float:
        """Share of the time in which a stage waits."""
        return bubble(self.layout.pipeline, self.work.window)


@dataclass(frozen=True)
class Excluded:
    """A layout that is not possible, and why."""

    layout: Layout
    reason: str
    needed: int = 0
    """Bytes of a GPU that it needs, if there is too little memory."""


def rank(model: Architecture, cluster: Cluster, batch: GlobalBatch) -> tuple[list[Candidate], list[Excluded]]:
    """Return the layouts that fit, the fastest first, and all others."""
    fitting, excluded = [], []
    for layout in layouts(model, cluster):
        reason = _impossible(model, cluster, batch, layout)
        if reason:
            excluded.append(Excluded(layout, reason))
            continue
        tried = [_candidate(model, cluster, layout, work) for work in _work_choices(layout, batch)]
        fits = [one for one in tried if one.memory.total <= cluster.memory]
        if fits:
            fitting.append(min(fits, key=lambda one: (one.seconds, one.memory.total)))
        else:
            smallest = min(tried, key=lambda one: one.memory.total)
            excluded.append(Excluded(layout, _shortage(smallest, cluster), smallest.memory.total))
    return sorted(fitting, key=lambda one: (one.seconds, one.memory.total)), excluded


def layouts(model: Architecture, cluster: Cluster) -> Iterator[Layout]:
    """Yield every division of the GPUs, each with its experts split in every way."""
    for layout in _divisions(cluster):
        for expert in _divisors(math.gcd(layout.sharing, model.experts)):
            yield replace(layout, expert=expert)


def _divisions(cluster: Cluster) -> Iterator[Layout]:
    """Yield divisions with weights sharded over all readers or, with replicas, over those of a machine."""
    for tensor in _divisors(cluster.gpus):
        for context in _divisors(cluster.gpus // tensor):
            for pipeline in _divisors(cluster.gpus // tensor // context):
                readers = cluster.gpus // (tensor * context * pipeline)
                sizes = {"context": context, "tensor": tensor, "pipeline": pipeline}
                yield Layout(shards=readers, **sizes)
                here, rest = divmod(cluster.per_machine, tensor * context)
                if not rest and 1 < here < readers and readers % here == 0:
                    yield Layout(shards=here, replicas=readers // here, **sizes)


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


def _impossible(model: Architecture, cluster: Cluster, batch: GlobalBatch, layout: Layout) -> str:
    """Return why a layout cannot be, whatever the memory; else ""."""
    # The experts of a mixture are not split themselves.
    mlp = model.intermediate if model.experts == 1 else model.shared
    split = {"heads": model.heads, "heads of keys": model.kv_heads, "outputs of the MLP": mlp}
    uneven = [f"{size} {what}" for what, size in split.items() if size % layout.tensor]
    if batch.precision == "mxfp8" and layout.tensor > 1:
        return "precision mxfp8 cannot scale blocks of weights that tensor_parallel splits"
    if batch.precision == "16-mixed" and layout.tensor * layout.pipeline > 1:
        return "precision 16-mixed cannot agree on a loss scale with tensor_parallel or pipeline_parallel"
    if layout.tensor > cluster.per_machine:
        return f"tensor_parallel={layout.tensor} goes beyond a machine of {cluster.per_machine} GPUs"
    if uneven:
        return f"tensor_parallel={layout.tensor} does not divide {', '.join(uneven)}"
    parts = layout.tensor * layout.expert
    if model.experts > 1 and model.experts % parts:
        return f"{model.experts} experts cannot be split over {parts} processes (expert_parallel x tensor_parallel)"
    if layout.pipeline > model.layers:
        return f"pipeline_parallel={layout.pipeline} is more than {model.layers} layers"
    if batch.sequence % layout.context or batch.sequence < 2 * layout.context:
        return f"context_parallel={layout.context} does not divide sequences of {batch.sequence}"
    if batch.samples % layout.readers:
        return f"{layout.readers} readers cannot share {batch.samples} sequences of a step evenly"
    return ""


def _work_choices(layout: Layout, batch: GlobalBatch) -> Iterator[Work]:
    """Yield the choices of micro-batches, activation checkpointing, and when gradients are reduced."""
    samples = batch.samples // layout.readers
    for micro_batch in (size for size in _divisors(samples) if size <= LARGEST_MICRO_BATCH):
        window = samples // micro_batch
        for checkpointing in (False, True):
            for unsharded in (True, False) if window > 1 and layout.sharing > 1 else (True,):
                yield Work(
                    batch.sequence,
                    micro_batch,
                    window,
                    batch.numbers,
                    checkpointing,
                    unsharded,
                    gathers_in_8_bits=batch.precision == "fp8",
                )


def _shortage(smallest: Candidate, cluster: Cluster) -> str:
    memory = smallest.memory
    states = memory.parameters + memory.gradients + memory.optimizer
    parts = {
        "weights, gradients and optimizer": states,
        "activations": memory.activations + memory.temporary,
        "gathered weights and gradients": memory.gathered,
    }
    words = ", ".join(f"{what} {size / 1e9:,.1f}" for what, size in parts.items())
    return f"needs at least {memory.total / 1e9:,.1f} GB of {cluster.memory / 1e9:,.1f} ({words})"


# -- the cost of one ---------------------------------------------------------------------------------------------------


def _candidate(model: Architecture, cluster: Cluster, layout: Layout, work: Work) -> Candidate:
    stages = stages_of(model, layout.pipeline)
    memories = [process_memory(model, layout, work, stage) for stage in stages]
    largest = max(stages, key=lambda stage: memories[stage.number].total)
    sent = [_sent(collectives(model, layout, work, stage)) for stage in stages]
    times = [_spent(model, cluster, layout, work, stage) for stage in stages]
    slowest = max(times, key=lambda spent: sum(spent.values()))
    busy = sum(slowest.values())
    seconds = busy / (1 - bubble(layout.pipeline, work.window))
    return Candidate(
        layout,
        work,
        memories[largest.number],
        largest.number,
        max(sent, key=lambda by_dimension: sum(by_dimension.values())),
        seconds,
        {**slowest, "bubble": seconds - busy},
    )


def _sent(several: list[Collective]) -> dict[str, float]:
    found: dict[str, float] = {}
    for one in several:
        found[one.along] = found.get(one.along, 0.0) + one.sent
    return found


def _spent(model: Architecture, cluster: Cluster, layout: Layout, work: Work, stage: Stage) -> dict[str, float]:
    """Return the seconds of a stage: only the collectives of shards and replicas overlap with the computing."""
    even = _even_share(model, layout, work) / cluster.flops
    once = step_flops(model, layout, Work(**{**vars(work), "checkpointing": False}), stage) / cluster.flops
    computing = step_flops(model, layout, work, stage) / cluster.flops
    sending: dict[str, float] = {}
    for one in collectives(model, layout, work, stage):
        speed = cluster.network if _crosses(layout, cluster, one.along) else cluster.link
        sending[one.along] = sending.get(one.along, 0.0) + one.sent / speed + one.count * LATENCY
    in_turn = {name: sending.get(name, 0.0) for name in ("experts", "tensor", "context", "stages", "norm")}
    overlapped = sending.get("shards", 0.0) + sending.get("replicas", 0.0)
    spent = {
        "computing": min(even, once),
        "uneven stages": max(0.0, once - even),
        "recomputing": computing - once,
        **in_turn,
    }
    return {**spent, "sharding": max(0.0, overlapped - sum(spent.values()))}


def _even_share(model: Architecture, layout: Layout, work: Work) -> float:
    """Return the operations of a process if all did the same, and each thing once."""
    once = Work(**{**vars(work), "checkpointing": False})
    full = step_flops(model, Layout(), once, Stage(0, model.layers, first=True, last=True))
    return full / (layout.context * layout.tensor * layout.pipeline)


def _crosses(layout: Layout, cluster: Cluster, along: str) -> bool:
    """Whether the processes along a dimension are on several machines; neighbours along "tensor" are next ranks."""
    reach = {
        "tensor": layout.tensor,
        "experts": layout.tensor * layout.expert,
        "context": layout.tensor * layout.context,
        "shards": layout.tensor * layout.sharing,
        "replicas": layout.tensor * layout.context * layout.readers,
    }
    return reach.get(along, layout.processes) > cluster.per_machine
