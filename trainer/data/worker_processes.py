"""Start the workers of DataLoaders so that they end with their parent, and not by the signals that stop a run."""

from __future__ import annotations

import ctypes
import gc
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing import context as contexts
from multiprocessing.connection import wait
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from typing import Any, ClassVar

import torch.distributed as dist
from torch.utils.data import DataLoader

from trainer.arguments import is_mapping
from trainer.fault_tolerance.signals import children_keep_handlers, ignore_in_this_process, in_main_thread

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_POLL_S = 1.0
_FORK_HANGS = sys.version_info < (3, 10, 15) or (3, 11) <= sys.version_info < (3, 11, 8)
"""A forked process hangs if, at that moment, a thread of the process group held the lock of the interpreter's threads.

https://github.com/python/cpython/issues/112275
"""
_BEGIN_S = 5.0
"""Seconds in which a forked worker has to begin, when `_FORK_HANGS`; twice as many in each further try."""
_TRIES = 4


class _DataWorker(BaseProcess):
    """A worker process that ends when its parent ends, and ignores the signals that stop a run."""

    by_server: ClassVar[bool] = False
    """True if multiprocessing's fork server is the parent."""

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
        super().run()

    def _end_with_parent(self) -> None:
        """Have this process end when its parent ends, whatever ends the parent."""
        parent, starter = os.getppid(), multiprocessing.parent_process()
        if self.by_server:
            # The parent is the fork server, which outlives the process that asked for this worker.
            assert starter is not None
            threading.Thread(target=_end_after, args=(starter.join,), name="end-with-parent", daemon=True).start()
        elif sys.platform.startswith("linux") and self._thread_lasts:
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        else:
            wait = partial(_wait_for_parent, parent)
            threading.Thread(target=_end_after, args=(wait,), name="end-with-parent", daemon=True).start()
        if not self.by_server and {parent, os.getppid()} != {self._starter}:
            os._exit(1)  # the parent ended before this line


class _Spawned(_DataWorker, contexts.SpawnProcess):
    """A data worker in a new interpreter."""


class _SpawnContext(contexts.SpawnContext):
    Process = _Spawned


_CONTEXTS: dict[str, BaseContext] = {"spawn": _SpawnContext()}

if "fork" in multiprocessing.get_all_start_methods():

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

    _CONTEXTS |= {"fork": _ForkContext(), "forkserver": _ForkServerContext()}


def worker_context(given: BaseContext | None) -> BaseContext:
    """Return a `multiprocessing_context` for a DataLoader whose workers end with this process.

    Args:
        given: the context that the user gave; returned unchanged if it is of a class of the user's own.
    """
    standard = multiprocessing.get_context() if given is None else given
    known = type(multiprocessing.get_context(standard.get_start_method()))
    return _CONTEXTS[standard.get_start_method()] if type(standard) is known else standard


class WorkerInit:
    """A `worker_init_fn` that ignores the signals that stop a run, then calls the user's `worker_init_fn`."""

    def __init__(self, users: Callable[[int], None] | None) -> None:
        self.users = users

    def __call__(self, worker_id: int) -> None:
        if isinstance(multiprocessing.current_process(), _DataWorker):
            leave_signals_to_parent()  # again, since torch has installed a handler for SIGTERM
        if self.users is not None:
            self.users(worker_id)


class WorkerOptions:
    """Changes the DataLoaders inside a user's loader so that their workers end with this process, until `restore`."""

    def __init__(self, loader: Any) -> None:
        self._changed = [
            (one, one.multiprocessing_context, one.worker_init_fn)
            for one in data_loaders_in(loader)
            if one.num_workers > 0
        ]
        for one, context, users in self._changed:
            one.multiprocessing_context, one.worker_init_fn = worker_context(context), WorkerInit(users)

    def restore(self) -> None:
        """Restore the DataLoaders' own options. Does nothing the second time."""
        for one, context, users in self._changed:
            one.multiprocessing_context, one.worker_init_fn = context, users
        self._changed.clear()


def data_loaders_in(loader: Any) -> Iterator[DataLoader[Any]]:
    """Yield the DataLoaders in an iterable: itself, its attributes, and the entries of lists and dicts among these."""
    seen = set()
    for one in (loader, *getattr(loader, "__dict__", {}).values()):
        for part in one.values() if is_mapping(one) else one if isinstance(one, (list, tuple)) else (one,):
            if isinstance(part, DataLoader) and id(part) not in seen:
                seen.add(id(part))
                yield part


def leave_signals_to_parent() -> None:
    """Ignore the signals that stop a run, in this process but not in its children.

    Terminals, torchrun and Slurm send these signals to data workers as well, whose end would break the last step.
    """
    for name in ("SIGINT", "SIGTERM", "SIGUSR1"):
        if hasattr(signal, name):
            ignore_in_this_process(getattr(signal, name))


def _wait_for_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_POLL_S)


def _end_after(wait: Callable[[], None]) -> None:
    wait()
    os._exit(1)
