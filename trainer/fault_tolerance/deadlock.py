"""Find processes that wait for each other, each in a collective that the other does not call, and end the run."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

from trainer.fault_tolerance.failure import report_deadlock
from trainer.fault_tolerance.flight_recorder import position, waiting_in
from trainer.fault_tolerance.stacks import stacks, where

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

_INTERVAL_S = 1.0
_LONGEST_INTERVAL_S = 60.0
_RECORDS_S = 5.0
"""Seconds to wait for the others' records: they look once a second, and may take two to write."""
SAME_CALLS = (
    "All processes have to make the same calls, at the same place: take them out of `if trainer.is_global_zero`, "
    "`if rank == 0`, and conditions that differ between the processes."
)
"""Advice in messages."""
_WAITING, _FOUND = "deadlock/waiting", "deadlock/found"

CollectiveId = tuple[str, int, str]
"""Group, number in the group, kind."""
Barrier = Literal["calls", "end"]
"""Points that all processes reach together without a collective of torch: a `CollectiveCheck`, the end of training."""


class Waiting(NamedTuple):
    """The collective in which a process waits, and how far the process is in all groups."""

    group: str
    number: int
    kind: str
    words: str
    newest: dict[str, int]
    """Group: the number of the newest collective that the process has begun."""
    in_python: bool
    """True if the main thread can raise an error where it waits."""

    @property
    def collective(self) -> CollectiveId:
        return self.group, self.number, self.kind

    def lacks(self, other: CollectiveId) -> bool:
        """Whether the process has not come to a collective, so that those in it wait for this process."""
        group, number, kind = other
        if (self.group, self.number) == (group, number):
            return self.kind != kind
        return self.newest.get(group, number) < number


