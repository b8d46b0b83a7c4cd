"""Compute what a layout of a transformer over processes costs: memory, collectives, and time, without running it.

docs/planning.md derives the formulas, and tests/strategies/test_parallel_cost.py compares them with real steps.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from trainer.model.memory import DtypeSizes
from trainer.model.pipeline_stages import cut_blocks

REDUCED = 4
"""Bytes of a number in the sums of gradients: they are float32."""
HEADER = 80
"""Bytes of the message that says the shape of the next one between stages."""


@dataclass(frozen=True)
class Architecture:
    """Sizes of a decoder: an embedding, equal blocks of attention and an MLP with norms, a norm, and a head."""

    layers: int
    hidden: int
    heads: int
    vocabulary: int
    kv_heads: int
    head_dim: int
    intermediate: int
    gated: bool = True
    """True: the MLP has three layers (gate, up, down), else two."""
    tied: bool = False
    """True if the head has the weights of the embedding."""
    experts: int = 1
    experts_per_token: int = 1
    shared: int = 0
    """Width of the experts of a mixture that compute every token, all together."""

    @property
    def attention(self) -> int:
        """Elements of a block's attention."""
        return 2 * self.hidden * self.head_dim * (self.heads + self.kv_heads)

    @property
    def mlp(self) -> int:
        """Elements of one expert, or of the MLP."""
        return (3 if self.gated else 2) * self.hidden * self.intermediate

    @property
    def shared_mlp(self) -> int:
        """Elements of the experts that compute every token."""
        return (3 if self.gated else 2) * self.hidden * self.shared

    @property
    def linear_layers(self) -> list[tuple[int, int]]:
        """Rows and columns of the weights of a block's linear layers; experts are no such layers."""
        queries, keys, up = self.heads * self.head_dim, self.kv_heads * self.head_dim, 2 if self.gated else 1
        widths = [width for width in (self.intermediate if self.experts == 1 else 0, self.shared) if width]
        mlp = [size for width in widths for size in ([(width, self.hidden)] * up + [(self.hidden, width)])]
        router = [(self.experts, self.hidden)] if self.experts > 1 else []
        return [(queries, self.hidden), *[(keys, self.hidden)] * 2, (self.hidden, queries), *mlp, *router]

    @property
    def sharded(self) -> int:
        """Elements of a block in layers that tensor parallelism splits."""
        return self.attention + self.experts * self.mlp + self.shared_mlp

    @property
    def full(self) -> int:
        """Elements of a block that tensor parallelism does not split."""
        return self.norms + self.router

    @property
    def norms(self) -> int:
        """Elements of a block's two norms."""
        return 2 * self.hidden

    @property
    def router(self) -> int:
        """Elements of a block's router, which has a row for each expert."""
        return self.experts * self.hidden if self.experts > 1 else 0

    @property
    def active(self) -> int:
        """Elements of a block with which a token is multiplied."""
        return self.attention + self.experts_per_token * self.mlp + self.shared_mlp

    @property
    def table(self) -> int:
        """Elements of the embedding, and of the head."""
        return self.vocabulary * self.hidden

    @property
    def parameters(self) -> int:
        """Elements of the model."""
        return self.layers * (self.sharded + self.full) + self.table * (1 if self.tied else 2) + self.hidden


@dataclass(frozen=True)
class Layout:
    """Numbers of processes along each dimension of the mesh; the product of all but `expert` is all processes."""

    shards: int = 1
    """Readers over which weights are sharded."""
    replicas: int = 1
    """Groups of readers with replicated shards: more than one with HYBRID_SHARD."""
    context: int = 1
    tensor: int = 1
    pipeline: int = 1
    expert: int = 1
    """Processes over which the experts of a mixture are split, out of those over which weights are sharded."""

    @property
    def readers(self) -> int:
        """Models that read different samples."""
        return self.shards * self.replicas

    @property
    def sharing(self) -> int:
        """Processes over which FSDP shards a weight: readers, and the parts of their sequences."""
        return self.shards * self.context

    @property
    def processes(self) -> int:
        """All processes."""
        return self.readers * self.context * self.tensor * self.pipeline


