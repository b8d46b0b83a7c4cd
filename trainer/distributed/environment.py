"""Detect rank and world size from the variables of the program that started this process."""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from trainer.distributed import slurm
from trainer.errors import ConfigError

_PLACE = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
_REQUIRED = (*_PLACE, "MASTER_ADDR", "MASTER_PORT")
_SOURCE = "TRAINER_SOURCE"
"""Set by `Environment.export`: the source before torchrun's variables were set."""
_HOW = (
    "Start with torchrun, which sets all of them, or set what is missing (in Azure ML under environment_variables), or "
    "unset them (unset RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE) to run as a single process."
)
_FIRST_RESERVED_STEP = 4294967280
"""Slurm numbers its own steps (batch, interactive, extern) downwards from 2**32."""


@dataclass(frozen=True)
class Environment:
    """Rank and world size of this process, and the address of the rendezvous."""

    rank: int = 0
    local_rank: int = 0
    """Rank among the processes of this machine."""
    world_size: int = 1
    local_world_size: int = 1
    """Number of processes on this machine."""
    node_rank: int = 0
    num_nodes: int = 1
    source: str = "single process"
    """The program that set the variables, or `"single process"`. Our own launcher sets torchrun's variables."""
    master_addr: str = ""
    """Address of the rendezvous; empty for a single process."""
    master_port: int = 0

    def export(self, environ: MutableMapping[str, str] = os.environ) -> None:
        """Set torchrun's variables, so that all libraries in this process read the same ranks from them."""
        if self.source in ("single process", *_OF_TORCHRUN):
            return
        values = (self.rank, self.local_rank, self.world_size, self.local_world_size)
        environ.update(zip(_PLACE, map(str, values), strict=True))
        environ.update(MASTER_ADDR=self.master_addr, MASTER_PORT=str(self.master_port))
        environ.update(GROUP_RANK=str(self.node_rank), GROUP_WORLD_SIZE=str(self.num_nodes))
        environ[_SOURCE] = self.source


class ProcessSource(NamedTuple):
    """A program that starts processes, and the variables that it sets."""

    name: str
    decides: str
    """The condition under which it is the one, as a text."""
    variables: tuple[str, ...]
    read: Callable[[Mapping[str, str]], Environment | str]
    """Returns the ranks of this process, or the reason why this is not the source. May raise a ConfigError."""


def detect_environment(environ: Mapping[str, str] = os.environ) -> Environment:
    """Read the variables of the first of `SOURCES` that recognises them; without one, this is a single process.

    Raises:
        ConfigError: the variables are incomplete or contradict each other.
    """
    environment = next((found for s in SOURCES if isinstance(found := s.read(environ), Environment)), None)
    if environment is None:
        _refuse_incomplete_torchrun(environ)
        _refuse_one_of_several(environ)
        return Environment()
    if environment.source not in _OF_TORCHRUN:
        _refuse_disagreement(environment, environ)
    return environment


