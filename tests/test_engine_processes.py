"""A loop of one's own through the Engine on two processes: as one big batch, with exact resume, on every strategy."""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.functional import mse_loss
from torch.optim import SGD, AdamW
from torch.utils.data import DataLoader, TensorDataset

from tests.helpers.compare import assert_same_bits
from tests.helpers.processes import run_distributed
from tests.tiers import selected
from trainer import ConfigError, Engine
from trainer.strategies import DDPStrategy

STRATEGIES = ["ddp", "fsdp", "deepspeed_stage_1", "deepspeed_stage_2", "deepspeed_stage_3"]
TWO: dict[str, Any] = {"accelerator": "cpu", "devices": 2, "seed": 7}
FEATURES, EPOCHS = 6, 2


def dataset(samples: int = 37) -> TensorDataset:
    inputs = torch.randn(samples, FEATURES, generator=torch.Generator().manual_seed(1))
    return TensorDataset(inputs, inputs.sum(dim=1, keepdim=True))


def make_net(dropout: float = 0.0) -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, 1))


def train(
    strategy: str, folder: Path, stop: int | None = None, resume: bool = False, dropout: float = 0.0, window: int = 1
) -> dict[str, Any]:
    """Train on two processes with micro-batches of 4; return full weights and this process's losses."""
    with Engine(strategy=strategy, **TWO) as engine:
        net = make_net(dropout)
        # A large eps: Adam divides by the root of tiny gradients, which magnifies mere rounding.
        model, optimizer = engine.setup(net, AdamW(net.parameters(), lr=1e-2, eps=1e-3))
        loader = engine.setup_dataloaders(DataLoader(dataset(), batch_size=4, shuffle=dropout > 0))
        state = {"model": model, "optimizer": optimizer, "step": 0, "losses": []}
        if resume:
            engine.load(folder, state)
        for _ in range(loader.epoch, EPOCHS):
            for number, (x, y) in enumerate(loader, loader.batch + 1):
                last = number % window == 0 or number == len(loader)
                with engine.no_backward_sync(model, enabled=not last):
                    loss = mse_loss(model(x), y)
                    engine.backward(loss * loader.weight / window)
                state["losses"].append(loss.item())
                if not last:
                    continue
                engine.clip_gradients(model, optimizer, max_norm=0.5)
                optimizer.step()
                optimizer.zero_grad()
                state["step"] += 1
                if state["step"] == stop:
                    engine.save(folder, {**state, "losses": []})
                    return state["losses"]
        return {"weights": engine.full_state_dict(model, everywhere=True), "losses": state["losses"]}


