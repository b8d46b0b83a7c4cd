"""Check that all processes make the same collective call, and raise an error that names the calls if they do not."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

from torch._C._distributed_c10d import Store

from trainer.distributed.all_gather import describe_leaves
from trainer.distributed.process_group import SingleProcess
from trainer.errors import ConfigError
from trainer.fault_tolerance.failure import SAME_CALLS, first_failure
from trainer.fault_tolerance.flight_recorder import position
from trainer.fault_tolerance.stacks import innermost_call, users_calls, where
from trainer.fault_tolerance.stop import StopCoordinator

_GRACE_S = 1.0
"""Seconds to wait for the other processes before checking that they have not passed the call."""


class CollectiveCheck:
    """A barrier before a collective that users may call, such as `trainer.save_checkpoint`.

    torch's `monitored_barrier` is similar; this one knows the name of the call on each process. A process that has
    begun more windows of training, or more of the trainer's own collectives, than the waiting one has passed this point
    without the call. One that waits in a collective of torch which the waiting one has not begun will never come.

    Args:
        store: shared by the processes of this run (`StopCoordinator.store`).
        rank, world_size: of this process.
        begun: returns the number of windows and collectives that this process has begun; a larger one when it is
            shutting down.
    """

    def __init__(self, store: Store, rank: int, world_size: int, begun: Callable[[], int]) -> None:
        self._store: Any = store  # torch's stubs do not know all methods
        self._rank, self._world_size = rank, world_size
        self._begun = begun
        self._calls = 0
        # Used by the thread that publishes the progress.
        self._seen: object = None
        self._since = self._next_look = 0.0

    def wait_for_all(self, call: str) -> None:
        """Return when all processes have come to `call`. Only for the main thread.

        Raises:
            ConfigError: another process has gone on without the call, or makes another one.
            RuntimeError: another process has failed.
        """
        self._calls += 1
        self._store.set(self._key(self._rank), call)
        if self._calls > 2:  # all processes have left the call before the last
            for key in (self._rank, *(("answer",) if self._rank == 0 else ())):
                self._store.delete_key(f"collective/{self._calls - 2}/{key}")
        if self._rank == 0:
            everyone = [self._key(rank) for rank in range(self._world_size)]
            self._wait_for(everyone, call, range(self._world_size))
            calls = [other.decode() for other in self._store.multi_get(everyone)]
            other = next((rank for rank, theirs in enumerate(calls) if theirs != call), None)
            answer = "" if other is None else _difference(0, call, other, calls[other])
            self._store.set(self._key("answer"), f"={answer}")  # never empty
        else:
            # One key to wait for: with W processes that compare with each other, a call would take W x W requests.
            self._wait_for([self._key("answer")], call, (0,))
            answer = self._store.get(self._key("answer")).decode()[1:]
        if answer:
            raise ConfigError(answer)

    def _wait_for(self, keys: list[str], call: str, ranks: Iterable[int]) -> None:
        """Return when all keys are in the store; raise if one of the `ranks` cannot come any more."""
        begun, pause = time.monotonic(), 0.001
        while not self._store.check(keys):
            time.sleep(pause)
            pause = min(2 * pause, 0.05)
            if time.monotonic() - begun > _GRACE_S:
                self._require_not_passed(call, ranks)
                pause = 0.25

    def publish_progress(self, store: Store) -> None:
        """Tell waiting processes how far this one is, and which collective of torch it waits in.

        Called regularly by a thread, with its own store. Torch is asked, which takes milliseconds, only while the main
        thread stays in one call.
        """
        seen, now = (self._begun(), innermost_call()), time.monotonic()
        if seen != self._seen:
            self._seen, self._since, self._next_look = seen, now, now + _GRACE_S
            waits_in = None
        elif now < self._next_look:
            return
        else:
            self._next_look = now + (now - self._since)  # a long computation is looked at less and less often
            waits_in = position().waits_in
        store.set(f"collective/begun/{self._rank}", json.dumps([seen[0], where(), waits_in]))

    def _require_not_passed(self, call: str, ranks: Iterable[int]) -> None:
        if first_failure(self._store) is not None:
            raise RuntimeError(f"{_named(call)} was not finished, because another process failed")
        newest = position().newest
        for rank in ranks:
            key = f"collective/begun/{rank}"
            if not self._store.check([key]):
                continue
            begun, place, waits_in = json.loads(self._store.get(key))
            if begun > self._begun():
                reason = f"has gone on without, to {place}"
            elif waits_in is not None and newest.get(waits_in[0], waits_in[1]) < waits_in[1]:
                reason = f"waits in {waits_in[2]}, in {place}: they wait for each other"
            else:
                continue
            # This check comes after the progress was read: the process may have come in between.
            if not self._store.check([self._key(rank)]):
                # If user code catches the error, the next call of this process is also the others' next one.
                self._store.delete_key(self._key(self._rank))
                self._calls -= 1
                raise ConfigError(f"rank {self._rank} calls {_named(call)}, and rank {rank} {reason}. {SAME_CALLS}")

    def _key(self, name: int | str) -> str:
        return f"collective/{self._calls}/{name}"


def listen(processes: SingleProcess, begun: Callable[[], int], signals: bool) -> StopCoordinator:
    """Listen for stops and failures of the processes, and have `processes.wait_for_all` check collective calls.

    Args:
        begun: as `CollectiveCheck`.
        signals: whether a signal stops the run.
    """
    stop = StopCoordinator(processes.store, processes.rank, processes.world_size)
    polls = []
    if stop.store is not None:
        check = CollectiveCheck(stop.store, processes.rank, processes.world_size, begun)
        processes.wait_for_all = check.wait_for_all
        polls.append(check.publish_progress)
    stop.install(signals=signals, polls=polls)
    return stop


def end_listening(processes: SingleProcess, stop: StopCoordinator) -> None:
    """Stop listening; from now on `processes.wait_for_all` checks calls of the program after a run."""
    processes.wait_for_all = partial(wait_after_run, processes)
    stop.uninstall()


def require_same_call(processes: SingleProcess, call: str, data: Any, position: str) -> None:
    """Wait until all processes make a collective call of the user at the same place, with data of the same shapes.

    Args:
        position: a text that says which loops over loaders the process is in.

    Raises:
        ConfigError: they do not; raised on all processes that make one.
    """
    if processes.world_size > 1:
        try:
            processes.wait_for_all("\n".join([f"{call} in {users_calls()}{position}", *describe_leaves(data)]))
        except ConfigError as error:
            raise ConfigError(
                f"{error} Where lengths or numbers of batches differ, as in an evaluation: collect in the loop, and "
                "call gather_uneven once after it. Calls that belong together all the same take check=False."
            ) from None


def wait_for_callers(processes: SingleProcess, call: str) -> None:
    """Raise ConfigError if only some processes call the collective `call`, a method that users call.

    The message names the function that called the method, because another process may call it elsewhere.
    """
    caller = sys._getframe(2).f_code  # traceback.extract_stack reads the source lines, too: 67 us
    processes.wait_for_all(f"{call} (in {Path(caller.co_filename).name}, {caller.co_name})")


def wait_after_run(processes: SingleProcess, call: str) -> None:
    """Return when all processes have come to `call`, a collective of a run that has ended.

    Raises:
        ConfigError: another process makes another call, or has come to the end of the program.
    """
    store: Any = processes.store
    if store is None:
        return
    rank = processes.rank
    number = store.add(f"after run/{rank}", 1)
    store.set(f"after run/{number}/{rank}", call)
    pause = 0.001
    for other in (other for other in range(processes.world_size) if other != rank):
        while not store.check([f"after run/{number}/{other}"]):
            if store.check([_ended(other)]):
                raise ConfigError(
                    f"rank {rank} calls {_named(call)}, and rank {other} has come to the end of the program without "
                    f"it. {SAME_CALLS}"
                )
            time.sleep(pause)
            pause = min(2 * pause, 0.1)
        theirs = store.get(f"after run/{number}/{other}").decode()
        if theirs != call:
            raise ConfigError(_difference(rank, call, other, theirs))


def record_end(store: Store, rank: int) -> None:
    """Record that this program has come to its end; before its connections are closed."""
    store.set(_ended(rank), "1")


def _ended(rank: int) -> str:
    return f"trainer/ended/{rank}"


def _named(call: str) -> str:
    """Return a call without the lines that describe its data."""
    return call.partition("\n")[0]


def _difference(rank: int, call: str, other: int, their_call: str) -> str:
    lines, others = call.splitlines(), their_call.splitlines()
    first, second = lines[0], others[0]
    if first == second:
        first += f" with {', '.join(one for one in lines if one not in others) or 'less'}"
        second += f" with {', '.join(one for one in others if one not in lines) or 'less'}"
    return (
        f"rank {rank} calls {first}, and rank {other} calls {second}: the processes do not do the same. Look for code "
        "that depends on the rank, or on data or time that differ between them."
    )
