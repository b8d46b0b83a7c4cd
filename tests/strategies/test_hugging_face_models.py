"""Hugging Face models of many architectures, split in each way: losses and gradients of a hand-written loop, to 1e-5.

Random weights; sliding windows, padding, tied weights, grouped heads and mixtures of experts are among them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from tests.helpers.hf_models import ARCHITECTURES, MIXTURES, WITHOUT_PLAN, HFModule, data
from tests.helpers.processes import run_distributed
from tests.helpers.strategy_runs import WAYS, StepLosses
from tests.tiers import selected
from trainer import Callback, Trainer, TrainModule

pytestmark = pytest.mark.timeout(1200)

STEPS, WINDOW, MICRO_BATCH = 4, 2, 4
BOUND = 1e-5
EAGER = ("GPT-OSS",)
"""Their attention is not torch's scaled_dot_product_attention."""
RUNS = [
    *(("TP x2", name) for name in ARCHITECTURES if name not in WITHOUT_PLAN),
    *(("TP x2, compiled", name) for name in ARCHITECTURES if name not in (*WITHOUT_PLAN, "Llama 4")),
    *(("CP x2", name) for name in ARCHITECTURES if name not in EAGER),
    *(("PP x2", name) for name in ARCHITECTURES),
    *(("EP x2", name) for name in MIXTURES),
    *((f"{way}, compiled", "Llama, tied") for way in ("CP x2", "PP x2")),
    *((f"{way}, compiled", "Qwen3") for way in ("CP x2", "PP x2")),
    *((f"{way}, compiled", "Gemma3, sliding window in some layers") for way in ("CP x2", "PP x2")),
    *((f"{way}, compiled", "Qwen3-MoE") for way in ("CP x2", "PP x2", "EP x2")),
]


class Training(NamedTuple):
    """What a training is compared by."""

    losses: list[float]
    gradients: dict[str, torch.Tensor]
    """Of the first step, before clipping."""


def train_by_hand(names: list[str]) -> dict[str, Training]:
    return {name: _train_by_hand(name) for name in names}


def _train_by_hand(name: str) -> Training:
    module = HFModule(name)
    optimizer = module.configure_optimizers()
    batches = iter(DataLoader(data(name), MICRO_BATCH))
    losses: list[float] = []
    gradients: dict[str, torch.Tensor] = {}
    while len(losses) < STEPS:
        window = [next(batches) for _ in range(WINDOW)]
        items = [module.num_items(batch) or MICRO_BATCH for batch in window]
        optimizer.zero_grad()
        total = 0.0
        for batch, own in zip(window, items, strict=True):
            loss = module.net(**batch).loss * own / sum(items)
            loss.backward()
            total += loss.item()
        gradients = gradients or {key: p.grad.clone() for key, p in module.named_parameters() if p.grad is not None}
        nn.utils.clip_grad_norm_(module.parameters(), 0.5)
        optimizer.step()
        losses.append(total)
    return Training(losses, gradients)


class FirstGradients(Callback):
    """Keep the gradients of the first step, of the parameters that this process has."""

    def __init__(self) -> None:
        self.gradients: dict[str, torch.Tensor] = {}

    def on_before_optimizer_step(self, trainer: Trainer, module: TrainModule, optimizer: Any) -> None:
        self.gradients = self.gradients or {
            key: p.grad.full_tensor().clone()  # type: ignore[attr-defined]
            for key, p in module.named_parameters()
            if p.grad is not None
        }


def train(runs: list[tuple[str, str]]) -> dict[tuple[str, str], Training]:
    return {(way, name): _train(way, name) for way, name in runs}


def _train(case: str, name: str) -> Training:
    way, _, compiled = case.partition(", ")
    recorder, first = StepLosses(), FirstGradients()
    trainer = WAYS[way].trainer(
        max_steps=STEPS,
        accumulate_grad_batches=WINDOW,
        gradient_clip_val=0.5,
        log_every_n_steps=1,
        activation_checkpointing="auto" if name == "Llama, tied" else None,
        compile={"blocks": "auto", "backend": "aot_eager"} if compiled else False,
        callbacks=[recorder, first],
    )
    loader = DataLoader(data(name), MICRO_BATCH * WAYS[way].processes_of_a_model // WAYS[way].processes)
    trainer.fit(HFModule(name), loader)
    return Training(recorder.losses, first.gradients)


@pytest.fixture(scope="module")
def trainings(request: pytest.FixtureRequest) -> Any:
    pytest.importorskip("transformers", reason='needs transformers: pip install "exact-trainer[dev]"')
    runs = selected(request, "way", "name")
    expected = run_distributed(train_by_hand, 1, sorted({name for _, name in runs}))[0]
    return expected, run_distributed(train, 2, runs)


@pytest.mark.parametrize(("way", "name"), RUNS)
def test_losses_and_gradients_are_those_of_a_hand_written_loop(way: str, name: str, trainings: Any) -> None:
    by_hand, of_ranks = trainings
    expected = by_hand[name]
    norms = {key: gradient.norm() for key, gradient in expected.gradients.items()}
    least = 1e-2 * torch.stack([*norms.values()]).norm()  # some are 0 but for rounding
    for found in (of_rank[way, name] for of_rank in of_ranks):
        assert found.losses == pytest.approx(expected.losses, rel=BOUND)
        for key, gradient in found.gradients.items():
            assert (gradient - expected.gradients[key]).norm() <= BOUND * max(norms[key], least), key
    assert {key for of_rank in of_ranks for key in of_rank[way, name].gradients} == set(norms)
