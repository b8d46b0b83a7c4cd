from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path

import pytest

from tests.helpers.processes import ROOT, Running, alive, descendants, run_python, start_python, wait_until
from tests.messages import raises_recorded
from trainer.errors import ConfigError
from trainer.launchers.launcher import _exit_code, can_relaunch, die_with_parent, launch_processes
from trainer.loop.teardown import in_interactive_session

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="signals as on Linux and macOS")

BEGIN = """
import os, signal, sys, time
from trainer.launchers.launcher import can_relaunch, die_with_parent, launch_processes

if "RANK" not in os.environ:
    print("parent", can_relaunch(), flush=True)
    launch_processes(2)
die_with_parent()
rank = int(os.environ["RANK"])
"""

PROGRAMS = {
    "a dash as the last argument": ([__file__, "--out", "-"], ""),
    "options": (["-u", "-W", "ignore", "-Xdev", "-X", "utf8", "-Werror", __file__, "-"], ""),
    "a folder": ([os.path.dirname(__file__), "-"], ""),
    "a command": (["-uc", "pass", "-"], ""),
    "a command in one word": (["-cpass"], ""),
    "a module": (["-m", "json.tool", "-"], ""),
    "nothing": ([], "its program came from standard input"),
    "only options": (["-u", "-X", "dev"], "its program came from standard input"),
    "a dash": (["-u", "-", "train.py"], "its program came from standard input"),
    "no file": (["gone.py"], "its program came from 'gone.py', which is not a file"),
}
"""Arguments of Python, and the beginning of why the program cannot be started a second time; empty: it can."""

LOOP = (
    BEGIN
    + """
import torch, torch.distributed as dist
from trainer.fault_tolerance.stop import StopCoordinator, exit_code

dist.init_process_group("gloo")
coordinator = StopCoordinator(dist.distributed_c10d._get_default_store(), rank, 2)
coordinator.install()
step = 0
while (reason := coordinator.check(step)) is None:
    if step == 0:
        print("training", flush=True)
    dist.all_reduce(torch.ones(1))
    time.sleep(0.01)
    step += 1
print("stopped at", step, flush=True)
dist.barrier()
coordinator.uninstall()
dist.destroy_process_group()
sys.exit(exit_code(reason))
"""
)

DEAF = (
    BEGIN
    + """
for name in ("SIGINT", "SIGTERM"):
    signal.signal(signal.Signals[name], lambda *_: print("heard", flush=True))
print("training", flush=True)
while True:
    time.sleep(0.05)
"""
)


def started(script: str, timeout: float = 90) -> tuple[Running, list[int]]:
    running = start_python(script)
    running.wait_for("training", count=2, timeout=timeout)
    return running, descendants(running.pid)


def all_gone(pids: list[int]) -> None:
    wait_until(lambda: not any(alive(pid) for pid in pids))


def test_command_line_environment_and_output_are_the_same() -> None:
    script = (
        BEGIN
        + """
env = os.environ
print("worker", rank, sys.argv[1:], env["LOCAL_RANK"], env["WORLD_SIZE"], env["LOCAL_WORLD_SIZE"], flush=True)
print("threads", env["OMP_NUM_THREADS"], flush=True)
print("error line", file=sys.stderr, flush=True)
"""
    )
    result = run_python(script, "a b", "$$x ${local_rank}", env={"OMP_NUM_THREADS": "7"}).check(0)
    assert sorted(result.stdout.splitlines()) == [
        "parent None",
        "threads 7",
        "threads 7",
        "worker 0 ['a b', '$$x ${local_rank}'] 0 2 2",
        "worker 1 ['a b', '$$x ${local_rank}'] 1 2 2",
    ]
    assert result.stderr == "error line\n" * 2


@pytest.mark.parametrize(
    ("end", "code", "stderr"),
    [
        ("sys.exit(3)", 3, ""),
        ("raise ValueError('no such thing')", 1, "ValueError: no such thing"),
        ("os.kill(os.getpid(), signal.SIGKILL)", 137, "rank 1 was ended by SIGKILL"),
    ],
)
def test_the_failing_process_decides_the_exit_code(end: str, code: int, stderr: str) -> None:
    result = run_python(BEGIN + f"if rank == 1:\n    {end}\ntime.sleep(3600)\n").check(code)
    assert result.stderr.rstrip().endswith(stderr)
    # No banner, no log lines of the agent: only the output of the process itself.
    assert len(result.stderr.splitlines()) == {3: 0, 1: 4, 137: 1}[code], result.stderr


