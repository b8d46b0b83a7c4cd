"""Context parallelism: the blocks of a module compute parts of sequences, everything around them full sequences."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from trainer.data.transfer import map_leaves
from trainer.errors import ConfigError
from trainer.model.blocks import class_of, without_caches
from trainer.model.gradients import takes_gradient
from trainer.model.reachable import nodes_behind, tensors_in
from trainer.strategies.parallel.refusals import without_graph
from trainer.strategies.parallel.verify import Inputs, Results, Verification, compare, results_of, tensors_left

AttentionExchange = Literal["auto", "heads", "keys"]
"""The exchange of one sequence's processes for attention: "heads": an all-to-all gives each process all tokens of a
part of the heads (Ulysses, https://arxiv.org/abs/2309.14509); "keys": each process gathers all keys and values; "auto":
the first where the number of heads is a multiple of the processes."""


class ContextParallel:
    """Splits sequences over the processes of a group from the first block to the last.

    The first block's input, and what belongs to tokens among the arguments of blocks, is cut; the last block's output
    is gathered. Embeddings, positions, masks, labels and the loss are replicated, so that a `training_step`
    for one device stays right. The first forward of each block is compared with one of full sequences. In it the output
    of every block is gathered: where the next block gets another tensor than that, sequences stay full in between.

    Args:
        blocks: all blocks by name, in the order of their calls.
        here: the names of those that this process computes; others are on other stages of a pipeline.
        group: the processes of one sequence.
        exchange: how attention reaches the tokens of the others.
        verification: of the model.
    """

    def __init__(
        self,
        blocks: Mapping[str, nn.Module],
        here: Mapping[str, nn.Module],
        group: dist.ProcessGroup,
        exchange: AttentionExchange,
        verification: Verification,
    ) -> None:
        self.group, self.parts, self.part = group, dist.get_world_size(group), dist.get_rank(group)
        self.batch = self.length = 0
        """Sizes of the full sequences of the forward in progress."""
        self._unsplit = {name: block.forward for name, block in here.items()}
        """The forwards for full sequences."""
        self._verification = verification
        self._is_split = False
        """True between the first block and the last one: there are parts of sequences."""
        self._given: tuple[str, int, int] | None = None
        """The name of a block before, and the address and version of its output, if that was gathered."""
        self._follows: dict[tuple[str, bool], bool] = {}
        """True, by block and whether it trains, if only the next block gets its output, which then is not gathered."""
        self._token_dims: dict[tuple[str, int, tuple[bool, ...]], int | None] = {}
        """The dimension of tokens, if any, by block, number of the argument and which of its dimensions are of size 1.

        As in the first forward that was compared: in a later one other dimensions may have the sequence's length."""
        self._outputs: list[_Output] = []
        """The gathered outputs of the step in progress."""
        self._sent: torch.Tensor | None = None
        """The tensor that this stage of a pipeline sends in the step in progress."""
        names, own = [*blocks], [*here]
        self._first, self._first_here, self._last = names[0], own[0], names[-1]
        blocks[self._first].register_forward_pre_hook(self._measure, with_kwargs=True)
        for name, block in here.items():
            block.forward = _WithAttention(SplitAttention(group, exchange), block.forward)
            block.register_forward_pre_hook(partial(self._cut, name), with_kwargs=True)
            block.register_forward_hook(partial(self._gather_output, name))
        if own[-1] != self._last:
            after = names[names.index(own[-1]) + 1]
            blocks[after].register_forward_pre_hook(self._cut_sent, with_kwargs=True)

    def begin(self) -> None:
        """Prepare for a step, after one that may have ended with an error."""
        self._is_split, self._given, self._sent = False, None, None
        self._outputs.clear()

    def end(self, outputs: Any) -> None:
        """End a step that has returned `outputs`: find what else than the next block has used the output of a block."""
        self.check_end()
        blocks = [one for one in self._outputs if self._follows.get(one.block)]
        self._outputs.clear()
        roots = [one.grad_fn for one in tensors_in((outputs, self._sent)) if one.grad_fn is not None]
        self._sent = None
        if blocks and roots:
            uses = Counter(before for node in nodes_behind(roots) for before, _ in node.next_functions)
            for one in blocks:
                self._follows[one.block] = uses[one.node] < 2
        elif blocks:  # without a graph only the last one may be in use
            self._follows[blocks[-1].block] = False

    def check_end(self) -> None:
        """Raise ConfigError if a forward has ended with parts of sequences, because it has skipped the last block."""
        if self._is_split:
            raise ConfigError(
                "context_parallel: a step has not called the last block, whose output is gathered, and has computed "
                "with parts of sequences after the blocks. Multiply what a block adds by 0 instead of skipping it."
            )

    def _measure(self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.check_end()
        hidden, _, _ = split_hidden(block, args, kwargs)
        self._measure_hidden(hidden)

    def _measure_hidden(self, hidden: torch.Tensor) -> None:
        if hidden.dim() < 3:
            raise ConfigError(
                f"context_parallel: the first block gets a tensor of {tuple(hidden.shape)}. Give the blocks tensors of "
                "(batch, length, features)."
            )
        self.batch, self.length = hidden.shape[:2]
        if self.length % self.parts or self.length < 2 * self.parts:
            raise ConfigError(
                f"context_parallel={self.parts} does not divide sequences of {self.length} tokens into parts of at "
                f"least 2. Pad the batches to a multiple of {self.parts}, in the collate_fn."
            )

    def _cut(self, name: str, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        """Return this process's part of a block's arguments; verify the block in its first call."""
        own, args, kwargs = split_hidden(block, without_caches(args), without_caches(kwargs))
        self._compare_given(own, block.training)
        receives_part = name == self._first_here and name != self._first  # from another stage
        if not (self._is_split or receives_part):
            if name != self._first:
                self._measure_hidden(own)
            own = Cut.apply(own, 1, self.group)
        self._is_split = True
        if self._verification.is_due("context_parallel", name, block, args, kwargs):
            self._verify(name, block, own, args, kwargs)
        own_args, own_kwargs = self._parts_of(name, args, kwargs)
        return (own, *own_args), own_kwargs

    def _cut_sent(self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        """Cut what a stage of a pipeline sends, in front of the first block after its own ones."""
        hidden, args, kwargs = split_hidden(block, args, kwargs)
        self._compare_given(hidden, block.training)
        self._sent = hidden if self._is_split else Cut.apply(hidden, 1, self.group)
        self._is_split = False
        return (self._sent, *args), kwargs

    def _gather_output(self, name: str, block: nn.Module, args: Any, output: Any) -> Any:
        """Return the full output of a block; None, for no change, if only the next block gets the output."""
        if name != self._last and self._follows.get((name, block.training)):
            return None
        joined, self._is_split = self._join(name, output), False
        if not torch.compiler.is_compiling():
            self._remember((name, block.training), joined)
        return joined

    def _remember(self, block: tuple[str, bool], joined: Any) -> None:
        """Remember what a block has returned, for the next one; find outputs that are in use somewhere else."""
        gathered = first_tensor(joined)
        self._given = (block[0], gathered.data_ptr(), gathered._version)
        # That of the block before is still in a variable.
        if any(one.tensor() is not None for one in self._outputs[:-1]):
            self._follows.update({one.block: False for one in self._outputs})
        if isinstance(joined, tuple) and any(isinstance(one, torch.Tensor) for one in joined[1:]):
            self._follows[block] = False  # the other outputs may be used between the blocks
        self._outputs.append(_Output(block, weakref.ref(gathered), gathered.grad_fn))

    def _compare_given(self, hidden: torch.Tensor, training: bool) -> None:
        """Remember whether the block before has returned this very tensor."""
        if self._given is not None and not self._is_split and not torch.compiler.is_compiling():
            name, *given = self._given
            follows = given == [hidden.data_ptr(), hidden._version]
            if self._follows.setdefault((name, training), follows) != follows:
                self._follows[name, training] = False

    def _parts_of(self, name: str, args: Any, kwargs: Any, guess: int = 0) -> tuple[Any, Any]:
        """Return this process's tokens of a block's arguments; masks of attention stay full.

        Args:
            guess: 1 for the second best, where the shape of an argument does not say whether it belongs to tokens.
        """
        number = 0

        def part_of(leaf: Any) -> Any:
            nonlocal number
            number += 1
            if not isinstance(leaf, torch.Tensor):
                return leaf
            place = name, number, tuple(size == 1 for size in leaf.shape)
            if guess or place not in self._token_dims:
                self._token_dims[place] = self._guesses(leaf)[guess]
            dim = self._token_dims[place]
            if dim is not None and leaf.shape[dim] * self.parts == self.length:
                raise ConfigError(
                    f"context_parallel: {name} gets an argument for the {leaf.shape[dim]} tokens of a part, computed "
                    "between two blocks. Compute what belongs to tokens, such as positions, before the first block."
                )
            if dim is None or leaf.shape[dim] != self.length:
                return Shared.apply(leaf, self.group) if leaf.requires_grad else leaf
            return Cut.apply(leaf, dim, self.group) if leaf.requires_grad else leaf.chunk(self.parts, dim)[self.part]

        own_args, own_kwargs = map_leaves((args, kwargs), part_of)
        return own_args, own_kwargs

    def _guesses(self, tensor: torch.Tensor) -> tuple[int | None, int | None]:
        """Return the best and the second best guess of the dimension of tokens; None for masks and others.

        A mask's last dimension is the keys, as many as tokens.
        """
        last = tensor.dim() - 1
        found = [dim for dim, size in enumerate(tensor.shape) if size == self.length]
        likely = [dim for dim in found if not (dim == 0 and last and tensor.shape[0] == self.batch)]
        if len(likely) == 1 and not (last > 1 and likely == [last]):
            return likely[0], None
        others = [dim for dim in found if dim < max(last, 1)]
        return None, (others[-1] if others else None)

    def _join(self, name: str, output: Any) -> Any:
        """Gather a block's output; of several, all that belong to tokens.

        Raises:
            ConfigError: one of the others is computed from this process's tokens, with a gradient.
        """
        if isinstance(output, torch.Tensor):
            return _Join.apply(output, 1, self.group)
        own = first_tensor(output).shape[:2]
        joined = [
            _Join.apply(one, 1, self.group) if isinstance(one, torch.Tensor) and one.shape[:2] == own else one
            for one in output
        ]
        if any(isinstance(one, torch.Tensor) and one.requires_grad and one.shape[:2] != own for one in output):
            raise ConfigError(
                f"context_parallel: {name} returns a second tensor with a gradient that is not (batch, length, ...): a "
                "loss computed from it would be of a part of the tokens. Return values of each token, and compute the "
                "loss outside of the blocks; or detach() what is only logged."
            )
        return type(output)(*joined) if hasattr(output, "_fields") else tuple(joined)

    def _verify(self, name: str, block: nn.Module, own: torch.Tensor, args: Any, kwargs: Any) -> None:
        """Compare what a block computes in parts of sequences with what it computes of full ones.

        Raises:
            ConfigError: they differ, because what the block computes from tokens depends on more than attention.
        """
        inputs = (gather(own, 1, self.group), *args), kwargs
        captured = tensors_left(block, [], tensors_in((own, args, kwargs)))
        if captured:
            raise ConfigError(
                f"context_parallel: {name} ({class_of(block).__name__}) reads a tensor with a gradient that was "
                f"computed outside of it, {next(iter(captured))}, and is none of its arguments: pass it as one."
            )

        def in_full(inputs: Inputs) -> Results:
            return results_of(block, inputs, self._unsplit[name], {})

        def in_parts(guess: int, inputs: Inputs) -> Results:
            def forward(hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
                own_args, own_kwargs = self._parts_of(name, args, kwargs, guess)
                return self._join(name, block.forward(Cut.apply(hidden, 1, self.group), *own_args, **own_kwargs))

            return results_of(block, inputs, forward, {})

        differences = []
        for guess in (0, 1):
            differences.append(compare(name, block, inputs, in_full, partial(in_parts, guess), self.group))
            if not differences[-1]:
                return
        raise ConfigError(
            f"context_parallel: {name} ({class_of(block).__name__}) does not compute the same for a part of a "
            f"sequence: {differences[0]}. Mix tokens by torch.nn.functional.scaled_dot_product_attention only (a "
            'Hugging Face model: attn_implementation="sdpa"; not nn.MultiheadAttention, convolutions or BatchNorm), '
            "give the blocks positions as arguments and nothing that each process keeps of its tokens, and use batches "
            "whose number of samples is not their number of tokens."
        )


class _Output(NamedTuple):
    """The gathered output of a block."""

    block: tuple[str, bool]
    """Its name, and whether it trains."""
    tensor: weakref.ref[torch.Tensor]
    node: Any
    """The node of autograd's graph that has computed it."""


def split_hidden(
    block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[torch.Tensor, tuple[Any, ...], dict[str, Any]]:
    """Return the first argument of a block, which the block before has returned, and the other ones.

    Raises:
        ConfigError: it is not a tensor of floating-point numbers.
    """
    rest = dict(kwargs)
    hidden = args[0] if args else rest.pop(next(iter(rest), ""), None)
    if not takes_gradient(hidden):
        given = getattr(hidden, "dtype", type(hidden).__name__)
        raise ConfigError(
            f"{class_of(block).__name__} gets {given} as its first argument. Give blocks that are split over processes "
            "the output of the block before first, a tensor (batch, length, features), and masks and others after it."
        )
    return hidden, args[1:], rest


def first_tensor(output: Any) -> torch.Tensor:
    """Return the output of a block, or the first one of several.

    Raises:
        ConfigError: it is not a tensor.
    """
    found = output[0] if isinstance(output, tuple) and output else output
    if not isinstance(found, torch.Tensor):
        raise ConfigError(
            f"a block returns a {type(output).__name__}. Return a tensor (batch, length, features), or a tuple that "
            "begins with one, from blocks that are split over processes."
        )
    return found


class _WithAttention:
    """The `forward` of a block whose attention is split; an object, so that a deep copy of the block has its own."""

    def __init__(self, attention: SplitAttention, forward: Callable[..., Any]) -> None:
        self.attention, self.forward = attention, forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self.attention:
            return self.forward(*args, **kwargs)


class SplitAttention(TorchFunctionMode):
    """Has `scaled_dot_product_attention` attend from this process's tokens to all tokens."""

    def __init__(self, group: dist.ProcessGroup, exchange: AttentionExchange) -> None:
        super().__init__()
        self.group, self.exchange = group, exchange
        self.parts, self.part = dist.get_world_size(group), dist.get_rank(group)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        with torch._C.DisableTorchFunction():
            return self.attend(*args, **(kwargs or {}))

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        """Take the arguments of `scaled_dot_product_attention` for a part of the tokens, and return its part.

        Raises:
            ConfigError: the number of heads cannot be split, with the exchange "heads".
        """
        if query.dim() != 4:
            raise ConfigError(
                f"context_parallel: attention over a query of {tuple(query.shape)}. Give it (batch, heads, length, "
                "features)."
            )
        options = {"dropout_p": dropout_p, "scale": scale, "enable_gqa": enable_gqa}
        mask = self._full_mask(attn_mask, query.shape[2], key.shape[2])
        by_heads = query.shape[1] % self.parts == 0
        if self.exchange == "heads" and not by_heads:
            raise ConfigError(
                f"context_parallel={self.parts} does not divide {query.shape[1]} heads of attention: give "
                "context_exchange='keys', or a number that does."
            )
        if by_heads and self.exchange != "keys":
            return self._by_heads(query, key, value, mask, is_causal, options)
        return self._by_keys(query, key, value, mask, is_causal, options)

    def _full_mask(self, mask: torch.Tensor | None, queries: int, keys: int) -> torch.Tensor | None:
        """Return the mask for all tokens, also of one that the block has made from a part of a tensor of tokens."""
        if mask is None:
            return None
        if mask.shape[-1] == keys:
            mask = _GatherKeys.apply(mask, mask.dim() - 1, self.group)
        if mask.dim() > 1 and mask.shape[-2] == queries:
            mask = _GatherKeys.apply(mask, mask.dim() - 2, self.group)
        return mask

    def _by_heads(
        self, query: Any, key: Any, value: Any, mask: torch.Tensor | None, is_causal: bool, options: dict[str, Any]
    ) -> torch.Tensor:
        if key.shape[1] % self.parts:
            repeats = query.shape[1] // key.shape[1]
            key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
            options = {**options, "enable_gqa": False}
        whole_query, whole_key, whole_value = (_Exchange.apply(one, 2, 1, self.group) for one in (query, key, value))
        if mask is not None and mask.dim() >= 3 and mask.shape[-3] > 1:
            mask = mask.chunk(self.parts, -3)[self.part]
        attended = scaled_dot_product_attention(
            whole_query, whole_key, whole_value, mask, is_causal=is_causal, **options
        )
        exchanged: torch.Tensor = _Exchange.apply(attended, 1, 2, self.group)
        return exchanged

    def _by_keys(
        self, query: Any, key: Any, value: Any, mask: torch.Tensor | None, is_causal: bool, options: dict[str, Any]
    ) -> torch.Tensor:
        keys, values = (_GatherKeys.apply(tensor, 2, self.group) for tensor in (key, value))
        queries = query.shape[2]
        start = self.part * queries
        if is_causal:
            rows = torch.arange(start, start + queries, device=query.device)
            mask = rows[:, None] >= torch.arange(keys.shape[2], device=query.device)
        elif mask is not None and mask.dim() > 1 and mask.shape[-2] != 1:
            mask = mask[..., start : start + queries, :]
        return scaled_dot_product_attention(query, keys, values, mask, is_causal=False, **options)


# -- collectives with gradients ----------------------------------------------------------------------------------------


def gather(tensor: torch.Tensor, dim: int, group: dist.ProcessGroup) -> torch.Tensor:
    """Return the parts of all processes of the group, one after the other along `dim`."""
    parts = dist.get_world_size(group)
    own = tensor.detach().contiguous()
    bits = own.view(torch.uint8) if own.dtype == torch.bool else own  # gloo cannot send booleans
    gathered = torch.empty(parts, *bits.shape, dtype=bits.dtype, device=bits.device)
    _all_gather(gathered.view(-1), bits.view(-1), group=group)
    return torch.cat(list(gathered.view(own.dtype)), dim)


# torch 2.13 gives them other names.
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Cut(torch.autograd.Function):
    """Take this process's part along a dimension; the backward gathers all gradients, divided by their number."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, dim: int, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.dim, ctx.group = dim, group
        # A copy: a block may change its input in place.
        return tensor.chunk(dist.get_world_size(group), dim)[dist.get_rank(group)].clone(
            memory_format=torch.contiguous_format
        )

    @staticmethod
    @without_graph
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gather(gradient, ctx.dim, ctx.group) / dist.get_world_size(ctx.group), None, None


class Shared(torch.autograd.Function):
    """A tensor that all parts of a sequence use; the backward adds up its gradients, divided by their number."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    @without_graph
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        total = gradient.contiguous() / dist.get_world_size(ctx.group)
        dist.all_reduce(total, group=ctx.group)
        return total, None


class _Join(torch.autograd.Function):
    """Gather the parts of all processes along a dimension.

    Each process computes the same loss from full sequences, and the strategy averages gradients as if the processes had
    different samples. So a process's part of the gradient counts as often as there are processes.
    """

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, dim: int, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.dim, ctx.group = dim, group
        return gather(tensor, dim, group)

    @staticmethod
    @without_graph
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        parts = dist.get_world_size(ctx.group)
        return gradient.chunk(parts, ctx.dim)[dist.get_rank(ctx.group)].contiguous() * parts, None, None


class _Exchange(torch.autograd.Function):
    """Exchange a part of dimension `split` and all of `full` for the opposite, by one all-to-all."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, split: int, full: int, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.split, ctx.full, ctx.group = split, full, group
        return _exchanged(tensor, split, full, group)

    @staticmethod
    @without_graph
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return _exchanged(gradient, ctx.full, ctx.split, ctx.group), None, None, None


def _exchanged(tensor: torch.Tensor, split: int, full: int, group: dist.ProcessGroup) -> torch.Tensor:
    sent = torch.stack(tensor.chunk(dist.get_world_size(group), full))
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    return torch.cat(list(received), split)


class _GatherKeys(_Join):
    """Gather the keys or values of all tokens; each process uses all, and their gradients are added up."""

    @staticmethod
    @without_graph
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        sent = torch.stack(gradient.chunk(dist.get_world_size(ctx.group), ctx.dim))
        own = torch.empty_like(sent[0])
        _reduce_scatter(own.view(-1), sent.view(-1), group=ctx.group)
        return own, None, None
