"""XLA compiles nothing after the warm-up, and the reason for any later compilation is reported."""

from __future__ import annotations

import logging
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, TensorDataset

from tests.helpers.compare import QUIET
from tests.helpers.processes import ROOT
from trainer import Callback, ConfigError, Trainer, TrainModule
from trainer.callbacks import CSVLogger, LearningRateMonitor, ModelCheckpoint
from trainer.strategies.xla.recompiles import compilations_so_far
from trainer.strategies.xla.strategy import XlaFsdpStrategy, XlaStrategy


class MLP(TrainModule):
    """An MLP whose width differs from test to test, since graphs of another test are not compiled again."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(12, width), nn.ReLU(), nn.Dropout(0.1), nn.Linear(width, 3))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = cross_entropy(self.layers(batch[0]), batch[1])
        self.log("loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", cross_entropy(self.layers(batch[0]), batch[1]))

    def configure_optimizers(self) -> Any:
        # With weight decay a rate of exactly 0 multiplies by exactly 1, which torch_xla leaves out: see docs/tpu.md.
        optimizer = AdamW(self.parameters(), lr=1e-2, weight_decay=0.0)
        # Late in a run exactly 0, a number that XLA likes to build into the program.
        schedule = LambdaLR(optimizer, lambda step: min(1.0, step / 100) if step < 200 else 0.0)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def numbers(count: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(count, 12, generator=generator)
    return TensorDataset(x, x[:, :3].argmax(1))


class Counts(Callback):
    """The work of XLA by the end of each step: ended steps, and copied results to the host."""

    def __init__(self) -> None:
        self.ends: list[int] = []
        self.reads: list[int] = []

    def on_train_step_end(self, trainer: Trainer, module: TrainModule) -> None:
        from torch_xla.debug import metrics

        self.ends.append(metrics.counter_value("MarkStep") or 0)
        self.reads.append((metrics.metric_data("TransferFromDeviceTime") or (0,))[0])


@pytest.mark.parametrize("kind", [XlaStrategy, XlaFsdpStrategy])
def test_a_step_ends_once_and_values_are_read_at_a_flush(kind: Any, tmp_path: Path) -> None:
    counts = Counts()
    fit(
        kind(),
        8 * 40,
        MLP(72),
        accumulate_grad_batches=2,
        gradient_clip_val=1.0,
        log_every_n_steps=5,
        callbacks=[counts],
        enable_progress_bar=True,
        logger=CSVLogger(),
        default_root_dir=tmp_path,
    )
    assert [after - before for before, after in pairwise(counts.ends)] == [1] * 39
    read_in = [step for step, (before, after) in enumerate(pairwise(counts.reads), 2) if after != before]
    # Values are read after the hook of their step; with those of step 20 the mean over the epoch is read.
    assert read_in == [6, 11, 16, 21, 26, 31, 36]


class Compiles(Callback):
    """Record the number of compiled graphs at the end of each step."""

    def __init__(self) -> None:
        self.by_step: list[int] = []

    def on_train_step_end(self, trainer: Trainer, module: TrainModule) -> None:
        self.by_step.append(compilations_so_far())


@pytest.mark.parametrize("kind", [XlaStrategy, XlaFsdpStrategy])
def test_nothing_is_compiled_after_the_warm_up(kind: Any, tmp_path: Path) -> None:
    """Twelve epochs of 20 steps, with everything on; each thing has happened once after two of them."""
    count = Compiles()
    trainer = Trainer(
        strategy=kind(),
        max_epochs=12,
        accumulate_grad_batches=2,
        gradient_clip_val=1.0,
        val_check_interval=10,
        log_every_n_steps=5,
        default_root_dir=tmp_path,
        callbacks=[count, ModelCheckpoint(every_n_train_steps=7, save_top_k=-1), LearningRateMonitor()],
    )
    trainer.fit(MLP(), DataLoader(numbers(320), 8, shuffle=True), DataLoader(numbers(24), 8))
    assert len(count.by_step) == 240
    assert set(count.by_step[40:]) == {count.by_step[39]}
    watch = trainer.strategy.recompilation_monitor
    assert watch.recompiled_steps == 0
    assert len(list(tmp_path.rglob("manifest.json"))) >= 30


def fit(strategy: XlaStrategy, samples: int, module: TrainModule | None = None, **options: Any) -> Trainer:
    trainer = Trainer(strategy=strategy, max_epochs=2, **{**QUIET, **options})
    trainer.fit(module or MLP(), DataLoader(numbers(samples), 8))
    return trainer


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return the warnings, but for the one that the module's validation_step is not used."""
    messages = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    return [message for message in messages if "nothing is validated" not in message]


