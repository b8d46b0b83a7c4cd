"""Gradients survive the next forward where each forward reuses the memory of the last results, as with CUDA graphs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.helpers.toy import Toy, loader, quiet

REUSES = {"backend": "eager", "mode": "reduce-overhead"}
POOL = torch.zeros(2, 4)
"""The memory of the gradients, in turn, as the pool of a CUDA graph."""


class FromPool(torch.autograd.Function):
    """A product whose gradient lies in the pool, which the next forward overwrites."""

    place = 0

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        POOL.fill_(float("nan"))
        ctx.save_for_backward(x)
        return x @ weight

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        (x,) = ctx.saved_tensors
        FromPool.place = place = 1 - FromPool.place
        POOL[place] = x.T @ gradients[0]
        return POOL[place], None


class Pooled(Toy):
    """Like a compiled model on a GPU, if `pooled`; else its plain twin."""

    def __init__(self, pooled: bool) -> None:
        super().__init__()
        self.pooled = pooled
        self.weight = nn.Parameter(torch.zeros(4))

    def loss_of(self, batch: Any) -> torch.Tensor:
        x, y = batch
        predicted = FromPool.apply(self.weight, x) if self.pooled else x @ self.weight  # type: ignore[no-untyped-call]
        return (predicted - y[:, 0]).square().mean() + self.layer(x).square().mean()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.loss_of(batch)


class ByHand(Pooled):
    """Steps after every third batch."""

    automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.manual_backward(self.loss_of(batch) / 3)
        if batch_idx % 3 == 2:
            self.optimizers().step()
            self.optimizers().zero_grad()


class ByHandTogether(ByHand):
    """Reduces its gradients over processes once a step."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer = self.optimizers()
        with optimizer.toggle_model(sync_grad=batch_idx % 3 == 2):
            self.manual_backward(self.loss_of(batch) / 3)
        if batch_idx % 3 == 2:
            optimizer.step()
            optimizer.zero_grad()


def full(value: torch.Tensor) -> torch.Tensor:
    return value.full_tensor() if hasattr(value, "full_tensor") else value


@pytest.fixture(autouse=True)
def leave_no_process_group() -> Iterator[None]:
    """End the group of fsdp, which the sharded weights of a module need after `fit`."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.parametrize(("kind", "window"), [(Pooled, 3), (Pooled, 4), (Pooled, 1), (ByHand, 1), (ByHandTogether, 1)])
@pytest.mark.parametrize("strategy", ["single_device", "ddp", "fsdp"])
def test_accumulated_gradients_are_kept(kind: type[Pooled], window: int, strategy: str) -> None:
    weights = []
    for pooled in (False, True):
        torch.manual_seed(2)
        module = kind(pooled)
        settings: dict[str, Any] = {"accumulate_grad_batches": window, "strategy": strategy, "devices": 1}
        quiet(max_epochs=2, compile=REUSES if pooled else False, **settings).fit(module, loader(7))
        weights.append({name: full(value) for name, value in module.state_dict().items()})
    torch.testing.assert_close(weights[1], weights[0])


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["reduce-overhead", "max-autotune"])
@pytest.mark.parametrize(
    ("kind", "strategy"), [(Toy, "single_device"), (ByHand, "single_device"), (Toy, "fsdp"), (ByHandTogether, "fsdp")]
)
def test_cuda_graphs_accumulate(mode: str, kind: Any, strategy: str) -> None:
    weights = []
    for setting in (False, mode):
        torch.manual_seed(2)
        module = kind() if kind is Toy else kind(False)
        window = 3 if kind is Toy else 1
        options: dict[str, Any] = {"accelerator": "cuda", "devices": 1, "strategy": strategy}
        quiet(max_epochs=3, compile=setting, accumulate_grad_batches=window, **options).fit(module, loader(7))
        weights.append({name: full(value).cpu() for name, value in module.state_dict().items()})
    torch.testing.assert_close(weights[1], weights[0], atol=1e-5, rtol=1e-4)
