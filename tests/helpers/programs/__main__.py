"""Draw programs by their seeds, run them, and print what differs: `python -m tests.helpers.programs 17 18`.

After the word "several" the programs are those with several of everything.
"""

from __future__ import annotations

import sys
import warnings

from tests.helpers.programs.check import wrong_or_none

if __name__ == "__main__":
    warnings.simplefilter("ignore")
    several = sys.argv[1] == "several"
    for seed in map(int, sys.argv[1 + several :]):
        print(wrong_or_none(seed, several) or f"{seed}: right", flush=True)
