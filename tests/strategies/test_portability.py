"""A checkpoint of one strategy resumes under another: a few pairs; `python -m tests.helpers.portability` runs all."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.helpers.portability import (
    BOUND,
    PORTABLE,
    SAVED_AT,
    Cell,
    SaveAt,
    differences,
    fit,
    make_trainer,
    matrix,
    table,
    uninterrupted,
)
from tests.helpers.strategy_models import STEPS
from tests.helpers.strategy_runs import SINGLE, StepLosses, skip_if_missing
from trainer import Callback, Trainer, TrainModule

pytestmark = pytest.mark.timeout(1200)  # the first test starts all processes

RING = [name for name in PORTABLE if " x " not in name and name not in ("FSDP x4", "ZeRO-1 x2", "ZeRO-3 x1")]
FEW: list[Cell] = list(zip(RING, (*RING[1:], RING[0]), strict=True))
"""Round in a ring: each way is once the source and once the target. All other pairs are run before a release."""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[Cell, float]:
    folder = tmp_path_factory.mktemp("portability")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        return differences(FEW, folder)


@pytest.mark.parametrize(("source", "target"), FEW)
def test_a_run_goes_on_under_another_strategy(source: str, target: str, found: dict[Cell, float]) -> None:
    skip_if_missing(source)
    skip_if_missing(target)
    assert found[source, target] <= BOUND


class LoseMoments(Callback):
    """Drop a part of the optimizer's state, as a wrong resume would."""

    def on_train_start(self, trainer: Trainer, module: TrainModule) -> None:
        for state in trainer.optimizers[0].state.values():
            state["exp_avg"].zero_()


class LoseStep(Callback):
    """Drop the step counts of AdamW's bias correction, as a wrong resume would."""

    def on_train_start(self, trainer: Trainer, module: TrainModule) -> None:
        for state in trainer.optimizers[0].state.values():
            state["step"] = torch.tensor(0.0)


@pytest.mark.parametrize("loss", [LoseMoments, LoseStep])
def test_a_lost_part_of_the_optimizers_state_would_be_seen(loss: type[Callback], tmp_path: Path) -> None:
    checkpoint = str(tmp_path / "checkpoint")
    fit(SINGLE, make_trainer(SINGLE, SAVED_AT, SaveAt(SAVED_AT, checkpoint)))
    recorder = StepLosses()
    fit(SINGLE, make_trainer(SINGLE, STEPS, recorder, loss()), ckpt_path=checkpoint)
    expected = uninterrupted()[SAVED_AT:]
    assert max(abs(a - b) for a, b in zip(recorder.losses, expected, strict=True)) > 100 * BOUND


def test_the_table_has_a_row_and_a_column_for_each_way() -> None:
    cells = matrix()
    lines = table({cell: number * 1e-7 for number, cell in enumerate(cells)}).splitlines()
    assert len(cells) == len(PORTABLE) ** 2
    assert [line.count("|") for line in lines] == [len(PORTABLE) + 2] * (len(PORTABLE) + 2)
    assert "-" not in lines[2].replace("e-", "").replace("ZeRO-", "")
