"""Estimate the memory of a training run on each process by arithmetic on the numbers of parameters.

Sources: the states are sharded as in ZeRO (Rajbhandari et al., https://arxiv.org/abs/1910.02054, sections 3
and 5): 2 bytes for each parameter, 2 for its gradient, and for Adam in mixed precision 12 for the float32 master
weight, the momentum and the variance. Activations are those of a transformer (Korthikanti et al.,
https://arxiv.org/abs/2205.05198, sections 4 and 5).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trainer.precision import Precision

PERSISTENT = 100_000
"""Parameters with at most this many elements stay full in ZeRO-3 (`stage3_param_persistence_threshold`)."""
SUB_GROUP = 1_000_000_000
"""Elements that ZeRO-3 updates at once: DeepSpeed's `sub_group_size`."""


@dataclass(frozen=True)
class Weight:
    """One parameter tensor, or several that are sharded as one."""

    elements: int
    rows: int
    """Size of the first dimension: FSDP2 shards by rows."""
    trainable: bool = True
    optimized: bool = True
    """True if an optimizer updates the weight."""
    shards: int | None = None
    """Processes over which the weight is sharded; None: those of the partitioning."""


@dataclass(frozen=True)
class DtypeSizes:
    """Sizes of a precision's numbers."""

    stored: int
    """Bytes of a number in weights, gradients and optimizer states of torch's strategies."""
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
class ModelSize:
    """The sizes of a module on which its memory depends."""

    weights: Sequence[Weight]
    states: OptimizerStates = ADAMW
    buffers: int = 0
    """Bytes of buffers, replicated on every process."""
    block: int = 0
    """Elements of the largest block that is gathered at once; 0: not known."""
    outside_blocks: int = 0
    """Elements outside all blocks, which stay gathered."""


@dataclass(frozen=True)
class Setup:
    """Processes and options of a run."""

    processes: int
    numbers: DtypeSizes
    per_machine: int | None = None
    """Processes on each machine, over which HYBRID_SHARD shards; None: all processes are on one machine."""
    window: int = 1
    """Micro-batches of a step."""
    bucket: int = 500_000_000
    """Elements of DeepSpeed's gradient bucket: its `reduce_bucket_size`."""


@dataclass(frozen=True)
class StatePartitioning:
    """The states that a strategy shards over the processes, and those that it offloads to the host."""

    stage: int = 0
    """0: nothing is sharded; 1: optimizer states; 2: gradients too; 3: weights too, by FSDP as by ZeRO-3."""
    master_weights: bool = False
    """DeepSpeed: compute with weights in low precision, and keep float32 copies for the optimizer."""
    by_machine: bool = False
    """Shard over the processes of one machine only."""
    shards: int | None = None
    """Number of processes to shard over; None: all, or those of one machine."""
    keep_gathered: bool = False
    """Keep weights gathered from the forward to the backward."""
    offload_weights: bool = False
    offload_optimizer: bool = False
    tensor: int = 1
    """Processes over which layers are split; context, pipeline and expert: sequences, blocks and experts."""
    context: int = 1
    pipeline: int = 1
    expert: int = 1

    @property
    def splits_models(self) -> bool:
        """Whether several processes hold one model together."""
        return self.tensor * self.context * self.pipeline * self.expert > 1


@dataclass
class Memory:
    """Bytes on one process."""

    weights: int
    """Parameters and buffers."""
    gradients: int
    master_weights: int
    """float32 copies of low-precision weights."""
    optimizer: int
    temporary: int = 0
    """Estimate of temporary memory: gathered weights, copies in low precision, buckets."""
    host: int = 0
    """Bytes of host memory."""
    offloaded: list[str] = field(default_factory=list)
    """Names of the fields above that are on the host, and count as `host` instead of `device`."""

    @property
    def device(self) -> int:
        """Bytes on the device between backward and step, without temporary memory."""
        names = {"weights", "gradients", "master_weights", "optimizer"} - set(self.offloaded)
        return sum(getattr(self, name) for name in names)


def estimate_memory(partitioning: StatePartitioning, size: ModelSize, setup: Setup) -> Memory:
    """Return the memory of the process with the largest shards, when all gradients are allocated.

    Exact for torch's strategies, except for temporary memory. DeepSpeed's optimizer states are float32, and so are the
    copies of the weights that it updates, even of float32 weights.
    """
    trainable = [weight for weight in size.weights if weight.trainable]
    optimized = [weight for weight in trainable if weight.optimized]
    number = min(setup.numbers.computed, 4) if partitioning.master_weights else setup.numbers.stored
    updated = _elements(optimized, partitioning, setup, 1)
    memory = Memory(
        weights=number * _elements(size.weights, partitioning, setup, 3) + size.buffers,
        gradients=number * _elements(trainable, partitioning, setup, 2),
        master_weights=4 * updated if partitioning.master_weights else 0,
        optimizer=round((4 if partitioning.master_weights else number) * size.states.per_element * updated)
        + size.states.per_tensor * (min(len(optimized), 1) if partitioning.master_weights else len(optimized)),
    )
    if partitioning.master_weights:
        memory.temporary = _zero_temporary(partitioning, size, setup, 4 * updated)
    else:
        memory.temporary = _torch_temporary(partitioning, size, setup, trainable)
    if partitioning.offload_optimizer:
        # ZeRO's optimizer step on the host reads the gradients there, in float32.
        if partitioning.master_weights:
            memory.offloaded += ["master_weights", "optimizer"]
            memory.host += memory.optimizer + memory.master_weights + 4 * updated
        else:
            memory.offloaded += ["gradients", "optimizer"]
            memory.host += memory.optimizer + memory.gradients
    if partitioning.offload_weights:
        memory.offloaded.append("weights")
        memory.host += memory.weights - size.buffers
        memory.temporary += size.buffers
    return memory


