"""Media that a tracker has not sent yet, as a checkpoint stores them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_map_only

from trainer.checkpoint.schema import NUMBER, Integer, require
from trainer.metrics.media import Images, Media, Table, Text, as_histogram, as_images

_STATES: dict[str, dict[str, Any]] = {
    "Images": {"arrays": [torch.Tensor], "captions": ([str], None)},
    "Text": {"text": str},
    "Histogram": {"values": torch.Tensor, "bins": Integer(1)},
    "Table": {"columns": [str], "rows": [[(str, NUMBER, bool, None)]]},
}


def _images(arrays: list[torch.Tensor], captions: list[str] | None) -> Images:
    return as_images([array.numpy() for array in arrays], captions, {})


_MAKE: dict[str, Callable[..., Media]] = {"Images": _images, "Text": Text, "Histogram": as_histogram, "Table": Table}


def state_of(media: Media) -> dict[str, Any]:
    """Return a medium as a checkpoint stores it: as dicts, lists and tensors, without the `options` of pictures."""
    kind = type(media).__name__
    state = {name: getattr(media, name) for name in _STATES[kind]}
    return {"kind": kind, **tree_map_only(np.ndarray, torch.tensor, state)}


def media_of(state: dict[str, Any]) -> Media:
    """Return the medium of a state, whose types are checked.

    Raises:
        CheckpointError: it is of another form.
    """
    require(state, {"kind": tuple(_STATES)}, "a medium")
    kind = state["kind"]
    require(state, _STATES[kind], kind)
    return _MAKE[kind](**{name: state[name] for name in _STATES[kind]})
