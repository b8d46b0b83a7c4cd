"""Compare the results of two trainings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

QUIET = {
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}
"""Arguments of a Trainer that only trains."""


def as_floats(metrics: Mapping[str, torch.Tensor]) -> dict[str, float]:
    """Return the values of `trainer.callback_metrics` as numbers."""
    return {name: float(value) for name, value in metrics.items()}


def assert_same_bits(ours: Any, theirs: Any, where: str = "") -> None:
    """Assert that nested containers of tensors and numbers are equal to the last bit."""
    if isinstance(ours, torch.Tensor):
        assert ours.dtype == theirs.dtype, where
        assert torch.equal(ours, theirs), f"{where}: differs by up to {(ours - theirs).abs().max().item()}"
    elif isinstance(ours, dict):
        assert ours.keys() == theirs.keys(), where
        for key in ours:
            assert_same_bits(ours[key], theirs[key], f"{where}.{key}")
    elif isinstance(ours, (list, tuple)):
        assert len(ours) == len(theirs), where
        for index, pair in enumerate(zip(ours, theirs, strict=True)):
            assert_same_bits(*pair, f"{where}[{index}]")
    else:
        assert ours == theirs, where
