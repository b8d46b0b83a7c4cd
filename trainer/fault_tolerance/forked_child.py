"""End a process that user code has forked, before an exception in it tears down what belongs to its parent."""

from __future__ import annotations

import os
import sys
import traceback
from contextlib import suppress


def end_forked_child(parent: int, error: BaseException | None) -> None:
    """End this process as Python would, unless it is `parent`, the process number of the run.

    A child that leaves a hook by an exception, such as `SystemExit`, would continue in the trainer's teardown: it
    would end the data workers, take part in collectives, and write checkpoints. `os._exit` skips functions of `atexit`,
    which belong to the parent, too.
    """
    if os.getpid() == parent:
        return
    code = error.code or 0 if isinstance(error, SystemExit) else int(error is not None)
    with suppress(Exception):
        if not isinstance(code, int):
            print(code, file=sys.stderr)
        elif error is not None and not isinstance(error, SystemExit):
            traceback.print_exception(error)
    with suppress(Exception):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code & 0xFF if isinstance(code, int) else 1)
