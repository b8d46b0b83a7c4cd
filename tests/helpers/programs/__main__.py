"""Draw programs by their seeds, run them, and print what differs: `python -m tests.helpers.programs 17 18`."""

from __future__ import annotations

import sys
import warnings

from tests.helpers.programs.check import drawn, wrong_or_none

if __name__ == "__main__":
    warnings.simplefilter("ignore")
    for seed in map(int, sys.argv[1:]):
        print(wrong_or_none(seed) or f"{seed}: {drawn(seed)}: right", flush=True)
