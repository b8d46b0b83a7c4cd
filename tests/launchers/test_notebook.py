"""`trainer.launch` runs functions that were typed at a prompt and exist in no file."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.processes import ROOT, Running, alive, descendants, fork_python, run_python, wait_until
from tests.messages import raises_recorded
from trainer import launch
from trainer.errors import ConfigError
from trainer.testing.processes import clean_environment

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="forks as on Linux")


def at_a_prompt(*lines: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Return the output of a Python prompt for these lines, typed one by one."""
    return subprocess.run(
        [sys.executable, "-i", "-q"],
        input="\n".join(lines) + "\n",
        cwd=cwd,
        env=clean_environment({"PYTHONPATH": str(ROOT)}),
        capture_output=True,
        text=True,
        timeout=600,
    )


def test_a_function_of_the_prompt_gives_its_results_by_rank(tmp_path: Path) -> None:
    done = at_a_prompt(
        *("import os, torch", "from trainer import launch", "offset = 10"),
        "def place(a, b): return int(os.environ['RANK']), int(os.environ['WORLD_SIZE']), a + b + offset, torch.ones(2)",
        *("", "print(launch(place, 1, b=2, devices=2))", "print('RANK' in os.environ)"),
        cwd=tmp_path,
    )
    assert done.stdout == "[(0, 2, 13, tensor([1., 1.])), (1, 2, 13, tensor([1., 1.]))]\nFalse\n", done.stderr


def test_a_training_in_the_function(tmp_path: Path) -> None:
    source = """
        import sys
        import torch
        from torch.utils.data import DataLoader
        from trainer import Trainer, TrainModule, launch

        class Net(TrainModule):
            def __init__(self):
                super().__init__()
                self.layer = torch.nn.Linear(1, 1)
            def training_step(self, batch, batch_idx):
                return self.layer(batch).pow(2).mean()
            def configure_optimizers(self):
                return torch.optim.SGD(self.parameters(), lr=0.1)

        def train(steps):
            trainer = Trainer(accelerator="cpu", max_steps=steps, seed=1, logger=False, enable_checkpointing=False,
                              enable_progress_bar=False, enable_model_summary=False)
            module = Net()
            trainer.fit(module, DataLoader(torch.ones(8, 1), batch_size=2))
            return trainer.world_size, module.layer.weight.item()

        def main():
            torch.ones(300, 300) @ torch.ones(300, 300)  # as a notebook that has calculated before
            (n, first), (_, second) = launch(train, 3, devices=2)
            print(n, first == second, len(launch(train, 1, devices=2)))
            print("a fit in this process:", file=sys.stderr, flush=True)
            train(1)
            launch(train, 1, devices=2)

        main()
    """
    lines = [line[8:] for line in source.splitlines()]
    done = fork_python("\n".join(lines), cwd=tmp_path).wait().check()
    assert done.stdout == "2 True 2\n"
    before, after = done.stderr.split("a fit in this process:")
    assert before.count("samples come in order") == 2
    assert after.count("samples come in order") == 1  # of rank 0, though the forked processes inherit the log


def test_the_error_of_the_first_process_that_fails_is_raised(tmp_path: Path) -> None:
    done = at_a_prompt(
        *("import os, time", "from trainer import launch", "from trainer.launchers import notebook"),
        *("notebook._SHUTDOWN_TIMEOUT_S = 0.5", "def fail():"),
        *("    if os.environ['RANK'] == '1': raise ValueError('no such thing')", "    time.sleep(3600)", ""),
        "launch(fail, devices=2)",
        cwd=tmp_path,
    )
    assert "WorkerError: rank 1 of 2 failed:" in done.stderr
    assert "in fail\nValueError: no such thing" in done.stderr


def test_a_process_that_is_killed(tmp_path: Path) -> None:
    done = at_a_prompt(
        *("import os, signal, time", "from trainer import launch"),
        *("def vanish(): os.kill(os.getpid(), signal.SIGKILL) if os.environ['RANK'] == '0' else time.sleep(3600)", ""),
        *("launch(vanish, devices=2)", "launch(lambda: os._exit(7), devices=1)"),
        "launch(lambda: (lambda: 1), devices=1)",
        cwd=tmp_path,
    )
    assert "WorkerError: rank 0 of 2 was ended by SIGKILL." in done.stderr
    assert "WorkerError: rank 0 of 1 ended with exit code 7." in done.stderr
    assert "rank 0 of 1 failed" in done.stderr  # its result cannot be sent
    assert "pickle" in done.stderr


SLEEPER = """
import time
from trainer import launch

def sleep(deaf):
    print("sleeping", flush=True)
    while True:
        try:
            time.sleep(0.05)
        except KeyboardInterrupt:
            if not deaf:
                raise
            print("deaf", flush=True)

try:
    launch(sleep, {deaf}, devices=2)
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""


@pytest.mark.parametrize("deaf", [False, True])
def test_an_interrupt_leaves_nothing_running(deaf: bool, tmp_path: Path) -> None:
    (tmp_path / "sleeper.py").write_text(SLEEPER.format(deaf=deaf))
    running = Running([sys.executable, "sleeper.py"], tmp_path, clean_environment({"PYTHONPATH": str(ROOT)}))
    running.wait_for("sleeping", count=2)
    workers = descendants(running.pid)
    running.send(signal.SIGINT)
    if deaf:
        running.wait_for("deaf", count=2)
        running.send(signal.SIGINT)
    assert running.wait().check().stdout.endswith("interrupted\n")
    assert len(workers) == 2
    assert not any(alive(pid) for pid in workers)


STOPPED = """
import os, time
from tests.helpers.toy import Toy, loader
from trainer import Trainer, launch

