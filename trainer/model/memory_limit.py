"""The memory of this process: what it may use, a limit for a block, and the errors that say that it was too little."""

from __future__ import annotations

import errno
import gc
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from trainer.distributed.environment import detect_environment

_MESSAGES = ("out of memory", "can't allocate memory", "not enough memory", "Cannot allocate memory", "bad allocation")


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether an error, or one that it was raised from, says that the memory of a device or of the host is used up."""
    while error is not None:
        texts = str(error) if isinstance(error, RuntimeError) else ""
        is_lack = isinstance(error, (torch.OutOfMemoryError, MemoryError)) or getattr(error, "errno", 0) == errno.ENOMEM
        if is_lack or any(text in texts for text in _MESSAGES):
            return True
        error = error.__cause__ or error.__context__
    return False


def free_memory() -> int | None:
    """Return the bytes of host memory that are free on the machine and in its container; None: unknown."""
    found = []
    try:
        lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        found.append(int(lines["MemAvailable"].split()[0]) * 1024)
    except (OSError, KeyError, ValueError):
        pass
    try:
        limit, used = (Path(f"/sys/fs/cgroup/memory.{name}").read_text().strip() for name in ("max", "current"))
        found.append(int(limit) - int(used))
    except (OSError, ValueError):
        pass
    return min(found, default=None)


def memory_of_trial() -> int | None:
    """Return the bytes of host memory that a trial may take on each process: nine tenths of all that is free, split
    among the processes; None: unknown."""
    free = free_memory()
    return None if free is None else free * 9 // 10 // detect_environment().local_world_size


def release_memory() -> None:
    """Free the memory that a trial has left behind."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


@contextmanager
def limited_memory(more: int | None) -> Iterator[None]:
    """Have allocations fail in the block when the process has taken `more` bytes than it has now; None: no limit.

    The operating system would end the process, where an error can be caught.
    """
    if more is None:
        yield
        return
    now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    limits = [limit for limit in (soft, hard) if limit != resource.RLIM_INFINITY]
    resource.setrlimit(resource.RLIMIT_AS, (min([now + max(more, 0), *limits]), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
