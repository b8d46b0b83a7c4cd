"""Stopping together: a signal or a wish of one process ends all of them after the same step."""

from __future__ import annotations

import atexit
import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import TYPE_CHECKING, Any

from trainer.distributed.rendezvous import attempt
from trainer.errors import TrainerError
from trainer.fault_tolerance.failure import first_failure, follow_failure
from trainer.fault_tolerance.process_monitor import LocalProcessMonitor, mark_done

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

_SIGNALS = ("SIGINT", "SIGTERM", "SIGUSR1")
DEADLINE = "deadline"
"""The reason of a run that stopped because its deadline is near."""
EXIT_RETRY = 75
"""EX_TEMPFAIL of sysexits.h: the same command, started again, goes on."""
_EXIT_CODES = {"SIGINT": 130, "SIGTERM": 143, "SIGUSR1": EXIT_RETRY, DEADLINE: EXIT_RETRY}
_END_PATIENCE_S = 1800.0
"""How long the first process at the end of a run waits for the last: as long as a collective would."""
_SHUTDOWN_TIMEOUT_S = 10.0
"""How long rank 0, which may hold the store, waits until all have read the last decision."""
_STUCK_PATIENCE_S = 5.0
"""How long a process may stay in a step (in a collective, most likely) after it is known that another has failed."""


def exit_code(reason: str | None) -> int:
    """What a process that stopped for this reason exits with; 0 when the run has done what it was asked for.

    130 for SIGINT, 143 for SIGTERM. 75 for SIGUSR1, by which a cluster warns that the time is running out, and for a
    deadline: there is more to do, start the same command again.
    """
    return _EXIT_CODES.get(reason or "", 0)


