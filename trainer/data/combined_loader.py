"""CombinedLoader: several loaders whose batches come together, or one after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import chain, count, islice, repeat
from typing import Any, Literal

from torch.utils._pytree import tree_flatten, tree_unflatten

from trainer.checkpoint.schema import Integer, require
from trainer.data.loader import Batch, BatchLoader, FactsForRanks
from trainer.errors import unknown_name_error

MODES = ("min_size", "max_size_cycle", "max_size", "sequential")


class CombinedLoader:
    """Several loaders as one, for training or evaluation.

    Args:
        iterables: a dict or list of loaders, possibly nested: batches have the same structure.
        mode: "min_size": batches of all loaders together, until the shortest ends; "max_size_cycle": until the longest
            ends, while shorter ones begin again; "max_size": likewise, but with None for those that have ended;
            "sequential": one loader after the other.

    Raises:
        ConfigError: the mode is unknown.
    """

    def __init__(
        self, iterables: Any, mode: Literal["min_size", "max_size_cycle", "max_size", "sequential"] = "min_size"
    ) -> None:
        if mode not in MODES:
            raise unknown_name_error("mode of CombinedLoader", mode, MODES)
        self.iterables, self.mode = iterables, mode
        self.flattened, self.structure = tree_flatten(
            iterables, is_leaf=lambda one: not isinstance(one, (dict, list, tuple))
        )
        self.limits: list[int | float] | None = None

    @property
    def sampler(self) -> Any:
        """The samplers of the loaders, in their structure."""
        return self._attributes("sampler")

    @property
    def batch_sampler(self) -> Any:
        """The batch samplers of the loaders, in their structure."""
        return self._attributes("batch_sampler")

    def _attributes(self, name: str) -> Any:
        return tree_unflatten([getattr(one, name, None) for one in self.flattened], self.structure)

    def __len__(self) -> int:
        return combined_length([len(one) for one in self.flattened], self.mode)

    def __iter__(self) -> Iterator[tuple[Any, int, int]]:
        """Yield (batch, batch_idx, dataloader_idx), as Lightning does."""
        if self.mode == "sequential":
            for index, loader in enumerate(self.flattened):
                for batch_idx, batch in enumerate(loader):
                    yield batch, batch_idx, index
            return
        parts = together([loader.__iter__ for loader in self.flattened], self.mode, [False] * len(self.flattened))
        for batch_idx, batches in enumerate(parts):
            yield tree_unflatten(batches, self.structure), batch_idx, 0


def combined_length(lengths: Sequence[int], mode: str) -> int:
    """Return the number of batches."""
    if mode == "sequential":
        return sum(lengths)
    return min(lengths) if mode == "min_size" else max(lengths)


def together(
    begin: Sequence[Callable[[], Iterator[Any]]], mode: str, ended_before: Sequence[bool]
) -> Iterator[list[Any]]:
    """Yield lists with an item of each iterator; `begin` starts them, in "max_size_cycle" again and again.

    Args:
        ended_before: whether each iterator has been at its end before.
    """
    iterators, ended = [start() for start in begin], list(ended_before)
    while not all(ended):
        items: list[Any] = []
        for number, start in enumerate(begin):
            item = next(iterators[number], None)
            if item is None:
                ended[number] = True
                if mode == "min_size" or all(ended):
                    return
                if mode == "max_size_cycle":
                    iterators[number] = start()
                    item = next(iterators[number], None)
            items.append(item)
        yield items


class CombinedBatches(BatchLoader):
    """The batches of a `CombinedLoader` on one process; each loader is split over the processes separately."""

    def __init__(self, loader: CombinedLoader, parts: list[BatchLoader], label: str, limit: int | float | None) -> None:
        super().__init__(loader, label, limit)
        self.parts, self.mode, self.structure = parts, loader.mode, loader.structure
        self.exact = all(part.exact for part in parts)
        self.one_shot = any(part.one_shot for part in parts)
        self._lengths: list[int | None] = [None] * len(parts)
        """The batches of each loader in this epoch; None: a loader of unknown length that has not ended yet."""
        self._set_sizes()
        self.note = " ".join(part.note for part in parts if part.note) or None

    def measure(self, epoch: int | None = None, start: int = 0) -> None:
        for part, before in zip(self.parts, self._lengths, strict=True):
            # A loader that has begun again may be at the beginning of its round.
            part.measure(epoch, start % before if self.mode == "max_size_cycle" and before else start)
            if self.mode == "sequential":
                length = before if part.length is None else part.length
                start = 0 if length is None else max(0, start - length)
        self._set_sizes()

    def forget_sizes(self) -> None:
        for part in self.parts:
            part.forget_sizes()

    def _set_sizes(self) -> None:
        lengths = [part.length for part in self.parts]
        self._set_lengths(self._combined(lengths), self._combined([part.max_length for part in self.parts]), None)
        self.batch_size = self.parts[0].batch_size
        self._lengths = [before if now is None else now for before, now in zip(self._lengths, lengths, strict=True)]

    def _combined(self, lengths: Sequence[int | None]) -> int | None:
        """Return the number of batches of loaders of these lengths; None: a length is not known."""
        return None if None in lengths else combined_length(lengths, self.mode)  # type: ignore[arg-type]

    def iterate(self, epoch: int, start: int = 0, again: int = 0) -> Iterator[Batch]:
        if start == 0:
            self._lengths = [part.length for part in self.parts]
        places, ends = self._places(start), (self._combined(self._lengths), self.limit)
        if start and any(end is not None and end <= start for end in ends):
            for part, (done, position) in zip(self.parts, places, strict=True):
                part.pass_by(epoch, position, done)
            return
        batches = self._in_turn(epoch, places) if self.mode == "sequential" else self._together(epoch, places)
        yield from islice(batches, None if self.limit is None else self.limit - start)

    def _places(self, start: int) -> list[tuple[int, int]]:
        """Return the full rounds that each loader has made, if it begins again, and the batches after them."""
        if self.mode == "max_size_cycle":
            return [divmod(start, length) if length else (0, start) for length in self._lengths]
        places = []
        for length in self._lengths:
            places.append((0, start if length is None else min(start, length)))
            start -= places[-1][1] if self.mode == "sequential" else 0
        return places

    def _in_turn(self, epoch: int, places: list[tuple[int, int]]) -> Iterator[Batch]:
        for number, (_, position) in enumerate(places):
            if position and position == self._lengths[number]:
                self.parts[number].pass_by(epoch, position)
            else:
                yield from self._batches(number, epoch, position)

    def _together(self, epoch: int, places: list[tuple[int, int]]) -> Iterator[Batch]:
        begin = [self._rounds(number, epoch, *place) for number, place in enumerate(places)]
        for batches in together(begin, self.mode, [rounds > 0 for rounds, _ in places]):
            first = next(batch for batch in batches if batch is not None)
            data = [None if batch is None else batch.data for batch in batches]
            yield first._replace(data=tree_unflatten(data, self.structure))

    def _rounds(self, number: int, epoch: int, done: int, position: int) -> Callable[[], Iterator[Batch]]:
        """Return a function that begins the next round of a loader; the first one at a position."""
        rounds = count(done)

        def begin() -> Iterator[Batch]:
            current = next(rounds)
            return self._batches(number, epoch, position if current == done else 0, current)

        return begin

    def _batches(self, number: int, epoch: int, start: int, again: int = 0) -> Iterator[Batch]:
        """Yield the batches of a loader, and note their number if its length is unknown."""
        given = count(start)  # not by a loop, whose variable would keep a batch in memory
        yield from map(lambda batch, _: batch, self.parts[number].iterate(epoch, start, again), given)
        if self._lengths[number] is None:
            self._lengths[number] = next(given)

    def facts_for_ranks(self) -> FactsForRanks:
        parts = [part.facts_for_ranks() for part in self.parts]
        equal, orders, contents = (_numbered(facts) for facts in zip(*parts, strict=True))
        return FactsForRanks({"mode": self.mode, **equal}, orders, contents)

    def identity(self, world_size: int) -> dict[str, str]:
        each = [part.identity(world_size) for part in self.parts]
        names = dict.fromkeys(chain.from_iterable(each))
        described = {name: "; ".join(one.get(name, "") for one in each) for name in names}
        return {**described, "loader": f"combined, {self.mode}"}

    def numbers(self) -> dict[str, dict[str, str]]:
        each = [part.numbers() for part in self.parts]
        names = dict.fromkeys(chain.from_iterable(each))
        return {name: _numbered([one.get(name, {}) for one in each]) for name in names}

    def state_dict(self) -> dict[str, Any]:
        return {"loaders": [part.state_dict() for part in self.parts], "lengths": list(self._lengths)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        require(state, {"lengths?": [(Integer(), None)]}, "the state of a CombinedLoader")
        saved = chain(state.get("lengths", []), repeat(None))
        self._lengths = [
            length if part.length is None else part.length for part, length in zip(self.parts, saved, strict=False)
        ]
        for part, one in zip(self.parts, state.get("loaders", []), strict=False):
            part.load_state_dict(one)

    def streams(self) -> list[Any]:
        return [*chain.from_iterable(part.streams() for part in self.parts)]

    @contextmanager
    def kept_place(self) -> Iterator[None]:
        lengths = list(self._lengths)
        with ExitStack() as places:
            for part in self.parts:
                places.enter_context(part.kept_place())
            yield
        self._lengths = lengths

    def close(self) -> None:
        for part in self.parts:
            part.close()


def _numbered(each: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the facts of several loaders, with the number of the loader in their names."""
    return {f"loader {number}, {fact}": value for number, facts in enumerate(each) for fact, value in facts.items()}
