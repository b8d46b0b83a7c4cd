"""Start the workers of DataLoaders so that they end with their parent, and ignore the signals that stop a run."""

from __future__ import annotations

import ctypes
import gc
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from multiprocessing import context as contexts
from multiprocessing.connection import wait
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from typing import Any, ClassVar

import torch.distributed as dist
from torch.utils.data import DataLoader
from torch.utils.data._utils import signal_handling

from trainer.fault_tolerance.signals import children_keep_handlers, ignore_in_this_process, in_main_thread

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_POLL_S = 1.0
_FORK_HANGS = sys.version_info < (3, 11, 8)
"""A forked process hangs if, during the fork, a thread of the process group held the lock of the interpreter's threads.

https://github.com/python/cpython/issues/112275
"""
_BEGIN_S = 5.0
"""Seconds for a forked worker to begin, when `_FORK_HANGS`; twice as many in each further try."""
_TRIES = 4


class _DataWorker(BaseProcess):
    """A worker process that ends when its parent ends, and ignores the signals that stop a run."""

    by_server: ClassVar[bool] = False
    """True: multiprocessing's fork server is the worker's parent, at the request of this process."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._starter = os.getpid()
        # prctl's PDEATHSIG is sent at the end of the thread that started the process, not of its process.
        self._thread_lasts = in_main_thread()

    @classmethod
    def _Popen(cls, process: Any) -> Any:  # noqa: N802  # multiprocessing's name
        with children_keep_handlers():
            popen = super()._Popen(process)  # type: ignore[misc]
        # SIGTERM would have no effect: the worker ignores it.
        popen.terminate = popen.kill
        return popen

    def run(self) -> None:
        leave_signals_to_parent()
        self._end_with_parent()
        # torch installs its own handler for SIGTERM when its part of the worker begins.
        torchs: Any = signal_handling
        torchs._set_worker_signal_handlers = partial(_then_leave_signals, torchs._set_worker_signal_handlers)
        super().run()

    def _end_with_parent(self) -> None:
        """Have this process end when its parent ends, whatever ends the parent."""
        parent, starter = os.getppid(), multiprocessing.parent_process()
        by_kernel = sys.platform.startswith("linux") and (self._thread_lasts or self.by_server)
        if by_kernel:
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if self.by_server or not by_kernel:
            # multiprocessing's fork server ends with the process that asked for this worker, unless another fork of
            # that process holds a copy of the server's pipe.
            wait = starter.join if self.by_server and starter is not None else partial(_wait_for_parent, parent)
            threading.Thread(target=_end_after, args=(wait,), name="end-with-parent", daemon=True).start()
        if not self.by_server and {parent, os.getppid()} != {self._starter}:
            os._exit(1)  # the parent ended before this line


class _Spawned(_DataWorker, contexts.SpawnProcess):
    """A data worker in a new interpreter."""


class _SpawnContext(contexts.SpawnContext):
    Process = _Spawned


class _Forked(_DataWorker, contexts.ForkProcess):
    """A data worker that is a copy of this process."""

    begun: tuple[int, int] | None = None
    """The ends of the pipe through which the worker says that it has begun."""

    @classmethod
    def _Popen(cls, process: Any) -> Any:  # noqa: N802
        for number in range(_TRIES if _FORK_HANGS and dist.is_available() and dist.is_initialized() else 0):
            process.begun = read, write = os.pipe()
            popen = super()._Popen(process)
            os.close(write)
            begun = wait([read], _BEGIN_S * 2**number)
            os.close(read)
            if begun:
                return popen
            popen.kill()
            popen.wait()
        process.begun = None
        return super()._Popen(process)

    def run(self) -> None:
        if self.begun is not None:
            read, write = self.begun
            os.close(read)
            os.write(write, b"1")
            os.close(write)
        # Never collect the parent's garbage here: destroying a copy of a process group or a thread pool, whose
        # threads do not exist in this process, hangs or crashes.
        gc.freeze()
        super().run()


class _ForkContext(contexts.ForkContext):
    Process = _Forked


class _OfServer(_DataWorker, contexts.ForkServerProcess):
    """A data worker that multiprocessing's fork server starts."""

    by_server = True


class _ForkServerContext(contexts.ForkServerContext):
    Process = _OfServer


_CONTEXTS: dict[str, BaseContext] = {
    "spawn": _SpawnContext(),
    "fork": _ForkContext(),
    "forkserver": _ForkServerContext(),
}


def _then_leave_signals(install: Callable[[], None]) -> None:
    install()
    leave_signals_to_parent()


def _worker_context(given: BaseContext | None) -> BaseContext:
    """Return a context for a DataLoader whose workers end with this process; keep a user's kind of context."""
    standard = multiprocessing.get_context() if given is None else given
    method = standard.get_start_method()
    return _CONTEXTS[method] if type(standard) is type(multiprocessing.get_context(method)) else standard


# Module state, because the class DataLoader belongs to the process.
_runs: list[object] = []
_class: Any = DataLoader
_property = _class.multiprocessing_context


def _context_in_a_run(loader: DataLoader[Any]) -> BaseContext | None:
    given: BaseContext | None = _property.fget(loader)
    return _worker_context(given) if loader.num_workers > 0 else given


@contextmanager
def workers_end_with_this_process() -> Iterator[None]:
    """Within the block, have the workers of all DataLoaders end with this process, and not by signals.

    This includes loaders that the user makes in hooks, in iterables or in libraries. Each iterator of a DataLoader or a
    StatefulDataLoader reads the loader's `multiprocessing_context` when it starts its workers, and nothing else does.
    """
    _runs.append(None)
    _class.multiprocessing_context = property(_context_in_a_run, _property.fset)
    try:
        yield
    finally:
        _runs.pop()
        if not _runs:
            _class.multiprocessing_context = _property


def data_loaders_in(loader: Any) -> list[DataLoader[Any]]:
    """Return the DataLoaders in an iterable: itself, its attributes, and the entries of lists and dicts among these."""
    found = [loader, *getattr(loader, "__dict__", {}).values()]
    for one in [*found]:
        if isinstance(one, Mapping):
            found += one.values()
        elif isinstance(one, (list, tuple)):
            found += one
    return list({id(one): one for one in found if isinstance(one, DataLoader)}.values())


def leave_signals_to_parent() -> None:
    """Ignore the signals that stop a run, in this process but not in its children.

    Terminals, torchrun and Slurm send these signals to data workers as well, but the last step still needs the workers.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        ignore_in_this_process(number)


def _wait_for_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_POLL_S)


def _end_after(wait: Callable[[], None]) -> None:
    wait()
    os._exit(1)
