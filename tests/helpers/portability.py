"""`python -m tests.helpers.portability`: resume each strategy's run under each other one; a table in Markdown.

Every cell is a real run: ten steps under the strategy of the row, a checkpoint, ten more under that of the column, in
new processes. The number in it is the largest difference of a loss of these ten from those of a run on one process that
was never interrupted.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

from tests.helpers.strategy_models import GPT, STEPS
from tests.helpers.strategy_runs import SINGLE, WAYS, StepLosses, run_each
from trainer import Callback, Trainer, TrainModule

PORTABLE = (
    *(SINGLE, "DDP x2", "FSDP x2", "FSDP x4", "ZeRO-1 x2", "ZeRO-2 x2", "ZeRO-3 x2", "ZeRO-3 x1", "TP x2", "CP x2"),
    *("PP x2", "TP 2 x FSDP 2", "CP 2 x FSDP 2", "CP 2 x TP 2", "PP 2 x FSDP 2", "PP 2 x TP 2", "PP 2 x CP 2"),
    *("EP x2", "EP 2 x FSDP 2", "EP 2 x TP 2", "EP 2 x CP 2", "PP 2 x EP 2", "HYBRID 2 x TP 2", "HYBRID 2 x EP 2"),
)
SAVED_AT = 10
BOUND = 1e-5
SAMPLES = 81
"""Four steps an epoch: the checkpoint is in the middle of the third one, and the data is shuffled."""

Cell = tuple[str, str]
"""The way that saves, and the way that resumes."""


class SaveAt(Callback):
    """Save a checkpoint in the middle of a run."""

    def __init__(self, step: int, path: str) -> None:
        self.step = step
        self.path = path

    def on_train_step_end(self, trainer: Trainer, module: TrainModule) -> None:
        if trainer.global_step == self.step:
            trainer.save_checkpoint(self.path)


def make_trainer(name: str, max_steps: int, *callbacks: Callback) -> Trainer:
    return WAYS[name].trainer(
        seed=3,
        max_steps=max_steps,
        max_epochs=-1,
        accumulate_grad_batches=3,
        gradient_clip_val=1.0,
        log_every_n_steps=1,
        callbacks=list(callbacks),
    )


def fit(name: str, trainer: Trainer, ckpt_path: str | None = None) -> None:
    module = GPT(ragged=True, tied=True, frozen=True, experts=4)
    loader = DataLoader(module.data(SAMPLES), WAYS[name].micro_batch, shuffle=True)
    trainer.fit(module, loader, ckpt_path=ckpt_path)


def uninterrupted() -> list[float]:
    """Return the losses of all steps on one process."""
    recorder = StepLosses()
    fit(SINGLE, make_trainer(SINGLE, STEPS, recorder))
    return recorder.losses


def save(name: str, folder: str) -> None:
    """Train the first half of a run, and save a checkpoint with the way's name."""
    fit(name, make_trainer(name, SAVED_AT, SaveAt(SAVED_AT, os.path.join(folder, name))))


def go_on(name: str, folder: str, cells: Iterable[Cell]) -> dict[str, list[float]]:
    """Return the losses of the second half, resumed from the checkpoint of each other way that `cells` names."""
    losses = {}
    for source in [source for source, target in cells if target == name]:
        recorder = StepLosses()
        torch.manual_seed(99)
        fit(name, make_trainer(name, STEPS, recorder), ckpt_path=os.path.join(folder, source))
        losses[source] = recorder.losses
    return losses


def differences(cells: Iterable[Cell], folder: Path) -> dict[Cell, float]:
    """Return the largest difference of a loss from the uninterrupted run, for each cell whose two ways can run here.

    Every rank has to report the same losses.
    """
    cells = [cell for cell in cells if not any(WAYS[name].missing() for name in cell)]
    run_each(save, dict.fromkeys(source for source, _ in cells), str(folder))
    expected = uninterrupted()[SAVED_AT:]
    found = {}
    for target, ranks in run_each(go_on, dict.fromkeys(target for _, target in cells), str(folder), cells).items():
        for source in ranks[0]:
            pairs = [zip(rank[source], expected, strict=True) for rank in ranks]
            found[source, target] = max(abs(ours - wanted) for pair in pairs for ours, wanted in pair)
    return found


def matrix() -> list[Cell]:
    """Return every pair of ways, including a way and itself."""
    return [(source, target) for source in PORTABLE for target in PORTABLE]


def table(found: dict[Cell, float]) -> str:
    """Return a Markdown table: rows are the ways of saving, columns those of resuming."""
    lines = [f"| saved under | {' | '.join(PORTABLE)} |", "|---" * (len(PORTABLE) + 1) + "|"]
    for source in PORTABLE:
        row = [f"{found[source, target]:.0e}" if (source, target) in found else "-" for target in PORTABLE]
        lines.append(f"| **{source}** | {' | '.join(row)} |")
    return "\n".join(lines)


def main() -> int:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        found = differences(matrix(), Path(folder))
        os.chdir("/")
    wrong: list[Any] = [cell for cell, difference in found.items() if not difference <= BOUND]
    for name in PORTABLE:
        if reason := WAYS[name].missing():
            print(f"left out: {name}: {reason}")
    print(f"\nSteps {SAVED_AT + 1}-{STEPS}: largest difference of a loss from that of an uninterrupted run.\n")
    print(table(found))
    print(f"\n{len(found)} of {len(matrix())} cells, {len(wrong)} above {BOUND:g}: {wrong}")
    return 1 if wrong or len(found) < len(matrix()) else 0


if __name__ == "__main__":
    # Other processes import the functions by this module's name.
    from tests.helpers import portability

    sys.exit(portability.main())
