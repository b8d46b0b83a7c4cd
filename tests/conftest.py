"""Set up every test: one thread, a directory of its own, fixed random numbers, and GPU tests only on GPUs."""

from __future__ import annotations

import gc
import os

# Before torch is imported. Tests run side by side, and their numbers must not depend on the number of cores.
os.environ["OMP_NUM_THREADS"] = "1"

import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.helpers.processes import DEVICE
from trainer.fault_tolerance.signals import _undo_keep_exit_code
from trainer.seed import GLOBAL_SEED, isolated_rng, seed_cpu_generators, seed_generators

torch.set_num_threads(1)

# torch.compile's cache takes kernels for AVX2 for those for AVX512, whose loops have another stride: after a run
# with ATEN_CPU_CAPABILITY=avx2, one without it would write beyond its memory, and the other way round.
os.environ.setdefault(
    "TORCHINDUCTOR_CACHE_DIR",
    f"{tempfile.gettempdir()}/torchinductor-{os.getuid()}-{os.environ.get('ATEN_CPU_CAPABILITY', 'all')}",
)

# A shell starts background jobs with these signals ignored, and the processes of the tests would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

pytest_plugins = ["tests.tiers", "tests.messages"]


def pytest_configure(config: pytest.Config) -> None:
    """Hide the GPUs from tests that are not about them, and would run on them by default."""
    if "gpu" not in config.option.markexpr and DEVICE == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


def pytest_collection_finish() -> None:
    """Keep the modules and the tests out of every garbage collection from here on."""
    gc.collect()
    gc.freeze()


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") is not None and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device, which make test-gpu shows to it")


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
def _same_action_of_sigusr1() -> Iterator[None]:
    """Undo what `trainer fit`, run in this process, does at its end: processes of later tests would inherit it."""
    ignored = signal.getsignal(signal.SIGUSR1) is signal.SIG_IGN
    yield
    if not ignored:
        _undo_keep_exit_code(signal.SIGUSR1)


@pytest.fixture(autouse=True)
def _same_modules(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Forget modules that a test has imported from a folder of its own: other tests use the same names."""
    before, path, folder = set(sys.modules), [*sys.path], tmp_path_factory.getbasetemp()
    yield
    sys.path[:] = path
    for name in sorted(sys.modules.keys() - before):  # packages before their parts
        module, parent = sys.modules[name], name.rpartition(".")[0]
        if file := getattr(module, "__file__", None):
            own = Path(file).is_relative_to(folder)
        elif parent and parent not in sys.modules:  # by which the path of a package without a file is found
            own = True
        else:
            own = any(Path(place).is_relative_to(folder) for place in getattr(module, "__path__", []))
        if own:
            del sys.modules[name]


@pytest.fixture(autouse=True, scope="module")
def _no_process_group() -> Iterator[None]:
    """Destroy a process group that a file's tests have left, as a script of one process under fsdp does."""
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


@pytest.fixture(autouse=True)
def _same_random_numbers() -> Iterator[None]:
    with isolated_rng():
        # The other generators of a machine without GPUs are asked in vain, for 5 ms.
        (seed_cpu_generators if DEVICE == "cpu" else seed_generators)(0)
        yield
    os.environ.pop(GLOBAL_SEED, None)  # of the test's `seed_everything`
