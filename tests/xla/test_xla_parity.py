"""Four XLA devices give the losses of one CPU device, step by step."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader, TensorDataset

from tests.helpers.compare import QUIET, as_floats
from tests.helpers.examples import example_module
from trainer import Callback, Trainer, TrainModule, seed_everything

STEPS = 20
GPT, Crops = example_module("gpt", "module").GPT, example_module("gpt", "data").Crops


class Losses(Callback):
    """Record the losses of all micro-batches, and the learning rates of all steps."""

    def __init__(self) -> None:
        self.losses: list[torch.Tensor] = []
        self.rates: list[float] = []

    def on_train_batch_end(self, trainer: Trainer, module: TrainModule, outputs: Any, batch: Any, index: int) -> None:
        self.losses.append(outputs["loss"])

    def on_train_step_end(self, trainer: Trainer, module: TrainModule) -> None:
        self.rates.append(trainer.optimizers[0].param_groups[0]["lr"])


class MLP(TrainModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(20, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 5)
        )

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = cross_entropy(self.layers(batch[0]), batch[1])
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", cross_entropy(self.layers(batch[0]), batch[1]))

    def configure_optimizers(self) -> Any:
        optimizer = SGD(self.parameters(), lr=0.2, momentum=0.9)
        return [optimizer], [{"scheduler": CosineAnnealingLR(optimizer, STEPS), "interval": "step"}]


def numbers() -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(STEPS * 2 * 8, 20, generator=generator)
    return TensorDataset(x, x[:, :5].argmax(1))


def text(pieces: int) -> Any:
    lines = [b"def f(x):\n\treturn x + 1\n" * 40, b"for i in range(10):\n\tprint(i)\n" * 40]
    return Crops(lines, 16, pieces, seed=1)


def train(strategy: str, kind: str, accumulate: int, clip: float | None) -> dict[str, Any]:
    """STEPS steps, and a validation."""
    watch = Losses()
    trainer = Trainer(
        strategy=strategy,
        accelerator="cpu" if strategy == "single_device" else "auto",
        seed=7,
        max_steps=STEPS,
        max_epochs=-1,
        accumulate_grad_batches=accumulate,
        gradient_clip_val=clip,
        log_every_n_steps=5,
        callbacks=[watch],
        **QUIET,
    )
    seed_everything(7)
    if kind == "mlp":
        module: TrainModule = MLP()
        loaders = [DataLoader(numbers(), 8), DataLoader(numbers(), 8)]
    else:
        module = GPT(context=16, layers=2, heads=2, width=32, warmup_steps=5)
        loaders = [DataLoader(text(STEPS * 2 * 8), 8), DataLoader(text(24), 8)]
    trainer.fit(module, *loaders)
    return {
        "losses": [loss.item() for loss in watch.losses],
        "rates": watch.rates,
        "metrics": {k: v for k, v in as_floats(trainer.callback_metrics).items() if not k.startswith("throughput")},
        "weights": {name: value.cpu() for name, value in module.state_dict().items()},
        "tied": kind == "gpt" and module.net.head.weight is module.net.token_embedding.weight,
    }


CASES = [("mlp", 1, None), ("mlp", 2, None), ("mlp", 2, 0.3), ("gpt", 2, 0.3)]
on_cpu: dict[Any, dict[str, Any]] = {}


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("strategy", ["xla", "xla_fsdp"])
def test_losses_are_those_of_one_cpu_device(strategy: str, case: tuple[str, int, float | None]) -> None:
    ours = train(strategy, *case)
    if case not in on_cpu:
        on_cpu[case] = train("single_device", *case)
    theirs = on_cpu[case]
    assert len(ours["losses"]) == STEPS * case[1] == len(theirs["losses"])
    assert ours["losses"] == pytest.approx(theirs["losses"], rel=1e-5, abs=1e-5)
    assert ours["metrics"] == pytest.approx(theirs["metrics"], rel=1e-4, abs=1e-4)
    assert ours["rates"] == theirs["rates"]
    assert ours["rates"][0] != ours["rates"][-1]
    assert ours["losses"][-1] < ours["losses"][0] - 0.05
    assert ours["tied"] is (case[0] == "gpt")


def test_every_case_is_a_different_training() -> None:
    """A case that changes nothing would test nothing."""
    ends = [on_cpu.setdefault(case, train("single_device", *case))["losses"][-1] for case in CASES]
    assert len({round(end, 4) for end in ends}) == len(CASES)
    assert not any(math.isnan(end) for end in ends)
