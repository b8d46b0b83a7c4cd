"""Pass information between the attempts of a run, and to its launcher, through the launcher's store."""

from __future__ import annotations

import logging
import os
import time
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING

from trainer.distributed.rendezvous import attempt
from trainer.launchers.ray_store import ray_store

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

log = logging.getLogger("trainer")

STOPPED = "trainer/stopped"
"""Key in the launcher's store: the exit code of processes that have stopped by agreement, and are not restarted."""
BEGUN = "trainer/begun"
"""Key in the launcher's store: a fit has begun in this attempt, so that exit codes tell how the processes stopped."""
LAUNCHED = "TRAINER_LAUNCHED"
"""Environment variable in processes that our launcher starts: the launcher's process id."""
_AGREED = "trainer/agreed"
_TIMEOUT = timedelta(seconds=30)


def agent_store(timeout: timedelta = _TIMEOUT) -> Store | None:
    """Return the store of the launcher or of torchrun's agent, which outlives the processes; None without one."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    from torch._C._distributed_c10d import TCPStore

    return TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False, timeout=timeout)


class RestartRecord:
    """The run directory of one `fit` of the script over all attempts. The n-th fits of all attempts are the same one.

    For rank 0. Does nothing without a store of a launcher or of Ray.
    """

    def __init__(self) -> None:
        self._store = agent_store() or ray_store()
        self.former: str | None = None
        """The run directory of this fit in the former attempt; None in the first."""
        if self._store is not None:
            number = self._store.add(f"trainer/fits/attempt{attempt()}", 1)
            self._key = f"trainer/run_dir/{number}"
            self._store.set(BEGUN, "1")
            if self._store.check([self._key]):
                self.former = self._store.get(self._key).decode()

    def remember(self, run_dir: str) -> None:
        """Record the run directory for the next attempt."""
        if self._store is not None:
            self._store.set(self._key, run_dir)


def restart_safe_exit_code(code: int, store: Store | None) -> int:
    """Return the exit code after an agreed stop, chosen so that the processes are not restarted.

    torchrun restarts its processes whenever one of them exits with a code other than 0, and does not pass their codes
    on; so under `torchrun --max-restarts` an agreed stop exits with 0.

    Args:
        code: the intended exit code; 0 for a run that is complete.
        store: shared by the processes of the run; None for a single one.
    """
    if code == 0:
        return 0
    if store is not None:
        store.set(_AGREED, "1")
    if os.environ.get(LAUNCHED):
        launcher = agent_store()
        if launcher is not None:
            launcher.set(STOPPED, str(code))
        return code
    if not exit_code_is_free():
        if os.environ["RANK"] == "0":
            log.info("exit code 0 instead of %d: with another one torchrun --max-restarts would start again", code)
        return 0
    return code


def exit_code_is_free() -> bool:
    """Return False under `torchrun --max-restarts`, which starts again after any exit code other than 0."""
    return bool(os.environ.get(LAUNCHED)) or not max_restarts()


def exit_barrier(store: Store, world_size: int) -> None:
    """Wait at the end of a process, after an agreed stop, for the other processes, for ten seconds at most.

    The launcher ends the others as soon as one process exits with a code other than 0, even in the middle of the
    script.
    """
    with suppress(Exception):  # the process that hosts the store may have left first
        if store.check([_AGREED]):
            left, deadline = store.add(f"{_AGREED}/left", 1), time.monotonic() + 10.0
            while left < world_size and time.monotonic() < deadline:
                time.sleep(0.02)
                left = store.add(f"{_AGREED}/left", 0)


def max_restarts() -> int:
    """Return how often the launcher restarts this process."""
    return int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0"))