def test_a_short_last_batch_is_named(caplog: pytest.LogCaptureFixture) -> None:
    strategy = XlaStrategy(compile_warmup_steps=5)
    fit(strategy, 8 * 9 + 5, MLP(48))
    (warning,) = warnings_of(caplog)
    assert "training_step number 10 was compiled again" in warning
    assert "batch[0] is (5, 12) instead of (8, 12); batch[1] is (5,) instead of (8,)" in warning
    assert "drop_last=True" in warning
    assert warning in " ".join((ROOT / "docs" / "tpu.md").read_text().split())
    assert strategy.recompilation_monitor.recompiled_steps == 1


def test_a_short_last_batch_is_filled_up(caplog: pytest.LogCaptureFixture) -> None:
    strategy = XlaStrategy(compile_warmup_steps=5, pad_last_batch=True)
    trainer = fit(strategy, 8 * 9 + 5, MLP(56))
    assert strategy.recompilation_monitor.recompiled_steps == 0
    assert warnings_of(caplog) == []
    assert trainer.progress.samples == 2 * (8 * 9 + 5)


def test_filling_up_repeats_the_batch_s_own_samples() -> None:
    seen: list[torch.Tensor] = []

    class Look(Callback):
        def on_train_batch_start(self, trainer: Trainer, module: TrainModule, batch: Any, index: int) -> None:
            seen.append(batch[0].cpu())

    fit(XlaStrategy(pad_last_batch=True), 8 + 3, callbacks=[Look()])
    rows = numbers(11).tensors[0]
    assert torch.equal(seen[1], rows[[8, 9, 10, 8, 9, 10, 8, 9]])


def test_only_what_is_shorter_than_before_is_filled_up() -> None:
    seen: list[list[tuple[int, ...]]] = []

    class Weighted(MLP):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            seen.append([tuple(one.shape) for one in batch])
            return cross_entropy(self.layers(batch[0]), batch[1], weight=batch[2])

    x, y = numbers(11).tensors
    weights = torch.ones(int(y.max()) + 1)
    batches = [(x[:8], y[:8], weights), (x[8:], y[8:], weights)]
    Trainer(strategy=XlaStrategy(pad_last_batch=True), max_epochs=1, **QUIET).fit(Weighted(40), batches)
    assert seen[1] == seen[0] == [tuple(x[:8].shape), (8,), tuple(weights.shape)]


def test_a_second_run_counts_its_steps_from_the_beginning(caplog: pytest.LogCaptureFixture) -> None:
    strategy = XlaStrategy(compile_warmup_steps=5)
    for width in (72, 80):
        fit(strategy, 8 * 9, MLP(width))
    assert warnings_of(caplog) == []


def test_a_warm_up_of_less_than_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="compile_warmup_steps=-1"):
        XlaStrategy(compile_warmup_steps=-1)


def test_a_dropped_last_batch_is_not_compiled(caplog: pytest.LogCaptureFixture) -> None:
    strategy = XlaStrategy(compile_warmup_steps=5)
    trainer = Trainer(strategy=strategy, max_epochs=2, **QUIET)
    trainer.fit(MLP(64), DataLoader(numbers(8 * 9 + 5), 8, drop_last=True))
    assert strategy.recompilation_monitor.recompiled_steps == 0
    assert warnings_of(caplog) == []


def test_a_short_window_is_named(caplog: pytest.LogCaptureFixture) -> None:
    strategy = XlaStrategy(compile_warmup_steps=3)
    fit(strategy, 8 * 11, MLP(24), accumulate_grad_batches=2)
    assert any("it has 1 micro-batches instead of 2" in warning for warning in warnings_of(caplog))


class Branching(MLP):
    """A module that builds a changing Python number into the graph."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return cross_entropy(self.layers(batch[0]).roll(batch_idx % 7, 0), batch[1].roll(batch_idx % 7, 0))


def test_what_changes_without_the_shapes_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    strategy = XlaStrategy(compile_warmup_steps=3)
    fit(strategy, 8 * 6, Branching(40))
    assert strategy.recompilation_monitor.recompiled_steps == 4
    assert all("the shapes of its batches are not new" in warning for warning in warnings_of(caplog))
