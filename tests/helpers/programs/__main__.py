"""Draw programs by their seeds, run them, and print what differs: `python -m tests.helpers.programs 17 18`.

`python -m tests.helpers.programs loops 0-30 41` does so with loops for the Engine on one process and two.
After the word "several" the programs are those with several of everything.
"""

from __future__ import annotations

import sys
import warnings

from tests.helpers.programs.check import drawn, wrong_loops, wrong_or_none

if __name__ == "__main__":
    warnings.simplefilter("ignore")
    kind = sys.argv[1] if sys.argv[1] in ("loops", "several") else ""
    given = sys.argv[2 if kind else 1 :]
    if kind == "loops":
        for text in given:
            first, _, last = text.partition("-")
            for seed, program, wrong in wrong_loops([*range(int(first), int(last or first) + 1)]):
                print(wrong or f"{seed}: {program}: right", flush=True)
    else:
        for seed in map(int, given):
            right = f"{seed}: {'' if kind else drawn(seed)}: right"
            print(wrong_or_none(seed, kind == "several") or right, flush=True)
