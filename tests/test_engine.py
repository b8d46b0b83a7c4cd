"""A loop of one's own through the Engine, on one process: the bits of a hand-written loop, exact resume, messages."""

from __future__ import annotations

import copy
import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.optim import LBFGS, SGD, AdamW
from torch.optim.lr_scheduler import CosineAnnealingLR, StepLR
from torch.utils.data import DataLoader, TensorDataset

from tests.helpers.compare import QUIET, assert_same_bits
from tests.messages import raises_recorded
from trainer import CheckpointError, ConfigError, Engine, Trainer, TrainModule
from trainer.checkpoint.left_out import LeftOutError
from trainer.engine.model import Adapter
from trainer.errors import NotRunningError

CPU: dict[str, Any] = {"accelerator": "cpu", "devices": 1, "seed": 7}
FEATURES = 6


def dataset(samples: int = 22) -> TensorDataset:
    inputs = torch.randn(samples, FEATURES, generator=torch.Generator().manual_seed(1))
    return TensorDataset(inputs, inputs.sum(dim=1, keepdim=True))


def make_net() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(FEATURES, 8), nn.Dropout(0.3), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1))


def weights(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in module.state_dict().items()}


# -- parity ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["32-true", "64-true", "bf16-mixed"])
def test_it_trains_to_the_bits_of_a_hand_written_loop(precision: str) -> None:
    batches = list(DataLoader(dataset(), batch_size=4))
    by_hand = make_net().double() if precision == "64-true" else make_net()
    optimizer = AdamW(by_hand.parameters(), lr=1e-2)
    scheduler = CosineAnnealingLR(optimizer, 12)
    for _ in range(2):
        for x, y in batches:
            if precision == "64-true":
                x, y = x.double(), y.double()
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16-mixed"):
                loss = mse_loss(by_hand(x), y)
            loss.backward()
            nn.utils.clip_grad_norm_(by_hand.parameters(), 0.5)
            optimizer.step()
            scheduler.step()
    with Engine(precision=precision, **CPU) as engine:
        net = make_net()
        ours = AdamW(net.parameters(), lr=1e-2)
        model, ours = engine.setup(net, ours)
        schedule = CosineAnnealingLR(ours, 12)
        loader = engine.setup_dataloaders(batches)
        for _ in range(2):
            for x, y in loader:
                ours.zero_grad()
                engine.backward(mse_loss(model(x), y))
                engine.clip_gradients(model, ours, max_norm=0.5)
                ours.step()
                schedule.step()
    assert_same_bits(weights(net), weights(by_hand))
    assert ours.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]


def test_accumulation_is_one_big_batch_and_lbfgs_steps_with_a_closure() -> None:
    with Engine(**CPU) as engine:
        net = nn.Linear(FEATURES, 1)
        start = weights(net)
        model, optimizer = engine.setup(net, SGD(net.parameters(), lr=0.1))
        (x, y) = dataset(8).tensors
        for position in range(2):
            with engine.no_backward_sync(model, enabled=position == 0):
                part = slice(4 * position, 4 * position + 4)
                engine.backward(mse_loss(model(x[part]), y[part]) / 2)
        optimizer.step()
        once = nn.Linear(FEATURES, 1)
        once.load_state_dict(start)
        mse_loss(once(x), y).backward()
        SGD(once.parameters(), lr=0.1).step()
        torch.testing.assert_close(weights(net), weights(once))

        second = nn.Linear(FEATURES, 1)
        solver_model, solver = engine.setup(second, LBFGS(second.parameters(), line_search_fn="strong_wolfe"))

        def closure() -> torch.Tensor:
            solver.zero_grad()
            loss = mse_loss(solver_model(x), y)
            engine.backward(loss)
            return loss

        first = mse_loss(second(x), y)
        assert torch.equal(solver.step(closure), first)  # as torch's LBFGS returns it
        assert mse_loss(second(x), y).item() < 1e-3


class WithStep(nn.Linear):
    def training_step(self, batch: Any) -> torch.Tensor:
        return mse_loss(self(batch[0]), batch[1])


