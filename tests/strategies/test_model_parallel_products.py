"""Products of divisions of a model, on four processes: parity with a hand-written loop, and portable checkpoints."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.portability import BOUND, PORTABLE, Cell, differences
from tests.helpers.processes import once_per_module
from tests.helpers.strategy_runs import SINGLE, run_each
from tests.strategies.test_strategy_parity import ALL, train_by_hand, train_one
from tests.tiers import selected

pytestmark = pytest.mark.timeout(1200)

PRODUCTS = [name for name in PORTABLE if " x " in name]
KEYS = ("gpt", "gpt, tied and frozen", "gpt, tied, in configure_model", "gpt, bf16-mixed")
MIXTURES = ("mixture", "mixture, tied, in configure_model")
VARIANTS = (
    "EP 2 x CP 2, SHARD_GRAD_OP",
    "TP 2 x FSDP 2, SHARD_GRAD_OP",
    "EP 2 x TP 2, CPU offload",
    "PP 2 x FSDP 2, CPU offload",
)
COMPARED = [(name, key) for name in (*PRODUCTS, *VARIANTS) for key in (MIXTURES if "EP" in name else KEYS)]
COMPARED += [("PP 2 x TP 2", "gpt, trained at its end"), ("PP 2 x CP 2", "gpt, trained at its end")]
COMPARED += [(name, "mixture") for name in ("PP 2 x TP 2", "CP 2 x TP 2")]
CELLS: list[Cell] = [
    *zip(PRODUCTS, (*PRODUCTS[1:], PRODUCTS[0]), strict=True),
    (SINGLE, "PP 2 x CP 2"),
    ("PP 2 x TP 2", SINGLE),
    ("ZeRO-3 x2", "CP 2 x TP 2"),
    ("TP 2 x FSDP 2", "DDP x2"),
    ("EP 2 x TP 2", "EP x2"),
    ("ZeRO-3 x2", "EP 2 x FSDP 2"),
    ("PP 2 x EP 2", SINGLE),
]


def train(name: str, runs: list[tuple[str, str]]) -> dict[str, list[float]]:
    return {key: train_one(name, ALL[key]) for way, key in runs if way == name}


@pytest.fixture(scope="module")
def losses(request: pytest.FixtureRequest) -> dict:
    runs = selected(request, "name", "key")
    return run_each(train, dict.fromkeys(name for name, _ in runs), runs)


by_hand = once_per_module(
    lambda: {key: train_by_hand(ALL[key]) for key in (*KEYS, *MIXTURES, "gpt, trained at its end")}
)


@pytest.mark.parametrize(("name", "key"), COMPARED)
def test_the_losses_are_those_of_one_process(name: str, key: str, losses: dict, by_hand: dict) -> None:
    for of_rank in losses[name]:
        assert max(abs(a - b) for a, b in zip(of_rank[key], by_hand[key], strict=True)) <= ALL[key].bound


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[Cell, float]:
    folder: Path = tmp_path_factory.mktemp("portability")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        return differences(selected(request, "source", "target"), folder)


@pytest.mark.parametrize(("source", "target"), CELLS)
def test_a_run_goes_on_in_another_layout(source: str, target: str, found: dict[Cell, float]) -> None:
    assert found[source, target] <= BOUND
