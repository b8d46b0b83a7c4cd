"""GradNormMonitor logs the norms of one big batch under every strategy, with and without clipping."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from tests.callbacks.test_lr_monitor import Kept
from tests.helpers.strategy_models import MLP
from tests.helpers.strategy_runs import WAYS, run_each, skip_if_missing
from tests.helpers.toy import Toy, loader, quiet
from tests.messages import raises_recorded
from tests.tiers import selected
from trainer import Callback, ConfigError, Trainer, TrainModule
from trainer.callbacks import GradNormMonitor

NAMES = ("DDP x2", "FSDP x2", "ZeRO-1 x2", "ZeRO-2 x2", "ZeRO-3 x2")
KEYS = ("grad_norm", "weight_norm", "update_norm")


class Frozen(MLP):
    """A frozen parameter, and two groups, one of which has a name."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[0].bias.requires_grad_(False)

    def groups(self) -> dict[str, list[torch.nn.Parameter]]:
        return {"first": [self.layers[0].weight], "pg2": [*self.layers[2:].parameters()]}

    def configure_optimizers(self) -> Any:
        first, others = self.groups().values()
        return torch.optim.AdamW([{"params": first, "name": "first"}, {"params": others, "lr": 0.01}], lr=0.02)


class Record(Callback):
    def __init__(self) -> None:
        self.rows: list[dict[str, float]] = []

    def on_train_step_end(self, trainer: Trainer, module: TrainModule) -> None:
        values = trainer.read_metrics()
        self.rows.append({key: value for key, value in values.items() if "norm" in key})


def _train(name: str, clip: float | None) -> list[dict[str, float]]:
    record = Record()
    trainer = WAYS[name].trainer(
        max_steps=3, seed=1, log_every_n_steps=1, gradient_clip_val=clip, callbacks=[GradNormMonitor(), record]
    )
    trainer.fit(Frozen(), DataLoader(Frozen.data(24), batch_size=WAYS[name].micro_batch))
    return record.rows


def _both(name: str) -> dict[str, Any]:
    return {"plain": _train(name, None), "clipped": _train(name, 0.01)}


class _Manually(Callback):
    """The same norms of a single device, from the plain parameters."""

    def __init__(self) -> None:
        self.rows: list[dict[str, float]] = []

    def on_before_optimizer_step(self, trainer: Trainer, module: TrainModule, optimizer: Any) -> None:
        assert isinstance(module, Frozen)
        every = {"": [p for p in module.parameters() if p.requires_grad]}
        self.of = {**every, **{f"/AdamW/{name}": members for name, members in module.groups().items()}}
        self.before = {name: _flat(members) for name, members in self.of.items()}
        self.gradients = {name: _flat([p.grad for p in members]) for name, members in self.of.items()}

    def on_train_step_end(self, trainer: Trainer, module: TrainModule) -> None:
        row = {}
        for name, members in self.of.items():
            after = _flat(members)
            of = (self.gradients[name], after, after - self.before[name])
            row |= {f"{key}{name}": float(one.norm()) for key, one in zip(KEYS, of, strict=True)}
        self.rows.append(row)


def _flat(tensors: list[Any]) -> torch.Tensor:
    return torch.cat([one.detach().flatten() for one in tensors])


@pytest.fixture(scope="module")
def expected() -> dict[str, Any]:
    rows = {}
    for key, clip in (("plain", None), ("clipped", 0.01)):
        manual = _Manually()
        trainer = WAYS["single"].trainer(max_steps=3, seed=1, gradient_clip_val=clip, callbacks=[manual])
        trainer.fit(Frozen(), DataLoader(Frozen.data(24), batch_size=8))
        rows[key] = manual.rows
    return rows


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest) -> dict[str, list[Any]]:
    return run_each(_both, selected(request, "name"))


@pytest.mark.parametrize("name", ["single", *NAMES])
def test_the_norms_are_those_of_one_big_batch(name: str, results: dict[str, list[Any]], expected: Any) -> None:
    skip_if_missing(name)
    for rank in results[name]:
        for kind, rows in expected.items():
            for ours, theirs in zip(rank[kind], rows, strict=True):
                if name.startswith("ZeRO"):
                    theirs = {key: value for key, value in theirs.items() if not key.startswith("grad_norm/")}
                assert ours == pytest.approx(theirs, rel=1e-4), (kind, rank[kind])


