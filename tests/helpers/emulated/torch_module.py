"""The functions of the emulated device that torch looks for in `torch.emulated`, as in `torch.cuda`."""

from __future__ import annotations

from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch

from tests.helpers.emulated.device import extension

NAME = "emulated"
Stream = partial(torch.Stream, NAME)
Event = partial(torch.Event, NAME)


def is_available() -> bool:
    return device_count() > 0


def is_initialized() -> bool:
    return True


def device_count() -> int:
    return int(extension().device_count())


def current_device() -> int:
    return torch.accelerator.current_device_index()


def set_device(device: Any) -> None:
    torch.accelerator.set_device_index(device)


def synchronize(device: Any = None) -> None:
    torch.accelerator.synchronize(device)


def current_stream(device: Any = None) -> torch.Stream:
    return torch.accelerator.current_stream(device)


def stream(stream: torch.Stream) -> AbstractContextManager[Any]:
    return stream


def device(index: Any) -> AbstractContextManager[Any]:
    return torch.accelerator.device_index(index if isinstance(index, int) else torch.device(index).index)


def _generator(device: Any) -> torch.Generator:
    device = torch.device(NAME, device) if isinstance(device, int) else torch.device(device)
    return extension().default_generator(current_device() if device.index is None else device.index)


def get_rng_state(device: Any = NAME) -> torch.Tensor:
    return _generator(device).get_state()


def set_rng_state(state: torch.Tensor, device: Any = NAME) -> None:
    _generator(device).set_state(state)


def manual_seed(seed: int) -> None:
    _generator(NAME).manual_seed(seed)


def manual_seed_all(seed: int) -> None:
    for index in range(device_count()):
        _generator(index).manual_seed(seed)


def _is_in_bad_fork() -> bool:
    return False


def get_amp_supported_dtype() -> list[torch.dtype]:
    return [torch.float16, torch.bfloat16]
