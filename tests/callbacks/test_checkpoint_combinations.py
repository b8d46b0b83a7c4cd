"""ModelCheckpoint keeps what a model of it keeps, that knows every true value, in random combinations of settings."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.helpers.processes import run_distributed
from tests.helpers.toy import Toy, loader, quiet
from tests.tiers import Inputs
from trainer import Callback
from trainer.callbacks import ModelCheckpoint
from trainer.checkpoint.directory import CheckpointDirectory
from trainer.checkpoint.manifest import read_manifest

Saves = list[tuple[int, float | None]]
"""Steps of the checkpoints that are kept, in the order of writing, with their scores."""


@dataclass
class Case:
    """One combination. Its parts end at `ends`: interrupted ones by a signal, others by max_steps or max_epochs."""

    length: int
    interval: int | float
    check_every: int
    trigger: str
    every: int
    monitor: str | None
    mode: str
    top_k: int
    save_last: bool
    filename: str
    values: list[int]
    """The true value after each step, in a small range: there are ties."""
    ends: list[int]
    interrupted: list[bool]
    fits_before: int
    has_length: bool
    """Of the training data; else nothing knows which step is an epoch's last before the next batch is asked for."""

    @classmethod
    def drawn(cls, draw: random.Random) -> Case:
        length = draw.choice([2, 3, 4])
        ends = sorted(draw.sample(range(1, 3 * length + 1), draw.choice([1, 2, 2, 3])))
        case = cls(
            length=length,
            interval=draw.choice([1.0, 1.0, 0.5, *range(1, length + 1)]),
            check_every=draw.choice([1, 1, 2]),
            trigger=draw.choice(["steps", "epochs", "time"]),
            every=draw.choice([1, 2, 3]),
            monitor=draw.choice([None, "val", "val", "val", "train", "step"]),
            mode=draw.choice(["min", "max"]),
            top_k=draw.choice([-1, 0, 1, 1, 2, 3]),
            save_last=draw.random() < 0.7,
            filename=draw.choice(["{epoch}-{step}", "model", "{step}-{val:.1f}"]),
            values=[draw.randrange(4) for _ in range(3 * length + 1)],
            ends=ends,
            interrupted=[draw.random() < 0.5 for _ in ends[1:]] + [False],
            fits_before=draw.choice([0, 0, 0, 1]),
            has_length=draw.random() < 0.7,
        )
        if case.interval == 0.5:
            case.has_length = True
        return case

    def validates(self, step: int) -> bool:
        batch = (step - 1) % self.length + 1
        inside = self.interval if isinstance(self.interval, int) else max(1, int(self.length * self.interval))
        return (step - 1) // self.length % self.check_every == self.check_every - 1 and batch % inside == 0

    def score(self, step: int, epoch_ended: bool, left: bool = False) -> float | None:
        """Return the monitored value of the state after `step`; `left`: a signal has ended its validation."""
        if self.monitor == "step":
            return step
        if self.monitor == "train" and epoch_ended:
            return sum(self.values[step - self.length + 1 : step + 1]) / self.length
        known = self.validates(step) and (epoch_ended or self.interval != 1.0 or isinstance(self.interval, int))
        known = known and not left
        return self.values[step] if self.monitor == "val" and known else None


