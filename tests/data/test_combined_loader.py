"""Several loaders as one: batches together or one after the other, as Lightning's, and resumed at any batch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from tests.messages import raises_recorded
from trainer.data.adapters import make_batch_loader
from trainer.data.combined_loader import MODES, CombinedLoader
from trainer.data.loader import BatchLoader
from trainer.errors import CheckpointError, ConfigError


class Stream(IterableDataset[torch.Tensor]):
    """Numbers from `first`, in a stream that does not know its length."""

    def __init__(self, first: int, count: int) -> None:
        self.first, self.count = first, count

    def __iter__(self) -> Iterator[torch.Tensor]:
        for number in range(self.first, self.first + self.count):
            yield torch.tensor([float(number)])


def loaders(streams: bool) -> dict[str, Any]:
    long = DataLoader(Stream(10, 5), batch_size=1) if streams else DataLoader(torch.arange(10.0, 15.0)[:, None])
    return {"long": long, "short": DataLoader(torch.arange(2.0)[:, None])}


def combined(mode: str, streams: bool = False) -> BatchLoader:
    loader = CombinedLoader(loaders(streams), mode)  # type: ignore[arg-type]
    return make_batch_loader(loader, name="", rank=0, world_size=1, seed=1, training=True, shuffle=False)


def numbers(batches: Iterator[Any]) -> list[Any]:
    found = []
    for batch in batches:
        parts = batch.values() if isinstance(batch, dict) else [batch]
        found.append([None if part is None else int(part) for part in parts])
    return found


BATCHES: dict[str, list[list[int | None]]] = {
    "min_size": [[10, 0], [11, 1]],
    "max_size_cycle": [[10, 0], [11, 1], [12, 0], [13, 1], [14, 0]],
    "max_size": [[10, 0], [11, 1], [12, None], [13, None], [14, None]],
    "sequential": [[10], [11], [12], [13], [14], [0], [1]],
}
"""The batches of Lightning's CombinedLoader for `loaders` (pytorch_lightning 2.6)."""


@pytest.mark.parametrize("mode", MODES)
def test_batches_are_those_of_lightning(mode: str) -> None:
    loader = CombinedLoader(loaders(streams=False), mode)  # type: ignore[arg-type]
    found = list(loader)
    assert numbers(batch for batch, _, _ in found) == BATCHES[mode]
    several = [(number, 0) for number in range(len(found))]
    places = [*several[:5], (0, 1), (1, 1)] if mode == "sequential" else several
    assert [place for _, *place in found] == [list(place) for place in places]
    assert len(loader) == len(found)


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_an_epoch_is_resumed_at_any_batch(mode: str, streams: bool) -> None:
    undisturbed = numbers(batch.data for batch in combined(mode, streams).iterate(0))
    assert undisturbed == BATCHES[mode]
    for position in range(1, len(undisturbed)):
        before, after = combined(mode, streams), combined(mode, streams)
        batches = before.iterate(0)
        for _ in range(position):
            next(batches)
        after.load_state_dict(before.state_dict())
        assert numbers(batch.data for batch in after.iterate(0, position)) == undisturbed[position:]


def test_a_stream_counts_anew_in_each_epoch() -> None:
    loader = combined("sequential", streams=True)
    first = numbers(batch.data for batch in loader.iterate(0))
    assert numbers(batch.data for batch in loader.iterate(1)) == first
    assert loader.length is None


def test_a_damaged_state_and_an_unknown_mode_are_refused() -> None:
    with raises_recorded(CheckpointError):
        combined("sequential").load_state_dict({"lengths": ["many"]})
    with raises_recorded(ConfigError):
        CombinedLoader([], "maxsize")  # type: ignore[arg-type]
