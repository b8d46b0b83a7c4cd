"""What hooks change of the model and its optimizers is in the checkpoint, and a resumed run goes on with it."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.helpers.processes import run_distributed
from tests.helpers.stops import StopsAt
from tests.helpers.toy import loader, quiet
from trainer import Callback, TrainModule
from trainer.callbacks import ModelCheckpoint
from trainer.state.hook_changes import HookChanges

STEPS, EPOCHS = 3, 4
Plan = list[tuple[str, int, str]]
"""Changes: the hook, the epoch, and what is changed."""


class Net(TrainModule):
    """A module that hooks change; its forward depends on all that they change."""

    def __init__(self, plan: Plan, own: bool, scale: float = 1.0) -> None:
        super().__init__()
        self.plan, self.own = plan, own
        self.body, self.neck, self.head = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)
        self.drop = nn.Dropout(0.1)
        self.scale, self.how, self.turned = scale, "plain", False
        self.body.requires_grad_(False)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        features = self.drop(self.neck(self.body(batch[0]))) * self.scale
        features = features.relu() if self.how == "relu" else features
        return nn.functional.mse_loss(self.head(-features if self.turned else features), batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.training_step(batch, batch_idx))

    def on_train_start(self) -> None:
        self.scale *= 2
        self.at("the start", 0)

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam([p for p in self.parameters() if p.requires_grad], 0.05)

    def change(self, what: str, optimizer: Any) -> None:
        if what == "unfreeze":
            self.body.requires_grad_(True)
            optimizer.add_param_group({"params": [*self.body.parameters()], "lr": 0.01})
        elif what == "freeze":
            self.head.bias.requires_grad_(False)
        elif what == "scale":
            self.scale *= 1.5
        elif what == "values":
            self.how, self.turned, self.drop.p, self.neck.momentum = "relu", not self.turned, 0.5, None  # type: ignore[assignment]
        elif what == "eval":
            self.neck.eval()
        elif what == "rate":
            optimizer.param_groups[-1]["lr"] *= 0.5
        elif what == "weights":
            with torch.no_grad():
                self.neck.weight.mul_(0.5)
                self.neck.num_batches_tracked.add_(1)
        elif what == "state":
            optimizer.state.clear()
        elif what == "append":
            self.body.weight.requires_grad_(True)
            optimizer.param_groups[0]["params"].append(self.body.weight)
        elif what == "move":
            first, last = optimizer.param_groups[0], optimizer.param_groups[-1]
            last["params"].append(self.head.weight)
            first["params"] = [one for one in first["params"] if one is not self.head.weight]
        elif what == "remove" and len(optimizer.param_groups) > 1:
            for parameter in optimizer.param_groups.pop()["params"]:
                optimizer.state.pop(parameter, None)
        elif what == "new":
            self.head.late = self.global_step + 0.5

    def at(self, hook: str, epoch: int) -> None:
        for where, when, what in self.plan:
            if (where, when) == (hook, epoch):
                self.change(what, self.trainer.optimizers[0])

    def on_train_epoch_start(self) -> None:
        if self.own:
            self.at("start", self.current_epoch)

    def on_train_epoch_end(self) -> None:
        if self.own:
            self.at("end", self.current_epoch)

    def on_train_step_end(self) -> None:
        if self.own and self.global_step % STEPS == 2:
            self.at("step", self.current_epoch)

    def facts(self) -> dict[str, Any]:
        values = (self.scale, self.how, self.turned, self.drop.p, self.neck.momentum, self.neck.training)
        flags = [p.requires_grad for p in self.parameters()]
        return {"values": values, "flags": flags, "late": getattr(self.head, "late", None)}


class Changes(Callback):
    """The same changes by a callback, which counts the epochs in its own state."""

    epochs = 0

    def state_dict(self) -> dict[str, Any]:
        return {"epochs": self.epochs}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epochs = state["epochs"]

    def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
        self.epochs += 1
        module.at("start", trainer.current_epoch)

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        module.at("end", trainer.current_epoch)

    def on_train_step_end(self, trainer: Any, module: Any) -> None:
        if trainer.global_step % STEPS == 2:
            module.at("step", trainer.current_epoch)


def fit(folder: Path, plan: Plan, own: bool, stop: int = -1, scale: float = 1.0, **options: Any) -> Any:
    torch.manual_seed(0)
    module = Net(plan, own, scale)
    callbacks = [StopsAt(stop), ModelCheckpoint(every_n_train_steps=1), *([] if own else [Changes()])]
    settings = {"max_epochs": EPOCHS, "num_sanity_val_steps": 1, "enable_checkpointing": True} | options
    trainer = quiet(callbacks=callbacks, default_root_dir=folder, **settings)
    trainer.fit(module, loader(STEPS), loader(1), ckpt_path="last")
    return trainer


def result(trainer: Any) -> tuple[dict[str, Any], list[Any], dict[str, Any]]:
    groups = [{**group, "params": len(group["params"])} for group in trainer.optimizers[0].param_groups]
    weights = {name: value.tolist() for name, value in trainer.full_state_dict(everywhere=True).items()}
    counted = [one.epochs for one in trainer.callbacks if isinstance(one, Changes)]
    return trainer.module.facts() | {"counted": counted}, groups, weights


def test_drawn_changes_and_stops(inputs: Any, tmp_path: Path) -> None:
    kinds = ("unfreeze", "freeze", "scale", "values", "eval", "rate", "new", "scale", "weights", "weights", "state")
    for rng in islice(inputs, 0, None, 7):
        own = rng.random() < 0.5
        chosen = rng.sample(kinds, rng.randint(2, 5))
        plan = [(rng.choice(("start", "end", "step")), rng.randrange(EPOCHS), one) for one in chosen]
        plan.sort(key=lambda one: one[1])
        if rng.random() < 0.3:
            plan = [("the start", 0, "unfreeze"), *(one for one in plan if one[2] != "unfreeze")]
        stops = sorted(rng.sample(range(1, STEPS * EPOCHS), rng.randint(1, 2)))
        folder = tmp_path / str(rng.seed_given)
        expected = result(fit(folder / "whole", plan, own))
        for stop in stops:
            fit(folder / "stopped", plan, own, stop)
        assert result(fit(folder / "stopped", plan, own)) == expected, (rng.seed_given, plan, stops)


@pytest.mark.parametrize(
    ("plan", "stops"),
    [
        ([("start", 1, "unfreeze"), ("step", 1, "move"), ("end", 2, "remove")], (4, 7, 10)),
        ([("the start", 0, "append")], (2,)),
        ([("start", 1, "append")], (4,)),
    ],
)
def test_groups_whose_parameters_change(plan: Plan, stops: tuple[int, ...], tmp_path: Path) -> None:
    expected = result(fit(tmp_path / "whole", plan, True))
    for stop in stops:
        fit(tmp_path / "stopped", plan, True, stop)
    assert result(fit(tmp_path / "stopped", plan, True)) == expected


def test_where_the_program_begins_otherwise_its_value_is_kept_and_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plan = [("end", 0, "scale"), ("end", 0, "values")]
    fit(tmp_path, plan, True, stop=4)
    later = fit(tmp_path, plan, True, scale=5.0)
    assert (later.module.scale, later.module.drop.p) == (10.0, 0.5)
    assert "the program's values are kept: scale" in caplog.text


def test_an_evaluation_of_a_checkpoint_has_the_values(tmp_path: Path) -> None:
    plan = [("start", 1, "scale"), ("start", 2, "values")]
    trained = fit(tmp_path, plan, True)
    [own] = trained.validate(trained.module, loader(2), verbose=False)
    [read] = quiet().validate(Net(plan, True), loader(2), ckpt_path=trained.checkpoint_callback.last_model_path)
    assert read == own


def across(folder: Path, strategy: str) -> list[Any]:
    options: dict[str, Any] = {"devices": 2, "strategy": strategy, "num_sanity_val_steps": 0}
    plan = [
        ("start", 1, "unfreeze"),
        ("start", 1, "scale"),
        ("start", 2, "weights"),
        ("start", 2, "state"),
        ("end", 1, "values"),
        ("step", 2, "freeze"),
    ]
    fit(folder / "a", plan, False, 8, **options)
    return [result(fit(folder / "a", plan, False, **options)) == result(fit(folder / "b", plan, False, **options))]


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_on_two_processes(strategy: str, tmp_path: Path) -> None:
    assert run_distributed(across, 2, tmp_path, strategy) == [[True], [True]]


def test_a_module_of_an_earlier_run_is_taken_as_it_was_made(tmp_path: Path) -> None:
    plan = [("the start", 0, "unfreeze"), ("start", 1, "scale"), ("start", 2, "values"), ("start", 2, "new")]
    trained = fit(tmp_path, plan, True)
    first = tmp_path / "of the first epoch"
    fit(tmp_path / "stopped", plan, True, stop=STEPS).save_checkpoint(first)
    [of_new] = quiet().validate(Net(plan, True), loader(2), ckpt_path=first, verbose=False)
    [again] = quiet().validate(trained.module, loader(2), ckpt_path=first, verbose=False)
    assert again == of_new
    trained.module.turned = True  # by the program, which counts
    quiet().validate(trained.module, loader(2), ckpt_path=first, verbose=False)
    assert trained.module.turned

    def continued(module: TrainModule, epochs: int) -> Any:
        settings = {"max_epochs": epochs, "enable_checkpointing": True, "default_root_dir": tmp_path / "continued"}
        trainer = quiet(callbacks=[ModelCheckpoint()], **settings)
        trainer.fit(module, loader(STEPS), ckpt_path="last")
        return trainer

    module = Net(plan, True)
    for epochs in (2, 2, 3):
        continued(module, epochs)
    expected = result(fit(tmp_path / "whole", plan, True, num_sanity_val_steps=0))[0]
    assert result(continued(Net(plan, True), EPOCHS))[0] == expected


class Lazy(torch.optim.SGD):
    """Makes objects of its own in its first step: no plain values, which no rewind may take away."""

    def step(self, closure: Any = None) -> Any:
        if not hasattr(self, "steps"):
            self.steps, self.scratch, self.buffer = 0, [1.0], torch.zeros(1)
        self.steps += 1
        return super().step(closure)


def test_going_back_keeps_the_objects_that_an_optimizer_has_made() -> None:
    module = nn.Linear(2, 1)
    optimizer = Lazy(module.parameters(), lr=0.1)
    changes = HookChanges(module, [optimizer], {})
    changes.begin()
    optimizer.step()
    state = changes.state_dict()
    optimizer.step()
    changes.load_state_dict(state)
    assert (optimizer.steps, optimizer.scratch, optimizer.buffer.tolist()) == (1, [1.0], [0.0])
