"""Random numbers: seeding, deriving seeds, taking the generators' states out and putting them back."""

from __future__ import annotations

import hashlib
import os
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from trainer.distributed.environment import detect_environment
from trainer.distributed.tpu import torch_tpu_is_ready
from trainer.errors import ConfigError


def seed_everything(seed: int) -> None:
    """Seed the global generators of torch (all devices), numpy (with the lower 32 bits) and `random`.

    Raises:
        ConfigError: not a whole number from 0 to 2**63 - 1.
    """
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**63:
        raise ConfigError(f"seed={seed!r}: allowed is a whole number from 0 to 2**63 - 1.")
    if torch_tpu_is_ready() and detect_environment().source == "single process":
        # It may yet start others, and a chip belongs to the first process that touches it.
        torch.default_generator.manual_seed(seed)
    else:
        torch.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)


def seed_accelerator() -> None:
    """Seed the device's generator as the CPU's, which stays as it is."""
    state = torch.get_rng_state()
    torch.manual_seed(torch.initial_seed())
    torch.set_rng_state(state)


def derive_seed(*parts: int | str) -> int:
    """A seed from 0 to 2**63 - 1 that depends on all parts, the same on every machine and Python version."""
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        text = f"{'s' if isinstance(part, str) else 'i'}{part}".encode()
        digest.update(len(text).to_bytes(8, "little") + text)
    return int.from_bytes(digest.digest(), "little") >> 1


def rng_state(device: torch.device | None = None) -> dict[str, Any]:
    """The global generators' states as data: tensors on the cpu, numbers, strings, None.

    Args:
        device: also the generator of this device, if it is a cuda, mps or xla one.
    """
    version, words, gauss = random.getstate()
    numpy_state: dict[str, Any] = dict(np.random.get_state(legacy=False))
    inner = dict(numpy_state["state"])
    if "key" in inner:
        inner["key"] = torch.from_numpy(inner["key"].astype(np.int64))
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "numpy": {**numpy_state, "state": inner},
        "python": {"version": version, "words": torch.tensor(words, dtype=torch.int64), "gauss": gauss},
    }
    if device is not None and device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    elif device is not None and device.type == "mps":
        state["mps"] = torch.mps.get_rng_state()
    elif device is not None and device.type == "xla":
        from torch_xla.core import xla_model

        state["xla"] = xla_model.get_rng_state(device)
    return state


def set_rng_state(state: dict[str, Any], device: torch.device | None = None) -> None:
    """Put back what `rng_state` gave. A device's part is used only on a device of the same type."""
    torch.set_rng_state(state["torch"].cpu())
    if device is not None and device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"].cpu(), device)
    elif device is not None and device.type == "mps" and "mps" in state:
        torch.mps.set_rng_state(state["mps"].cpu())
    elif device is not None and device.type == "xla" and "xla" in state:
        from torch_xla.core import xla_model

        xla_model.set_rng_state(state["xla"], device)
    inner = dict(state["numpy"]["state"])
    if "key" in inner:
        inner["key"] = inner["key"].cpu().numpy().astype(np.uint32)
    np.random.set_state({**state["numpy"], "state": inner})
    python = state["python"]
    random.setstate((python["version"], tuple(python["words"].tolist()), python["gauss"]))


@contextmanager
def isolated_rng(device: torch.device | None = None) -> Iterator[None]:
    """What runs inside leaves the global generators as they were."""
    state = rng_state(device)
    try:
        yield
    finally:
        set_rng_state(state, device)


def set_deterministic(deterministic: bool | str, benchmark: bool | None = None) -> Callable[[], None]:
    """Ask torch for deterministic algorithms, and say whether cuDNN may choose algorithms by timing them.

    Args:
        deterministic: True (an operation that has no deterministic algorithm raises), `"warn"` (it warns), or
            False (torch's own setting stays as it is).
        benchmark: for `torch.backends.cudnn.benchmark`; None leaves it, or switches it off with `deterministic`.

    Returns:
        A function that puts torch's settings back.

    Raises:
        ConfigError: an unknown value, or both at once.
    """
    if deterministic not in (True, False, "warn"):
        raise ConfigError(f"deterministic={deterministic!r}. Allowed: True, False, 'warn'.")
    if deterministic and benchmark:
        raise ConfigError(
            "benchmark=True chooses algorithms by their speed, which differs from run to run; "
            "that contradicts deterministic. Leave one of them out."
        )
    before = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.backends.cudnn.benchmark,
    )
    if deterministic:
        # cuBLAS reads it when it is first used: https://docs.nvidia.com/cuda/cublas/#results-reproducibility
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True, warn_only=deterministic == "warn")
        torch.backends.cudnn.benchmark = False
    elif benchmark is not None:
        torch.backends.cudnn.benchmark = benchmark

    def undo() -> None:
        if deterministic:  # the call imports torch._inductor, which takes a second
            torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        torch.backends.cudnn.benchmark = before[2]

    return undo
