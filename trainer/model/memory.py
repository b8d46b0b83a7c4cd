"""Estimate the memory of a training run on each process by arithmetic on the numbers of parameters.

Sources: the states are sharded as in ZeRO (Rajbhandari et al., https://arxiv.org/abs/1910.02054, sections 3
and 5): 2 bytes for each parameter, 2 for its gradient, and for Adam in mixed precision 12 for the float32 master
weight, the momentum and the variance. Activations are those of a transformer (Korthikanti et al.,
https://arxiv.org/abs/2205.05198, sections 4 and 5).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainer.precision import Precision

# -- what is given -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Weight:
    """One parameter tensor, or several that are sharded as one."""

    elements: int
    rows: int
    """Size of the first dimension: FSDP2 shards by rows."""
    trainable: bool = True
    optimized: bool = True
    """True if an optimizer updates the weight."""


@dataclass(frozen=True)
class DtypeSizes:
    """Bytes of one number."""

    stored: int
    """Bytes of a stored number: weights, gradients and optimizer states of torch's strategies."""
    computed: int
    """Bytes of a number in the forward and backward."""


def number_sizes(precision: Precision) -> DtypeSizes:
    """Return the sizes of a precision's numbers."""
    return DtypeSizes(precision.weights.itemsize, (precision.autocast or precision.weights).itemsize)


@dataclass(frozen=True)
class OptimizerStates:
    """State of an optimizer."""

    name: str
    per_element: float
    """Numbers per element of a parameter."""
    per_tensor: int = 0
    """Bytes per parameter tensor, such as torch's float32 step count."""


ADAMW = OptimizerStates("AdamW", 2, 4)


@dataclass(frozen=True)
class Setup:
    """Processes, numbers, optimizer and sizes of a run."""

    processes: int
    numbers: DtypeSizes
    states: OptimizerStates
    per_machine: int | None = None
    """Processes on each machine, over which the hybrid layout shards; None: all processes are on one machine."""
    window: int = 1
    """Micro-batches of a step."""
    buffers: int = 0
    """Bytes of the module's buffers, replicated on every process."""
    block: int = 0
    """Elements of the largest block that is gathered at once; 0: not known."""
    rest: int = 0
    """Elements outside all blocks, which stay gathered."""
    bucket: int = 500_000_000
    """Elements of DeepSpeed's gradient bucket: its `reduce_bucket_size`."""


PERSISTENT = 100_000
"""Parameters with at most this many elements stay full in ZeRO-3 (`stage3_param_persistence_threshold`)."""
SUB_GROUP = 1_000_000_000
"""Elements that ZeRO-3 updates at once: DeepSpeed's `sub_group_size`."""

# -- how each strategy shards ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class MemoryLayout:
    """The states that a strategy shards over the processes, and those that it offloads to the host."""

    label: str
    """Starts with the public names of the strategies."""
    weights: bool = False
    gradients: bool = False
    optimizer: bool = False
    by_machine: bool = False
    """Shard over the processes of one machine only."""
    shards: int | None = None
    """Number of processes to shard over; None: all, or those of one machine."""
    keep_gathered: bool = False
    """Keep weights gathered from the forward to the backward."""
    masters: bool = False
    """Compute with weights in low precision, and keep float32 copies for the optimizer."""
    offload_weights: bool = False
    offload_optimizer: bool = False


_ZERO_3 = MemoryLayout("deepspeed_stage_3 (ZeRO-3)", weights=True, gradients=True, optimizer=True, masters=True)
_ZERO_2 = replace(_ZERO_3, label="deepspeed_stage_2 (ZeRO-2)", weights=False)
_FSDP = replace(_ZERO_3, label="fsdp FULL_SHARD, xla_fsdp", masters=False)
LAYOUTS = (
    MemoryLayout("single_device, ddp, xla"),
    _FSDP,
    replace(_FSDP, label="fsdp SHARD_GRAD_OP", keep_gathered=True),
    replace(_FSDP, label="fsdp HYBRID_SHARD", by_machine=True),
    replace(_FSDP, label="fsdp FULL_SHARD cpu_offload", offload_weights=True, offload_optimizer=True),
    replace(_ZERO_2, label="deepspeed_stage_1 (ZeRO-1)", gradients=False),
    _ZERO_2,
    _ZERO_3,
    replace(_ZERO_2, label="deepspeed_stage_2_offload (ZeRO-2)", offload_optimizer=True),
    replace(_ZERO_3, label="deepspeed_stage_3_offload (ZeRO-3)", offload_weights=True, offload_optimizer=True),
)


