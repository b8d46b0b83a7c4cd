"""Products of three divisions, on eight processes: parity with a hand-written loop, and exact resume."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.compare import assert_same_bits
from tests.helpers.portability import SAVED_AT, SaveAt, fit, make_trainer
from tests.helpers.processes import once_per_module
from tests.helpers.strategy_models import STEPS
from tests.helpers.strategy_runs import IN_THREE, StepLosses, run_each
from tests.strategies.test_strategy_parity import ALL, train_by_hand, train_one
from tests.tiers import selected

pytestmark = pytest.mark.timeout(1800)

KEYS = ("gpt, tokens", "gpt, tied and frozen")
MIXTURES = ("mixture", "mixture, tied, in configure_model")
COMPARED = [(name, key) for name in IN_THREE for key in (MIXTURES if "EP" in name else (*KEYS, "mixture"))]


@pytest.fixture(autouse=True)
def _full_matrix(request: pytest.FixtureRequest) -> None:
    if request.config.getoption("sample") is not None:
        pytest.skip("eight processes: make test-release")


def train(name: str, runs: list[tuple[str, str]]) -> dict[str, list[float]]:
    return {key: train_one(name, ALL[key]) for way, key in runs if way == name}


@pytest.fixture(scope="module")
def losses(request: pytest.FixtureRequest) -> dict[str, Any]:
    runs = selected(request, "name", "key")
    return run_each(train, dict.fromkeys(name for name, _ in runs), runs)


by_hand = once_per_module(lambda: {key: train_by_hand(ALL[key]) for key in (*KEYS, *MIXTURES)})


@pytest.mark.parametrize(("name", "key"), COMPARED)
def test_the_losses_are_those_of_one_process(name: str, key: str, losses: Any, by_hand: Any) -> None:
    for of_rank in losses[name]:
        assert max(abs(a - b) for a, b in zip(of_rank[key], by_hand[key], strict=True)) <= ALL[key].bound


def resume(name: str, folder: str) -> dict[str, Any]:
    """Train in one go, with a checkpoint on the way, and again from the checkpoint."""
    place, found = os.path.join(folder, name), {}
    for which, callbacks, ckpt_path in (("unbroken", [SaveAt(SAVED_AT, place)], None), ("resumed", [], place)):
        recorder = StepLosses()
        trainer = make_trainer(name, STEPS, recorder, *callbacks)
        torch.manual_seed(99)
        fit(name, trainer, ckpt_path)
        found[which] = (recorder.losses, trainer.full_state_dict(everywhere=True))
    return found


@pytest.fixture(scope="module")
def resumed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder: Path = tmp_path_factory.mktemp("resumed")
    return run_each(resume, selected(request, "way"), str(folder))


@pytest.mark.parametrize("way", IN_THREE)
def test_a_resumed_run_has_the_same_bits(way: str, resumed: Any) -> None:
    for of_rank in resumed[way]:
        (unbroken, weights), (rest, again) = of_rank["unbroken"], of_rank["resumed"]
        assert rest == unbroken[SAVED_AT:]
        assert_same_bits(weights, again)
