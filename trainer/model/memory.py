"""Estimate the memory of a training run on each process by arithmetic on the sizes of its weights.

Sources: the states are sharded as in ZeRO (Rajbhandari et al., https://arxiv.org/abs/1910.02054, sections 3 and 5).
Activations are a transformer's (Korthikanti et al., https://arxiv.org/abs/2205.05198, sections 4 and 5).
docs/planning.md derives the formulas; tests/strategies/test_parallel_cost.py compares them with real steps.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

from trainer.errors import ConfigError
from trainer.model.pipeline_stages import cut_blocks

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
    is_matrix: bool = False
    """True for the matrix of a layer or table, which tensor parallelism splits."""
    experts: int = 0
    """Experts along the first dimension, in a weight that holds all experts of a layer."""
    shards: int = 1
    """Processes over which FSDP shards the weight."""


@dataclass(frozen=True)
class DtypeSizes:
    """Bytes of a precision's numbers: in stored weights, gradients and states, and in the forward and backward."""

    stored: int
    computed: int


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


def elements_of(weights: Iterable[Weight]) -> int:
    """Return the elements of all these weights."""
    return sum(weight.elements for weight in weights)


@dataclass(frozen=True)
class ModelSize:
    """The weights of a module, or of a stage of it."""

    before: Sequence[Weight]
    """Weights before the blocks, and all weights of a module without blocks."""
    blocks: Sequence[Sequence[Weight]] = ()
    """Weights that FSDP gathers together."""
    after: Sequence[Weight] = ()
    tied: Sequence[Weight] = ()
    """Weights of `before` that are used after the blocks too."""
    states: OptimizerStates = ADAMW
    buffers: int = 0
    """Bytes of buffers, replicated on every process."""

    @property
    def weights(self) -> list[Weight]:
        """All weights."""
        return [*self.before, *chain.from_iterable(self.blocks), *self.after]


@dataclass(frozen=True)
class Transformer:
    """Sizes on which the activations of a transformer with fused attention depend, and the bytes that it sends."""

    hidden: int
    sequence: int
    batch: int
    """Samples of a micro-batch on one process."""
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    """Width of the MLP, or of an expert."""
    vocabulary: int = 0
    gated: bool = False
    """True: the MLP has three layers (gate, up, down), else two."""
    experts: int = 0
    experts_per_token: int = 1
    shared: int = 0
    """Width of the experts of a mixture that compute every token, all together."""
    dropout: bool = False
    checkpointing: bool = False
    """Store only the input of each layer; recompute the rest."""

    @property
    def tokens(self) -> int:
        """Tokens of a micro-batch."""
        return self.sequence * self.batch


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
    norms_stored: bool = True
    """True if norms read numbers in their stored dtype: autocast runs norms in float32 on GPUs only."""

    @property
    def norm_bytes(self) -> int:
        """Bytes of a number that a norm reads, and keeps."""
        return self.numbers.stored if self.norms_stored else self.numbers.computed


