"""End a process that hangs in a step at the third SIGTERM, and print the stacks of its threads."""

from __future__ import annotations

import faulthandler
import os
import signal
import socket
import threading
import time

from trainer.fault_tolerance.signals import in_main_thread, install_wakeup_fd, restore_wakeup_fd

SIGTERMS = 3
"""The number of SIGTERMs that end a process at once; the first one asks it to stop after the step."""
DUMP_SIGNAL: int = signal.SIGRTMAX - 5 if hasattr(signal, "SIGRTMAX") else 0
"""The signal that makes C code print the stacks of a process, for a launcher that is about to kill it; 0 on a system
without such signals."""
_SAME_S = 0.1
"""Seconds within which several SIGTERMs count as one, because launcher and cluster may both pass it on."""
_WORDS = "the third SIGTERM ends this process in the middle of a step, without a checkpoint. The stacks of its threads:"


class SigtermWatch:
    """Counts the SIGTERMs of one run; the last one ends the process with exit code 143.

    In a thread, because Python runs its signal handlers between two instructions of the main thread only, which may
    hang in C code, as in a collective. C code that keeps Python's interpreter lock holds up this thread, too: then only
    SIGKILL ends the process.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._pid = os.getpid()
        self._write: socket.socket | None = None
        self._thread: threading.Thread | None = None
        self._dumps = False

    def start(self) -> None:
        """Start the thread. Call it in the main thread; does nothing if other code uses the wakeup descriptor."""
        read, write = socket.socketpair()
        write.setblocking(False)
        if not install_wakeup_fd(write.fileno()):
            read.close()
            write.close()
            return
        self._dumps = bool(DUMP_SIGNAL) and signal.getsignal(DUMP_SIGNAL) is signal.SIG_DFL
        if self._dumps:
            faulthandler.register(DUMP_SIGNAL, file=2, all_threads=True)
        self._write = write
        self._thread = threading.Thread(target=self._listen, args=(read,), name="third-sigterm", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread. Does nothing the second time, and in a forked process."""
        if self._write is None or self._thread is None or self._pid != os.getpid():
            return
        if in_main_thread():
            restore_wakeup_fd()
        self._write.shutdown(socket.SHUT_RDWR)  # which ends the thread, though a child may have a copy of the socket
        self._write.close()
        self._thread.join()
        self._write = self._thread = None
        if self._dumps:
            faulthandler.unregister(DUMP_SIGNAL)

    def _listen(self, read: socket.socket) -> None:
        count, last = 0, -_SAME_S
        with read:
            while numbers := read.recv(64):
                if signal.SIGTERM in numbers and time.monotonic() - last >= _SAME_S:
                    count, last = count + 1, time.monotonic()
                if count == SIGTERMS:
                    # Not through sys.stderr: the code that hangs may hold its lock.
                    os.write(2, f"rank {self._rank}: {_WORDS}\n".encode())
                    faulthandler.dump_traceback(file=2)
                    os._exit(128 + signal.SIGTERM)
