"""Print a plan: the ranked layouts, why others are excluded, and the settings of the first."""

from __future__ import annotations

import sys
from dataclasses import asdict
from typing import Any

from trainer.cli.columns import fitted_lines, in_columns
from trainer.cli.plan.architecture import describe
from trainer.cli.plan.candidates import Candidate, Cluster, Excluded, GlobalBatch
from trainer.errors import first_of
from trainer.loop.terminal import columns_of
from trainer.model.parallel_cost import Architecture, Layout

SPENT = {
    "recomputing": "forwards again",
    "uneven stages": "uneven work",
    "experts": "tokens to experts",
    "tensor": "tensor sums",
    "context": "attention's exchange",
    "stages": "messages of stages",
    "sharding": "weights that arrive late",
    "norm": "norm",
    "bubble": "bubble",
}
"""The words for the time that is spent on something else than computing."""


NUMBERS = (2, 3, 4, 5)
"""The columns of the table that are aligned to the right."""
FIRST_TO_GO = (4, 3, 1)
"""The columns that a narrow terminal leaves out, in that order: GB sent, bubble, micro-batches."""
NEAREST = 5
"""Layouts without enough memory that are printed."""


def name_of(layout: Layout) -> str:
    """Return a layout in words, the dimensions in the order of the mesh."""
    shards = f"FSDP {layout.shards}" if layout.replicas == 1 else f"HYBRID {layout.replicas} x {layout.shards}"
    sizes = (("PP", layout.pipeline), ("CP", layout.context), ("TP", layout.tensor))
    parts = [f"{name} {size}" for name, size in sizes if size > 1]
    name = " x ".join([*([shards] if layout.readers > 1 else []), *parts]) or "one GPU"
    return f"{name} with EP {layout.expert}" if layout.expert > 1 else name


def report(
    model: Architecture,
    cluster: Cluster,
    batch: GlobalBatch,
    ranked: list[Candidate],
    excluded: list[Excluded],
    top: int,
    notes: list[str],
    precision: str,
) -> str:
    """Return the plan for people."""
    machines = cluster.gpus // cluster.per_machine
    where = f"{cluster.gpus} GPUs ({machines} machine{'s' if machines > 1 else ''})"
    lines = [
        describe(model),
        f"a step of {batch.samples:,} sequences of {batch.sequence:,} tokens, {precision}, AdamW, on {where}, "
        f"{cluster.memory / 1e9:,.1f} GB to use on each",
        f"assumed: {cluster.flops / 1e12:g} TFLOP/s, {cluster.link / 1e9:g} GB/s within a machine, "
        f"{cluster.network / 1e9:g} GB/s between machines for each GPU",
        *(f"note: {note}" for note in notes),
        "",
        *(_table(ranked[:top]) if ranked else ["no layout fits"]),
        *([f"    and {len(ranked) - top} more that fit: --top {len(ranked)}"] if len(ranked) > top else []),
        "",
        *_reasons(excluded),
        *(["", "the first as settings:", settings(ranked[0], cluster, precision)] if ranked else []),
    ]
    return "\n".join(lines) + "\n"


def _table(ranked: list[Candidate]) -> list[str]:
    digits = len(str(len(ranked)))
    rows = [[f"{'':{digits}}  layout", "micro-batches", "GB", "bubble", "GB sent", "seconds", "the time of a step"]]
    for number, one in enumerate(ranked, 1):
        rows.append(
            [
                f"{number:{digits}}  {name_of(one.layout)}",
                f"{one.work.window} of {one.work.micro_batch}{', recomputing' if one.work.checkpointing else ''}",
                f"{one.memory.total / 1e9:,.1f}",
                f"{one.bubble:.0%}",
                f"{sum(one.sent.values()) / 1e9:,.1f}",
                f"{one.seconds:,.2f}",
                why(one, ranked[0]),
            ]
        )
    lines, columns = in_columns(rows, NUMBERS), columns_of(sys.stdout)
    if columns is None or max(map(len, lines)) <= columns:
        return lines
    times = [f"  {number:{digits}}  {row[-1]}" for number, row in enumerate(rows[1:], 1)]
    return [*fitted_lines([row[:-1] for row in rows], NUMBERS, FIRST_TO_GO, "--json"), f"{rows[0][-1]}:", *times]