@dataclass(frozen=True)
class Layout:
    """The states that a strategy shards over the processes or offloads to the host, and how it splits a model."""

    stage: int = 0
    """0: nothing is sharded; 1: optimizer states; 2: gradients too; 3: weights too, by FSDP as by ZeRO-3."""
    master_weights: bool = False
    """DeepSpeed: compute with weights in low precision, and keep float32 copies for the optimizer."""
    by_machine: bool = False
    """Shard over the processes of one machine only."""
    readers: int | None = None
    """Readers to shard over; None: all, or the readers of one machine."""
    keep_gathered: bool = False
    """Keep weights gathered from the forward to the backward."""
    reduce_each: bool = False
    """Reduce the gradients of each micro-batch (`accumulate_unsharded=False`)."""
    offload_weights: bool = False
    offload_optimizer: bool = False
    tensor: int = 1
    """Processes over which layers are split; context, pipeline and expert: sequences, blocks and experts."""
    context: int = 1
    pipeline: int = 1
    expert: int = 1
    keys: bool = False
    """True: context parallelism gathers keys, also where heads could be exchanged."""

    def all_readers(self, setup: Setup) -> int:
        """Return the number of models that read different samples."""
        return setup.processes // (self.tensor * self.context * self.pipeline)

    def sharing(self, setup: Setup) -> int:
        """Return the processes over which a weight is sharded: readers, and the parts of their sequences."""
        all_readers, per_machine = self.all_readers(setup), setup.per_machine if self.by_machine else None
        here = max(1, (per_machine or setup.processes) // (self.tensor * self.context))
        return self.context * (self.readers or min(all_readers, here))


@dataclass
class Memory:
    """Bytes on one process."""

    weights: int
    gradients: int
    master_weights: int
    optimizer: int
    temporary: int = 0
    """Estimate of temporary memory: gathered weights, copies in low precision, buckets, logits."""
    host: int = 0
    """Bytes of host memory."""
    offloaded: list[str] = field(default_factory=list)
    """Names of the fields above that are on the host, and count as `host` instead of `device`."""
    activations: int | None = None
    """Bytes kept for backwards; None: the sizes of the model are not known."""
    stage: int = 0
    """The stage of a pipeline."""

    @property
    def device(self) -> int:
        """Bytes on the device between backward and step, without temporary memory and activations."""
        names = {"weights", "gradients", "master_weights", "optimizer"} - set(self.offloaded)
        return sum(getattr(self, name) for name in names)

    @property
    def total(self) -> int:
        """All bytes on the device."""
        return self.device + self.temporary + (self.activations or 0)


class Stage(NamedTuple):
    """A part of a pipeline; the full model without one."""

    number: int
    is_last: bool
    size: ModelSize
    """The weights that a process of the stage computes with."""


def stages_of(size: ModelSize, layout: Layout, setup: Setup) -> list[Stage]:
    """Return the stages as `FSDPStrategy` cuts them: the largest has as few parameters as possible.

    Raises:
        ConfigError: there are too few processes or blocks.
    """
    model, most = layout.tensor * layout.context * layout.pipeline, len(size.blocks)
    if setup.processes % model or layout.pipeline > max(1, most):
        raise ConfigError(
            f"a model split over {model} processes, {layout.pipeline} stages, needs a multiple of {model} processes "
            f"and as many blocks as stages; there are {setup.processes} processes and {most} blocks."
        )
    sizes = [elements_of(block) for block in size.blocks] or [0]
    sizes[0] += elements_of(size.before)
    sizes[-1] += elements_of([*size.tied, *size.after])
    ends, found = cut_blocks(sizes, layout.pipeline), []
    for number, (start, end) in enumerate(zip([0, *ends], ends, strict=False)):
        is_last = end == len(sizes)
        before: Sequence[Weight] = []
        after: Sequence[Weight] = []
        if is_last:
            before, after = size.tied, size.after
        if number == 0:
            before = size.before
        own, last, *blocks = (_parts(weights, layout, setup) for weights in (before, after, *size.blocks[start:end]))
        found.append(Stage(number, is_last, replace(size, before=own, blocks=blocks, after=last)))
    return found


def _parts(weights: Sequence[Weight], layout: Layout, setup: Setup) -> list[Weight]:
    """Return the parts of weights that the first process of a stage computes with."""
    found = []
    for weight in weights:
        parts, rows, shards = 1, weight.rows, layout.sharing(setup)
        if weight.experts:
            parts, shards = layout.tensor * layout.expert, shards // layout.expert
            rows //= parts
        elif weight.is_matrix:
            parts = layout.tensor
        elements = weight.elements // parts
        found.append(replace(weight, elements=elements, rows=min(rows, elements), shards=shards))
    return found


def estimate_memory(layout: Layout, size: ModelSize, setup: Setup, model: Transformer | None = None) -> Memory:
    """Return the memory of the process with the largest shards, of the stage that needs most.

    Exact for torch's strategies, except for temporary memory and activations. DeepSpeed's optimizer states are float32,
    and so are the copies of the weights that it updates, even of float32 weights.
    """
    found = []
    for stage in stages_of(size, layout, setup):
        memory = stage_memory(layout, stage.size, setup)
        memory.stage = stage.number
        if model is not None:
            memory.activations = kept_activations(model, layout, setup, stage)
            logits = model.tokens * model.vocabulary * max(4, setup.numbers.computed) if stage.is_last else 0
            repeated = block_activations(model, layout, setup) if model.checkpointing else 0
            memory.temporary += max(logits, repeated)
        found.append(memory)
    return max(found, key=lambda memory: memory.total)


def stage_memory(layout: Layout, size: ModelSize, setup: Setup) -> Memory:
    """Return the memory of a stage, when all gradients are allocated."""
    trainable = [weight for weight in size.weights if weight.trainable]
    optimized = [weight for weight in trainable if weight.optimized]
    updated = _elements(optimized, layout, setup, 1)
    full, gradients = _elements(size.weights, layout, setup, 3), _elements(trainable, layout, setup, 2)
    if layout.master_weights:  # the optimizer has one flat tensor
        number, of_state, tensors = min(setup.numbers.computed, 4), 4, min(len(optimized), 1)
        master, temporary = 4 * updated, _zero_temporary(layout, size, setup, updated)
        # The optimizer's step on the host reads the gradients there, in float32.
        offloaded, on_host = "master_weights", master + 4 * updated
    else:
        number, of_state, tensors = setup.numbers.stored, setup.numbers.stored, len(optimized)
        master, temporary = 0, _torch_temporary(layout, size, setup, trainable)
        offloaded, on_host = "gradients", number * gradients
    memory = Memory(
        weights=number * full + size.buffers,
        gradients=number * gradients,
        master_weights=master,
        optimizer=round(of_state * size.states.per_element * updated) + size.states.per_tensor * tensors,
        temporary=temporary,
    )
    if layout.offload_optimizer:
        memory.offloaded += [offloaded, "optimizer"]
        memory.host += memory.optimizer + on_host
    if layout.offload_weights:
        memory.offloaded.append("weights")
        memory.host += memory.weights - size.buffers
        memory.temporary += size.buffers
    return memory


def _elements(weights: Iterable[Weight], layout: Layout, setup: Setup, sharded_from: int) -> int:
    """Return the elements of these weights on one process, padded, if they are sharded from this stage on."""
    if layout.stage < sharded_from:
        return elements_of(weights)
    if layout.master_weights:
        # DeepSpeed flattens the parameters and shards the flat buffer.
        return math.ceil(elements_of(weights) / layout.sharing(setup))
    return sum(shard_of(weight) for weight in weights)


def shard_of(weight: Weight) -> int:
    """Return the elements of the largest shard of a weight."""
    return math.ceil(weight.rows / weight.shards) * (weight.elements // max(weight.rows, 1))


def _torch_temporary(layout: Layout, size: ModelSize, setup: Setup, trainable: list[Weight]) -> int:
    numbers, full = setup.numbers, elements_of(size.weights)
    if layout.stage < 3:
        # Autocast's copies of the weights, which live until the end of the backward.
        return numbers.computed * full if numbers.computed != numbers.stored else 0
    # The current block, the next block (prefetched), and the gradient of the previous block.
    blocks = [elements_of(block) for block in size.blocks]
    in_use = 3 * max(blocks, default=0) - sum(blocks) + (full if blocks else 0)
    padding = (sum(shard_of(one) * one.shards - one.elements for one in block) for block in size.blocks)
    gathered = numbers.computed * ((full if layout.keep_gathered else min(full, in_use)) + max(padding, default=0))
    # FSDP keeps full gradients until the last micro-batch.
    waiting = sum(weight.elements for weight in trainable if weight.shards > 1)
    return gathered + (max(numbers.stored, 4) * waiting if setup.window > 1 and not layout.reduce_each else 0)


def _zero_temporary(layout: Layout, size: ModelSize, setup: Setup, updated: int) -> int:
    """Return the temporary bytes of ZeRO, whose step reads the gradients of its shard in float32."""
    number = min(setup.numbers.computed, 4)
    bucket, in_step = number * setup.bucket, 0 if layout.offload_optimizer else 4 * updated
    if layout.stage < 3:
        return max(in_step, bucket)
    small = sum(weight.elements for weight in size.weights if weight.elements <= PERSISTENT)
    block = max((elements_of(block) for block in size.blocks), default=0)
    return number * (small + 2 * block) + bucket + min(in_step, 4 * SUB_GROUP)


# -- activations -------------------------------------------------------------------------------------------------------


def kept_activations(model: Transformer, layout: Layout, setup: Setup, stage: Stage) -> int:
    """Estimate the bytes that the forwards of all micro-batches in flight keep for their backwards."""
    computed, in_flight = setup.numbers.computed, min(setup.window, layout.pipeline - stage.number)
    inputs = model.tokens // layout.context * model.hidden * computed
    of_block = inputs if model.checkpointing else block_activations(model, layout, setup)
    # The last norm's input and output, and the logarithms of the probabilities, in float32; others: the message sent.
    head = model.tokens * (model.hidden * (setup.norm_bytes + computed) + model.vocabulary * max(4, computed))
    return in_flight * (len(stage.size.blocks) * of_block + (head if stage.is_last else inputs))


def block_activations(model: Transformer, layout: Layout, setup: Setup) -> int:
    """Estimate the bytes that a block keeps: the inputs of layers, of norms, of the attention and of the MLP."""
    queries, keys = model.heads * model.head_dim, exchanged_keys(model, layout) * model.head_dim
    # Queries, keys, values, and the attention's output.
    attention, mask = 2 * queries + 2 * keys, 0
    if layout.context > 1 and by_heads(model, layout):
        attention += queries  # the output, in the arrangement before the exchange too
    elif layout.context > 1:
        # The keys and values of all tokens; a mask, since torch's causal attention expects full sequences.
        attention, mask = 2 * queries + 2 * layout.context * keys, model.sequence // model.batch
    mlp = (4 if model.gated else 2) * (model.experts_per_token * model.intermediate + model.shared)
    if model.experts:
        # The experts' inputs and outputs, for each expert of a token; from other processes they return.
        mlp += (3 if layout.tensor * layout.expert > 1 else 2) * model.experts_per_token * model.hidden
    of_token = setup.numbers.computed * (2 * model.hidden + (attention + mlp) // layout.tensor + mask)
    of_token += 2 * model.hidden * (setup.norm_bytes + model.dropout)  # the masks of dropout are bytes
    return model.tokens // layout.context * of_token


def by_heads(model: Transformer, layout: Layout) -> bool:
    """Return True if context parallelism exchanges heads, and False if it gathers keys."""
    return not layout.keys and model.heads // layout.tensor % layout.context == 0


def exchanged_keys(model: Transformer, layout: Layout) -> int:
    """Return the heads of keys that are exchanged, on all tensor processes: repeated where they cannot be split."""
    repeated = by_heads(model, layout) and model.kv_heads // layout.tensor % layout.context
    return model.heads if repeated else model.kv_heads
