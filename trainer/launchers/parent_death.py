"""Script that runs the Python program given as arguments, and has it killed when the launcher dies (Linux)."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

if __name__ == "__main__":
    if sys.platform.startswith("linux"):
        # Kept across exec. Number 1 is PR_SET_PDEATHSIG in linux/prctl.h.
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
        if os.getppid() != int(os.environ["TRAINER_LAUNCHED"]):
            sys.exit("the launcher has died")
    os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
