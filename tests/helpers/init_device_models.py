"""Layers that initialize themselves, and a function that cannot build on the meta device, for tests of init_device=."""

from __future__ import annotations

import torch
from torch import nn


class Rotary(nn.Module):
    """Its table is in no checkpoint, and is made anew by `reset_parameters`."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("inv_freq", self.table(), persistent=False)
        self.register_buffer("mask", torch.ones(3, 3).tril().bool(), persistent=False)

    @staticmethod
    def table() -> torch.Tensor:
        return 10000.0 ** -(torch.arange(0, 8, 2) / 8)

    def reset_parameters(self) -> None:
        self.inv_freq = self.table()
        self.mask.copy_(torch.ones(3, 3).tril())


class Block(nn.Module):
    """Initializes its layers again when all of them are there, and two of them with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.rotary = nn.Linear(4, 4), nn.Linear(4, 4, bias=False), Rotary()
        self.second.weight = self.first.weight
        self.init_weights()

    def init_weights(self) -> None:
        nn.init.trunc_normal_(self.first.weight, std=0.02)
        self.first.bias.data.fill_(0.5)


def from_pretrained() -> nn.Module:
    """Refuse to read weights into tensors without memory, as that of transformers does."""
    if torch.get_default_device() == torch.device("meta"):
        raise RuntimeError("You are using `from_pretrained` with a meta device context manager.\nDo not.")
    return nn.Linear(2, 2)
