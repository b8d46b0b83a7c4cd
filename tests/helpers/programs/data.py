"""Blocks of data: what users give to `fit`, and which batches an epoch of it has."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any, ClassVar

from torch.utils.data import BatchSampler, DataLoader, SequentialSampler, SubsetRandomSampler

from tests.helpers.programs import objects
from tests.helpers.programs.blocks import Block, Program, block, one_of
from trainer.utilities import CombinedLoader

EVERYWHERE = ("Trainer", "Engine")


class Data(Block):
    """A user's training data."""

    replayed: ClassVar[bool] = False
    """True: the order of samples is the product's own. The reference loop takes it from an uninterrupted run, after
    `check_order`."""
    reload: int = 0
    """`reload_dataloaders_every_n_epochs`; above 0, `made_for` is called by a data module."""
    changes: ClassVar[bool] = False
    """True: `change` does something between two epochs."""

    def tells_samples(self) -> bool:
        """Whether micro-batches weigh by their samples, because a DataLoader makes them, and not all the same."""
        return True

    def made_for(self, epoch: int) -> Any:
        """Return a new loader; data modules make it for an epoch."""
        raise NotImplementedError

    def change(self, loader: Any, epoch: int) -> None:
        """Make the loader as it is in an epoch."""

    def batches(self, loader: Any, epoch: int) -> Iterator[Any]:
        """Yield the batches of an epoch, as a loop by hand takes them."""
        objects.set_epoch(loader, epoch)
        return iter(loader)

    def length(self, loader: Any) -> int | None:
        """Return the batches of an epoch; None: the loader does not know."""
        try:
            return len(loader)
        except TypeError:
            return None

    def has_length(self) -> bool:
        """Whether fractions of an epoch can be asked for."""
        return self.length(self.made_for(0)) is not None

    def check_order(self, loader: Any, epochs: list[list[list[int]]]) -> str | None:
        """Return what is wrong with the samples of the batches of complete epochs in an order of the product's."""
        sizes = [len(one) for one in loader.batch_sampler]
        for epoch, batches in enumerate(epochs):
            numbers = sorted(number for batch in batches for number in batch)
            whole = sorted(self.samples_drawn())
            if [len(batch) for batch in batches] != sizes[: len(batches)]:
                return f"epoch {epoch} has batches of the sizes {[len(batch) for batch in batches]}, not {sizes}"
            if not set(numbers) <= set(whole) or len(set(numbers)) != len(numbers):
                return f"epoch {epoch} has the samples {numbers} of {whole}"
        return None

    def samples_drawn(self) -> list[int]:
        """Return the numbers of which an epoch has each at most once."""
        raise NotImplementedError


@block("data", of=EVERYWHERE)
class InOrder(Data):
    """A plain DataLoader without shuffling."""

    samples: int = one_of(8, 7, 10)
    size: int = one_of(2, 3, 4)
    drop_last: bool = one_of(False, False, True)

    def made_for(self, epoch: int) -> Any:
        return DataLoader(objects.Numbers(self.samples), self.size, drop_last=self.drop_last)


@block("data", of=EVERYWHERE)
class Shuffled(Data):
    """A plain DataLoader with shuffling."""

    replayed = True
    samples: int = one_of(8, 7, 10)
    size: int = one_of(2, 3)
    workers: int = one_of(0, 0, 0, 0, 0, 0, 0, 1)

    def made_for(self, epoch: int) -> Any:
        return DataLoader(objects.Numbers(self.samples), self.size, shuffle=True, num_workers=self.workers)

    def samples_drawn(self) -> list[int]:
        return [*range(self.samples)]


@block("data", times=2, of=EVERYWHERE)
class OwnSampler(Data):
    """A sampler, or a batch sampler, of the user's own."""

    kind: str = one_of("by epoch", "counts", "counts", "has a state", "has a state", "uneven batches")
    samples: int = one_of(8, 7, 10)
    size: int = one_of(2, 3)

    def made_for(self, epoch: int) -> Any:
        data = objects.Numbers(self.samples)
        if self.kind == "uneven batches":
            return DataLoader(data, batch_sampler=objects.UnevenBatches(self.samples))
        kinds = {"by epoch": objects.ByEpochSampler, "counts": objects.CountingSampler}
        return DataLoader(data, self.size, sampler=kinds.get(self.kind, objects.SamplerWithState)(self.samples))


