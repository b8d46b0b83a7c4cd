"""Which process this is, read from the variables of whatever started it."""

from __future__ import annotations

import os
import re
import sys
import zlib
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass

from trainer.distributed import slurm
from trainer.errors import ConfigError, raise_problems

_PLACE = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
_OF_MACHINE = ("LOCAL_RANK", "LOCAL_WORLD_SIZE")
_REQUIRED = (*_PLACE, "MASTER_ADDR", "MASTER_PORT")
_SOURCE = "TRAINER_SOURCE"
"""Set by `Environment.export`: who had said so before torchrun's variables did."""
_HOW = (
    "Start with torchrun, which sets all of them, or unset them (unset RANK LOCAL_RANK WORLD_SIZE "
    "LOCAL_WORLD_SIZE) to run as a single process."
)
_FIRST_RESERVED_STEP = 4294967280
"""Slurm numbers its own steps (batch, interactive, extern) downwards from 2**32."""


@dataclass(frozen=True)
class Environment:
    """The place of this process among all processes of the run."""

    rank: int = 0
    local_rank: int = 0
    """The number of this process on its own machine."""
    world_size: int = 1
    local_world_size: int = 1
    """Processes on this machine."""
    node_rank: int = 0
    num_nodes: int = 1
    source: str = "single process"
    """Who said so: a name of `SOURCES`, or `"single process"`. Our own launcher sets torchrun's variables."""
    restart_count: int = 0
    """How often torchrun has restarted the processes (`--max-restarts`)."""
    master_addr: str = ""
    """Where the processes meet; empty for a single process."""
    master_port: int = 0
    nproc_flag: str = "--nproc-per-node"
    """What to type to the starting program for so many processes on a machine."""

    def export(self, environ: MutableMapping[str, str] = os.environ) -> None:
        """Set torchrun's variables, so that all libraries in this process read the same place from them."""
        if self.source in ("single process", "torchrun", "Ray Train"):
            return
        environ.update(
            {
                "RANK": str(self.rank),
                "LOCAL_RANK": str(self.local_rank),
                "WORLD_SIZE": str(self.world_size),
                "LOCAL_WORLD_SIZE": str(self.local_world_size),
                "GROUP_RANK": str(self.node_rank),
                "GROUP_WORLD_SIZE": str(self.num_nodes),
                "MASTER_ADDR": self.master_addr,
                "MASTER_PORT": str(self.master_port),
                _SOURCE: self.source,
            }
        )


@dataclass(frozen=True)
class Source:
    """One way to be started, and the variables that tell."""

    name: str
    decides: str
    """In words: when it is the one."""
    variables: tuple[str, ...]
    """What it reads."""
    read: Callable[[Mapping[str, str]], Environment | str]
    """The place of this process, or why this is not the one; ConfigError if its variables contradict each other."""


def detect_environment(environ: Mapping[str, str] = os.environ) -> Environment:
    """The first of `SOURCES` that recognises its variables; a single process if there is none.

    Raises:
        ConfigError: the variables are incomplete or contradict each other.
    """
    environment = next((found for s in SOURCES if isinstance(found := s.read(environ), Environment)), None)
    if environment is None:
        raise_problems([*_some_of_torchruns(environ), *_some_of_mpiruns(environ)], "the environment")
        return Environment()
    if environment.source not in _OF_TORCHRUN:
        raise_problems(_disagreements(environment, environ), "the environment")
    return environment


def _some_of_torchruns(environ: Mapping[str, str]) -> list[str]:
    """Some of torchrun's variables, but not all of them, where no other source decides."""
    given = {name: environ[name] for name in _REQUIRED if environ.get(name)}
    # As Kubeflow sets them in the only pod of a job.
    alone = given.get("WORLD_SIZE") == "1" and given.get("RANK", "0") == "0"
    if (alone and not given.keys() & set(_OF_MACHINE)) or not given.keys() & set(_PLACE[:3]):
        return []
    seen = ", ".join(f"{name}={value}" for name, value in given.items())
    return [f"{seen} set, but not {', '.join(name for name in _REQUIRED if name not in given)}. {_HOW}"]


