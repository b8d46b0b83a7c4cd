"""Set up every test: one thread, a directory of its own, fixed random numbers, and GPU tests only on GPUs."""

from __future__ import annotations

import os

# Before torch is imported. Tests run side by side, and their numbers must not depend on the number of cores.
os.environ["OMP_NUM_THREADS"] = "1"

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from trainer.seed import isolated_rng, seed_everything

torch.set_num_threads(1)

# A shell starts background jobs with these signals ignored, and the processes of the tests would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

SLOW = (
    "callbacks/test_straggler_monitor.py",
    "callbacks/test_two_processes.py",
    "cli/test_cli.py",
    "cli/test_doctor_command.py",
    "cli/test_init_command.py",
    "cli/test_launch_command.py",
    "distributed/test_others_variables.py",
    "distributed/test_rendezvous",
    "distributed/test_slurm.py",
    "emulated/",
    "examples/",
    "fault_tolerance/test_collective_check.py",
    "fault_tolerance/test_process_monitor.py",
    "fault_tolerance/test_stop.py",
    "fault_tolerance/test_watchdog.py",
    "faults/",
    "launchers/test_launcher.py",
    "launchers/test_multinode.py",
    "launchers/test_notebook.py",
    "launchers/test_ray.py",
    "loop/test_evaluation.py",
    "loop/test_messages.py",
    "loop/test_resume.py",
    "model/test_compile_slow.py",
    "model/test_memory_runs.py",
    "strategies/test_deepspeed_engine.py",
    "strategies/test_deepspeed_state.py",
    "strategies/test_portability.py",
    "strategies/test_resume_sharded.py",
    "strategies/test_strategy_",
    "test_benchmarks.py",
    "test_contract.py",
    "test_docs.py",
    "test_gpu_report.py",
    "test_parity_processes.py",
)
"""Files whose tests start many processes: `make test-quick` leaves them out."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if item.path.relative_to(here).as_posix().startswith(SLOW):
            item.add_marker(pytest.mark.slow)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") is not None and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device, and there is none")


@pytest.fixture(autouse=True, scope="session")
def _not_in_the_repository(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Run the fixtures of a module outside of the repository, since they have no directory of their own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("session"))
        yield


@pytest.fixture(autouse=True)
def _own_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture(autouse=True)
def _same_random_numbers() -> Iterator[None]:
    with isolated_rng():
        seed_everything(0)
        yield
