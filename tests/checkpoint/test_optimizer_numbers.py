"""Numbers in the state of an optimizer keep their bits in a resume, whatever the dtype of the parameters."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.compare import assert_same_bits
from tests.helpers.processes import once_per_module
from tests.helpers.strategy_runs import SINGLE, WAYS, run_each, skip_if_missing
from tests.helpers.toy import Toy, loader
from trainer.callbacks import ModelCheckpoint
from trainer.checkpoint.format import read_checkpoint
from trainer.checkpoint.optimizer_state import load_by_position, state_by_name, state_by_position, with_dtypes_of


@pytest.mark.parametrize("kind", ["NAdam", "ASGD", "Adamax", "RAdam", "Rprop"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=["bf16", "float64"])
def test_a_resumed_optimizer_takes_the_same_step(kind: str, dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    module = torch.nn.Linear(3, 2).to(dtype)
    optimizer = getattr(torch.optim, kind)(module.parameters(), lr=0.05)
    step(module, optimizer, 3)
    saved = copy.deepcopy(state_by_name(module, optimizer))
    again = copy.deepcopy(module)
    resumed = getattr(torch.optim, kind)(again.parameters(), lr=0.05)
    load_by_position(resumed, state_by_position(again, resumed, saved))
    assert_same_bits(resumed.state_dict()["state"], optimizer.state_dict()["state"])
    for one, its_optimizer in ((module, optimizer), (again, resumed)):
        step(one, its_optimizer, 3)
    assert_same_bits(dict(again.state_dict()), dict(module.state_dict()))


class Own(torch.optim.Optimizer):
    """An optimizer that keeps its moments in float64 and a count of each element in integers, for any parameters."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.05})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            state = self.state[parameter]
            if not state:
                state["moment"] = torch.zeros_like(parameter, dtype=torch.float64)
                state["count"] = torch.zeros_like(parameter, dtype=torch.uint8)
            state["count"] += 1
            state["moment"].mul_(0.9).add_(parameter.grad.double() / 3)
            parameter.sub_((0.05 * state["moment"] / state["count"]).to(parameter.dtype))


class Nested(Own):
    """The same with a tensor in a list in a dict, which has no parameter's shape."""

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        for state in self.state.values():
            state.setdefault("more", {"seen": [torch.zeros(3, dtype=torch.float64)]})["seen"][0] += 1 / 3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=["bf16", "float32", "float64"])
def test_an_optimizers_own_dtypes_survive(dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    module = torch.nn.Linear(3, 2).to(dtype)
    optimizer = Nested(module.parameters())
    step(module, optimizer, 3)
    saved = copy.deepcopy(state_by_name(module, optimizer))
    weights = copy.deepcopy(module.state_dict())
    again = copy.deepcopy(module)
    resumed = Nested(again.parameters())
    load_by_position(resumed, state_by_position(again, resumed, with_dtypes_of(saved, weights)))
    assert_same_bits(resumed.state_dict()["state"], optimizer.state_dict()["state"])
    for one, its_optimizer in ((module, optimizer), (again, resumed)):
        step(one, its_optimizer, 3)
    assert_same_bits(dict(again.state_dict()), dict(module.state_dict()))


@pytest.mark.parametrize("before", [torch.bfloat16, torch.float64], ids=["bf16", "float64"])
def test_moments_like_the_parameter_follow_it_to_another_dtype(before: torch.dtype) -> None:
    module = torch.nn.Linear(3, 2).to(before)
    optimizer = torch.optim.AdamW(module.parameters())
    step(module, optimizer, 2)
    saved = with_dtypes_of(state_by_name(module, optimizer), module.state_dict())
    now = torch.nn.Linear(3, 2)
    resumed = torch.optim.AdamW(now.parameters())
    load_by_position(resumed, state_by_position(now, resumed, saved))
    assert resumed.state[now.weight]["exp_avg"].dtype == torch.float32
    step(now, resumed, 1)


class WithOwn(Toy):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = (one.to(self.layer.weight.dtype) for one in batch)
        return (self.layer(x) - y).float().square().mean()

    def configure_optimizers(self) -> Any:
        return Own(self.parameters())


def resume(name: str) -> list[str]:
    """Return the last checkpoints of a run of six steps, and of one that is resumed after the third."""
    found = []
    for stops in ((6,), (3, 6)):
        root = Path.cwd() / name / str(len(stops))
        for end in stops:
            callback = ModelCheckpoint()
            options: dict[str, Any] = {"enable_checkpointing": True, "default_root_dir": root, "callbacks": callback}
            trainer = WAYS[name].trainer(seed=1, precision="bf16-true", max_steps=end, **options)
            trainer.fit(WithOwn(), loader(4), ckpt_path="last")
        found.append(callback.last_model_path)
    return found


NAMES = (SINGLE, "FSDP x2", "ZeRO-2 x2", "ZeRO-3 x2")


resumed = once_per_module(lambda names: run_each(resume, names), "name")


@pytest.mark.parametrize("name", NAMES)
def test_an_optimizers_own_dtypes_survive_under_every_strategy(name: str, resumed: Any) -> None:
    skip_if_missing(name, "bf16-true")
    unbroken, again = map(read_checkpoint, resumed[name][0])
    states = unbroken["optimizers"][0]["state"]["layer.weight"]
    assert {key: value.dtype for key, value in states.items()} == {"moment": torch.float64, "count": torch.uint8}
    assert_same_bits(again["optimizers"][0]["state"], unbroken["optimizers"][0]["state"])
    assert_same_bits(again["model"], unbroken["model"])


def step(module: torch.nn.Linear, optimizer: Any, times: int) -> None:
    x = torch.ones(4, 3, dtype=module.weight.dtype)
    for _ in range(times):
        optimizer.zero_grad()
        module(x).square().mean().backward()
        optimizer.step()
