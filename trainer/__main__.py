"""The command `trainer`, also as `python -m trainer`."""

from __future__ import annotations

import signal
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line: `arguments`, or those that this process was started with. Return 130 if interrupted."""
    # Signals wait until their handlers are there, since a cluster's may come at any time.
    former = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT, signal.SIGUSR1])
    import trainer
    from trainer.errors import refuse_other_package

    try:
        refuse_other_package(trainer)
    except ImportError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    from trainer.cli.main import interrupted
    from trainer.cli.main import main as run
    from trainer.fault_tolerance.signals import end_by_sigusr1_with_retry

    end_by_sigusr1_with_retry()
    try:
        signal.pthread_sigmask(signal.SIG_SETMASK, former)
        return run(arguments)
    except KeyboardInterrupt:  # as soon as signals act again
        return interrupted()


if __name__ == "__main__":
    sys.exit(main())