def layout_of(name: str, options: Mapping[str, Any]) -> MemoryLayout | None:
    """Return the layout of a strategy; None: no estimate for this strategy.

    Args:
        name: of the strategy.
        options: attributes of the strategy; only those that change the layout are read.
    """
    words = [f"deepspeed_stage_{options['stage']}" if "stage" in options else name]
    words += [options["sharding_strategy"]] if "sharding_strategy" in options else []
    row = next((row for row in LAYOUTS if set(words) <= set(re.findall(r"\w+", row.label))), None)
    if row is None:
        return None
    cpu_offload = bool(options.get("cpu_offload"))
    weights = cpu_offload or options.get("offload_parameters") in ("cpu", "nvme")
    optimizer = cpu_offload or options.get("offload_optimizer") in ("cpu", "nvme")
    offloaded = " and ".join(
        part for part, is_on_host in (("optimizer", optimizer), ("weights", weights)) if is_on_host
    )
    label = f"ZeRO-{options['stage']}" if "stage" in options else " ".join(words)
    return replace(
        row,
        label=label + (f" with {offloaded} offloaded" if offloaded else ""),
        shards=options["device_mesh"][1] if row.by_machine and options.get("device_mesh") else None,
        offload_weights=weights,
        offload_optimizer=optimizer,
    )


@dataclass
class Memory:
    """Bytes on one process, on its device and on the host."""

    label: str
    weights: int = 0
    """Parameters and buffers."""
    gradients: int = 0
    masters: int = 0
    """float32 copies of low-precision weights."""
    optimizer: int = 0
    temporary: int = 0
    """Estimate of temporary memory: gathered weights, copies in low precision, buckets."""
    host: int = 0
    """Bytes of host memory."""
    offloaded: list[str] = field(default_factory=list)
    """Names of the fields above that are on the host, and count as `host` instead of `device`."""

    @property
    def device(self) -> int:
        """Bytes on the device between backward and step, without temporary memory."""
        parts = {
            "weights": self.weights,
            "gradients": self.gradients,
            "masters": self.masters,
            "optimizer": self.optimizer,
        }
        return sum(size for name, size in parts.items() if name not in self.offloaded)


def needed(layout: MemoryLayout, weights: Sequence[Weight], setup: Setup) -> Memory:
    """Return the memory of the process with the largest shards, when all gradients are allocated.

    Exact for float32, except for temporary memory. With a window of several micro-batches FSDP keeps full gradients
    until the last micro-batch, unless `accumulate_unsharded=False`.
    """
    trainable = [weight for weight in weights if weight.trainable]
    optimized = [weight for weight in trainable if weight.optimized]
    return (_zero if layout.masters else _torch)(layout, weights, trainable, optimized, setup)


def possible(layout: MemoryLayout, precision: str) -> bool:
    """Return False for a precision that the layout does not support: DeepSpeed has no float64."""
    return not (layout.masters and precision == "64-true")


def _torch(
    layout: MemoryLayout, weights: Sequence[Weight], trainable: list[Weight], optimized: list[Weight], setup: Setup
) -> Memory:
    """Return the memory with weights, gradients and states in the stored precision; FSDP2 shards tensors by rows."""
    numbers, states = setup.numbers, setup.states
    among = setup.per_machine if layout.by_machine else None
    parts = (layout.shards or among or setup.processes) if layout.weights else 1
    memory = Memory(layout.label)
    memory.weights = numbers.stored * _by_rows(weights, parts) + setup.buffers
    memory.gradients = numbers.stored * _by_rows(trainable, parts)
    in_window = max(numbers.stored, 4) * _elements(trainable) if layout.weights and setup.window > 1 else 0
    memory.optimizer = round(numbers.stored * states.per_element * _by_rows(optimized, parts))
    memory.optimizer += states.per_tensor * len(optimized)
    if not layout.weights:
        # Autocast's copies of the weights, which live until the end of the backward.
        memory.temporary = numbers.computed * _elements(weights) if numbers.computed != numbers.stored else 0
    elif layout.keep_gathered or not setup.block:
        memory.temporary = numbers.computed * (_elements(weights) if layout.keep_gathered else setup.rest)
    else:
        # The current block, the next block (prefetched), and the gradient of the previous block.
        memory.temporary = numbers.computed * (setup.rest + 3 * setup.block)
    if layout.offload_weights:
        memory.offloaded = ["weights", "gradients", "optimizer"]
        memory.host = memory.weights - setup.buffers + memory.gradients + memory.optimizer
        memory.temporary += setup.buffers
    memory.temporary += in_window
    return memory


