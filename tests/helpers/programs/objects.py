"""Datasets, samplers, streams and loaders as users write them. Each sample is known by its number."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, default_collate

TOLD: list[int] = []
"""The epochs that `set_epoch` of these objects was given."""

_INPUTS = torch.cos(torch.arange(2000, dtype=torch.float64)[:, None] * torch.tensor([1.0, 2.0, 3.0]).double())
_TARGETS = _INPUTS.sum(dim=1, keepdim=True) + torch.sin(torch.arange(2000, dtype=torch.float64)[:, None])


def sample(number: int) -> dict[str, Any]:
    """Return a sample."""
    return {"x": _INPUTS[number], "y": _TARGETS[number], "id": number}


def batch_of(numbers: Any) -> dict[str, torch.Tensor]:
    """Return a batch, as torch's own collate function makes it."""
    which = torch.as_tensor(list(numbers))
    return {"x": _INPUTS[which], "y": _TARGETS[which], "id": which}


def order_of(epoch: int, samples: int) -> list[int]:
    """Return an order that users compute from the epoch."""
    order = list(range(samples))
    random.Random(epoch).shuffle(order)
    return order


class Numbers(Dataset[Any]):
    """Samples of a range of numbers, which may grow and shrink."""

    def __init__(self, samples: int, first: int = 0) -> None:
        self.samples, self.first = samples, first

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> Any:
        if not 0 <= index < self.samples:
            raise IndexError(index)
        return sample(self.first + index)


class ReadyBatches(Dataset[Any]):
    """A dataset whose items are batches, of unequal sizes."""

    def __init__(self, samples: int) -> None:
        self.batches, first = [], 0
        while first < samples:
            size = min(samples - first, 1 + (5 * len(self.batches) + 3) % 4)
            self.batches.append(range(first, first + size))
            first += size

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, index: int) -> Any:
        return batch_of(self.batches[index])


class InBulk(Dataset[Any]):
    """A dataset that is asked for a list of indices at once, as torch's page on `batch_size=None` shows."""

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, indices: list[int]) -> Any:
        return batch_of(indices)


class ByEpochSampler(Sampler[int]):
    """Draws another order in each epoch, which `set_epoch` tells it."""

    def __init__(self, samples: int) -> None:
        self.samples, self.epoch = samples, 0

    def set_epoch(self, epoch: int) -> None:
        TOLD.append(epoch)
        self.epoch = epoch

    def __len__(self) -> int:
        return self.samples

    def __iter__(self) -> Iterator[int]:
        yield from order_of(self.epoch, self.samples)


class CountingSampler(Sampler[int]):
    """Begins one sample later each time that it is iterated."""

    def __init__(self, samples: int) -> None:
        self.samples, self.calls = samples, 0

    def __len__(self) -> int:
        return self.samples

    def __iter__(self) -> Iterator[int]:
        self.calls += 1
        yield from [(index + self.calls) % self.samples for index in range(self.samples)]


class SamplerWithState(CountingSampler):
    """The same, and saves its count itself."""

    def state_dict(self) -> dict[str, Any]:
        return {"calls": self.calls}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.calls = state["calls"]


class UnevenBatches(Sampler[list[int]]):
    """A batch sampler with batches of several sizes, in another order in each epoch."""

    def __init__(self, samples: int) -> None:
        self.batches, self.epoch = [list(one) for one in ReadyBatches(samples).batches], 0

    def set_epoch(self, epoch: int) -> None:
        TOLD.append(epoch)
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[list[int]]:
        for index in order_of(self.epoch, len(self.batches)):
            yield self.batches[index]


def without_broken(samples: list[Any]) -> Any:
    """Collate the samples that are not broken; the first of a batch never is."""
    return default_collate([one for place, one in enumerate(samples) if place == 0 or one["id"] % 3 != 1])


class Stream(IterableDataset[Any]):
    """A stream without a state."""

    def __init__(self, samples: int) -> None:
        self.samples, self.epoch = samples, 0

    def set_epoch(self, epoch: int) -> None:
        TOLD.append(epoch)
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        for number in order_of(self.epoch, self.samples):
            yield sample(number)


class StreamOfEpochs(Stream):
    """A stream whose state has the epoch and the place. When it has ended, its place is 0 again."""

    def __init__(self, samples: int) -> None:
        super().__init__(samples)
        self.index = 0

    def __iter__(self) -> Iterator[Any]:
        order = order_of(self.epoch, self.samples)
        while self.index < self.samples:
            self.index += 1
            yield sample(order[self.index - 1])
        self.end()

    def end(self) -> None:
        self.index = 0

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "index": self.index}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epoch, self.index = state["epoch"], state["index"]


class StreamThatIsReset(StreamOfEpochs):
    """The same, but `set_epoch` begins the epoch, and the end of an epoch leaves the place where it is."""

    def set_epoch(self, epoch: int) -> None:
        super().set_epoch(epoch)
        self.index = 0

    def end(self) -> None:
        pass


class StreamThatGoesOn(StreamOfEpochs):
    """A stream that knows of no epochs: its state is the place, which is 0 again when it has ended."""

    set_epoch = None  # type: ignore[assignment]

    def state_dict(self) -> dict[str, Any]:
        return {"index": self.index}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.index = state["index"]


STREAMS = {
    "no state": Stream,
    "state has the epoch": StreamOfEpochs,
    "set_epoch resets": StreamThatIsReset,
    "goes on": StreamThatGoesOn,
}


def with_length(kind: type[Any]) -> type[Any]:
    """Return a kind of stream that has a length, in samples."""
    return type(f"{kind.__name__}WithLength", (kind,), {"__len__": lambda self: self.samples})


class OwnLoader:
    """A loader of one's own over a stream: it makes the batches, and passes on what the stream can do."""

    def __init__(self, stream: Any, size: int) -> None:
        self.stream, self.size = stream, size
        for name in ("set_epoch", "state_dict", "load_state_dict"):
            if getattr(stream, name, None) is not None:
                setattr(self, name, getattr(stream, name))

    def __iter__(self) -> Iterator[Any]:
        numbers = iter(self.stream)
        while samples := list(islice(numbers, self.size)):
            yield default_collate(samples)


class Subclass(DataLoader[Any]):
    """A subclass, as other libraries have them."""


def set_epoch(loader: Any, epoch: int) -> None:
    """Tell a loader and its parts the epoch, as a loop by hand does."""
    batches = getattr(loader, "batch_sampler", None)
    parts = (loader, *(getattr(loader, name, None) for name in ("dataset", "sampler")), batches)
    for one in {id(part): part for part in parts if callable(getattr(part, "set_epoch", None))}.values():
        one.set_epoch(epoch)
