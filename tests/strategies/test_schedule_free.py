"""Optimizers with `train()` and `eval()` train, are evaluated and saved with the weights that they mean for each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import SGD
from torch.utils.data import DataLoader

from tests.helpers.compare import assert_same_bits
from tests.helpers.strategy_models import MLP
from tests.helpers.strategy_runs import WAYS, run_each, skip_if_missing
from tests.helpers.toy import Toy, loader, quiet
from tests.messages import raises_recorded
from trainer import ConfigError, seed_everything
from trainer.callbacks import EMAWeightAveraging, ModelCheckpoint
from trainer.cli.main import main

NAMES = ("single", "DDP x2", "FSDP x2")
BETA = 0.9


class ScheduleFree(SGD):
    """Trains at y, between z, which SGD steps, and x, the mean of all z, which `eval()` puts into the module.

    As schedulefree's SGDScheduleFree, but the mode is not in the state, and a wrong one is not noticed.
    """

    def __init__(self, parameters: Any, lr: float = 0.1) -> None:
        super().__init__(parameters, lr=lr)
        self.training, self.steps = False, 0

    def _each(self) -> Any:
        for group in self.param_groups:
            yield from ((p, self.state[p]["z"]) for p in group["params"] if "z" in self.state[p])

    @torch.no_grad()
    def train(self) -> None:
        for p, z in self._each() if not self.training else ():
            p.lerp_(z, 1 - BETA)
        self.training = True

    @torch.no_grad()
    def eval(self) -> None:
        for p, z in self._each() if self.training else ():
            p.lerp_(z, 1 - 1 / BETA)
        self.training = False

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        assert self.training, "a step in eval mode"
        for group in self.param_groups:
            steps = group["steps"] = group.get("steps", 0) + 1
            for p in group["params"]:
                z = self.state[p].setdefault("z", p.detach().clone())
                p.lerp_(z, 1 - 1 / BETA)
                z.sub_(p.grad, alpha=group["lr"])
                p.lerp_(z, 1 / steps)
                p.lerp_(z, 1 - BETA)


def _optimizer(kind: str, parameters: Any) -> Any:
    if kind in ("here", "exchanging"):
        return (ScheduleFree if kind == "here" else Exchanging)(parameters)
    schedulefree = pytest.importorskip("schedulefree")
    return getattr(schedulefree, kind)(parameters, lr=0.05)


class Exchanging(ScheduleFree):
    """Has the mean of all weights in its state, and exchanges it with the weights by arithmetic."""

    @torch.no_grad()
    def train(self) -> None:
        for p, mean in self._each() if not self.training else ():
            p.add_(mean)
            mean.sub_(p).neg_()
            p.sub_(mean)
        self.training = True

    @torch.no_grad()
    def eval(self) -> None:
        if self.training:
            self.training = False
            self.train()
        self.training = False

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad, alpha=group["lr"])
                # Weights follow their mean a little.
                p.lerp_(self.state[p].setdefault("z", p.detach().clone()).lerp_(p, 0.3), 0.1)


class Net(MLP):
    def __init__(self, kind: str = "here") -> None:
        super().__init__()
        self.kind = kind

    def configure_optimizers(self) -> Any:
        return _optimizer(self.kind, self.parameters())

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))

    test_step = validation_step


def _fit(name: str, folder: str, kind: str, validates: bool, epochs: int = 2, path: Any = None) -> Any:
    seed_everything(1)
    module, way = Net(kind), WAYS[name]
    writes = [ModelCheckpoint(dirpath=folder, save_top_k=-1)] if folder else []
    trainer = way.trainer(max_epochs=epochs, seed=1, enable_checkpointing=bool(folder), callbacks=writes)
    data = DataLoader(MLP.data(24), batch_size=way.micro_batch)
    trainer.fit(module, data, data if validates else None, ckpt_path=path)
    metrics = {key: float(value) for key, value in trainer.callback_metrics.items()}
    return trainer, module, metrics.get("val_loss"), data


def _each(name: str, folder: str, kind: str = "here") -> dict[str, Any]:
    path = f"{folder}/{name.replace(' ', '-')}-{kind}"
    trainer, module, loss, data = _fit(name, path, kind, validates=True)
    ends = trainer.full_state_dict(everywhere=True)
    best = str(Path(path) / "epoch=1-step=6")
    (tested,) = WAYS[name].trainer().test(Net(kind), data, ckpt_path=best, verbose=False)
    (own,) = trainer.test(module, data, verbose=False)
    without, *_ = _fit(name, "", kind, validates=False)
    resumed, *_ = _fit(name, "", kind, validates=True, path=Path(path) / "epoch=0-step=3")
    return {
        "with": ends,
        "without": without.full_state_dict(everywhere=True),
        "resumed": resumed.full_state_dict(everywhere=True),
        "losses": (loss, tested["val_loss"], own["val_loss"]),
    }


def _by_hand(kind: str = "here") -> tuple[float, Any]:
    """Return the loss of the weights for evaluation after the training, and these weights."""
    seed_everything(1)
    module = Net(kind)
    optimizer = module.configure_optimizers()
    optimizer.train()
    data = list(DataLoader(MLP.data(24), batch_size=WAYS["single"].micro_batch))
    for _ in range(2):
        for batch in data:
            optimizer.zero_grad()
            module.loss(batch).backward()
            optimizer.step()
    optimizer.eval()
    with torch.no_grad():
        return sum(float(module.loss(batch)) for batch in data) / len(data), module.state_dict()


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    return run_each(_each, NAMES, str(tmp_path_factory.mktemp("free")))


@pytest.mark.parametrize("name", NAMES)
def test_validations_and_resumes_change_no_bit(name: str, found: dict[str, list[Any]]) -> None:
    skip_if_missing(name)
    loss, weights = _by_hand()
    for rank in found[name]:
        assert_same_bits(rank["with"], rank["without"])
        assert_same_bits(rank["with"], rank["resumed"])
        assert rank["losses"] == pytest.approx([loss] * 3, rel=1e-5)
        for key, value in weights.items():
            torch.testing.assert_close(rank["with"][key], value, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["SGDScheduleFree", "AdamWScheduleFree", "RAdamScheduleFree"])
def test_the_package_schedulefree(kind: str, tmp_path: Path) -> None:
    pytest.importorskip("schedulefree")
    found, (loss, weights) = _each("single", str(tmp_path), kind), _by_hand(kind)
    assert_same_bits(found["with"], found["without"])
    assert_same_bits(found["with"], found["resumed"])
    assert found["losses"] == pytest.approx([loss] * 3, rel=1e-5)
    assert_same_bits(found["with"], dict(weights))


def test_states_that_are_exchanged_with_the_weights(tmp_path: Path) -> None:
    found = _each("single", str(tmp_path), "exchanging")
    assert_same_bits(found["with"], found["without"])
    assert_same_bits(found["with"], found["resumed"])
    assert found["losses"] == pytest.approx([_by_hand("exchanging")[0]] * 3, rel=1e-5)


class Free(Toy):
    def configure_optimizers(self) -> Any:
        return ScheduleFree(self.parameters())


class Toggling(Free):
    """Calls the modes by itself, as one does with other trainers."""

    def on_train_epoch_start(self) -> None:
        self.optimizers().train()

    def on_validation_model_eval(self) -> None:
        super().on_validation_model_eval()
        self.optimizers().eval()

    def on_validation_model_train(self) -> None:
        self.optimizers().train()
        super().on_validation_model_train()


def test_hooks_that_call_the_modes_change_nothing() -> None:
    ends = []
    for kind in (Free, Toggling):
        seed_everything(1)
        module = kind()
        quiet(max_epochs=2, num_sanity_val_steps=2).fit(module, loader(), loader())
        ends.append(dict(module.state_dict()))
    assert_same_bits(*ends)


def test_load_and_export_take_the_weights_for_evaluation(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    module = Free()
    trainer = quiet(max_epochs=1)
    trainer.fit(module, loader(), loader())
    trainer.save_checkpoint(tmp_path / "run" / "last")
    assert main(["checkpoint", "export", str(tmp_path / "run" / "last"), str(tmp_path / "out.safetensors")]) == 0
    assert_same_bits(dict(module.state_dict()), load_file(tmp_path / "out.safetensors"))
    assert_same_bits(dict(module.state_dict()), dict(Free.load_from_checkpoint(tmp_path / "run" / "last").state_dict()))


def test_an_average_beside_is_refused() -> None:
    with raises_recorded(ConfigError):
        quiet(max_epochs=1, callbacks=[EMAWeightAveraging()]).fit(Free(), loader())


class ModeOfGroups(ScheduleFree):
    """Has the mode in each group, as schedulefree's own optimizers do: a new group is in eval mode."""

    def _switch(self, training: bool, weight: float) -> None:
        for group in self.param_groups:
            for p in group["params"] if group.setdefault("train_mode", False) != training else ():
                if "z" in self.state[p]:
                    p.lerp_(self.state[p]["z"], weight)
            group["train_mode"] = training
        self.training = training

    @torch.no_grad()
    def train(self) -> None:
        self._switch(True, 1 - BETA)

    @torch.no_grad()
    def eval(self) -> None:
        self._switch(False, 1 - 1 / BETA)


class Unfreezes(Net):
    def configure_optimizers(self) -> Any:
        return ModeOfGroups([*self.parameters()][:2])

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.trainer.optimizers[0].add_param_group({"params": [*self.parameters()][2:]})


def test_a_group_that_a_hook_adds_is_averaged_too(tmp_path: Path) -> None:
    data, ends = DataLoader(MLP.data(24), batch_size=8), []
    for validates in (True, False):
        seed_everything(1)
        module = Unfreezes()
        trainer = quiet(max_epochs=3, callbacks=[ModelCheckpoint(tmp_path)], enable_checkpointing=True)
        trainer.fit(module, data, data if validates else None)
        ends.append(trainer.full_state_dict(everywhere=True))
        (tested,) = quiet().test(
            Unfreezes(), data, ckpt_path=trainer.checkpoint_callback.last_model_path, verbose=False
        )
        (own,) = trainer.test(module, data, verbose=False)
        assert tested == own
    assert_same_bits(*ends)