def _zero(
    layout: MemoryLayout, weights: Sequence[Weight], trainable: list[Weight], optimized: list[Weight], setup: Setup
) -> Memory:
    """Return the memory with ZeRO: DeepSpeed flattens the parameters and shards the flat buffer.

    The optimizer's states are float32, and so are the copies of the weights that it updates, even of float32 weights.
    """
    parts, low = setup.processes, min(setup.numbers.computed, 4)
    memory = Memory(layout.label)
    memory.weights = low * (_by_elements(weights, parts) if layout.weights else _elements(weights)) + setup.buffers
    memory.gradients = low * (_part(_elements(trainable), parts) if layout.gradients else _elements(trainable))
    share = _by_elements(optimized, parts) if layout.weights else _part(_elements(optimized), parts)
    memory.masters = 4 * share
    memory.optimizer = round(4 * setup.states.per_element * share) + (setup.states.per_tensor if optimized else 0)
    in_step = 0 if layout.offload_optimizer else 4 * share  # the shard's gradient in float32
    if layout.weights:
        small = _elements(weight for weight in weights if weight.elements <= PERSISTENT)
        gathered = low * (small + 2 * setup.block)
        memory.temporary = gathered + low * setup.bucket + min(in_step, 4 * SUB_GROUP)
    else:
        memory.temporary = max(in_step, low * setup.bucket)
    if layout.offload_optimizer:
        memory.offloaded = ["masters", "optimizer"]
        memory.host = memory.masters + memory.optimizer + 4 * share
    if layout.offload_weights:
        memory.offloaded.append("weights")
        memory.host += memory.weights - setup.buffers
        memory.temporary += setup.buffers
    return memory


def _elements(weights: Iterable[Weight]) -> int:
    return sum(weight.elements for weight in weights)


def _part(elements: int, parts: int) -> int:
    return math.ceil(elements / parts)


def _by_rows(weights: Iterable[Weight], parts: int) -> int:
    """Return the elements of a shard of tensors sharded by their first dimension, padded."""
    return sum(_part(weight.rows, parts) * (weight.elements // max(weight.rows, 1)) for weight in weights)


def _by_elements(weights: Iterable[Weight], parts: int) -> int:
    """Return the elements of a shard of tensors that are flattened and sharded, padded."""
    return sum(_part(weight.elements, parts) for weight in weights)


# -- the table of the ZeRO paper ---------------------------------------------------------------------------------------


def zero_table(elements: int, processes: int) -> list[Memory]:
    """Return bytes per process of mixed-precision Adam without ZeRO and with stages 1, 2 and 3 (the paper's section 3).

    Per parameter: 2 for a weight, 2 for its gradient, 4 for its master copy, 8 for the optimizer's states.
    """
    weights = [Weight(elements, elements)]
    setup = Setup(processes, DtypeSizes(4, 2), OptimizerStates("adam", 2))
    stages = [MemoryLayout("No ZeRO", masters=True)]
    stages += [MemoryLayout(f"ZeRO-{n}", n > 2, n > 1, True, masters=True) for n in (1, 2, 3)]
    table = [needed(stage, weights, setup) for stage in stages]
    table[0].masters, table[0].optimizer = 4 * elements, 8 * elements
    return table


# -- activations -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Transformer:
    """Sizes of a transformer: equal layers of attention and a four times wider MLP."""

    layers: int
    hidden: int
    sequence: int
    batch: int
    """Samples of a micro-batch on one process."""
    heads: int | None = None
    vocabulary: int = 0
    dropout: bool = False
    full_scores: bool = False
    """Attention is not fused and stores its scores, sequence x sequence for each head."""
    checkpointing: bool = False
    """Store only the input of each layer; recompute the rest."""


def activations(model: Transformer, numbers: DtypeSizes) -> int:
    """Estimate the bytes of activations that one micro-batch stores for its backward, on each process.

    A layer takes sbh(14c + 2w + 2d) + as²b(2c + d) bytes, with s sequence, b batch, h hidden, a heads, c bytes of a
    computed and w of a stored number, and d = 1 with dropout (masks are bytes), else 0. For c = w = 2 and d = 1 this is
    sbh(34 + 5as/h), table 2 of arXiv:2205.05198. Under autocast (w > c) the residual stream, which the norms read,
    stays in w. Without dropout the scores are stored once, as²bc; fused attention stores none. With checkpointing:
    sbhw for every layer, and all of one layer. The logits are stored in c and in float32.
    """
    c, w, mask = numbers.computed, numbers.stored, int(model.dropout)
    tokens = model.sequence * model.batch
    layer = tokens * model.hidden * (14 * c + 2 * w + 2 * mask)
    if model.full_scores and model.heads:
        layer += model.heads * model.sequence * tokens * (2 * c + 1 if mask else c)
    kept = tokens * model.hidden * w
    layers = model.layers * kept + layer if model.checkpointing else model.layers * layer
    return layers + tokens * model.vocabulary * (c + 4 if c < 4 else c)
