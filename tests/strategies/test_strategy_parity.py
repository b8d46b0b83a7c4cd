"""Every strategy gives the losses of one hand-written torch loop over the same global batches, to 1e-5."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader

from tests.helpers.strategy_models import GPT, MLP, STEPS, Trained, warm_up_and_cosine
from tests.helpers.strategy_runs import GLOBAL_MICRO_BATCH, SINGLE, WAYS, StepLosses, run_each, skip_if_missing
from tests.tiers import selected
from trainer import seed_everything
from trainer.callbacks import ReplicaCheck

pytestmark = pytest.mark.timeout(1200)  # the first test starts all processes

SEED = 3
SAMPLES = 81
"""Eleven micro-batches an epoch, of which the last has one sample: with windows of three, the last has two, and some
processes get a padding batch."""


@dataclass(frozen=True)
class Case:
    """A training that both the hand-written loop and the trainer can run."""

    kind: str = "gpt"
    options: dict[str, Any] = field(default_factory=dict)
    """Of the module."""
    accumulate: int = 3
    clip: float | None = 1.0
    schedule: bool = True
    precision: str = "32-true"
    bound: float = 1e-5
    """The largest difference of a loss, relative to it."""

    def module(self) -> Trained:
        return MLP() if self.kind == "mlp" else GPT(**self.options)


CASES = {
    "mlp": Case("mlp"),
    "gpt": Case(),
    "gpt, tokens": Case(options={"ragged": True}),
    "gpt, tied and frozen": Case(options={"tied": True, "frozen": True}),
    "gpt, tied, in configure_model": Case(options={"tied": True, "deferred": True}),
    "gpt, bf16-mixed": Case(precision="bf16-mixed", bound=1e-2),
}
PARTS = {"gpt, trained at its end": Case(options={"trains_end": True})}
MIXTURES = {
    "mixture": Case(options={"experts": 4, "ragged": True}),
    "mixture, tied, in configure_model": Case(options={"experts": 4, "tied": True, "deferred": True}),
}
SOME = ("gpt", "gpt, tied and frozen", "gpt, bf16-mixed")
COMPARED: dict[str, tuple[str, ...]] = {
    SINGLE: (*CASES, *PARTS),
    "DDP x2": (*CASES, *PARTS),
    "FSDP x2": (*CASES, *PARTS),
    "FSDP x2, SHARD_GRAD_OP": SOME,
    "FSDP x2, CPU offload": SOME,
    "FSDP x2, communicating always": SOME,
    "FSDP 2x2": tuple(CASES),
    "TP x2": (*tuple(CASES)[1:], *PARTS, *MIXTURES),
    "CP x2": (*tuple(CASES)[1:], *PARTS),
    "EP x2": tuple(MIXTURES),
    "CP x2, keys": ("gpt, tied and frozen",),
    "PP x2": (*tuple(CASES)[1:], *PARTS),
    "ZeRO-1 x2": tuple(CASES),
    "ZeRO-2 x2": tuple(CASES),
    "ZeRO-3 x2": (*CASES, *PARTS),
    "ZeRO-2 x2, CPU offload": SOME,
    "ZeRO-3 x2, CPU offload": SOME,
}
ALL = {**CASES, **PARTS, **MIXTURES}


def train_by_hand(case: Case) -> list[float]:
    """Return the losses of one process that trains each window as one big batch."""
    seed_everything(SEED)
    module = case.module()
    module.configure_model()
    optimizer = module.optimizer()
    scheduler = LambdaLR(optimizer, warm_up_and_cosine if case.schedule else lambda step: 1.0)
    losses: list[float] = []
    while len(losses) < STEPS:
        for window in DataLoader(module.data(SAMPLES), GLOBAL_MICRO_BATCH * case.accumulate):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16) if case.precision == "bf16-mixed" else nullcontext():
                loss = module.loss(window)
            loss.backward()
            if case.clip is not None:
                nn.utils.clip_grad_norm_(module.parameters(), case.clip)
            optimizer.step()
            scheduler.step()
            losses.append(loss.item())
    return losses[:STEPS]


def train(name: str, cells: list[tuple[str, str]]) -> dict[str, list[float]]:
    """Train the cases of one way and return the losses."""
    keys = [key for way, key in cells if way == name and not WAYS[name].missing(ALL[key].precision)]
    return {key: train_one(name, ALL[key]) for key in keys}


def train_one(name: str, case: Case) -> list[float]:
    recorder = StepLosses()
    trainer = WAYS[name].trainer(
        seed=SEED,
        max_steps=STEPS,
        max_epochs=-1,
        accumulate_grad_batches=case.accumulate,
        gradient_clip_val=case.clip,
        precision=case.precision,
        log_every_n_steps=1,
        callbacks=[recorder, ReplicaCheck(every_n_train_steps=1)],
    )
    module = case.module()
    trainer.fit(module, DataLoader(module.data(SAMPLES), WAYS[name].micro_batch))
    return recorder.losses


@pytest.fixture(scope="module")
def losses(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    cells = selected(request, "name", "key")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("runs"))
        return run_each(train, dict.fromkeys(name for name, _ in cells), cells)


@pytest.fixture(scope="module")
def by_hand() -> dict[str, list[float]]:
    return {key: train_by_hand(case) for key, case in ALL.items()}


@pytest.mark.parametrize(("name", "key"), [(name, key) for name, keys in COMPARED.items() for key in keys])
def test_the_losses_are_those_of_a_hand_written_loop(name: str, key: str, losses: Any, by_hand: Any) -> None:
    skip_if_missing(name, ALL[key].precision)
    for rank in losses[name]:
        assert len(rank[key]) == STEPS
        assert rank[key] == pytest.approx(by_hand[key], rel=ALL[key].bound)


def test_the_cases_train(by_hand: dict[str, list[float]]) -> None:
    for key, found in by_hand.items():
        first_epoch, last_epoch = sum(found[:4]), sum(found[-4:])
        assert last_epoch < 0.93 * first_epoch, key


@pytest.mark.parametrize("key", ["mlp", "gpt"])
def test_what_a_case_switches_on_changes_the_losses(key: str, by_hand: dict[str, list[float]]) -> None:
    """A case that changes nothing would test nothing."""
    case = ALL[key]
    for other in (replace(case, accumulate=1), replace(case, clip=None), replace(case, schedule=False)):
        there = train_by_hand(other)
        assert max(abs(a - b) for a, b in zip(there, by_hand[key], strict=True)) > 100 * case.bound


def test_each_gpt_is_another_training(by_hand: dict[str, list[float]]) -> None:
    runs = [*by_hand.values()]
    pairs = [(one, other) for number, one in enumerate(runs) for other in runs[:number]]
    # In any step: the last loss may be nearly the same in 16 bits.
    assert all(max(abs(a - b) for a, b in zip(*pair, strict=True)) > 1e-4 for pair in pairs)