@dataclass(frozen=True)
class Work:
    """One step of a reader, and how it is computed."""

    sequence: int
    micro_batch: int
    """Samples of a micro-batch."""
    window: int
    """Micro-batches of a step."""
    numbers: DtypeSizes
    checkpointing: bool = False
    accumulate_unsharded: bool = True
    keys: bool = False
    """True: context parallelism gathers keys, also where heads could be exchanged."""
    clips: bool = True
    """True if gradients are clipped by their norm."""
    states: float = 2
    """Numbers of the optimizer's state for each parameter."""
    gathers_in_8_bits: bool = False
    """True if FSDP gathers the weights of linear layers in 8 bits, where it alone makes equal shards of them."""
    norms_stored: bool = True
    """True if norms read numbers as they are stored: autocast runs them in float32 on GPUs, and on CPUs it does not."""

    @property
    def tokens(self) -> int:
        """Tokens of a micro-batch."""
        return self.sequence * self.micro_batch


@dataclass(frozen=True)
class Stage:
    """A part of a pipeline; the full model without one."""

    number: int
    blocks: int
    first: bool
    last: bool


@dataclass(frozen=True)
class Collective:
    """Equal collectives of one process in one step."""

    along: str
    """The dimension of the mesh: shards, replicas, experts, tensor, context, stages; or norm, for clipping."""
    kind: str
    """all_gather, reduce_scatter, all_reduce, all_to_all or send."""
    count: int
    bytes: int
    """Bytes of the full tensor: the output of all_gather, the input of the others."""
    processes: int

    @property
    def sent(self) -> float:
        """Bytes that a process sends in all, by the algorithms that send least (rings)."""
        share = {"all_reduce": 2.0, "send": 1.0}.get(self.kind, 1.0)
        return self.count * self.bytes * share * (1 if self.kind == "send" else 1 - 1 / self.processes)


@dataclass(frozen=True)
class ProcessMemory:
    """Bytes on one process."""

    parameters: int
    gradients: int
    optimizer: int
    activations: int
    """Kept for the backwards of all micro-batches in flight."""
    temporary: int
    """The larger one of the loss's logits, and of the block whose forward is repeated by activation checkpointing."""
    gathered: int
    """Full weights of the blocks in use, and full gradients that wait for the end of a window."""

    @property
    def total(self) -> int:
        """All of them."""
        states = self.parameters + self.gradients + self.optimizer
        return states + self.activations + self.temporary + self.gathered


# -- which stage has what ----------------------------------------------------------------------------------------------


def stages_of(model: Architecture, stages: int) -> list[Stage]:
    """Return the stages, of which the largest has as few parameters as possible, as `FSDPStrategy` makes them."""
    sizes = [model.sharded + model.full] * model.layers
    sizes[0] += model.table
    sizes[-1] += model.hidden + model.table
    ends = cut_blocks(sizes, stages)
    return [
        Stage(number, end - start, number == 0, number == stages - 1)
        for number, (start, end) in enumerate(zip([0, *ends], ends, strict=False))
    ]


@dataclass(frozen=True)
class _Unit:
    """Equal groups of parameters, each of which FSDP gathers together."""

    count: int
    elements: int
    """Elements of a group on a process while it is gathered."""
    shard: int
    """Elements of the largest shard of a group."""
    sharing: int
    """Processes over which a group is sharded."""
    is_around: bool = False
    """True for the parameters in no block."""
    in_8_bits: tuple[int, ...] = ()
    """Elements of the weights that can be gathered in 8 bits."""

    @property
    def padding(self) -> int:
        """Elements that are sent and are no parameters, so that all shards are equal."""
        return self.shard * self.sharing - self.elements