def _refuse_incomplete_torchrun(environ: Mapping[str, str]) -> None:
    """Refuse some but not all of torchrun's variables, where no source decides."""
    given = {name: environ[name] for name in _REQUIRED if environ.get(name)}
    numbers = {name: given[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE") if name in given}
    # Nothing, or as Kubeflow sets them in the only pod of a job.
    if numbers in ({}, {"WORLD_SIZE": "1"}, {"RANK": "0", "WORLD_SIZE": "1"}):
        return
    missing = [name for name in _REQUIRED if name not in given]
    raise ConfigError(f"{_list(given)} set, but not {', '.join(missing)}. {_HOW}")


def _refuse_one_of_several(environ: Mapping[str, str]) -> None:
    """Refuse the number of one of several processes where its launcher does not say all that is needed.

    A first process without a size looks like a single one. So does each of a Ray worker that such a launcher has
    started, and the shell of an interactive step of Slurm, whose own PMI sets some of the variables.
    """
    if environ.get("RAY_JOB_ID") or environ.get("SLURM_STEP_ID"):
        return
    for mpi in (*_MPI, *_WITHOUT_SIZE):
        if not any(map(environ.get, mpi.names[0])):
            continue
        rank = _integer(environ, *mpi.names[0])
        size = _integer(environ, *mpi.names[1], default=1) if mpi.names[1:] else 1
        if rank > mpi.first or size > 1:
            given = {name: environ[name] for choice in mpi.names for name in choice if environ.get(name)}
            raise ConfigError(
                f"{_list(given)} set, but not all of rank, size, local rank and local size, so that each of several "
                f"processes would train alone. Start with torchrun, or have {mpi.start} start `trainer launch` on each "
                f"machine, or unset them (unset {' '.join(given)}) to run as a single process."
            )


def _refuse_disagreement(environment: Environment, environ: Mapping[str, str]) -> None:
    """Refuse variables of torchrun that differ from the source that decides."""
    ranks = (environment.rank, environment.local_rank, environment.world_size, environment.local_world_size)
    for name, value in zip(_PLACE, ranks, strict=True):
        if environ.get(name, "") not in ("", str(value)):
            raise ConfigError(
                f"{name}={environ[name]} is set, but {environment.source} says {value}. Unset {name}, or set all of "
                f"{', '.join(_REQUIRED)} to decide by them."
            )


def _list(variables: Mapping[str, str]) -> str:
    return ", ".join(f"{name}={value}" for name, value in variables.items())


def _integer(environ: Mapping[str, str], *names: str, default: int = 0) -> int:
    """Return the number in the first of these variables that is set."""
    for name in names:
        if text := environ.get(name):
            if not text.isdecimal():
                raise ConfigError(f"{name}={text!r} is not an integer from 0.")
            return int(text)
    return default


def _place(environ: Mapping[str, str], names: Sequence[str]) -> tuple[int, int, int, int]:
    """Return rank, size, local rank and local size, from variables that are set.

    Raises:
        ConfigError: they contradict each other.
    """
    rank, size, local_rank, local_size = (_integer(environ, name) for name in names)
    if not (local_rank <= rank < size and local_rank < local_size <= size):
        raise ConfigError(
            f"{_list({name: environ[name] for name in names})} contradict each other: ranks are from 0 and smaller "
            f"than sizes, and local ranks and sizes are not larger than global ones. {_HOW}"
        )
    return rank, size, local_rank, local_size


def _port(environ: Mapping[str, str], default: int = 29500) -> int:
    """Return MASTER_PORT, or `default` where it is not set."""
    port = _integer(environ, "MASTER_PORT", default=default)
    if not 1 <= port <= 65535:
        raise ConfigError(f"MASTER_PORT={port} is not a port: give all processes the same one from 1 to 65535.")
    return port


def _torchrun(environ: Mapping[str, str]) -> Environment | str:
    # MASTER_ADDR and MASTER_PORT alone mean nothing: clusters and shell profiles export them by habit.
    missing = [name for name in _REQUIRED if not environ.get(name)]
    if missing:
        return f"{', '.join(missing)} not set"
    rank, size, local_rank, local_size = _place(environ, ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"))
    node = _integer(environ, "GROUP_RANK", "NODE_RANK", default=rank // local_size)
    nodes = _integer(environ, "GROUP_WORLD_SIZE", default=-(-size // local_size))
    source = "torchrun" if environ.get("TORCHELASTIC_RUN_ID") else environ.get(_SOURCE) or "torchrun"
    port = _port(environ)
    return Environment(rank, local_rank, size, local_size, node, nodes, source, environ["MASTER_ADDR"], port)


def _ray(environ: Mapping[str, str]) -> Environment | str:
    if not environ.get("RAY_JOB_ID"):
        return "no RAY_JOB_ID"
    if environ.get("TORCHELASTIC_RUN_ID"):
        return "torchrun was started inside of a Ray job (TORCHELASTIC_RUN_ID)"
    found = _torchrun(environ)
    if isinstance(found, str):
        return f"not in a worker of Ray Train: {found}"
    return replace(found, source="Ray Train")


@dataclass(frozen=True)
class _Mpi:
    """An implementation of MPI or the like."""

    name: str
    start: str
    names: tuple[tuple[str, ...], ...]
    """Names of the variables for rank, size, local rank and local size; of each the first one that is set counts."""
    first: int = 0
    """The rank of the first process."""

    def read(self, environ: Mapping[str, str]) -> Environment | str:
        found = [next(filter(environ.get, choice), "") for choice in self.names]
        missing = [choice[0] for choice, name in zip(self.names, found, strict=True) if not name]
        if missing:
            return f"{', '.join(missing)} not set"
        rank, size, local_rank, local_size = _place(environ, found)
        if size == 1:
            return "a single process"
        address = environ.get("MASTER_ADDR") or ("127.0.0.1" if size == local_size else "")
        if not address:
            raise ConfigError(
                f"{self.start} started {size} processes, {local_size} of them here, and MASTER_ADDR is not set. Give "
                "all of them the name of the machine with rank 0, and one of its ports: export MASTER_ADDR=node1 "
                f"MASTER_PORT=29500 before {self.start} (mpirun -x MASTER_ADDR -x MASTER_PORT with Open MPI)."
            )
        port = _port(environ, _port_of_job(environ.get("PMIX_NAMESPACE") or environ.get("PMI_JOBID") or "mpi"))
        node, nodes = rank // local_size, -(-size // local_size)
        return Environment(rank, local_rank, size, local_size, node, nodes, self.start, address, port)


def _slurm(environ: Mapping[str, str]) -> Environment | str:
    if not environ.get("SLURM_JOB_ID"):
        return "no SLURM_JOB_ID"
    # The batch script and the shell of salloc have the variables of the allocation, but are not a step's task.
    if not (environ.get("SLURM_PROCID") and environ.get("SLURM_STEP_ID")):
        return "in an allocation, but not started by srun (no SLURM_STEP_ID): not a task of a step"
    if _integer(environ, "SLURM_STEP_ID") >= _FIRST_RESERVED_STEP:
        return "the shell of an interactive step, not a task of srun"
    size = _integer(environ, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", default=1)  # the second one of old versions
    if size == 1:
        return "a step of one task (SLURM_STEP_NUM_TASKS=1): a single process"
    # A step started from such a shell inherits the variable, but not the terminal.
    if environ.get("SLURM_PTY_PORT") and os.isatty(0):
        return "an interactive shell (SLURM_PTY_PORT, and a terminal): not a task of a step"
    rank, local_rank, node = (_integer(environ, name) for name in ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID"))
    tasks = environ.get("SLURM_STEP_TASKS_PER_NODE") or environ.get("SLURM_TASKS_PER_NODE") or str(size)
    counts = slurm.tasks_per_node(tasks)
    if node >= len(counts) or sum(counts) != size or rank != sum(counts[:node]) + local_rank:
        raise ConfigError(
            f"SLURM_PROCID={rank}, SLURM_LOCALID={local_rank} and SLURM_NODEID={node} are not a task of a step with "
            f"SLURM_STEP_NUM_TASKS={size} and SLURM_STEP_TASKS_PER_NODE={tasks}, counted in the order of the nodes. "
            "Start with srun --distribution=block, which sets all of them."
        )
    port = _port(environ, _port_of_job(f"{environ['SLURM_JOB_ID']}.{environ['SLURM_STEP_ID']}"))
    nodelist = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST", "")
    address = environ.get("MASTER_ADDR") or slurm.first_host(nodelist)
    return Environment(rank, local_rank, size, counts[node], node, len(counts), "Slurm", address, port)


def _flux(environ: Mapping[str, str]) -> Environment | str:
    if not environ.get("FLUX_TASK_RANK") or environ.get("FLUX_JOB_SIZE") == "1":
        return "no FLUX_TASK_RANK, or a single process (FLUX_JOB_SIZE=1)"
    size, nodes = _integer(environ, "FLUX_JOB_SIZE"), _integer(environ, "FLUX_JOB_NNODES")
    if not size or not nodes or size % nodes:
        words = f"Flux started {size} tasks (FLUX_JOB_SIZE) on {nodes} nodes (FLUX_JOB_NNODES)"
        raise ConfigError(f"{words}: set both, and give each node as many tasks (flux run -N -n).")
    return _FLUX.read({**environ, "FLUX_LOCAL_SIZE": str(size // nodes)})


def _kubeflow(environ: Mapping[str, str]) -> Environment | str:
    pods = re.fullmatch(r"(?:\d+:)?(\d+)", environ.get("PET_NNODES", ""))
    if pods is None or pods[1] == "1":
        return "no PET_NNODES, or a single pod (PET_NNODES=1)"
    given = {name: environ.get(name, "") for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")}
    one_process = environ.get("PET_NPROC_PER_NODE", "1") in ("1", "auto", "cpu", "gpu")
    if not all(given.values()) or given["WORLD_SIZE"] != pods[1] or not one_process:
        raise ConfigError(
            f"this pod is one of several (PET_NNODES={pods[0]}), and {_list(given)} are not the variables of one "
            "process in each. Start with `trainer launch train.py`, which reads PET_NNODES and the like."
        )
    rank, size, _, _ = _place({**environ, "LOCAL_RANK": "0", "LOCAL_SIZE": "1"}, [mpi[0] for mpi in _DEEPSPEED.names])
    return Environment(rank, 0, size, 1, rank, size, "Kubeflow", environ["MASTER_ADDR"], _port(environ))


def _port_of_job(job: str) -> int:
    """Return the same port for all processes of a job, below the kernel's ephemeral ports."""
    return 20000 + zlib.crc32(job.encode()) % 10000


_OF_TORCHRUN = ("torchrun", "Ray Train")


_PLACE_OF_MPI = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
_FLUX = _Mpi(
    "Flux", "flux run", (("FLUX_TASK_RANK",), ("FLUX_JOB_SIZE",), ("FLUX_TASK_LOCAL_ID",), ("FLUX_LOCAL_SIZE",))
)
_DEEPSPEED = _Mpi(
    "DeepSpeed's launcher", "deepspeed", tuple((name,) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_SIZE"))
)
_MPI = (
    _Mpi("Open MPI", "mpirun (Open MPI)", tuple((f"OMPI_COMM_WORLD_{name}",) for name in _PLACE_OF_MPI)),
    _Mpi("MVAPICH", "mpirun (MVAPICH)", tuple((f"MV2_COMM_WORLD_{name}",) for name in _PLACE_OF_MPI)),
    _Mpi("LSF", "jsrun", tuple((f"JSM_NAMESPACE_{name}",) for name in _PLACE_OF_MPI)),
    _Mpi("Horovod", "horovodrun", tuple((f"HOROVOD_{name}",) for name in _PLACE_OF_MPI)),
    _Mpi(
        "PALS",
        "mpiexec (PALS)",
        (("PALS_RANKID",), ("PMI_SIZE",), ("PALS_LOCAL_RANKID",), ("PALS_LOCAL_SIZE",)),
    ),
    _Mpi(
        "MPICH",
        "mpirun (PMI)",
        (("PMI_RANK",), ("PMI_SIZE",), ("MPI_LOCALRANKID", "PMI_LOCAL_RANK"), ("MPI_LOCALNRANKS", "PMI_LOCAL_SIZE")),
    ),
)

_WITHOUT_SIZE = (
    _Mpi("PMIx", "prun or the like", (("PMIX_RANK",),)),
    _Mpi("LSF", "blaunch", (("LSF_PM_TASKID",),), first=1),
)
"""Launchers that number their processes, but say neither how many they are nor which are of this machine."""

SOURCES = (
    ProcessSource("Ray Train", "RAY_JOB_ID and all of torchrun's are set", ("RAY_JOB_ID", *_REQUIRED), _ray),
    ProcessSource(
        "torchrun", f"{', '.join(_REQUIRED)} are all set", (*_REQUIRED, "GROUP_RANK", "GROUP_WORLD_SIZE"), _torchrun
    ),
    ProcessSource("Kubeflow", "PET_NNODES > 1", ("PET_NNODES", "PET_NPROC_PER_NODE", "RANK", "WORLD_SIZE"), _kubeflow),
    ProcessSource("Flux", "FLUX_TASK_RANK is set, and FLUX_JOB_SIZE > 1", ("FLUX_TASK_RANK", "FLUX_JOB_SIZE"), _flux),
    *(
        ProcessSource(
            mpi.name,
            f"{', '.join(choice[0] for choice in mpi.names)} are all set, and {mpi.names[1][0]} > 1",
            tuple(name for choice in mpi.names for name in choice),
            mpi.read,
        )
        for mpi in (_DEEPSPEED, *_MPI)
    ),
    ProcessSource(
        "Slurm",
        "a task of srun with SLURM_STEP_NUM_TASKS > 1",
        (
            *("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_PTY_PORT"),
            *("SLURM_STEP_NUM_TASKS", "SLURM_STEP_TASKS_PER_NODE", "SLURM_STEP_NODELIST"),
        ),
        _slurm,
    ),
)
"""Launchers in order of priority, the nearest to the process first: torchrun may run inside a step of srun, and mpirun
starts its helpers with srun."""
