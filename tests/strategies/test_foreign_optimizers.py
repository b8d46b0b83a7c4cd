"""Optimizers that keep more than torch's do are resumed to the same bits, or refused in words."""

from __future__ import annotations

from collections import Counter, defaultdict
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import SGD, AdamW, Optimizer
from torch.utils.data import DataLoader

from tests.helpers.compare import assert_same_bits
from tests.helpers.strategy_models import MLP
from tests.helpers.strategy_runs import WAYS, run_each, skip_if_missing
from tests.helpers.toy import Toy, loader, quiet
from tests.messages import raises_recorded
from tests.tiers import selected
from trainer import ConfigError, seed_everything
from trainer.errors import CheckpointError
from trainer.optimizers import optimizers_inside

STEPS, NAMES = 4, ("single", "FSDP x2", "ZeRO-2 x2")


class Counting(SGD):
    """As MADGRAD: a key in `state` that is no parameter. Options of its groups change their types."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1)
        self.param_groups[0].update(phase=False, rates=())
        self.state["k"] = torch.tensor([0])  # type: ignore[index, assignment]

    def step(self, closure: Any = None) -> Any:
        self.state["k"] += 1  # type: ignore[index, operator]
        for group in self.param_groups:
            group["lr"] = 0.1 / float(self.state["k"])  # type: ignore[index, arg-type]
            group["lr"] *= 1 if group["phase"] is False else 0.5 + 0.1 * len(group["rates"])
            group["phase"], group["rates"] = "warm", (*group["rates"], group["lr"])
        return super().step(closure)


class Averaging(AdamW):
    """An average that becomes the weights every third step, in entries of its own in `state_dict`."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.05)
        self.averages = [p.detach().clone() for group in self.param_groups for p in group["params"]]
        self.later: dict[str, Any] = {}
        self.count = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss, self.count = super().step(closure), self.count + 1
        parameters = [p for group in self.param_groups for p in group["params"]]
        self.later.setdefault("first", parameters[0].detach().clone())
        parameters[0].lerp_(self.later["first"], 0.1)
        for average, parameter in zip(self.averages, parameters, strict=True):
            average.lerp_(parameter, 0.3)
            if self.count == 3:
                parameter.copy_(average)
        return loss

    def state_dict(self) -> Any:
        return {**super().state_dict(), "averages": self.averages, "later": self.later, "count": self.count}

    def load_state_dict(self, state: Any) -> None:
        state = dict(state)
        self.averages, self.later, self.count = state.pop("averages"), state.pop("later"), state.pop("count")
        super().load_state_dict(state)


class Wrapping(Optimizer):
    """As the usual SAM: the moments are in another optimizer, of the same groups, and not in the `state_dict`."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"rho": 0.05, "lr": 0.05})
        self.base = AdamW(self.param_groups, lr=0.05)
        self.param_groups = self.base.param_groups

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["old"] = p.detach().clone()
        self.base.step()
        for group in self.param_groups:
            group["lr"] *= 0.9
            for p in group["params"]:
                p.lerp_(self.state[p]["old"], group["rho"])


class Helper:
    def __init__(self, held: Any) -> None:
        self.held = held


def test_optimizers_within_others_are_found() -> None:
    optimizer: Any
    optimizer, *others = [SGD(MLP().parameters(), lr=0.1) for _ in range(7)]
    optimizer.one, optimizer.in_tuple, optimizer.in_list = others[0], (None, others[1]), [others[2]]
    optimizer.in_dict = {"other": others[3]}
    optimizer.in_object, optimizer.in_objects = Helper(others[4]), [Helper(Helper({"one": others[5]}))]
    optimizer.in_object.outer = optimizer
    found = optimizers_inside(optimizer)
    assert [*found] == [
        "",
        "one",
        "in_tuple.1",
        "in_list.0",
        "in_dict.other",
        "in_object.held",
        "in_objects.0.held.held.one",
    ]
    assert [*found.values()] == [optimizer, *others]


class Lookahead(Optimizer):
    """As timm's: the other optimizer's `state_dict`, in which the slow weights are."""

    def __init__(self, parameters: Any) -> None:
        self._optimizer_step_pre_hooks: Any = {}
        self._optimizer_step_post_hooks: Any = {}
        self.base = SGD(parameters, lr=0.1, momentum=0.9)
        self.param_groups, self.defaults = self.base.param_groups, self.base.defaults
        self.state: Any = defaultdict(dict)
        self.begin()

    def begin(self) -> None:
        for group in self.param_groups:
            group["count"] = 0

    def slow(self, p: Any) -> torch.Tensor:
        slow: torch.Tensor = self.base.state[p].setdefault("slow", p.detach().clone())
        return slow

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        self.base.step()
        for group in self.param_groups:
            group["count"] += 1
            for p in group["params"] if group["count"] % 2 else ():
                p.copy_(self.slow(p).lerp_(p, 0.5))

    def state_dict(self) -> Any:
        return self.base.state_dict()

    def load_state_dict(self, state: Any) -> None:
        self.base.load_state_dict(state)
        self.param_groups = self.base.param_groups


class ByParameter(Lookahead):
    """As pytorch_optimizer's: slow weights by parameter, and the other's `state_dict` under a key of its own."""

    def slow(self, p: Any) -> torch.Tensor:
        slow: torch.Tensor = self.state[p].setdefault("slow", p.detach().clone())
        return slow

    def state_dict(self) -> Any:
        return {"slow": self.state, "base": self.base.state_dict()}

    def load_state_dict(self, state: Any) -> None:
        self.state = defaultdict(dict, state["slow"])
        super().load_state_dict(state["base"])


class ById(Lookahead):
    """As torch_optimizer's: slow weights by `id`, which is another one in each process."""

    slow = ByParameter.slow

    def state_dict(self) -> Any:
        return {**self.base.state_dict(), "slow": {id(p): value for p, value in self.state.items()}}