def _units(model: Architecture, layout: Layout, stage: Stage) -> list[_Unit]:
    """Return the blocks of a stage, their experts if these are split, and what is around the blocks."""
    sharing, mlp = layout.sharing, model.mlp if model.experts == 1 else 0
    others = (model.attention + mlp + model.shared_mlp) // layout.tensor + model.norms
    # The router has a row for each expert.
    block, shard = (
        others + model.router,
        -(-others // sharing) + -(-model.experts // sharing) * model.router // model.experts,
    )
    experts = []
    if model.experts > 1:
        # An expert is a row of its parameters, and FSDP shards rows.
        parts, own = layout.tensor * layout.expert, -(-model.experts // (layout.tensor * sharing)) * model.mlp
        of_process = model.experts * model.mlp // parts
        if parts > 1:
            experts = [_Unit(stage.blocks, of_process, own, sharing // layout.expert)]
        else:
            block, shard = block + of_process, shard + own
    tables = int(stage.first) + int(stage.last and not (model.tied and stage.first))
    around = tables * model.table // layout.tensor + (model.hidden if stage.last else 0)
    head = [(model.vocabulary, model.hidden)] if stage.last and not model.tied else []
    of_around, of_block = _in_8_bits(head, layout), _in_8_bits(model.linear_layers, layout)
    rest = [_Unit(1, around, -(-around // sharing), sharing, True, of_around)] if around else []
    return [_Unit(stage.blocks, block, shard, sharing, in_8_bits=of_block), *experts, *rest]


def _in_8_bits(layers: Sequence[tuple[int, int]], layout: Layout) -> tuple[int, ...]:
    """Return the elements of those layers that compute in 8 bits, and whose rows FSDP alone shards evenly."""
    fitting = [rows * columns for rows, columns in layers if not (rows % 16 or columns % 16 or rows % layout.sharing)]
    return tuple(fitting) if layout.tensor == 1 else ()


# -- memory ------------------------------------------------------------------------------------------------------------


def process_memory(model: Architecture, layout: Layout, work: Work, stage: Stage) -> ProcessMemory:
    """Return the memory of a process of a stage at the peak of a step; of padding only that of experts is in it."""
    units = _units(model, layout, stage)
    numbers, own = work.numbers, sum(unit.count * unit.shard for unit in units)
    # FSDP2 computes with a copy also where one process has the full weights.
    is_gathered = layout.processes > 1 or numbers.computed != numbers.stored
    together = stage.blocks if layout.pipeline > 1 else min(stage.blocks, 3)
    # The padding is only in the message that is received.
    gathered = sum(unit.elements * min(unit.count, together) + unit.padding for unit in units)
    waits = work.window > 1 and work.accumulate_unsharded
    gradients = sum(unit.count * unit.elements for unit in units if unit.sharing > 1) if waits else 0
    return ProcessMemory(
        parameters=numbers.stored * own,
        gradients=numbers.stored * own,
        optimizer=round(numbers.stored * work.states * own),
        activations=_stored_activations(model, layout, work, stage),
        temporary=max(
            _block_activations(model, layout, work) if work.checkpointing else 0,
            work.tokens * model.vocabulary * (numbers.computed + 4 * _is_mixed(work)) if stage.last else 0,
        ),
        gathered=numbers.computed * gathered * int(is_gathered) + max(numbers.stored, 4) * gradients,
    )


def _stored_activations(model: Architecture, layout: Layout, work: Work, stage: Stage) -> int:
    """Return the bytes that the forwards of all micro-batches in flight keep for their backwards."""
    computed = work.numbers.computed
    in_flight = min(work.window, layout.pipeline - stage.number)
    hidden = work.tokens // layout.context * model.hidden
    blocks = stage.blocks * (hidden * computed if work.checkpointing else _block_activations(model, layout, work))
    sent = 0 if stage.last else hidden * computed
    # The last norm's input and output, and the logarithms of the probabilities, which autocast computes in float32.
    logarithms = model.vocabulary * (4 if _is_mixed(work) else computed)
    head = work.tokens * (model.hidden * (_norm_bytes(work) + computed) + logarithms) if stage.last else 0
    return in_flight * (blocks + head + sent)


def _block_activations(model: Architecture, layout: Layout, work: Work) -> int:
    """Return the bytes that a block keeps: the inputs of layers, of norms, of the attention and of the MLP."""
    numbers, queries = work.numbers, model.heads * model.head_dim
    keys, mask = _exchanged_keys(model, layout, work) * model.head_dim, 0
    # Queries, keys, values, and the attention's output.
    attention = 2 * queries + 2 * keys
    if layout.context > 1 and _by_heads(model, layout, work):
        attention += queries  # the output, in the arrangement before the exchange too
    elif layout.context > 1:
        # The keys and values of all tokens; a mask, since torch's causal attention is that of full sequences.
        attention, mask = 2 * queries + 2 * layout.context * keys, work.sequence // work.micro_batch
    mlp = (4 if model.gated else 2) * (model.experts_per_token * model.intermediate + model.shared)
    if model.experts > 1:
        # What the experts read and compute, for each one of a token; from other processes it returns.
        several = 3 if layout.tensor * layout.expert > 1 else 2
        mlp += several * model.experts_per_token * model.hidden
    sharded = (attention + mlp) // layout.tensor
    of_token = numbers.computed * (2 * model.hidden + sharded + mask) + _norm_bytes(work) * 2 * model.hidden
    return work.tokens // layout.context * of_token


def _is_mixed(work: Work) -> bool:
    return work.numbers.computed < work.numbers.stored


def _norm_bytes(work: Work) -> int:
    """Return the bytes of a number that a norm reads, and keeps."""
    return work.numbers.stored if work.norms_stored else work.numbers.computed


# -- collectives -------------------------------------------------------------------------------------------------------


def collectives(model: Architecture, layout: Layout, work: Work, stage: Stage) -> list[Collective]:
    """Return the collectives and messages of a process of a stage in one step."""
    found = [
        *_sharding_collectives(model, layout, work, stage),
        *_expert_collectives(model, layout, work, stage),
        *_tensor_collectives(model, layout, work, stage),
        *_context_collectives(model, layout, work, stage),
        *_pipeline_collectives(model, layout, work, stage),
        *_norm_collectives(layout, work),
    ]
    return [one for one in found if one.count and one.processes > 1]


def _sharding_collectives(model: Architecture, layout: Layout, work: Work, stage: Stage) -> Iterator[Collective]:
    window = work.window
    reduced = 1 if work.accumulate_unsharded else window
    # A block is gathered before its forward and before its backward, and so are its experts if they are split; what is
    # around the blocks stays in between, and a stage of a pipeline keeps everything for the window.
    of_block, of_others = (1, 1) if layout.pipeline > 1 else (2 * window, window)
    for unit in _units(model, layout, stage):
        gathers = unit.count * (of_others if unit.is_around else of_block)
        elements = unit.elements + unit.padding
        in_8_bits = unit.in_8_bits if work.gathers_in_8_bits else ()
        gathered = work.numbers.computed * (elements - sum(in_8_bits)) + sum(in_8_bits)
        yield Collective("shards", "all_gather", gathers, gathered, unit.sharing)
        # The largest element of each, for the scales.
        scales = work.numbers.computed * len(in_8_bits)
        yield Collective("shards", "all_reduce", gathers * int(scales > 0), scales, unit.sharing)
        gradients = max(REDUCED, work.numbers.stored) * elements
        yield Collective("shards", "reduce_scatter", unit.count * reduced, gradients, unit.sharing)
        sharded = gradients // unit.sharing
        yield Collective("replicas", "all_reduce", unit.count * reduced, sharded, layout.replicas)


def _expert_collectives(model: Architecture, layout: Layout, work: Work, stage: Stage) -> Iterator[Collective]:
    """Yield the collectives that take tokens to their experts and back, if the router sends as many to each."""
    parts, forwards = layout.expert, 2 if work.checkpointing else 1
    of_blocks = stage.blocks * work.window
    rows = work.tokens // layout.context * model.experts_per_token // layout.tensor
    # How many come, and for which experts: integers of 8 bytes.
    yield Collective("experts", "all_to_all", forwards * of_blocks, 8 * parts, parts)
    yield Collective("experts", "all_to_all", forwards * of_blocks, 8 * rows, parts)
    hidden = work.numbers.computed * rows * model.hidden
    yield Collective("experts", "all_to_all", 2 * (forwards + 1) * of_blocks, hidden, parts)


def _tensor_collectives(model: Architecture, layout: Layout, work: Work, stage: Stage) -> Iterator[Collective]:
    window, number, parts = work.window, work.numbers.computed, layout.tensor
    hidden = number * work.tokens * model.hidden
    # Forward: sums after attention and MLP, of which recomputation needs all but the last; backward: sums of the
    # gradients of what q, k and v, and gate and up, have read. A mixture may have an MLP for all tokens besides.
    sums = 3 if model.experts > 1 and model.shared else 2
    of_block = 2 * sums + (sums - 1) * int(work.checkpointing)
    yield Collective("tensor", "all_reduce", of_block * stage.blocks * window, hidden // layout.context, parts)
    if model.experts > 1:
        # The gradients of the weights that the router gives to a token's experts.
        weights = work.numbers.stored * work.tokens // layout.context * model.experts_per_token
        yield Collective("tensor", "all_reduce", stage.blocks * window, weights, parts)
    # The embedding's sum, and that of the gradients of what the head has read; the logits are gathered.
    yield Collective("tensor", "all_reduce", (int(stage.first) + int(stage.last)) * window, hidden, parts)
    logits = number * work.tokens * model.vocabulary
    yield Collective("tensor", "all_gather", int(stage.last) * window, logits, parts)


def _context_collectives(model: Architecture, layout: Layout, work: Work, stage: Stage) -> Iterator[Collective]:
    parts, forwards = layout.context, 2 if work.checkpointing else 1
    number = work.numbers.computed * work.tokens * model.head_dim // layout.tensor
    of_blocks = stage.blocks * work.window
    keys = number * _exchanged_keys(model, layout, work)
    if _by_heads(model, layout, work):
        # Queries and the attention's output; keys and values.
        for size in (number * model.heads, keys):
            yield Collective("context", "all_to_all", 2 * (forwards + 1) * of_blocks, size // parts, parts)
    else:
        yield Collective("context", "all_gather", 2 * forwards * of_blocks, keys, parts)
        yield Collective("context", "reduce_scatter", 2 * of_blocks, keys, parts)
    # The last block's output is joined, and so is the gradient of the first block's input.
    hidden = work.numbers.computed * work.tokens * model.hidden
    yield Collective("context", "all_gather", (int(stage.first) + int(stage.last)) * work.window, hidden, parts)


def _by_heads(model: Architecture, layout: Layout, work: Work) -> bool:
    return not work.keys and model.heads // layout.tensor % layout.context == 0


def _exchanged_keys(model: Architecture, layout: Layout, work: Work) -> int:
    """Return the heads of keys that are exchanged, on all tensor processes: repeated where they cannot be split."""
    repeated = _by_heads(model, layout, work) and model.kv_heads // layout.tensor % layout.context
    return model.heads if repeated else model.kv_heads


def _pipeline_collectives(model: Architecture, layout: Layout, work: Work, stage: Stage) -> Iterator[Collective]:
    # Outputs to the next stage, each after a header, and gradients to the one before.
    forwards, backwards = int(not stage.last) * work.window, int(not stage.first) * work.window
    hidden = work.numbers.computed * work.tokens // layout.context * model.hidden
    yield Collective("stages", "send", forwards, HEADER, layout.pipeline)
    yield Collective("stages", "send", forwards + backwards, hidden, layout.pipeline)
    if model.tied and layout.pipeline > 1 and (stage.first or stage.last):
        table = work.numbers.stored * -(-model.table // (layout.tensor * layout.sharing))
        yield Collective("stages", "all_reduce", 1, table, 2)


def _norm_collectives(layout: Layout, work: Work) -> Iterator[Collective]:
    """Yield the sums of squared norms, one for weights that are split in the same way: by rows, by columns, or not."""
    by_plan = 2 if layout.tensor > 1 else 0
    experts = int(layout.expert > 1)
    for count, processes in (
        (by_plan + 1, layout.sharing),
        (by_plan + experts, layout.tensor),
        (1, layout.pipeline),
        (experts, layout.sharing // layout.expert),
        (experts, layout.expert),
    ):
        yield Collective("norm", "all_reduce", count * int(work.clips), work.numbers.stored, processes)


# -- computing ---------------------------------------------------------------------------------------------------------


def step_flops(model: Architecture, layout: Layout, work: Work, stage: Stage) -> float:
    """Return the floating-point operations of a process in one step: a forward and twice as much for the backward.

    What is around the blocks is computed by each process of a sequence; causal attention needs half of the scores.
    """
    of_token = 2 * model.active + 2 * work.sequence * model.heads * model.head_dim
    blocks = stage.blocks * of_token * (4 if work.checkpointing else 3) / layout.context
    head = 6 * model.table if stage.last else 0
    return work.tokens * work.window * (blocks + head) / layout.tensor
