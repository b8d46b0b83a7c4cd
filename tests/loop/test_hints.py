"""Performance hints appear on a GPU, and only where there is something to gain."""

from __future__ import annotations

import pytest
import torch

from tests.helpers.processes import run_python
from trainer.precision import PRECISIONS
from trainer.runs.describe import performance_hints
from trainer.strategies import STRATEGIES

FLOAT32 = PRECISIONS["32-true"]
CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")
WEIGHTS = [torch.nn.Parameter(torch.zeros(2))]


def test_pinned_memory_and_fused_optimizers_are_hinted_at() -> None:
    pin, fused = performance_hints(CUDA, False, [torch.optim.AdamW(WEIGHTS)], FLOAT32, (7, 5))
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
    assert performance_hints(device, pinned, [optimizer], FLOAT32, (7, 5)) == []


@pytest.mark.parametrize(
    ("precision", "capability", "hint"),
    [
        ("32-true", (8, 0), "set_float32_matmul_precision"),
        ("32-true", (9, 0), "set_float32_matmul_precision"),
        ("32-true", (7, 5), None),
        ("32-true", None, None),  # AMD
        ("bf16-mixed", (7, 5), "has no bfloat16"),
        ("bf16-true", (7, 0), "compute capability 7.0"),
        ("bf16-mixed", (8, 0), None),
        ("16-mixed", (7, 5), None),
        ("16-mixed", (8, 9), None),
        ("64-true", (8, 0), None),
    ],
)
def test_what_the_card_computes_faster(precision: str, capability: tuple[int, int] | None, hint: str | None) -> None:
    hints = performance_hints(CUDA, True, [], PRECISIONS[precision], capability)
    assert len(hints) == (hint is not None)
    assert hint is None or hint in hints[0]


@pytest.mark.parametrize("allow", ["torch.set_float32_matmul_precision('high')", "matmul.fp32_precision = 'tf32'"])
def test_tf32_that_is_allowed_by_either_of_torchs_switches_is_not_hinted_at(allow: str) -> None:
    run_python(f"""
import torch
from torch.backends.cuda import matmul
{allow}
from trainer.runs.describe import performance_hints
from trainer.precision import PRECISIONS
assert performance_hints(torch.device("cuda"), True, [], PRECISIONS["32-true"], (8, 0)) == []
""").check()


def test_float64_on_mps_is_refused_before_the_start() -> None:
    for name in ("single_device", "ddp"):
        (problem,) = STRATEGIES[name]().problems(PRECISIONS["64-true"], "mps", 1)
        assert "no float64" in problem
        assert not STRATEGIES[name]().problems(PRECISIONS["32-true"], "mps", 1)
