"""End a process that user code has forked, before an exception in it tears down what belongs to its parent."""

from __future__ import annotations

import os
import sys
import traceback
from contextlib import suppress


def end_forked_child(parent: int, error: BaseException | None) -> None:
    """End this process as Python would, unless it is `parent`, the process number of the run.

    A child that leaves a hook by an exception, such as that of `sys.exit`, would go on in the trainer's teardown: it
    would end the data workers, take part in collectives, and write checkpoints. `os._exit` skips functions of `atexit`,
    which belong to the parent, too.
    """
    if os.getpid() == parent:
        return
    code: object = 0 if error is None else 1
    with suppress(Exception):
        if isinstance(error, SystemExit):
            code = 0 if error.code is None else error.code
            if not isinstance(code, int):
                print(code, file=sys.stderr)
        elif error is not None:
            traceback.print_exception(error)
    with suppress(Exception):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code & 0xFF if isinstance(code, int) else 1)