class DeadlockWatch:
    """Finds processes of a run that wait for each other.

    A thread calls `poll` regularly. A process whose main thread is for some time in the same collective publishes which
    one that is, and how far it is in each group; rank 0 compares. That one process waits in A and lacks B, and another
    one waits in B and lacks A, cannot be if all make the same calls in the same order, however slow they are. What a
    busy process costs: a look at its innermost frame each second.

    Args:
        rank, world_size: of this process.
    """

    def __init__(self, rank: int, world_size: int) -> None:
        self.found: str | None = None
        """The deadlock in words, if this process is in one."""
        self._rank, self._world_size = rank, world_size
        self._folder: Path | None = None
        # Written by the main thread.
        self._barriers: dict[str, int] = dict.fromkeys(get_args(Barrier), 0)
        self._barrier: tuple[Barrier, int, str] | None = None
        # Used by the polling thread.
        self._next_poll = self._next_read = 0.0
        self._pause = _INTERVAL_S
        self._place: object = None
        self._waiting: Waiting | None = None
        self._published = self._recorded = False
        self._compared: list[bytes] = []

    def keep_records_in(self, folder: Path | None) -> None:
        """Write what torch has recorded of the collectives into this folder, if there is a deadlock."""
        self._folder = folder

    @contextmanager
    def barrier(self, kind: Barrier, words: str) -> Iterator[None]:
        """Wait in this block, in Python, for all processes to come to the same barrier; raise if a deadlock is `found`.

        The n-th barriers of a kind of all processes are the same one. Only for the main thread.

        Args:
            words: what this process does, for the message: "calls save_checkpoint".
        """
        self._barriers[kind] += 1
        self._barrier = (kind, self._barriers[kind], words)
        try:
            yield
        finally:
            self._barrier = None

    # -- the thread that polls -----------------------------------------------------------------------------------------

    def poll(self, store: Store) -> None:
        """Publish a collective in which this process waits, compare on rank 0, and act on what was found."""
        now = time.monotonic()
        if now < self._next_poll:
            return
        self._next_poll = now + _INTERVAL_S
        self._publish(store, now)
        if self._rank == 0 and store.check([_WAITING]):
            self._compare(store)
        if not self._recorded and store.check([_FOUND]):
            self._record(store)
            if self._published:
                self._end(store)

    def _publish(self, store: Store, now: float) -> None:
        place = self._barrier or _innermost_call()
        if place != self._place:
            self._place, self._waiting, self._next_read, self._pause = place, None, now, _INTERVAL_S
            if self._published:
                store.set(_key(self._rank), "")
                self._published = False
            return
        if now < self._next_read:
            return
        before, self._waiting = self._waiting, self._read()
        if self._waiting is None:  # a long computation
            self._pause = min(2 * self._pause, _LONGEST_INTERVAL_S)
            self._next_read = now + self._pause
        elif before is not None and before.collective == self._waiting.collective:
            store.set(_key(self._rank), json.dumps(self._waiting._asdict()))
            store.set(_WAITING, "1")
            self._published = True

    def _read(self) -> Waiting | None:
        barrier, here = self._barrier, position()
        newest = {**here.newest, **self._barriers}
        if barrier is not None:
            name, count, words = barrier
            return Waiting(name, count, name, words, {**newest, name: count}, True)
        if here.waits_in is None:
            return None
        group, number, kind, words = here.waits_in
        return Waiting(group, number, kind, f"waits in {words}, in {where()}", newest, False)

    def _compare(self, store: Any) -> None:
        keys = {rank: _key(rank) for rank in range(self._world_size)}
        if not store.check(list(keys.values())):
            keys = {rank: key for rank, key in keys.items() if store.check([key])}
        texts = store.multi_get(list(keys.values()))
        if texts == self._compared:
            return
        self._compared = texts
        waiting = {rank: Waiting(**json.loads(text)) for rank, text in zip(keys, texts, strict=True) if text}
        pair = sorted(find_pair(waiting), key=lambda rank: (not waiting[rank].in_python, rank))
        if pair:
            each = ", and ".join(f"rank {rank} {waiting[rank].words}" for rank in pair)
            store.set(_FOUND, json.dumps({"rank": pair[0], "words": f"{each}: they wait for each other. {SAME_CALLS}"}))

    def _record(self, store: Store) -> None:
        """Write what torch has recorded of the collectives, and wait until the others have: one of them ends all."""
        self._recorded = True
        waiting_in(self._folder, self._rank)
        store.set(_record_key(self._rank), "1")
        keys = [_record_key(rank) for rank in range(self._world_size)]
        deadline = time.monotonic() + _RECORDS_S
        while not store.check(keys) and time.monotonic() < deadline:
            time.sleep(0.05)

    def _end(self, store: Store) -> None:
        """Have the main thread raise an error if it waits in Python; else end this process, if it is to report."""
        found = json.loads(store.get(_FOUND))
        self.found = found["words"]
        if self._barrier is None and self._rank == found["rank"]:
            report_deadlock(store, self._rank, self._world_size, f"{stacks()}{self.found}\n")
            os._exit(1)


def find_pair(waiting: Mapping[int, Waiting]) -> list[int]:
    """Return two ranks of which each waits for the other, the lowest ones; empty if there are none.

    Longer circles, which take three process groups, end at the watchdog.

    Args:
        waiting: the processes that wait, by rank.
    """
    collectives = {one.collective for one in waiting.values()}
    in_one_without_another = {
        (one.collective, other): rank
        for rank, one in sorted(waiting.items(), reverse=True)
        for other in collectives
        if one.lacks(other)
    }
    pairs = [
        sorted([rank, in_one_without_another[other, one]])
        for (one, other), rank in in_one_without_another.items()
        if (other, one) in in_one_without_another
    ]
    return min(pairs, default=[])


def _innermost_call() -> object:
    """Return what stays the same while the main thread is in one call of C code."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    return None if frame is None else (id(frame), frame.f_lasti)


def _key(rank: int) -> str:
    return f"deadlock/{rank}"


def _record_key(rank: int) -> str:
    return f"deadlock/recorded/{rank}"
