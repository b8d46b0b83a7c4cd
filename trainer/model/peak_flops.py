"""The speed at which a device multiplies matrices: the vendor's peak where it is known, or a measurement."""

from __future__ import annotations

import time
from typing import NamedTuple

import torch

from trainer.precision import tf32_is_allowed

NVIDIA = "https://www.nvidia.com/en-us/data-center"
SHEETS = "https://www.nvidia.com/content/dam/en-zz/Solutions/Data-Center"


class Peaks(NamedTuple):
    """Dense peaks in TFLOP/s, and where the vendor gives them; None: the card has no such unit."""

    fp16: float
    bf16: float | None
    tf32: float | None
    fp32: float
    fp64: float
    source: str


# Many data sheets give figures "with sparsity", which are twice the dense ones. Sought in the device's name in this
# order, so a longer name comes first. fp64: of the tensor cores, if the card has any for it.
PEAKS: dict[str, Peaks] = {
    "h200 nvl": Peaks(835.5, 835.5, 417.7, 60, 60, f"{NVIDIA}/h200/"),
    "h200": Peaks(989.4, 989.4, 494.7, 66.9, 66.9, f"{NVIDIA}/h200/"),
    "h100 nvl": Peaks(835.5, 835.5, 417.7, 60, 60, f"{NVIDIA}/h100/"),
    "h100 pcie": Peaks(756, 756, 378, 51.2, 51.2, "https://resources.nvidia.com/en-us-tensor-core (H100 data sheet)"),
    "h100": Peaks(989.4, 989.4, 494.7, 66.9, 66.9, f"{NVIDIA}/h100/"),
    "b200": Peaks(2250, 2250, 1125, 75, 37, f"{NVIDIA}/hgx/ (a board of eight)"),
    "a100": Peaks(312, 312, 156, 19.5, 19.5, f"{SHEETS}/a100/pdf/nvidia-a100-datasheet-us-nvidia-1758950-r4-web.pdf"),
    "a10": Peaks(125, 125, 62.5, 31.2, 0.5, f"{SHEETS}/a10/pdf/a10-datasheet.pdf"),
    "l40s": Peaks(362, 362, 183, 91.6, 1.4, f"{NVIDIA}/l40s/"),
    "l40": Peaks(181, 181, 90.5, 90.5, 1.4, f"{NVIDIA}/l40/"),
    "l4": Peaks(121, 121, 60, 30.3, 0.5, f"{NVIDIA}/l4/"),
    "v100 pcie": Peaks(112, None, None, 14, 7, f"{NVIDIA}/v100/"),
    "v100": Peaks(125, None, None, 15.7, 7.8, f"{NVIDIA}/v100/"),
    "t4": Peaks(65, None, None, 8.1, 0.25, f"{NVIDIA}/tesla-t4/"),
    "rtx 4090": Peaks(
        165.2,
        165.2,
        82.6,
        82.6,
        1.3,
        "https://images.nvidia.com/aem-dam/Solutions/geforce/ada/nvidia-ada-gpu-architecture.pdf",
    ),
    "rtx 3090": Peaks(
        71,
        71,
        35.6,
        35.6,
        0.56,
        "https://www.nvidia.com/content/PDF/nvidia-ampere-ga-102-gpu-architecture-whitepaper-v2.pdf",
    ),
}

OTHER_CARDS = {"laptop", "ti", "super", "d", "mig"}
"""Words after a card's name that make it another card, with another peak, or a part of one."""


def peak_of(device: torch.device, dtype: torch.dtype) -> float | None:
    """Return the vendor's dense peak of an NVIDIA card, FLOP/s, for products in `dtype`; None if it is not known."""
    if device.type != "cuda":
        return None
    return peak_by_name(torch.cuda.get_device_name(device), dtype)


def peak_by_name(name: str, dtype: torch.dtype) -> float | None:
    """Return `peak_of` for a device called `name`. float32 counts as TF32 where torch may use that."""
    words = f" {name.lower()} ".replace("-", " ")
    peaks = next((peaks for card, peaks in PEAKS.items() if f" {card} " in words), None)
    if peaks is None or OTHER_CARDS & set(words.split()):
        return None
    by_dtype = {
        torch.float16: peaks.fp16,
        torch.bfloat16: peaks.bf16,
        torch.float32: peaks.tf32 if peaks.tf32 is not None and tf32_is_allowed() else peaks.fp32,
        torch.float64: peaks.fp64,
    }
    peak = by_dtype.get(dtype)
    return None if peak is None else peak * 1e12


def measured_peak(device: torch.device, dtype: torch.dtype, size: int | None = None, repeats: int = 5) -> float:
    """Return the speed of a large matrix product, FLOP/s: the fastest of `repeats`, after one that is not timed.

    A product reaches less than a vendor's peak, so a share of this is larger than an MFU by a vendor's figure.

    Args:
        size: rows and columns of the square matrices. Default: 8192, and 1024 on a CPU.

    Raises:
        RuntimeError: the device cannot multiply in this dtype.
    """
    size = size or (1024 if device.type == "cpu" else 8192)
    left, right = (torch.ones(size, size, dtype=dtype, device=device) for _ in range(2))
    product = torch.empty_like(left)
    torch.mm(left, right, out=product)
    fastest = float("inf")
    for _ in range(repeats):
        _wait_for(device)
        begun = time.perf_counter()
        torch.mm(left, right, out=product)
        _wait_for(device)
        fastest = min(fastest, time.perf_counter() - begun)
    return 2 * size**3 / fastest


def _wait_for(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
