"""Activation checkpointing keeps less between forward and backward, and changes no bit of the results."""

from __future__ import annotations

import copy
import gc
import random
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from tests.helpers.processes import run_distributed
from tests.messages import raises_recorded
from trainer.errors import ConfigError
from trainer.model.activation_checkpointing import (
    compile_block,
    disable_activation_checkpointing,
    enable_activation_checkpointing,
)
from trainer.model.blocks import BlockPolicy
from trainer.seed import seed_everything


class Block(nn.Module):
    def __init__(self, norm: type[nn.Module] = nn.BatchNorm1d, width: int = 16) -> None:
        super().__init__()
        self.norm = norm(width)
        self.up = nn.Linear(width, 8 * width)
        self.dropout = nn.Dropout(0.3)
        self.down = nn.Linear(8 * width, width)

    def forward(self, x: torch.Tensor, *, scale: torch.Tensor) -> torch.Tensor:
        added: torch.Tensor = self.down(self.dropout(torch.tanh(self.up(self.norm(x)))))
        return x + scale * added


class Net(nn.Module):
    def __init__(self, block: Callable[[], nn.Module] = Block) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(block() for _ in range(4))
        self.head = nn.Linear(16, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x, scale=torch.tensor(0.5))
        scored: torch.Tensor = self.head(x)
        return scored


def net(block: Callable[[], nn.Module] = Block) -> Net:
    seed_everything(0)
    return Net(block)


def train(module: nn.Module, steps: int = 3, rank: int = 0) -> dict[str, Any]:
    """A few steps, and everything that they leave behind; `kept`: how many numbers the forward keeps for the backward,
    without the parameters."""
    seed_everything(1 + rank)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    losses, kept = [], {}
    parameters = {p.untyped_storage()._cdata for p in module.parameters() if type(p) is nn.Parameter}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage()._cdata not in parameters:
            kept[tensor.untyped_storage()._cdata] = tensor.numel()
        return tensor

    for _ in range(steps):
        kept.clear()
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            loss = module(torch.randn(8, 16)).square().mean()
        number = sum(kept.values())
        loss.backward()
        losses.append(loss.item())
        gradients = [full(p.grad) for p in module.parameters()]
        optimizer.step()
        optimizer.zero_grad()
    state = {name.removeprefix("module."): full(t) for name, t in module.state_dict().items()}
    after = torch.get_rng_state()
    return {"losses": losses, "gradients": gradients, "state": state, "generator": after, "kept": number}


def full(tensor: Any) -> torch.Tensor:
    full: torch.Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return full.clone()


def assert_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one["losses"] == other["losses"]
    assert list(one["state"]) == list(other["state"])
    assert all(torch.equal(one["state"][name], value) for name, value in other["state"].items())
    assert all(map(torch.equal, one["gradients"], other["gradients"]))
    assert torch.equal(one["generator"], other["generator"])


@pytest.mark.parametrize("policy", ["auto", "Block", [Block], lambda name, child: name.startswith("blocks.")])
def test_everything_is_the_same_and_less_is_kept(policy: BlockPolicy) -> None:
    plain, recomputed = net(), net()
    names = [*recomputed.state_dict()]
    enable_activation_checkpointing(recomputed, policy)
    assert [*recomputed.state_dict()] == names
    assert [name for name, _ in recomputed.named_parameters()] == [name for name, _ in plain.named_parameters()]
    expected, seen = train(plain), train(recomputed)
    assert_same(expected, seen)
    # Of four blocks the inputs (8 x 16), instead of what is computed within (8 x 128, several times).
    assert seen["kept"] < expected["kept"] / 5


def test_it_returns_the_blocks_and_can_be_asked_twice_and_undone() -> None:
    module = net()
    assert list(enable_activation_checkpointing(module)) == [f"blocks.{i}" for i in range(4)]
    once = train(copy.deepcopy(module))
    enable_activation_checkpointing(module)
    assert train(copy.deepcopy(module))["kept"] == once["kept"]
    disable_activation_checkpointing(module)
    assert all("forward" not in vars(child) for child in module.modules())
    assert train(module)["kept"] > 5 * once["kept"]


def test_a_forward_of_the_blocks_own_is_put_back() -> None:
    module = net()
    block = module.blocks[0]
    block.forward = own = lambda x, scale: x * scale
    enable_activation_checkpointing(module, lambda name, child: child is block)
    x = torch.ones(2, 16, requires_grad=True)
    block(x, scale=torch.tensor(2.0)).sum().backward()
    assert torch.equal(x.grad, torch.full((2, 16), 2.0))
    disable_activation_checkpointing(module)
    assert block.forward is own


def test_without_gradients_nothing_is_prepared() -> None:
    module = net()
    enable_activation_checkpointing(module)
    module.eval()
    x = torch.randn(8, 16)
    with torch.no_grad():
        assert torch.equal(module(x), module(x))
    expected = net().eval()(x)
    assert torch.equal(module(x), expected)


def test_a_deep_copy_computes_with_its_own_weights() -> None:
    module = net()
    enable_activation_checkpointing(module)
    other = copy.deepcopy(module)
    for parameter in other.parameters():
        nn.init.zeros_(parameter)
    other(torch.randn(8, 16)).sum().backward()
    assert all(parameter.grad is None for parameter in module.parameters())
    assert all(parameter.grad is not None for parameter in other.parameters())


def test_nested_blocks_are_right_too() -> None:
    plain, recomputed = net(), net()
    enable_activation_checkpointing(recomputed, ["Block", "Linear"])
    assert_same(train(plain), train(recomputed))