def _some_of_mpiruns(environ: Mapping[str, str]) -> list[str]:
    """Variables of mpirun that tell of several processes, without those that tell the place on the machine."""
    problems = []
    for _, start, names in _MPI:
        size_name = names[1][0]
        number = _Numbers(environ)
        size = number(size_name, default=1)
        # Slurm's own PMI sets these too, and Slurm was asked: this is an interactive shell in a step.
        of_slurm = environ.get("SLURM_STEP_ID") and environ.get("SLURM_STEP_NUM_TASKS") == environ.get(size_name)
        missing = [" or ".join(choice) for choice in names if not any(environ.get(name) for name in choice)]
        problems += number.problems
        if size > 1 and missing and not (size_name.startswith("PMI_") and of_slurm):
            given = {name: environ[name] for choice in names for name in choice if environ.get(name)}
            problems.append(
                f"{', '.join(f'{name}={value}' for name, value in given.items())} set, but not {', '.join(missing)}: "
                f"one of {size} processes, and nothing says which of this machine. Start with {start}, which sets all "
                f"of them, or with torchrun, or unset them (unset {' '.join(given)}) to run as a single process."
            )
    return problems


def _disagreements(environment: Environment, environ: Mapping[str, str]) -> list[str]:
    """Some of torchrun's variables beside another source that decides: they have to say the same."""
    said = (environment.rank, environment.local_rank, environment.world_size, environment.local_world_size)
    return [
        f"{name}={environ[name]} is set, but {environment.source} says {value}. Unset {name}, or set all of "
        f"{', '.join(_REQUIRED)} to decide by them."
        for name, value in zip(_PLACE, said, strict=True)
        if (environ.get(name) or str(value)) != str(value)
    ]


class _Numbers:
    """Whole numbers among the variables; what cannot be read is collected."""

    def __init__(self, environ: Mapping[str, str], how: str = "") -> None:
        self._environ = environ
        self._how = how
        self.problems: list[str] = []

    def __call__(self, name: str, default: int = 0) -> int:
        text = self._environ.get(name, "") or str(default)
        if not text.isdecimal():
            self.problems.append(f"{name}={text!r} is not a whole number from 0. {self._how}".rstrip())
            return default
        return int(text)

    def below(self, name: str, value: int, limit_name: str, limit: int) -> None:
        if value >= limit:
            self.problems.append(f"{name}={value} must be smaller than {limit_name}={limit}. {self._how}".rstrip())

    def port(self, default: int = 29500) -> int:
        """MASTER_PORT, or `default` where it is not set."""
        port = self("MASTER_PORT", default)
        if not 1 <= port <= 65535:
            self.problems.append(f"MASTER_PORT={port} is not a port: give all processes the same one from 1 to 65535.")
        return port


