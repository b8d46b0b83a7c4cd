"""What a program changes of a module between two runs counts, under every strategy and for the same trainer."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.helpers.compare import QUIET
from tests.helpers.processes import run_distributed
from trainer import Trainer, TrainModule
from trainer.errors import ConfigError

pytestmark = pytest.mark.skipif(find_spec("deepspeed") is None, reason="deepspeed is not installed")

ROWS = [1, 3]


class Net(TrainModule):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.rate = nn.Linear(4, 4), nn.Linear(4, 2), 0.1

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.second(self.first(batch[0])).square().mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("bias", self.second.bias.mean())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), self.rate)


def data() -> Any:
    return DataLoader(TensorDataset(torch.ones(16, 4)), 4)


def change(module: Net) -> None:
    """By the parameter, by its memory, and by rows."""
    with torch.no_grad():
        module.second.weight.fill_(0.5)
        module.first.weight[ROWS] = 0.25
    module.second.bias.data.fill_(0.125)


def changed(strategy: str, precision: str, what: str) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Return the weights that are expected after a change between two runs, and those that are found."""
    torch.manual_seed(0)
    module = Net()
    trainer = Trainer(**{**QUIET, "num_sanity_val_steps": 0}, devices=2, accelerator="cpu", strategy=strategy,
                      max_steps=2, precision=precision)  # fmt: skip
    trainer.fit(module, data())
    expected = {name: value.clone() for name, value in trainer.full_state_dict(everywhere=True).items()}
    expected["second.weight"].fill_(0.5)
    expected["first.weight"][ROWS] = 0.25
    expected["second.bias"].fill_(0.125)
    if strategy == "fsdp":
        with trainer.full_parameters(module, write=True):
            change(module)
    else:
        change(module)
    if what == "fit":
        module.rate = 0.0
        trainer.fit(module, data())
    elif what == "validate":
        trainer.validate(module, data(), verbose=False)
        assert float(trainer.callback_metrics["bias"]) == 0.125
    return expected, dict(trainer.full_state_dict(everywhere=True))


CASES = [
    *(("deepspeed_stage_1", "32-true", what) for what in ("fit", "validate", "nothing")),
    *(("deepspeed_stage_2", "bf16-mixed", what) for what in ("fit", "validate", "nothing")),
    *((strategy, "bf16-mixed", "fit") for strategy in ("ddp", "fsdp")),
]


def all_cases() -> list[Any]:
    return [changed(*case) for case in CASES]


def test_a_change_between_two_runs_counts_and_all_else_keeps_its_digits() -> None:
    for of_rank in run_distributed(all_cases, 2):
        for case, (expected, found) in zip(CASES, of_rank, strict=True):
            for name, value in expected.items():
                assert torch.equal(found[name], value), (case, name)


def change_of_what_is_empty() -> list[str]:
    torch.manual_seed(0)
    module, messages = Net(), []
    trainer = Trainer(**QUIET, devices=2, accelerator="cpu", strategy="deepspeed_stage_3", max_steps=1)
    trainer.fit(module, data())
    with trainer.full_parameters(module, write=True):
        change(module)
    assert trainer.full_state_dict(everywhere=True)["second.weight"].unique().tolist() == [0.5]
    with torch.no_grad():
        module.second.weight.fill_(1.0)
    for use in (trainer.full_state_dict, lambda: trainer.save_checkpoint("c"), lambda: trainer.fit(module, data())):
        with pytest.raises(ConfigError) as refused:
            use()
        messages.append(str(refused.value))
    return messages


def test_a_change_of_what_is_empty_is_refused() -> None:
    for messages in run_distributed(change_of_what_is_empty, 2):
        for message in messages:
            assert "second.weight was changed after the run, when it was empty" in message
