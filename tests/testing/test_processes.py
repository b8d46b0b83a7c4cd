"""A signal reaches one rank of several, and a script is killed and restarted until it is done."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.helpers.processes import start_python
from trainer.testing import alive, descendants, kill_at_random, rank_of

PARENT = '''
import os, signal, subprocess, sys, time
child = """
import signal, sys, time
signal.signal(signal.SIGUSR1, lambda *_: sys.exit(7))
print('up', flush=True)
while True:
    time.sleep(0.05)
"""
ranks = [subprocess.Popen([sys.executable, "-c", child], env={**os.environ, "RANK": str(rank)}) for rank in (0, 1)]
print("codes", ranks[1].wait(), ranks[0].poll(), flush=True)
ranks[0].kill()
'''

COUNTER = """
import pathlib, time
file = pathlib.Path("count")
print("ready", flush=True)
while (count := int(file.read_text()) if file.exists() else 0) < 20:
    time.sleep(0.03)
    (new := pathlib.Path("new")).write_text(str(count + 1))
    new.rename(file)
"""


def test_a_signal_reaches_one_rank() -> None:
    running = start_python(PARENT)
    running.wait_for("up", count=2)
    running.send(signal.SIGUSR1, rank=1)
    assert "codes 7 None" in running.wait().stdout
    assert not any(alive(pid) for pid in descendants(running.pid))


def test_a_rank_that_is_not_there_is_named() -> None:
    running = start_python("import time\ntime.sleep(3600)\n")
    with pytest.raises(AssertionError, match=f"process {running.pid} has started no process of rank 3"):
        rank_of(running.pid, 3)
    running.kill()


def test_a_script_is_killed_until_it_is_done(tmp_path: Path) -> None:
    script = tmp_path / "counter.py"
    script.write_text(COUNTER)
    storm = kill_at_random(script, kills=4, longest=0.2, ready="ready", seed=1)
    assert storm.kills == 4
    assert storm.starts == 5
    assert storm.result.returncode == 0
    assert (tmp_path / "count").read_text() == "20"


def test_an_error_of_the_script_is_an_error(tmp_path: Path) -> None:
    script = tmp_path / "broken.py"
    script.write_text("raise SystemExit('no')\n")
    with pytest.raises(AssertionError, match="no"):
        kill_at_random(script, kills=3, longest=5, ready="ready", early=0)
