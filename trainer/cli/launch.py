"""`trainer launch`: start a script, module or trainer command on all devices of this machine, or of several."""

from __future__ import annotations

import argparse
import os
import re
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from trainer.arguments import local_path, whole_number
from trainer.cli.collisions import collisions, shadow
from trainer.cli.options import CommandParser, positive, reports_errors, whole
from trainer.errors import ConfigError, printable

if TYPE_CHECKING:
    from trainer.launchers.logs import Logs
    from trainer.launchers.multinode import Machines

EXAMPLES = """\
examples:
  trainer launch --nproc-per-node 2 train.py --lr 0.1
  trainer launch --nproc-per-node 2 -m mypackage.train
  trainer launch --nproc-per-node 2 trainer fit --config run.yaml
  trainer launch --nproc-per-node 8 --max-restarts 3 train.py

  the same on each of four machines (the launcher on node1 hosts the rendezvous):
  trainer launch --nnodes 4 --nproc-per-node 8 --rdzv node1:29500 train.py

  a file for Slurm's sbatch:
  trainer launch --slurm --print --nodes 4 --gpus-per-node 8 --time 24:00:00 train.py > run.sbatch

In a pod of Kubeflow its variables PET_NNODES, PET_NPROC_PER_NODE, PET_NODE_RANK, PET_MAX_RESTARTS, PET_RDZV_ENDPOINT,
PET_RDZV_ID, PET_MASTER_ADDR and PET_MASTER_PORT are taken for what is not given here.
"""
SBATCHS_OWN = {
    "time": "HH:MM:SS",
    "cpus-per-task": "N",
    "mem": "N",
    **dict.fromkeys(("partition", "account", "job-name", "constraint", "qos"), "NAME"),
}
"""Options of sbatch that are passed on, and what their values are."""
SLURM_ONLY = ("print", "gpus-per-node", "ntasks-per-node", *SBATCHS_OWN)
EQUIVALENTS = {
    **dict.fromkeys(("--master-addr", "--master-port"), "--rdzv HOST:PORT, the same on all machines"),
    **dict.fromkeys(("--num-gpus", "--gpus", "--devices"), "--nproc-per-node N: processes on this machine"),
    "--num-nodes": "--nnodes N: machines",
    "--deepspeed-config": "DeepSpeedStrategy(config=FILE) as strategy; `trainer config --from FILE` translates it",
    **dict.fromkeys(("--include", "--exclude"), "CUDA_VISIBLE_DEVICES=0,1 before the command"),
    "--hostfile": "nothing: start the command on each of the machines, with --nnodes N --rdzv HOST:PORT",
}
"""Options of torchrun, deepspeed and Lightning's Fabric -> the text after "Use"."""


@reports_errors
def run(arguments: list[str]) -> int:
    """Start the program. Returns its exit code."""
    parser = _parser(os.environ)
    options, unknown = parser.parse_known_args(arguments)
    if unknown:
        raise ConfigError(f"{parser.unknown(unknown[0])}{_instead_of(unknown[0])} See {parser.prog} --help.")
    command = _command(options)
    if options.slurm:
        return _slurm(options, command)
    machines = _machines(options)
    if options.program[0] != "trainer" or options.module:  # our command reports it
        for note in collisions([Path.cwd() if options.module else local_path(command[0]).absolute().parent]):
            print(f"note: {printable(note)}", file=sys.stderr, flush=True)
    number = _number_of_processes(options.nproc_per_node)
    return _start(command, number, options.max_restarts, machines, _logs(options))


def _logs(options: argparse.Namespace) -> Logs:
    """Return where the output of the processes goes."""
    from trainer.launchers.logs import Logs

    shown = options.local_ranks_filter
    log_dir = options.log_dir and str(local_path(options.log_dir, "--log-dir"))
    return Logs(log_dir, options.redirects, options.tee, shown or None)


def _ranks(text: str) -> frozenset[int]:
    """Return the value of `--local-ranks-filter`."""
    return frozenset(whole(rank) for rank in text.split(",") if rank)


def _streams(text: str) -> str:
    """Return the value of `--redirects` and `--tee`."""
    if not re.fullmatch(r"[0-3]|\d+:[0-3](,\d+:[0-3])*", text):
        words = "give 3 for the output and errors of all processes (1: output, 2: errors), or 0:3,1:2 by local rank"
        raise argparse.ArgumentTypeError(f"{text!r}: {words}")
    return text


