"""A number that an optimizer's step or a hook of it reads is that of the full tensor, as in a hand-written loop."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch.nn.functional import mse_loss
from torch.optim import SGD, AdamW, Optimizer
from torch.utils.data import DataLoader

from tests.helpers.processes import run_distributed
from tests.helpers.strategy_models import GPT, MLP
from tests.helpers.strategy_runs import WAYS, run_each, skip_if_missing
from tests.tiers import selected
from trainer import ConfigError, Engine, seed_everything
from trainer.errors import explain_torch_error
from trainer.strategies.optimizer_trials import mixes_parameters

STEPS, BATCH = 4, 8
SHARDED = ("FSDP x2", "FSDP x2, CPU offload", "FSDP 2x2", "TP x2", "PP x2")


class Scaled(Optimizer):
    """Has what the optimizers below have in common."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @property
    def all(self) -> list[Any]:
        return [p for group in self.param_groups for p in group["params"] if p.grad is not None]


class Ratio(Scaled):
    """As LARS: each tensor by the norms of the weight and its gradient."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else torch.enable_grad()(closure)()
        for p in self.all:
            norm = float(p.grad.norm())
            p.add_(p.grad, alpha=-0.1 * (p.norm().item() / norm if norm > 0.01 else 1.0))
        return loss


class ByNorm(Scaled):
    """All tensors by the norm of all gradients, which is in the state."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        norm = sum(p.grad.pow(2).sum().item() for p in self.all) ** 0.5
        for p in self.all:
            self.state[p]["norm"] = norm
            p.add_(p.grad, alpha=-0.1 / (1 + norm))


class Distance(Scaled):
    """As Prodigy: one step size, which grows with how far the weights have gone; torch itself reads it, as `alpha`."""

    size = 0.01

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        gone = 0.0
        for p in self.all:
            first = self.state[p].setdefault("first", p.clone())
            gone += (p.grad * (first - p)).sum().item()
        self.size = max(self.size, 0.01 + gone)
        for p in self.all:
            p.sub_(p.grad, alpha=self.size * p.grad.square().sum().sqrt())


def halve_large(optimizer: Any, args: Any, kwargs: Any) -> None:
    """Change gradients in a hook of the optimizer's step."""
    gradients = [p.grad for group in optimizer.param_groups for p in group["params"]]
    norm = sum(gradient.norm().item() ** 2 for gradient in gradients) ** 0.5
    for gradient in gradients:
        gradient.mul_(1 / (1 + norm))


def hooked(parameters: Any) -> Optimizer:
    optimizer = SGD(parameters, lr=0.1)
    optimizer.register_step_pre_hook(halve_large)
    return optimizer


MAKE: dict[str, Any] = {"ratio": Ratio, "norm": ByNorm, "distance": Distance, "hook": hooked, "closure": Ratio}
KINDS = [*MAKE, "manual hook"]
CASES = [(name, kind) for name in SHARDED for kind in KINDS if name != "PP x2" or kind == "ratio"]
"""A stage of a pipeline has no norm of all gradients."""


def make_module(way: str, kind: str) -> Any:
    """Return a module whose last bias, of shape [1], is empty on one of two processes."""
    seed_everything(1)
    base: Any = GPT if way.startswith(("TP", "PP")) else MLP

    class Module(base):
        def configure_optimizers(self) -> Any:
            return MAKE[kind.removeprefix("manual ")](self.parameters())

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if self.automatic_optimization:
                return super().training_step(batch, batch_idx)
            optimizer = self.optimizers()
            optimizer.zero_grad()

            def closure() -> None:
                self.manual_backward(self.loss(batch))

            if kind == "closure":
                optimizer.step(closure)
            else:
                closure()
                optimizer.step()
            return None

    module = Module().double()  # which leaves no rounding for the step size to make larger
    module.automatic_optimization = kind not in ("closure", "manual hook")
    return module


