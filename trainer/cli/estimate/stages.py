"""Count what a process of each stage holds, when a strategy splits one model over processes."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from typing import Any

from trainer.cli.estimate.module import build_without_memory
from trainer.config.loading import Configuration
from trainer.distributed.fake_process_group import fake_process_group
from trainer.model.blocks import find_blocks
from trainer.model.memory import Memory, ModelSize, Setup, StatePartitioning, Transformer, Weight, estimate_memory
from trainer.model.parallel_cost import Architecture, Layout, Work, process_memory, stages_of
from trainer.precision import Precision
from trainer.strategy import Strategy

FSDP_DIMENSIONS = ("replicate", "shard", "expert shard")
"""Dimensions of a mesh along which full weights are gathered; along the others each process computes its part."""


@dataclass(frozen=True)
class StageMemory:
    """Memory of the process of a stage that needs most."""

    stage: int
    memory: Memory
    activations: int | None
    """Bytes kept for backwards; None: the sizes of the model are not known."""

    @property
    def total(self) -> int:
        """All bytes on the device."""
        return self.memory.device + self.memory.temporary + (self.activations or 0)


def largest_stage(
    configuration: Configuration,
    strategy: Strategy,
    layout: StatePartitioning,
    size: ModelSize,
    setup: Setup,
    model: Transformer | None,
    precision: Precision,
) -> StageMemory:
    """Split the configuration's module as a process of each stage would, and return the stage that needs most.

    Args:
        size: of the full module.
        model: the sizes on which activations depend, if they are known.

    Raises:
        ConfigError: the module cannot be split in this way.
    """
    found = []
    for stage in range(layout.pipeline):
        rank = stage * (setup.processes // layout.pipeline)  # the first process of a stage holds the largest parts
        memory = estimate_memory(layout, _size_of(rank, configuration, strategy, size, setup, precision), setup)
        kept = None if model is None else _activations(model, layout, setup, stage)
        found.append(StageMemory(stage, memory, kept))
    return max(found, key=lambda one: one.total)


def _size_of(
    rank: int, configuration: Configuration, strategy: Strategy, size: ModelSize, setup: Setup, precision: Precision
) -> ModelSize:
    """Return the weights that a rank computes with."""
    module = build_without_memory(configuration.module, precision, [])
    as_rank = copy.deepcopy(strategy)
    with fake_process_group(setup.processes, setup.per_machine or setup.processes, rank):
        as_rank.dry_run(module, precision)
        # In the order of the full module's weights, of which tied ones are one here too.
        parts = {p: _part(p, weight) for p, weight in zip(module.parameters(), size.weights, strict=True)}
        blocks = [sum(parts[p].elements for p in block.parameters()) for block in find_blocks(module).values()]
    weights = [part for part in parts.values() if part.elements]
    outside = sum(weight.elements for weight in weights) - sum(blocks)
    return replace(size, weights=weights, block=max(blocks, default=0), outside_blocks=outside)


def _part(parameter: Any, weight: Weight) -> Weight:
    """Return the part of a weight with which a process computes: nothing of what other stages have."""
    if not hasattr(parameter, "device_mesh"):
        return replace(weight, elements=0, rows=0)
    elements, rows, shards, mesh = parameter.numel(), parameter.shape[0], 1, parameter.device_mesh
    for name, number, placement in zip(mesh.mesh_dim_names, mesh.shape, parameter.placements, strict=True):
        if name in FSDP_DIMENSIONS:
            shards *= 1 if name == "replicate" else number
        elif not placement.is_replicate():
            elements = -(-elements // number)
            rows = -(-rows // number) if placement.dim == 0 else rows
    return replace(weight, elements=elements, rows=rows, shards=shards)


def _activations(model: Transformer, layout: StatePartitioning, setup: Setup, stage: int) -> int:
    """Return the bytes that a stage keeps, by the formulas of `trainer plan`, for an MLP four times as wide."""
    architecture = Architecture(
        layers=max(model.layers, layout.pipeline),
        hidden=model.hidden,
        heads=model.hidden,
        kv_heads=model.hidden,
        head_dim=1,
        intermediate=4 * model.hidden,
        vocabulary=model.vocabulary,
        gated=False,
    )
    work = Work(model.sequence, model.batch, setup.window, setup.numbers, model.checkpointing)
    parts = Layout(context=layout.context, tensor=layout.tensor, pipeline=layout.pipeline)
    memory = process_memory(architecture, parts, work, stages_of(architecture, layout.pipeline)[stage])
    return memory.activations + memory.temporary
