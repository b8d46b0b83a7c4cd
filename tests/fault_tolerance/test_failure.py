from __future__ import annotations

import sys
import time

import pytest
import torch.distributed as dist

from tests.helpers.processes import fork_ranks, run_python
from trainer.fault_tolerance.failure import first_failure, report_dead_process, report_failure


def error() -> ValueError:
    try:
        raise ValueError("no such thing")
    except ValueError as raised:
        return raised


@pytest.fixture(autouse=True)
def _excepthook(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)


def test_first_prints_its_traceback_and_later_ones_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    store = dist.HashStore()
    assert first_failure(store) is None
    assert report_failure(store, 1, 3, error())
    printed = capsys.readouterr().err
    assert printed.startswith("rank 1 of 3 failed:\nTraceback (most recent call last):\n")
    assert printed.endswith("ValueError: no such thing\n")
    assert first_failure(store) == 1
    assert not report_failure(store, 0, 3, error())
    assert not report_failure(store, 2, 3, error())
    assert capsys.readouterr().err == "rank 0 stops because rank 1 failed\nrank 2 stops because rank 1 failed\n"


def test_who_follows_a_process_that_is_gone_names_its_own_call(capsys: pytest.CaptureFixture[str]) -> None:
    store = dist.HashStore()
    report_dead_process(store, 1, 2)
    assert not report_failure(store, 0, 2, error())
    assert "rank 0 stops because rank 1 is gone, in error (" in capsys.readouterr().err


def test_without_a_store(capsys: pytest.CaptureFixture[str]) -> None:
    assert report_failure(None, 0, 1, error())
    assert capsys.readouterr().err == ""  # Python prints it
    assert report_failure(None, 1, 2, error())
    assert "rank 1 of 2 failed:\nTraceback" in capsys.readouterr().err


def test_a_store_that_raises_does_not_hide_the_error(capsys: pytest.CaptureFixture[str]) -> None:
    class Gone:
        def compare_set(self, *_: str) -> bytes:
            raise RuntimeError("connection reset")

    assert not report_failure(Gone(), 1, 2, error())  # type: ignore[arg-type]
    assert "too late to know whether another rank failed first: ValueError: no such thing" in capsys.readouterr().err


def test_a_store_that_does_not_answer(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    class Silent:
        def compare_set(self, *_: str) -> bytes:
            time.sleep(0.5)
            return b"0"

    monkeypatch.setattr("trainer.fault_tolerance.failure._STORE_TIMEOUT_S", 0.05)
    assert not report_failure(Silent(), 1, 2, error())  # type: ignore[arg-type]
    assert "ValueError: no such thing" in capsys.readouterr().err


def test_python_does_not_print_it_again_but_still_prints_others() -> None:
    script = """
import sys
from trainer.fault_tolerance.failure import report_failure

def fail(text):
    raise ValueError(text)

try:
    fail("first")
except ValueError as error:
    report_failure(None, 1, 2, error)
    if len(sys.argv) > 1:
        fail("second")
    raise
"""
    once = run_python(script).check(1)
    assert once.stderr.count("ValueError: first") == 1
    other = run_python(script, "other").check(1)
    assert "ValueError: second" in other.stderr


BLOCKED = """
import sys, time
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader
from trainer import Callback, Trainer, TrainModule
from trainer.fault_tolerance import failure

def never_ends(*args):
    while True:
        time.sleep(0.1)

class Net(TrainModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 2)
    def training_step(self, batch, batch_idx):
        if self.global_step == 2 and self.trainer.rank == 1:
            raise ValueError("no such thing")
        if self.global_step == 2:  # as with NCCL, whose collectives do not keep the other process waiting here
            time.sleep(1)
            raise RuntimeError("Connection closed by peer")
        return self.layer(batch).square().mean()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

class Blocking(Callback):
    def on_exception(self, trainer, module, error):
        never_ends()

failure._HOOKS_TIMEOUT_S = failure._EXIT_TIMEOUT_S = 1.0
if sys.argv[1] == "destroy":  # as that of NCCL does while collectives are outstanding
    dist.destroy_process_group = never_ends
trainer = Trainer(strategy="ddp", devices=2, accelerator="cpu", max_steps=6, logger=False, enable_checkpointing=False,
                  enable_progress_bar=False, enable_model_summary=False,
                  callbacks=Blocking() if sys.argv[1] == "hook" else None)
trainer.fit(Net(), DataLoader(torch.ones(64, 2), 4))
"""


@pytest.mark.parametrize("blocked_in", ["destroy", "hook"])
def test_what_waits_for_ever_after_an_error_does_not_keep_the_job(blocked_in: str) -> None:
    done = fork_ranks(BLOCKED, blocked_in).wait(150).check(1)
    assert done.stderr.count("ValueError: no such thing") == 1
    assert "rank 1 of 2 failed" in done.stderr
    assert "did not end within" in done.stderr