class Counting(Block):
    """A module that changes a buffer and a number in its forward, as spectral norm does."""

    calls = 0

    def __init__(self, width: int = 1) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(width))

    def forward(self, x: torch.Tensor, *, scale: torch.Tensor) -> torch.Tensor:
        self.total += 1
        self.calls += 1
        return super().forward(x, scale=scale) * (1 + 0.1 * self.total[0] + 0.2 * (self.calls % 2))


class Table(Block):
    """A module that fills a buffer at its first use, as for tables of positions."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.zeros(0), persistent=False)

    def forward(self, x: torch.Tensor, *, scale: torch.Tensor) -> torch.Tensor:
        if not self.table.numel():
            self.table = torch.arange(16.0)
        return super().forward(x + self.table, scale=scale)


NOISE = random.Random()


class Drawing(Block):
    """A module whose static method draws, inside a comprehension, from a generator at module level."""

    @staticmethod
    def draw() -> float:
        return sum(NOISE.random() for _ in range(2))

    def forward(self, x: torch.Tensor, *, scale: torch.Tensor) -> torch.Tensor:
        return super().forward(x, scale=scale * self.draw())


class Shrinking(Block):
    def forward(self, x: torch.Tensor, *, scale: torch.Tensor) -> torch.Tensor:
        return super().forward(x.mul_(scale), scale=scale)


@pytest.mark.parametrize("block", [Counting, Table])
def test_what_a_block_changes_is_changed_once(block: type[Block]) -> None:
    plain, recomputed = net(block), net(block)
    enable_activation_checkpointing(recomputed)
    assert_same(train(plain), train(recomputed))
    assert [vars(one).get("calls") for one in recomputed.blocks] == [vars(one).get("calls") for one in plain.blocks]


def test_a_block_draws_the_same_again() -> None:
    plain, recomputed = net(Drawing), net(Drawing)
    enable_activation_checkpointing(recomputed)
    NOISE.seed(1)
    before = train(plain)
    NOISE.seed(1)
    assert_same(before, train(recomputed))


def test_a_second_backward_through_one_graph_begins_with_the_same() -> None:
    gradients = []
    for recomputes in (False, True):
        module = net(Counting)
        if recomputes:
            enable_activation_checkpointing(module)
        loss = module(torch.linspace(-1, 1, 128).view(8, 16)).square().mean()
        for _ in range(2):
            gradients += torch.autograd.grad(loss, module.parameters(), retain_graph=True)
    several = len(gradients) // 4
    for number in (1, 2, 3):
        assert all(map(torch.equal, gradients[:several], gradients[number * several :]))


@pytest.mark.parametrize("block", [Shrinking, partial(Counting, 200_000)], ids=["an argument", "a large buffer"])
def test_a_change_in_place_of_what_is_not_copied_is_reported(block: Callable[[], nn.Module]) -> None:
    module = net(block)
    enable_activation_checkpointing(module)
    with raises_recorded(ConfigError):
        train(module, steps=1)


def test_no_blocks_are_reported() -> None:
    with raises_recorded(ConfigError):
        enable_activation_checkpointing(nn.Linear(2, 2))
    with raises_recorded(ConfigError):
        enable_activation_checkpointing(net(), "Blok")


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch's compiler looks at it
def test_it_compiles() -> None:
    module = nn.Sequential(*(nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 16)) for _ in range(2)))
    plain = copy.deepcopy(module)
    enable_activation_checkpointing(module)
    module.compile(backend="aot_eager", fullgraph=True)
    x = torch.randn(8, 16)
    module(x).sum().backward()
    plain(x).sum().backward()
    for one, other in zip(module.parameters(), plain.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch's compiler looks at it
def test_blocks_with_buffers_are_compiled_alone() -> None:
    graphs = []

    def count(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph

    plain, module = net(), net()
    enable_activation_checkpointing(module)
    compiled = [*compile_block(module, {"backend": count})]
    assert compiled == [module, *module.blocks]
    assert_same(train(plain), train(module))
    assert any("batch_norm" in str(graph.code) for graph in graphs)


# -- with DDP and FSDP -------------------------------------------------------------------------------------------------


def wrapped_training(how: str, recompute: str) -> dict[str, Any]:
    """Train under DDP or FSDP, with checkpointing applied `"before"` or `"after"` wrapping, or `"never"`."""
    # torch's batch norm on the CPU does not support weights in bf16 with statistics in fp32.
    module = net(partial(Block, nn.LayerNorm) if how == "fsdp bf16" else Block)
    if recompute == "before":
        enable_activation_checkpointing(module)
    if how == "ddp":
        wrapped: nn.Module = DistributedDataParallel(module)
    else:
        low = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
        policy = low if how == "fsdp bf16" else MixedPrecisionPolicy()
        shard = partial(fully_shard, mesh=init_device_mesh("cpu", (2,)), mp_policy=policy)
        for block in module.blocks:
            shard(block)
        wrapped = shard(module)
    if recompute == "after":
        enable_activation_checkpointing(module)
    return train(wrapped, rank=dist.get_rank())


WRAPPED = ("ddp", "fsdp", "fsdp bf16")


def all_wrapped_trainings() -> dict[str, dict[str, dict[str, Any]]]:
    dist.init_process_group("gloo")
    outcomes = {how: {when: wrapped_training(how, when) for when in ("never", "before", "after")} for how in WRAPPED}
    gc.collect()  # the wrappers are deleted before the process group
    dist.barrier()
    dist.destroy_process_group()
    return outcomes


def test_under_ddp_and_fsdp_everything_is_the_same_and_less_is_kept() -> None:
    for outcomes in run_distributed(all_wrapped_trainings, 2):
        for how in WRAPPED:
            expected = outcomes[how]["never"]
            for when in ("before", "after"):
                assert_same(expected, outcomes[how][when])
                assert outcomes[how][when]["kept"] < expected["kept"] / 5
