"""Models that accelerate has placed on several devices, in memory and on disk: for inference, where they stay."""

from __future__ import annotations

import torch
from torch import nn

from trainer.errors import ConfigError
from trainer.model.blocks import outermost


def dispatched_models(module: nn.Module) -> dict[str, nn.Module]:
    """Return the outermost modules with accelerate's hooks, which bring weights to the layers; see `outermost`."""
    return outermost(module, lambda child: "_hf_hook" in vars(child))


def refuse_dispatched(module: nn.Module, training: bool, shards: bool, converts: bool) -> None:
    """Raise ConfigError for a dispatched model in a run that cannot have one.

    Args:
        shards: the strategy shards weights.
        converts: the precision converts weights.
    """
    models = dispatched_models(module)
    if models and (training or shards or converts):
        name = f"{type(module).__name__}.{next(iter(models))}".rstrip(".")
        raise ConfigError(
            f"{name} was placed by accelerate (device_map, cpu_offload or disk_offload), and its parameters hold no "
            "values: it can validate, test and predict, with strategy='single_device', devices=1 and "
            "precision='32-true' (the dtype is given to the loading). To train it, build it without device_map under "
            "strategy 'fsdp' or 'deepspeed_stage_3', with init_device='mixed' or 'meta' and fit(weights=...)."
        )


def move_the_rest(module: nn.Module, device: torch.device) -> None:
    """Move the parameters and buffers outside of dispatched models."""
    placed = {id(child) for model in dispatched_models(module).values() for child in model.modules()}
    for child in module.modules():
        if id(child) not in placed:
            for tensor in (*child.parameters(recurse=False), *child.buffers(recurse=False)):
                tensor.data = tensor.data.to(device)
