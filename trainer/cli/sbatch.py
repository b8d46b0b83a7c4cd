"""The file for Slurm's sbatch that `trainer launch --slurm --print` writes."""

from __future__ import annotations

import argparse
import shlex
import sys

_PLAIN = ("partition", "account", "qos", "constraint", "cpus_per_task", "mem")
_WARN_S = 120


def sbatch_file(options: argparse.Namespace, typed: list[str]) -> str:
    """A batch script: one process per GPU, a signal before the time is over, and back into the queue after saving.

    Args:
        options: of `trainer launch`.
        typed: the command line, to stand in the file.

    Raises:
        ConfigError: a number is none.
    """
    from trainer.errors import raise_problems

    numbers = {
        "--nodes": options.nodes,
        "--gpus-per-node": options.gpus_per_node,
        "--max-restarts": options.max_restarts,
    }
    numbers["--ntasks-per-node"] = options.ntasks_per_node
    problems = [
        f"{name} {value}: give a number{'' if name == '--max-restarts' else ' from 1'}."
        for name, value in numbers.items()
        if value is not None and not (value.isdecimal() and (int(value) > 0 or name == "--max-restarts"))
    ]
    if options.gpus_per_node and options.ntasks_per_node not in (None, options.gpus_per_node):
        problems.append("--gpus-per-node starts one process for each GPU: leave --ntasks-per-node out.")
    raise_problems(problems, "the options")
    processes = int(options.gpus_per_node or options.ntasks_per_node or 1)
    launcher = int(options.max_restarts) > 0
    directives = [
        f"--job-name={options.job_name or _name(options)}",
        f"--nodes={options.nodes}",
        f"--ntasks-per-node={1 if launcher else processes}",
        *([f"--gpus-per-node={options.gpus_per_node}"] if options.gpus_per_node else []),
        *([f"--time={options.time}"] if options.time else []),
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
            *_run(options, processes, launcher),
            "",
        ]
    )


def _run(options: argparse.Namespace, processes: int, launcher: bool) -> list[str]:
    program = shlex.join([*(["-m"] if options.module else []), *(word for word in options.program if word != "--")])
    of_trainer = not options.module and options.program[0] == "trainer"
    python = shlex.quote(sys.executable)
    # srun does not take over this one of sbatch's options.
    cores = f" --cpus-per-task={options.cpus_per_task}" if options.cpus_per_task else ""
    stop_all = f"srun --kill-on-bad-exit=1{cores}"
    if not launcher:
        return [
            "# One task per process: they find each other by Slurm's variables. The first that fails ends the others.",
            f"{stop_all} {python} {'-m ' if of_trainer else ''}{program}",
        ]
    return [
        "# One launcher per machine, which starts the processes there, and starts all again after a failure. They meet",
        "# on the first machine, at a port that follows from the number of the job.",
        'first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
        "port=$((20000 + SLURM_JOB_ID % 10000))",
        f"{stop_all} {python} -m trainer launch --nnodes {options.nodes} --nproc-per-node {processes} \\",
        f'    --rdzv "$first:$port" --rdzv-id "$SLURM_JOB_ID" --max-restarts {options.max_restarts} \\',
        f"    {program}",
    ]


def _name(options: argparse.Namespace) -> str:
    word: str = options.program[0] if options.program[0] != "trainer" else "trainer-" + options.program[1]
    return word.rpartition("/")[2].removesuffix(".py")