class LoadedById(Lookahead):
    """As lonePatient's: states by `id`, which torch's `load_state_dict` then has as keys."""

    slow = ByParameter.slow

    def begin(self) -> None:
        super().begin()
        for name in ("state_dict_pre", "state_dict_post", "load_state_dict_pre", "load_state_dict_post"):
            setattr(self, f"_optimizer_{name}_hooks", {})

    def state_dict(self) -> Any:
        slow = {id(p): value for p, value in self.state.items()}
        base = self.base.state_dict()
        return {"fast": base["state"], "slow": slow, "param_groups": base["param_groups"]}

    def load_state_dict(self, state: Any) -> None:
        Optimizer.load_state_dict(self, {"state": state["slow"], "param_groups": state["param_groups"]})
        self.base.load_state_dict({"state": state["fast"], "param_groups": state["param_groups"]})
        self.param_groups = self.base.param_groups

    def __setstate__(self, state: Any) -> None:
        self.__dict__.update(state)


class CountedPrivately(Lookahead):
    """As alphadl's: a count of its own, which is in no `state_dict`."""

    _count = -1

    def begin(self) -> None:
        self._count = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        self.base.step()
        self._count += 1
        for group in self.param_groups:
            for p in group["params"] if self._count % 3 == 0 else ():
                p.copy_(self.slow(p).lerp_(p, 0.5))
        for group in self.param_groups:
            for p in group["params"]:
                self.slow(p)


KINDS = {
    kind.__name__: kind
    for kind in (Counting, Averaging, Wrapping, Lookahead, ByParameter, ById, LoadedById, CountedPrivately)
}
REFUSED = ("Averaging", "Wrapping", "Lookahead", "ByParameter", "ById", "LoadedById", "CountedPrivately")
"""Those that DeepSpeed cannot have."""


class Net(MLP):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def configure_optimizers(self) -> Any:
        return KINDS[self.kind](self.parameters())


def _train(name: str, folder: str, kind: str, steps: int, path: str | None = None) -> Any:
    seed_everything(1)
    module, way = Net(kind), WAYS[name]
    trainer = way.trainer(max_steps=steps, max_epochs=-1, seed=1)
    trainer.fit(module, DataLoader(MLP.data(24), batch_size=way.micro_batch), ckpt_path=path)
    saved = f"{folder}/{name.replace(' ', '-')}-{kind}-{steps}-{path is None}"
    trainer.save_checkpoint(saved)
    return trainer.full_state_dict(everywhere=True), saved


