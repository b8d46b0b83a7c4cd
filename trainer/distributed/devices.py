"""Choose the kind and number of devices of a run: check the settings against the machine."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import cache

import torch

from trainer.distributed.accelerators import ACCELERATORS, OTHER_ACCELERATORS
from trainer.distributed.tpu import choose_tpu_stack, tpu_is_there
from trainer.errors import ConfigError, unknown_name_error

_MOST_PROCESSES = 4096
"""Maximum number of processes on the CPUs of a machine, which stops answering long before."""


def choose_accelerator(accelerator: str) -> tuple[str, str]:
    """Return the device type (`"cpu"`, `"cuda"`, `"mps"`; on TPUs `"tpu"` or `"xla"`) and the reason.

    An accelerator that torch knows from elsewhere (`torch.accelerator`), such as `"xpu"` or `"npu"`, is chosen by its
    type, and by "auto" where there is no GPU and no TPU.

    Raises:
        ConfigError: the name is unknown, or there is no such device.
    """
    others = _other_accelerators()
    if accelerator == "cpu":
        return "cpu", "cpu: as asked"
    if accelerator not in (*ACCELERATORS, *others):
        raise unknown_name_error("accelerator", accelerator, [*ACCELERATORS, *others], OTHER_ACCELERATORS)
    is_there: dict[str, Callable[[], bool]] = {
        "cuda": torch.cuda.is_available,
        "mps": torch.backends.mps.is_available,
        "tpu": tpu_is_there,
    }
    is_there |= dict.fromkeys((*others, "cpu"), lambda: True)
    wanted = {"auto": tuple(is_there), "gpu": ("cuda", "mps")}.get(accelerator, (accelerator,))
    found = next((kind for kind in wanted if is_there[kind]()), None)
    if "tpu" in (accelerator, found):
        device_type, reason = choose_tpu_stack()
        if device_type is None:
            raise ConfigError(f"accelerator={accelerator!r}, but {reason}")
        return device_type, f"{accelerator}: {reason}"
    if found is None:
        raise ConfigError(
            f"accelerator={accelerator!r}, but there is none (this torch is built for CUDA {torch.version.cuda}, ROCm "
            f"{torch.version.hip}). Use accelerator='auto' or 'cpu'."
        )
    reason = "as asked" if found == accelerator else f"the first available of {', '.join(wanted)}"
    return found, f"{accelerator}: {reason}"


def _other_accelerators() -> list[str]:
    """Return the type of the accelerator that torch knows, if it is not one of `ACCELERATORS`."""
    device = torch.accelerator.current_accelerator(check_available=True)
    return [] if device is None or device.type in ACCELERATORS else [device.type]


@cache
def has_streams(device_type: str) -> bool:
    """Whether copies to and from a kind of device can be asynchronous, on streams that torch knows.

    Not on MPS, where asynchronous copies are used before they are complete:
    https://github.com/pytorch/pytorch/issues/83015.
    """
    return device_type not in ("cpu", "mps") and hasattr(getattr(torch, device_type, None), "Stream")


def device_number(local_rank: int, device_ids: Sequence[int] | None, visible: int) -> int:
    """Return the number of a process's GPU among those that it sees; the only one where each process sees its own.

    Raises:
        ConfigError: there is no such GPU.
    """
    wanted = device_ids[local_rank] if device_ids else local_rank
    if wanted < visible:
        return wanted
    if visible == 1 and device_ids is None:
        return 0
    raise ConfigError(
        f"the process with local rank {local_rank} is to use GPU {wanted}, and sees {visible}. Start as many processes "
        "on a machine as it has GPUs, and let each process see all of them, or only its own (CUDA_VISIBLE_DEVICES)."
    )


def parse_devices(devices: int | str | Sequence[int], device_type: str) -> tuple[int, list[int] | None, str]:
    """Return the number of processes on this machine, the GPU numbers if they were given, and the reason.

    Args:
        devices: `"auto"` (1 on cpu and mps, and on xla, where one process drives all devices; all visible ones of
            other kinds), a number, -1 for all GPUs, a list of GPU numbers, or one of these as a string: `"2"` is a
            number, `"0,1"` a list (and `"0,"` a list of one).
        device_type: from `choose_accelerator`.

    Raises:
        ConfigError: `devices` is invalid, or not available on this machine.
    """
    numbered = device_type not in ("cpu", "xla")
    counts = {"mps": lambda: 1, "cuda": torch.cuda.device_count}
    available = counts.get(device_type, torch.accelerator.device_count)() if numbered else _MOST_PROCESSES
    wanted = devices if not isinstance(devices, str) or devices == "auto" else _from_text(devices)
    if wanted == "auto" or (wanted == -1 and device_type != "cpu"):
        if not numbered:
            return 1, None, f"{wanted}: one process on {device_type}"
        return available, None, f"{wanted}: all {device_type} devices ({available})"
    if type(wanted) is int and 0 < wanted <= available:
        return wanted, None, f"{wanted}: as asked"
    chosen = [*wanted] if isinstance(wanted, Sequence) and numbered and device_type != "tpu" else []
    if chosen and len(set(chosen)) == len(chosen) and set(chosen) <= set(range(available)):
        return len(chosen), chosen, f"{chosen}: as asked"
    raise ConfigError(
        f"devices={devices!r}: up to {available} {device_type} devices can be used "
        "(CUDA_VISIBLE_DEVICES hides GPUs). Allowed: 'auto', a number of devices from 1, -1 for all GPUs, or a list of "
        "different GPU numbers from 0, such as [0, 1] or '0,1'."
    )


def _from_text(text: str) -> int | list[int] | None:
    """Return the number or the numbers in a text; None if it has none."""
    if re.fullmatch(r"\s*-?\d+\s*", text):
        return int(text)
    if re.fullmatch(r"\s*\d+\s*(,\s*\d+\s*)*,?\s*", text):
        return [int(part) for part in text.split(",") if part.strip()]
    return None