@pytest.mark.parametrize(("name", "code"), [("SIGINT", 130), ("SIGTERM", 143)])
def test_a_signal_to_the_launcher_stops_all_at_one_step(name: str, code: int) -> None:
    running, workers = started(LOOP)
    running.send(signal.Signals[name])
    result = running.wait().check(code)
    steps = [line for line in result.stdout.splitlines() if line.startswith("stopped at")]
    assert len(steps) == 2
    assert steps[0] == steps[1]
    assert "Traceback" not in result.stderr
    all_gone(workers)


def test_an_interrupt_while_python_starts_in_the_processes(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import os, time\nif 'RANK' in os.environ:\n    print('training', flush=True)\n"
        # A signal between the print and a single sleep is noticed by Python only after that sleep.
        "    while True:\n        time.sleep(0.05)\n"
    )
    running = start_python(BEGIN, env={"PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])})
    running.wait_for("training", count=2)
    running.send(signal.SIGINT)
    running.wait().check(130)


SIGNALLED_BETWEEN = """
import os, signal, sys, time
if "RANK" in os.environ:
    open("first", "w").write(str(os.getpid()))
    os.rename("first", "begun")
    time.sleep(3600)
calls = []
def look(event, args):
    if event == "subprocess.Popen" and args[0] == sys.executable:
        calls.append(args)
        if len(calls) == 2:
            while not os.path.exists("begun"):
                time.sleep(0.01)
            os.kill(os.getpid(), signal.Signals[os.environ["SENT"]])
sys.addaudithook(look)
"""


@pytest.mark.parametrize(("name", "code"), [("SIGINT", 130), ("SIGUSR1", 75)])
def test_a_signal_while_the_processes_are_started_leaves_none_of_them(name: str, code: int, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(SIGNALLED_BETWEEN)
    running = start_python(BEGIN, env={"PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)]), "SENT": name})
    try:
        running.wait().check(code)
        assert not alive(int(Path("begun").read_text()))
    finally:
        with suppress(ProcessLookupError):
            os.kill(int(Path("begun").read_text()), signal.SIGKILL)


FAILURES = {
    "before": """
signal.signal(signal.SIGTERM, lambda *_: print("interrupt", flush=True))
if rank == 1:
    print("interrupt", flush=True)
    sys.exit(3)
while True:
    time.sleep(0.05)
""",
    "after, in training": """
from trainer.launchers.restarts import RestartRecord
RestartRecord()
print("interrupt", flush=True)
try:
    while True:
        time.sleep(0.05)  # a signal just before a single long sleep would be noticed after it
except KeyboardInterrupt:
    sys.exit(3)
""",
}


@pytest.mark.parametrize("when", FAILURES)
def test_an_interrupt_does_not_hide_a_failure(when: str) -> None:
    running = start_python(BEGIN + FAILURES[when])
    running.wait_for("interrupt", count=2)
    running.send(signal.SIGINT)
    running.wait().check(3)


LEAVES = """
import os, sys, time
from pathlib import Path
from trainer.launchers.launcher import launch_processes

if "RANK" not in os.environ:
    launch_processes(1, max_restarts=1)
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    left = os.fork()
    if left == 0:
        time.sleep(3600)
    Path("left").write_text(str(left))
    sys.exit(1)
"""


def test_a_restart_ends_what_the_failed_processes_have_left() -> None:
    run_python(LEAVES).check(0)
    left = int(Path("left").read_text())
    try:
        all_gone([left])
    finally:
        if alive(left):
            os.kill(left, signal.SIGKILL)


def test_a_closed_terminal_is_passed_on_as_sigterm() -> None:
    running, workers = started(BEGIN + "print('training', flush=True)\ntime.sleep(3600)\n")
    running.send(signal.SIGHUP)
    running.wait().check(143)
    all_gone(workers)


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&- >&- 2>&-"])
def test_streams_that_are_closed_stop_nothing(closed: str, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        BEGIN + "print('trained')\nprint('a warning', file=sys.stderr)\nopen(f'rank-{rank}', 'w').close()\n"
    )
    subprocess.run(["sh", "-c", f"exec {sys.executable} {script} {closed}"], cwd=tmp_path, check=True, timeout=90)
    assert sorted(path.name for path in tmp_path.glob("rank-*")) == ["rank-0", "rank-1"]


def test_the_second_interrupt_ends_processes_that_do_not_listen() -> None:
    running, workers = started(DEAF)
    running.send(signal.SIGINT)
    running.wait_for("heard", count=2)
    assert all(alive(pid) for pid in workers)
    running.send(signal.SIGINT)
    running.wait().check(130)
    all_gone(workers)


@pytest.mark.skipif(sys.platform != "linux", reason="needs PR_SET_PDEATHSIG")
def test_killing_the_launcher_leaves_nothing_behind() -> None:
    running, workers = started(DEAF)
    assert len(workers) == 2
    running.process.kill()
    running.wait().check(-signal.SIGKILL)
    all_gone(workers)


def test_as_module_and_as_command(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(BEGIN + "print('rank', rank, flush=True)\n")
    env = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}"}
    env.pop("PYTHONUNBUFFERED", None)
    for command in (["-m", "mine"], ["-c", "import mine"]):
        done = subprocess.run([sys.executable, *command], env=env, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stderr
        assert sorted(done.stdout.splitlines()) == ["parent None", "rank 0", "rank 1"]


def test_where_it_cannot_be_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    assert can_relaunch() == "it runs inside pytest"
    with raises_recorded(ConfigError):
        launch_processes(2)
    reasons: list[str | None] = []
    thread = threading.Thread(target=lambda: reasons.append(can_relaunch({})))
    thread.start()
    thread.join()
    assert reasons == ["this is not its main thread"]
    monkeypatch.setattr(sys, "argv", ["--changed", "by", "the program"])
    for arguments, reason in PROGRAMS.values():
        monkeypatch.setattr(sys, "orig_argv", [sys.executable, *arguments])
        found = can_relaunch({})
        assert (found or "").startswith(reason), (arguments, found)
        assert bool(found) is bool(reason), (arguments, found)
    monkeypatch.setattr(multiprocessing, "parent_process", lambda: object())
    assert can_relaunch({}) == "it was itself started by multiprocessing"
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    assert can_relaunch({}) == "it is a notebook or an interactive session"


def test_a_program_that_executes_notebooks_is_no_notebook(tmp_path: Path) -> None:
    """nbclient and papermill import ipykernel to find its kernels; a signal still has to end such a program."""
    pytest.importorskip("ipykernel")
    assert not in_interactive_session()
    program = tmp_path / "program.py"
    program.write_text("import ipykernel\nfrom trainer.launchers.launcher import can_relaunch\nprint(can_relaunch({}))")
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    assert subprocess.run([sys.executable, program], capture_output=True, env=env, text=True).stdout == "None\n"


@pytest.mark.parametrize("arguments", [("-u", "/dev/stdin"), ("-",), ()])
def test_a_program_from_a_pipe_is_not_started_twice(arguments: tuple[str, ...]) -> None:
    """/dev/stdin is empty for the processes that would be started: they would end well, and have done nothing."""
    source = b"from trainer.launchers.launcher import can_relaunch\nprint(can_relaunch())"
    env = {**os.environ, "PYTHONPATH": str(ROOT)} | {"PYTEST_CURRENT_TEST": ""}
    done = subprocess.run([sys.executable, *arguments], input=source, capture_output=True, env=env)
    assert done.stdout.startswith(b"its program came from "), done


@pytest.mark.skipif(sys.platform != "linux", reason="needs PR_GET_PDEATHSIG")
def test_die_with_parent_does_nothing_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, signal_of_parent = ctypes.CDLL(None).prctl, ctypes.c_int(-1)
    monkeypatch.delenv("TRAINER_LAUNCHED", raising=False)
    die_with_parent()
    monkeypatch.setenv("TRAINER_LAUNCHED", str(os.getpid()))  # as in a process started by a started one
    die_with_parent()
    assert (asked(2, ctypes.byref(signal_of_parent)), signal_of_parent.value) == (0, 0)  # PR_GET_PDEATHSIG


@pytest.mark.parametrize(
    ("codes", "code"),
    [([], 0), ([3], 3), ([1, 3], 3), ([-15, 1], 1), ([1, -9], 137), ([-15, 130], 130), ([143, 143], 143), ([-15], 143)],
)
def test_one_exit_code_for_all(codes: list[int], code: int) -> None:
    assert _exit_code(codes) == code
