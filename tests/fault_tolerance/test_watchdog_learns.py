"""The limit that the watchdog learns: what a healthy run may do, and what is a hang."""

from __future__ import annotations

import os
import time
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from tests.helpers.processes import run_python
from tests.helpers.toy import Toy, loader, quiet
from trainer import Callback, Trainer
from trainer.fault_tolerance import patience
from trainer.fault_tolerance.patience import LEAST_S, TIMES, TRAINING, LearntLimit
from trainer.fault_tolerance.watchdog import Watchdog

UNKNOWN = 1800.0


def begun(first: float = 1.0) -> LearntLimit:
    """After a first step of so many seconds."""
    learnt = LearntLimit(UNKNOWN)
    learnt.seen("start of an epoch", True, first)
    assert learnt.limit(TRAINING, True) == UNKNOWN
    learnt.limit(TRAINING, False)
    return learnt


def test_nothing_is_known_before_the_first_step() -> None:
    learnt = LearntLimit(UNKNOWN)
    learnt.seen("start of an epoch", True, 5.0)
    assert learnt.limit(TRAINING, True) == learnt.limit("evaluation", True) == UNKNOWN


def test_steps_have_ten_times_the_longest_and_a_minute_at_least() -> None:
    learnt = begun()
    assert learnt.limit(TRAINING, False) == LEAST_S
    learnt.seen(TRAINING, False, 20.0)
    learnt.seen(TRAINING, False, 2.0)
    assert learnt.limit(TRAINING, False) == TIMES * 20.0


def test_the_first_step_counts_because_it_may_compile_and_a_later_one_again() -> None:
    assert begun(first=90.0).limit(TRAINING, False) == TIMES * 90.0


def test_a_save_does_not_count() -> None:
    learnt = begun()
    learnt.seen(TRAINING, True, 500.0)
    assert learnt.limit(TRAINING, False) == LEAST_S
    assert learnt.limit(TRAINING, True) == UNKNOWN


def test_a_moment_is_known_when_the_run_has_come_back_from_it() -> None:
    learnt = begun()
    learnt.seen("end of an epoch", False, 4.0)
    learnt.seen("evaluation", False, 30.0)
    assert learnt.limit("evaluation", False) == learnt.limit("end of an epoch", False) == UNKNOWN
    learnt.seen(TRAINING, False, 0.1)
    assert learnt.limit("evaluation", False) == TIMES * 30.0
    assert learnt.limit("end of an epoch", False) == LEAST_S
    assert learnt.limit("start of an epoch", False) == UNKNOWN


class StageHooks(Callback):
    """Notes the moments that the watchdog's thread would see."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def on_train_batch_start(self, trainer: Trainer, *args: Any) -> None:
        self.seen.append(trainer.moment)

    on_validation_batch_start = on_train_epoch_end = on_train_step_end = on_train_batch_start


def test_the_moments_of_a_run() -> None:
    moments = StageHooks()
    quiet(max_epochs=1, callbacks=[moments]).fit(Toy(), loader(3), loader(1))
    start, end = "start of an epoch", "end of an epoch"
    assert moments.seen == [start, *[TRAINING] * 4, end, "evaluation", end]


SCRIPT = """
from tests.fault_tolerance.test_watchdog_learns import watched
watched()
"""


def watched() -> None:
    """One of two processes; the least limit is two seconds, and rank 1 stops after some steps."""
    rank = int(os.environ["RANK"])
    patience.LEAST_S = 2.0
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    watchdog = Watchdog()
    store = dist.PrefixStore("x", dist.distributed_c10d._get_default_store())
    watchdog.start(store, rank, 2, "auto", lambda: watchdog.heartbeats)
    for _ in range(5):
        time.sleep(0.01)
        watchdog.heartbeats += 1
        watchdog.allow_slow = False
    while True:
        time.sleep(0.1)
        watchdog.heartbeats += 1 - rank


def test_a_hang_after_a_short_while_is_told_by_what_was_learnt() -> None:
    errors = run_python(SCRIPT, nproc=2, timeout=120).check(1).stderr
    assert "(watchdog_seconds='auto', learnt from this run). rank 1 is behind." in errors
    assert "rank 1: 5 steps done" in errors
