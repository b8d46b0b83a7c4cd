"""Draw programs by their seeds, run them, and print what differs: `python -m tests.helpers.programs 17 18`.

`python -m tests.helpers.programs loops 0-30 41` does so with loops for the Engine on one process and two.
"""

from __future__ import annotations

import sys
import warnings

from tests.helpers.programs.check import drawn, wrong_loops, wrong_or_none

if __name__ == "__main__":
    warnings.simplefilter("ignore")
    of_loops = sys.argv[1] == "loops"
    for given in sys.argv[2:] if of_loops else ():
        first, _, last = given.partition("-")
        for seed, program, wrong in wrong_loops([*range(int(first), int(last or first) + 1)]):
            print(wrong or f"{seed}: {program}: right", flush=True)
    for seed in map(int, () if of_loops else sys.argv[1:]):
        print(wrong_or_none(seed) or f"{seed}: {drawn(seed)}: right", flush=True)
