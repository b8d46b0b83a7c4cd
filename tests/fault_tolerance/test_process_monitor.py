from __future__ import annotations

import os
import time
from datetime import timedelta

import pytest
import torch.distributed as dist

from tests.helpers.processes import fork_ranks
from trainer.fault_tolerance import stop
from trainer.fault_tolerance.stop import StopCoordinator

SCRIPT = """
import sys
from tests.fault_tolerance.test_process_monitor import end
end(sys.argv[1])
"""

pytestmark = pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="needs Linux")


def end(how: str) -> None:
    """End rank 1 without an error, while rank 0 never reaches the end of a step."""
    rank = int(os.environ["RANK"])
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), timeout=timedelta(seconds=60))
    stop._STUCK_TIMEOUT_S = 1.0
    coordinator = StopCoordinator(store, rank, 2, interval=0.05)
    coordinator.install()
    time.sleep(0.5)
    if rank == 1:
        if how == "done":
            coordinator.done()
        os._exit(0)
    time.sleep(4 if how == "done" else 600)
    print("rank 0 came through", flush=True)


def test_a_process_that_vanishes_ends_the_others() -> None:
    result = fork_ranks(SCRIPT, "vanish").wait().check(1)
    assert "rank 1 of 2 is gone: it ended without reporting an error" in result.stderr
    assert "rank 0 stops because rank 1 is gone" in result.stderr
    assert "came through" not in result.stdout


def test_a_process_that_is_done_is_not_missed() -> None:
    assert "came through" in fork_ranks(SCRIPT, "done").wait().check(0).stdout
