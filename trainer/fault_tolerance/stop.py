"""Stop all processes after the same step, on a signal or a request of one of them."""

from __future__ import annotations

import atexit
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from types import FrameType
from typing import TYPE_CHECKING, Any

from trainer.distributed.rendezvous import attempt
from trainer.errors import TrainerError
from trainer.fault_tolerance.failure import first_failure, follow_failure
from trainer.fault_tolerance.process_monitor import LocalProcessMonitor, mark_done
from trainer.fault_tolerance.signals import EXIT_RETRY, end_as_child, in_main_thread, install_handler, restore_handler
from trainer.fault_tolerance.third_sigterm import SigtermWatch

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

log = logging.getLogger("trainer")

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
DEADLINE = "deadline"
"""The reason for stopping because the deadline is near."""
_EXIT_CODES = {"SIGINT": 130, "SIGTERM": 143, "SIGUSR1": EXIT_RETRY, DEADLINE: EXIT_RETRY}
_STUCK_TIMEOUT_S = 5.0
"""Seconds that a process may stay in a step (most likely in a collective) after another has failed."""


def exit_code(reason: str | None) -> int:
    """Return the exit code of a process that stopped for this reason; 0 for a run that is complete.

    130 for SIGINT, 143 for SIGTERM. 75 for SIGUSR1, a cluster's warning that the time is running out, and for a
    deadline: start the same command again to continue.
    """
    return _EXIT_CODES.get(reason or "", 0)


