"""Experts that are split over processes compute what all of them compute, whatever tokens each process gets."""

from __future__ import annotations

from copy import deepcopy
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader, TensorDataset

from tests.helpers.compare import QUIET
from tests.helpers.processes import once_per_module, run_distributed
from tests.helpers.strategy_models import GPT, WIDTH, Experts
from tests.messages import raises_recorded
from trainer import Trainer, TrainModule
from trainer.errors import ConfigError
from trainer.strategies import FSDPStrategy

EXPERTS, TOKENS, CHOICES = 4, 6, 2
ROUTES = {
    "to all": lambda rank: torch.tensor([[0, 3], [1, 2], [3, 1], [2, 0], [0, 1], [2, 3]]),
    "to the first process": lambda rank: torch.tensor([[0, 1]]).expand(TOKENS, 2),
    "to one expert": lambda rank: torch.full((TOKENS, 2), 3),
    "to its own process": lambda rank: torch.tensor([[0, 1]]).expand(TOKENS, 2) + 2 * rank,
    "without tokens on one process": lambda rank: torch.zeros(0 if rank else TOKENS, 2, dtype=torch.int64),
}


def compute(experts: nn.Module, indices: torch.Tensor, seed: int) -> dict[str, torch.Tensor]:
    """Return the outputs, and the gradients of tokens and weights, for tokens of a seed."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(len(indices), WIDTH, generator=generator, requires_grad=True)
    weights = torch.rand(indices.shape, generator=generator, requires_grad=True)
    outputs = experts(hidden, indices, weights)
    outputs.square().sum().backward()
    assert hidden.grad is not None
    assert weights.grad is not None
    return {"outputs": outputs.detach(), "hidden": hidden.grad, "weights": weights.grad}


def split_experts() -> dict[str, Any]:
    """Compare experts that are split along a dimension of the mesh with full ones, on each route."""
    from trainer.strategies.fsdp.experts import split_experts

    torch.manual_seed(0)
    undivided = Experts(EXPERTS)
    found: dict[str, Any] = {}
    for dimension in ("expert", "tensor"):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=(dimension,))
        for route, indices in ROUTES.items():
            # Along "tensor" all processes have the same tokens.
            rank = dist.get_rank() if dimension == "expert" else 0
            of_all = [0, 1] if dimension == "expert" else [0]
            experts, expected = deepcopy(undivided), deepcopy(undivided)
            split_experts(experts, mesh)
            ours = compute(experts, indices(rank), rank)
            theirs = [compute(expected, indices(one), one) for one in of_all][rank]
            for name, parameter in experts.named_parameters():
                assert parameter.grad is not None
                ours[name] = parameter.grad.full_tensor()  # type: ignore[attr-defined]
                gradient = expected.get_parameter(name).grad
                assert gradient is not None
                theirs[name] = gradient / len(of_all)  # FSDP averages over readers
            found[f"{dimension}, {route}"] = (ours, theirs)
    return found


@once_per_module
def computed() -> list[dict[str, Any]]:
    return run_distributed(split_experts, 2)


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("dimension", ["expert", "tensor"])
def test_outputs_and_gradients_are_those_of_all_experts(dimension: str, route: str, computed: Any) -> None:
    for of_rank in computed:
        torch.testing.assert_close(*of_rank[f"{dimension}, {route}"])


class For16Bits(Experts):
    """Has kernels for 16 bits only, as `torch._grouped_mm`."""

    def forward(self, hidden: torch.Tensor, indices: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        if hidden.dtype == torch.float32:
            raise RuntimeError("not for float32")
        return super().forward(hidden, indices, weights)


def errors_of_kernels() -> str:
    from trainer.strategies.fsdp.experts import split_experts

    experts = For16Bits(EXPERTS)
    split_experts(experts, init_device_mesh("cpu", (2,), mesh_dim_names=("expert",)))
    with pytest.raises(RuntimeError) as error:
        compute(experts, ROUTES["to the first process"](0), 0)
    return str(error.value)


def test_an_error_of_a_kernel_is_raised_on_processes_without_tokens_too() -> None:
    """Else one that tries something else would wait for the others in the middle of it."""
    assert run_distributed(errors_of_kernels, 2) == ["not for float32"] * 2


def weights_in_a_rehearsal() -> list[tuple[torch.dtype, bool]]:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    from trainer.strategies.fsdp.verify import rehearsal

    torch.manual_seed(0)
    block = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4)))
    gathered = [p.detach().bfloat16().float() + 0.02 for p in block.parameters()]
    expected = [one + 0.01 * torch.arange(one.numel()).sin().view(one.shape) for one in gathered]
    for unit in (block[1], block):
        fully_shard(unit, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    block.unshard()  # type: ignore[operator]
    with rehearsal(block, ((torch.ones(1, 4),), {})):
        return [(p.dtype, torch.equal(p, one)) for p, one in zip(block.parameters(), expected, strict=True)]


def test_the_weights_of_units_within_a_block_are_in_float32_too() -> None:
    assert run_distributed(weights_in_a_rehearsal, 2) == [[(torch.float32, True)] * 4] * 2


class Listed(GPT):
    """Experts in a list, each called by itself."""

    def __init__(self) -> None:
        super().__init__(experts=EXPERTS)
        assert self.net is not None
        self.net.blocks[1].feed_forward.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(EXPERTS))


class Three(GPT):
    def __init__(self) -> None:
        super().__init__(experts=3)


class Unnamed(TrainModule):
    tensor_parallel_plan: ClassVar = {"layers.0": "colwise"}

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.layers(batch[0]).sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Residual(Experts):
    """Adds to each token what its experts return."""

    def forward(self, hidden: torch.Tensor, indices: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return hidden + super().forward(hidden, indices, weights)


class Normalizing(Experts):
    def forward(self, hidden: torch.Tensor, indices: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return super().forward(hidden, indices, weights / weights.sum(-1, keepdim=True))


class Counted(Experts):
    """Goes through a fixed number of experts."""

    def forward(self, hidden: torch.Tensor, indices: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return super().forward(hidden, indices, weights) + 0 * self.bias[EXPERTS - 1]


def with_experts(kind: type[Experts]) -> type[TrainModule]:
    class Other(GPT):
        def __init__(self) -> None:
            super().__init__(experts=EXPERTS)
            assert self.net is not None
            self.net.blocks[1].feed_forward.experts = kind(EXPERTS)

    return Other


REFUSED: dict[str, tuple[type[TrainModule], str]] = {
    "more than a sum": (with_experts(Residual), "Residual cannot be split as 'experts': "),
    "weights that are not as they are": (with_experts(Normalizing), "Normalizing cannot be split as 'experts': "),
    "experts by number": (with_experts(Counted), "index 3 is out of bounds"),
    "a list of experts": (Listed, "not a ModuleList of experts"),
    "an odd number": (Three, "3 experts of net.blocks.1.feed_forward.experts cannot be split over 2 processes"),
    "no experts in the plan": (Unnamed, "the plan of Unnamed names no experts"),
}


def refusals() -> dict[str, str]:
    found = {}
    for name, (kind, _) in REFUSED.items():
        trainer = Trainer(**QUIET, devices=2, accelerator="cpu", strategy=FSDPStrategy(expert_parallel=2), max_steps=1)
        module = kind()
        data = module.data(8) if isinstance(module, GPT) else TensorDataset(torch.ones(4, 4))
        with pytest.raises((ConfigError, IndexError)) as error:
            trainer.fit(module, DataLoader(data, 2))
        found[name] = str(error.value)
    return found


def test_what_cannot_be_split_is_refused_in_words() -> None:
    for of_rank in run_distributed(refusals, 2):
        for name, (_, words) in REFUSED.items():
            assert words in of_rank[name]


def test_experts_are_split_over_the_processes_that_share_weights() -> None:
    with raises_recorded(ConfigError):
        Trainer(**QUIET, devices=2, accelerator="cpu", strategy=FSDPStrategy(expert_parallel=3))
