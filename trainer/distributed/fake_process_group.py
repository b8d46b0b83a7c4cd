"""Stand in for one of many processes with torch's fake process group, which sends nothing."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

from trainer.distributed.environment import Environment


@contextmanager
def fake_process_group(world_size: int, per_machine: int) -> Iterator[None]:
    """Act as the first of `world_size` processes, `per_machine` on each machine. Collectives return undefined values.

    No process is started and no port opened. There must be no process group; the fake one is destroyed at the end.
    """
    import torch.distributed as dist

    # Torch's own tool for this; importing it registers the backend "fake".
    from torch.testing._internal.distributed.fake_pg import FakeStore

    place = Environment(0, 0, world_size, per_machine, 0, world_size // per_machine, "the dry run", "127.0.0.1", 1)
    with patch.dict(os.environ):
        place.export()
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
        try:
            yield
        finally:
            dist.destroy_process_group()