class StopCoordinator:
    """Agrees on a common boundary at which all processes stop, at no cost until somebody asks for it.

    Every process passes the same boundaries in the same order: it calls `check` any number of times per step,
    wherever the run could be left. A thread looks into the store four times a second. Once it sees a request, it
    publishes the first boundary at which this process can still stop (the one it stands at, or the next), and the
    main thread does not go past that boundary before all processes have published theirs. The latest of them is
    where all stop. Because the thread publishes even while the main thread sits in a collective, no process waits
    for one that waits for it.

    Args:
        store: shared by all processes; None with a single one.
        rank, world_size: of this process. All processes make the same number of switches, in the same order.
        interval: seconds between two looks into the store.
        timeout: seconds to wait for the answer of another process's thread.
    """

    def __init__(
        self,
        store: Store | None,
        rank: int = 0,
        world_size: int = 1,
        interval: float = 0.25,
        timeout: float = 60.0,
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self.store = _own_keys(store, rank) if store is not None and world_size > 1 else None
        """The keys of this run alone: also what `report_failure` takes."""
        self._interval = interval
        self._timeout = timeout
        # While somebody waits. Slower with many processes, since they all ask one store.
        self._fast_interval = max(0.005, 0.0005 * world_size)
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        # Set by the signal handler without the lock, which the interrupted code may hold.
        self._wanted: str | None = None
        self._alert = False
        # All the others change under the lock.
        self._boundary = 0  # how many boundaries the main thread has come to
        self._earliest: int | None = None
        self._published = False
        self._agreed: int | None = None
        self._reason: str | None = None
        self._waiting_since: float | None = None
        self._ending = False
        self._ended = False
        self._error: Exception | None = None
        self._closed = False
        self._leaving = False
        self._interrupts = 0
        self._pid = os.getpid()
        self._thread: threading.Thread | None = None
        self._handlers: dict[signal.Signals, Any] = {}

    # -- signals -----------------------------------------------------------------------------------

    def install(self, signals: bool = True) -> None:
        """Start to listen for the other processes, and take the signals over unless `signals` is False.

        SIGINT, SIGTERM and SIGUSR1, in the main thread only; what was ignored stays ignored. When another process fails
        and this one does not come out of its step within five seconds, it is ended with exit code 1.
        """
        if signals and threading.current_thread() is threading.main_thread():
            for number in (getattr(signal, name) for name in _SIGNALS if hasattr(signal, name)):
                before = signal.getsignal(number)
                # None is a handler that is not Python's and could not be put back.
                if before is not signal.SIG_IGN and before is not None:
                    self._handlers[number] = before
                    signal.signal(number, self._on_signal)
        if self.store is not None and self._thread is None:
            # Its own connection: a client serves one caller at a time. (torch's stubs do not know `clone`.)
            store: Any = self.store
            self._thread = threading.Thread(target=self._listen, args=(store.clone(),), name="stop-switch", daemon=True)
            self._thread.start()
            # A daemon thread that comes back from C++ while Python exits would abort the process.
            atexit.register(self.uninstall)

    def done(self) -> None:
        """Say, when the last collective of a run is over, that this process may leave: it is not missed any more."""
        if self.store is not None:
            with suppress(Exception):  # the process that holds the store may be the first to leave
                mark_done(self.store, self.rank)

    def failed(self) -> None:
        """Say, first of all in an `except`, that this process knows of an error and is on its way out."""
        with self._changed:
            self._leaving = True
            self._changed.notify_all()

    def uninstall(self) -> None:
        """Put the former handlers back and stop listening. Does nothing the second time."""
        for number, before in self._handlers.items():
            if signal.getsignal(number) == self._on_signal:
                signal.signal(number, before)
        self._handlers.clear()
        if self._thread is not None:
            with self._changed:
                self._closed = True
                self._changed.notify_all()
            self._thread.join(timeout=2.0)
            self._thread = None
            atexit.unregister(self.uninstall)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._pid:
            return  # a forked data worker that has inherited the handler
        if number == signal.SIGINT:
            self._interrupts += 1
            if self._interrupts > 1:
                raise KeyboardInterrupt
            if self.rank == 0:
                os.write(2, b"\nStopping after this step; Ctrl-C again stops at once.\n")
        if self._wanted is None:
            self._wanted = signal.Signals(number).name
        self._alert = True

    # -- what the loop calls -----------------------------------------------------------------------

    @property
    def requested(self) -> bool:
        """Whether this process knows of a wish to stop. Differs between processes: decide nothing common by it."""
        return self._alert

    def request(self, reason: str) -> None:
        """Ask all processes to stop at the next common boundary. From any thread, but not from a signal handler.

        When all processes ask between the same two boundaries, they stop at the second of them.
        """
        with self._changed:
            if self._wanted is None:
                self._wanted = reason
            self._alert = True
            self._changed.notify_all()

    @property
    def boundaries(self) -> int:
        """How many boundaries this process has come to."""
        return self._boundary

    def check(self, step: int) -> str | None:
        """The reason to stop here, the same on all processes; None to go on.

        Args:
            step: steps done, for the error message.

        Raises:
            TrainerError: another process failed, or did not answer in time, or the store is gone.
        """
        with self._lock:
            self._boundary += 1
            if not self._alert:
                return None
        return self._decide(step)

    def finish(self, step: int) -> str | None:
        """The last boundary, once per run on every process, when the loop has ended by itself or by a stop.

        Waits for the other processes, so that all know the same about a request that came at the very end, and so
        that none goes away while another still needs its answer.

        Returns:
            The reason if a stop was requested before the last process came here, the same on all; else None.
        """
        if self.store is None:
            return self._wanted
        assert self._thread is not None, "install() comes first"
        with self._changed:
            self._ending = True
            self._changed.notify_all()
            self._wait(lambda: self._ended, step)
            return self._reason

    def _decide(self, step: int) -> str | None:
        if self.store is None:
            return self._wanted
        assert self._thread is not None, "install() comes first"
        with self._changed:
            if self._earliest is None:
                self._earliest = self._boundary
                self._changed.notify_all()
            if self._error is None and self._boundary < self._earliest:
                return None
            self._wait(lambda: self._agreed is not None, step)
            return self._reason if self._agreed is not None and self._boundary >= self._agreed else None

    def _wait(self, ready: Callable[[], bool], step: int) -> None:
        """Until the listening thread has brought it about. The lock is held."""
        self._waiting_since = time.monotonic()
        try:
            while not ready():
                if self._error is not None:
                    raise TrainerError(f"lost the other processes at step {step}: {self._error}")
                self._changed.wait(1.0)
        finally:
            self._waiting_since = None

    # -- the thread that talks to the others -------------------------------------------------------

    def _listen(self, store: Store) -> None:
        siblings = None
        try:
            siblings = LocalProcessMonitor(store, self.rank, self.world_size)
            while not self._closed:
                with self._changed:
                    # Before the look at requests: what was asked before the end is announced before it.
                    ending = self._ending and not self._ended
                siblings.look()
                failed = first_failure(store)
                if failed is not None:
                    self._follow(store, failed)
                    return
                self._announce(store)
                if ending:
                    self._end(store)
                self._pause()
        except Exception as error:
            # A store that is gone disturbs only those who need it: a run that nobody stops goes on.
            with self._changed:
                self._error = error
                self._changed.notify_all()
        finally:
            if siblings is not None:
                siblings.close()

    def _follow(self, store: Store, failed: int) -> None:
        """Rank `failed` did: tell the main thread, and end the process if that is stuck."""
        with self._changed:
            self._alert = True
            self._error = TrainerError(f"rank {failed} failed")
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._leaving or self._closed, _STUCK_PATIENCE_S)
            if self._leaving or self._closed:
                return
        with suppress(Exception):
            follow_failure(store, self.rank)
        os._exit(1)

    def _pause(self) -> None:
        with self._changed:
            busy = (self._alert and self._agreed is None) or (self._ending and not self._ended)
            if not self._closed:
                self._changed.wait(self._fast_interval if busy else self._interval)

    def _announce(self, store: Store) -> None:
        """Tell about a request of this process, answer one of another, look for the answers of all."""
        if self._agreed is not None:
            return
        wanted = self._wanted
        if wanted is None and not self._published:
            if not store.check(["request"]):
                return
            wanted = store.get("request").decode()
        if not self._published:
            reason = store.compare_set("request", "", wanted or "").decode()
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
            self._check_patience(store, keys, self._timeout)

    def _end(self, store: Store) -> None:
        """Say that this process is at the end; rank 0, once all are, fixes what is known about a request."""
        store.set(f"end/{self.rank}", "1")
        keys = [f"end/{rank}" for rank in range(self.world_size)]
        if self.rank == 0 and not store.check(["decision"]):
            if not store.check(keys):
                self._check_patience(store, keys, _END_PATIENCE_S)
                return
            store.set("decision", store.get("request").decode() if store.check(["request"]) else "")
        if not store.check(["decision"]):
            self._check_patience(store, keys, _END_PATIENCE_S)
            return
        decision = store.get("decision").decode()
        read = store.add("read", 1)
        deadline = time.monotonic() + _SHUTDOWN_TIMEOUT_S
        while self.rank == 0 and read < self.world_size and time.monotonic() < deadline and not self._closed:
            time.sleep(self._fast_interval)
            read = store.add("read", 0)
        with self._changed:
            self._ended = True
            self._reason = decision or None
            self._changed.notify_all()

    def _check_patience(self, store: Store, keys: list[str], patience: float) -> None:
        since = self._waiting_since
        if since is not None and time.monotonic() - since > patience:
            silent = [str(rank) for rank, key in enumerate(keys) if not store.check([key])]
            raise TrainerError(f"no answer from rank {', '.join(silent)} in {patience:.0f} s")


def ignore_signals_in_worker() -> None:
    """Call this in every DataLoader worker, first of all: the signals that stop a run are for the main process.

    A terminal, and torchrun, send them to data workers as well; torch's own handler would end the worker, and with
    it the step that is to be finished. A worker still ends when its own main process terminates it.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if hasattr(signal, "SIGUSR1"):
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    if not hasattr(signal, "sigwaitinfo"):
        return
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    parent = os.getppid()

    def obey_parent() -> None:
        while signal.sigwaitinfo({signal.SIGTERM}).si_pid != parent:
            pass
        os._exit(0)

    threading.Thread(target=obey_parent, name="sigterm", daemon=True).start()


def _own_keys(store: Store, rank: int) -> Store:
    """The part of the store that belongs to this switch: the n-th of every process share one."""
    from torch.distributed.distributed_c10d import PrefixStore  # not there in a torch built without distributed

    common = PrefixStore(f"trainer/attempt{attempt()}", store)
    number = common.add(f"switches/{rank}", 1)
    return PrefixStore(f"run{number}", common)
