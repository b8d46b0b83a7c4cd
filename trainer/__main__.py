"""The command `trainer`, also as `python -m trainer`."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from trainer.fault_tolerance.signals import end_by_sigusr1_with_retry


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line: `arguments`, or those that this process was started with."""
    end_by_sigusr1_with_retry()  # before all else, since a cluster's signal may come at any time
    import trainer
    from trainer.errors import refuse_other_package

    try:
        refuse_other_package(trainer)
    except ImportError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    from trainer.cli.main import main as run

    return run(arguments)


if __name__ == "__main__":
    sys.exit(main())
