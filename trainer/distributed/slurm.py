"""Parse Slurm's lists of nodes and tasks, and put a job back into its queue."""

from __future__ import annotations

import logging
import os
import re
import subprocess
from collections.abc import Mapping

from trainer.errors import ConfigError

log = logging.getLogger("trainer")

REQUEUE = "TRAINER_REQUEUE"
"""Environment variable: 1 requeues a Slurm job that has saved a checkpoint before its time limit."""


def first_host(nodelist: str) -> str:
    """Return the first name in Slurm's list of nodes.

    >>> first_host("node[08-10,12],gpu1")
    'node08'

    Raises:
        ConfigError: it is not that notation.
    """
    match = re.fullmatch(r"((?:\[\d[\d,-]*\]|[^,\[\]])+)(,.*)?", nodelist)
    if match is None:
        raise ConfigError(
            f"the list of nodes {nodelist!r} (SLURM_STEP_NODELIST) cannot be read. "
            "Set MASTER_ADDR to the first of the nodes, and report this list."
        )
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", match[1])


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
    log.info("putting the job back into the queue: scontrol requeue %s", job)
    command = ["scontrol", "requeue", job]
    try:
        subprocess.run(command, capture_output=True, text=True, timeout=60, check=True, env={**environ})
    except (OSError, subprocess.SubprocessError) as error:
        said = getattr(error, "stderr", None) or error
        log.warning("scontrol requeue %s failed: run it yourself. %s", job, str(said).strip())
        return False
    return True