def test_the_steps_of_any_module_run_like_forward() -> None:
    with Engine(**CPU) as engine:
        net = WithStep(FEATURES, 1)
        model, optimizer = engine.setup(net, SGD(net.parameters(), lr=0.1))
        model.mark_forward_method(model.training_step)  # is marked already
        before = weights(net)
        engine.backward(model.training_step(dataset(8).tensors))
        optimizer.step()
        assert not torch.equal(before["weight"], net.weight)


def test_a_strategy_calls_the_forward_or_the_method_that_was_called() -> None:
    net, batch = WithStep(FEATURES, 1), dataset(8).tensors
    adapter = Adapter(net)
    assert torch.equal(adapter.training_step("forward", (batch[0],), {}), net(batch[0]))
    assert torch.equal(adapter.training_step("training_step", (batch,), {}), net.training_step(batch))


def test_two_optimizers_share_a_loss_scale() -> None:
    with Engine(precision="16-mixed", **CPU) as engine:
        nets = [nn.Linear(4, 4), nn.Linear(4, 1)]
        (first, opt_first), (second, opt_second) = (engine.setup(net, SGD(net.parameters(), lr=0.1)) for net in nets)
        before = [weights(net) for net in nets]
        x = torch.randn(8, 4)
        engine.backward(second(first(x)).square().mean())
        expected = [[p.grad / 2**16 for p in net.parameters()] for net in nets]
        opt_second.step()  # the scale may change here, and the other's gradients wait with the former one
        engine.backward(second(first(x)).mean() * 0)
        opt_first.step()
        for net, start, gradients in zip(nets, before, expected, strict=True):
            for (name, value), gradient in zip(net.state_dict().items(), gradients, strict=True):
                torch.testing.assert_close(value, start[name] - 0.1 * gradient, rtol=1e-3, atol=1e-4)
        assert model_scale(first) is model_scale(second)


def model_scale(model: Any) -> Any:
    return model._strategy.scaler


def test_what_comes_out_of_autocast_is_float32_and_a_marked_method_runs_as_forward() -> None:
    class Net(nn.Linear):
        def twice(self, x: torch.Tensor) -> torch.Tensor:
            return self(x) * 2

    with Engine(precision="bf16-mixed", **CPU) as engine:
        net = Net(4, 4)
        model, _ = engine.setup(net, SGD(net.parameters(), lr=0.1))
        x = torch.randn(2, 4)
        assert model(x).dtype is torch.float32
        assert model.in_features == 4
        assert not model.eval().training
        assert not net.training
        with raises_recorded(ConfigError):
            model.twice(x)
        model.mark_forward_method("twice")
        assert_same_bits(model.twice(x), model(x) * 2)
        assert list(model.state_dict()) == list(dict(model.named_parameters())) == ["weight", "bias"]


# -- checkpoints -------------------------------------------------------------------------------------------------------