def batches(module: Any, size: int) -> Any:
    rows = [[x.double() if x.is_floating_point() else x for x in row] for row in module.data(STEPS * BATCH)]
    return DataLoader(rows, size)  # type: ignore[arg-type]


def trained(name: str) -> dict[str, Any]:
    """Return the weights after training with each kind of optimizer."""
    found = {}
    for kind in (kind for way, kind in CASES if way == name):
        module, way = make_module(name, kind), WAYS[name]
        trainer = way.trainer(max_steps=STEPS, seed=1)
        trainer.fit(module, batches(module, way.micro_batch))
        found[kind] = trainer.full_state_dict(everywhere=True)
    return found


def by_hand(name: str, kind: str) -> dict[str, torch.Tensor]:
    module = make_module(name, kind)
    optimizer = module.configure_optimizers()
    for batch in batches(module, BATCH):
        optimizer.zero_grad()
        module.loss(batch).backward()
        optimizer.step()
    return dict(module.state_dict())


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest) -> dict[str, list[Any]]:
    return run_each(trained, selected(request, "name"))


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_an_optimizer_reads_numbers_of_full_tensors(name: str, kind: str, results: Any) -> None:
    skip_if_missing(name)
    expected = by_hand(name, kind)
    for rank in results[name]:
        assert rank[kind].keys() == expected.keys()
        for key, value in rank[kind].items():
            torch.testing.assert_close(value, expected[key], rtol=1e-4, atol=1e-6, msg=lambda m, key=key: f"{key}: {m}")


def in_an_engine() -> Any:
    layers = make_module("FSDP x2", "ratio").layers
    with Engine(strategy="fsdp", accelerator="cpu", devices=2, seed=1) as engine:
        model, optimizer = engine.setup(layers, Ratio(layers.parameters()))
        for x, y in engine.setup_dataloaders(batches(MLP, BATCH // 2)):
            optimizer.zero_grad()
            engine.backward(mse_loss(model(x)[:, 0], y))
            optimizer.step()
        return engine.full_state_dict(model, everywhere=True)


def test_an_engines_optimizer_reads_numbers_of_full_tensors() -> None:
    expected = by_hand("FSDP x2", "ratio")
    for weights in run_distributed(in_an_engine, 2):
        for key, value in weights.items():
            torch.testing.assert_close(value, expected[f"layers.{key}"], rtol=1e-4, atol=1e-6)


def test_the_largest_element_of_an_empty_shard_has_words() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(0).abs().max()
    assert "p.grad.full_tensor().abs().max()" in str(explain_torch_error(caught.value))


def refused(name: str, kinds: list[str]) -> list[str]:
    found = []
    for kind in kinds:
        module, way = make_module(name, kind), WAYS[name]
        with pytest.raises(ConfigError) as caught:
            way.trainer(max_steps=STEPS, seed=1).fit(module, batches(module, way.micro_batch))
        found.append(str(caught.value))
    return found


def test_zero_refuses_what_would_be_given_flat_parts() -> None:
    name = "ZeRO-2 x2"
    skip_if_missing(name)
    for rank in run_each(refused, [name], KINDS[:4])[name]:
        *steps, of_hook = rank
        assert all("needs full parameters" in one for one in steps)
        assert "on_before_optimizer_step" in of_hook


def test_a_stage_refuses_what_needs_all_parameters() -> None:
    name = "PP x2"
    for rank in run_each(refused, [name], ["norm", "distance"])[name]:
        assert all("pipeline_parallel: its step depends on all parameters" in one for one in rank)


@pytest.mark.parametrize("kind", [Ratio, ByNorm, Distance, SGD, AdamW, partial(AdamW, amsgrad=True, fused=True)])
def test_optimizers_that_step_each_parameter_alone_are_told_apart(kind: Any) -> None:
    assert mixes_parameters(kind([torch.nn.Parameter(torch.ones(2))])) == (kind in (ByNorm, Distance))
