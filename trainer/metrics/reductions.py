"""Running reductions of logged values, on the device for tensors and on the host for numbers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import reduce
from typing import TypeVar

import torch

from trainer.distributed.tpu import xla_scalar

Number = float | torch.Tensor
Part = TypeVar("Part", float, torch.Tensor)

REDUCTIONS = ("mean", "sum", "min", "max")


class TensorBuffer:
    """A reused tensor that holds copies of up to `SIZE` 0-dim tensors, with their weights."""

    SIZE = 64

    def __init__(self) -> None:
        self.weights: list[float] = []
        self._values = torch.empty(0)
        self._slots: list[torch.Tensor] = []
        self._dtype: torch.dtype | None = None
        self._device = -1

    def fits(self, value: torch.Tensor) -> bool:
        """Return True if the value has the dtype and device of the buffer."""
        return value.dtype is self._dtype and value.get_device() == self._device

    # A tensor made in inference mode cannot be written to outside of inference mode.
    @torch.inference_mode(False)
    def begin(self, value: torch.Tensor) -> None:
        """Allocate for values of this dtype and device."""
        assert not self.weights
        self._dtype, self._device = value.dtype, value.get_device()
        self._values, self._slots = torch.empty(self.SIZE, dtype=value.dtype, device=value.device), []

    def add(self, value: torch.Tensor, weight: float) -> None:
        count = len(self.weights)
        if count == len(self._slots):
            self._make_slot()
        self._slots[count].copy_(value.detach() if value.requires_grad else value)
        self.weights.append(weight)

    @torch.inference_mode(False)
    def _make_slot(self) -> None:
        self._slots.append(self._values[len(self._slots)])

    def tensors(self) -> list[torch.Tensor]:
        return self._slots[: len(self.weights)]

    def values(self) -> torch.Tensor:
        """Return the buffered values as a 1-dim tensor."""
        return self._values[: len(self.weights)]


@dataclass
class Accumulator:
    """A running reduction. Tensors are accumulated on their device, Python numbers on the host; combined when read."""

    reduction: str
    on_host: float | None = None
    on_device: torch.Tensor | None = None
    weight_on_host: float = 0.0
    weight_on_device: torch.Tensor | None = None
    pending: TensorBuffer = field(default_factory=TensorBuffer)
    """The latest values of a mean, added up together: one by one takes six times as long. Their number at each flush is
    constant, counted from the first value of a dtype, so that a resumed run rounds in the same places."""

    def add(self, value: Number, weight: Number) -> None:
        """Add a value; tensors are 0-dim."""
        if self.reduction == "mean":
            self._add_weighted(value, weight)
        elif isinstance(value, torch.Tensor):
            self.on_device = _combined(self.on_device, to_float64(value), self.reduction)
        else:
            self.on_host = _merged(self.on_host, value, COMBINE_HOST[self.reduction])

    def _add_weighted(self, value: Number, weight: Number) -> None:
        if isinstance(weight, torch.Tensor):
            self._add_product(value, weight)
            return
        if not weight:  # a mean over nothing, often NaN
            return
        self.weight_on_host += weight
        if not isinstance(value, torch.Tensor):
            self.on_host = (self.on_host or 0.0) + value * weight
            return
        pending = self.pending
        if not pending.fits(value):
            if value.device.type == "xla":  # where each step must record the same program
                before = identity_element(value, "mean") if self.on_device is None else self.on_device
                self.on_device = to_float64(value) * weight if before is None else before.add_(value, alpha=weight)
                return
            self.flush()
            pending.begin(value)
        pending.add(value, weight)
        if len(pending.weights) == pending.SIZE:
            self.flush()

    def _add_product(self, value: Number, weight: torch.Tensor) -> None:
        wide = to_float64(weight)
        self.weight_on_device = _combined(self.weight_on_device, wide, "mean")
        product = (to_float64(value) if isinstance(value, torch.Tensor) else value) * wide
        product = torch.where(wide == 0, 0.0, product)  # a mean over nothing is often NaN
        self.on_device = _combined(self.on_device, product, "mean")

    def flush(self) -> None:
        """Add up the pending values."""
        pending = self.pending
        weights = set(pending.weights)
        if len(weights) == 1:
            added = _widened(pending.values()).sum() * weights.pop()
            self.on_device = _combined(self.on_device, added, "mean")
        else:  # without copying the weights to the device, which would synchronize
            for value, weight in zip(pending.tensors(), pending.weights, strict=True):
                self.on_device = _combined(self.on_device, to_float64(value) * weight, "mean")
        pending.weights.clear()

    def merge(self, other: Accumulator) -> None:
        """Add the accumulator of another process for the same name."""
        self.flush()
        other.flush()
        self.on_host = _merged(self.on_host, other.on_host, COMBINE_HOST[self.reduction])
        self.on_device = _merged(self.on_device, other.on_device, _COMBINE[self.reduction])
        self.weight_on_host += other.weight_on_host
        self.weight_on_device = _merged(self.weight_on_device, other.weight_on_device, torch.add)

    def local_value(self) -> Number | None:
        """Return the reduction so far, without reading the device; None without a value."""
        tensors = [to_float64(v) * w for v, w in zip(self.pending.tensors(), self.pending.weights, strict=True)]
        if self.on_device is not None:
            tensors.append(self.on_device)
        value: Number | None = self.on_host
        if tensors:
            on_host = [] if self.on_host is None else [torch.full_like(tensors[0], self.on_host)]
            value = reduce(_COMBINE[self.reduction], tensors + on_host)
        if self.reduction != "mean" or value is None:
            return value
        return value / (self.weight_on_host + (0.0 if self.weight_on_device is None else self.weight_on_device))

    def tensors(self) -> list[torch.Tensor]:
        """Return the tensors to read; `host_value` takes their numbers in the same order."""
        summed = [tensor for tensor in (self.on_device, self.weight_on_device) if tensor is not None]
        return summed + self.pending.tensors()

    def host_value(self, read: Iterator[float]) -> tuple[float | None, float]:
        """Return (reduced value so far, weight so far), given the numbers of `tensors()`."""
        from_device = next(read) if self.on_device is not None else None
        value = _merged(self.on_host, from_device, COMBINE_HOST[self.reduction])
        weight = self.weight_on_host + (next(read) if self.weight_on_device is not None else 0.0)
        for pending_weight in self.pending.weights:
            value = (0.0 if value is None else value) + next(read) * pending_weight
        return value, weight


def _combined(before: torch.Tensor | None, value: torch.Tensor, reduction: str) -> torch.Tensor:
    """Return the reduction so far with one more value; the weighted values of a mean are added up."""
    before = identity_element(value, reduction) if before is None else before
    return value if before is None else _COMBINE[reduction](before, value)


def _merged(one: Part | None, other: Part | None, combine: Callable[[Part, Part], Part]) -> Part | None:
    """Return the reduction of two parts, either of which may be missing."""
    if one is None or other is None:
        return other if one is None else one
    return combine(one, other)


def _stacked(values: list[torch.Tensor]) -> torch.Tensor:
    """Stack one-element tensors of any shape into one float64 tensor (float32 on devices without it)."""
    if len({(value.dtype, value.dim()) for value in values}) > 1:
        values = [to_float64(value) for value in values]
    return _widened(torch.stack(values).flatten())


def to_float64(value: torch.Tensor) -> torch.Tensor:
    """Return a 0-dim copy in float64 (float32 on devices without it), so that long sums keep their digits."""
    return _widened(value.detach().reshape(()), copy=True)


def _widened(values: torch.Tensor, copy: bool = False) -> torch.Tensor:
    return values.to(torch.float32 if values.device.type == "mps" else torch.float64, copy=copy)


def identity_element(value: torch.Tensor, reduction: str) -> torch.Tensor | None:
    """Return the identity element of a reduction on XLA, on other devices None.

    XLA compiles steps: without an identity element, the first step of an epoch would be another program.
    """
    return xla_scalar(_BEGINNINGS[reduction]) if value.device.type == "xla" else None


_BEGINNINGS = {"mean": 0.0, "sum": 0.0, "min": math.inf, "max": -math.inf}
_COMBINE: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "mean": torch.add,
    "sum": torch.add,
    "min": torch.minimum,
    "max": torch.maximum,
}
COMBINE_HOST: dict[str, Callable[[float, float], float]] = {
    "mean": lambda a, b: a + b,
    "sum": lambda a, b: a + b,
    "min": lambda a, b: math.nan if a != a or b != b else min(a, b),  # Python's go by the order of a NaN
    "max": lambda a, b: math.nan if a != a or b != b else max(a, b),
}


def as_tensors(values: Mapping[str, Number]) -> dict[str, torch.Tensor]:
    """Return the values as 0-dim tensors; numbers become float64 on the CPU."""
    return {
        name: value if isinstance(value, torch.Tensor) else torch.tensor(value, dtype=torch.float64)
        for name, value in values.items()
    }


def total_of(tensors: list[torch.Tensor]) -> torch.Tensor:
    """Return the sum of one-element tensors, on the device of the first: it is finite only if all of them are."""
    # One by one at 2/3 of the price: `stack` takes the GIL for each again. Without tensors it is zero.
    if all(tensor.is_cpu for tensor in tensors):
        return torch.tensor(sum(tensor.item() for tensor in tensors), dtype=torch.float64)
    try:
        return torch.stack(tensors).sum(dtype=torch.float32)
    except RuntimeError:  # they are of several shapes, or on several devices
        first = tensors[0].device
        return torch.stack([tensor.reshape(()).to(first) for tensor in tensors]).sum(dtype=torch.float32)


def to_host(tensors: list[torch.Tensor]) -> list[float]:
    """Return one-element tensors as numbers, with one copy from each device other than the CPU."""
    by_device: dict[torch.device, list[int]] = {}
    numbers = [0.0] * len(tensors)
    for index, tensor in enumerate(tensors):
        if tensor.is_cpu:
            numbers[index] = float(tensor.item())
        else:
            by_device.setdefault(tensor.device, []).append(index)
    for indices in by_device.values():
        with torch.no_grad():
            stacked = _stacked([tensors[index] for index in indices])
        for index, number in zip(indices, stacked.tolist(), strict=True):
            numbers[index] = number
    return numbers