def train(path: Path, stop: int | None = None, resume: bool = False, workers: int = 0) -> dict[str, Any]:
    """Train three epochs, or until step `stop`, which is saved; return weights, optimizer state and losses."""
    with Engine(**CPU) as engine:
        net = make_net()
        model, optimizer = engine.setup(net, AdamW(net.parameters(), lr=1e-2))
        scheduler = CosineAnnealingLR(optimizer, 18)
        data = DataLoader(dataset(), batch_size=4, shuffle=True, num_workers=workers)
        loader, held_out = engine.setup_dataloaders(data, [dataset(4).tensors])
        state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "step": 0, "losses": []}
        if resume:
            engine.load(path, state)
        for _ in range(loader.epoch, 3):
            for x, y in loader:
                optimizer.zero_grad()
                loss = mse_loss(model(x), y)
                engine.backward(loss)
                optimizer.step()
                scheduler.step()
                state["step"] += 1
                state["losses"].append(loss.item())
                if state["step"] == stop:
                    engine.save(path, state)
                    return state
            list(held_out)
        result = {"weights": weights(net), "optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict()}
        return {**result, "losses": state["losses"], "step": state["step"]}


@pytest.mark.parametrize(("stop", "workers"), [(9, 0), (8, 2), (12, 0), (1, 0)])
def test_a_broken_loop_goes_on_to_the_same_bits(stop: int, workers: int, tmp_path: Path) -> None:
    unbroken = train(tmp_path / "none", workers=workers)
    train(tmp_path / "checkpoint", stop=stop, workers=workers)
    assert_same_bits(train(tmp_path / "checkpoint", resume=True, workers=workers), unbroken)


def test_generators_of_models_and_optimizers_go_on(tmp_path: Path) -> None:
    def draws(stop: int | None, resume: bool) -> list[float]:
        with Engine(**CPU) as engine:
            net = make_net()
            net[0].noise = random.Random(1)
            model, optimizer = engine.setup(net, SGD(net.parameters(), lr=0.1))
            optimizer.optimizer.noise = torch.Generator().manual_seed(1)
            state, drawn = {"model": model, "optimizer": optimizer}, []
            if resume:
                engine.load(tmp_path / "checkpoint", state)
            for step in range(3 if resume else 0, 6):
                drawn.append(net[0].noise.random() + float(torch.rand((), generator=optimizer.optimizer.noise)))
                if step + 1 == stop:
                    engine.save(tmp_path / "checkpoint", state)
            return drawn

    whole = draws(3, resume=False)
    assert draws(None, resume=True) == whole[3:]


@pytest.mark.parametrize(("look", "stop"), [("before load", 5), ("after load", 4), ("after load", 6)])
def test_a_look_at_a_batch_and_an_evaluation_by_next_take_no_epoch(look: str, stop: int, tmp_path: Path) -> None:
    def run(stop: int | None = None, resume: bool = False) -> list[list[int]]:
        with Engine(**CPU) as engine:
            net = nn.Linear(1, 1)
            model, optimizer = engine.setup(net, SGD(net.parameters(), lr=0.1))
            loader = engine.setup_dataloaders(DataLoader(list(range(12)), batch_size=3, shuffle=True))
            evaluated = engine.setup_dataloaders(DataLoader(list(range(100, 112)), batch_size=3), training=False)
            state, seen = {"model": model, "optimizer": optimizer}, list[list[int]]()
            if look == "before load":
                next(iter(loader))
            if resume:
                engine.load(tmp_path / "saved", state)
            if look == "after load":
                next(iter(loader), None)  # of an epoch at its end nothing is left
            for epoch in range(loader.epoch, 3):
                for batch in loader:
                    engine.backward(model(batch[:, None].float()).mean())
                    optimizer.step()
                    batches = iter(evaluated)
                    seen.append([epoch, *batch.tolist(), *next(batches).tolist(), *next(batches).tolist()])
                    if len(seen) == stop:
                        engine.save(tmp_path / "saved", state)
                        return seen
            return seen

    unbroken = run()
    assert [one[0] for one in unbroken] == [0] * 4 + [1] * 4 + [2] * 4
    assert sorted(number for one in unbroken[:4] for number in one[1:4]) == [*range(12)]
    assert {tuple(one[4:]) for one in unbroken} == {(*range(100, 106),)}
    assert run(stop) + run(resume=True) == unbroken


@pytest.mark.parametrize("at", ["between two optimizers", "between two updates", "before the step"])
def test_a_save_that_would_leave_out_a_step_is_refused(at: str, tmp_path: Path) -> None:
    with Engine(**CPU) as engine:
        nets = [nn.Linear(FEATURES, 1), nn.Linear(FEATURES, 1)]
        (one, stepping), (other, following) = (engine.setup(net, SGD(net.parameters(), lr=0.1)) for net in nets)
        loader = engine.setup_dataloaders(DataLoader(dataset(16), batch_size=4))
        state = {"one": one, "other": other, "stepping": stepping, "following": following}
        engine.save(tmp_path / "start", state)
        for x, y in loader:
            if loader.batch == 3 and at == "before the step":
                engine.save(tmp_path / "saved", state)
            engine.backward(mse_loss(one(x), y) + mse_loss(other(x), y))
            if loader.batch < 3:
                stepping.step()
                following.step()
                engine.save(tmp_path / "saved", state)
                continue
            if at == "between two optimizers":
                stepping.step()
                engine.save(tmp_path / "saved", state)
            elif at == "between two updates":
                stepping.step()
                following.step()
                engine.save(tmp_path / "saved", state)
                engine.backward(mse_loss(other(x), y))
            with raises_recorded(ConfigError):
                following.step()
            return


@pytest.mark.parametrize("by", ["optimizer", "model"])
def test_a_batch_may_be_given_up_by_zero_grad(by: str, tmp_path: Path) -> None:
    with Engine(**CPU) as engine:
        net = make_net()
        model, optimizer = engine.setup(net, AdamW(net.parameters()))
        engine.backward(model(torch.zeros(2, FEATURES)).mean() * math.nan)
        with raises_recorded(ConfigError):
            engine.save(tmp_path / "one", {"model": model, "optimizer": optimizer})
        (optimizer if by == "optimizer" else model).zero_grad()
        engine.save(tmp_path / "one", {"model": model, "optimizer": optimizer})


@pytest.mark.parametrize("by", ["optimizer", "model"])
def test_the_overflow_of_a_batch_that_was_given_up_lowers_the_scale_also_of_a_checkpoint(
    by: str, tmp_path: Path
) -> None:
    with Engine(precision="16-mixed", **CPU) as engine:
        model, optimizer = engine.setup(net := make_net(), AdamW(net.parameters()))
        engine.backward(model(torch.zeros(2, FEATURES)).mean() * math.inf)
        assert not torch.isfinite(engine.clip_gradients(model, optimizer, max_norm=1.0))
        (optimizer if by == "optimizer" else model).zero_grad()
        engine.save(tmp_path / "one", {"model": model, "optimizer": optimizer})
        assert model_scale(model).get_scale() == 2**15
        engine.backward(model(torch.zeros(2, FEATURES)).mean())
        optimizer.step()
        assert model_scale(model).get_scale() == 2**15


def test_gradients_that_wait_are_saved_with_the_loss_scale_of_then(tmp_path: Path) -> None:
    x = torch.ones(2, 4)

    def begin(engine: Engine) -> dict[str, Any]:
        one, stepping = engine.setup(net := nn.Linear(4, 1), SGD(net.parameters(), 0.1))
        other, waiting = engine.setup(net := nn.Linear(4, 1), SGD(net.parameters(), 0.1))
        model_scale(one).set_growth_interval(1)
        return {"one": one, "other": other, "stepping": stepping, "waiting": waiting}

    def end(state: dict[str, Any], engine: Engine) -> dict[str, torch.Tensor]:
        engine.backward(state["other"](x).mean() / 16, model=state["other"])
        before = state["other"].module.weight.detach().clone()
        state["waiting"].step()
        torch.testing.assert_close(state["other"].module.weight, before - 0.2 / 16)  # of two gradients
        return weights(state["other"].module)

    with Engine(precision="16-mixed", **CPU) as engine:
        state = begin(engine)
        engine.backward(state["other"](x).mean() / 16, model=state["other"])
        engine.backward(state["one"](x).mean() / 16, model=state["one"])
        state["stepping"].step()  # the scale is doubled here
        engine.save(tmp_path / "one", state)
        whole = end(state, engine)
    with Engine(precision="16-mixed", **CPU) as engine:
        state = begin(engine)
        engine.load(tmp_path / "one", state)
        assert_same_bits(end(state, engine), whole)


def test_a_load_inside_the_training_takes_back_gradients_that_wait(tmp_path: Path) -> None:
    x = torch.ones(2, 4)
    with Engine(**CPU) as engine:
        one, stepping = engine.setup(net := nn.Linear(4, 1), SGD(net.parameters(), 0.1))
        other, waiting = engine.setup(net := nn.Linear(4, 1), SGD(net.parameters(), 0.1))
        state = {"one": one, "other": other, "stepping": stepping, "waiting": waiting}
        engine.save(tmp_path / "one", state)
        engine.backward(other(x).mean(), model=other)
        engine.backward(one(x).mean(), model=one)
        stepping.step()
        engine.load(tmp_path / "one", state)
        before = other.module.weight.detach().clone()
        engine.backward(other(x).mean(), model=other)
        waiting.step()
        torch.testing.assert_close(other.module.weight, before - 0.1)  # of one gradient


@pytest.mark.parametrize("names", [("net", "net.ema"), ("model", "model.model"), ("a", "a.0", "a..0")])
def test_names_with_dots_are_kept_apart(names: tuple[str, ...], tmp_path: Path) -> None:
    def models(engine: Engine, fill: float) -> dict[str, Any]:
        made = {name: engine.setup(nn.Sequential(nn.Linear(2, 2))) for name in names}
        for number, model in enumerate(made.values()):
            nn.init.constant_(model.module[0].weight, fill * (number + 1))
        return made

    with Engine(**CPU) as engine:
        engine.save(tmp_path / "one", models(engine, 1.0))
    with Engine(**CPU) as engine:
        engine.load(tmp_path / "one", read := models(engine, 0.0))
        assert [float(model.module[0].weight.detach()[0, 0]) for model in read.values()] == [*range(1, len(names) + 1)]


@pytest.mark.parametrize("spoiled", ["scheduler", "seen"])
def test_a_checkpoint_is_written_without_what_it_cannot_hold(
    spoiled: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def state_of(engine: Engine) -> dict[str, Any]:
        model, optimizer = engine.setup(net := make_net(), SGD(net.parameters(), 0.1))
        return {"model": model, "optimizer": optimizer, "scheduler": StepLR(optimizer, 1), "seen": [1], "step": 3}

    with Engine(**CPU) as engine:
        state = state_of(engine)
        state["scheduler"].seen, weight = [1], state["model"].module[0].weight
        if spoiled == "seen":
            state["seen"] = {len}
        else:
            state["scheduler"].seen = {len}
        nn.init.constant_(weight, 5.0)
        with raises_recorded(LeftOutError):
            engine.save(tmp_path / "one", state)
    with Engine(**CPU) as engine:
        state = state_of(engine)
        state["step"] = 0
        engine.load(tmp_path / "one", state)
        assert (state["seen"], state["step"], float(state["model"].module[0].weight.detach().min())) == ([1], 3, 5.0)
        kind = "values" if spoiled == "seen" else "stateful"
        assert f"begins again: engine['{kind}']['{spoiled}']" in caplog.text
        state["optimizer"].param_groups[0]["seen"] = {len}
        with raises_recorded(CheckpointError):
            engine.save(tmp_path / "two", state)
        assert not (tmp_path / "two").exists()


def test_a_load_inside_the_loop_is_refused_and_after_it_goes_back(tmp_path: Path) -> None:
    with Engine(**CPU) as engine:
        net = make_net()
        model, optimizer = engine.setup(net, SGD(net.parameters(), 0.1))
        state = {"model": model, "optimizer": optimizer}
        loader = engine.setup_dataloaders(DataLoader(dataset(), batch_size=4))
        seen = []
        for _ in range(2):
            for inputs, targets in loader:
                seen.append(loader.batch)
                engine.backward(mse_loss(model(inputs), targets))
                optimizer.step()
                optimizer.zero_grad()
                if seen == [1, 2]:
                    engine.save(tmp_path / "good", state)
                    saved = weights(net)
                if seen == [1, 2, 3, 4]:
                    with raises_recorded(ConfigError):
                        engine.load(tmp_path / "good", state)
                    break
            if len(seen) == 4:
                engine.load(tmp_path / "good", state)
                assert_same_bits(weights(net), saved)
        assert seen == [1, 2, 3, 4, 3, 4, 5, 6]


def test_labels_are_not_rounded_and_outputs_are_float32_in_16_bits() -> None:
    labels = torch.tensor([[1001.0], [1003.0]])
    with Engine(precision="bf16-true", **CPU) as engine:
        net = nn.Linear(FEATURES, 1)
        model, _ = engine.setup(net, SGD(net.parameters(), 0.1))
        (batch,) = engine.setup_dataloaders(DataLoader(TensorDataset(torch.zeros(2, FEATURES), labels), batch_size=2))
        assert torch.equal(batch[1], labels)
        assert torch.equal(engine.to_device(labels), labels)
        assert model(batch[0]).dtype is torch.float32
        assert net.weight.dtype is torch.bfloat16


def test_two_iterators_of_one_loader_at_once_are_refused() -> None:
    with Engine(accelerator="cpu") as engine:
        loader = engine.setup_dataloaders(DataLoader(dataset(), 4, shuffle=True))
        with raises_recorded(ConfigError):
            next(zip(loader, loader, strict=True))
        iter(loader)  # one that is never asked is none
        assert len([*loader]) == 6
        assert (loader.epoch, loader.batch) == (1, 0)


class Module(TrainModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = make_net()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return mse_loss(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return AdamW(self.parameters(), lr=1e-2)


def test_checkpoints_of_the_trainer_and_the_engine_have_one_format(tmp_path: Path) -> None:
    trained = Module()
    trainer = Trainer(max_epochs=1, **CPU, **QUIET)
    trainer.fit(trained, DataLoader(dataset(), batch_size=4))
    trainer.save_checkpoint(tmp_path / "trainer")
    with Engine(**CPU) as engine:
        module = Module()
        model, optimizer = engine.setup(module, module.configure_optimizers())
        engine.load(tmp_path / "trainer", {"model": model, "optimizer": optimizer})
        assert_same_bits(weights(module), weights(trained))
        assert_same_bits(optimizer.state_dict()["state"], trainer.optimizers[0].state_dict()["state"])
        batch = dataset(4).tensors
        engine.backward(model.training_step(batch, 0))
        optimizer.step()
        engine.save(tmp_path / "engine", {"model": model, "optimizer": optimizer, "note": "here"})
        inner = engine.setup(trained.net)
        with raises_recorded(CheckpointError):
            engine.load(tmp_path / "trainer", {"model": inner})
        assert engine.load(tmp_path / "engine") == {"note": "here"}
    assert_same_bits(weights(Module.load_from_checkpoint(tmp_path / "engine")), weights(module))


# -- messages ----------------------------------------------------------------------------------------------------------


def test_arguments_are_checked_before_anything_starts() -> None:
    with raises_recorded(ConfigError):
        Engine(gradient_accumulation_steps=4)  # type: ignore[arg-type]
    with raises_recorded(ConfigError):
        Engine(precision="bf17-mixed")
    with raises_recorded(ConfigError):
        Engine(**CPU).setup(nn.Linear(1, 1))
    with raises_recorded(ConfigError):
        Engine(strategy="xla")


def test_loaders_are_set_up_within_the_block() -> None:
    with pytest.raises(NotRunningError, match="setup_dataloaders must be called inside"):
        Engine(**CPU).setup_dataloaders([[1]])


def test_mistakes_in_the_loop_are_reported_with_their_fix(tmp_path: Path) -> None:
    net = nn.Linear(2, 1)
    raw = SGD(net.parameters(), lr=0.1)
    loss = net(torch.ones(1, 2)).mean()
    with Engine(**CPU) as engine:
        with raises_recorded(ConfigError):
            engine.backward(loss)
        with raises_recorded(ConfigError):
            engine.setup(nn.Linear(2, 1), raw)
        model, optimizer = engine.setup(net, raw)
        with raises_recorded(ConfigError):
            engine.setup(net, raw)
        with raises_recorded(ConfigError):
            engine.backward(loss)
        with raises_recorded(ConfigError):
            optimizer.step()
        out = model(torch.ones(3, 2))
        with raises_recorded(ConfigError):
            engine.backward(out.mean().detach())
        engine.backward(out.mean())
        with raises_recorded(ConfigError):
            engine.save(tmp_path / "c", {"model": model})
        with raises_recorded(ConfigError):
            engine.clip_gradients(model, optimizer)
        with raises_recorded(ConfigError), engine.no_backward_sync(model):  # noqa: SIM117
            with engine.no_backward_sync(model):
                pass
        optimizer.step()
        for wrong in (net, DataLoader([1])):
            with raises_recorded(ConfigError):
                engine.save(tmp_path / "c", {"it": wrong})
        with raises_recorded(ConfigError):
            engine.setup_dataloaders(dataset())
        engine.save(tmp_path / "c", {"model": model, "optimizer": optimizer, "steps": 1})
        with raises_recorded(CheckpointError):
            engine.load(tmp_path / "c", {"model": model, "step": 0})
        loader = engine.setup_dataloaders([[1]])
        with raises_recorded(ConfigError):
            engine.load(tmp_path / "c", {"model": model, "optimizer": optimizer})
        del loader
        with torch.no_grad():
            net.bias.fill_(float("nan"))
        with raises_recorded(CheckpointError):
            engine.save(tmp_path / "c", {"model": model})


def test_a_copy_of_what_setup_returned_is_refused_in_words() -> None:
    net = nn.Linear(2, 1)
    with Engine(**CPU) as engine:
        model, optimizer = engine.setup(net, SGD(net.parameters(), lr=0.1))
        with raises_recorded(ConfigError):
            copy.deepcopy(model)
        with raises_recorded(ConfigError):
            copy.deepcopy(optimizer)
        assert_same_bits(copy.deepcopy(model.module).state_dict(), net.state_dict())
        assert copy.deepcopy(optimizer.state_dict())["param_groups"][0]["lr"] == 0.1


def test_numbers_that_were_infinite_in_setup_are_saved_and_others_are_not(tmp_path: Path) -> None:
    with Engine(**CPU) as engine:
        net = make_net()
        net.register_buffer("mask", torch.full((3, 3), -math.inf).triu(1))
        model, optimizer = engine.setup(net, AdamW(net.parameters()))
        parts = {"model": model, "adam": optimizer}

        def assert_refused() -> None:
            with raises_recorded(CheckpointError):
                engine.save(tmp_path / "c", parts)

        engine.backward(model(torch.ones(3, FEATURES)).mean())
        optimizer.step()
        engine.save(tmp_path / "c", parts)
        net.mask.fill_(math.nan)
        assert_refused()
        net.mask.zero_()
        optimizer.param_groups[0]["lr"] = math.nan
        assert_refused()
        optimizer.param_groups[0]["lr"] = 0.1
        optimizer.state[net[0].bias]["exp_avg_sq"].fill_(math.inf)
        assert_refused()


def test_collectives_of_one_process_return_what_they_get() -> None:
    with Engine(**CPU) as engine:
        assert engine.all_reduce({"a": 2.0})["a"] == 2.0
        assert engine.broadcast("x") == "x"
        assert engine.all_gather(3) == 3
        several = {"a": [torch.ones(2, 3), None]}
        assert engine.gather_uneven(several) is several
        assert (engine.rank, engine.global_rank, engine.world_size, engine.is_global_zero) == (0, 0, 1, True)
        engine.barrier()
        with raises_recorded(ConfigError):
            engine.all_reduce(1.0, reduce_op="median")  # type: ignore[arg-type]


class Annealed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.extra, self.heat, self.drop = nn.Linear(4, 1), nn.Linear(4, 1), 1.0, nn.Dropout(0.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.drop(self.layer(x) + self.extra(x)) / self.heat


def test_what_the_loop_changes_of_the_model_is_restored(tmp_path: Path) -> None:
    def train(first: int, last: int, name: str) -> Any:
        torch.manual_seed(0)
        with Engine(accelerator="cpu", seed=1) as engine:
            made = Annealed()
            model, optimizer = engine.setup(made, torch.optim.Adam(made.layer.parameters(), 0.1))
            if first:
                engine.load(tmp_path / name, {"model": model, "optimizer": optimizer})
            for epoch in range(first, last):
                model.module.heat *= 0.5
                if epoch == 1:
                    model.module.drop.p = 0.5
                    optimizer.add_param_group({"params": [*model.module.extra.parameters()], "lr": 0.01})
                engine.backward(model(torch.ones(8, 4)).square().mean())
                optimizer.step()
                optimizer.zero_grad()
            engine.save(tmp_path / name, {"model": model, "optimizer": optimizer})
            return made.heat, made.drop.p, [group["lr"] for group in optimizer.param_groups], made.state_dict()

    whole = train(0, 4, "whole")
    train(0, 2, "parts")
    heat, p, rates, weights = train(2, 4, "parts")
    assert (heat, p, rates) == whole[:3] == (0.0625, 0.5, [0.1, 0.01])
    assert all(value.equal(whole[3][name]) for name, value in weights.items())
