"""Messages: what the trainer says of itself is seen, unless the program has set up logging in its own way."""

from __future__ import annotations

import logging
import sys


class _Shown(logging.StreamHandler):  # type: ignore[type-arg]
    """To stderr, wherever that leads at the moment of the message."""

    def emit(self, record: logging.LogRecord) -> None:
        self.setStream(sys.stderr)
        super().emit(record)


def show_messages(rank: int) -> None:
    """From now on the logger "trainer" writes to stderr: rank 0 what was chosen and why, every process its warnings.

    Nothing happens where the program has a handler for it already (`logging.basicConfig`), and a level that was set
    (`logging.getLogger("trainer").setLevel("WARNING")`) stays.
    """
    log = logging.getLogger("trainer")
    if not log.hasHandlers():
        log.addHandler(_Shown())
        if log.level == logging.NOTSET:
            log.setLevel(logging.INFO if rank == 0 else logging.WARNING)