def supports_precision(partitioning: StatePartitioning, precision: str) -> bool:
    """Return False for a precision that the partitioning does not support: DeepSpeed has no float64."""
    return not (partitioning.master_weights and precision == "64-true")


def _elements(weights: Iterable[Weight], partitioning: StatePartitioning, setup: Setup, sharded_from: int) -> int:
    """Return the elements of these weights on one process, padded, if they are sharded from this stage on."""
    if partitioning.stage < sharded_from:
        return sum(weight.elements for weight in weights)
    parts = partitioning.shards or (partitioning.by_machine and setup.per_machine) or setup.processes
    if partitioning.master_weights:
        # DeepSpeed flattens the parameters and shards the flat buffer.
        return math.ceil(sum(weight.elements for weight in weights) / parts)
    return sum(
        math.ceil(weight.rows / (weight.shards or parts)) * (weight.elements // max(weight.rows, 1))
        for weight in weights
    )


def _torch_temporary(partitioning: StatePartitioning, size: ModelSize, setup: Setup, trainable: list[Weight]) -> int:
    numbers, full = setup.numbers, sum(weight.elements for weight in size.weights)
    if partitioning.stage < 3:
        # Autocast's copies of the weights, which live until the end of the backward.
        return numbers.computed * full if numbers.computed != numbers.stored else 0
    # The current block, the next block (prefetched), and the gradient of the previous block.
    gathered = numbers.computed * (full if partitioning.keep_gathered else size.outside_blocks + 3 * size.block)
    # FSDP keeps full gradients until the last micro-batch, unless `accumulate_unsharded=False`.
    in_window = max(numbers.stored, 4) * sum(weight.elements for weight in trainable) if setup.window > 1 else 0
    return gathered + in_window


def _zero_temporary(partitioning: StatePartitioning, size: ModelSize, setup: Setup, gradients: int) -> int:
    """Return the temporary bytes of ZeRO. `gradients`: bytes of the shard's gradients in float32, read by the step."""
    number = min(setup.numbers.computed, 4)
    bucket, in_step = number * setup.bucket, 0 if partitioning.offload_optimizer else gradients
    if partitioning.stage < 3:
        return max(in_step, bucket)
    small = sum(weight.elements for weight in size.weights if weight.elements <= PERSISTENT)
    return number * (small + 2 * size.block) + bucket + min(in_step, 4 * SUB_GROUP)


def zero_table(elements: int, processes: int) -> list[Memory]:
    """Return bytes per process of mixed-precision Adam without ZeRO and with stages 1, 2 and 3 (the paper's section 3).

    Per parameter: 2 for a weight, 2 for its gradient, 4 for its master copy, 8 for the optimizer's states.
    """
    size = ModelSize([Weight(elements, elements)], OptimizerStates("Adam", 2))
    stages = [StatePartitioning(stage, master_weights=True) for stage in range(4)]
    return [estimate_memory(partitioning, size, Setup(processes, DtypeSizes(4, 2))) for partitioning in stages]


@dataclass(frozen=True)
class Transformer:
    """Sizes of a transformer: equal layers of fused attention and a four times wider MLP."""

    layers: int
    hidden: int
    sequence: int
    batch: int
    """Samples of a micro-batch on one process."""
    vocabulary: int = 0
    dropout: bool = False
    checkpointing: bool = False
    """Store only the input of each layer; recompute the rest."""


def activations(model: Transformer, numbers: DtypeSizes) -> int:
    """Estimate the bytes of activations that one micro-batch stores for its backward, on each process.

    A layer takes sbh(14c + 2w + 2d) bytes, with s sequence, b batch, h hidden, c bytes of a computed and w of a stored
    number, and d = 1 with dropout (masks are bytes), else 0. For c = w = 2 and d = 1 this is 34sbh, table 2 of
    arXiv:2205.05198 without the scores, which fused attention does not store. Under autocast (w > c) the residual
    stream, which the norms read, stays in w. With checkpointing: sbhw for every layer, and all of one layer. The logits
    are stored in c and in float32.
    """
    c, w = numbers.computed, numbers.stored
    tokens = model.sequence * model.batch
    layer = tokens * model.hidden * (14 * c + 2 * w + 2 * model.dropout)
    inputs = tokens * model.hidden * w
    layers = model.layers * inputs + layer if model.checkpointing else model.layers * layer
    return layers + tokens * model.vocabulary * (c + 4 if c < 4 else c)
