"""Names of accelerators, known without an import of torch."""

from __future__ import annotations

ACCELERATORS = ("auto", "cpu", "cuda", "gpu", "mps", "tpu")
OTHER_ACCELERATORS = dict.fromkeys(
    ("npu", "xpu", "hpu", "mlu", "musa", "sdaa"),
    "'auto', or this name where torch itself knows the accelerator (torch.accelerator), which is not so here",
)
"""Devices that torch may know -> what to use instead."""
