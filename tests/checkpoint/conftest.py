"""Compare exactly, draw random states, and forge checkpoints."""

from __future__ import annotations

import json
import math
import random
import warnings
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash

from trainer.checkpoint.manifest import with_checksum
from trainer.checkpoint.safetensors_io import flat_bytes
from trainer.checkpoint.serialization import DTYPES
from trainer.checkpoint.writing import write_checkpoint


def raw(tensor: torch.Tensor) -> list[int]:
    return flat_bytes(tensor.detach().resolve_conj().resolve_neg().contiguous()).tolist()


def check_same(one: Any, other: Any, where: str = "") -> None:
    """Assert equal types, values, order of keys, and bits of floats and tensors."""
    if isinstance(one, torch.Tensor):
        assert type(other) is torch.Tensor, where
        assert (one.dtype, one.shape) == (other.dtype, other.shape), where
        assert raw(one) == raw(other), where
        return
    assert type(one) is type(other), where
    if isinstance(one, dict):
        for (key, value), (other_key, other_value) in zip(one.items(), other.items(), strict=True):
            check_same(key, other_key, f"{where} key {key!r}")
            check_same(value, other_value, f"{where}[{key!r}]")
    elif isinstance(one, (list, tuple)):
        for index, (value, other_value) in enumerate(zip(one, other, strict=True)):
            check_same(value, other_value, f"{where}[{index}]")
    elif isinstance(one, float):
        assert math.copysign(1, one) == math.copysign(1, other), where
        assert one == other or (math.isnan(one) and math.isnan(other)), where
    else:
        assert one == other, where


@pytest.fixture
def assert_same() -> Callable[[Any, Any], None]:
    return check_same


SCALARS: list[Any] = [
    *(None, True, False, 0, -1, 2**63, -(2**64) - 1, 10**5000),
    *(0.1, -0.0, 5e-324, 1.7976931348623157e308, math.inf, -math.inf, math.nan, -math.nan),
    *("", "plain", "$tensor", "ünïcode \U0001f600", "\ud800", 'quote" \\ \n\0', "__metadata__"),
]


KINDS: list[Any] = [
    *({1, "1", (2, None)}, set(), frozenset({-0.5, torch.int8}), {Path("1"), "1", 1.0}, range(9, 0, -2)),
    *(torch.float32, torch.device("cuda:1"), torch.Size([2, 3]), timedelta(-3, 4, 5), Path("a/b")),
]


def random_tensor(rng: random.Random) -> torch.Tensor:
    dtype = rng.choice(list(DTYPES.values()))
    shape = [rng.choice([0, 1, 2, 5]) for _ in range(rng.choice([0, 1, 2, 4]))]
    numbers = torch.tensor([rng.randrange(256) for _ in range(math.prod(shape) * dtype.itemsize)], dtype=torch.uint8)
    if dtype is torch.bool:
        numbers = numbers % 2
    tensor = numbers.view(dtype).reshape(shape)
    return tensor.t() if tensor.dim() == 2 else tensor


def random_tree(rng: random.Random, depth: int) -> Any:
    kind = rng.choice(["scalar", "tensor", "kind", "list", "tuple", "dict", "keys", "counter"]) if depth else "scalar"
    size = rng.choice([0, 1, 2, 3])
    if kind == "scalar":
        return rng.choice(SCALARS)
    if kind == "tensor":
        return random_tensor(rng)
    if kind == "kind":
        return rng.choice(KINDS)
    if kind == "counter":
        return Counter([rng.randrange(3) for _ in range(size)])
    children = [random_tree(rng, depth - 1) for _ in range(size)]
    if kind == "list":
        return children
    if kind == "tuple":
        return tuple(children)
    if kind == "dict":
        return dict(zip(["a", "a.b", "0"], children, strict=False))
    return dict(zip(rng.sample([0, -5, "$tuple", "$x", "a", 2.5, (1, ("a", None)), None], 3), children, strict=False))


@pytest.fixture
def random_state() -> Callable[[int], dict[str, Any]]:
    """Return a random state for a seed."""

    def make(seed: int) -> dict[str, Any]:
        rng = random.Random(seed)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="ComplexHalf support is experimental")
            return {key: random_tree(rng, 4) for key in ("model", "optimizers", "rng", "extra")}

    return make


def small_state() -> dict[str, Any]:
    return {
        "model": {"a.weight": torch.arange(600.0).reshape(20, 30), "a.bias": torch.ones(20, dtype=torch.bfloat16)},
        "optimizers": [{"state": {0: {"exp_avg": torch.full((20, 30), 2.0), "step": torch.tensor(3.0)}}}],
        "progress": {"step": 3},
    }


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """Write a small checkpoint at step 3 and return its path."""
    path = tmp_path / "step=3"
    write_checkpoint(path, small_state(), info={"step": 3, "metrics": {"loss": 0.5}})
    return path


def reseal(folder: Path, change: Callable[[dict[str, Any]], None] | None = None) -> None:
    """Update the manifest for changed files, as an attacker would; `change` edits the manifest further."""
    body = json.loads((folder / "manifest.json").read_bytes())
    body.pop("seal")
    for name in body["files"]:
        data = (folder / name).read_bytes() if (folder / name).is_file() else b""
        body["files"][name] = {"bytes": len(data), "xxh3_128": xxhash.xxh3_128_hexdigest(data)}
    if change:
        change(body)
    (folder / "manifest.json").write_bytes(with_checksum(body))


@pytest.fixture(name="reseal")
def reseal_fixture() -> Callable[..., None]:
    return reseal
