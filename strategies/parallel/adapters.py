"""Split layers that PEFT has wrapped: the layer as the plan says, and the matrices of its adapters so that they fit."""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, SequenceParallel

from trainer.errors import ConfigError, first_of


class FullInputs(ParallelStyle):
    """Replicate a layer, and gather its inputs where a norm on parts of sequences has made a distributed tensor."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        module.register_forward_pre_hook(_gathered)
        return module


def _gathered(layer: nn.Module, args: tuple[Any, ...]) -> Any:
    return (args[0].full_tensor(), *args[1:]) if isinstance(args[0], DTensor) else None


def wrapped_layers(names: Mapping[str, nn.Module]) -> set[str]:
    """Return the names of the modules that PEFT has put in the place of others."""
    peft: Any = sys.modules.get("peft")
    if peft is None:
        return set()
    kinds = peft.tuners.tuners_utils.BaseTunerLayer, peft.utils.other.AuxiliaryTrainingWrapper
    return {name for name, layer in names.items() if isinstance(layer, kinds)}


def refuse_adapted_parameters(module: nn.Module) -> None:
    """Raise ConfigError if PEFT changes parameters in each forward, as for experts that are one tensor."""
    peft: Any = sys.modules.get("peft")
    kind = () if peft is None else getattr(peft.tuners.lora.layer, "ParamWrapper", ())
    found = [name for name, layer in module.named_modules() if isinstance(layer, kind)]
    if found:
        raise ConfigError(
            f"LoraConfig(target_parameters=[...]) replaces the parameters of {first_of(found)} in each forward, and "
            "strategy 'fsdp' has shards of them. Name layers by target_modules alone, or use strategy 'ddp' or "
            "'deepspeed_stage_3'."
        )


def styles_within(
    names: Mapping[str, nn.Module], styles: Mapping[str, ParallelStyle], wrapped: Collection[str]
) -> dict[str, ParallelStyle]:
    """Replace the styles of wrapped layers by styles of their parts; layers that cannot be split keep theirs.

    An adapter of LoRA is two layers in a row beside its layer. If the layer's outputs are split, so are the outputs of
    the second one; if its inputs are split, so are the inputs of the first one.

    Args:
        names: modules by their names.
        styles: of layers, by their names.
        wrapped: see `wrapped_layers`.
    """
    found: dict[str, ParallelStyle] = {}
    for name, style in styles.items():
        parts = {}
        if name in wrapped and isinstance(style, (ColwiseParallel, RowwiseParallel)):
            parts = _parts(names[name], style)
        found |= {f"{name}.{part}": own for part, own in parts.items()} or {name: style}
    return found


def _parts(layer: Any, style: ColwiseParallel | RowwiseParallel) -> dict[str, ParallelStyle]:
    """Return the styles of the parts of a wrapped layer, by their names in it; nothing if it cannot be split."""
    from peft.tuners.lora import Embedding, Linear
    from peft.utils.other import ModulesToSaveWrapper

    if type(layer) is ModulesToSaveWrapper:  # copies of a layer, of which one is used
        return dict.fromkeys(["original_module", *(f"modules_to_save.{copy}" for copy in layer.modules_to_save)], style)
    if getattr(layer, "lora_variant", None):
        return {}
    if type(layer) is Embedding and isinstance(style, RowwiseParallel) and style.output_layouts == (Replicate(),):
        return {"base_layer": style}  # whose vocabulary is split
    if type(layer) is not Linear:
        return {}
    first, second = ([f"{matrix}.{adapter}" for adapter in layer.lora_A] for matrix in ("lora_A", "lora_B"))
    # Where activations are split along the sequence, the other matrix acts on parts of it.
    if isinstance(style, ColwiseParallel):
        other = SequenceParallel() if style.input_layouts == (Shard(1),) else FullInputs()
        return {**dict.fromkeys(["base_layer", *second], style), **dict.fromkeys(first, other)}
    by_sequence = SequenceParallel(use_local_output=True)
    others = dict.fromkeys(second, by_sequence) if style.output_layouts == (Shard(1),) else {}
    return {**dict.fromkeys(["base_layer", *first], style), **others}
