"""ReplicaCheck finds weights that differ between processes, and says where and since when."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader

from tests.helpers.compare import QUIET
from tests.helpers.processes import run_distributed
from tests.helpers.strategy_models import MLP
from tests.messages import raises_recorded
from trainer import Callback, ConfigError, Trainer, TrainModule
from trainer.callbacks import ReplicaCheck
from trainer.callbacks.replica_check import checksums
from trainer.errors import TrainerError


class Disturb(Callback):
    """Change one bit of a weight on rank 2 after a step; not the last one, which the next steps may round away."""

    def __init__(self, at: int) -> None:
        self.at = at

    def on_train_start(self, trainer: Trainer, module: TrainModule) -> None:
        self.on_train_step_end(trainer, module)

    def on_train_step_end(self, trainer: Trainer, module: TrainModule) -> None:
        if trainer.global_step == self.at and trainer.rank == 2:
            weight = module.get_parameter("layers.2.weight")
            with torch.no_grad():
                weight.view(torch.int32)[3, 3] ^= 1 << 12


def check(precision: str, at: int, check: ReplicaCheck, frozen: bool = False) -> str:
    trainer = Trainer(accelerator="cpu", max_steps=8, precision=precision, callbacks=[Disturb(at), check], **QUIET)
    module = MLP()
    module.layers[2].requires_grad_(not frozen)
    try:
        trainer.fit(module, DataLoader(MLP.data(96), 4))
    except TrainerError as error:
        return str(error)
    return "equal"


def check_all() -> list[str]:
    again = ReplicaCheck(3)
    return [
        check("32-true", 99, again),
        check("bf16-true", 99, ReplicaCheck(3)),
        check("32-true", 0, again),
        check("32-true", 4, ReplicaCheck(3), frozen=True),
        check("32-true", 8, ReplicaCheck(3)),
    ]


def test_a_changed_bit_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for found in run_distributed(check_all, 3):
        assert found[:2] == ["equal", "equal"]
        assert found[2].startswith("the replicas differ: layers.2.weight on rank 2 from rank 0, before the first step")
        assert "on rank 2 from rank 0, after step 3, seen at step 6" in found[3]
        assert "layers.2.weight on rank 2 from rank 0, after step 6, seen at step 8" in found[4]


def test_every_dtype_has_a_checksum() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.complex64, torch.float8_e4m3fn):
        module = torch.nn.Module()
        module.p = torch.nn.Parameter(torch.ones(3).to(dtype), requires_grad=False)
        before = checksums(module)
        module.p.data[1:2].copy_(torch.full((1,), 2.0).to(dtype))
        assert checksums(module) != before


def test_an_exchange_of_values_or_signs_changes_the_checksum() -> None:
    module = torch.nn.Linear(1000, 600, bias=False)  # more than one part
    before = checksums(module)
    with torch.no_grad():
        weight = module.weight.clone()
        for other in (weight.flip(0), weight.flip(1), -weight, weight[:, torch.randperm(1000)], weight.roll(1, 0)):
            module.weight.copy_(other)
            assert checksums(module) != before
        module.weight.copy_(torch.ones(600, 1000))
        module.weight[0, :2] *= -1
        one = checksums(module)
        module.weight[0, :2] *= -1
        module.weight[1, :2] *= -1
        assert checksums(module) != one
        module.weight.copy_(weight)
    assert checksums(module) == before


def test_a_wrong_interval() -> None:
    with raises_recorded(ConfigError):
        ReplicaCheck(0)
