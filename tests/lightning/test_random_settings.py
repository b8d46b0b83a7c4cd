"""Random intervals, schedules, limits and monitors: Lightning and this package train, stop and keep alike."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pytorch_lightning", reason="compares with Lightning, which is not installed")

import torch

from tests.helpers.lightning_runs import LIGHTNING, OURS, Library, Record, Scenario, run
from tests.lightning.test_differential import close

COMPARED = ("losses", "rates", "logged", "weights", "best")
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
    top_k = draw.choice([1, 2, 3, -1])

    def define(library: Library, Net: Any, record: Record) -> Any:  # noqa: N803
        class Module(Net):
            def validation_step(self, batch: Any, batch_idx: int) -> None:
                self.log("value", values[self.trainer.global_step])

            def configure_optimizers(self) -> Any:
                optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
                kinds = torch.optim.lr_scheduler
                if kind == "plateau":
                    plateau = kinds.ReduceLROnPlateau(optimizer, patience=0, mode=mode)
                    return [optimizer], [{"scheduler": plateau, "monitor": "value", "frequency": every}]
                if kind == "steps":
                    return [optimizer], [{"scheduler": kinds.StepLR(optimizer, size), "interval": interval}]
                return optimizer

        return Module

    def callbacks(library: Library, record: Record, folder: Path) -> list[Any]:
        early = library.EarlyStopping("value", mode=mode, patience=patience)
        folder = folder / "checkpoints"
        return [early, library.ModelCheckpoint(dirpath=folder, monitor="value", mode=mode, save_top_k=top_k)]

    return Scenario(str(draw), define, settings, callbacks)


@pytest.mark.parametrize("seed", range(8))
def test_the_same_in_random_settings(seed: int, tmp_path: Path) -> None:
    scenario = drawn(random.Random(seed))
    theirs, ours = run(LIGHTNING, scenario, tmp_path), run(OURS, scenario, tmp_path)
    for piece in COMPARED:
        assert close(getattr(theirs, piece), getattr(ours, piece)), (piece, scenario.settings)
    assert theirs.end["global_step"] == ours.end["global_step"]
