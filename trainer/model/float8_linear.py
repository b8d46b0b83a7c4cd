"""torchao's linear layer of 8 bits, for any number of rows; importing this imports torchao."""

from __future__ import annotations

import torch
from torchao.float8 import float8_linear

from trainer.model.float8_layers import ROWS, in_full_rows


class Float8Linear(float8_linear.Float8Linear):  # type: ignore[misc]
    """Compute as torchao's layer does, which on GPUs fails for a number of rows that is not a multiple of 16."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return in_full_rows(super().forward, input, ROWS)