def test_clipping_is_not_measured_a_second_time(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr("trainer.callbacks.grad_norm_monitor.total_norm", lambda *args, **options: calls.append(args))
    quiet(max_steps=3, gradient_clip_val=0.1, callbacks=[GradNormMonitor(weight_norm=False, update_norm=False)]).fit(
        Toy(), loader()
    )
    assert calls == []


class Two(Toy):
    """Two optimizers, stepped by hand; one gradient is clipped before."""

    def __init__(self) -> None:
        super().__init__()
        self.other = torch.nn.Linear(4, 1)
        self.automatic_optimization = False
        self.norms: list[float] = []

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(self.layer.parameters(), lr=0.1), torch.optim.SGD(self.other.parameters(), lr=0.1)]

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        first, second = self.optimizers()
        self.manual_backward(self._loss(batch) + self.other(batch[0]).square().mean())
        norm = self.clip_gradients(first.optimizer, 1e-3, "norm")
        assert norm is not None
        theirs = torch.cat([p.grad.flatten() for p in self.other.parameters() if p.grad is not None]).norm()
        self.norms = [float(norm), float(theirs)]
        for optimizer in (first, second):
            optimizer.step()
            optimizer.zero_grad()


def test_two_optimizers_by_hand() -> None:
    module = Two()
    trainer = quiet(max_steps=3, log_every_n_steps=1, callbacks=GradNormMonitor())
    trainer.fit(module, loader())
    first, second = module.norms
    values = trainer.callback_metrics
    assert float(values["grad_norm/SGD"]) == pytest.approx(first)
    assert float(values["grad_norm/SGD-1"]) == pytest.approx(second)
    assert float(values["grad_norm"]) == pytest.approx((first**2 + second**2) ** 0.5)


def test_with_loss_scaling_the_norm_is_unscaled() -> None:
    trainer = quiet(max_steps=8, precision="16-mixed", callbacks=GradNormMonitor())
    trainer.fit(Toy(), loader())
    assert trainer.strategy.scaler is not None
    assert 0 < float(trainer.callback_metrics["grad_norm"]) < 100 < trainer.strategy.scaler.get_scale()


class LogsItsOwn(Toy):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("grad_norm", torch.tensor(1000.0))
        return super().training_step(batch, batch_idx)


def test_a_norm_is_not_mixed_with_a_value_of_the_module() -> None:
    with raises_recorded(ConfigError):
        quiet(max_steps=1, callbacks=GradNormMonitor()).fit(LogsItsOwn(), loader())


class ByTurns(Toy):
    """Two optimizers: one steps twice in a batch, the other in every second batch."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.second = torch.nn.Linear(4, 1)
        self.norms: list[tuple[float, float]] = []
        self.last: list[dict[str, float]] = []

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        gradients = [one.grad.flatten() for group in optimizer.param_groups for one in group["params"]]
        norm = self.trainer.gradient_norm(optimizer)
        self.norms.append((float(norm), float(torch.cat(gradients).norm())))
        self.last[-1]["SGD" if optimizer is self.trainer.optimizers[0] else "SGD-1"] = self.norms[-1][1]

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.last.append({})
        one, other = self.optimizers()
        for optimizer, layer in ((one, self.layer), (one, self.layer), (other, self.second))[: 2 + batch_idx % 2]:
            optimizer.zero_grad()
            self.manual_backward(torch.nn.functional.mse_loss(layer(batch[0]), batch[1]))
            optimizer.step()

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(self.layer.parameters(), 0.05), torch.optim.SGD(self.second.parameters(), 0.05)]


def test_optimizers_that_step_twice_or_by_turns_have_the_norm_of_their_last_step() -> None:
    kept = Kept()
    module = ByTurns()
    quiet(max_steps=4, log_every_n_steps=1, logger=kept, callbacks=GradNormMonitor()).fit(module, loader(4))
    assert [own for own, _ in module.norms] == pytest.approx([by_hand for _, by_hand in module.norms])
    for name in ("SGD", "SGD-1"):
        expected = {step: norms[name] for step, norms in enumerate(module.last, start=1) if name in norms}
        assert dict(kept.values[f"grad_norm/{name}"]) == pytest.approx(expected)
