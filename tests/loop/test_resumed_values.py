"""Values that were logged, torchmetrics objects and the window of accumulation, over sanity checks and resumes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torchmetrics
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.wrappers import MetricTracker

from tests.helpers.processes import run_distributed
from tests.helpers.stops import StopsAt
from tests.helpers.toy import Toy, loader, quiet
from trainer import Callback
from trainer.callbacks import CSVLogger, EarlyStopping


class ByHand(Toy):
    """A module that computes a metric by hand."""

    def __init__(self, resets: bool) -> None:
        super().__init__()
        self.resets, self.seen = resets, torchmetrics.SumMetric()
        self.best = torchmetrics.MaxMetric()
        self.totals: list[float] = []

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.seen.update(1.0)

    def on_validation_epoch_end(self) -> None:
        if self.trainer.sanity_checking:
            return
        self.totals.append(float(self.seen.compute()))
        self.best(self.totals[-1])
        self.best.compute()
        if self.resets:
            self.seen.reset()


@pytest.mark.parametrize("resets", [True, False])
def test_metrics_computed_by_hand(resets: bool, caplog: pytest.LogCaptureFixture) -> None:
    module = ByHand(resets)
    quiet(max_epochs=3, num_sanity_val_steps=1).fit(module, loader(1), loader(2))
    assert module.totals == ([2, 2, 2] if resets else [2, 4, 6])
    assert caplog.text.count("seen (SumMetric): computed by hand over this validation and those before it") == (
        not resets
    )
    assert "best" not in caplog.text


class FirstHooks(Toy):
    def on_fit_start(self) -> None:
        self.log("fit_start", 1.0, reduce_fx="sum")

    def on_train_start(self) -> None:
        self.log("train_start", 1.0, reduce_fx="sum")


def test_values_of_the_first_hooks_count_once(tmp_path: Path) -> None:
    def fit(*callbacks: Callback) -> dict[str, Any]:
        options: dict[str, Any] = {"enable_checkpointing": True, "default_root_dir": tmp_path}
        trainer = quiet(max_epochs=1, callbacks=[*callbacks], **options)
        trainer.fit(FirstHooks(), loader(4), ckpt_path="last")
        return trainer.callback_metrics

    fit(StopsAt(2))
    values = fit()
    assert (values["fit_start"], values["train_start"]) == (1, 1)


class Tracked(Toy):
    def __init__(self) -> None:
        super().__init__()
        self.tracker = MetricTracker(torchmetrics.MeanMetric(), maximize=True)
        self.history: list[list[float]] = []

    def on_train_epoch_start(self) -> None:
        if self.trainer.progress.batch == 0:
            self.tracker.increment()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.tracker.update(batch[0].mean() + self.current_epoch)
        return super().training_step(batch, batch_idx)

    def on_validation_epoch_start(self) -> None:
        if self.trainer.sanity_checking:
            self.tracker.increment()

    def on_train_epoch_end(self) -> None:
        self.history.append(self.tracker.compute_all().tolist())


@pytest.mark.filterwarnings("ignore:The default value for .maximize.")
@pytest.mark.parametrize("stop", [4, 6])
def test_a_tracker_keeps_its_history(stop: int, tmp_path: Path) -> None:
    def fit(folder: str, *callbacks: Callback) -> list[list[float]]:
        options: dict[str, Any] = {"enable_checkpointing": True, "default_root_dir": tmp_path / folder}
        module = Tracked()
        trainer = quiet(max_epochs=3, callbacks=[*callbacks], num_sanity_val_steps=1, **options)
        trainer.fit(module, loader(4), loader(1), ckpt_path="last")
        return module.history

    whole = fit("a")
    assert [len(one) for one in whole] == [1, 2, 3]
    fit("b", StopsAt(stop))
    assert fit("b")[-1] == whole[-1]


class Window(Callback):
    def __init__(self, at: int) -> None:
        self.at, self.windows = at, list[tuple[int, int]]()

    def on_train_step_end(self, trainer: Any, module: Any) -> None:
        self.windows.append((trainer.global_step, trainer.progress.window))
        if trainer.global_step == self.at:
            trainer.accumulate_grad_batches = 4


def test_a_window_that_a_callback_has_set_is_kept(tmp_path: Path) -> None:
    def fit(folder: str, *callbacks: Callback, **options: Any) -> list[tuple[int, int]]:
        window = Window(3)
        settings: dict[str, Any] = {"enable_checkpointing": True, "default_root_dir": tmp_path / folder, **options}
        quiet(max_epochs=1, callbacks=[window, *callbacks], **settings).fit(Toy(), loader(20), ckpt_path="last")
        return window.windows

    whole = fit("a")
    assert whole[3:] == [(4, 4), (5, 4), (6, 4), (7, 4), (8, 1)]
    fit("b", StopsAt(5))
    assert fit("b") == whole[5:]
    fit("c", StopsAt(5))
    assert fit("c", accumulate_grad_batches=2)[0] == (6, 2)  # the program begins otherwise


class Ends(Toy):
    def __init__(self) -> None:
        super().__init__()
        self.ends: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.log("mean", float(batch_idx), on_step=False, on_epoch=True)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("v", 1.0)

    def on_train_epoch_end(self) -> None:
        self.ends.append(self.global_step)


class Dies(Callback):
    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        if trainer.global_step == 6:
            raise InterruptedError


def test_an_early_stop_inside_an_epoch_is_made_up_for_if_the_process_died_at_its_end(tmp_path: Path) -> None:
    def fit(*callbacks: Callback) -> Ends:
        module = Ends()
        options: dict[str, Any] = {
            "enable_checkpointing": True,
            "default_root_dir": tmp_path,
            "val_check_interval": 0.5,
        }
        stopping = EarlyStopping("v", patience=2, mode="min")
        quiet(max_epochs=3, logger=CSVLogger(), callbacks=[*callbacks, stopping], **options).fit(
            module, loader(4), loader(1), ckpt_path="last"
        )
        return module

    with pytest.raises(InterruptedError):
        fit(Dies())
    assert fit().ends == [6]
    [row] = [row for row in (tmp_path / "version_0" / "metrics.csv").read_text().splitlines() if row.startswith("6,")]
    assert "0.5" in row.split(",")


def one_sample(folder: Path) -> list[str]:
    import logging

    found: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            found.append(record.getMessage())

    logging.getLogger("trainer").addHandler(Keep())
    data = DataLoader(TensorDataset(torch.ones(1, 4), torch.ones(1, 1)), 1)
    os.chdir(folder)
    quiet(max_epochs=1, devices=2, strategy="ddp").fit(Toy(), data)
    return [one for one in found if "some of the processes only" in one]


def test_a_process_with_padding_alone_logs_what_the_others_log(tmp_path: Path) -> None:
    assert run_distributed(one_sample, 2, tmp_path) == [[], []]
