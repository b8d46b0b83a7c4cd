"""Set up tests on torch_xla's CPU devices; `make test-xla` runs each file in a process of its own."""

from __future__ import annotations

import os

# Before torch_xla is imported.
os.environ["PJRT_DEVICE"] = "CPU"
os.environ["CPU_NUM_DEVICES"] = "4"
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ["XLA_NO_SPECIAL_SCALARS"] = "1"  # as the strategy does where nobody has imported torch_xla yet

from pathlib import Path

import pytest

from trainer.distributed.tpu import torch_xla_problem

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    problem = torch_xla_problem()
    for item in items:
        if problem is not None and HERE in item.path.parents:
            item.add_marker(pytest.mark.skip(reason=f"run by make test-xla: {problem}"))


@pytest.fixture(scope="session", autouse=True)
def _devices_first() -> None:
    """torch takes note of the devices there are when the first backward pass runs, and some here run on the CPU."""
    if torch_xla_problem() is None:
        import torch_xla
        import torch_xla.runtime as xr

        if not xr.is_spmd():
            xr.use_spmd()
            torch_xla.device()
