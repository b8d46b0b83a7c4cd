"""Expert parallelism: each process has some experts of a mixture, and gets the tokens that are routed to them."""

from __future__ import annotations

import fnmatch
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from trainer.errors import ConfigError, raise_problems
from trainer.model.blocks import class_of
from trainer.strategies.parallel.one_reader import local_part
from trainer.strategies.parallel.refusals import without_graph
from trainer.strategies.parallel.verify import Inputs, Results, compare, replaced_parameters, results_of

EXPERT_STYLES = ("experts", "moe_tp_experts", "ep_dispatch_experts")
"""The word of a plan for a module of experts, and Hugging Face's words for it."""


def find_experts(module: nn.Module, plan: Mapping[str, Any], parts: int) -> dict[str, nn.Module]:
    """Return the modules of experts that a plan names.

    Args:
        parts: the number of processes among which experts are split.

    Raises:
        ConfigError: one of them cannot be split.
    """
    modules, found = dict(module.named_modules()), dict[str, nn.Module]()
    for pattern, style in plan.items():
        for name in fnmatch.filter(modules, pattern):
            found.pop(name, None)
            if style in EXPERT_STYLES:
                found[name] = modules[name]
    problems = (_problem(name, experts, parts) for name, experts in found.items())
    raise_problems(list(filter(None, problems)), type(module).__name__)
    return found


def _problem(name: str, experts: nn.Module, parts: int) -> str:
    sizes = {parameter: p.shape[0] if p.dim() else 0 for parameter, p in experts.named_parameters()}
    if not takes_routing(experts) or len(set(sizes.values())) != 1:
        return (
            f"tensor_parallel_plan: {name} ({type(experts).__name__}) cannot be split as 'experts'. Name a module with "
            "forward(hidden (tokens, features), indices (tokens, k), weights (tokens, k)) -> (tokens, features), whose "
            "parameters have one row for each expert (not a ModuleList of experts)."
        )
    count = next(iter(sizes.values()))
    if count % parts:
        return (
            f"{count} experts of {name} cannot be split over {parts} processes: choose numbers that divide them, or "
            f"replicate them: tensor_parallel_plan = {{{name!r}: None}}."
        )
    return ""


def takes_routing(experts: nn.Module) -> bool:
    """Whether `forward` takes tokens, the indices of their experts, and weights."""
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(experts.forward).parameters.values()
    return sum(parameter.kind in positional for parameter in parameters) == 3


def split_experts(experts: nn.Module, mesh: DeviceMesh, verify: bool = True) -> None:
    """Leave this process its part of the experts, for good; `forward` then is collective.

    Args:
        mesh: of dimension "expert", along which processes have different tokens; or "tensor", along which they have the
            same ones; or both.
        verify: see `FSDPStrategy`.
    """
    forward = experts.forward
    for owner in experts.modules():
        for name, parameter in owner._parameters.items():
            if parameter is not None:
                # Without sending anything: all processes have the values, or get them later.
                sharded = distribute_tensor(parameter, mesh, [Shard(0)] * mesh.ndim, src_data_rank=None)
                owner._parameters[name] = nn.Parameter(sharded, requires_grad=parameter.requires_grad)
    experts.forward = _SplitExperts(experts, forward, mesh, verify)


