"""Data and settings that the scripts have in common; of no trainer."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

LOSSES: list[torch.Tensor] = []
"""The losses of the script that runs."""


def dataset(samples: int = 48, seed: int = 1) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(samples, 8, generator=generator)
    return TensorDataset(inputs, (inputs.sum(1) > 0).long())


def loader(samples: int = 48, batch_size: int = 8, seed: int = 1) -> DataLoader[Any]:
    return DataLoader(dataset(samples, seed), batch_size)


class ReadyBatches:
    """Batches that are there already: a DataLoader begins with a draw from the global generator, here without."""

    def __init__(self, batches: list[Any]) -> None:
        self.batches = batches

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Any:
        return iter([[part.clone() for part in batch] for batch in self.batches])


def ready(samples: int = 48, batch_size: int = 8, seed: int = 1) -> ReadyBatches:
    """Batches for training steps that draw random numbers."""
    return ReadyBatches([*loader(samples, batch_size, seed)])


def quiet(folder: Any, **settings: Any) -> dict[str, Any]:
    off = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing"), False)
    return {"accelerator": "cpu", "devices": 1, "default_root_dir": folder, **off, **settings}


def noted(loss: torch.Tensor) -> torch.Tensor:
    LOSSES.append(loss.detach().clone())
    return loss
