"""Names of accelerators, and what can be said of a wrong one before torch is imported."""

from __future__ import annotations

from difflib import get_close_matches

from trainer.errors import unknown_name_error

ACCELERATORS = ("auto", "cpu", "cuda", "gpu", "mps", "tpu")
_DEVICES = ("npu", "xpu", "hpu", "mlu", "musa", "sdaa")
"""Devices that torch may know."""
OTHER_ACCELERATORS = dict.fromkeys(
    _DEVICES, "'auto', or this name where torch itself knows the accelerator (torch.accelerator), which is not so here"
)
"""Devices that torch may know -> what to use instead."""


def accelerator_problem(name: object) -> str | None:
    """Return the problem with a name that is wrong for any torch; an extension may have given it other devices."""
    if not isinstance(name, str) or name in (*ACCELERATORS, *_DEVICES):
        return None
    # Three letters of which one is another may be a device, too: only closer ones are misspelt.
    if name not in OTHER_ACCELERATORS and not get_close_matches(name.lower(), ACCELERATORS, cutoff=0.75):
        return None
    return str(unknown_name_error("accelerator", name, ACCELERATORS, OTHER_ACCELERATORS))