class StopCoordinator:
    """Agree on a common boundary for all processes to stop at, at no cost until one of them asks for it.

    Every process passes the same boundaries in the same order: it calls `check` any number of times per step,
    wherever the run can be left. A thread polls the store four times a second. When it sees a request, it publishes the
    first boundary where this process can still stop (the current one or the next), and the main thread does not go
    past that boundary before all processes have published theirs. All stop at the latest of them. The thread publishes
    even while the main thread waits in a collective, so there is no deadlock.

    Args:
        store: shared by all processes; None with a single one.
        rank, world_size: of this process. All processes make the same number of coordinators, in the same order.
        interval: seconds between two polls of the store.
        timeout: seconds to wait for the answer of another process's thread.
    """

    def __init__(
        self, store: Store | None, rank: int = 0, world_size: int = 1, interval: float = 0.25, timeout: float = 60.0
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self.store = _own_keys(store, rank) if store is not None and world_size > 1 else None
        """The store with the keys of this run only; also for `report_failure`."""
        self._interval = interval
        self._timeout = timeout
        # While a process waits. Slower with many processes, since they all poll one store.
        self._fast_interval = max(0.005, 0.0005 * world_size)
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        # Set by the signal handler without the lock, which the interrupted code may hold.
        self.wanted: str | None = None
        """The reason for which this process has asked for a stop."""
        self._alert = False
        self._boundary = 0  # number of boundaries that the main thread has reached; see `check`
        # The other attributes change under the lock.
        self._earliest: int | None = None
        self._published = False
        self._agreed: int | None = None
        self._reason: str | None = None
        self._waiting_since: float | None = None
        self._error: Exception | None = None
        self._closed = False
        self._leaving = False
        self._interrupts = 0
        self._received: int | None = None
        self._thread: threading.Thread | None = None
        self._handlers: dict[signal.Signals, Any] = {}
        self._pid = os.getpid()
        self._sigterm_watch = SigtermWatch(rank)

    # -- signals -----------------------------------------------------------------------------------

    def install(self, signals: bool = True, polls: Iterable[Callable[[Store], None]] = ()) -> None:
        """Start to listen to the other processes, and install signal handlers unless `signals` is False.

        Handles SIGINT, SIGTERM and SIGUSR1, in the main thread only; ignored signals stay ignored. The second SIGINT
        raises KeyboardInterrupt, and the third SIGTERM ends the process where it hangs. If another process
        fails and this one does not leave its step within five seconds, it is ended with exit code 1.

        Args:
            polls: called regularly by the listening thread, with its store.
        """
        if signals and in_main_thread():
            for number in _SIGNALS:
                before = install_handler(number, self._on_signal)
                if before is not None:
                    self._handlers[number] = before
            if signal.SIGTERM in self._handlers:
                self._sigterm_watch.start()
        if self.store is not None and self._thread is None:
            # A separate connection: a client serves one caller at a time. (torch's stubs do not know `clone`.)
            store: Any = self.store
            self._thread = threading.Thread(
                target=self._listen, args=(store.clone(), list(polls)), name="stop-coordinator", daemon=True
            )
            self._thread.start()
            # A daemon thread that returns from C++ while Python exits would abort the process.
            atexit.register(self.uninstall)

    def done(self) -> None:
        """Record, after the last collective of a run, that this process may exit without being reported as lost."""
        if self.store is not None:
            with suppress(Exception):  # the process that hosts the store may have left first
                mark_done(self.store, self.rank)

    def failed(self) -> None:
        """Record, first in an `except` block, that this process is leaving because of an error."""
        with self._changed:
            self._leaving = True
            self._changed.notify_all()

    def uninstall(self) -> None:
        """Restore the former signal handlers and stop listening. Does nothing the second time."""
        self._sigterm_watch.stop()
        for number, before in self._handlers.items():
            restore_handler(number, self._on_signal, before)
        self._handlers.clear()
        if self._thread is not None:
            with self._changed:
                self._closed = True
                self._changed.notify_all()
            self._thread.join(timeout=2.0)
            self._thread = None
            atexit.unregister(self.uninstall)

    def send_again(self, reason: str | None) -> None:
        """Send this process a signal again that came too late for the run, which ended for another `reason`; after
        `uninstall`, so that it acts as outside of a run."""
        number, self._received = self._received, None
        if number is not None and exit_code(reason) == 0:
            # From each process, since the others can no longer be asked whether it was sent to them too.
            who = f"rank {self.rank}: " if self.world_size > 1 else ""
            log.warning("%s%s came when training had ended: it takes effect now.", who, signal.Signals(number).name)
            signal.raise_signal(number)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if end_as_child(number, self._pid):
            return
        if number == signal.SIGINT:
            self._interrupts += 1
            if self._interrupts > 1:
                raise KeyboardInterrupt
            if self.rank == 0:
                os.write(2, b"\nStopping after this step; Ctrl-C again stops at once.\n")
        if self.wanted is None:
            self.wanted = signal.Signals(number).name
        if self._received is None:
            self._received = number
        self._alert = True

    # -- what the loop calls -----------------------------------------------------------------------

    @property
    def requested(self) -> bool:
        """True if this process knows of a request to stop. Differs between processes: base no common decision on it."""
        return self._alert

    def request(self, reason: str) -> None:
        """Ask all processes to stop at the next common boundary. From any thread, but not from a signal handler.

        When all processes ask between the same two boundaries, they stop at the second of them.
        """
        with self._changed:
            if self.wanted is None:
                self.wanted = reason
            self._alert = True
            self._changed.notify_all()

    @property
    def announced(self) -> str | None:
        """The reason for which all processes will stop, as soon as this one knows it; None: there is none yet."""
        return self._reason if self.store is not None else self.wanted

    @property
    def boundaries(self) -> int:
        """Number of boundaries that this process has reached."""
        return self._boundary

    def check(self, step: int) -> str | None:
        """Return the reason to stop here, the same on all processes; None to continue.

        Args:
            step: number of steps done, for the error message.

        Raises:
            TrainerError: another process failed, or did not answer in time, or the store is gone.
        """
        # Without the lock: the boundary is counted before the alert is read, and the listening thread sets the alert
        # before it reads the boundary. So either this boundary sees the alert, or the thread sees this boundary.
        self._boundary += 1
        return self._decide(step) if self._alert else None

    def _decide(self, step: int) -> str | None:
        if self.store is None:
            return self.wanted
        assert self._thread is not None, "install() comes first"
        with self._changed:
            if self._earliest is None:
                self._earliest = self._boundary
                self._changed.notify_all()
            if self._error is None and self._boundary < self._earliest:
                return None
            self._waiting_since = time.monotonic()
            while self._agreed is None:  # until the listening thread has the answers of all
                if self._error is not None:
                    raise TrainerError(f"lost the other processes at step {step}: {self._error}")
                self._changed.wait(1.0)
            self._waiting_since = None
            return self._reason if self._boundary >= self._agreed else None

    # -- the thread that talks to the other processes -------------------------------------------------------

    def _listen(self, store: Store, polls: list[Callable[[Store], None]]) -> None:
        monitor = None
        try:
            monitor = LocalProcessMonitor(store, self.rank, self.world_size)
            while not self._closed:
                monitor.poll()
                failed = first_failure(store)
                if failed is not None:
                    self._follow(store, failed)
                    return
                self._announce(store)
                for poll in polls:
                    poll(store)
                self._pause()
        except Exception as error:
            # A lost store matters only to processes that need it: a run without a request continues.
            with self._changed:
                self._error = error
                self._changed.notify_all()
        finally:
            if monitor is not None:
                monitor.close()

    def _follow(self, store: Store, failed: int) -> None:
        """Notify the main thread that rank `failed` failed, and end the process if the main thread is stuck."""
        with self._changed:
            self._alert = True
            self._error = TrainerError(f"rank {failed} failed")
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._leaving or self._closed, _STUCK_TIMEOUT_S)
            if self._leaving or self._closed:
                return
        with suppress(Exception):
            follow_failure(store, self.rank)
        os._exit(1)

    def _pause(self) -> None:
        with self._changed:
            busy = self._alert and self._agreed is None
            if not self._closed:
                self._changed.wait(self._fast_interval if busy else self._interval)

    def _announce(self, store: Store) -> None:
        """Publish a request of this process, answer one of another, collect the answers of all."""
        if self._agreed is not None:
            return
        if not self._published:
            wanted = self.wanted or (store.get("request").decode() if store.check(["request"]) else None)
            if wanted is None:
                return
            reason = store.compare_set("request", "", wanted).decode()
            with self._changed:
                self._reason = reason
                self._alert = True
                if self._earliest is None:
                    self._earliest = self._boundary + 1
                earliest = self._earliest
            store.set(f"earliest/{self.rank}", str(earliest))
            self._published = True
        keys = [f"earliest/{rank}" for rank in range(self.world_size)]
        if store.check(keys):
            answers = [int(answer) for answer in store.multi_get(keys)]
            with self._changed:
                self._agreed = max(answers)
                self._changed.notify_all()
        else:
            self._check_timeout(store, keys)

    def _check_timeout(self, store: Store, keys: list[str]) -> None:
        since = self._waiting_since
        if since is not None and time.monotonic() - since > self._timeout:
            silent = [str(rank) for rank, key in enumerate(keys) if not store.check([key])]
            raise TrainerError(f"no answer from rank {', '.join(silent)} in {self._timeout:.0f} s")


def _own_keys(store: Store, rank: int) -> Store:
    """Return the part of the store for this coordinator: the n-th coordinators of all processes share one."""
    from torch.distributed.distributed_c10d import PrefixStore  # missing in a torch built without distributed

    common = PrefixStore(f"trainer/attempt{attempt()}", store)
    number = common.add(f"switches/{rank}", 1)
    return PrefixStore(f"run{number}", common)
