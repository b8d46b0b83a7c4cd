"""Optimizers in 16-mixed: hooks see unscaled gradients, the scale changes once a step, and no gradient is no error."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from tests.helpers.strategy_models import MLP
from tests.helpers.strategy_runs import SINGLE, WAYS, run_each
from tests.helpers.toy import Toy, loader, quiet
from trainer import Callback, ConfigError, Trainer, TrainModule

SCALE = 8.0


class ByHand(TrainModule):
    """Two optimizers, both backwards before both steps, and everything that was seen."""

    automatic_optimization = False

    def __init__(self, clips: int = 0, closure: bool = False, again: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(4, 1), nn.Linear(4, 1)
        self.clips, self.closure, self.again = clips, closure, again
        self.norms: list[float] = []
        self.updates = 0

    def loss(self, layer: nn.Module, batch: Any) -> torch.Tensor:
        return (layer(batch[0]) - batch[1]).square().mean()

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizers = self.optimizers()
        for optimizer, layer in zip(optimizers, (self.first, self.second), strict=True):
            optimizer.zero_grad()
            if not self.closure:
                self.manual_backward(self.loss(layer, batch))
        for optimizer, layer in zip(optimizers, (self.first, self.second), strict=True):
            for _ in range(self.clips):
                self.clip_gradients(optimizer, 0.5)
            if self.closure:
                optimizer.step(lambda layer=layer: self.manual_backward(self.loss(layer, batch)))
            else:
                optimizer.step()
            if self.again:
                optimizer.zero_grad()
                self.manual_backward(self.loss(layer, batch))
                optimizer.step()

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        gradients = [p.grad for group in optimizer.param_groups for p in group["params"]]
        self.norms.append(float(nn.utils.get_total_norm(gradients)))

    def on_fit_start(self) -> None:
        scaler = self.trainer.strategy.scaler
        if scaler is not None:
            scaler.load_state_dict({**scaler.state_dict(), "scale": SCALE, "growth_interval": 1})

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(layer.parameters(), lr=0.01) for layer in (self.first, self.second)]


@pytest.mark.parametrize(
    "options",
    [{}, {"clips": 1}, {"clips": 2}, {"closure": True}, {"again": True}, {"clips": 2, "again": True}],
    ids=str,
)
def test_manual_steps_are_those_without_scaling(options: dict[str, Any]) -> None:
    scaled, plain = ByHand(**options), ByHand(**options)
    trainer = quiet(max_epochs=1, precision="16-mixed")
    trainer.fit(scaled, loader(4))
    quiet(max_epochs=1, precision="32-true").fit(plain, loader(4))
    assert scaled.norms == pytest.approx(plain.norms, rel=2e-2)
    for ours, theirs in zip(scaled.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=2e-3)
    assert trainer.strategy.scaler is not None
    assert trainer.strategy.scaler.get_scale() == SCALE * 2**4


@pytest.mark.parametrize("overflows", [0, 1])
def test_the_scale_falls_after_an_overflow_in_any_optimizer(overflows: int) -> None:
    class Overflows(ByHand):
        def loss(self, layer: nn.Module, batch: Any) -> torch.Tensor:
            loss = super().loss(layer, batch)
            return loss * float("inf") if layer is (self.first, self.second)[overflows] else loss

    module = Overflows()
    before = [layer.weight.detach().clone() for layer in (module.first, module.second)]
    trainer = quiet(max_epochs=1, precision="16-mixed")
    trainer.fit(module, loader(1))
    assert trainer.strategy.scaler is not None
    assert trainer.strategy.scaler.get_scale() == SCALE / 2
    same = [torch.equal(layer.weight, b) for layer, b in zip((module.first, module.second), before, strict=True)]
    assert same == [overflows == 0, overflows == 1]


def test_an_optimizer_without_gradients_is_left_out() -> None:
    class OneOfTwo(TrainModule):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = nn.Linear(4, 1), nn.Linear(4, 1)

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            return self.used(batch[0]).square().mean()

        def configure_optimizers(self) -> Any:
            return [torch.optim.SGD(layer.parameters(), lr=0.1) for layer in (self.used, self.unused)]

    module = OneOfTwo()
    before = [parameter.detach().clone() for parameter in (module.used.weight, module.unused.weight)]
    quiet(max_epochs=1, precision="16-mixed").fit(module, loader(2))
    assert not torch.equal(module.used.weight, before[0])
    assert torch.equal(module.unused.weight, before[1])


def test_a_step_whose_batches_are_all_skipped_has_no_update() -> None:
    class SkipsAll(TrainModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 1)

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor | None:
            if batch_idx == 1:
                return None
            return self.layer(batch[0]).square().mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)

    trainer = quiet(max_epochs=1, precision="16-mixed", gradient_clip_val=1.0)
    trainer.fit(SkipsAll(), loader(3))
    assert trainer.global_step == 3


def clipped_before_more(module: Waiting, first: Any, second: Any, batch_idx: int) -> None:
    module.manual_backward(module.first * 2.0)
    module.clip_gradients(first, 1.5, "value")
    module.manual_backward(module.first * 1.0 + module.second * 3.0)
    for optimizer in (first, second):
        optimizer.step()
        optimizer.zero_grad()


def clipped_in_each_of_two(module: Waiting, first: Any, second: Any, batch_idx: int) -> None:
    module.manual_backward(module.first * 2.0 + module.second * 3.0)
    module.clip_gradients(first, 3.0, "value")
    second.step()
    second.zero_grad()
    if batch_idx % 2:
        first.step()
        first.zero_grad()


def accumulated_beside_another(module: Waiting, first: Any, second: Any, batch_idx: int) -> None:
    module.manual_backward(module.first * 2.0)
    module.manual_backward(module.second * 3.0)
    for optimizer, every in ((first, 3), (second, 2)):
        if batch_idx % every == every - 1:
            optimizer.step()
            optimizer.zero_grad()


def stepped_a_batch_later(module: Waiting, first: Any, second: Any, batch_idx: int) -> None:
    if batch_idx % 2:
        first.step()
        first.zero_grad()
    else:
        module.manual_backward(module.first * 2.0)
    module.manual_backward(module.second * 3.0)
    second.step()
    second.zero_grad()


def left_out_if_not_finite(module: Waiting, first: Any, second: Any, batch_idx: int) -> None:
    first.zero_grad()
    module.manual_backward(module.first * (float("inf") if batch_idx == 1 else 2.0))
    if bool(module.clip_gradients(first, 100.0).isfinite()):
        first.step()


class Waiting(TrainModule):
    """Two numbers, whose gradients wait for a step while the loss scale doubles."""

    automatic_optimization = False

    def __init__(self, script: Any) -> None:
        super().__init__()
        self.first, self.second, self.script = nn.Parameter(torch.zeros(())), nn.Parameter(torch.zeros(())), script

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.script(self, *self.optimizers(), batch_idx)

    on_fit_start = ByHand.on_fit_start

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD([parameter], lr=1.0) for parameter in (self.first, self.second)]


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        (clipped_before_more, (-6 * (1.5 + 1.0), -6 * 3.0)),
        (clipped_in_each_of_two, (-3 * 3.0, -6 * 3.0)),  # the second clip is of 2 + 2
        (accumulated_beside_another, (-6 * 2.0, -6 * 3.0)),
        (stepped_a_batch_later, (-3 * 2.0, -6 * 3.0)),
        (left_out_if_not_finite, (-5 * 2.0, 0.0)),
    ],
)
def test_gradients_that_wait_for_a_step_have_the_scale_of_those_added(script: Any, expected: Any) -> None:
    module = Waiting(script)
    trainer = quiet(max_epochs=1, precision="16-mixed")
    trainer.fit(module, loader(6))
    assert (float(module.first.detach()), float(module.second.detach())) == expected
    if script is left_out_if_not_finite:
        assert trainer.strategy.scaler is not None
        assert trainer.strategy.scaler.get_scale() == SCALE * 2**5 / 2


class Direct(MLP):
    """Calls torch's own backward or step from the second step on."""

    automatic_optimization = False

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what
        self.done = 0

    def training_step(self, batch: Any, batch_idx: int) -> None:
        loss, optimizer = self.loss(batch), self.optimizers()
        if self.what == "backward" and batch_idx > 0:
            loss.backward()
        else:
            self.manual_backward(loss)
        if self.what == "step" and batch_idx > 0:
            optimizer.optimizer.step()
        else:
            optimizer.step()
        optimizer.zero_grad()
        self.done += 1

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def call_directly(name: str, precision: str) -> dict[str, tuple[int, str]]:
    found = {}
    for what in ("backward", "step"):
        module = Direct(what)
        try:
            WAYS[name].trainer(seed=1, max_steps=3, precision=precision).fit(module, DataLoader(MLP.data(24), 4))
        except ConfigError as error:
            found[what] = module.done, str(error)
        else:
            found[what] = module.done, ""
    return found