class _SplitExperts:
    """The `forward` of a module of experts, some of which are on this process.

    Tokens go to the processes along "expert" that have their experts, and the outputs come back. Along "tensor" each
    process computes what its experts add, and the sums are added up.
    """

    def __init__(
        self, experts: nn.Module, forward: Callable[..., torch.Tensor], mesh: DeviceMesh, verify: bool
    ) -> None:
        self._experts, self._forward, self._signature = experts, forward, inspect.signature(forward)
        groups = {name: mesh.get_group(name) for name in mesh.mesh_dim_names or ()}
        self._senders, self._copies = groups.get("expert"), groups.get("tensor")
        self._parts = 1 if self._senders is None else dist.get_world_size(self._senders)
        self._copy = 0 if self._copies is None else dist.get_rank(self._copies)
        self._own = next(p for p in experts.parameters() if isinstance(p, DTensor)).to_local().shape[0]
        self._verifies = verify
        """False after the first forward."""

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        hidden, indices, weights = self._signature.bind(*args, **kwargs).args
        shape = hidden.shape
        hidden, indices, weights = hidden.flatten(0, -2), indices.flatten(0, -2), weights.flatten(0, -2)
        if self._verifies and len(hidden) and not torch.compiler.is_compiling():
            self._verifies = False
            self._verify(hidden[:8].detach(), indices.shape[1], weights[:8].detach())
        if self._copies is not None:
            hidden, weights = (add_up_gradients(one, self._copies) for one in (hidden, weights))
        pairs, part, expert = self._sort(indices)
        sizes = torch.bincount(part, minlength=self._parts)
        sent = hidden[pairs // indices.shape[1]]
        if self._senders is None:
            outputs = self._run(sent, expert)
        else:
            sizes_received = torch.empty_like(sizes)
            dist.all_to_all_single(sizes_received, sizes, group=self._senders)
            here, there = sizes.tolist(), sizes_received.tolist()
            received = _Send.apply(sent, here, there, self._senders, float(self._parts))
            outputs = self._run(received, _Send.apply(expert, here, there, self._senders, 1.0))
            outputs = _Send.apply(outputs, there, here, self._senders, 1 / self._parts)
        weighted = outputs * weights.flatten()[pairs, None]
        # Not by index_add, whose order is not defined on GPUs, nor by index_copy, which keeps its source.
        every = weighted.new_zeros(indices.numel(), shape[-1]).index_put((pairs,), weighted)
        combined = every.view(*indices.shape, shape[-1]).sum(1).to(hidden.dtype)
        if self._copies is not None:
            combined = _Sum.apply(combined, self._copies)
        result: torch.Tensor = combined.view(shape)
        return result

    def _verify(self, hidden: torch.Tensor, choices: int, weights: torch.Tensor) -> None:
        """Compare some tokens' outputs with weighted sums of one expert each, which is how tokens are computed here.

        Raises:
            ConfigError: they differ, or this process's experts cannot be used without the others.
        """
        choices = min(choices, self._own)
        # The sum of the weights stays the router's, which may be 1.
        few = weights[:, :choices]
        total, of_few = weights.sum(1, keepdim=True), few.sum(1, keepdim=True)
        weights = few * torch.where(of_few == 0, 1, total / of_few)
        weights.requires_grad_()
        rows, columns = (torch.arange(size, device=hidden.device) for size in weights.shape)
        experts = (rows[:, None] + columns) % self._own

        def each(hidden: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
            ones = torch.ones_like(hidden[:, :1])
            outputs = [self._forward(hidden, experts[:, i : i + 1], ones) * weights[:, i : i + 1] for i in columns]
            return torch.stack(outputs).sum(0)

        def together(hidden: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
            return self._forward(hidden, experts, weights)

        def run(forward: Callable[..., torch.Tensor], inputs: Inputs) -> Results:
            with self._local_parameters():
                return results_of(self._experts, inputs, forward, {})

        name = class_of(self._experts).__name__
        inputs: Inputs = (hidden, weights), {}
        difference = compare(name, self._experts, inputs, partial(run, each), partial(run, together))
        if difference:
            raise ConfigError(
                f"tensor_parallel_plan: {name} cannot be split as 'experts': {difference}. For each token return the "
                "sum of its experts' outputs times the given weights, take the number of experts from the rows of the "
                "parameters, and do everything else in the module around it."
            )

    def _sort(self, indices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the pairs of a token and a choice for this process to send, by receiver; the receivers; and experts.

        Pairs count through (tokens, k); experts count within the process that has them.
        """
        copies = 1 if self._copies is None else dist.get_world_size(self._copies)
        owner, expert = indices.flatten() // self._own, indices.flatten() % self._own
        pairs = (owner % copies == self._copy).nonzero()[:, 0]
        pairs = pairs[torch.argsort(owner[pairs], stable=True)]
        return pairs, owner[pairs] // copies, expert[pairs]

    def _run(self, hidden: torch.Tensor, expert: torch.Tensor) -> torch.Tensor:
        """Return the output of this process's experts for tokens of one expert each."""
        with self._local_parameters():
            if len(hidden):
                return self._call_experts(hidden, expert)
            # One without tokens computes one, too: an error of the kernels is raised by all processes, or by none.
            outputs = self._call_experts(hidden.new_zeros(1, hidden.shape[1]), expert.new_zeros(1))
            # Gradients are sums over processes, so each process needs one.
            nothing = sum(p.sum() for p in self._experts.parameters()) * 0
            return hidden + outputs[:0] + nothing

    def _call_experts(self, hidden: torch.Tensor, expert: torch.Tensor) -> torch.Tensor:
        ones = torch.ones(len(hidden), 1, dtype=hidden.dtype, device=hidden.device)
        return self._forward(hidden, expert[:, None], ones)

    @contextmanager
    def _local_parameters(self) -> Iterator[None]:
        """Give the module its part of the parameters as plain tensors, and the number of experts in it."""
        count = getattr(self._experts, "num_experts", None)
        if isinstance(count, int):
            self._experts.num_experts = self._own  # type: ignore[assignment]
        try:
            with replaced_parameters(self._experts, local_part):
                yield
        finally:
            if isinstance(count, int):
                self._experts.num_experts = count  # type: ignore[assignment]


# -- collectives with gradients ----------------------------------------------------------------------------------------


class _Send(torch.autograd.Function):
    """Send `sent[i]` rows to process i of a group, and receive `received[i]` rows from it.

    The gradient is scaled: weights of experts get gradients of all senders' tokens, and FSDP averages over the other
    processes.
    """

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup, scale: float
    ) -> torch.Tensor:
        ctx.sizes, ctx.group, ctx.scale = (sent, received), group, scale
        return _all_to_all(rows, sent, received, group)

    @staticmethod
    @without_graph
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        sent, received = ctx.sizes
        return _all_to_all(gradient * ctx.scale, received, sent, ctx.group), None, None, None, None


def _all_to_all(rows: torch.Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> torch.Tensor:
    output = rows.new_empty(sum(received), *rows.shape[1:])
    dist.all_to_all_single(output, rows.contiguous(), received, sent, group=group)
    return output


def add_up_gradients(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Return the same tensor for a group whose processes each use a part: the gradients are added up."""
    same: torch.Tensor = _SumOfGradients.apply(tensor, group)
    return same


class _SumOfGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return tensor.detach()

    @staticmethod
    @without_graph
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        total = gradient.contiguous().clone()
        dist.all_reduce(total, group=ctx.group)
        return total, None


class _Sum(torch.autograd.Function):
    """The sum over the processes of a group, which all use it in the same way."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        total = tensor.contiguous().clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    @without_graph
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient, None
