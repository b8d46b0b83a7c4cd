"""Rehearsal: one process that stands for rank 0 of many, in torch's fake process group, where nothing is sent."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch


@contextmanager
def fake_process_group(world_size: int, per_machine: int) -> Iterator[None]:
    """Be rank 0 of so many processes, `per_machine` on each machine. Collectives return at once, with any values.

    Nothing is started, and no port is opened. There must be no process group; afterwards there is none again.
    """
    import torch.distributed as dist

    # Torch's own tool for this; importing it registers the backend "fake".
    from torch.testing._internal.distributed.fake_pg import FakeStore

    place = {
        "RANK": 0,
        "LOCAL_RANK": 0,
        "WORLD_SIZE": world_size,
        "LOCAL_WORLD_SIZE": per_machine,
        "GROUP_RANK": 0,
        "GROUP_WORLD_SIZE": world_size // per_machine,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": 1,
        "TORCHELASTIC_RUN_ID": "rehearsal",
    }
    with patch.dict(os.environ, {name: str(value) for name, value in place.items()}):
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
        try:
            yield
        finally:
            dist.destroy_process_group()
