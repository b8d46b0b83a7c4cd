"""Find out before a run, in forks, the order of a user's sampler, and whether a resumed run gets the same order."""

from __future__ import annotations

import gc
import hashlib
import os
import select
import signal
import sys
import time
import warnings
from collections.abc import Callable
from itertools import chain, islice
from typing import Any

import torch

from trainer.data.batch_sampler import DistributedBatchSampler
from trainer.distributed.encoding import from_bytes, to_bytes

_MOST_ITEMS = 20_000
_LONGEST_S = 10.0


def resumes_exactly(sampler: DistributedBatchSampler) -> bool | None:
    """Return False if a run that is resumed in its second epoch gets another order than one that was not interrupted.

    A sampler may keep state anywhere, so its items are compared, not its attributes; of a large sampler only the first.
    Forked copies of this process do the work, so that its objects stay unchanged.

    Returns:
        None if the answer is unknown: the sampler is slow, or fails, as it will in the run.
    """
    if sampler.random_access is not None:
        return None
    unbroken = _in_forked_process(lambda: _unbroken(sampler))
    if unbroken is None:
        return None
    resumed = _in_forked_process(lambda: _resumed(sampler, unbroken["state"]))
    return None if resumed is None else bool(unbroken["order"] == resumed["order"])


def order_of(sampler: DistributedBatchSampler) -> str | None:
    """Return a fingerprint of the order of the first epoch, for comparing two processes.

    Of a large sampler only the first items count. None as in `resumes_exactly`.
    """
    if sampler.random_access is not None:
        return None
    found = _in_forked_process(lambda: {"order": _digest(_order(sampler, 0, 0))[:8]})
    return None if found is None else str(found["order"])


def _unbroken(sampler: DistributedBatchSampler) -> dict[str, Any]:
    """Return the order of the second epoch, and the state that a checkpoint within it has."""
    _order(sampler, 0, 0)
    order = _order(sampler, 1, 0)
    return {"order": _digest(order[1:]), "state": sampler.state_dict()}


def _resumed(sampler: DistributedBatchSampler, state: dict[str, Any]) -> dict[str, Any]:
    """Return the order of the second epoch of a run that is resumed after its first item."""
    sampler.load_state_dict(state)
    return {"order": _digest(_order(sampler, 1, 1))}


def _order(sampler: DistributedBatchSampler, epoch: int, start: int) -> list[Any]:
    items = chain.from_iterable(sampler.iterate_sampler(epoch, start, 1))
    return list(islice(items, _MOST_ITEMS - start))


def _digest(order: list[Any]) -> str:
    text = repr(order)
    if " at 0x" in text:
        raise ValueError("objects with an address in their text cannot be compared")
    return hashlib.sha256(text.encode()).hexdigest()


def _in_forked_process(work: Callable[[], dict[str, Any]]) -> Any:
    """Do `work` in a forked process, and return its result; None if it fails or takes long."""
    read, write = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of threads that do not exist in the copy
        pid = os.fork()
    if pid == 0:
        _work_and_exit(work, write)
    os.close(write)
    try:
        message = _read(read)
    finally:
        os.close(read)
        os.kill(pid, signal.SIGKILL)  # it has ended, or hangs
        os.waitpid(pid, 0)
    return from_bytes(message) if message else None


def _work_and_exit(work: Callable[[], dict[str, Any]], write: int) -> None:
    try:
        gc.freeze()  # see worker_processes
        torch.set_num_threads(1)  # the threads of a pool do not exist here
        silent = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silent, 1)
        os.dup2(silent, 2)
        sys.stdout = sys.stderr = open(silent, "w")  # noqa: SIM115  # these may write elsewhere
        message = to_bytes(work())
        while message:
            message = message[os.write(write, message) :]
    finally:
        os._exit(0)


def _read(descriptor: int) -> bytes:
    """Return the bytes that come until the other end is closed; none if that takes long."""
    message, deadline = b"", time.monotonic() + _LONGEST_S
    poll = select.poll()  # select.select takes no descriptor above 1023
    poll.register(descriptor, select.POLLIN)
    while poll.poll(1000 * max(0.0, deadline - time.monotonic())):
        part = os.read(descriptor, 1 << 16)
        if not part:
            return message
        message += part
    return b""
