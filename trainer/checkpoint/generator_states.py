"""Check states of random generators that were read from a checkpoint, before torch and numpy use them."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

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
"""The maxima of the integers in the states of numpy's generators; the minima are 0."""

_BIT_GENERATORS = ("MT19937", "PCG64", "PCG64DXSM", "Philox", "SFC64")
_DEVICES = ("cuda", "mps", "xpu")
_TORCH_BYTES, _TORCH_WORDS = 5056, 624


def check_rng_state(state: Any, where: str, device: torch.device | None = None) -> None:
    """Check a state before `seed.set_rng_state` gets it: torch and numpy use the positions in it without bounds checks.

    Args:
        state: as `seed.rng_state` returns it.
        where: its name, for the message.
        device: also check the state of this device's generator.

    Raises:
        CheckpointError: `seed.rng_state` cannot have returned such a state.
    """
    if not isinstance(state, dict):
        raise CheckpointError(f"{where} is a {type(state).__name__}, not the states of random generators")
    problem = (
        _torch_problem(state.get("torch")) or _numpy_problem(state.get("numpy")) or _python_problem(state.get("python"))
    )
    if problem is None and device is not None and device.type in state:
        problem = _device_problem(state[device.type], rng_state(device).get(device.type), device)
    problem = problem or _own_problem(state.get("own", {}))
    if problem is not None:
        raise CheckpointError(f"{where}: {problem}. It is damaged, or was not written by this package")


def _own_problem(own: Any) -> str | None:
    """Return what is wrong with the states of generators that users' objects hold, by object and name."""
    if not isinstance(own, dict) or not all(isinstance(states, dict) for states in own.values()):
        return "'own' does not have states by object and name"
    for owner, states in own.items():
        for name, state in states.items():
            kind, value = next(iter(state.items())) if isinstance(state, dict) and len(state) == 1 else ("", None)
            of_device = isinstance(value, torch.Tensor) and value.dtype == torch.uint8 and kind in _DEVICES
            problem = None if of_device else _PROBLEMS.get(kind, lambda _: "it is not a generator's state")(value)
            if problem is not None:
                return f"{name!r} of {owner!r}: {problem}"
    return None


def check_torch_states(data: Any, where: str) -> None:
    """Check every tensor in nested data that has the dtype and shape of a state of torch's CPU generator.

    Args:
        data: nested dicts, lists and tuples, whose reader gives such tensors to torch.
        where: the name of `data`, for the message.

    Raises:
        CheckpointError: such a tensor is not a valid state.
    """
    if isinstance(data, torch.Tensor):
        if data.dtype == torch.uint8 and data.shape == (_TORCH_BYTES,) and (problem := _torch_problem(data)):
            raise CheckpointError(f"{where}: {problem}. It is damaged, or was not written by this package")
    elif isinstance(data, (dict, list, tuple)):
        for one in data.values() if isinstance(data, dict) else data:
            check_torch_states(one, where)


def _torch_problem(state: Any) -> str | None:
    if not isinstance(state, torch.Tensor) or state.dtype != torch.uint8 or state.shape != (_TORCH_BYTES,):
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
    return _difference({"gauss": 0.0, "has_gauss": 0, **state}, {"gauss": 0.0, "has_gauss": 0, **like}, "numpy")


def _difference(state: Any, like: Any, path: str) -> str | None:
    """Return how a state differs in structure from another one; None if it does not."""
    if isinstance(like, dict):
        if not isinstance(state, dict) or state.keys() != like.keys():
            return f"{path!r} does not have the entries {', '.join(like)}"
        found = (_difference(state[key], one, f"{path}.{key}") for key, one in like.items())
        return next((problem for problem in found if problem), None)
    if isinstance(like, np.ndarray):
        # `rng_state` writes words of 32 bits into a tensor of int64.
        kinds = (torch.int64,) if like.dtype == np.uint32 else (like.dtype,)
        fits = isinstance(state, (torch.Tensor, np.ndarray)) and (state.dtype, tuple(state.shape)) == (
            *kinds,
            like.shape,
        )
        return None if fits else f"{path!r} is not {like.size} words"
    if type(state) is not type(like):
        return f"{path!r} is a {type(state).__name__}"
    if isinstance(like, int) and not 0 <= state <= _MAXIMA[path.rpartition(".")[2]]:
        return f"{path!r} is {state}, and not from 0 to {_MAXIMA[path.rpartition('.')[2]]}"
    return None


def _python_problem(given: Any) -> str | None:
    try:
        words = tuple(given["words"].tolist())
        if given["gauss"] is not None and type(given["gauss"]) is not float:
            return "'python.gauss' is not a number"
        random.Random().setstate((given["version"], words, given["gauss"]))
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        return f"'python' is refused ({error})"
    return None


def _device_problem(state: Any, own: Any, device: torch.device) -> str | None:
    if own is None or type(state) is not type(own):
        return None if own is None else f"{device.type!r} is a {type(state).__name__}"
    if isinstance(own, torch.Tensor) and (state.dtype, state.shape) != (own.dtype, own.shape):
        return f"{device.type!r} is not the state of this device's generator"
    return None


_PROBLEMS = {"python": _python_problem, "numpy": _numpy_problem, "torch": _torch_problem}
