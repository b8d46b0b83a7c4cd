"""CombinedLoader: several loaders whose batches come together, or one after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import count, islice
from typing import Any, Literal

from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from trainer.checkpoint.schema import Integer, require
from trainer.data.loader import Batch, BatchLoader
from trainer.errors import ConfigError, unknown_name_error

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
        self.flattened, self.structure = _flatten(iterables)
        self.limits: list[int | float] | None = None

    @property
    def sampler(self) -> Any:
        """The samplers of the loaders, in their structure."""
        return tree_unflatten([getattr(one, "sampler", None) for one in self.flattened], self.structure)

    @property
    def batch_sampler(self) -> Any:
        """The batch samplers of the loaders, in their structure."""
        return tree_unflatten([getattr(one, "batch_sampler", None) for one in self.flattened], self.structure)

    def __len__(self) -> int:
        return combined_length([len(one) for one in self.flattened], self.mode)

    def __iter__(self) -> Iterator[tuple[Any, int, int]]:
        """Yield (batch, batch_idx, dataloader_idx), as Lightning does."""
        if self.mode == "sequential":
            for index, loader in enumerate(self.flattened):
                for batch_idx, batch in enumerate(loader):
                    yield batch, batch_idx, index
            return
        parts = together([loader.__iter__ for loader in self.flattened], self.mode)
        for batch_idx, batches in enumerate(parts):
            yield tree_unflatten(batches, self.structure), batch_idx, 0


def _flatten(iterables: Any) -> tuple[list[Any], TreeSpec]:
    try:
        return tree_flatten(iterables, is_leaf=lambda one: not isinstance(one, (dict, list, tuple)))
    except RecursionError:
        raise ConfigError(
            "the loaders are nested without end: give one loader, or a list, tuple or dict of loaders."
        ) from None


def combined_length(lengths: Sequence[int], mode: str) -> int:
    """Return the number of batches."""
    if mode == "sequential":
        return sum(lengths)
    return min(lengths) if mode == "min_size" else max(lengths)


def together(
    begin: Sequence[Callable[[], Iterator[Any]]], mode: str, ended: Sequence[bool] | None = None
) -> Iterator[list[Any]]:
    """Yield lists with an item of each iterator; `begin` starts them, in "max_size_cycle" again and again.

    Args:
        ended: which of them have been at their end before; default: none.
    """
    iterators = [start() for start in begin]
    ended = list(ended or [False] * len(begin))
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
    """The batches of a `CombinedLoader` on one process; each loader is split over the processes by itself."""

    def __init__(self, loader: CombinedLoader, parts: list[BatchLoader], label: str, limit: int | float | None) -> None:
        lengths = [part.length for part in parts]
        known = [length for length in lengths if length is not None]
        mode = loader.mode
        length = combined_length(known, mode) if len(known) == len(lengths) else None
        largest = [part.max_length for part in parts if part.max_length is not None]
        most = combined_length(largest, mode) if len(largest) == len(parts) else None
        super().__init__(loader, label, limit, length, most)
        self.parts, self.mode, self.structure = parts, mode, loader.structure
        self.exact = all(part.exact for part in parts)
        self.one_shot = any(part.one_shot for part in parts)
        self.batch_size = parts[0].batch_size
        self._lengths = lengths
        """The batches of each loader in this epoch; None: it does not know its length, and has not ended yet."""
        self.note = " ".join(part.note for part in parts if part.note) or None

    def iterate(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        if start == 0:
            self._lengths = [part.length for part in self.parts]
        batches = self._in_turn(epoch, start) if self.mode == "sequential" else self._together(epoch, start)
        yield from islice(batches, None if self.limit is None else max(0, self.limit - start))

    def _in_turn(self, epoch: int, start: int) -> Iterator[Batch]:
        for number in range(len(self.parts)):
            length = self._lengths[number]
            if length is None or start < length:
                yield from self._batches(number, epoch, start)
                start = 0
            else:
                start -= length

    def _together(self, epoch: int, start: int) -> Iterator[Batch]:
        cycles = self.mode == "max_size_cycle"
        # Full rounds of a loader that begins again, and the batches of its round after them.
        places = [divmod(start, length) if cycles and length else (0, start) for length in self._lengths]
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
            # Each round of an epoch has an order of its own.
            return self._batches(number, epoch + current * 1_000_003, position if current == done else 0)

        return begin

    def _batches(self, number: int, epoch: int, start: int) -> Iterator[Batch]:
        """Yield the batches of a loader, and learn their number where its length is unknown."""
        given = count(start)
        yield from map(lambda batch, _: batch, self.parts[number].iterate(epoch, start), given)
        if self._lengths[number] is None:
            self._lengths[number] = next(given)

    def equal_everywhere(self) -> dict[str, object]:
        each = enumerate(part.equal_everywhere() for part in self.parts)
        return {"mode": self.mode} | {f"loader {number}, {fact}": one[fact] for number, one in each for fact in one}

    def orders(self) -> dict[str, str]:
        each = enumerate(part.orders() for part in self.parts)
        return {f"loader {number}, {what}": one[what] for number, one in each for what in one}

    def contents(self) -> dict[str, str]:
        each = enumerate(part.contents() for part in self.parts)
        return {f"loader {number}, {what}": one[what] for number, one in each for what in one}

    def identity(self, world_size: int) -> dict[str, str]:
        each = [part.identity(world_size) for part in self.parts]
        names = {name: None for one in each for name in one}
        return {name: "; ".join(one.get(name, "") for one in each) for name in names} | {
            "loader": f"combined, {self.mode}"
        }

    def numbers(self) -> dict[str, dict[str, str]]:
        each = [part.numbers() for part in self.parts]
        names = dict.fromkeys(name for one in each for name in one)
        return {
            name: {
                f"loader {number}, {fact}": text
                for number, one in enumerate(each)
                for fact, text in one.get(name, {}).items()
            }
            for name in names
        }

    def state_dict(self) -> dict[str, Any]:
        return {"loaders": [part.state_dict() for part in self.parts], "lengths": list(self._lengths)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        require(state, {"lengths?": [(Integer(), None)]}, "the state of a CombinedLoader")
        saved = [*state.get("lengths", []), *[None] * len(self.parts)]
        self._lengths = [
            saved[number] if part.length is None else part.length for number, part in enumerate(self.parts)
        ]
        for part, one in zip(self.parts, state.get("loaders", []), strict=False):
            part.load_state_dict(one)

    def close(self) -> None:
        for part in self.parts:
            part.close()
