"""A run that is interrupted anywhere and resumed ends with the same bits."""

from __future__ import annotations

import csv
import signal
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from tests.helpers.compare import QUIET, assert_same_bits
from tests.helpers.processes import fork_python, run_distributed, start_python
from tests.helpers.resume_runs import (
    EPOCHS,
    EVERY_CELL,
    SAMPLES,
    Cell,
    break_points,
    differences,
    matrix,
    plain,
    plain_on_two,
    stateful,
)
from tests.tiers import selected
from trainer import Trainer, TrainModule


class Found(NamedTuple):
    world: int
    folder: Path
    different: dict[tuple[Cell, str], list[str]]
    """By cell and place."""


@pytest.fixture(scope="module", params=[1, 2], ids=["one process", "two processes"])
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Found:
    """Run the matrix on one or two processes, in one start."""
    wanted: dict[Cell, list[str]] = {cell: [] for cell in EVERY_CELL}
    for world, cell, break_point in selected(request, "found", "cell", "break_point"):
        if world == request.param:
            wanted[cell].append(break_point)
    folder = tmp_path_factory.mktemp("matrix")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        results = run_distributed(matrix, request.param, str(folder), wanted)
    return Found(request.param, folder, {key: [line for rank in results for line in rank[key]] for key in results[0]})


@pytest.mark.parametrize(
    ("cell", "break_point"), [(cell, break_point) for cell in EVERY_CELL for break_point in break_points(cell)], ids=str
)
def test_a_broken_run_ends_with_the_same_bits(found: Found, cell: Cell, break_point: str) -> None:
    different = found.different[cell, break_point]
    assert not different, "\n".join(different)


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_the_number_of_workers_changes_nothing(found: Found, optimizer: str) -> None:
    different = differences(found.folder / f"{optimizer}-0workers", found.folder / f"{optimizer}-2workers")
    assert not different, "\n".join(different)


def test_sigkill(found: Found, tmp_path: Path) -> None:
    """The last rank is a real process that SIGKILL ends in a window and in a validation."""

    def run(hook: str = "on_fit_end", step: int = -1) -> int:
        script = f"from tests.helpers.resume_runs import killed_for_good\nkilled_for_good('broken', {hook!r}, {step})\n"
        if found.world == 1:
            return fork_python(script).wait().returncode
        return start_python(script, nproc=found.world).wait().returncode

    killed = -signal.SIGKILL if found.world == 1 else 1
    if found.world == 1:
        assert run("on_before_backward", 1) == killed
    assert run("on_validation_batch_start", 2) == killed
    assert run() == 0
    assert differences(found.folder / "adamw-0workers", tmp_path / "broken") == []


def test_torchdatas_stateful_loader(tmp_path: Path) -> None:
    pytest.importorskip("torchdata")
    for result in run_distributed(stateful, 2, str(tmp_path)):
        assert len(result) == 6
        assert not any(result.values()), "\n".join(f"{key}: {line}" for key, lines in result.items() for line in lines)


def test_another_number_of_processes_goes_on_with_the_same_global_batches(tmp_path: Path) -> None:
    one = plain(f"{tmp_path}/one", 8, 2)
    begun = plain(f"{tmp_path}/one to two", 8, 2, stop_at=4)
    two = run_distributed(plain_on_two, 2, str(tmp_path))
    ended = plain(f"{tmp_path}/two to one", 8, 2)

    assert len(one) == SAMPLES * EPOCHS
    # With seeds per sample the augmented samples have the same bits on every process.
    assert sorted(one) == sorted(two[0]["uninterrupted"] + two[1]["uninterrupted"])
    assert sorted(one) == sorted(begun + two[0]["one to two"] + two[1]["one to two"])
    assert sorted(one) == sorted(two[0]["two to one"] + two[1]["two to one"] + ended)
    rows = losses(tmp_path / "one")
    assert {"loss_step", "loss_epoch", "largest", "accuracy", "val_loss", "rate", "step"} <= set(rows[-1])
    for other in ("two", "one to two", "two to one"):
        for row, theirs in zip(rows, losses(tmp_path / other), strict=True):
            assert row.keys() == theirs.keys()
            for name in row:
                # A maximum over micro-batches depends on their size.
                if name != "largest":
                    assert row[name] == pytest.approx(theirs[name], rel=1e-5, abs=1e-5), (other, row["step"], name)


def losses(folder: Path) -> list[dict[str, float]]:
    with open(folder / "version_0" / "metrics.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["step"] for row in rows] == [str(step) for step in range(1, 7)]
    drawn: Any = ("epochs_begun", "python", "val_hook")
    return [{name: float(value) for name, value in row.items() if value and name not in drawn} for row in rows]


class Images(TrainModule):
    """A convolution in channels_last with a fused optimizer, which goes by the order in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = torch.nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.conv(batch[0]).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2, fused=True)


def train_images(folder: Path, steps: int, ckpt_path: str | None = None) -> Images:
    data = TensorDataset(torch.randn(16, 3, 8, 8, generator=torch.Generator().manual_seed(1)))
    settings = {**QUIET, "enable_checkpointing": True}
    trainer = Trainer(max_steps=steps, max_epochs=2, seed=1, accelerator="cpu", default_root_dir=folder, **settings)
    module = Images()
    trainer.fit(module, DataLoader(data, 4), ckpt_path=ckpt_path)
    return module


def test_the_optimizers_state_resumes_in_the_strides_of_the_weights(tmp_path: Path) -> None:
    uninterrupted = train_images(tmp_path / "a", 8)
    train_images(tmp_path / "b", 3)
    resumed = train_images(tmp_path / "b", 8, "last")
    assert_same_bits(resumed.state_dict(), uninterrupted.state_dict())
