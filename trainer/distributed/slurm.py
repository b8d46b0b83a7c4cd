"""Parse Slurm's lists of nodes and tasks, and put a job back into its queue."""

from __future__ import annotations

import logging
import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from itertools import product

from trainer.errors import ConfigError

log = logging.getLogger("trainer")

REQUEUE = "TRAINER_REQUEUE"
"""Environment variable: 1 requeues a Slurm job that has saved a checkpoint before its time limit."""


def hosts(nodelist: str) -> list[str]:
    """Expand Slurm's list of nodes, in its order.

    >>> hosts("node[08-10,12],gpu1")
    ['node08', 'node09', 'node10', 'node12', 'gpu1']

    Raises:
        ConfigError: it is not that notation.
    """
    without_ranges = re.sub(r"\[[0-9,-]+\]", "", nodelist)
    if re.sub(r"\[[^\[\]]*\]", "", nodelist).strip(",") == "" or re.search(r"[\[\]]", without_ranges):
        raise ConfigError(_unreadable(nodelist))
    found = []
    for entry in re.findall(r"(?:\[[^\]]*\]|[^,\[])+", nodelist):
        parts = re.split(r"\[([^\]]*)\]", entry)
        choices = [list(_numbers(part, nodelist)) if i % 2 else [part] for i, part in enumerate(parts)]
        found += ["".join(choice) for choice in product(*choices)]
    return found


def _numbers(ranges: str, nodelist: str) -> Iterator[str]:
    """Expand `01-03,7` to 01, 02, 03, 7: leading zeros are part of a name."""
    for one in ranges.split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", one)
        if match is None:
            raise ConfigError(_unreadable(nodelist))
        first, last = match[1], match[2] or match[1]
        for number in range(int(first), int(last) + 1):
            yield str(number).zfill(len(first))


def _unreadable(nodelist: str) -> str:
    return (
        f"the list of nodes {nodelist!r} (SLURM_STEP_NODELIST) cannot be read. "
        "Set MASTER_ADDR to the first of the nodes, and report this list."
    )


def tasks_per_node(text: str) -> list[int]:
    """Expand Slurm's counts to one number for each node.

    >>> tasks_per_node("2(x3),1")
    [2, 2, 2, 1]

    Raises:
        ConfigError: it is not that notation.
    """
    counts: list[int] = []
    for one in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", one)
        if match is None:
            raise ConfigError(f"SLURM_STEP_TASKS_PER_NODE={text!r} cannot be read: expected a form like 2(x3),1.")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def was_requeued(environ: Mapping[str, str] = os.environ) -> bool:
    """Return True if this is a later start of a Slurm job requeued by TRAINER_REQUEUE=1, which has to resume."""
    return environ.get(REQUEUE, "0") not in ("", "0") and environ.get("SLURM_RESTART_COUNT", "0") not in ("", "0")


def requeue(environ: Mapping[str, str] = os.environ) -> bool:
    """Requeue this Slurm job if TRAINER_REQUEUE=1; called by one process after all have saved.

    Slurm then ends the job, and starts its script again later. Logs a warning if there is no job, or Slurm refuses.

    Returns:
        True if Slurm has requeued the job.
    """
    if environ.get(REQUEUE, "0") in ("", "0"):
        return False
    job = environ.get("SLURM_JOB_ID")
    if not job:
        log.warning("%s=1, but this is not a Slurm job (no SLURM_JOB_ID): nothing is put back into a queue", REQUEUE)
        return False
    scontrol = shutil.which("scontrol", path=environ.get("PATH"))
    if scontrol is None:
        log.warning("%s=1, but the command scontrol is not found: run `scontrol requeue %s` yourself", REQUEUE, job)
        return False
    log.info("putting the job back into the queue: scontrol requeue %s", job)
    try:
        done = subprocess.run([scontrol, "requeue", job], capture_output=True, text=True, timeout=60)
    except subprocess.TimeoutExpired:
        log.warning("scontrol requeue %s does not answer", job)
        return False
    if done.returncode != 0:
        log.warning("scontrol requeue %s failed: %s", job, (done.stderr or done.stdout).strip())
    return done.returncode == 0