def _torchrun(environ: Mapping[str, str]) -> Environment | str:
    # MASTER_ADDR and MASTER_PORT alone mean nothing: clusters and shell profiles export them by habit.
    missing = [name for name in _REQUIRED if not environ.get(name)]
    if missing:
        return f"{', '.join(missing)} not set"
    number = _Numbers(environ, _HOW)
    rank, local_rank = number("RANK"), number("LOCAL_RANK")
    world_size, local_world_size = number("WORLD_SIZE"), number("LOCAL_WORLD_SIZE")
    if not number.problems:
        number.below("RANK", rank, "WORLD_SIZE", world_size)
        number.below("LOCAL_RANK", local_rank, "LOCAL_WORLD_SIZE", local_world_size)
        if not number.problems and local_rank > rank:
            number.problems.append(
                f"LOCAL_RANK={local_rank} must not be larger than RANK={rank}: the ranks of a machine are counted "
                f"from 0, among those of all. {_HOW}"
            )
        if local_world_size > world_size:
            number.problems.append(
                f"LOCAL_WORLD_SIZE={local_world_size} must not be larger than WORLD_SIZE={world_size}. {_HOW}"
            )
    port = number.port()
    raise_problems(number.problems, "the environment")
    node_name = "GROUP_RANK" if environ.get("GROUP_RANK") else "NODE_RANK"
    node_rank = number(node_name, default=rank // local_world_size)
    num_nodes = number("GROUP_WORLD_SIZE", default=-(-world_size // local_world_size))
    if not number.problems and not 1 <= num_nodes <= world_size:
        number.problems.append(f"GROUP_WORLD_SIZE={num_nodes} must be from 1 to WORLD_SIZE={world_size}. {_HOW}")
    elif environ.get("GROUP_WORLD_SIZE") and environ.get(node_name):
        number.below(node_name, node_rank, "GROUP_WORLD_SIZE", num_nodes)
    environment = Environment(
        rank=rank,
        local_rank=local_rank,
        world_size=world_size,
        local_world_size=local_world_size,
        node_rank=node_rank,
        num_nodes=num_nodes,
        source="torchrun" if environ.get("TORCHELASTIC_RUN_ID") else environ.get(_SOURCE) or "torchrun",
        restart_count=number("TORCHELASTIC_RESTART_COUNT"),
        master_addr=environ["MASTER_ADDR"],
        master_port=port,
    )
    raise_problems(number.problems, "the environment")
    return environment


def _ray(environ: Mapping[str, str]) -> Environment | str:
    if not environ.get("RAY_JOB_ID"):
        return "no RAY_JOB_ID"
    if environ.get("TORCHELASTIC_RUN_ID"):
        return "torchrun was started inside of a Ray job (TORCHELASTIC_RUN_ID)"
    found = _torchrun(environ)
    if isinstance(found, str):
        return f"not in a worker of Ray Train: {found}"
    return Environment(**{**vars(found), "source": "Ray Train", "nproc_flag": "ScalingConfig(num_workers=...)"})


def _mpi(name: str, start: str, names: tuple[tuple[str, ...], ...]) -> Source:
    """A flavour of mpirun: its variables for rank, size, local rank and local size, each under one of some names."""

    def read(environ: Mapping[str, str]) -> Environment | str:
        found = [next((n for n in choice if environ.get(n)), "") for choice in names]
        missing = [choice[0] for choice, n in zip(names, found, strict=True) if not n]
        number = _Numbers(environ)
        if missing:
            alone = environ.get(found[0]) == "0" and environ.get(found[1]) == "1"
            return "a single process" if alone else f"{', '.join(missing)} not set"
        rank, size, local_rank, local_size = map(number, found)
        number.below(found[0], rank, found[1], size)
        number.below(found[2], local_rank, found[3], local_size)
        port = number.port(_port_of(environ.get("PMIX_NAMESPACE") or environ.get("PMI_JOBID") or "mpi"))
        address = environ.get("MASTER_ADDR") or ("127.0.0.1" if size == local_size else "")
        if not address:
            number.problems.append(
                f"{start} started {size} processes, {local_size} of them here, and MASTER_ADDR is not set: give the "
                "name of the machine with rank 0, as in `mpirun -x MASTER_ADDR=node1 -x MASTER_PORT=29500 ...`."
            )
        raise_problems(number.problems, "the environment")
        if size == 1:
            return "a single process"
        nodes = -(-size // local_size)
        node = rank // local_size
        return Environment(rank, local_rank, size, local_size, node, nodes, start, 0, address, port, "mpirun -n")

    flat = tuple(n for choice in names for n in choice)
    decides = f"{', '.join(choice[0] for choice in names)} are all set, and {names[1][0]} > 1"
    return Source(name, decides, flat, read)


def _slurm(environ: Mapping[str, str]) -> Environment | str:
    number = _Numbers(environ)
    if not environ.get("SLURM_JOB_ID"):
        return "no SLURM_JOB_ID"
    # The batch script and the shell of salloc have the variables of the allocation, but are not a step's task.
    if not (environ.get("SLURM_PROCID") and environ.get("SLURM_STEP_ID")):
        return "in an allocation, but not started by srun (no SLURM_STEP_ID): not a task of a step"
    if number("SLURM_STEP_ID") >= _FIRST_RESERVED_STEP:
        return "the shell of an interactive step, not a task of srun"
    size = number("SLURM_STEP_NUM_TASKS", 1)
    if size == 1 and not number.problems:
        return "a step of one task (SLURM_STEP_NUM_TASKS=1): a single process"
    # A step started from such a shell inherits the variable, but not the terminal.
    if environ.get("SLURM_PTY_PORT") and at_a_terminal():
        return "an interactive shell (SLURM_PTY_PORT, and a terminal): not a task of a step"
    rank, local_rank, node = number("SLURM_PROCID"), number("SLURM_LOCALID"), number("SLURM_NODEID")
    number.below("SLURM_PROCID", rank, "SLURM_STEP_NUM_TASKS", size)
    tasks = environ.get("SLURM_STEP_TASKS_PER_NODE") or str(size)
    # Compared before it is written out: 2(x1000000000000) would fill the memory.
    too_many = re.search(r"\d{7}", tasks) or sum(map(int, re.findall(r"\(x(\d+)\)", tasks))) > size
    counts = [] if too_many else slurm.tasks_per_node(tasks)
    if node >= len(counts) or sum(counts) != size:
        number.problems.append(
            f"SLURM_NODEID={node} and SLURM_STEP_NUM_TASKS={size} do not fit SLURM_STEP_TASKS_PER_NODE={tasks}: they "
            "are not of one step. Start with srun, which sets all of them."
        )
    elif rank != sum(counts[:node]) + local_rank:
        number.problems.append(
            f"SLURM_PROCID={rank} is task {local_rank} of node {node}: the tasks are not in the order of the nodes. "
            "Start with srun --distribution=block."
        )
    job = environ["SLURM_JOB_ID"]
    port = number.port(_port_of(f"{job}.{environ['SLURM_STEP_ID']}"))
    raise_problems(number.problems, "Slurm's variables")
    nodelist = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST", "")
    address = environ.get("MASTER_ADDR") or slurm.hosts(nodelist)[0]
    return Environment(
        rank, local_rank, size, counts[node], node, len(counts), "Slurm", 0, address, port, "--ntasks-per-node"
    )


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
    number.below("RANK", rank, "WORLD_SIZE", size)
    raise_problems(number.problems, "Kubeflow's variables")
    return Environment(rank, 0, size, 1, rank, size, "Kubeflow", 0, environ["MASTER_ADDR"], port)


def _port_of(job: str) -> int:
    """The same port for all processes of a job, below those that the kernel gives away."""
    return 20000 + zlib.crc32(job.encode()) % 10000


def at_a_terminal() -> bool:
    """Whether somebody types into this process's standard input."""
    return sys.stdin is not None and not sys.stdin.closed and sys.stdin.isatty()


_OF_TORCHRUN = ("torchrun", "Ray Train")

_MPI: tuple[tuple[str, str, tuple[tuple[str, ...], ...]], ...] = (
    (
        "Open MPI",
        "mpirun (Open MPI)",
        tuple((f"OMPI_COMM_WORLD_{n}",) for n in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")),
    ),
    (
        "MVAPICH",
        "mpirun (MVAPICH)",
        tuple((f"MV2_COMM_WORLD_{n}",) for n in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")),
    ),
    (
        "MPICH",
        "mpirun (PMI)",
        (("PMI_RANK",), ("PMI_SIZE",), ("MPI_LOCALRANKID", "PMI_LOCAL_RANK"), ("MPI_LOCALNRANKS", "PMI_LOCAL_SIZE")),
    ),
)
"""The arguments of `_mpi`, one row for each flavour."""

SOURCES: tuple[Source, ...] = (
    Source("Ray Train", "RAY_JOB_ID and all of torchrun's are set", ("RAY_JOB_ID", *_REQUIRED), _ray),
    Source(
        "torchrun", f"{', '.join(_REQUIRED)} are all set", (*_REQUIRED, "GROUP_RANK", "GROUP_WORLD_SIZE"), _torchrun
    ),
    Source("Kubeflow", "PET_NNODES > 1", ("PET_NNODES", "PET_NPROC_PER_NODE", "RANK", "WORLD_SIZE"), _kubeflow),
    *(_mpi(*flavour) for flavour in _MPI),
    Source(
        "Slurm",
        "a task of srun with SLURM_STEP_NUM_TASKS > 1",
        (
            "SLURM_JOB_ID",
            "SLURM_STEP_ID",
            "SLURM_PROCID",
            "SLURM_LOCALID",
            "SLURM_NODEID",
            "SLURM_STEP_NUM_TASKS",
            "SLURM_STEP_TASKS_PER_NODE",
            "SLURM_STEP_NODELIST",
            "SLURM_PTY_PORT",
        ),
        _slurm,
    ),
)
"""In order: the first that recognises its variables decides. Each raises `ConfigError` if they contradict each other.

The nearest to the process comes first: torchrun may run inside a step of srun, mpirun starts its helpers with srun.
"""
