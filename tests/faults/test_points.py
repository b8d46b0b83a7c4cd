"""A training killed at every named point, or at a hook, resumes and ends with the same bits."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path

import pytest

from benchmarks.chaos import problems
from tests.helpers.processes import ROOT, run_python
from tests.tiers import selected
from trainer.fault_tolerance.fault_points import POINTS
from trainer.testing import fault

FAULTS = {
    # Six files, of two parts or one, in each checkpoint; fifteen steps.
    "in_file": 61,
    "after_file": 47,
    "before_manifest": 7,
    "before_rename": 7,
    "after_rename": 7,
    "before_pointer": 9,
    "after_pointer": 9,
    "in_removal": 3,
    "on_sanity_check_start": 1,
    "on_train_start": 1,
    "on_train_epoch_start": 2,
    "on_train_batch_start": 6,  # inside a window
    "on_before_optimizer_step": 5,
    "on_train_step_end": 6,
    "on_validation_start": 2,
    "on_validation_batch_end": 5,
    "on_validation_end": 4,
    "on_train_epoch_end": 2,
    "on_train_end": 1,
    "on_fit_end": 1,
}
"""The point, and at which passing of it the process is killed."""

DRIVER = """
import json, os, sys, traceback
import torch._dynamo  # optimizers import it
from benchmarks import _chaos_training as training

def process(folder, fault=""):
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    code = 1
    try:
        os.environ.update({"TRAINER_FAULT": fault} if fault else {})
        training.main([folder, "--epochs", "3"])
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(code)

codes = {"uninterrupted": [process("uninterrupted")]}
for name, fault in json.loads(sys.argv[1]).items():
    codes[name] = [process(name, fault), process(name)]
print("CODES " + json.dumps(codes))
"""
"""Starts a process for each training; they share nothing but what was imported, which saves three seconds each."""


@pytest.fixture(scope="module")
def ended(memory_folder: Path, request: pytest.FixtureRequest) -> tuple[Path, dict[str, list[int]]]:
    """Run the trainings; return their folder, and the exit codes of each one's processes."""
    names = selected(request, "name")
    faults = {name: next(iter(fault(name, count=count).values())) for name, count in FAULTS.items() if name in names}
    result = run_python(DRIVER, json.dumps(faults), cwd=memory_folder).check()
    codes = re.search("^CODES (.*)", result.stdout, flags=re.MULTILINE)
    assert codes, result.stderr
    return memory_folder, json.loads(codes[1])


@pytest.mark.parametrize("name", FAULTS)
def test_killed_there_it_ends_with_the_same_bits(name: str, ended: tuple[Path, dict[str, list[int]]]) -> None:
    folder, codes = ended
    assert codes["uninterrupted"] == [0]
    assert codes[name] == [-signal.SIGKILL, 0]
    assert problems(folder / name, folder / "uninterrupted" / "version_0") == []


def test_every_point_is_struck_here_and_stands_in_the_code() -> None:
    code = "".join(path.read_text() for path in (ROOT / "trainer" / "checkpoint").glob("*.py"))
    assert set(re.findall(r'fault_point\("(\w+)"\)', code)) == set(POINTS)
    assert set(POINTS) <= set(FAULTS)
