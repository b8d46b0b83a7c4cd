"""Print an estimate: tables for people, bytes for programs."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, field
from typing import Any

from trainer.model.memory import Memory, OptimizerStates, Setup, Transformer, Weight, number_sizes, zero_table

COLUMNS = ("weights", "gradients", "masters", "optimizer", "device", "temporary", "host")
LEGEND = """\
weights: parameters and buffers. masters: float32 copies of weights in low precision. device: all that is held there
when the gradients are there; what stands in brackets is not: it is in the memory of the host, for each process.
~more: an estimate of what is needed in addition at times: gathered weights, copies in low precision, buckets."""


@dataclass
class ModuleSize:
    """The sizes of a module on which its memory depends."""

    name: str
    """Name of its class; "": only the number of parameters is known."""
    weights: list[Weight]
    states: OptimizerStates
    buffers: int = 0
    """Bytes."""
    tied: int = 0
    """Parameters that are registered in several places, and kept once."""
    block: int = 0
    """Elements of the largest block."""
    rest: int = 0
    """Elements outside the blocks."""
    shape: dict[str, Any] = field(default_factory=dict)
    """Arguments of `Transformer`, as far as they are known."""
    notes: list[str] = field(default_factory=list)


@dataclass
class EstimateInput:
    """The module to train, and the machines."""

    size: ModuleSize
    precision: str
    machines: int
    per_machine: list[int]
    window: int
    bucket: int = Setup.bucket
    checkpointing: bool = False
    strategy: str | None = None
    """The strategy of the configuration."""

    def setup(self, devices: int) -> Setup:
        """Return the setup for this number of processes on each machine."""
        from trainer.precision import resolve_precision

        return Setup(
            processes=devices * self.machines,
            numbers=number_sizes(resolve_precision(self.precision)),
            states=self.size.states,
            per_machine=devices,
            window=self.window,
            buffers=self.size.buffers,
            block=self.size.block,
            rest=self.size.rest,
            bucket=self.bucket,
        )


def describe(size: ModuleSize) -> str:
    """Return a line about a module's parameters and buffers."""
    frozen = sum(weight.elements for weight in size.weights if not weight.trainable)
    idle = sum(weight.elements for weight in size.weights if weight.trainable and not weight.optimized)
    words = f"{sum(weight.elements for weight in size.weights):,} parameters"
    words = f"{size.name}: {words} in {len(size.weights)} tensors" if size.name else words
    words += f", {frozen:,} of them frozen" if frozen else ""
    words += f", {idle:,} of them trained by no optimizer" if idle else ""
    words += f", {size.tied} tied" if size.tied else ""
    return words + (f"; {size.buffers:,} bytes of buffers" if size.buffers else "")


def report(
    subject: EstimateInput, tables: dict[int, list[Memory]], transformer: Transformer | None, kept: int | None
) -> str:
    """Return a table for each number of processes on a machine, and the lines around the tables."""
    states = f"{subject.size.states.name} ({subject.size.states.per_element:g} numbers for each parameter)"
    lines = [describe(subject.size), f"precision {subject.precision}, {states}, {subject.window} micro-batches a step"]
    lines = [line.replace("1 micro-batches", "1 micro-batch") for line in lines]
    for devices, table in tables.items():
        machines = f" ({devices} on each of {subject.machines} machines)" if subject.machines > 1 else ""
        lines += ["", *_table(table, f"on each of {devices * subject.machines} processes{machines}", subject.strategy)]
    lines += ["", LEGEND]
    lines += ["", *_activation_lines(subject, transformer, kept)]
    lines += [f"note: {note}" for note in subject.size.notes]
    return "\n".join(lines) + "\n"


def _table(table: list[Memory], title: str, strategy: str | None) -> list[str]:
    unit, size = _unit(max(max(_cells(memory)) for memory in table))
    rows = [[title, *(f"~{name}" if name == "temporary" else name for name in COLUMNS)]]
    rows[0][COLUMNS.index("temporary") + 1] = "~more"
    for memory in table:
        marked = strategy is not None and strategy in re.findall(r"\w+", memory.label)
        cells = [f"{value / size:,.2f}" for value in _cells(memory)]
        cells = [f"({cell})" if name in memory.offloaded else cell for name, cell in zip(COLUMNS, cells, strict=True)]
        rows.append([f"{'* ' if marked else '  '}{memory.label}", *cells])
    widths = [max(len(row[column]) for row in rows) for column in range(len(COLUMNS) + 1)]
    lines = [
        "  ".join(
            [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        )
        for row in rows
    ]
    lines[0] += f"  {unit}"
    return [*lines, *(["* the strategy of the configuration"] if any(line.startswith("* ") for line in lines) else [])]


def _cells(memory: Memory) -> list[int]:
    return [getattr(memory, name) for name in COLUMNS]


def _unit(largest: int) -> tuple[str, int]:
    """Return the unit of a table and its bytes. 1 GB is 10^9 bytes."""
    for unit, size in (("TB", 10**12), ("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if largest >= (10 * size if unit == "TB" else size):
            return unit, size
    return "bytes", 1


def _activation_lines(subject: EstimateInput, model: Transformer | None, kept: int | None) -> list[str]:
    if model is None or kept is None:
        missing = [f"--{n}" for n in ("layers", "hidden", "sequence", "batch") if n not in subject.size.shape]
        return [f"activations are not counted; of a transformer they can be estimated: give {' '.join(missing)}."]
    unit, size = _unit(kept)
    recomputed = ", activation checkpointing of every layer" if model.checkpointing else ""
    return [
        f"activations, an estimate: {kept / size:,.2f} {unit} on each process, in addition, for a transformer of "
        f"{model.layers} layers,",
        f"width {model.hidden}, sequences of {model.sequence}, micro-batches of {model.batch}, a vocabulary of "
        f"{model.vocabulary or 'unknown size (no logits counted)'}, fused attention, "
        f"{'dropout' if model.dropout else 'no dropout'}{recomputed}.",
    ]


def zero_report(elements: int, processes: int) -> str:
    """Return the table of the ZeRO paper, in the layout of DeepSpeed's tutorials."""
    table = zero_table(elements, processes)
    unit, size = _unit(table[0].device)
    lines = [f"{elements:,} parameters, {processes} processes, Adam in mixed precision: {unit} on each process"]
    rows = {
        "weights (16 bit)": [memory.weights for memory in table],
        "gradients (16 bit)": [memory.gradients for memory in table],
        "optimizer (float32)": [memory.optimizer for memory in table],
        "without master weights": [memory.device - memory.masters for memory in table],
        "master weights (float32)": [memory.masters for memory in table],
        "all": [memory.device for memory in table],
    }
    lines.append(" " * 26 + "".join(f"{memory.label:>10}" for memory in table))
    lines += [f"{name:<26}" + "".join(f"{value / size:>10,.2f}" for value in values) for name, values in rows.items()]
    lines += ["", "Tables without master weights are common, and too low: Adam in mixed precision needs them."]
    return "\n".join(lines) + "\n"


def as_data(subject: EstimateInput, tables: dict[int, list[Memory]], kept: int | None) -> dict[str, Any]:
    """Return the estimate in bytes, for JSON."""
    return {
        "parameters": sum(weight.elements for weight in subject.size.weights),
        "trainable": sum(weight.elements for weight in subject.size.weights if weight.trainable),
        "precision": subject.precision,
        "optimizer": asdict(subject.size.states),
        "activations": kept,
        "processes": {
            devices * subject.machines: [{**asdict(memory), "device": memory.device} for memory in table]
            for devices, table in tables.items()
        },
        "notes": subject.size.notes,
    }
