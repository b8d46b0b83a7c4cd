"""What `trainer estimate` says: tables for people, bytes for programs."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, field
from typing import Any

from trainer.model.memory import PRECISIONS, Memory, OptimizerStates, Setup, Transformer, Weight, zero_table

COLUMNS = ("weights", "gradients", "masters", "optimizer", "device", "temporary", "host")
LEGEND = """\
weights: parameters and buffers. masters: float32 copies of weights in low precision. device: all that is held there
when the gradients are there; what stands in brackets is not: it is in the memory of the host, for each process.
~more: an estimate of what is needed beside, at times: gathered weights, copies in low precision, buckets."""


@dataclass
class EstimateInput:
    """What is to be trained, and where."""

    weights: list[Weight]
    states: OptimizerStates
    precision: str
    machines: int
    per_machine: list[int]
    window: int
    buffers: int = 0
    block: int = 0
    rest: int = 0
    bucket: int = Setup.bucket
    shape: dict[str, int] = field(default_factory=dict)
    """Sizes of a transformer, by the names of the options."""
    words: list[str] = field(default_factory=list)
    """Lines that say what is estimated."""
    notes: list[str] = field(default_factory=list)
    strategy: str | None = None
    """The strategy of the configuration."""

    def setup(self, devices: int) -> Setup:
        """With so many processes on each machine."""
        return Setup(
            processes=devices * self.machines,
            numbers=PRECISIONS[self.precision],
            states=self.states,
            per_machine=devices,
            window=self.window,
            buffers=self.buffers,
            block=self.block,
            rest=self.rest,
            bucket=self.bucket,
        )


def report(
    subject: EstimateInput, tables: dict[int, list[Memory]], transformer: Transformer | None, kept: int | None
) -> str:
    """The tables, by processes on each machine, and what belongs to them."""
    states = f"{subject.states.name} ({subject.states.per_element:g} numbers for each parameter)"
    lines = [*subject.words, f"precision {subject.precision}, {states}, {subject.window} micro-batches a step"]
    lines = [line.replace("1 micro-batches", "1 micro-batch") for line in lines]
    for devices, table in tables.items():
        machines = f" ({devices} on each of {subject.machines} machines)" if subject.machines > 1 else ""
        lines += ["", *_table(table, f"on each of {devices * subject.machines} processes{machines}", subject.strategy)]
    lines += ["", LEGEND]
    lines += ["", *_activation_lines(subject, transformer, kept)]
    lines += [f"note: {note}" for note in subject.notes]
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
    """The unit for a table, and its bytes. 1 GB is 10^9 bytes."""
    for unit, size in (("TB", 10**12), ("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if largest >= (10 * size if unit == "TB" else size):
            return unit, size
    return "bytes", 1


def _activation_lines(subject: EstimateInput, model: Transformer | None, kept: int | None) -> list[str]:
    if model is None or kept is None:
        missing = [f"--{n}" for n in ("layers", "hidden", "sequence", "batch") if n not in subject.shape]
        return [f"activations are not counted; of a transformer they can be estimated: give {' '.join(missing)}."]
    unit, size = _unit(kept)
    attention = "unfused attention" if model.whole_scores else "fused attention"
    recomputed = ", activation checkpointing of every layer" if model.checkpointing else ""
    return [
        f"activations, an estimate: {kept / size:,.2f} {unit} on each process, beside the above, for a transformer of "
        f"{model.layers} layers,",
        f"width {model.hidden}, sequences of {model.sequence}, micro-batches of {model.batch}, a vocabulary of "
        f"{model.vocabulary or 'unknown size (no logits counted)'}, {attention}, "
        f"{'dropout' if model.dropout else 'no dropout'}{recomputed}.",
    ]


def zero_report(elements: int, processes: int) -> str:
    """The table of the paper, laid out as tutorials have it."""
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
    """Everything in bytes, for JSON."""
    return {
        "parameters": sum(weight.elements for weight in subject.weights),
        "trainable": sum(weight.elements for weight in subject.weights if weight.trainable),
        "precision": subject.precision,
        "optimizer": asdict(subject.states),
        "activations": kept,
        "processes": {
            devices * subject.machines: [{**asdict(memory), "device": memory.device} for memory in table]
            for devices, table in tables.items()
        },
        "notes": subject.notes,
    }