def _each(name: str, folder: str) -> dict[str, Any]:
    results: dict[str, Any] = {}
    for kind in KINDS:
        if name.startswith("ZeRO") and kind in REFUSED:
            with pytest.raises(ConfigError, match="use strategy 'fsdp' or 'ddp'"):
                _train(name, folder, kind, 1)
            continue
        unbroken, _ = _train(name, folder, kind, STEPS)
        _, half = _train(name, folder, kind, STEPS // 2)
        results[kind] = (unbroken, _train(name, folder, kind, STEPS, half)[0], half)
    return results


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    names = dict.fromkeys(("single", "FSDP x2", *selected(request, "name")))
    return run_each(_each, names, str(tmp_path_factory.mktemp("foreign")))


@pytest.mark.parametrize("name", NAMES)
def test_a_resumed_run_has_the_same_bits(name: str, found: dict[str, list[Any]]) -> None:
    skip_if_missing(name)
    for rank in found[name]:
        for kind, (unbroken, resumed, _) in rank.items():
            assert_same_bits(unbroken, resumed, kind)


@pytest.mark.parametrize("kind", ["Averaging", "ByParameter"])
def test_one_process_goes_on_from_shards(kind: str, found: dict[str, list[Any]], tmp_path: Path) -> None:
    skip_if_missing("FSDP x2")
    resumed, _ = _train("single", str(tmp_path), kind, STEPS, found["FSDP x2"][0][kind][2])
    expected, *_ = found["single"][0][kind]
    for name, value in expected.items():
        torch.testing.assert_close(resumed[name], value, rtol=1e-4, atol=1e-5)


class Bare(Optimizer):
    """Keeps a tensor, no dict, as the state of a parameter."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.05})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in (one for group in self.param_groups for one in group["params"]):
            self.update(p)

    def update(self, p: Any) -> None:
        self.state[p] = self.state.get(p, torch.zeros_like(p)) * 0.9 + p.grad
        p.sub_(self.state[p], alpha=0.05)


class Defaults(Bare):
    """Has entries that appear later in dicts with a default."""

    FACTORY: Any = float

    def update(self, p: Any) -> None:
        counts = self.state.setdefault(p, defaultdict(self.FACTORY))
        inner = self.state.setdefault("seen", {}).setdefault("counts", Counter())  # type: ignore[call-overload]
        counts[len(counts) // 2] += 1.0
        inner[str(inner.total() // 3)] += 1
        p.sub_(p.grad, alpha=0.01 * sum(counts.values()) / (1 + len(inner)))


class Counted(Bare):
    """Counts in attributes that `state_dict` does not have, one of which its first step makes."""

    count = 0

    def update(self, p: Any) -> None:
        self.count += 1
        self.largest = max(getattr(self, "largest", 0.0), float(p.grad.abs().max()))
        p.sub_(p.grad, alpha=0.1 * self.largest / self.count)


class Around(Bare):
    """Has another optimizer, with the moments, in an object."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters)
        self.helper = Helper(SGD(self.param_groups[0]["params"], lr=0.1, momentum=0.9))

    def step(self, closure: Any = None) -> Any:
        self.helper.held.step()
        return super().step(closure)


class Made(Defaults):
    FACTORY = staticmethod(lambda: 0.0)


class Numbered(Bare):
    """Has a key that `state_dict` takes for the first parameter."""

    def update(self, p: Any) -> None:
        self.state[p]["old"] = p.grad.clone()
        self.state[0] = {"steps": 1}  # type: ignore[index]
        p.sub_(self.state[p]["old"], alpha=0.05)


class OneOptimizer(Toy):
    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.kind = kind

    def configure_optimizers(self) -> Any:
        return self.kind(self.parameters())


@pytest.mark.parametrize("kind", [Bare, Defaults, Counted, Around])
def test_states_of_other_types_come_back_as_they_were(kind: Any, tmp_path: Path) -> None:
    ends = []
    for folder, stops in (("whole", (4,)), ("stopped", (2, 4))):
        for epochs in stops:
            seed_everything(1)
            module = OneOptimizer(kind)
            options: dict[str, Any] = {"enable_checkpointing": True, "default_root_dir": tmp_path / folder}
            quiet(max_epochs=epochs, **options).fit(module, loader(3), ckpt_path="last")
        ends.append(dict(module.state_dict()))
    assert_same_bits(*ends)


@pytest.mark.parametrize("kind", [Made, Numbered])
def test_states_that_could_not_be_restored_are_refused_at_the_first_step(kind: Any, tmp_path: Path) -> None:
    trainer = quiet(max_epochs=2, enable_checkpointing=True, default_root_dir=tmp_path)
    with raises_recorded(CheckpointError):
        trainer.fit(OneOptimizer(kind), loader(3))
    assert trainer.global_step == 1


class Sharp(Bare):
    """As the usual SAM: its `step` asks for the closure that its signature does not need."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        assert closure is not None, "a closure is required"
        gradients = [p.grad.clone() for p in self.param_groups[0]["params"]]
        for p, gradient in zip(self.param_groups[0]["params"], gradients, strict=True):
            p.add_(gradient, alpha=0.1)
        self.zero_grad()
        torch.enable_grad()(closure)()
        for p, gradient in zip(self.param_groups[0]["params"], gradients, strict=True):
            p.sub_(gradient + p.grad, alpha=0.1)


class ByClosure(OneOptimizer):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.automatic_optimization:
            return super().training_step(batch, batch_idx)
        optimizer = self.optimizers()

        def closure() -> Any:
            loss = super(ByClosure, self).training_step(batch, batch_idx)
            self.manual_backward(loss)
            return loss

        closure()
        optimizer.step(closure)
        optimizer.zero_grad()
        return None


def test_an_optimizer_that_asks_for_a_closure_gets_it_in_manual_optimization() -> None:
    seed_everything(1)
    module = ByClosure(Sharp)
    by_hand, module.automatic_optimization = deepcopy(module), False
    quiet(max_epochs=1).fit(module, loader(3))
    optimizer = by_hand.configure_optimizers()
    for batch in loader(3):

        def closure(batch: Any = batch) -> None:
            by_hand._loss(batch).backward()

        closure()
        optimizer.step(closure)
        optimizer.zero_grad()
    assert_same_bits(dict(module.state_dict()), dict(by_hand.state_dict()))
