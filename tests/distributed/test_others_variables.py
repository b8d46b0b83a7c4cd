"""Processes with the variables of mpirun or Kubeflow join, and end with the same bits as those of the trainer."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.helpers.launcher_variables import HYDRA, KUBEFLOW, OPEN_MPI
from tests.helpers.processes import fork_python
from tests.helpers.training import make, steps_of, weights_of
from trainer.distributed.store import free_port

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="processes as on Linux and macOS")
STEPS = 6


def open_mpi(rank: int) -> dict[str, str]:
    """Return Open MPI's variables; MVAPICH's are the same with another prefix."""
    values = {"RANK": rank, "SIZE": 2, "LOCAL_RANK": rank, "LOCAL_SIZE": 2}
    assert {f"OMPI_COMM_WORLD_{name}" for name in values} < OPEN_MPI.keys()
    return {f"OMPI_COMM_WORLD_{name}": str(value) for name, value in values.items()}


def mvapich(rank: int) -> dict[str, str]:
    return {name.replace("OMPI_", "MV2_"): value for name, value in open_mpi(rank).items()}


def hydra(rank: int) -> dict[str, str]:
    """Return the variables of MPICH and Intel MPI."""
    return {**HYDRA, "PMI_RANK": str(rank), "MPI_LOCALRANKID": str(rank)}


def kubeflow(rank: int) -> dict[str, str]:
    """Return the variables of two pods with one process each, without torchrun."""
    return {**KUBEFLOW, "PET_NNODES": "2", "RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}


def pods(rank: int) -> dict[str, str]:
    """Return the variables of two pods that run `trainer launch train.py`."""
    place = {"PET_NNODES": "2", "PET_NODE_RANK": str(rank), "PET_NPROC_PER_NODE": "1", "PET_MASTER_ADDR": "127.0.0.1"}
    return {**place, "PET_RDZV_CONF": "join_timeout=600"}


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the weights of two processes that the trainer starts itself."""
    folder = tmp_path_factory.mktemp("own")
    fork_python(make(folder), str(folder / "out"), str(STEPS), "0", "2", cwd=folder).wait().check()
    return weights_of(folder / "out")


@pytest.mark.parametrize("variables", [open_mpi, mvapich, hydra, kubeflow, pods], ids=lambda one: one.__name__)
def test_they_join_and_train_together(tmp_path: Path, own: str, variables: Callable[[int], dict[str, str]]) -> None:
    script, port = make(tmp_path / "run"), str(free_port())
    launcher = ["-m", "trainer", "launch"] if variables is pods else []
    started = [
        fork_python(
            *launcher,
            str(script),
            str(script.parent / "out"),
            str(STEPS),
            "0",
            cwd=tmp_path,
            env={**variables(rank), "MASTER_PORT": port, "PET_MASTER_PORT": port},
            number=rank,
        )
        for rank in (0, 1)
    ]
    for one in started:
        one.wait().check()
    assert steps_of(script.parent / "out", 0) == steps_of(script.parent / "out", 1) == list(range(1, STEPS + 1))
    assert weights_of(script.parent / "out") == own
