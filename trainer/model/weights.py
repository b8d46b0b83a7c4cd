"""Loading weights by name, with an error that says whose they are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from trainer.errors import CheckpointError


def load_weights(module: nn.Module, state: Mapping[str, torch.Tensor], strict: bool = True) -> None:
    """Load weights and buffers by name.

    Raises:
        CheckpointError: names or shapes differ from the module's.
    """
    try:
        module.load_state_dict(state, strict=strict)
    except RuntimeError as error:
        raise CheckpointError(
            f"the checkpoint does not fit {type(module).__name__}: {error}\n"
            "It was written for another model, or with other hyperparameters."
        ) from None


def check_fit(module: nn.Module, own: Mapping[str, Any], state: Mapping[str, Any], strict: bool) -> None:
    """Compare the names and shapes of weights with those of the module (`own`: its `state_dict`).

    Raises:
        CheckpointError: they differ. Without `strict`, names may.
    """
    problems = [
        f"size mismatch for {name}: the checkpoint has {list(state[name].shape)}, the module {list(mine.shape)}"
        for name, mine in own.items()
        if name in state and hasattr(mine, "shape") and tuple(mine.shape) != tuple(state[name].shape)
    ]
    missing, unexpected = own.keys() - state.keys(), state.keys() - own.keys()
    if strict and missing:
        problems.append(f"the checkpoint lacks {', '.join(sorted(missing))}")
    if strict and unexpected:
        problems.append(f"the module lacks {', '.join(sorted(unexpected))}")
    if problems:
        raise CheckpointError(
            f"the checkpoint does not fit {type(module).__name__}: {'; '.join(problems)}\n"
            "It was written for another model, or with other hyperparameters."
        )