def all_on_this_process(strategies: list[str], folder: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for strategy in strategies:
        place = Path(folder) / strategy
        before = train(strategy, place, stop=4, dropout=0.3)
        found[strategy] = {
            "plain": train(strategy, place),
            "window": train(strategy, place, window=2),
            "unbroken": train(strategy, place, dropout=0.3),
            "resumed": [before, train(strategy, place, resume=True, dropout=0.3)],
        }
    return found


@pytest.fixture(scope="module")
def on_two(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("engine")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        return folder, run_distributed(all_on_this_process, 2, selected(request, "strategy"), str(folder), timeout=400)


def by_hand(window: int) -> dict[str, torch.Tensor]:
    """Train on one process, with each window of both processes as one big batch."""
    net = make_net()
    optimizer = AdamW(net.parameters(), lr=1e-2, eps=1e-3)
    for _ in range(EPOCHS):
        batches = list(DataLoader(dataset(), batch_size=8))
        for start in range(0, len(batches), window):
            optimizer.zero_grad()
            for x, y in batches[start : start + window]:
                (mse_loss(net(x), y) / window).backward()
            nn.utils.clip_grad_norm_(net.parameters(), 0.5)
            optimizer.step()
    return dict(net.state_dict())


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_two_processes_train_as_one_big_batch_and_resume_to_the_same_bits(strategy: str, on_two: Any) -> None:
    folder, ranks = on_two
    for name, window in {"plain": 1, "window": 2}.items():
        expected = by_hand(window)
        for rank in ranks:
            for key, value in expected.items():
                torch.testing.assert_close(rank[strategy][name]["weights"][key], value, rtol=1e-5, atol=1e-6)
    for rank in ranks:
        unbroken, (before, after) = rank[strategy]["unbroken"], rank[strategy]["resumed"]
        assert_same_bits(after["weights"], unbroken["weights"])
        assert_same_bits([*before, *after["losses"]], unbroken["losses"])
    with Engine(accelerator="cpu", devices=1, seed=7) as engine:
        net = make_net(0.3)
        model, optimizer = engine.setup(net, AdamW(net.parameters(), lr=1e-2, eps=1e-3))
        loader = engine.setup_dataloaders(DataLoader(dataset(), batch_size=8, shuffle=True))
        state = {"model": model, "optimizer": optimizer, "step": 0}
        engine.load(folder / strategy, state)
        assert (state["step"], loader.epoch, loader.batch) == (4, 0, 4)
        assert optimizer.state[net[0].weight]["step"] == 4
        assert len(list(loader)) == 1


# -- what processes do together ----------------------------------------------------------------------------------------


def refused_on_this_process() -> dict[str, str]:
    found = {}
    for strategy in ("ddp", "fsdp"):
        with Engine(strategy=strategy, **TWO) as engine:
            net, other = nn.Linear(2, 2), nn.Linear(2, 2)
            other.weight = net.weight
            model, optimizer = engine.setup(net, SGD(net.parameters(), 0.1))
            with pytest.raises(ConfigError) as error:
                engine.setup(other, SGD(other.parameters(), 0.1))
            found[f"shared, {strategy}"] = str(error.value)
            with engine.no_backward_sync(model):
                engine.backward(model(torch.ones(2, 2)).mean())
            with pytest.raises(ConfigError) as error:
                optimizer.step()
            found[f"held back, {strategy}"] = str(error.value)
            third = nn.Linear(2, 1)
            beside, of_beside = engine.setup(third, SGD(third.parameters(), 0.1))
            engine.backward(beside(torch.ones(2, 2)).mean())
            of_beside.step()
            for what, use in (("step", optimizer.step), ("save", partial(engine.save, "held", {"model": model}))):
                with pytest.raises(ConfigError) as error:
                    use()
                found[f"{what} while they are held back, {strategy}"] = str(error.value)
            optimizer.zero_grad()
            engine.backward(model(torch.ones(2, 2)).mean())
            optimizer.step()
    with Engine(strategy=DDPStrategy(static_graph=True), **TWO) as engine:
        model, _ = engine.setup(net := nn.Linear(2, 2), SGD(net.parameters(), lr=0.1))
        outputs = model(torch.zeros(2, 2))
        engine.backward(outputs.mean(), retain_graph=True)
        with pytest.raises(ConfigError) as error:
            engine.backward(outputs.square().mean())
        found["static graph"] = str(error.value)
    return found


def test_gradients_that_are_not_reduced_and_parameters_of_two_models_are_refused() -> None:
    for found in run_distributed(refused_on_this_process, 2):
        assert "this is a second one. Call backward once" in found["static graph"]
        for strategy in ("ddp", "fsdp"):
            assert "the parameter weight is also in a model that was set up before" in found[f"shared, {strategy}"]
            for held in ("held back", "step while they are held back"):
                assert "give enabled=False for the last micro-batch" in found[f"{held}, {strategy}"]
            assert (
                "engine.save while gradients wait in no_backward_sync"
                in found[f"save while they are held back, {strategy}"]
            )


def counting_hook(calls, bucket):  # type: ignore[no-untyped-def]  # torch refuses annotations that are strings
    calls.append(bucket.index())
    return default_hooks.allreduce_hook(dist.group.WORLD, bucket)


def together() -> dict[str, Any]:
    calls: list[int] = []
    found: dict[str, Any] = {}
    with Engine(strategy=DDPStrategy(comm_hook=counting_hook, comm_hook_state=calls), **TWO) as engine:
        rank = engine.global_rank
        net = nn.Linear(2, 1)
        model, optimizer = engine.setup(net, SGD(net.parameters(), lr=0.1))
        for number in range(1, 7):
            with engine.no_backward_sync(model, enabled=number % 3 != 0):
                engine.backward(model(torch.ones(2, 2)).mean())
            if number % 3 == 0:
                optimizer.step()
        found["reductions"] = len(calls)
        found["reduced"] = [engine.all_reduce(float(rank + 1), op).item() for op in ("mean", "sum", "min", "max")]
        found["gathered"] = engine.all_gather({"a": torch.tensor([rank])})["a"].tolist()
        found["broadcast"] = [engine.broadcast(f"from {rank}", src) for src in (0, 1)]
        held_out = engine.setup_dataloaders(DataLoader(list(range(7)), batch_size=2), training=False)
        found["held out"] = [x for batch in held_out for x in batch.tolist()]
        uneven = engine.setup_dataloaders(iter([[1]] * (3 + rank)))
        found["uneven"] = len(list(uneven))
        found["drawn"] = torch.rand(1).item()
        for name, mistake in mistakes(engine, net, model, optimizer).items():
            with pytest.raises(ConfigError) as error:
                mistake()
            found[name] = str(error.value)
        engine.backward(model(torch.ones(2, 2)).mean())
        net.weight.requires_grad_(False)
        with pytest.raises(ConfigError) as error:
            optimizer.step()
        found["frozen"] = str(error.value)
    return found


def mistakes(engine: Engine, net: Any, model: Any, optimizer: Any) -> dict[str, Any]:
    def inside() -> None:
        with engine.no_backward_sync(model):
            engine.backward(model(torch.ones(2, 2)).mean())
            optimizer.step()

    return {
        "raw": lambda: net(torch.ones(1, 2)),
        "inside": inside,
        "paths": lambda: engine.save(f"at {engine.rank}", {}),
    }


def test_gradients_travel_once_a_step_and_values_between_processes() -> None:
    ranks = run_distributed(together, 2)
    for rank, found in enumerate(ranks):
        assert found["reductions"] == 2
        assert found["reduced"] == [1.5, 3.0, 1.0, 2.0]
        assert found["gathered"] == [[0], [1]]
        assert found["broadcast"] == ["from 0", "from 1"]
        assert found["uneven"] == 3
        assert "call the model that engine.setup returned" in found["raw"]
        assert "enabled=False for the last" in found["inside"]
        assert f"engine.save(at {rank})" in found["paths"] or "engine.save(at 0)" in found["paths"]
        assert "frozen or unfrozen since engine.setup" in found["frozen"]
    assert sorted(ranks[0]["held out"] + ranks[1]["held out"]) == list(range(7))
    assert ranks[0]["drawn"] != ranks[1]["drawn"]


def save_alone() -> tuple[str, list[str]]:
    reported, logged = "", []
    handler = logging.Handler()
    handler.emit = lambda record: logged.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("trainer").addHandler(handler)
    with Engine(strategy="ddp", **TWO) as engine:
        net = nn.Linear(2, 1)
        model, optimizer = engine.setup(net, SGD(net.parameters(), lr=0.1))
        for step in range(3):
            engine.backward(model(torch.ones(2, 2)).mean())
            optimizer.step()
            if step == 1 and engine.is_global_zero:
                try:
                    engine.save("alone", {"model": model})
                except ConfigError as error:
                    reported = str(error)
    return reported, logged


def test_a_process_that_saves_alone_and_a_loop_without_a_loader_of_its_own_are_reported() -> None:
    reported, logged = run_distributed(save_alone, 2)[0]
    assert "rank 1 has gone on without" in reported
    assert len([text for text in logged if "no loader is set up" in text]) == 1


def test_what_a_strategy_cannot_do_is_refused_in_words() -> None:
    for words in run_distributed(refusals, 2):
        assert "trains one model with one optimizer" in words[0]
        assert "pipeline_parallel runs the backward" in words[1]


def refusals() -> list[str]:
    from trainer.strategies import FSDPStrategy

    found = []
    with Engine(strategy="deepspeed_stage_2", **TWO) as engine:
        first, second = nn.Linear(2, 2), nn.Linear(2, 2)
        engine.setup(first, SGD(first.parameters(), lr=0.1))
        with pytest.raises(ConfigError) as error:
            engine.setup(second, SGD(second.parameters(), lr=0.1))
        found.append(str(error.value))
    with Engine(strategy=FSDPStrategy(pipeline_parallel=2), **TWO) as engine:
        with pytest.raises(ConfigError) as error:
            engine.setup(nn.Sequential(first, second), SGD(first.parameters(), lr=0.1))
        found.append(str(error.value))
    return found
