"""`trainer run-as-lightning`: run a program that was written for Lightning, unchanged."""

from __future__ import annotations

import argparse
import os
import sys

from trainer.cli.options import CommandParser, reports_errors
from trainer.errors import ConfigError

EXAMPLES = """\
examples:
  trainer run-as-lightning train.py --lr 0.1
  trainer run-as-lightning -m mypackage.train

In the program, in the processes that it starts, and in the packages that it imports, `lightning`, `pytorch_lightning`
and `lightning_fabric` are this package, whether or not they are installed. A checkpoint is also written as one file, in
Lightning's format. A program can do the same with `import trainer.compat.lightning` before its other imports.
"""


@reports_errors
def run(arguments: list[str]) -> int:
    """Replace this process by the program, which therefore ends as it would without this command."""
    parser = CommandParser(
        prog="trainer run-as-lightning",
        usage="trainer run-as-lightning [-m] SCRIPT [ARGS]",
        description="Run a program that was written for Lightning, unchanged.",
        epilog=EXAMPLES,
    )
    parser.add_argument("-m", dest="module", action="store_true", help="SCRIPT is the name of a module")
    parser.add_argument("program", metavar="SCRIPT", nargs=argparse.REMAINDER, help="a Python file, and its arguments")
    given = parser.parse_args(arguments)
    if not given.program:
        raise ConfigError("there is no program. Give a Python file, or -m and the name of a module.")
    if not given.module and not os.path.exists(given.program[0]):
        raise ConfigError(f"there is no file {given.program[0]!r}. Give a Python file, or -m and a module's name.")
    import trainer.compat.lightning  # noqa: F401 - says so, and sets the environment of the program

    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, [sys.executable, *(["-m"] if given.module else []), *given.program])
