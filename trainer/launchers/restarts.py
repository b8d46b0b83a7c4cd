"""Restarts: what the processes of one attempt leave in the launcher's store for the next one, and for the launcher."""

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
"""Key in the launcher's store: the processes have stopped by agreement with this exit code, and are not restarted."""
LAUNCHED = "TRAINER_LAUNCHED"
"""Environment variable in the processes that our launcher starts: its process id."""
_TOGETHER = "trainer/together"
_TIMEOUT = timedelta(seconds=30)


def agent_store(timeout: timedelta = _TIMEOUT) -> Store | None:
    """The store that the launcher or torchrun's agent holds, which outlives the processes; None without one."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    from torch._C._distributed_c10d import TCPStore

    return TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False, timeout=timeout)


class RestartRecord:
    """One `fit` of the script over all attempts: where it writes. The n-th fits of all attempts are the same one.

    For rank 0. Without a launcher's store, or Ray's, it does nothing.
    """

    def __init__(self) -> None:
        self._store = agent_store() or ray_store()
        self.former: str | None = None
        """The run directory of this fit in a former attempt; None in the first."""
        if self._store is not None:
            number = self._store.add(f"trainer/fits/attempt{attempt()}", 1)
            self._key = f"trainer/run_dir/{number}"
            if self._store.check([self._key]):
                self.former = self._store.get(self._key).decode()

    def remember(self, run_dir: str) -> None:
        """For the next attempt."""
        if self._store is not None:
            self._store.set(self._key, run_dir)


def restart_safe_exit_code(code: int, store: Store | None) -> int:
    """The code with which to exit after an agreed stop, so that nobody starts the processes again: 0 means done.

    torchrun starts its processes again whenever one of them exits with another code than 0, and its own exit code
    carries nothing of theirs; so under `torchrun --max-restarts` an agreed stop exits with 0.

    Args:
        code: what the user is to see; 0 for a run that is done.
        store: shared by the processes of the run; None for a single one.
    """
    if code == 0:
        return 0
    if store is not None:
        store.set(_TOGETHER, "1")
    if os.environ.get(LAUNCHED):
        launcher = agent_store()
        if launcher is not None:
            launcher.set(STOPPED, str(code))
        return code
    if max_restarts():
        if os.environ["RANK"] == "0":
            log.info("exit code 0 instead of %d: with another one torchrun --max-restarts would start again", code)
        return 0
    return code


def exit_barrier(store: Store, world_size: int) -> None:
    """At the very end of a process, after an agreed stop: wait for the others, for ten seconds at most.

    The first process that exits with another code than 0 has the others ended, in the middle of what the script still
    does.
    """
    with suppress(Exception):  # the process that holds the store may be the first to leave
        if store.check([_TOGETHER]):
            left, deadline = store.add(f"{_TOGETHER}/left", 1), time.monotonic() + 10.0
            while left < world_size and time.monotonic() < deadline:
                time.sleep(0.02)
                left = store.add(f"{_TOGETHER}/left", 0)


def max_restarts() -> int:
    """How often whoever started this process starts it again."""
    return int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0"))