def train():
    def step(module, batch, batch_idx):
        print("step", flush=True)
        time.sleep(0.2)
        return Toy.training_step(module, batch, batch_idx)

    kind = type("Slow", (Toy,), {"training_step": step})
    trainer = Trainer(max_steps=100, accelerator="cpu", default_root_dir="run", enable_progress_bar=False)
    trainer.fit(kind(), loader(100))

os.setpgid(0, 0)  # a group as a shell makes it
try:
    launch(train, devices=2)
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""


def test_an_interrupt_of_the_group_stops_a_training_after_its_step(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(STOPPED)
    running = Running([sys.executable, "train.py"], tmp_path, clean_environment({"PYTHONPATH": str(ROOT)}))
    running.wait_for("step", count=4)
    os.killpg(running.pid, signal.SIGINT)  # as a terminal does, and a notebook's stop button
    ended = running.wait().check()
    assert "To go on, start it again with ckpt_path='last'" in ended.stdout
    assert ended.stdout.endswith("interrupted\n")
    assert len([*(tmp_path / "run/version_0/checkpoints").glob("*step=*")]) == 1


INTERRUPTED = """
import os, signal, time
from trainer import launch

forks = 0

def interrupt():
    global forks
    forks += 1
    if forks == {fork}:
        os.kill(os.getpid(), signal.SIGINT)

os.register_at_fork(after_in_parent=interrupt)
try:
    launch(time.sleep, 30.0, devices=2)
except KeyboardInterrupt:
    print("interrupted")
"""


@pytest.mark.parametrize("fork", [1, 2])
def test_an_interrupt_during_a_fork_is_not_lost(fork: int) -> None:
    assert run_python(INTERRUPTED.format(fork=fork)).check().stdout == "interrupted\n"


def test_killing_the_prompt_leaves_nothing_running(tmp_path: Path) -> None:
    (tmp_path / "sleeper.py").write_text(SLEEPER.format(deaf=True))
    running = Running([sys.executable, "sleeper.py"], tmp_path, clean_environment({"PYTHONPATH": str(ROOT)}))
    running.wait_for("sleeping", count=2)
    workers = descendants(running.pid)
    running.process.kill()
    running.wait()
    wait_until(lambda: not any(alive(pid) for pid in workers))


@pytest.mark.parametrize("devices", [0, "2"])
def test_wrong_numbers(devices: int | str) -> None:
    with raises_recorded(ConfigError):
        launch(print, devices=devices)


def test_inside_of_a_process_that_is_one_of_several(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with raises_recorded(ConfigError):
        launch(print, devices=2)


CUDA = """
import os, torch
from trainer import launch
{before}

def total():
    import torch.distributed as dist
    value = torch.ones(1, device=f"cuda:0")
    return os.getpid(), value + 1

print([value.item() for _, value in launch(total, devices=2)])
"""


@pytest.mark.gpu
@pytest.mark.skipif("not __import__('torch').cuda.is_available()", reason="needs a CUDA device")
@pytest.mark.parametrize(
    ("before", "message"),
    [
        ("", None),
        ("torch.cuda.device_count()", None),
        ("torch.ones(1).cuda()", "CUDA has been used in this process"),
        ("torch.cuda.is_available()", "CUDA has been used in this process"),
    ],
)
def test_cuda_in_a_notebook(before: str, message: str | None, tmp_path: Path) -> None:
    result = run_python(CUDA.format(before=before), cwd=tmp_path, env={"PYTORCH_NVML_BASED_CUDA_CHECK": "0"})
    if message is None:
        assert result.check().stdout == "[2.0, 2.0]\n"
    else:
        assert message in result.check(1).stderr
        assert "fresh kernel" in result.stderr


@pytest.mark.timeout(300)
@pytest.mark.parametrize("strategies", [("fsdp", "fsdp"), ("deepspeed_stage_2", "deepspeed_stage_2")])
def test_a_launch_after_a_fit_in_the_same_process(strategies: tuple[str, str], tmp_path: Path) -> None:
    """The forked processes forget the process group of the fit, which goes on to work in the first process."""
    source = f"""
        import torch
        from torch.utils.data import DataLoader
        from trainer import Trainer, TrainModule, launch

        class Net(TrainModule):
            def __init__(self):
                super().__init__()
                self.layer = torch.nn.Linear(2, 2)
            def training_step(self, batch, batch_idx):
                return self.layer(batch).pow(2).mean()
            def configure_optimizers(self):
                return torch.optim.SGD(self.parameters(), lr=0.1)

        def train(strategy):
            trainer = Trainer(accelerator="cpu", max_steps=3, seed=1, logger=False, enable_checkpointing=False,
                              enable_progress_bar=False, enable_model_summary=False, strategy=strategy)
            trainer.fit(Net(), DataLoader(torch.ones(8, 2), batch_size=2))
            return trainer.world_size, trainer.full_state_dict(everywhere=True)["layer.weight"]

        def main():
            before, second = {strategies!r}
            alone, weight = train(before)
            (n, first), (_, other) = launch(train, second, devices=2)
            again, weight_again = train(before)
            print(alone, n, again)
            print(torch.equal(first, other), torch.allclose(first, weight), torch.equal(weight, weight_again))

        main()
    """
    lines = [line[8:] for line in source.splitlines()]
    done = fork_python("\n".join(lines), cwd=tmp_path).wait().check()
    assert done.stdout.splitlines()[-2:] == ["1 2 1", "True True True"]
