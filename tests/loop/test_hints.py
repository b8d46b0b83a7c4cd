"""Performance hints appear on a GPU, and only where there is something to gain."""

from __future__ import annotations

import pytest
import torch

from trainer.loop.describe import performance_hints

CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")
WEIGHTS = [torch.nn.Parameter(torch.zeros(2))]


def test_pinned_memory_and_fused_optimizers_are_hinted_at() -> None:
    pin, fused = performance_hints(CUDA, False, [torch.optim.AdamW(WEIGHTS)])
    assert "pin_memory=True" in pin
    assert "AdamW(fused=True)" in fused


@pytest.mark.parametrize(
    ("device", "pinned", "optimizer"),
    [
        (CPU, False, torch.optim.AdamW(WEIGHTS)),
        (CUDA, True, torch.optim.AdamW(WEIGHTS, fused=True)),
        (CUDA, None, torch.optim.RMSprop(WEIGHTS)),
        (CUDA, True, torch.optim.Adam(WEIGHTS, capturable=True)),
    ],
)
def test_nothing_is_said_where_nothing_is_gained(
    device: torch.device, pinned: bool | None, optimizer: torch.optim.Optimizer
) -> None:
    assert performance_hints(device, pinned, [optimizer]) == []
