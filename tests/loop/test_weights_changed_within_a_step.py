"""Weights that a step changes between two forwards: the later one computes with the new ones, in any precision."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.helpers.strategy_runs import WAYS
from trainer import TrainModule

torch.manual_seed(0)
X, Y = torch.randn(16, 8), torch.randn(16, 1)


class SAM(torch.optim.Optimizer):
    """Climb along the gradient, take the gradient there, go back, and step (Foret et al., arXiv:2010.01412)."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1, "rho": 0.5})

    @torch.no_grad()
    def first_step(self) -> None:
        norm = nn.utils.get_total_norm([p.grad for p in self.param_groups[0]["params"]])
        for p in self.param_groups[0]["params"]:
            self.state[p]["old"] = p.data.clone()
            p.data.add_(p.grad, alpha=float(0.5 / norm))
        self.zero_grad()

    @torch.no_grad()
    def second_step(self) -> None:
        for p in self.param_groups[0]["params"]:
            p.data = self.state[p]["old"]
            p.add_(p.grad, alpha=-0.1)
        self.zero_grad()

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        self.first_step()
        with torch.enable_grad():
            loss = closure()
        self.second_step()
        return loss


Loss = Callable[[], torch.Tensor]


def sam(loss: Loss, backward: Any, optimizer: Any, net: nn.Module) -> list[torch.Tensor]:
    backward(loss())
    optimizer.first_step()
    second = loss()
    backward(second)
    optimizer.second_step()
    return [second]


def by_closure(loss: Loss, backward: Any, optimizer: Any, net: nn.Module) -> list[torch.Tensor]:
    losses: list[torch.Tensor] = []

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        losses.append(loss())
        backward(losses[-1])
        return losses[-1]

    if isinstance(optimizer, SAM):
        backward(loss())
    optimizer.step(closure)
    return losses


def inner_steps(loss: Loss, backward: Any, optimizer: Any, net: nn.Module) -> list[torch.Tensor]:
    old = [p.detach().clone() for p in net.parameters()]
    for _ in range(2):
        gradients = torch.autograd.grad(loss(), list(net.parameters()))
        with torch.no_grad():
            for p, gradient in zip(net.parameters(), gradients, strict=True):
                p.sub_(gradient, alpha=0.3)
    outer = loss()
    backward(outer)
    with torch.no_grad():
        for p, before in zip(net.parameters(), old, strict=True):
            p.copy_(before)
    optimizer.step()
    optimizer.zero_grad()
    return [outer]


def swapped(loss: Loss, backward: Any, optimizer: Any, net: nn.Module) -> list[torch.Tensor]:
    """Use weights that are halved for a target without gradients."""
    own = loss()
    with torch.no_grad():
        for p in net.parameters():
            p.data.mul_(0.5)
        target = loss()
        for p in net.parameters():
            p.data.mul_(2.0)
    total = own + (own - target).square()
    if backward is not None:
        backward(total)
        optimizer.step()
        optimizer.zero_grad()
    return [total]


KINDS: dict[str, tuple[Any, Any]] = {
    "SAM": (sam, SAM),
    "SAM by closure": (by_closure, SAM),
    "LBFGS by closure": (by_closure, lambda params: torch.optim.LBFGS(params, lr=0.5, max_iter=4)),
    "inner steps": (inner_steps, lambda params: torch.optim.SGD(params, lr=0.1)),
    "swapped weights": (swapped, lambda params: torch.optim.SGD(params, lr=0.1)),
}


def make_net() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))


def error(out: torch.Tensor) -> torch.Tensor:
    return (out.float() - Y).square().mean()


def numbers(losses: list[torch.Tensor]) -> list[float]:
    return [float(loss.detach()) for loss in losses]


def by_hand(kind: str, precision: str) -> list[float]:
    """Train with one autocast for each forward."""
    step, make_optimizer = KINDS[kind]
    net, losses = make_net(), []
    optimizer = make_optimizer(net.parameters())

    def loss() -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16-mixed"):
            out = net(X)
        return error(out)

    for _ in range(3):
        losses += numbers(step(loss, lambda value: value.backward(), optimizer, net))
    return losses


class Module(TrainModule):
    def __init__(self, kind: str, automatic: bool = False) -> None:
        super().__init__()
        self.net, self.automatic_optimization = make_net(), automatic
        self.step, self.make_optimizer = KINDS[kind]
        self.losses: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        automatic = self.automatic_optimization
        optimizer, backward = (None, None) if automatic else (self.optimizers(), self.manual_backward)
        found = self.step(lambda: error(self.net(X)), backward, optimizer, self.net)
        self.losses += numbers(found)
        return found[-1] if automatic else None

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.losses += numbers(swapped(lambda: error(self.net(X)), None, None, self.net))

    def configure_optimizers(self) -> Any:
        return self.make_optimizer(self.parameters())


@pytest.mark.parametrize("precision", ["bf16-mixed", "32-true"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_later_forward_of_the_step_computes_with_the_changed_weights(kind: str, precision: str) -> None:
    for way, automatic in (("single", False), ("DDP x1", False), *([("single", True)] * (kind == "swapped weights"))):
        module = Module(kind, automatic)
        WAYS[way].trainer(precision=precision, max_steps=3).fit(module, [X] * 3)
        assert module.losses == by_hand(kind, precision), (way, automatic)


def test_a_validation_step_computes_with_the_weights_that_it_changes() -> None:
    seen: list[list[float]] = []
    for precision in ("bf16-mixed", "32-true"):
        module = Module("swapped weights")
        WAYS["single"].trainer(precision=precision).validate(module, [X], verbose=False)
        seen.append(module.losses)
    assert seen[0] == pytest.approx(seen[1], rel=1e-2)
    plain = float(error(make_net()(X)).detach())
    assert seen[0][0] != pytest.approx(plain, rel=1e-3)