@dataclass
class Model:
    """What ModelCheckpoint has to keep."""

    case: Case
    step: int = 0
    kept: Saves = field(default_factory=list)
    seconds: int = 0
    """Since the time was up, or since the start."""
    time_is_up: bool = False
    """A checkpoint is due by time, until one is written."""
    left: bool = False
    """A signal came before or in the validation of the last step, which the resumed run repeats."""

    def run(self, end: int, interrupted: bool) -> None:
        case, self.seconds, self.time_is_up = self.case, 0, False
        if self.left and not (case.has_length and self.step % case.length == 0):
            self.save_if_due(self.step, epoch_ended=False)
        self.left = interrupted and case.validates(end)
        if self.step and self.step % case.length == 0:
            self.save_if_due(self.step, epoch_ended=True)  # pending since a signal after the epoch's last batch
        for step in range(self.step + 1, end + 1):
            self.seconds += 1
            if self.seconds == case.every:
                self.seconds, self.time_is_up = 0, True
            stopped = interrupted and step == end
            self.save_if_due(step, step % case.length == 0 and not stopped, left=stopped and self.left)
        if not any(step == end for step, _ in self.kept):
            self.save(end, case.score(end, end % case.length == 0 and not interrupted, self.left))
        self.step = max([step for step, _ in self.kept], default=0)

    def save_if_due(self, step: int, epoch_ended: bool, left: bool = False) -> None:
        case = self.case
        by_epoch = ((step - 1) // case.length + 1) % case.every == 0
        due = {
            "steps": step % case.every == 0,
            "time": self.time_is_up,
            "epochs": by_epoch
            and (
                epoch_ended
                or ((case.interval != 1.0 or type(case.interval) is int) and case.validates(step) and not left)
            ),
        }[case.trigger]
        if due and self.save(step, case.score(step, epoch_ended, left)):
            self.time_is_up = False

    def save(self, step: int, score: float | None) -> bool:
        """Add a checkpoint; return whether its time is over."""
        case, others = self.case, [one for one in self.kept if one[0] != step]
        every: Saves = [*others, (step, score)]
        scored = sorted((one for one in every if one[1] is not None), key=self.rank)
        wanted = (scored if case.monitor else every[::-1])[: case.top_k if case.top_k >= 0 else None]
        if case.top_k == -1:
            wanted = every
        if case.save_last:
            wanted = [*wanted, every[-1]]
        if every[-1] in wanted:
            self.kept = [one for one in every if one in wanted]
        return every[-1] in wanted or score is not None

    def rank(self, one: tuple[int, float | None]) -> float:
        assert one[1] is not None
        return one[1] if self.case.mode == "min" else -one[1]

    @property
    def best(self) -> int | None:
        scored = [one for one in self.kept if one[1] is not None]
        return min(scored, key=self.rank)[0] if scored and self.case.monitor and self.case.top_k else None


class Known(Toy):
    """Logs the true value of each step, in training and in validation."""

    def __init__(self, values: list[int], clock: Callable[[], None]) -> None:
        super().__init__()
        self.values, self.clock = values, clock

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.clock()
        self.log("train", float(self.values[self.global_step + 1]), on_step=False, on_epoch=True)
        return self._loss(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", float(self.values[self.global_step]))


class WithoutLength:
    """The batches of a loader."""

    def __init__(self, batches: Any) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)


class Interrupt(Callback):
    """Send the process a signal in a step."""

    def __init__(self, step: int | None) -> None:
        self.step = step

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == self.step:
            os.kill(os.getpid(), signal.SIGINT)


def run(case: Case, folder: Path, clock: list[float], processes: int) -> ModelCheckpoint:
    """Run all parts of a case, each with a trainer of its own but for the fits before the first."""

    def tick() -> None:
        clock[0] += 1

    trigger = {"steps": "every_n_train_steps", "epochs": "every_n_epochs", "time": "train_time_interval"}[case.trigger]
    for number, (end, interrupted) in enumerate(zip(case.ends, case.interrupted, strict=True)):
        checkpoint = ModelCheckpoint(
            filename=case.filename,
            monitor=case.monitor,
            mode=case.mode if case.monitor else None,  # type: ignore[arg-type]
            save_top_k=case.top_k,
            save_last=case.save_last,
            **{trigger: case.every},  # type: ignore[arg-type]
        )
        ends_an_epoch = end % case.length == 0 and not interrupted
        trainer = quiet(
            max_epochs=end // case.length if ends_an_epoch else -1,
            max_steps=-1 if ends_an_epoch or interrupted else end,
            val_check_interval=case.interval,
            check_val_every_n_epoch=case.check_every,
            enable_checkpointing=True,
            callbacks=[checkpoint, Interrupt(end if interrupted else None)],
            default_root_dir=folder,
            devices=processes,
            strategy="ddp" if processes > 1 else "auto",
        )
        for again in range(case.fits_before + 1 if number == 0 else 1):
            with pytest.raises(SystemExit) if interrupted else nullcontext():
                module, path = Known(case.values, tick), "last" if number else None
                sized = loader(processes * case.length, 1)
                data = sized if case.has_length else WithoutLength(loader(case.length, 1))
                trainer.fit(module, data, loader(2, 1), ckpt_path=path)
            assert trainer.run_dir.name == f"version_{again}" or number
    return checkpoint


def check(case: Case, folder: Path, clock: list[float], processes: int = 1) -> None:
    model = Model(case)
    for end, interrupted in zip(case.ends, case.interrupted, strict=True):
        model.run(end, interrupted)
    checkpoint = run(case, folder, clock, processes)
    at = {name: read_manifest(Path(checkpoint._folder) / name).info["step"] for name in checkpoint.kept}  # type: ignore[arg-type]
    assert [(at[name], value) for name, value in checkpoint.kept.items()] == model.kept
    steps = [step for step, _ in model.kept]
    last = steps[-1] if steps else None
    best = model.best if case.monitor else last if case.top_k else None
    directory = CheckpointDirectory(str(checkpoint._folder))
    assert sorted(read_manifest(path).info["step"] for path in directory.list()) == sorted(steps)
    assert at.get(Path(checkpoint.last_model_path).name) == last
    assert at.get(Path(checkpoint.best_model_path).name) == best
    pointers = [directory.pointer("last"), directory.pointer("best")]
    assert [pointer and at[pointer.name] for pointer in pointers] == [last, model.best]
    assert checkpoint.best_model_score == dict(model.kept).get(model.best or 0)
    if case.filename == "model" and steps:
        assert "model" in checkpoint.kept


def test_random_combinations(inputs: Inputs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr("trainer.callbacks.checkpoint.time", SimpleNamespace(monotonic=lambda: clock[0]))
    for number, draw in enumerate(islice(inputs, 0, None, 2)):
        clock[0] = 0.0
        check(Case.drawn(draw), tmp_path / str(number), clock)


@pytest.mark.parametrize("filename", ["{step}-{val:.0f}-{train:.2f}", "model"])
@pytest.mark.parametrize("monitor", ["val", "train"])
@pytest.mark.parametrize("trigger", ["steps", "time"])
@pytest.mark.parametrize("interval", [1.0, 2])
def test_without_a_length_a_checkpoint_of_an_epochs_last_step_has_the_values_of_the_epoch(
    interval: float, trigger: str, monitor: str, filename: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, found = [0.0], []
    monkeypatch.setattr("trainer.callbacks.checkpoint.time", SimpleNamespace(monotonic=lambda: clock[0]))
    for has_length in (True, False):
        case = Case(
            *(4, interval, 1, trigger, 2, monitor, "min", -1, True, filename, [3, 5, 2, 7, 1, 4, 0, 6, 8]),
            *([8], [False], 0, has_length),
        )
        checkpoint = run(case, tmp_path / str(has_length), clock, processes=1)
        metrics = [read_manifest(Path(checkpoint._folder) / name).info["metrics"] for name in checkpoint.kept]  # type: ignore[arg-type]
        found.append((checkpoint.kept, metrics))
    assert found[1] == found[0]


def _on_two(folder: str) -> None:
    torch.set_num_threads(1)
    cases = [case for seed in range(30) if (case := Case.drawn(random.Random(seed))).trigger != "time"]
    for number, case in enumerate(cases[:8]):
        # A signal stops several processes at one step, but nobody knows beforehand at which.
        case.interrupted = [False] * len(case.ends)
        check(case, Path(folder) / str(number), [0.0], processes=2)


def test_combinations_on_two_processes(tmp_path: Path) -> None:
    run_distributed(_on_two, 2, str(tmp_path))