@block("data", of=EVERYWHERE)
class ReadyBatches(Data):
    """`batch_size=None`: a dataset of ready batches, or one that is asked for many indices at once."""

    in_bulk: bool = one_of(False, True)
    samples: int = one_of(7, 10)

    def made_for(self, epoch: int) -> Any:
        if not self.in_bulk:
            return DataLoader(objects.ReadyBatches(self.samples), batch_size=None)
        data = objects.InBulk(self.samples)
        return DataLoader(data, sampler=BatchSampler(SequentialSampler(data), 3, False), batch_size=None)


@block("data", of=EVERYWHERE)
class BrokenSamples(Data):
    """A `collate_fn` that leaves out broken samples."""

    samples: int = one_of(8, 7, 10)
    size: int = one_of(4, 3)

    def made_for(self, epoch: int) -> Any:
        return DataLoader(objects.Numbers(self.samples), self.size, collate_fn=objects.without_broken)


@block("data", of=EVERYWHERE)
class ListOfBatches(Data):
    """A list of batches of unequal sizes."""

    samples: int = one_of(7, 10)

    def tells_samples(self) -> bool:
        return False

    def made_for(self, epoch: int) -> Any:
        data = objects.ReadyBatches(self.samples)
        return [data[index] for index in range(len(data))]


_WAYS = ("DataLoader", "DataLoader", "own loader", *(["StatefulDataLoader"] if find_spec("torchdata") else []))


@block("data", times=4, of=EVERYWHERE)
class Stream(Data):
    """An IterableDataset of one of the usual designs, in one of the usual loaders."""

    design: str = one_of(*objects.STREAMS)
    way: str = one_of(*_WAYS)
    samples: int = one_of(8, 7, 6)
    size: int = one_of(2, 3)
    has_len: bool = one_of(False, False, True)

    def fits(self, program: Program) -> bool:
        # A limit leaves such a stream in the middle: which epoch a `for` continues is up to the loader.
        return self.design not in ("goes on", "state has the epoch") or not program.cuts_epochs

    def made_for(self, epoch: int) -> Any:
        kind = objects.STREAMS[self.design]
        stream = (objects.with_length(kind) if self.has_len else kind)(self.samples)
        if self.way == "own loader":
            return objects.OwnLoader(stream, self.size)
        if self.way == "DataLoader":
            return DataLoader(stream, self.size)
        from torchdata.stateful_dataloader import StatefulDataLoader

        return StatefulDataLoader(stream, self.size)

    def has_length(self) -> bool:
        return self.has_len and self.way != "own loader"

    def tells_samples(self) -> bool:
        return self.way != "own loader"


@block("data", of=EVERYWHERE)
class Subclassed(Data):
    """A subclass of DataLoader that shuffles, with persistent workers now and then."""

    replayed = True
    samples: int = one_of(8, 7, 10)
    size: int = one_of(2, 3)
    workers: int = one_of(0, 1)

    def made_for(self, epoch: int) -> Any:
        persistent = self.workers > 0
        data = objects.Numbers(self.samples)
        return objects.Subclass(data, self.size, shuffle=True, num_workers=self.workers, persistent_workers=persistent)

    def samples_drawn(self) -> list[int]:
        return [*range(self.samples)]


def part(kind: str, samples: int, first: int) -> Any:
    """Return a loader of one of several kinds, whose samples are numbered from `first`."""
    if kind in ("by epoch", "counts"):
        sampler = objects.ByEpochSampler(samples) if kind == "by epoch" else objects.CountingSampler(samples)
        return DataLoader(objects.Numbers(samples, first), 2, sampler=sampler)
    if kind == "in order":
        return DataLoader(objects.Numbers(samples, first), 2)
    return DataLoader(objects.STREAMS[kind](samples), 2)


