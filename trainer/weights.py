"""Loading weights by name, with an error that says whose they are."""

from __future__ import annotations

from collections.abc import Mapping

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
