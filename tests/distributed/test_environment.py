from __future__ import annotations

import os
import pty
import sys

import pytest

from tests.helpers.launcher_variables import (
    ALLOCATION,
    BATCH,
    DEEPSPEED,
    FLUX,
    HOROVODRUN,
    HYDRA,
    JSRUN,
    KUBEFLOW,
    MVAPICH,
    OLD_SRUN,
    OPEN_MPI,
    PALS,
    SRUN,
    TORCHRUN,
)
from tests.helpers.processes import ROOT
from tests.messages import raises_recorded
from trainer import Trainer
from trainer.distributed.environment import SOURCES, Environment, detect_environment
from trainer.errors import ConfigError

PMI = {"PMI_RANK": "3", "PMI_SIZE": "5"}
"""As `srun --mpi=pmi2` sets them, and an interactive shell of Slurm inherits them."""
OF_KUBEFLOW = {**KUBEFLOW, "PET_NNODES": "1", "RANK": "0", "WORLD_SIZE": "1"}
"""In the only pod of a job."""
SINGLE = [
    {"MASTER_ADDR": "a", "MASTER_PORT": "1"},
    ALLOCATION,  # the shell of salloc
    BATCH,  # python in the batch script itself
    {**SRUN, "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"},  # srun -n1, also with --pty bash
    {**SRUN, "SLURM_STEP_ID": "4294967290"},  # salloc with an interactive step
    {"OMPI_COMM_WORLD_RANK": "0"},
    {"PMI_RANK": "0", "PMI_SIZE": "1", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "1"},
    {"PET_NNODES": "1", "PET_NPROC_PER_NODE": "8"},
    {"RAY_JOB_ID": "0100"},
    {"RAY_JOB_ID": "0100", "LSF_PM_TASKID": "2", "PMIX_RANK": "1"},  # of blaunch and prun, which started Ray
    {"PMIX_RANK": "0", "PMIX_NAMESPACE": "x@1"},  # as srun --mpi=pmix has it with one task, too
    {"LSF_PM_TASKID": "1", "LSB_DJOB_NUMPROC": "8"},  # slots, which are cores
    {"PMI_RANK": "0", "PMI_SIZE": "1"},
    {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"},
    {"PMI_RANK": "", "PMI_SIZE": ""},
    {"RANK": "", "WORLD_SIZE": "", "LOCAL_RANK": ""},
    dict.fromkeys((*TORCHRUN, *SRUN, *OPEN_MPI, *KUBEFLOW, "RAY_JOB_ID", "TORCHELASTIC_RUN_ID"), ""),
    # As current and earlier versions of Kubeflow set them in the only pod of a job.
    OF_KUBEFLOW,
    {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "m", "MASTER_PORT": "23456"},
    {**SRUN, **PMI, "SLURM_STEP_ID": "4294967290"},
]


def test_nothing_set_is_a_single_process() -> None:
    assert detect_environment({}) == Environment(0, 0, 1, 1, 0, 1, "single process")


@pytest.mark.parametrize("variables", SINGLE)
def test_what_is_not_one_of_several_processes(variables: dict[str, str]) -> None:
    assert detect_environment(variables).source == "single process"


NAMES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
DECIDES: list[tuple[dict[str, str], str, tuple[object, ...]]] = [
    (TORCHRUN, "torchrun", (5, 1, 8, 4, 1, 2, "localhost")),
    ({name: TORCHRUN[name] for name in NAMES}, "torchrun", (5, 1, 8, 4, 1, 2, "localhost")),  # machines are counted
    (SRUN, "Slurm", (3, 1, 5, 2, 1, 3, "node08")),
    ({**SRUN, "MASTER_ADDR": "10.0.0.7"}, "Slurm", (3, 1, 5, 2, 1, 3, "10.0.0.7")),
    (OPEN_MPI, "mpirun (Open MPI)", (3, 1, 4, 2, 1, 2, "node1")),
    (MVAPICH, "mpirun (MVAPICH)", (3, 1, 4, 2, 1, 2, "node1")),
    (HYDRA, "mpirun (PMI)", (1, 1, 2, 2, 0, 1, "127.0.0.1")),
    (KUBEFLOW, "Kubeflow", (2, 0, 4, 1, 2, 4, "job-master-0")),
    ({**TORCHRUN, "RAY_JOB_ID": "0100"}, "Ray Train", (5, 1, 8, 4, 1, 2, "localhost")),
    (JSRUN, "jsrun", (3, 1, 4, 2, 1, 2, "node1")),
    (HOROVODRUN, "horovodrun", (1, 1, 2, 2, 0, 1, "127.0.0.1")),
    (PALS, "mpiexec (PALS)", (3, 1, 4, 2, 1, 2, "node1")),
    (FLUX, "flux run", (3, 1, 4, 2, 1, 2, "node1")),
    (DEEPSPEED, "deepspeed", (3, 1, 4, 2, 1, 2, "node1")),
    # A Slurm that does not set SLURM_STEP_NUM_TASKS.
    (OLD_SRUN, "Slurm", (3, 1, 5, 2, 1, 3, "node08")),
    # The innermost launcher decides: torchrun in a step of srun, mpirun in an allocation.
    ({**TORCHRUN, **SRUN}, "torchrun", (5, 1, 8, 4, 1, 2, "localhost")),
    ({**BATCH, **OPEN_MPI}, "mpirun (Open MPI)", (3, 1, 4, 2, 1, 2, "node1")),
    ({**TORCHRUN, "RAY_JOB_ID": "0100", "TORCHELASTIC_RUN_ID": "x"}, "torchrun", (5, 1, 8, 4, 1, 2, "localhost")),
    ({**TORCHRUN, **PMI}, "torchrun", (5, 1, 8, 4, 1, 2, "localhost")),
    ({**TORCHRUN, "PMIX_RANK": "3", "LSF_PM_TASKID": "2"}, "torchrun", (5, 1, 8, 4, 1, 2, "localhost")),
    ({**SRUN, **PMI}, "Slurm", (3, 1, 5, 2, 1, 3, "node08")),
    # Some of torchrun's variables, which say the same, or are empty.
    ({**SRUN, "RANK": "3", "WORLD_SIZE": "5", "LOCAL_RANK": "1"}, "Slurm", (3, 1, 5, 2, 1, 3, "node08")),
    ({**SRUN, "RANK": "", "WORLD_SIZE": "", "SLURM_PTY_PORT": ""}, "Slurm", (3, 1, 5, 2, 1, 3, "node08")),
]


@pytest.mark.parametrize(("variables", "source", "place"), DECIDES)
def test_who_decides(variables: dict[str, str], source: str, place: tuple[object, ...]) -> None:
    found = detect_environment(variables)
    numbers = (found.rank, found.local_rank, found.world_size, found.local_world_size, found.node_rank, found.num_nodes)
    assert (found.source, (*numbers, found.master_addr)) == (source, place)
    # Libraries read rank and world size from torchrun's variables, and so does a second call.
    variables = dict(variables)
    found.export(variables)
    again = detect_environment(variables)
    assert (again.rank, again.num_nodes, again.source, again.master_port) == (
        found.rank,
        found.num_nodes,
        found.source,
        found.master_port,
    )


def test_a_shell_that_srun_has_given_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """In `srun -n5 --pty bash` a program is a single process; those that the shell starts with srun are not."""
    code = "from trainer.distributed.environment import detect_environment as d; print('source:', d().source)"
    pid, terminal = pty.fork()
    if pid == 0:
        os.environ.update({**SRUN, "SLURM_PTY_PORT": "35673", "PYTHONPATH": str(ROOT)})
        os.execv(sys.executable, [sys.executable, "-c", code])
    output = b""
    while b"source:" not in output or not output.endswith(b"\n"):
        output += os.read(terminal, 1000)
    os.waitpid(pid, 0)
    os.close(terminal)
    assert "source: single process" in output.decode()
    with open(os.devnull) as nothing:
        monkeypatch.setattr(sys, "stdin", nothing)
        assert detect_environment({**SRUN, "SLURM_PTY_PORT": "35673"}).source == "Slurm"


REFUSED = [
    *({one: value for one, value in TORCHRUN.items() if one != name} for name in NAMES if name != "MASTER_ADDR"),
    *({**TORCHRUN, "RANK": rank} for rank in ("8", "one", "0")),
    *({**TORCHRUN, "LOCAL_RANK": "4"}, {**TORCHRUN, "LOCAL_WORLD_SIZE": "16"}, {**TORCHRUN, "LOCAL_WORLD_SIZE": "0"}),
    *({**TORCHRUN, "WORLD_SIZE": "-1"}, {**TORCHRUN, "WORLD_SIZE": "0"}),
    *({**TORCHRUN, "MASTER_PORT": "0"}, {**TORCHRUN, "MASTER_PORT": "65536"}),
    {**SRUN, "WORLD_SIZE": "4"},
    {**SRUN, "RANK": "0", "WORLD_SIZE": "5"},
    {**OPEN_MPI, "LOCAL_RANK": "0"},
    {**SRUN, "SLURM_PROCID": "5"},
    {**SRUN, "SLURM_PROCID": "4"},
    {**SRUN, "SLURM_LOCALID": "x"},
    {**SRUN, "SLURM_STEP_TASKS_PER_NODE": "2,2"},
    {**SRUN, "SLURM_STEP_NODELIST": "node[1-"},
    {**OPEN_MPI, "OMPI_COMM_WORLD_RANK": "4"},
    {**OPEN_MPI, "MASTER_ADDR": ""},
    {"PET_NNODES": "4", "PET_NODE_RANK": "1"},
    {**KUBEFLOW, "WORLD_SIZE": "32"},
    {**SRUN, "MASTER_PORT": "70000"},
    {**OPEN_MPI, "MASTER_PORT": "70000"},
    {**KUBEFLOW, "MASTER_PORT": "70000"},
    {**KUBEFLOW, "MASTER_PORT": ""},
    # Of mpirun without the local ones: each process would train by itself.
    {"PMI_RANK": "0", "PMI_SIZE": "2"},
    {"PMI_RANK": "1", "PMI_SIZE": "2", "WORLD_SIZE": "1"},
    {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4"},
    {name: HYDRA[name] for name in ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID")},
    {"PMI_RANK": "0", "PMI_SIZE": "x"},
    {name: PALS[name] for name in PALS if name != "PMI_SIZE"},
    {"JSM_NAMESPACE_RANK": "0", "JSM_NAMESPACE_SIZE": "2"},
    {**FLUX, "FLUX_JOB_SIZE": "5"},
    {**FLUX, "FLUX_JOB_NNODES": ""},
    {**FLUX, "FLUX_JOB_NNODES": "0"},
    {**FLUX, "FLUX_JOB_SIZE": ""},
    {name: FLUX[name] for name in FLUX if name != "MASTER_ADDR"},
    {name: TORCHRUN[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")},
    {"PMIX_RANK": "1", "PMIX_NAMESPACE": "x@1"},
    {"LSF_PM_TASKID": "2", "LSB_JOBID": "1"},
    # As in a batch script, where Slurm does not set these variables.
    {**BATCH, "PMI_RANK": "0", "PMI_SIZE": "2"},
    *({**OF_KUBEFLOW, "RANK": "1"}, {**OF_KUBEFLOW, "WORLD_SIZE": "8"}, {**OF_KUBEFLOW, "LOCAL_RANK": "0"}),
]


@pytest.mark.parametrize("variables", REFUSED)
def test_variables_that_are_missing_or_contradict_each_other_are_refused(variables: dict[str, str]) -> None:
    with raises_recorded(ConfigError):
        detect_environment(variables)


def test_all_processes_of_a_step_have_one_port_and_other_steps_another() -> None:
    ports = {
        (step, rank): detect_environment(
            {**SRUN, "SLURM_STEP_ID": step, "SLURM_PROCID": rank, "SLURM_LOCALID": str(int(rank) % 2)}
        ).master_port
        for step in "01"
        for rank in "23"
    }
    assert ports["0", "2"] == ports["0", "3"] != ports["1", "2"] == ports["1", "3"]
    assert all(20000 <= port < 30000 for port in ports.values())
    assert detect_environment({**SRUN, "MASTER_PORT": "29500"}).master_port == 29500


def test_every_source_says_when_it_decides() -> None:
    assert len({source.name for source in SOURCES}) == len(SOURCES) == 12
    assert all(source.decides and source.variables for source in SOURCES)


def test_the_number_of_machines_has_to_be_that_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    with raises_recorded(ConfigError):
        Trainer(accelerator="cpu", num_nodes=3)
    assert [Trainer(accelerator="cpu", num_nodes=given).config.num_processes for given in (1, 2)] == [8, 8]
