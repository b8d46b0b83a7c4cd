"""Choose the kind and number of devices of a run: check the settings against the machine."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache

import torch

from trainer.distributed.accelerators import ACCELERATORS, OTHER_ACCELERATORS
from trainer.distributed.tpu import choose_tpu_stack, tpu_is_there
from trainer.errors import ConfigError, unknown_name_error

_ALLOWED = "Allowed: 'auto', a number of devices, -1 for all GPUs, or a list of GPU numbers such as [0, 1] or '0,1'."
_MOST_PROCESSES = 4096
"""Maximum number of processes on the CPUs of a machine, which stops answering long before."""


def choose_accelerator(accelerator: str) -> tuple[str, str]:
    """Return the device type (`"cpu"`, `"cuda"`, `"mps"`; on TPUs `"tpu"` or `"xla"`) and the reason.

    An accelerator that torch knows from elsewhere (`torch.accelerator`), such as `"xpu"` or `"npu"`, is chosen by its
    type, and by "auto" where there is no GPU and no TPU.

    Raises:
        ConfigError: the name is unknown, or there is no such device.
    """
    other = _other_accelerator()
    if accelerator is None or accelerator not in (*ACCELERATORS, other):
        known = [*ACCELERATORS, *filter(None, [other])]
        raise unknown_name_error("accelerator", accelerator, known, OTHER_ACCELERATORS)
    if accelerator == "cpu":
        return "cpu", "cpu: as asked"
    wanted = {"auto": ("cuda", "mps", "tpu", other), "gpu": ("cuda", "mps")}.get(accelerator, (accelerator,))
    if "cuda" in wanted and torch.cuda.is_available():
        return "cuda", f"{accelerator}: CUDA devices found: {torch.cuda.device_count()}"
    if "mps" in wanted and torch.backends.mps.is_available():
        return "mps", f"{accelerator}: Apple GPU (MPS) found"
    if accelerator == "tpu" or ("tpu" in wanted and tpu_is_there()):
        return _tpu(accelerator)
    if other is not None and other in wanted:
        return other, f"{accelerator}: {other} devices of torch.accelerator: {torch.accelerator.device_count()}"
    missing = {"cuda": _no_cuda(), "mps": "no MPS"}.get(accelerator, f"{_no_cuda()}, no MPS")
    if accelerator == "auto":
        return "cpu", f"auto: {missing}"
    raise ConfigError(f"accelerator={accelerator!r}, but: {missing}. Use accelerator='auto' or 'cpu'.")


def _other_accelerator() -> str | None:
    """Return the type of the accelerator that torch knows, if it has no name of its own here."""
    device = torch.accelerator.current_accelerator(check_available=True)
    return device.type if device is not None and device.type not in ACCELERATORS else None


@cache
def has_streams(device_type: str) -> bool:
    """Whether copies to and from a kind of device can be asynchronous, on streams that torch knows.

    Not on MPS, where asynchronous copies are used before they are complete:
    https://github.com/pytorch/pytorch/issues/83015.
    """
    return device_type not in ("cpu", "mps") and hasattr(getattr(torch, device_type, None), "Stream")


def _tpu(accelerator: str) -> tuple[str, str]:
    device_type, reason = choose_tpu_stack()
    if device_type is None:
        raise ConfigError(f"accelerator={accelerator!r}, but {reason}")
    return device_type, f"{accelerator}: {reason}"


def _no_cuda() -> str:
    if torch.version.cuda is None and torch.version.hip is None:
        return "this torch is built without CUDA"
    return "no CUDA device found"


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
        f"the process with local rank {local_rank} is to use GPU {wanted}, and sees {visible}: start as many processes "
        "on a machine as it has GPUs, and let each process see all of them, or one of its own (CUDA_VISIBLE_DEVICES)."
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
    known = {"cpu": lambda: None, "xla": lambda: None, "mps": lambda: 1, "cuda": torch.cuda.device_count}
    available = known.get(device_type, torch.accelerator.device_count)()
    wanted = _from_text(devices) if isinstance(devices, str) and devices != "auto" else devices
    if wanted in ("auto", -1):
        return _all_devices(wanted, device_type, available)
    if isinstance(wanted, int):
        if wanted < 1:
            raise ConfigError(f"devices={wanted}: at least one device is needed. {_ALLOWED}")
        most = _MOST_PROCESSES if available is None else available
        if wanted > most:
            raise ConfigError(_not_there(wanted, device_type, most))
        return wanted, None, f"{wanted}: as asked"
    if isinstance(wanted, Sequence):
        ids = [one for one in wanted if isinstance(one, int)]
        if len(ids) == len(wanted):
            return _ids(ids, device_type, available)
    raise ConfigError(f"devices={devices!r} cannot be read. {_ALLOWED}")


def _from_text(text: str) -> int | list[int]:
    if re.fullmatch(r"\s*-?\d+\s*", text):
        return int(text)
    if re.fullmatch(r"\s*\d+\s*(,\s*\d+\s*)*,?\s*", text):
        return [int(part) for part in text.split(",") if part.strip()]
    raise ConfigError(f"devices={text!r} cannot be read. {_ALLOWED}")


def _all_devices(wanted: object, device_type: str, available: int | None) -> tuple[int, None, str]:
    if available is not None:
        return available, None, f"{wanted}: all {device_type} devices ({available})"
    if device_type == "xla":
        return 1, None, f"{wanted}: one process drives all devices"
    if wanted == "auto":
        return 1, None, "auto: one process on the cpu"
    raise ConfigError(
        "devices=-1 means all GPUs, but the accelerator is the cpu. Say how many processes, such as devices=2."
    )


def _ids(ids: list[int], device_type: str, available: int | None) -> tuple[int, list[int], str]:
    if available is None or device_type == "tpu":
        raise ConfigError(
            f"devices={ids}: processes on {device_type} choose no numbers. Say how many, such as {len(ids) or 1}."
        )
    if not ids or len(set(ids)) < len(ids):
        raise ConfigError(f"devices={ids}: give each process a device of its own, at least one. {_ALLOWED}")
    if not all(0 <= i < available for i in ids):
        raise ConfigError(_not_there(ids, device_type, available))
    return len(ids), ids, f"{ids}: as asked"


def _not_there(given: object, device_type: str, available: int) -> str:
    look = ", or look at CUDA_VISIBLE_DEVICES" if device_type == "cuda" else ""
    return (
        f"devices={given}, but {available} {device_type} device{'' if available == 1 else 's'} can be seen, counted "
        f"from 0. Use devices='auto'{look}."
    )
