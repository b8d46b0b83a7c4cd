"""Detect rank and world size from the variables of the program that started this process."""

from __future__ import annotations

import os
import re
import sys
import zlib
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass
from typing import NamedTuple

from trainer.distributed import slurm
from trainer.errors import ConfigError, raise_problems

_PLACE = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
_REQUIRED = (*_PLACE, "MASTER_ADDR", "MASTER_PORT")
_SOURCE = "TRAINER_SOURCE"
"""Set by `Environment.export`: the source before torchrun's variables were set."""
_HOW = (
    "Start with torchrun, which sets all of them, or unset them (unset RANK LOCAL_RANK WORLD_SIZE "
    "LOCAL_WORLD_SIZE) to run as a single process."
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
    nproc_flag: str = "--nproc-per-node"
    """The option of the starting program for the number of processes on a machine."""

    def export(self, environ: MutableMapping[str, str] = os.environ) -> None:
        """Set torchrun's variables, so that all libraries in this process read the same ranks from them."""
        if self.source in ("single process", *_OF_TORCHRUN):
            return
        values = (
            self.rank,
            self.local_rank,
            self.world_size,
            self.local_world_size,
            self.master_addr,
            self.master_port,
        )
        environ.update(zip(_REQUIRED, map(str, values), strict=True))
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
        problems = [*_incomplete_torchrun(environ), *_incomplete_mpirun(environ)]
        raise_problems(problems or _one_of_several(environ), "the environment")
        return Environment()
    if environment.source not in _OF_TORCHRUN:
        raise_problems(_disagreements(environment, environ), "the environment")
    return environment


def _incomplete_torchrun(environ: Mapping[str, str]) -> list[str]:
    """Report some but not all of torchrun's variables, where no source decides."""
    given = {name: environ[name] for name in _REQUIRED if environ.get(name)}
    # As Kubeflow sets them in the only pod of a job.
    alone = given.get("WORLD_SIZE") == "1" and given.get("RANK", "0") == "0"
    if (alone and not given.keys() & {"LOCAL_RANK", "LOCAL_WORLD_SIZE"}) or not given.keys() & set(_PLACE[:3]):
        return []
    missing = [name for name in _REQUIRED if name not in given]
    how = _HOW
    if missing == ["LOCAL_WORLD_SIZE"]:  # as in Azure ML
        how += " Or set LOCAL_WORLD_SIZE, the number of processes on this machine, for the job (in Azure ML under "
        how += "environment_variables)."
    return [f"{_list(given)} set, but not {', '.join(missing)}. {how}"]


def _incomplete_mpirun(environ: Mapping[str, str]) -> list[str]:
    """Report the variables of one of several processes of mpirun and the like if some of them are missing."""
    problems = []
    for mpi in _MPI:
        number = _Numbers(environ)
        size_name, in_pals = mpi.names[1][0], bool(environ.get("PALS_RANKID"))
        size = number(size_name, default=1)
        # Slurm's own PMI sets these too, and Slurm was asked: this is an interactive shell in a step.
        of_slurm = environ.get("SLURM_STEP_ID") and environ.get("SLURM_STEP_NUM_TASKS") == environ.get(size_name)
        missing = [" or ".join(choice) for choice in mpi.names if not any(map(environ.get, choice))]
        problems += number.problems
        others = size_name == "PMI_SIZE" and (of_slurm or (mpi.name == "PALS") != in_pals)
        unknown = in_pals and mpi.name == "PALS" and not environ.get(size_name)
        if (size > 1 or unknown) and missing and not others:
            given = {name: environ[name] for choice in mpi.names for name in choice if environ.get(name)}
            problems.append(
                f"{_list(given)} set, but not {', '.join(missing)}: one of {'several' if unknown else size} processes, "
                f"and nothing says which of this machine. Start with {mpi.start}, which sets all of them, or with "
                f"torchrun, or unset them (unset {' '.join(given)}) to run as a single process."
            )
    return problems


def _one_of_several(environ: Mapping[str, str]) -> list[str]:
    """Report a number that only one of several tasks has, of a launcher that says neither how many nor which are here.

    A first task looks like a single process, and so does each task of a Ray worker that such a launcher has started.
    """
    return [
        f"{name}={environ[name]}: one of several processes that {start} started, and nothing says how many they are "
        "and which of this machine: each would train alone. Have it start `trainer launch` or torchrun on each "
        f"machine, or unset {name} to run as a single process."
        for name, first, start in (("PMIX_RANK", 0, "prun or the like"), ("LSF_PM_TASKID", 1, "blaunch"))
        if environ.get(name, "").isdecimal() and int(environ[name]) > first and not environ.get("RAY_JOB_ID")
    ]


def _disagreements(environment: Environment, environ: Mapping[str, str]) -> list[str]:
    """Report variables of torchrun that differ from the source that decides."""
    ranks = (environment.rank, environment.local_rank, environment.world_size, environment.local_world_size)
    return [
        f"{name}={environ[name]} is set, but {environment.source} says {value}. Unset {name}, or set all of "
        f"{', '.join(_REQUIRED)} to decide by them."
        for name, value in zip(_PLACE, ranks, strict=True)
        if (environ.get(name) or str(value)) != str(value)
    ]


def _list(variables: Mapping[str, str]) -> str:
    return ", ".join(f"{name}={value}" for name, value in variables.items())


class _Numbers:
    """Read integers from the variables, and collect the problems. `how`: the advice at the end of each."""

    def __init__(self, environ: Mapping[str, str], how: str = "") -> None:
        self._environ = environ
        self._how = how
        self._read: dict[str, int] = {}
        self.problems: list[str] = []

    def __call__(self, name: str, default: int = 0) -> int:
        text = self._environ.get(name, "") or str(default)
        if not text.isdecimal():
            self.add(f"{name}={text!r} is not an integer from 0.")
        self._read[name] = int(text) if text.isdecimal() else default
        return self._read[name]

    def add(self, problem: str) -> None:
        self.problems.append(f"{problem} {self._how}".rstrip())

    def below(self, name: str, limit: str) -> None:
        """Require that one variable that was read is smaller than another."""
        if self._read[name] >= self._read[limit]:
            self.add(f"{name}={self._read[name]} must be smaller than {limit}={self._read[limit]}.")

    def port(self, default: int = 29500) -> int:
        """Return MASTER_PORT, or `default` where it is not set."""
        port = self("MASTER_PORT", default)
        if not 1 <= port <= 65535:
            self.problems.append(f"MASTER_PORT={port} is not a port: give all processes the same one from 1 to 65535.")
        return port

    def check(self, where: str = "the environment") -> None:
        raise_problems(self.problems, where)


def _torchrun(environ: Mapping[str, str]) -> Environment | str:
    # MASTER_ADDR and MASTER_PORT alone mean nothing: clusters and shell profiles export them by habit.
    missing = [name for name in _REQUIRED if not environ.get(name)]
    if missing:
        return f"{', '.join(missing)} not set"
    number = _Numbers(environ, _HOW)
    rank, local_rank, size, local_size = map(number, _PLACE)
    if not number.problems:
        number.below("RANK", "WORLD_SIZE")
        number.below("LOCAL_RANK", "LOCAL_WORLD_SIZE")
        if not number.problems and local_rank > rank:
            number.add(
                f"LOCAL_RANK={local_rank} must not be larger than RANK={rank}: the ranks of a machine are counted "
                "from 0, among those of all."
            )
        if local_size > size:
            number.add(f"LOCAL_WORLD_SIZE={local_size} must not be larger than WORLD_SIZE={size}.")
    port = number.port()
    number.check()
    node_name = "GROUP_RANK" if environ.get("GROUP_RANK") else "NODE_RANK"
    node, nodes = number(node_name, rank // local_size), number("GROUP_WORLD_SIZE", -(-size // local_size))
    number("TORCHELASTIC_RESTART_COUNT")  # only checked here; the rendezvous reads it
    number.check()
    source = "torchrun" if environ.get("TORCHELASTIC_RUN_ID") else environ.get(_SOURCE) or "torchrun"
    return Environment(rank, local_rank, size, local_size, node, nodes, source, environ["MASTER_ADDR"], port)


def _ray(environ: Mapping[str, str]) -> Environment | str:
    if not environ.get("RAY_JOB_ID"):
        return "no RAY_JOB_ID"
    if environ.get("TORCHELASTIC_RUN_ID"):
        return "torchrun was started inside of a Ray job (TORCHELASTIC_RUN_ID)"
    found = _torchrun(environ)
    if isinstance(found, str):
        return f"not in a worker of Ray Train: {found}"
    return Environment(**{**vars(found), "source": "Ray Train", "nproc_flag": "ScalingConfig(num_workers=...)"})


@dataclass(frozen=True)
class _Mpi:
    """An implementation of MPI or the like, and the names of its variables: the first one set counts."""

    name: str
    start: str
    names: tuple[tuple[str, ...], ...]
    """Names of the variables for rank, size, local rank and local size; of each the first one that is set counts."""

    def read(self, environ: Mapping[str, str]) -> Environment | str:
        found = [next(filter(environ.get, choice), "") for choice in self.names]
        missing = [choice[0] for choice, name in zip(self.names, found, strict=True) if not name]
        if missing:
            alone = environ.get(found[0]) == "0" and environ.get(found[1]) == "1"
            return "a single process" if alone else f"{', '.join(missing)} not set"
        number = _Numbers(environ)
        rank, size, local_rank, local_size = map(number, found)
        number.below(found[0], found[1])
        number.below(found[2], found[3])
        port = number.port(_port_of_job(environ.get("PMIX_NAMESPACE") or environ.get("PMI_JOBID") or "mpi"))
        address = environ.get("MASTER_ADDR") or ("127.0.0.1" if size == local_size else "")
        if not address:
            how = f"export MASTER_ADDR=node1 MASTER_PORT=29500, before {self.start}"
            if self.name == "Open MPI":  # which passes on what is named
                how = "mpirun -x MASTER_ADDR=node1 -x MASTER_PORT=29500"
            number.add(
                f"{self.start} started {size} processes, {local_size} of them here, and MASTER_ADDR is not set: give "
                f"all of them the name of the machine with rank 0, and a port of it: {how}."
            )
        number.check()
        if size == 1:
            return "a single process"
        node, nodes = rank // local_size, -(-size // local_size)
        return Environment(rank, local_rank, size, local_size, node, nodes, self.start, address, port, "mpirun -n")


def _slurm(environ: Mapping[str, str]) -> Environment | str:
    number = _Numbers(environ)
    if not environ.get("SLURM_JOB_ID"):
        return "no SLURM_JOB_ID"
    # The batch script and the shell of salloc have the variables of the allocation, but are not a step's task.
    if not (environ.get("SLURM_PROCID") and environ.get("SLURM_STEP_ID")):
        return "in an allocation, but not started by srun (no SLURM_STEP_ID): not a task of a step"
    if number("SLURM_STEP_ID") >= _FIRST_RESERVED_STEP:
        return "the shell of an interactive step, not a task of srun"
    tasks_name = "SLURM_STEP_NUM_TASKS" if environ.get("SLURM_STEP_NUM_TASKS") else "SLURM_NTASKS"  # of old ones
    size = number(tasks_name, 1)
    if size == 1 and not number.problems:
        return "a step of one task (SLURM_STEP_NUM_TASKS=1): a single process"
    # A step started from such a shell inherits the variable, but not the terminal.
    if environ.get("SLURM_PTY_PORT") and at_a_terminal():
        return "an interactive shell (SLURM_PTY_PORT, and a terminal): not a task of a step"
    rank, local_rank, node = map(number, ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID"))
    number.below("SLURM_PROCID", tasks_name)
    tasks = environ.get("SLURM_STEP_TASKS_PER_NODE") or environ.get("SLURM_TASKS_PER_NODE") or str(size)
    counts = slurm.tasks_per_node(tasks)
    if node >= len(counts) or sum(counts) != size:
        number.add(
            f"SLURM_NODEID={node} and {tasks_name}={size} do not fit SLURM_STEP_TASKS_PER_NODE={tasks}: they "
            "are not of one step. Start with srun, which sets all of them."
        )
    elif rank != sum(counts[:node]) + local_rank:
        number.add(
            f"SLURM_PROCID={rank} is task {local_rank} of node {node}: the tasks are not in the order of the nodes. "
            "Start with srun --distribution=block."
        )
    port = number.port(_port_of_job(f"{environ['SLURM_JOB_ID']}.{environ['SLURM_STEP_ID']}"))
    number.check("Slurm's variables")
    nodelist = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST", "")
    address = environ.get("MASTER_ADDR") or slurm.hosts(nodelist)[0]
    return Environment(
        rank, local_rank, size, counts[node], node, len(counts), "Slurm", address, port, "--ntasks-per-node"
    )


def _flux(environ: Mapping[str, str]) -> Environment | str:
    size, nodes = environ.get("FLUX_JOB_SIZE", ""), environ.get("FLUX_JOB_NNODES", "")
    if not environ.get("FLUX_TASK_RANK") or size == "1":
        return "no FLUX_TASK_RANK, or a single process (FLUX_JOB_SIZE=1)"
    if not (size.isdecimal() and nodes.isdecimal() and int(nodes)) or int(size) % int(nodes):
        words = f"Flux started {size or '?'} tasks (FLUX_JOB_SIZE) on {nodes or '?'} nodes (FLUX_JOB_NNODES)"
        raise ConfigError(f"{words}: set both, and give each node as many tasks (flux run -N -n).")
    return _FLUX.read({**environ, "FLUX_LOCAL_SIZE": str(int(size) // int(nodes))})


def _kubeflow(environ: Mapping[str, str]) -> Environment | str:
    nodes = environ.get("PET_NNODES", "")
    if not nodes:
        return "no PET_NNODES"
    most = re.fullmatch(r"(?:\d+:)?(\d+)", nodes)
    if most is None:
        raise ConfigError(f"PET_NNODES={nodes!r} is neither a number nor MIN:MAX.")
    if int(most[1]) == 1:
        return "a single pod (PET_NNODES=1)"
    start = "start with `trainer launch` or `torchrun`, which read them: `trainer launch train.py`."
    if not (environ.get("RANK") and environ.get("WORLD_SIZE")):
        raise ConfigError(f"PET_NNODES={nodes}: this pod is one of several, and nothing says which: {start}")
    if environ["WORLD_SIZE"] != most[1] or environ.get("PET_NPROC_PER_NODE", "1") not in ("1", "auto", "cpu", "gpu"):
        raise ConfigError(
            f"WORLD_SIZE={environ['WORLD_SIZE']} on PET_NNODES={nodes} pods: several processes in each pod: {start}"
        )
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not environ.get(name)]
    if missing:
        raise ConfigError(f"PET_NNODES={nodes} is set, but not {', '.join(missing)}: {start}")
    number = _Numbers(environ)
    rank, size, port = number("RANK"), number("WORLD_SIZE"), number.port()
    number.below("RANK", "WORLD_SIZE")
    number.check("Kubeflow's variables")
    return Environment(rank, 0, size, 1, rank, size, "Kubeflow", environ["MASTER_ADDR"], port)


def _port_of_job(job: str) -> int:
    """Return the same port for all processes of a job, below the kernel's ephemeral ports."""
    return 20000 + zlib.crc32(job.encode()) % 10000


def at_a_terminal() -> bool:
    """Return True if this process's standard input is a terminal."""
    return sys.stdin is not None and not sys.stdin.closed and sys.stdin.isatty()


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
