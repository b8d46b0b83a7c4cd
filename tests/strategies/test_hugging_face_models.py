"""Hugging Face models of many architectures, split in each way: the losses of a hand-written loop, to 1e-5.

Random weights; sliding windows, padding, tied weights, grouped heads and mixtures of experts are among them.
"""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn
from torch.utils.data import DataLoader

from tests.helpers.hf_models import ARCHITECTURES, MIXTURES, WITHOUT_PLAN, HFModule, data
from tests.helpers.processes import run_distributed
from tests.helpers.strategy_runs import WAYS, StepLosses
from tests.tiers import selected

pytestmark = pytest.mark.timeout(1200)

STEPS, WINDOW, MICRO_BATCH = 4, 2, 4
BOUND = 1e-5
EAGER = ("GPT-OSS",)
"""Their attention is not torch's scaled_dot_product_attention."""
RUNS = [
    *(("TP x2", name) for name in ARCHITECTURES if name not in WITHOUT_PLAN),
    *(("CP x2", name) for name in ARCHITECTURES if name not in EAGER),
    *(("PP x2", name) for name in ARCHITECTURES),
    *(("EP x2", name) for name in MIXTURES),
]


def train_by_hand(names: list[str]) -> dict[str, list[float]]:
    return {name: _train_by_hand(name) for name in names}


def _train_by_hand(name: str) -> list[float]:
    module = HFModule(name)
    optimizer = module.configure_optimizers()
    batches = iter(DataLoader(data(name), MICRO_BATCH))
    losses: list[float] = []
    while len(losses) < STEPS:
        window = [next(batches) for _ in range(WINDOW)]
        items = [module.num_items(batch) or MICRO_BATCH for batch in window]
        optimizer.zero_grad()
        total = 0.0
        for batch, own in zip(window, items, strict=True):
            loss = module.net(**batch).loss * own / sum(items)
            loss.backward()
            total += loss.item()
        nn.utils.clip_grad_norm_(module.parameters(), 0.5)
        optimizer.step()
        losses.append(total)
    return losses


def train(runs: list[tuple[str, str]]) -> dict[tuple[str, str], list[float]]:
    return {(way, name): _train(way, name) for way, name in runs}


def _train(way: str, name: str) -> list[float]:
    recorder = StepLosses()
    trainer = WAYS[way].trainer(
        max_steps=STEPS,
        accumulate_grad_batches=WINDOW,
        gradient_clip_val=0.5,
        log_every_n_steps=1,
        activation_checkpointing="auto" if name == "Llama, tied" else None,
        callbacks=[recorder],
    )
    loader = DataLoader(data(name), MICRO_BATCH * WAYS[way].processes_of_a_model // WAYS[way].processes)
    trainer.fit(HFModule(name), loader)
    return recorder.losses


@pytest.fixture(scope="module")
def losses(request: pytest.FixtureRequest) -> Any:
    pytest.importorskip("transformers", reason='needs transformers: pip install "exact-trainer[dev]"')
    runs = selected(request, "way", "name")
    expected = run_distributed(train_by_hand, 1, sorted({name for _, name in runs}))[0]
    return expected, run_distributed(train, 2, runs)


@pytest.mark.parametrize(("way", "name"), RUNS)
def test_the_losses_are_those_of_a_hand_written_loop(way: str, name: str, losses: Any) -> None:
    expected, found = losses
    for of_rank in found:
        assert of_rank[way, name] == pytest.approx(expected[name], rel=BOUND)
