"""Media that a tracker has not sent yet, as a checkpoint stores them."""

from __future__ import annotations

from typing import Any

import torch

from trainer.checkpoint.schema import NUMBER, Integer, require
from trainer.metrics.media import Histogram, Images, Media, Table, Text, as_histogram, as_images

_STATES: dict[str, dict[str, Any]] = {
    "Images": {"arrays": [torch.Tensor], "captions": ([str], None)},
    "Text": {"text": str},
    "Histogram": {"values": torch.Tensor, "bins": Integer(1)},
    "Table": {"columns": [str], "rows": [[(str, NUMBER, bool, None)]]},
}


def state_of(media: Media) -> dict[str, Any]:
    """Return a medium as a checkpoint stores it: as dicts, lists and tensors, without the `options` of pictures."""
    state = {name: getattr(media, name) for name in _STATES[type(media).__name__]}
    if isinstance(media, Images):
        state["arrays"] = [torch.tensor(array) for array in media.arrays]
    elif isinstance(media, Histogram):
        state["values"] = torch.tensor(media.values)
    return {"kind": type(media).__name__, **state}


def media_of(state: dict[str, Any]) -> Media:
    """Return the medium of a state, whose types are checked.

    Raises:
        CheckpointError: it is of another form.
    """
    kind = state.get("kind")
    require(state, {"kind": tuple(_STATES)}, "a medium")
    require(state, _STATES[str(kind)], str(kind))
    if kind == "Images":
        return as_images([array.numpy() for array in state["arrays"]], state["captions"], {})
    if kind == "Histogram":
        return as_histogram(state["values"], state["bins"])
    return Text(state["text"]) if kind == "Text" else Table(state["columns"], state["rows"])
