"""Check states of random generators that were read from a checkpoint, before torch and numpy use them."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

from trainer.checkpoint.schema import Array, Integer, Kind, require, wrong
from trainer.errors import CheckpointError
from trainer.seed import rng_state

_MAXIMA = {
    "pos": 624,
    "buffer_pos": 4,
    "has_uint32": 1,
    "has_gauss": 1,
    "uinteger": 2**32 - 1,
    "state": 2**128 - 1,
    "inc": 2**128 - 1,
}
"""The maxima of the integers in the states of numpy's generators; the minima are 0. XLA's state is one of 64 bits."""

_BIT_GENERATORS = ("MT19937", "PCG64", "PCG64DXSM", "Philox", "SFC64")
_DEVICES = ("cuda", "mps", "xpu")
_TORCH = Array(torch.uint8, (5056,))
"""The state of torch's generator on a CPU."""
_TORCH_WORDS = 624


def check_rng_state(state: Any, where: str, device: torch.device | None = None) -> None:
    """Check a state before `seed.set_rng_state` gets it: torch and numpy use the positions in it without bounds checks.

    Args:
        state: as `seed.rng_state` returns it.
        where: its name, for the message.
        device: also check the state of this device's generator.

    Raises:
        CheckpointError: `seed.rng_state` cannot have returned such a state.
    """
    require(state, {"torch": object, "numpy": object, "python": object, "own?": {str: {str: dict}}}, where)
    states = [(kind, state[kind]) for kind in ("torch", "numpy", "python")]
    for own in state.get("own", {}).values():
        states += [next(iter(one.items()), ("", None)) for one in own.values()]
    for kind, value in states:
        _refuse(_problem(kind, value), where)
    like = {} if device is None else rng_state(device)
    if device is not None and {device.type} & state.keys() & like.keys():
        _refuse(wrong(state[device.type], _kind_of(like[device.type]), repr(device.type)), where)


def _refuse(problem: str | None, where: str) -> None:
    if problem is not None:
        raise CheckpointError(f"{where}: {problem}. It is damaged, or was not written by this package")


def _problem(kind: str, value: Any) -> str | None:
    """Return what is wrong with a generator's state; None if nothing is."""
    if kind in _DEVICES and isinstance(value, torch.Tensor) and value.dtype == torch.uint8:
        return None
    return _PROBLEMS[kind](value) if kind in _PROBLEMS else f"{kind!r} is not a kind of generator"


def check_torch_states(data: Any, where: str) -> None:
    """Check every tensor in nested data that has the dtype and shape of a state of torch's CPU generator.

    Args:
        data: nested dicts, lists and tuples, whose reader gives such tensors to torch.
        where: the name of `data`, for the message.

    Raises:
        CheckpointError: such a tensor is not a valid state.
    """
    if _TORCH.fits(data):
        _refuse(_torch_problem(data), where)
    elif isinstance(data, (dict, list, tuple)):
        for one in data.values() if isinstance(data, dict) else data:
            check_torch_states(one, where)


def _torch_problem(state: Any) -> str | None:
    if not _TORCH.fits(state):
        return "'torch' is not the state of a generator"
    # It begins with a struct {uint64 seed; int left; int seeded; uint64 next; ...}. torch checks the range of each
    # number, but not that `left` and `next` fit together: https://github.com/pytorch/pytorch/blob/v2.13.0/aten/src/ATen/CPUGeneratorImpl.cpp
    begin = state[:24].cpu().clone()
    left, position = int(begin.view(torch.int32)[2]), int(begin.view(torch.int64)[2])
    if not 1 <= left <= _TORCH_WORDS or not 0 <= position <= _TORCH_WORDS + 1 - left:
        return f"'torch' has the position {position} with {left} words left, outside of its {_TORCH_WORDS} words"
    try:
        torch.Generator().set_state(state.cpu())
    except (RuntimeError, TypeError) as error:
        return f"'torch' is refused ({error})"
    return None


def _numpy_problem(state: Any) -> str | None:
    name = state.get("bit_generator") if isinstance(state, dict) else None
    if name not in _BIT_GENERATORS:
        return "'numpy' is not the state of one of numpy's generators"
    like = dict(getattr(np.random, name)(0).state)
    odd = {"gauss": 0.0, "has_gauss": 0}  # of some generators
    return wrong({**odd, **state}, _kind_of({**odd, **like}), "'numpy'")


def _kind_of(like: Any, name: str = "") -> Kind:
    """Return the kind (see `schema.Kind`) of the states that have the structure of `like`."""
    if isinstance(like, dict):
        return {key: _kind_of(one, key) for key, one in like.items()}
    if isinstance(like, np.ndarray) and like.dtype == np.uint32:
        return Array(torch.int64, like.shape)  # so `rng_state` writes words of 32 bits
    if isinstance(like, (np.ndarray, torch.Tensor)):
        return Array(like.dtype, tuple(like.shape))
    return Integer(0, _MAXIMA.get(name, 2**64 - 1)) if isinstance(like, int) else type(like)


def _python_problem(given: Any) -> str | None:
    try:
        words = tuple(given["words"].tolist())
        if given["gauss"] is not None and type(given["gauss"]) is not float:
            return "'python.gauss' is not a number"
        random.Random().setstate((given["version"], words, given["gauss"]))
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        return f"'python' is refused ({error})"
    return None


_PROBLEMS = {"python": _python_problem, "numpy": _numpy_problem, "torch": _torch_problem}