def _number_of_machines(text: str) -> tuple[int, int]:
    """Return the least and the largest number of machines."""
    counts = re.fullmatch(r"(?:(\d{1,9}):)?(\d{1,9})", text)
    minimum, maximum = (int(counts[1] or counts[2]), int(counts[2])) if counts else (0, 0)
    if not 1 <= minimum <= maximum:
        raise argparse.ArgumentTypeError(f"{text!r}: give a number of machines from 1, or MIN:MAX")
    return minimum, maximum


def _place(text: str) -> tuple[str, int]:
    """Return a host and its port, by default 29500."""
    host, _, port = text.rpartition(":") if ":" in text else (text, "", "29500")
    number = whole_number(port)
    if not host or number is None or number > 65535:
        raise argparse.ArgumentTypeError(f"{text!r}: give HOST:PORT, such as node1:29500")
    return host.strip("[]"), number


def _seconds_by_name(text: str) -> dict[str, int]:
    """Return the value of `--rdzv-conf`."""
    from trainer.launchers.multinode import CONF

    found = {}
    for entry in filter(None, text.split(",")):
        key, _, value = entry.partition("=")
        if key not in CONF or not whole_number(value):
            raise argparse.ArgumentTypeError(f"{entry!r}: give KEY=SECONDS with one of {', '.join(CONF)}")
        found[key] = int(value)
    return found


def _start(command: list[str], number: int, restarts: int, machines: Machines | None, logs: Logs) -> NoReturn:
    from trainer.launchers import parent_death

    with _quiet_torch():
        import torch.distributed  # noqa: F401
    from trainer.launchers.launcher import launch_command
    from trainer.launchers.multinode import launch_on_machine

    dying_with_us = ["-I", "-S", str(Path(str(parent_death.__file__)).resolve()), *command]
    if machines is None:
        launch_command(dying_with_us, number, restarts, logs)
    launch_on_machine(dying_with_us, number, restarts, machines, logs)


@contextmanager
def _quiet_torch() -> Iterator[None]:
    """Suppress the stack traces that torch's C++ code prints with an exception, in this process only."""
    name = "TORCH_CPP_LOG_LEVEL"
    if name in os.environ:
        yield
        return
    os.environ[name] = "FATAL"
    yield
    del os.environ[name]


