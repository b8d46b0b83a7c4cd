"""The layers that compute in 8 bits: torchao's, and one with a scale for each block. Importing this imports torchao."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torchao.float8.float8_linear import Float8Linear as LayerOfTorchao

from trainer.float8 import MX_BLOCK, ROWS


class Float8Linear(LayerOfTorchao):  # type: ignore[misc]
    """Compute as torchao's layer does, which on GPUs fails for a number of rows that is not a multiple of 16."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return in_full_rows(super().forward, input, ROWS)


class MXLinear(nn.Linear):
    """A linear layer whose products have a scale of 8 bits for each 32 numbers; made of an nn.Linear by its class."""

    product: Any
    """torchao's product of an input and a weight, with its gradients."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        device, dtype = input.device.type, input.dtype
        if torch.is_autocast_enabled(device):
            dtype = torch.get_autocast_dtype(device)
        with torch.autocast(device, enabled=False):
            weight = self.weight.to(dtype)
            output = in_full_rows(lambda rows: self.product(rows, weight), input.to(dtype), MX_BLOCK)
            return output if self.bias is None else output + self.bias.to(dtype)


def in_full_rows(product: Callable[[torch.Tensor], torch.Tensor], input: torch.Tensor, multiple: int) -> torch.Tensor:
    """Return `product(input)`, computed with zeros up to a number of rows that is a multiple of `multiple`.

    The gradient of a weight is a product over the rows. Zeros add nothing to it, nor to a largest value. An expert that
    no token has chosen gets a row of zeros, because the largest value of nothing is not defined.

    Args:
        input: (..., features).
    """
    size = input.shape[-1]
    rows = input.numel() // size
    if rows > 0 and rows % multiple == 0:
        return product(input)
    padded = nn.functional.pad(input.reshape(rows, size), (0, 0, 0, multiple - rows % multiple))
    output = product(padded)[:rows]
    return output.reshape(*input.shape[:-1], output.shape[-1])
