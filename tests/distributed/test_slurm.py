"""Slurm's notation is parsed, and jobs are requeued; a fake `scontrol` replaces Slurm."""

from __future__ import annotations

import logging
import os
import signal
from pathlib import Path

import pytest

from tests.helpers.launcher_variables import SRUN
from tests.helpers.processes import fork_python, wait_until
from tests.helpers.training import make, steps_of
from tests.messages import raises_recorded
from trainer.distributed.slurm import first_host, requeue, tasks_per_node, was_requeued
from trainer.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("node1", "node1"),
        ("node[01-04,07],gpu1", "node01"),
        ("cn-[9-11].site.org", "cn-9.site.org"),
        ("r[1-2]n[098-100],x", "r1n098"),
    ],
)
def test_a_list_of_nodes(text: str, name: str) -> None:
    assert first_host(text) == name


@pytest.mark.parametrize("text", ["", ",", "node[1-", "node[a-b]", "n]1[", "node[1-2]]", "[[1-2]]", "node[]"])
def test_what_is_no_list_of_nodes(text: str) -> None:
    with raises_recorded(ConfigError):
        first_host(text)


def test_tasks_of_each_node() -> None:
    assert tasks_per_node("2(x3),1") == [2, 2, 2, 1]
    with raises_recorded(ConfigError):
        tasks_per_node("2(x3")


def stand_in(folder: Path, code: int = 0) -> dict[str, str]:
    """Put a fake `scontrol` first on PATH, which records its arguments."""
    tool = folder / "bin" / "scontrol"
    tool.parent.mkdir()
    tool.write_text(f'#!/bin/sh\necho "$@" >> "{folder}/called"\necho "no permission" >&2\nexit {code}\n')
    tool.chmod(0o755)
    return {"PATH": f"{tool.parent}{os.pathsep}{os.environ['PATH']}", "SLURM_JOB_ID": "74"}


def test_requeue_only_when_asked_and_in_a_job(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    env = stand_in(tmp_path)
    assert not requeue(env)
    assert not requeue({**env, "TRAINER_REQUEUE": "0"})
    with caplog.at_level(logging.WARNING, "trainer"):
        assert not requeue({"TRAINER_REQUEUE": "1"})
        assert not requeue({"TRAINER_REQUEUE": "1", "SLURM_JOB_ID": "74", "PATH": str(tmp_path)})
    assert "not a Slurm job" in caplog.text
    assert "scontrol requeue 74 failed: run it yourself" in caplog.text
    assert not (tmp_path / "called").exists()
    assert requeue({**env, "TRAINER_REQUEUE": "1"})
    assert (tmp_path / "called").read_text() == "requeue 74\n"


def test_a_refusal_is_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    env = stand_in(tmp_path, code=1)
    assert not requeue({**env, "TRAINER_REQUEUE": "1"})
    assert "run it yourself. no permission" in caplog.text


def task(rank: int, **more: str) -> dict[str, str]:
    """Return Slurm's variables of one of two tasks on this machine."""
    return {
        **SRUN,
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_TASKS_PER_NODE": "2",
        "SLURM_STEP_NODELIST": "localhost",
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(rank),
        "SLURM_NODEID": "0",
        **more,
    }


def test_tasks_join_save_together_at_the_warning_and_one_of_them_goes_back_into_the_queue(tmp_path: Path) -> None:
    script = make(tmp_path / "run")
    out = script.parent / "out"
    queue = {**stand_in(tmp_path), "TRAINER_REQUEUE": "1", "SLURM_STEP_ID": str(os.getpid())}
    del queue["SLURM_JOB_ID"]
    tasks = [
        fork_python(script, str(out), "1000", "0.05", "last", env=task(rank, **queue), number=rank) for rank in (0, 1)
    ]
    wait_until(lambda: len(steps_of(out, 1)) > 2, 120, "\n".join(map(str, tasks)))
    for one in tasks:  # Slurm signals all tasks
        one.send(signal.SIGUSR1)
    for one in tasks:
        one.wait().check(75)
    done = steps_of(out)
    assert done == steps_of(out, 1) == list(range(1, len(done) + 1))
    assert (tmp_path / "called").read_text() == "requeue 74\n"
    # The job's second start continues with the next step.
    tasks = [
        fork_python(script, str(out), str(len(done) + 2), "0", "last", env=task(rank, **queue), number=rank)
        for rank in (0, 1)
    ]
    for one in tasks:
        one.wait().check()
    assert steps_of(out) == list(range(1, len(done) + 3))


def test_a_job_that_was_put_back_goes_on_by_itself(tmp_path: Path) -> None:
    """Slurm's count of restarts replaces ckpt_path."""
    script = make(tmp_path / "run")
    out = script.parent / "out"
    queue = {"TRAINER_REQUEUE": "1", "SLURM_STEP_ID": str(os.getpid())}
    for count, steps in (("", 3), ("1", 5)):
        env = {**queue, "SLURM_RESTART_COUNT": count}
        start = (script, str(out), str(steps), "0", "None")
        tasks = [fork_python(*start, env=task(rank, **env), number=rank) for rank in (0, 1)]
        for one in tasks:
            one.wait().check()
    assert steps_of(out) == [1, 2, 3, 4, 5]


def test_only_a_later_start_of_a_job_that_asks_for_it_goes_on() -> None:
    assert was_requeued({"TRAINER_REQUEUE": "1", "SLURM_RESTART_COUNT": "2"})
    assert not was_requeued({"TRAINER_REQUEUE": "1", "SLURM_RESTART_COUNT": "0"})
    assert not was_requeued({"TRAINER_REQUEUE": "0", "SLURM_RESTART_COUNT": "2"})
    assert not was_requeued({"SLURM_RESTART_COUNT": "2"})
