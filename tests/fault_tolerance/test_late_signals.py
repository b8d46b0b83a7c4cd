"""Signals before and after the handlers of a run, and the third SIGTERM to a step that hangs."""

from __future__ import annotations

import signal
import sys
import time
from pathlib import Path

import pytest

from tests.helpers.processes import run_python, start_python

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="signals as on Linux and macOS")

TRAINING = """
import os, signal, sys, threading, time
from tests.helpers.toy import Toy, loader, quiet

class Slow(Toy):
    def training_step(self, batch, batch_idx):
        print("step", flush=True)
        if "stuck" in sys.argv:
            sum(range(10**14))  # in C code, with the interpreter's lock
        if "hung" in sys.argv:
            lock = threading.Lock()
            with lock:
                lock.acquire()
        time.sleep(0.05)
        return super().training_step(batch, batch_idx)

files = [open(os.devnull) for _ in range(1100 if "files" in sys.argv else 0)]  # select() takes descriptors up to 1023
trainer = quiet(max_epochs=1000, devices=2 if "two" in sys.argv else 1)
print("made", flush=True)
while "before" in sys.argv:
    time.sleep(0.05)
if "after" in sys.argv:
    quiet(max_steps=1).fit(Slow(), loader())
    os.kill(os.getpid(), signal.SIGUSR1)
try:
    trainer.fit(Slow(), loader())
finally:
    time.sleep(1)  # what a script still does
"""


def test_a_second_sigusr1_does_not_change_the_exit_code() -> None:
    running = start_python(TRAINING)
    running.wait_for("step")
    while running.process.poll() is None:
        running.send(signal.SIGUSR1)
        time.sleep(0.02)
    running.wait().check(75)


@pytest.mark.parametrize("when", ["before", "after"])
def test_sigusr1_outside_of_a_run(when: str) -> None:
    running = start_python(TRAINING, when)
    running.wait_for("made")
    if when == "before":
        running.send(signal.SIGUSR1)
    running.wait().check(75)


EXITING = """
import os, signal
from tests.helpers.toy import Toy, loader, quiet

class Last:
    def __del__(self, kill=os.kill, number=signal.SIGUSR1, pid=os.getpid()):
        kill(pid, number)

last = Last()  # is deleted when Python has taken away the handlers of signals
quiet(max_steps=1).fit(Toy(), loader())
"""


def test_sigusr1_does_not_change_the_exit_code_of_a_program_that_is_exiting() -> None:
    run_python(EXITING).check(0)


EARLY = """
import os, signal, sys

class Sender:
    def find_spec(self, name, path=None, target=None):
        if name == sys.argv[2]:
            os.kill(os.getpid(), getattr(signal, sys.argv[1]))

sys.meta_path.insert(0, Sender())
from trainer.__main__ import main
sys.exit(main(["fit", "--help"]))
"""


@pytest.mark.parametrize(("name", "code", "words"), [("SIGUSR1", 75, ""), ("SIGINT", 130, "interrupted\n")])
@pytest.mark.parametrize("module", ["trainer.errors", "trainer.fault_tolerance.signals", "trainer.cli.fit"])
def test_signals_while_the_command_imports_its_first_modules(name: str, code: int, words: str, module: str) -> None:
    result = run_python(EARLY, name, module).check(code)
    assert (result.stdout, result.stderr) == ("", words)


COMPLETE = """
import os, signal, sys
import torch
from torch.utils.data import DataLoader, TensorDataset
from trainer import TrainModule
from trainer.__main__ import main

class Late(TrainModule):
    def __init__(self, hook: str):
        super().__init__()
        self.layer, self.hook = torch.nn.Linear(4, 1), hook
    def training_step(self, batch, batch_idx):
        return self.layer(batch[0]).square().mean()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)
    def train_dataloader(self):
        return DataLoader(TensorDataset(torch.ones(8, 4)), 4)
    def send(self, hook):
        if hook == self.hook:
            os.kill(os.getpid(), signal.SIGUSR1)
    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.send("batch")
    def on_train_epoch_end(self):
        self.send("epoch")
    def on_train_end(self):
        self.send("train")
    def on_fit_end(self):
        self.send("fit")

if __name__ == "__main__":
    for hook in ("batch", "epoch", "train", "fit"):
        try:
            words = ["fit", "--module", f"{sys.argv[0]}:Late", "--module.hook", hook, "--trainer.max_epochs", "1"]
            code = main([*words, "--trainer.accelerator", "cpu"])
        except SystemExit as end:
            code = end.code
        print("exit code", hook, code)
"""


def test_sigusr1_changes_nothing_when_the_command_has_nothing_left_to_train() -> None:
    Path("late.py").write_text(COMPLETE)
    lines = run_python(Path("late.py")).check(0).stdout.splitlines()
    codes = [line.removeprefix("exit code ") for line in lines if line.startswith("exit code ")]
    assert codes == ["batch 75", "epoch 0", "train 0", "fit 0"]


@pytest.mark.parametrize("number", ["one", "files", "two"])
def test_the_third_sigterm_ends_a_hung_step_with_its_stacks(number: str) -> None:
    running = start_python(TRAINING, "hung", number)
    running.wait_for("step", count=2 if number == "two" else 1)
    for _ in range(3):
        assert running.process.poll() is None
        running.send(signal.SIGTERM)
        time.sleep(1.0)  # signals that come together are one
    error = running.wait(60).check(143).stderr
    assert "the third SIGTERM ends this process in the middle of a step" in error
    assert "training_step" in error  # "in " may stand apart: two processes write at once


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs real-time signals")
def test_a_launcher_kills_steps_that_hold_the_interpreters_lock_after_their_stacks() -> None:
    running = start_python(TRAINING, "stuck", "two")
    running.wait_for("step", count=2)
    for _ in range(3):
        assert running.process.poll() is None
        time.sleep(0.5)
        running.send(signal.SIGTERM)
    error = running.wait(60).check(143).stderr
    assert "training_step" in error
