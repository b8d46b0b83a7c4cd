"""Random intervals, schedules, limits, monitors and rules to stop: Lightning and this package do alike."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pytorch_lightning", reason="compares with Lightning, which is not installed")

import torch

from tests.helpers.lightning_runs import LIGHTNING, OURS, Library, Record, Scenario, run
from tests.helpers.lightning_scenarios import Part
from tests.lightning.test_differential import close

COMPARED = ("losses", "rates", "logged", "weights", "best", "noted")
LENGTH = 4
"""Batches in an epoch."""


def drawn(draw: random.Random) -> Scenario:
    """Return a random combination, without those that the table of differences explains.

    These are an interval of 1 batch, which Lightning's callbacks take for 1.0, and a patience that ends a run with
    `check_val_every_n_epoch=2`, where it counts a value twice.
    """
    values = [float(draw.randrange(4)) for _ in range(4 * LENGTH + 1)]  # there are ties
    mode, every = draw.choice(["min", "max"]), draw.choice([1, 1, 2])
    patience = draw.choice([1, 2, 3]) if every == 1 else 9
    kind, size, interval = (
        draw.choice(["none", "plateau", "steps"]),
        draw.choice([1, 2, 3]),
        draw.choice(["step", "epoch"]),
    )
    settings = {
        "max_epochs": draw.choice([2, 3, 4]),
        "max_steps": draw.choice([-1, -1, LENGTH * draw.choice([1, 2, 3])]),
        "min_epochs": draw.choice([None, None, 2]),
        "val_check_interval": draw.choice([1.0, 1.0, 0.5, 2]),
        "check_val_every_n_epoch": every,
    }
    top_k = draw.choice([0, 1, 2, 3, -1])

    class Module(Part):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("value", values[self.trainer.global_step])

        def on_fit_end(self) -> None:
            best = self.trainer.checkpoint_callback
            self.record.noted.append(sorted(map(float, best.best_k_models.values())))
            self.record.noted.append((float(best.kth_value), bool(best.kth_best_model_path)))
            self.record.noted.append(None if best.current_score is None else float(best.current_score))

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            kinds = torch.optim.lr_scheduler
            if kind == "plateau":
                plateau = kinds.ReduceLROnPlateau(optimizer, patience=0, mode=mode)
                return [optimizer], [{"scheduler": plateau, "monitor": "value", "frequency": every}]
            if kind == "steps":
                return [optimizer], [{"scheduler": kinds.StepLR(optimizer, size), "interval": interval}]
            return optimizer

    def callbacks(library: Library, record: Record, folder: Path) -> list[Any]:
        early = library.EarlyStopping("value", mode=mode, patience=patience)
        folder = folder / "checkpoints"
        return [early, library.ModelCheckpoint(dirpath=folder, monitor="value", mode=mode, save_top_k=top_k)]

    return Scenario(str(draw), Module, settings, callbacks)


def drawn_stop(draw: random.Random) -> Scenario:
    """Return random options of EarlyStopping, with values at and beside their borders, and a stop that may wait."""
    values = [
        0.1 * draw.choice([0, 0.5, 1, 2, 2, 3, 4, *([math.nan, math.inf] if draw.random() < 0.2 else [])])
        for _ in range(9)
    ]
    options = {
        "mode": draw.choice(["min", "max"]),
        "patience": draw.choice([1, 2, 3]),
        "min_delta": draw.choice([0.0, 0.05, 0.1, -0.1]),
        "check_finite": draw.random() < 0.7,
        "stopping_threshold": draw.choice([None, None, 0.1, 0.3]),
        "divergence_threshold": draw.choice([None, None, 0.1, 0.3]),
    }

    class Module(Part):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("value", values[self.current_epoch])

        def on_fit_end(self) -> None:
            early = self.trainer.early_stopping_callback
            self.record.noted.append((early.stopped_epoch, early.wait_count, float(early.best_score)))
            self.record.noted.append(early.stopping_reason.name)

    def callbacks(library: Library, record: Record, folder: Path) -> list[Any]:
        return [library.EarlyStopping("value", **options)]

    return Scenario(str(options), Module, {"max_epochs": 8, "min_epochs": draw.choice([None, None, 4])}, callbacks)


@pytest.mark.parametrize("seed", range(12))
def test_stops_alike(seed: int, tmp_path: Path) -> None:
    scenario = drawn_stop(random.Random(seed))
    theirs, ours = run(LIGHTNING, scenario, tmp_path), run(OURS, scenario, tmp_path)
    assert theirs.noted == ours.noted, (scenario.name, scenario.settings)
    assert theirs.end == ours.end


@pytest.mark.parametrize("seed", range(8))
def test_the_same_in_random_settings(seed: int, tmp_path: Path) -> None:
    scenario = drawn(random.Random(seed))
    theirs, ours = run(LIGHTNING, scenario, tmp_path), run(OURS, scenario, tmp_path)
    for piece in COMPARED:
        assert close(getattr(theirs, piece), getattr(ours, piece)), (piece, scenario.settings)
    assert theirs.end["global_step"] == ours.end["global_step"]