class CallsBackward(MLP):
    """A module with automatic optimization that calls backward for a second loss, in the second batch of a window."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if batch_idx == 1:
            self.layers[0](batch[0]).square().mean().backward()
        return self.loss(batch)


def call_backward(name: str, precision: str) -> str:
    trainer = WAYS[name].trainer(seed=1, max_steps=3, precision=precision, accumulate_grad_batches=2)
    try:
        trainer.fit(CallsBackward(), DataLoader(MLP.data(48), 4))
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("precision", ["32-true", "16-mixed"])
def test_a_backward_in_automatic_optimization_is_refused_where_losses_are_scaled(precision: str) -> None:
    refused = "training_step has called loss.backward(), without the loss scaling"
    for ranks in run_each(call_backward, (SINGLE, "DDP x2", "FSDP x2"), precision).values():
        for found in ranks:
            assert found.startswith(refused) if precision == "16-mixed" else found == ""


BACKWARD, STEP = (
    "loss.backward() leaves the gradients unscaled",
    "the step of torch's SGD itself would use gradients that",
)


@pytest.mark.parametrize("precision", ["32-true", "16-mixed"])
def test_torch_s_own_backward_and_step_are_refused_where_they_would_train_wrongly(precision: str) -> None:
    results = run_each(call_directly, (SINGLE, "DDP x2", "FSDP x2"), precision)
    for name, ranks in results.items():
        for found in ranks:
            # Under fsdp the reduction of gradients is a part of torch's backward.
            right = {"backward": name == SINGLE, "step": name != "FSDP x2"}
            for what, words in (("backward", BACKWARD), ("step", STEP)):
                done, error = found[what]
                if precision == "32-true" and right[what]:
                    assert (done, error) == (3, "")
                else:
                    assert words in error, (name, what)
                    assert done == 1


class Fused(MLP):
    """A loss that overflows at first, and a fused optimizer, which can unscale in its own kernel."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return 1000 * super().training_step(batch, batch_idx)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01, fused=True)