def _parser(environ: Mapping[str, str]) -> CommandParser:
    parser = CommandParser(
        prog="trainer launch",
        usage="trainer launch [OPTIONS] SCRIPT.py [ARGUMENTS] | -m MODULE [ARGUMENTS] | trainer COMMAND [ARGUMENTS]",
        description="Start processes as torchrun does: its words and their meaning. All counts are per machine.",
        epilog=EXAMPLES,
    )

    def option(
        name: str,
        help: str,
        default: str | None = None,
        pet: str = "",
        metavar: str = "N",
        type: Callable[[str], Any] = str,
    ) -> None:
        names = dict.fromkeys((name, f"--{name[2:].replace('-', '_')}"))
        parser.add_argument(*names, metavar=metavar, help=help, default=environ.get(pet, default), type=type)

    endpoint = environ.get("PET_RDZV_ENDPOINT")
    if not endpoint and environ.get("PET_MASTER_ADDR"):
        endpoint = f"{environ['PET_MASTER_ADDR']}:{environ.get('PET_MASTER_PORT', '29500')}"
    processes = "processes on this machine: a number, gpu, cpu or auto (default: one for each GPU, one without)"
    words = "machines: a number, or MIN:MAX (default: 1)"
    option("--nnodes", words, "1", "PET_NNODES", type=_number_of_machines)
    option("--nproc-per-node", processes, None, "PET_NPROC_PER_NODE")
    names = ("--rdzv", "--rdzv-endpoint", "--rdzv_endpoint")
    parser.add_argument(*names, metavar="HOST:PORT", default=endpoint, type=_place, help="where the machines meet")
    words = "number of this machine; 0 hosts the rendezvous (default: found)"
    option("--node-rank", words, None, "PET_NODE_RANK", type=whole)
    parser.add_argument("--rdzv-backend", "--rdzv_backend", choices=("c10d",), help="as torchrun has it, and no other")
    option("--rdzv-id", "distinguishes runs at one rendezvous", "none", "PET_RDZV_ID", "NAME")
    words = "such as join_timeout=1200,keep_alive_interval=5"
    option("--rdzv-conf", words, "", "PET_RDZV_CONF", "KEY=N,...", _seconds_by_name)
    option("--max-restarts", "start all again after a failure (default: 0)", "0", "PET_MAX_RESTARTS", type=whole)
    option("--log-dir", "a folder for the files of --redirects and --tee (default: a new one in /tmp)", metavar="DIR")
    words = "write output (1), errors (2) or both (3) into files: 3, or 0:3,1:2 by rank"
    option("--redirects", words, "0", metavar="STD", type=_streams)
    words = "the same, and into this terminal too, with the rank before each line"
    option("--tee", words, "0", metavar="STD", type=_streams)
    option("--local-ranks-filter", "show the output of these local ranks only: 0,1", "", metavar="RANKS", type=_ranks)
    parser.add_argument("--standalone", action="store_true", help="one machine, which is the default")
    parser.add_argument("-m", "--module", action="store_true", help="the program is a module")
    _add_slurm_options(parser)
    parser.add_argument("program", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    return parser


def _add_slurm_options(parser: CommandParser) -> None:
    slurm = parser.add_argument_group("for Slurm")
    slurm.add_argument("--slurm", action="store_true", help="with --print: write a file for sbatch, start nothing")
    slurm.add_argument("--print", action="store_true", help="to the standard output")
    slurm.add_argument("--nodes", metavar="N", type=positive, default=1, help="machines (default: 1)")
    slurm.add_argument("--gpus-per-node", metavar="N", type=positive, help="GPUs, and processes, on each machine")
    words = "processes on each machine without GPUs (default: 1)"
    slurm.add_argument("--ntasks-per-node", metavar="N", type=positive, help=words)
    for name, metavar in SBATCHS_OWN.items():
        slurm.add_argument(f"--{name}", metavar=metavar, help=f"as sbatch's --{name}")


def _command(options: argparse.Namespace) -> list[str]:
    """Return the arguments that make Python run the program."""
    program = options.program[1:] if options.program[:1] == ["--"] else [*options.program]
    if not program:
        raise ConfigError("nothing to launch: give a script, -m MODULE or a trainer command.")
    if program[0] == "trainer" and not options.module:
        return [*_isolation(), "-m", *program]
    if options.module:
        return ["-m", *program]
    script = local_path(program[0])
    if not script.is_file():
        raise ConfigError(f"there is no script {program[0]!r} in {os.getcwd()}. Is it a module? Write -m before it.")
    return [str(script), *program[1:]]


def _isolation() -> list[str]:
    """Return the option with which Python does not import the user's own trainer.py, where there is one."""
    return [] if shadow([Path.cwd()]) is None else ["-P"]


def _instead_of(option: str) -> str:
    """Return what to use instead of an option of another launcher, as a sentence; nothing for an unknown one."""
    from trainer.compat.accelerate import launch_option_words

    name = option.partition("=")[0].replace("_", "-")
    words = EQUIVALENTS.get(name) or launch_option_words(name)
    return f" Use {words}." if words else ""


def _machines(options: argparse.Namespace) -> Machines | None:
    """Return the machines that take part; None: only this one."""
    from trainer.launchers.multinode import Machines

    if options.nodes > 1 or any(vars(options)[name.replace("-", "_")] for name in SLURM_ONLY):
        raise ConfigError("the options for Slurm need --slurm --print, which write a file for sbatch: add these two.")
    minimum, maximum = options.nnodes
    if (options.node_rank or 0) >= maximum:
        raise ConfigError(f"--node-rank {options.node_rank}: give a number from 0 to {maximum - 1}.")
    if maximum == 1:
        return None
    if options.rdzv is None or options.rdzv[1] == 0:
        raise ConfigError(f"--nnodes {maximum} machines have to meet: give --rdzv HOST:PORT, the same on all.")
    host, port = options.rdzv
    return Machines(minimum, maximum, host, port, options.node_rank, options.rdzv_id, options.rdzv_conf)


def _number_of_processes(given: str | None) -> int:
    number = whole_number(given or "")
    if number:
        return number
    import torch

    gpus, cores = torch.cuda.device_count(), os.cpu_count() or 1
    found = {None: gpus or 1, "auto": gpus or cores, "gpu": gpus, "cpu": cores}.get(given)
    if not found:
        raise ConfigError(f"--nproc-per-node {given}: give a number from 1, cpu, auto, or gpu where CUDA finds any.")
    return found


def _slurm(options: argparse.Namespace, command: list[str]) -> int:
    if not options.print:
        raise ConfigError("--slurm writes a file for sbatch, and starts nothing: add --print, and give it to sbatch.")
    if options.nnodes[1] not in (1, options.nodes) or options.rdzv:
        raise ConfigError("with --slurm the machines are --nodes and meet automatically: leave --nnodes, --rdzv out.")
    print(sbatch_file(options, command, ["trainer", "launch", *sys.argv[2:]]), end="")
    return 0


_PLAIN = ("gpus_per_node", "time", "partition", "account", "qos", "constraint", "cpus_per_task", "mem")
_WARN_S = 120


def sbatch_file(options: argparse.Namespace, command: list[str], typed: list[str]) -> str:
    """Return a batch script: one process per GPU, a signal before the time limit, and a requeue after saving.

    Args:
        options: the options of `trainer launch`.
        command: the arguments that make Python run the program.
        typed: the command line, which the file quotes.

    Raises:
        ConfigError: the numbers of processes contradict each other.
    """
    if options.gpus_per_node and options.ntasks_per_node not in (None, options.gpus_per_node):
        raise ConfigError("--gpus-per-node starts one process for each GPU: leave --ntasks-per-node out.")
    processes = options.gpus_per_node or options.ntasks_per_node or 1
    launcher = options.max_restarts > 0
    directives = [
        f"--job-name={options.job_name or _name(options)}",
        f"--nodes={options.nodes}",
        f"--ntasks-per-node={1 if launcher else processes}",
        *(f"--{name.replace('_', '-')}={value}" for name in _PLAIN if (value := vars(options)[name])),
        f"--signal=USR1@{_WARN_S}",
        "--requeue",
        "--open-mode=append",
        "--output=slurm-%j.out",
    ]
    return "\n".join(
        [
            "#!/bin/bash",
            f"# Written by: {shlex.join(typed)}",
            *(f"#SBATCH {directive}" for directive in directives),
            "",
            f"# Slurm sends SIGUSR1 {_WARN_S} s before the time is over. The processes then agree on a step, save a",
            "# checkpoint, and put the job back into the queue (TRAINER_REQUEUE=1: scontrol requeue). Its later starts",
            '# go on from ckpt_path="last" by themselves. Set it to 0 to end with exit code 75 instead. Raise USR1@ if',
            "# a step and a save together may take longer.",
            "export TRAINER_REQUEUE=1",
            "",
            *_run(options, command, processes, launcher),
            "",
        ]
    )


def _run(options: argparse.Namespace, command: list[str], processes: int, launcher: bool) -> list[str]:
    python = shlex.quote(sys.executable)
    # srun does not inherit --cpus-per-task from sbatch.
    cores = f" --cpus-per-task={options.cpus_per_task}" if options.cpus_per_task else ""
    stop_all = f"srun --kill-on-bad-exit=1{cores}"
    if not launcher:
        return [
            "# One task per process: they find each other by Slurm's variables. The first that fails ends the others.",
            f"{stop_all} {python} {shlex.join(command)}",
        ]
    isolated = "".join(f"{word} " for word in _isolation())
    program = shlex.join([*(["-m"] if options.module else []), *(word for word in options.program if word != "--")])
    return [
        "# One launcher per machine, which starts the processes there, and starts all again after a failure. They meet",
        "# on the first machine, at a port that follows from the number of the job.",
        'first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
        "port=$((20000 + SLURM_JOB_ID % 10000))",
        f"{stop_all} {python} {isolated}-m trainer launch --nnodes {options.nodes} --nproc-per-node {processes} \\",
        f'    --rdzv "$first:$port" --rdzv-id "$SLURM_JOB_ID" --max-restarts {options.max_restarts} \\',
        f"    {program}",
    ]


def _name(options: argparse.Namespace) -> str:
    word: str = options.program[0] if options.program[0] != "trainer" else "trainer-" + options.program[1]
    return word.rpartition("/")[2].removesuffix(".py")
