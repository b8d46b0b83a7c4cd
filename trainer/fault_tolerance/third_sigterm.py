"""End a process that hangs in a step at the third SIGTERM, and print the stacks of its threads."""

from __future__ import annotations

import faulthandler
import os
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress

from trainer.fault_tolerance import interpreter_guard
from trainer.fault_tolerance.interpreter_guard import DUMP_SIGNAL, SIGTERMS
from trainer.fault_tolerance.signals import in_main_thread, install_wakeup_fd, restore_wakeup_fd

_SAME_S = 0.1
"""Seconds within which several SIGTERMs count as one, because launcher and cluster may both pass it on."""
_WORDS = "the third SIGTERM ends this process in the middle of a step, without a checkpoint. The stacks of its threads:"


class SigtermCount:
    """Counts the SIGTERMs of one run; the last one ends the process with exit code 143."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._count = 0
        self._last = -1.0

    def add(self) -> bool:
        """Count one SIGTERM; return False if it is one with the last. May be called in a signal handler."""
        now = time.monotonic()
        if now - self._last < _SAME_S:
            return False
        self._last = now
        self._count += 1
        if self._count == SIGTERMS:
            # Not through sys.stderr: the interrupted code may hold its lock.
            os.write(2, f"rank {self._rank}: {_WORDS}\n".encode())
            faulthandler.dump_traceback(file=2)
            os._exit(128 + signal.SIGTERM)
        return True


class SigtermWatch:
    """Counts SIGTERMs in a thread, for the case that the main thread hangs in a call of C code.

    Python runs its signal handlers in the main thread only, and only between two instructions of Python.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._count = SigtermCount(rank)
        self._pid = os.getpid()
        self._write: socket.socket | None = None
        self._thread: threading.Thread | None = None
        self._guard: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the thread. Call it in the main thread; does nothing if other code uses the wakeup descriptor."""
        read, write = socket.socketpair()
        write.setblocking(False)
        if not install_wakeup_fd(write.fileno()):
            read.close()
            write.close()
            return
        noticed = self._start_guard(read)
        self._write = write
        self._thread = threading.Thread(target=self._listen, args=(read, noticed), name="third-sigterm", daemon=True)
        self._thread.start()

    def _start_guard(self, numbers: socket.socket) -> int | None:
        """Start `interpreter_guard`; return the descriptor to which a byte is written for each SIGTERM noticed."""
        if not DUMP_SIGNAL or signal.getsignal(DUMP_SIGNAL) is not signal.SIG_DFL or not sys.executable:
            return None
        read, write = os.pipe()
        words = [sys.executable, "-I", "-S", interpreter_guard.__file__, str(self._pid), str(read), str(self._rank)]
        try:
            # In milliseconds: this process goes on while the other one starts.
            self._guard = subprocess.Popen(words, stdin=numbers.fileno(), stdout=subprocess.DEVNULL, pass_fds=[read])
        except OSError:  # no process more: the thread counts alone
            os.close(write)
            return None
        finally:
            os.close(read)
        faulthandler.register(DUMP_SIGNAL, file=2, all_threads=True)
        return write

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
        if self._guard is not None:
            self._guard.kill()
            self._guard.wait()
            self._guard = None
            faulthandler.unregister(DUMP_SIGNAL)

    def _listen(self, read: socket.socket, noticed: int | None) -> None:
        with read, selectors.DefaultSelector() as incoming:  # select.select takes no descriptor above 1023
            incoming.register(read, selectors.EVENT_READ)
            # The call of `select` ends with the interpreter's lock: until then the guard sees the numbers, too.
            while incoming.select() and (numbers := read.recv(64)):
                for number in numbers:
                    if number == signal.SIGTERM and self._count.add() and noticed is not None:
                        with suppress(OSError):  # the guard has been killed
                            os.write(noticed, b"1")
        if noticed is not None:
            os.close(noticed)
