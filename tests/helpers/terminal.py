"""A pseudo-terminal for tests of what is drawn, or typed, on one."""

from __future__ import annotations

import fcntl
import os
import pty
import struct
import termios
import threading


class Terminal:
    """A pseudo-terminal that keeps its output."""

    def __init__(self, encoding: str = "utf-8", columns: int = 100, rows: int = 24) -> None:
        self._master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        self.stream = os.fdopen(slave, "w", encoding=encoding)
        self._received = b""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        while True:
            try:
                data = os.read(self._master, 4096)
            except OSError:
                return
            if not data:
                return
            self._received += data

    def type(self, text: str) -> None:
        """Type into the terminal, which keeps what is not read yet."""
        os.write(self._master, text.encode())

    def text(self) -> str:
        """Close the terminal and return its output."""
        self.stream.close()
        self._reader.join(600)
        os.close(self._master)
        return self._received.decode(errors="replace")
