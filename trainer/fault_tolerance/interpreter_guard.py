"""Script that ends its parent process at the third SIGTERM, if something there holds Python's interpreter lock.

Nothing written in Python runs in the parent then. Python's handler in C still writes the number of each signal to a
socket, which is this script's standard input; a number that the parent does not take from there was not noticed.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress

SIGTERMS = 3
"""The number of SIGTERMs that end a process at once; the first one asks it to stop after the step."""
DUMP_SIGNAL: int = signal.SIGRTMAX - 5 if hasattr(signal, "SIGRTMAX") else 0
"""The signal at which the parent prints the stacks of its threads, in C code; 0 on a system without such signals."""
_WORDS = (
    "the third SIGTERM ends this process in the middle of a step, without a checkpoint. Something holds Python's "
    "interpreter lock. The stacks of its threads:"
)


def main(parent: int, noticed: int, rank: str) -> None:
    """Watch until the parent ends.

    Args:
        parent: its process id.
        noticed: file descriptor from which a byte is read for each SIGTERM that the parent has noticed.
        rank: of the parent, for the message.
    """
    numbers = socket.socket(fileno=0)
    count = unnoticed = before = 0
    while os.getppid() == parent:
        ready = _readable([numbers.fileno(), noticed], seconds=2.0)
        time.sleep(0.1)  # in which the parent takes a signal that it notices; signals that come together are one
        if noticed in ready:
            count += len(os.read(noticed, 64))
        try:
            waiting = numbers.recv(4096, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            unnoticed = before = 0
            continue
        if not waiting:  # the run has ended
            return
        now = waiting.count(signal.SIGTERM)
        unnoticed = unnoticed + (now > before) if now >= before else 0
        before = now
        if (
            now
            and count + unnoticed >= SIGTERMS
            and not _soon(lambda: not _readable([numbers.fileno()], seconds=0.0), seconds=2.0)
        ):
            os.write(2, f"rank {rank}: {_WORDS}\n".encode())
            with suppress(ProcessLookupError):  # its launcher was faster
                os.kill(parent, DUMP_SIGNAL)
                _soon(lambda: not _is_pending(DUMP_SIGNAL, parent), seconds=5.0)
                time.sleep(1.0)
                os.kill(parent, signal.SIGKILL)
            return


def _readable(descriptors: list[int], seconds: float) -> list[int]:
    """Return those from which something can be read, as select.select does for descriptors up to 1023."""
    poll = select.poll()
    for descriptor in descriptors:
        poll.register(descriptor, select.POLLIN)
    return [descriptor for descriptor, _ in poll.poll(1000 * seconds)]


def _soon(condition: Callable[[], bool], seconds: float) -> bool:
    """Return True once the condition holds, False if it does not within the time: the machine may be busy."""
    deadline = time.monotonic() + seconds
    while not (holds := condition()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return holds


def _is_pending(number: int, pid: int) -> bool:
    """Return True if a signal sent to a process has reached none of its threads yet (known on Linux only)."""
    try:
        with open(f"/proc/{pid}/status") as file:
            lines = file.readlines()
    except OSError:
        return False
    waiting = next((line.split()[1] for line in lines if line.startswith("ShdPnd:")), "0")
    return bool(int(waiting, 16) >> (number - 1) & 1)


if __name__ == "__main__":
    for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1"):
        signal.signal(getattr(signal, name), signal.SIG_IGN)
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
