"""Print an estimate: tables for people, bytes for programs."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import asdict, dataclass, field
from typing import Any

from trainer.cli.columns import fitted_lines
from trainer.model.memory import Memory, ModelSize, Transformer, zero_table

NEEDED = ("layers", "hidden", "sequence", "batch")
"""Options that an estimate of a transformer's activations needs."""
SPLIT_ACTIVATIONS = (
    "the activations are those of an unsplit model: a process of a layout that splits it keeps a part of them, which "
    "trainer fit --dry-run counts"
)
COLUMNS = ("weights", "gradients", "master_weights", "optimizer", "device", "temporary", "host")
FIRST_TO_GO = (2, 3, 1, 4, 7, 6)
"""The numbers of the columns of a table that a narrow terminal leaves out, in that order; the sum stays."""
LEGEND = """\
weights: parameters and buffers. master weights: float32 copies of weights in low precision.
device: the sum in the memory of the device once the gradients exist, without the figures in brackets.
host: the memory of the host for each process; it holds the figures in brackets.
~more: an estimate of what is needed in addition at times: gathered weights, copies in low precision, buckets."""

Tables = dict[int, dict[str, Memory]]
"""The memory by the number of processes on a machine, then by the label of the layout."""


@dataclass
class EstimateInput:
    """The module to train, as far as it is known."""

    name: str
    """Name of its class; "": only the number of parameters is known."""
    size: ModelSize
    tied: int = 0
    """Parameters that are registered in several places, and kept once."""
    shape: dict[str, Any] = field(default_factory=dict)
    """Arguments of `Transformer`, as far as they are known."""
    notes: list[str] = field(default_factory=list)

    def transformer(self, checkpointing: bool) -> Transformer | None:
        """Return the sizes for an estimate of the activations; None if one of them is not known."""
        return Transformer(**self.shape, checkpointing=checkpointing) if self.shape.keys() >= {*NEEDED} else None


def _description(estimate_input: EstimateInput) -> str:
    weights, buffers = estimate_input.size.weights, estimate_input.size.buffers
    frozen = sum(weight.elements for weight in weights if not weight.trainable)
    idle = sum(weight.elements for weight in weights if weight.trainable and not weight.optimized)
    words = f"{sum(weight.elements for weight in weights):,} parameters"
    words = f"{estimate_input.name}: {words} in {len(weights)} tensors" if estimate_input.name else words
    words += f", {frozen:,} of them frozen" if frozen else ""
    words += f", {idle:,} of them trained by no optimizer" if idle else ""
    words += f", {estimate_input.tied} tied" if estimate_input.tied else ""
    return words + (f"; {buffers:,} bytes of buffers" if buffers else "")


def report(
    estimate_input: EstimateInput,
    given: Namespace,
    tables: Tables,
    configured: str | None,
    transformer: Transformer | None,
    saved: int | None,
) -> str:
    """Return a table for each number of processes on a machine, and the lines around the tables."""
    states = estimate_input.size.states
    window = f"{given.accumulate} micro-batch{'es' if given.accumulate > 1 else ''} a step"
    lines = [_description(estimate_input)]
    lines += [
        f"precision {given.precision}, {states.name} ({states.per_element:g} numbers for each parameter), {window}"
    ]
    for devices, rows in tables.items():
        machines = f" ({devices} on each of {given.num_nodes} machines)" if given.num_nodes > 1 else ""
        lines += ["", *_table(f"on each of {devices * given.num_nodes} processes{machines}", rows, configured)]
    lines += ["* the strategy of the configuration"] if any(configured in rows for rows in tables.values()) else []
    lines += ["", LEGEND, "", *_activation_lines(estimate_input, transformer, saved)]
    return "\n".join([*lines, *(f"note: {note}" for note in estimate_input.notes)]) + "\n"


def _table(title: str, rows: dict[str, Memory], configured: str | None) -> list[str]:
    bytes_of = {label: {name: getattr(memory, name) for name in COLUMNS} for label, memory in rows.items()}
    # Not by "~more": DeepSpeed's buckets take 2 GB with the smallest model, too.
    states = [value for row in bytes_of.values() for name, value in row.items() if name != "temporary"]
    unit, size = _unit(max(states, default=0))
    cells = [[title, *("~more" if name == "temporary" else name.replace("_", " ") for name in COLUMNS)]]
    for label, row in bytes_of.items():
        texts = {name: f"{value / size:,.2f}" for name, value in row.items()}
        texts |= {name: f"({texts[name]})" for name in rows[label].offloaded}
        cells.append([f"{'*' if label == configured else ' '} {label}", *texts.values()])
    numbers = range(1, len(cells[0]))
    head, *lines = fitted_lines(cells, numbers, FIRST_TO_GO, "--json", beside=2 + len(unit))
    return [f"{head}  {unit}", *lines]


def _unit(largest: int) -> tuple[str, int]:
    """Return the unit of a table and its bytes. 1 GB is 10^9 bytes."""
    for unit, size in (("TB", 10**12), ("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if largest >= (10 * size if unit == "TB" else size):
            return unit, size
    return "bytes", 1


def _activation_lines(estimate_input: EstimateInput, model: Transformer | None, saved: int | None) -> list[str]:
    if model is None or saved is None:
        missing = [f"--{name}" for name in NEEDED if name not in estimate_input.shape]
        return [f"activations are not counted; of a transformer they can be estimated: give {' '.join(missing)}."]
    unit, size = _unit(saved)
    recomputed = ", activation checkpointing of every layer" if model.checkpointing else ""
    return [
        f"activations, an estimate: {saved / size:,.2f} {unit} on each process, in addition, for a transformer of "
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
        "without master weights": [memory.device - memory.master_weights for memory in table],
        "master weights (float32)": [memory.master_weights for memory in table],
        "all": [memory.device for memory in table],
    }
    lines.append(" " * 26 + "".join(f"{label:>10}" for label in ("No ZeRO", "ZeRO-1", "ZeRO-2", "ZeRO-3")))
    lines += [f"{name:<26}" + "".join(f"{value / size:>10,.2f}" for value in values) for name, values in rows.items()]
    lines += ["", "Tables without master weights are common, and too low: Adam in mixed precision needs them."]
    return "\n".join(lines) + "\n"


def as_data(estimate_input: EstimateInput, given: Namespace, tables: Tables, saved: int | None) -> dict[str, Any]:
    """Return the estimate in bytes, for JSON."""
    weights = estimate_input.size.weights
    return {
        "parameters": sum(weight.elements for weight in weights),
        "trainable": sum(weight.elements for weight in weights if weight.trainable),
        "precision": given.precision,
        "optimizer": asdict(estimate_input.size.states),
        "activations": saved,
        "processes": {
            devices * given.num_nodes: [
                {"label": label, **asdict(memory), "device": memory.device} for label, memory in rows.items()
            ]
            for devices, rows in tables.items()
        },
        "notes": estimate_input.notes,
    }
