"""Install and remove the signal handlers of a run, so that processes forked by user code do not inherit them."""

from __future__ import annotations

import atexit
import logging
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

log = logging.getLogger("trainer")

EXIT_RETRY = 75
"""Exit code (EX_TEMPFAIL of sysexits.h) of a run that continues when the same command is started again."""
Handler = Callable[[int, FrameType | None], Any]


@dataclass
class _Signal:
    """A signal for which this module has installed handlers."""

    before: Any
    """The signal's action before the first of these handlers; children get it back."""
    handlers: list[Handler] = field(default_factory=list)


# Module state, because signal actions belong to the process.
_signals: dict[int, _Signal] = {}
_ignored: dict[int, Any] = {}
"""The actions that `keep_exit_code` has replaced, for a process that continues, such as a notebook."""
_wakeup: list[int] = []
"""The file descriptor that `install_wakeup_fd` has installed."""


class _Fork(threading.local):
    """The fork that this thread is about to make."""

    mask: set[int] | None = None
    """The thread's signal mask before the fork."""
    keeps_handlers = False
    """The child is a data worker, which ignores the signals that end a run."""


_fork = _Fork()


def in_main_thread() -> bool:
    """Return True if this thread may install signal handlers."""
    return threading.current_thread() is threading.main_thread()


def install_handler(number: int, handler: Handler) -> Any:
    """Install `handler` until `restore_handler`, in this process only: forked processes get the former action.

    Call it in the main thread.

    Returns:
        The former action; None if nothing was installed, because the signal is ignored or its action is not Python's.
    """
    _undo_keep_exit_code(number)
    before = signal.getsignal(number)
    if before is signal.SIG_IGN or before is None:
        return None
    _signals.setdefault(number, _Signal(before)).handlers.append(handler)
    signal.signal(number, handler)
    return before


def restore_handler(number: int, handler: Handler, before: Any) -> None:
    """Undo `install_handler`, which returned `before`; a handler that other code has installed since then stays."""
    if signal.getsignal(number) == handler:
        signal.signal(number, before)
    _signals[number].handlers.remove(handler)
    if not _signals[number].handlers:
        del _signals[number]


def install_wakeup_fd(descriptor: int) -> bool:
    """Have Python write the number of each signal to `descriptor` at once, in this process but not in forked ones.

    Call it in the main thread.

    Returns:
        False if other code, such as asyncio, has a wakeup descriptor already; then nothing changes.
    """
    former = signal.set_wakeup_fd(descriptor, warn_on_full_buffer=False)
    if former != -1:
        signal.set_wakeup_fd(former)
        return False
    _wakeup.append(descriptor)
    return True


def restore_wakeup_fd() -> None:
    """Undo `install_wakeup_fd`, unless other code has installed a descriptor since then."""
    descriptor = _wakeup.pop()
    former = signal.set_wakeup_fd(-1)
    if former != descriptor:
        signal.set_wakeup_fd(former)


def ignore_in_this_process(number: int) -> None:
    """Ignore a signal in this process, but not in processes that it starts."""
    # Programs that are executed inherit SIG_IGN, but no handler.
    if signal.getsignal(number) is not signal.SIG_IGN:
        former = _signals.setdefault(number, _Signal(signal.getsignal(number) or signal.SIG_DFL))
        former.handlers.append(_ignore)
        signal.signal(number, _ignore)


def _ignore(number: int, frame: FrameType | None) -> None:
    """Do nothing."""


# -- before and after a run --------------------------------------------------------------------------------------------


def end_by_sigusr1_with_retry() -> None:
    """Let SIGUSR1 end this process with exit code 75 outside of a run, too.

    Clusters send SIGUSR1 before the time limit. Does nothing outside of the main thread, or if the signal has another
    action already.
    """
    if in_main_thread():
        _undo_keep_exit_code(signal.SIGUSR1)
        if signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL:
            install_handler(signal.SIGUSR1, _end_with_retry)
            atexit.register(_keep_exit_code_at_exit)


def ignore_sigusr1_if(done: Callable[[], bool]) -> None:
    """Let SIGUSR1 change nothing outside of a run if `done()` is true; called after `end_by_sigusr1_with_retry`.

    For a program whose work is a single run: when that is complete, there is nothing to start again for.
    """

    def receive(number: int, frame: FrameType | None) -> None:
        if done():
            log.info("SIGUSR1 changes nothing: there is nothing left to do.")
        else:
            _end_with_retry(number, frame)

    if in_main_thread() and signal.getsignal(signal.SIGUSR1) is _end_with_retry:
        install_handler(signal.SIGUSR1, receive)


def keep_exit_code() -> None:
    """Ignore SIGUSR1, because this process is about to end and the signal would change its exit code.

    If the process does not end, as in a notebook, the next run handles the signal again.
    """
    if in_main_thread():
        # SIG_IGN, because Python removes its handlers long before the process has ended.
        former = signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        if former is not signal.SIG_IGN:
            known = _signals.get(signal.SIGUSR1)
            _ignored[signal.SIGUSR1] = former if known is None else known.before


def _keep_exit_code_at_exit() -> None:
    """Keep the exit code of a program that ends, before Python takes away the handlers and the signal kills again."""
    known = _signals.get(signal.SIGUSR1)
    if known is not None and signal.getsignal(signal.SIGUSR1) in known.handlers:
        keep_exit_code()


def _undo_keep_exit_code(number: int) -> None:
    """Undo `keep_exit_code`."""
    former = _ignored.pop(number, None)
    if former is not None and signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, former)


def _end_with_retry(number: int, frame: FrameType | None) -> None:
    # Imported here to keep the start of the command line fast.
    from trainer.distributed.environment import detect_environment
    from trainer.distributed.slurm import requeue

    keep_exit_code()
    if detect_environment().rank == 0:
        requeue()
    raise SystemExit(EXIT_RETRY)


# -- children ----------------------------------------------------------------------------------------------------------


@contextmanager
def children_keep_handlers() -> Iterator[None]:
    """Have processes that this thread forks within the block ignore the signals that end a run."""
    _fork.keeps_handlers = True
    try:
        yield
    finally:
        _fork.keeps_handlers = False


def end_as_child(number: int, pid: int) -> bool:
    """In a forked child of process `pid`, take the signal's default action; in `pid` itself only return False.

    For a handler of a run that a child still calls, because a library has wrapped it into another handler.
    """
    if os.getpid() == pid:
        return False
    signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    os.kill(os.getpid(), number)
    return True


def _before_fork() -> None:
    """Block the signals: the child would lose one that arrived before `_in_child` has removed the handlers there."""
    _fork.mask = signal.pthread_sigmask(signal.SIG_BLOCK, tuple(_signals)) if _signals else None


def _in_parent() -> None:
    if _fork.mask is not None:
        signal.pthread_sigmask(signal.SIG_SETMASK, _fork.mask)


def _in_child() -> None:
    keeps, _fork.keeps_handlers = _fork.keeps_handlers, False
    for number, known in list(_signals.items()):
        if signal.getsignal(number) in known.handlers:
            signal.signal(number, _ignore if keeps else known.before)
        known.handlers = [_ignore]
    if not keeps:
        _signals.clear()
    if _wakeup:
        restore_wakeup_fd()
    _in_parent()


os.register_at_fork(before=_before_fork, after_in_parent=_in_parent, after_in_child=_in_child)
