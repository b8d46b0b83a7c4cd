"""What a program of this folder has computed, written to `result.json`: numbers, and weights to the last bit."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

Tree = Mapping[str, Any]


def write(**computed: Any) -> None:
    """Write numbers, texts, tensors, arrays, modules (as their weights), and lists and dicts of these."""
    Path("result.json").write_text(json.dumps(as_data(computed), indent=1, sort_keys=True))


def as_data(value: Any) -> Any:
    """Return the value as JSON has it."""
    if isinstance(value, torch.nn.Module):
        return weights(value)
    if isinstance(value, Mapping):
        return {str(key): as_data(part) for key, part in value.items()}
    if isinstance(value, torch.Tensor | np.ndarray | np.generic):
        return value.tolist()
    if isinstance(value, Iterable) and not isinstance(value, str):
        return [as_data(part) for part in value]
    return value


def weights(module: torch.nn.Module) -> dict[str, Any]:
    """Return a checksum of all parameters and buffers, and their norm, which can be compared within a tolerance."""
    tensors = [tensor.detach().cpu() for _, tensor in sorted(module.state_dict().items()) if torch.is_tensor(tensor)]
    digest = hashlib.sha256(b"".join(tensor.contiguous().numpy().tobytes() for tensor in tensors)).hexdigest()
    return {"sha256": digest, "norm": sum(float(tensor.double().square().sum()) for tensor in tensors) ** 0.5}
