"""Print an estimate: tables for people, bytes for programs."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from trainer.cli.columns import fitted_lines
from trainer.cli.estimate.module import EstimateInput
from trainer.model.memory import Memory, Transformer, elements_of

COLUMNS = ("weights", "gradients", "master_weights", "optimizer", "device", "temporary", "host", "activations")
FIRST_TO_GO = (2, 3, 1, 4, 7, 6)
"""The numbers of the columns of a table that a narrow terminal leaves out, in that order; the sum stays."""
LEGEND = """\
*: the strategy of the configuration.
weights: parameters and buffers. master weights: float32 copies of weights in low precision.
device: the sum in the memory of the device once the gradients exist, without the figures in brackets.
~more: an estimate of what is needed in addition at times: gathered weights, low-precision copies, buckets, logits.
host: the memory of the host for each process; it holds the figures in brackets.
activations: an estimate of what the forward keeps for the backward, in addition."""
SHOWN = 20
"""Layouts that are printed."""


def report(
    found: EstimateInput,
    given: Namespace,
    model: Transformer | None,
    rows: Mapping[str, Memory],
    configured: str | None,
) -> str:
    """Return a table of the strategies, and the lines around it."""
    columns = COLUMNS if model else COLUMNS[:-1]
    bytes_of = {label: {name: getattr(memory, name) for name in columns} for label, memory in rows.items()}
    # Not by "~more": DeepSpeed's buckets take 2 GB with the smallest model, too.
    unit, size = _unit(max(value for row in bytes_of.values() for name, value in row.items() if name != "temporary"))
    titles = [name.replace("_", " ").replace("temporary", "~more") for name in columns]
    cells = [[f"on each of {given.devices * given.num_nodes} processes, {given.devices} on a machine", *titles]]
    for label, row in bytes_of.items():
        texts = {name: f"{value / size:,.2f}" for name, value in row.items()}
        texts |= {name: f"({texts[name]})" for name in rows[label].offloaded}
        cells.append([f"{'*' if label == configured else ' '} {label}", *texts.values()])
    head, *lines = fitted_lines(cells, range(1, len(cells[0])), FIRST_TO_GO, "--json", beside=2 + len(unit))
    return _page(found, given, model, [f"{head}  {unit}", *lines, "", LEGEND])


def _unit(largest: int) -> tuple[str, int]:
    """Return the unit of a table and its bytes. 1 GB is 10^9 bytes."""
    power = min(4, (len(str(largest)) - 1) // 3)
    return ("bytes", "kB", "MB", "GB", "TB")[power], 1000**power


def fitting_report(
    found: EstimateInput, given: Namespace, model: Transformer, ranked: Sequence[Mapping[str, Any]], least: int
) -> str:
    """Return a table of the first layouts that fit, or the memory that is missing."""
    rows = [[f"fsdp on {given.gpus} GPUs", "micro-batches", "bubble", "GB", "GB to other machines", "GB sent"]]
    for one in ranked[:SHOWN]:
        options = [f"{name}={value}".replace(" ", "") for name, value in one["strategy"].items()]
        if one["checkpointing"] and not model.checkpointing:
            options.append("recomputing")
        sizes = [f"{one[name] / 1e9:,.1f}" for name in ("memory", "between", "sent")]
        rows.append([" ".join(options) or "no options", str(one["window"]), f"{one['bubble']:.0%}", *sizes])
    lines = fitted_lines(rows, range(1, 6), (5, 2, 1), "--json")
    lines.append(f"the first {SHOWN} of {len(ranked)} that fit: --json has all")
    nothing = [f"no layout fits: the smallest needs {least / 1e9:,.1f} GB, and a tenth is left for libraries"]
    return _page(found, given, model, lines if ranked else nothing)


def _page(found: EstimateInput, given: Namespace, model: Transformer | None, lines: Sequence[str]) -> str:
    """Return the lines below a description of the model, and above the notes."""
    weights, states = found.size.weights, found.size.states
    frozen = elements_of(weight for weight in weights if not weight.trainable)
    idle = elements_of(weight for weight in weights if weight.trainable and not weight.optimized)
    words = f"{found.name}: {elements_of(weights):,} parameters, {frozen:,} of them frozen, "
    words += f"{idle:,} of them trained by no optimizer; {found.size.buffers:,} bytes of buffers"
    options = f"precision {given.precision}, {states.name} ({states.per_element:g} numbers for each parameter)"
    about = "activations are not counted: that takes --hidden, --sequence and --batch"
    if model is not None:
        about = f"a transformer of {len(found.size.blocks)} layers, width {model.hidden}, {model.heads} heads, "
        about += f"{model.experts} experts, MLPs of {model.intermediate}, "
        about += f"vocabulary {model.vocabulary or 'unknown'}, micro-batches of {model.batch} x {model.sequence} tokens"
        about += f", activation checkpointing {'on' if model.checkpointing else 'off'}"
    return "\n".join([words, options, about, "", *lines, *(f"note: {note}" for note in found.notes)]) + "\n"


def as_data(found: EstimateInput, given: Namespace) -> dict[str, Any]:
    """Return the model for JSON."""
    trainable = elements_of(weight for weight in found.size.weights if weight.trainable)
    sizes = {"parameters": elements_of(found.size.weights), "trainable": trainable, "precision": given.precision}
    return {**sizes, "optimizer": asdict(found.size.states), "notes": found.notes}
