"""Compute the bytes that a process sends in a step of a layout, without running it.

docs/planning.md derives the formulas, and tests/strategies/test_parallel_cost.py compares them with real steps.
Messages of a few bytes are left out: headers, norms, numbers of tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from trainer.model.memory import Layout, Setup, Stage, Transformer, by_heads, exchanged_keys, shard_of


@dataclass(frozen=True)
class Collective:
    """Equal collectives of one process in one step."""

    along: str
    """The dimension of the mesh: shards, replicas, experts, tensor, context or stages."""
    kind: str
    """all_gather, reduce_scatter, all_reduce, all_to_all or send."""
    count: int
    bytes: int
    """Bytes of the full tensor: the output of all_gather, the input of the others."""
    processes: int

    @property
    def sent(self) -> float:
        """Bytes that a process sends in all, by the algorithms that send least (rings)."""
        share = {"all_reduce": 2 - 2 / self.processes, "send": 1.0}.get(self.kind, 1 - 1 / self.processes)
        return self.count * self.bytes * share


def collectives(model: Transformer, layout: Layout, setup: Setup, stage: Stage) -> list[Collective]:
    """Return the collectives and messages of a process of a stage in one step."""
    parts = (_sharding, _experts, _tensor, _context, _pipeline)
    found = (one for part in parts for one in part(model, layout, setup, stage))
    return [one for one in found if one.count and one.bytes and one.processes > 1]


def _sharding(model: Transformer, layout: Layout, setup: Setup, stage: Stage) -> Iterator[Collective]:
    size, sharing = stage.size, layout.sharing(setup)
    reduced = setup.window if layout.reduce_each else 1
    around = [*size.before, *size.after]
    for weights in [*size.blocks, around]:
        # A block is gathered before its forward and before its backward, and so are its experts if they are split; the
        # weights around the blocks stay in between, and a stage of a pipeline keeps everything for the window.
        gathers = 1 if layout.pipeline > 1 else setup.window * (1 if weights is around else 2)
        # Split experts are gathered separately.
        split = [weight for weight in weights if weight.experts and layout.tensor * layout.expert > 1]
        for unit in (split, [weight for weight in weights if weight not in split]):
            shards = sharing // layout.expert if unit is split else sharing
            elements = sum(shard_of(weight) for weight in unit) * shards
            gradients = max(4, setup.numbers.stored) * elements
            yield Collective("shards", "all_gather", gathers, setup.numbers.computed * elements, shards)
            yield Collective("shards", "reduce_scatter", reduced, gradients, shards)
            replicas = layout.all_readers(setup) * layout.context // sharing
            yield Collective("replicas", "all_reduce", reduced, gradients // shards, replicas)


def _experts(model: Transformer, layout: Layout, setup: Setup, stage: Stage) -> Iterator[Collective]:
    """Yield the collectives that take tokens to their experts and back, if the router sends as many to each."""
    forwards, of_blocks = 2 if model.checkpointing else 1, len(stage.size.blocks) * setup.window
    rows = model.tokens // layout.context * model.experts_per_token // layout.tensor
    # The expert of each token: integers of 8 bytes.
    yield Collective("experts", "all_to_all", forwards * of_blocks, 8 * rows, layout.expert)
    hidden = setup.numbers.computed * rows * model.hidden
    yield Collective("experts", "all_to_all", 2 * (forwards + 1) * of_blocks, hidden, layout.expert)


def _tensor(model: Transformer, layout: Layout, setup: Setup, stage: Stage) -> Iterator[Collective]:
    window, number, parts = setup.window, setup.numbers.computed, layout.tensor
    hidden, of_blocks = number * model.tokens * model.hidden, len(stage.size.blocks) * window
    # Forward: sums after attention and MLP; recomputation needs all of these but the last. Backward: sums of the
    # gradients of the inputs of q, k and v, and of gate and up. A mixture may have an MLP for all tokens besides.
    sums = 3 if model.experts and model.shared else 2
    of_block = 2 * sums + (sums - 1) * int(model.checkpointing)
    yield Collective("tensor", "all_reduce", of_block * of_blocks, hidden // layout.context, parts)
    if model.experts:
        # The gradients of the weights that the router gives to a token's experts.
        weights = setup.numbers.stored * model.tokens // layout.context * model.experts_per_token
        yield Collective("tensor", "all_reduce", of_blocks, weights, parts)
    # The sum of the embedding, and of the gradients of the head's input; the logits are gathered.
    yield Collective("tensor", "all_reduce", ((stage.number == 0) + stage.is_last) * window, hidden, parts)
    logits = number * model.tokens * model.vocabulary
    yield Collective("tensor", "all_gather", stage.is_last * window, logits, parts)


def _context(model: Transformer, layout: Layout, setup: Setup, stage: Stage) -> Iterator[Collective]:
    parts, forwards = layout.context, 2 if model.checkpointing else 1
    number = setup.numbers.computed * model.tokens * model.head_dim // layout.tensor
    keys, of_blocks = number * exchanged_keys(model, layout), len(stage.size.blocks) * setup.window
    if by_heads(model, layout):
        # Queries and the attention's output; keys and values.
        for size in (number * model.heads, keys):
            yield Collective("context", "all_to_all", 2 * (forwards + 1) * of_blocks, size // parts, parts)
    else:
        yield Collective("context", "all_gather", 2 * forwards * of_blocks, keys, parts)
        yield Collective("context", "reduce_scatter", 2 * of_blocks, keys, parts)
    # The last block's output is joined, and so is the gradient of the first block's input.
    hidden = setup.numbers.computed * model.tokens * model.hidden
    yield Collective("context", "all_gather", ((stage.number == 0) + stage.is_last) * setup.window, hidden, parts)


def _pipeline(model: Transformer, layout: Layout, setup: Setup, stage: Stage) -> Iterator[Collective]:
    # Outputs to the next stage, and gradients to the one before.
    messages = ((not stage.is_last) + (stage.number > 0)) * setup.window
    hidden = setup.numbers.computed * model.tokens // layout.context * model.hidden
    yield Collective("stages", "send", messages, hidden, layout.pipeline)
    if layout.pipeline > 1 and (stage.number == 0 or stage.is_last):
        tied = sum(-(-weight.elements // (layout.tensor * layout.sharing(setup))) for weight in stage.size.tied)
        yield Collective("stages", "all_reduce", 1, setup.numbers.stored * tied, 2)


def reach(layout: Layout, setup: Setup, along: str) -> int:
    """Return the number of neighbouring ranks that hold all processes along a dimension of the mesh."""
    sizes = {
        "tensor": layout.tensor,
        "experts": layout.tensor * layout.expert,
        "context": layout.tensor * layout.context,
        "shards": layout.tensor * layout.sharing(setup),
        "replicas": layout.tensor * layout.context * layout.all_readers(setup),
    }
    return sizes.get(along, setup.processes)
