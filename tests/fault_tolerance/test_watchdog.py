from __future__ import annotations

import json
import os
import re
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

from tests.helpers.processes import fork_ranks
from tests.helpers.toy import Toy, loader, quiet
from tests.messages import raises_recorded
from trainer import Callback, Trainer, TrainModule
from trainer.errors import ConfigError
from trainer.fault_tolerance.stacks import stacks, where
from trainer.fault_tolerance.watchdog import Watchdog

SCRIPT = """
import sys, time
from tests.fault_tolerance.test_watchdog import watched
watched(sys.argv[1])
"""


def watched(how: str) -> None:
    """Run one of two processes under a watchdog with a limit of one second."""
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    watchdog = Watchdog()
    watchdog.start(dist.PrefixStore("x", dist.distributed_c10d._get_default_store()), rank, 2, 1.0, lambda: 3)
    watchdog.allow_slow = how == "slow"
    for _ in range(30):
        if how == "heartbeats" or rank == 0:
            watchdog.heartbeats += 1
        time.sleep(0.1)
    watchdog.stop()
    watchdog.stop()
    dist.barrier()
    os.write(1, b"came through\n")  # one write, so that the other process's output cannot split the line
    dist.destroy_process_group()


def two(how: str):  # type: ignore[no-untyped-def]
    return fork_ranks(SCRIPT, how).wait()


@pytest.mark.parametrize("how", ["heartbeats", "slow"])
def test_a_run_with_heartbeats_or_in_a_slow_phase_goes_on(how: str) -> None:
    assert two(how).check(0).stdout == "came through\n" * 2


def test_shows_all_stacks_and_who_is_behind() -> None:
    errors = two("hanging").check(1).stderr
    assert "the run hangs: no progress for 1 s (watchdog_seconds). behind the others: rank 1." in errors
    assert "\n  rank 1: 3 steps done" in errors
    for rank in (0, 1):
        shown = errors[errors.index(f"rank {rank} of 2, ") :]
        assert shown.splitlines()[1] == "  thread MainThread (most recent call last):"
        assert ", in watched" in shown


class OtherCollective(Callback):
    """Call a collective after the second step, another one on each rank."""

    def on_train_step_end(self, trainer: Trainer, module: TrainModule) -> None:
        if trainer.global_step == 2:
            dist.all_reduce(torch.ones(5)) if trainer.rank == 0 else dist.broadcast(torch.ones(7), src=0)
            time.sleep(60)


def fit_with_other_collectives() -> None:
    trainer = quiet(strategy="ddp", devices=2, max_epochs=1, watchdog_seconds=2.0, callbacks=OtherCollective())
    trainer.fit(Toy(), loader())


def test_names_the_collectives_in_which_the_processes_wait(tmp_path: Path) -> None:
    script = "from tests.fault_tolerance.test_watchdog import fit_with_other_collectives as f\nf()\n"
    errors = fork_ranks(script).wait().check(1).stderr
    lines = [line for line in errors.splitlines() if line.startswith("  rank ") and "steps done" in line]
    by_rank = {line.split(":")[0].split()[1]: line for line in lines}
    assert "; waits in all_reduce of [[5]], number " in by_rank["0"], errors
    assert "; waits in broadcast of [[7]], number " in by_rank["1"], errors
    assert "The processes are not in the same collective.\n" in errors
    assert "on_train_step_end (" in by_rank["0"]
    assert "test_watchdog.py:" in by_rank["1"]
    kept = sorted(tmp_path.glob("runs/*/flight-recorder-rank*.json"))
    assert [path.stem[-1] for path in kept] == ["0", "1"]
    assert json.loads(kept[1].read_text())["entries"][-1]["profiling_name"] == "gloo:broadcast"


class ReadsWhileOneHangs(Callback):
    """Call a collective of the trainer's on rank 1, while rank 0 hangs."""

    def on_train_step_end(self, trainer: Trainer, module: TrainModule) -> None:
        if trainer.global_step == 2:
            trainer.read_metrics() if trainer.rank == 1 else time.sleep(60)


def fit_with_a_read_while_one_hangs() -> None:
    trainer = quiet(strategy="ddp", devices=2, max_epochs=1, watchdog_seconds=2.0, callbacks=ReadsWhileOneHangs())
    trainer.fit(Toy(), loader())


def test_names_the_call_of_the_users_that_led_into_this_package(tmp_path: Path) -> None:
    script = "from tests.fault_tolerance.test_watchdog import fit_with_a_read_while_one_hangs as f\nf()\n"
    errors = fork_ranks(script).wait().check(1).stderr
    (line,) = [line for line in errors.splitlines() if line.startswith("  rank 1: ") and "steps done" in line]
    assert re.search(r", called from on_train_step_end \(.*test_watchdog\.py:\d+\)", line), errors


def test_the_limit_is_a_number_of_seconds() -> None:
    quiet(watchdog_seconds=60)
    for wrong in ("auto", -1, True):
        with raises_recorded(ConfigError):
            quiet(watchdog_seconds=wrong)


def test_single_processes_are_not_watched() -> None:
    watchdog = Watchdog()
    watchdog.start(None, 0, 1, 0.01, lambda: 0)
    time.sleep(0.1)
    watchdog.stop()


def test_stacks_of_the_other_threads() -> None:
    assert "test_watchdog" not in stacks()  # the calling thread's stack
    assert len(sys._current_frames()) >= 1


def test_a_process_that_holds_the_lock_is_ended_too() -> None:
    from tests.helpers.trouble import __file__ as script

    run = {"root": "r", "how": "locked", "who": "1", "watchdog_seconds": 2.0}
    errors = fork_ranks(script, json.dumps(run)).wait().check(1).stderr
    assert "Timeout (0:00:02" in errors  # rank 1, by faulthandler
    assert "in trouble" in errors
    assert "rank 1 did not answer" in errors or "rank 1 is gone" in errors  # whichever is noticed first


def test_a_mode_through_which_calls_of_torch_go_is_no_place() -> None:
    places: list[str] = []

    class Mode(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            with ThreadPoolExecutor(1) as another_thread:
                places.append(another_thread.submit(where).result())
            return func(*args, **(kwargs or {}))

    with Mode():
        torch.zeros(1).add(1)
    assert len(places) == 2
    assert all(place.startswith("test_a_mode_through_which_calls_of_torch_go_is_no_place") for place in places)