def why(one: Candidate, first: Candidate) -> str:
    """Return what takes the time of a step, the largest first, and how much more than in the first layout it is."""
    parts = sorted(((seconds, SPENT.get(name)) for name, seconds in one.spent.items()), key=lambda part: -part[0])
    words = [f"{name} {seconds / one.seconds:.0%}" for seconds, name in parts if name and seconds >= one.seconds / 200]
    slower = "" if one is first else f"+{one.seconds / first.seconds - 1:.0%}: "
    late = "" if one.work.accumulate_unsharded else "; gradients reduced in each micro-batch"
    return f"{slower}computing {one.spent['computing'] / one.seconds:.0%}{''.join(f', {word}' for word in words)}{late}"


def _reasons(excluded: list[Excluded]) -> list[str]:
    """Return a line for each reason, with the layouts that it excludes: of those without memory the nearest ones."""
    if not excluded:
        return ["no layout is excluded"]
    by_reason: dict[str, list[str]] = {}
    for one in excluded:
        if not one.needed:
            by_reason.setdefault(one.reason, []).append(name_of(one.layout))
    impossible = [f"  {reason}: {first_of(names, 3)}" for reason, names in by_reason.items()]
    too_large = sorted((one for one in excluded if one.needed), key=lambda one: one.needed)
    nearest = [f"  {name_of(one.layout)} {one.reason}" for one in too_large[:NEAREST]]
    rest = too_large[NEAREST:]
    more = (
        [f"  {len(rest)} more need {rest[0].needed / 1e9:,.1f} GB to {rest[-1].needed / 1e9:,.1f} GB"] if rest else []
    )
    return [f"excluded, {len(excluded)} layouts:", *impossible, *nearest, *more]


def settings(one: Candidate, cluster: Cluster, precision: str) -> str:
    """Return a layout as a configuration's settings of the trainer."""
    machines = cluster.gpus // cluster.per_machine
    options = strategy_options(one)
    arguments = "".join(f"\n      {name}: {value}" for name, value in options.items())
    lines = [
        "trainer:",
        f"  devices: {cluster.gpus // machines}",
        f"  num_nodes: {machines}",
        f"  precision: {precision}",
        f"  accumulate_grad_batches: {one.work.window}    # micro-batches of {one.work.micro_batch}",
        *(["  activation_checkpointing: auto"] if one.work.checkpointing else []),
        "  strategy:",
        "    class_path: fsdp",
        *([f"    init_args:{arguments}"] if options else []),
    ]
    return "\n".join(lines)


def strategy_options(one: Candidate) -> dict[str, Any]:
    """Return the arguments of `FSDPStrategy` for a layout."""
    layout = one.layout
    names = ("tensor", "context", "pipeline", "expert")
    sizes = {name: getattr(layout, name) for name in names}
    options: dict[str, Any] = {f"{name}_parallel": size for name, size in sizes.items() if size > 1}
    if layout.replicas > 1:
        options |= {"sharding_strategy": "HYBRID_SHARD", "device_mesh": [layout.replicas, layout.shards]}
    return options if one.work.accumulate_unsharded else {**options, "accumulate_unsharded": False}


def as_data(
    model: Architecture, cluster: Cluster, batch: GlobalBatch, ranked: list[Candidate], excluded: list[Excluded]
) -> dict[str, Any]:
    """Return the plan for programs: bytes and seconds."""
    return {
        "model": {**asdict(model), "parameters": model.parameters},
        "cluster": asdict(cluster),
        "batch": asdict(batch),
        "layouts": [
            {
                "name": name_of(one.layout),
                "layout": asdict(one.layout),
                "micro_batch": one.work.micro_batch,
                "window": one.work.window,
                "checkpointing": one.work.checkpointing,
                "strategy": strategy_options(one),
                "memory": {**asdict(one.memory), "total": one.memory.total},
                "largest_stage": one.stage,
                "bubble": one.bubble,
                "sent": one.sent,
                "seconds": one.seconds,
                "spent": one.spent,
                "why": why(one, ranked[0]),
            }
            for one in ranked
        ],
        "excluded": [
            {"name": name_of(one.layout), "layout": asdict(one.layout), "reason": one.reason} for one in excluded
        ],
    }