class Looks(Callback):
    def on_before_optimizer_step(self, trainer: Trainer, module: TrainModule, optimizer: Any) -> None: ...


def test_a_fused_optimizer_unscales_by_itself_unless_somebody_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    unscale = torch.amp.GradScaler.unscale_
    monkeypatch.setattr(torch.amp.GradScaler, "unscale_", lambda *args: calls.append(1) or unscale(*args))
    weights, counts = [], []
    for callbacks in ([], [Looks()]):
        torch.manual_seed(1)
        module, before = Fused(), len(calls)
        trainer = WAYS[SINGLE].trainer(precision="16-mixed", max_epochs=3, seed=1, callbacks=callbacks)
        trainer.fit(module, DataLoader(MLP.data(24), 8))
        weights.append(module.state_dict())
        counts.append(len(calls) - before)
        assert trainer.strategy.scaler is not None
        assert 1.0 < trainer.strategy.scaler.get_scale() < 2**16, "no step was skipped"
    assert counts == [0, 9]
    for name, value in weights[0].items():
        assert torch.allclose(value, weights[1][name], rtol=1e-6, atol=1e-8), name


class EverySecond(Toy):
    """Leaves out each second step, one of which overflows, from a scale of 8."""

    def __init__(self) -> None:
        super().__init__()
        self.scales: list[float] = []

    def on_train_start(self) -> None:
        scaler = self.trainer.strategy.scaler
        assert scaler is not None
        scaler.load_state_dict({**scaler.state_dict(), "scale": SCALE})

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self._loss(batch) * (torch.inf if batch_idx == 2 else 1)

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, closure: Any) -> None:
        if batch_idx % 2:
            optimizer.step(closure)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.scales.append(self.trainer.strategy.scaler.get_scale())  # type: ignore[union-attr]  # 16-mixed has one


def test_an_overflow_in_a_step_that_the_module_leaves_out_lowers_the_scale() -> None:
    module = EverySecond()
    quiet(max_epochs=1, precision="16-mixed").fit(module, loader(4))
    assert module.scales == [SCALE, SCALE, SCALE / 2, SCALE / 2]


def test_a_step_after_one_that_the_module_left_out_has_gradients_of_the_new_scale() -> None:
    module, by_hand, data = EverySecond(), Toy(), loader(4)
    by_hand.load_state_dict(module.state_dict())
    quiet(max_epochs=1, precision="16-mixed").fit(module, data)
    optimizer = by_hand.configure_optimizers()
    for batch in [*data][1::2]:
        optimizer.zero_grad()
        by_hand._loss(batch).backward()
        optimizer.step()
    torch.testing.assert_close(module.state_dict(), by_hand.state_dict(), rtol=1e-2, atol=1e-2)