@block("data", times=2, of=EVERYWHERE)
class Several(Data):
    """A dict or list of loaders, or a CombinedLoader."""

    mode: str = one_of("dict", "list", "min_size", "max_size", "max_size_cycle", "sequential")
    long: str = one_of("in order", "by epoch", "counts", "no state", "state has the epoch", "goes on")
    short: str = one_of("in order", "by epoch", "counts", "no state", "state has the epoch", "goes on")

    def fits(self, program: Program) -> bool:
        stateful = ("state has the epoch", "goes on")
        # A stream that another loader ends too early is left in the middle, see Stream.fits.
        left = program.cuts_epochs or self.mode in ("min_size", "dict", "list", "max_size_cycle")
        return not (left and {self.long, self.short} & {*stateful})

    def made_for(self, epoch: int) -> Any:
        parts = part(self.long, 10, 0), part(self.short, 6, 100)
        if self.mode in ("list", "sequential"):
            return [*parts] if self.mode == "list" else CombinedLoader([*parts], "sequential")
        named = dict(zip(("long", "short"), parts, strict=True))
        return named if self.mode == "dict" else CombinedLoader(named, self.mode)  # type: ignore[arg-type]

    def has_length(self) -> bool:
        return {self.long, self.short} <= {"in order", "by epoch", "counts"}

    def length(self, loader: Any) -> int | None:
        return {"min_size": 3, "sequential": 8}.get(self.mode, 5) if self.has_length() else None

    def batches(self, loader: Any, epoch: int) -> Iterator[Any]:
        given = loader.iterables if isinstance(loader, CombinedLoader) else loader
        parts = [*given.values()] if isinstance(given, dict) else given

        def begin(part: Any) -> Iterator[Any]:
            objects.set_epoch(part, epoch)
            return iter(part)

        if self.mode == "sequential":
            for part in parts:
                yield from begin(part)
            return
        running, ended = [begin(part) for part in parts], [False, False]
        while True:
            items: list[Any] = [next(one, None) for one in running]
            ended = [before or item is None for before, item in zip(ended, items, strict=True)]
            if all(ended) or (any(ended) and self.mode == "min_size"):
                return
            for place in (0, 1):
                if items[place] is None and self.mode != "max_size":
                    running[place] = begin(parts[place])
                    items[place] = next(running[place])
            yield dict(zip(("long", "short"), items, strict=True)) if isinstance(given, dict) else items


@block("data", times=2, of=EVERYWHERE)
class ByEpoch(Data):
    """A data module that makes a loader for the current epoch, of another length each time."""

    reload: int = one_of(1, 2)
    samples: int = one_of(6, 8)
    more: int = one_of(0, 2, -2)
    """Further samples in each epoch."""
    stream: bool = one_of(False, False, True)

    def fits(self, program: Program) -> bool:
        return program.of == "Trainer" and program.search.kind == "none"

    def made_for(self, epoch: int) -> Any:
        samples = max(2, self.samples + self.more * epoch)
        data = objects.Numbers(samples, 100 * epoch)
        if self.stream:
            return objects.OwnLoader(_Batches(data), 2)
        return DataLoader(data, 2)

    def has_length(self) -> bool:
        return not self.stream

    def tells_samples(self) -> bool:
        return not self.stream


class _Batches:
    """The samples of a dataset as a stream that has no length."""

    def __init__(self, data: Any) -> None:
        self.data = data

    def __iter__(self) -> Iterator[Any]:
        for index in range(len(self.data)):
            yield self.data[index]


@block("data", times=2, of=EVERYWHERE)
class Growing(Data):
    """A plain DataLoader whose dataset, indices, batch size or sampler is another one in each epoch."""

    changes = True
    what: str = one_of("dataset", "dataset", "batch size", "indices", "sampler")
    more: int = one_of(2, -2)
    """Further samples in each epoch."""
    samples: int = one_of(8, 7)

    @property
    def replayed(self) -> bool:  # type: ignore[override]
        return self.what == "indices"

    def made_for(self, epoch: int) -> Any:
        if self.what == "indices":
            return DataLoader(objects.Numbers(100), 2, sampler=SubsetRandomSampler([*range(self.samples)]))
        return DataLoader(objects.Numbers(100 if self.what == "sampler" else self.samples), 2)

    def change(self, loader: Any, epoch: int) -> None:
        now = max(2, self.samples + self.more * epoch)
        if self.what == "dataset":
            loader.dataset.samples = now
        elif self.what == "batch size":
            loader.batch_sampler.batch_size = 2 + epoch
        elif self.what == "sampler":
            loader.batch_sampler.sampler = [*range(10 * epoch, 10 * epoch + now)]
        else:
            loader.sampler.indices = [*range(10 * epoch, 10 * epoch + now)]

    def check_order(self, loader: Any, epochs: list[list[list[int]]]) -> str | None:
        for epoch, batches in enumerate(epochs):
            self.change(loader, epoch)
            numbers = [number for batch in batches for number in batch]
            allowed = set(loader.sampler.indices)
            if len(set(numbers)) != len(numbers) or not set(numbers) <= allowed:
                return f"epoch {epoch} has the samples {sorted(numbers)} of {sorted(allowed)}"
        return None
