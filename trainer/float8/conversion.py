"""Have the linear layers of a module compute in 8 bits by torchao's recipes, and undo it."""

from __future__ import annotations

import logging
import sys
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from trainer.errors import ConfigError, first_of
from trainer.float8 import MX_BLOCK, ROWS

log = logging.getLogger("trainer")

NATIVE_FLOAT8 = {"tensorwise": (8, 9), "rowwise": (8, 9), "mx": (10, 0)}
"""The least compute capability of a GPU that multiplies in 8 bits (Ada and Hopper; Blackwell), by recipe."""


def convert_linear_layers(module: nn.Module, name: str, recipe: str) -> None:
    """Have linear layers compute in 8 bits, in place, with the same parameters; the log says which do not, and why.

    Weights, activations and gradients are scaled by their largest value and rounded in each product
    (https://github.com/pytorch/ao/tree/main/torchao/float8). Subclasses of nn.Linear, which may compute something else,
    stay unchanged.

    Raises:
        ConfigError: no layer can.
    """
    multiple = MX_BLOCK if recipe == "mx" else ROWS
    linear = {path: child for path, child in module.named_modules() if isinstance(child, nn.Linear)}
    whole = [path for path, one in linear.items() if one.in_features % multiple == one.out_features % multiple == 0]
    fits = [path for path in whole if type(linear[path]) is nn.Linear]
    if not fits:
        raise ConfigError(
            f"precision={name!r}: no nn.Linear of {type(module).__name__} has sizes that are multiples of {multiple}, "
            "and only these compute in 8 bits: use 'bf16-mixed', or other sizes."
        )
    native = has_float8(recipe)
    if recipe == "mx":
        _convert_to_mx([linear[path] for path in fits], native)
    else:
        _convert_to_float8(module, fits, recipe, native)
    how = "" if native else ", emulated on this machine: with the same rounding, but not faster"
    log.info("%s: %d linear layers compute in 8 bits%s", name, len(fits), how)
    if others := [path for path in linear if path not in fits]:
        log.info(
            "not in 8 bits, because sizes are not multiples of %d, or a subclass may compute something else: %s",
            multiple,
            first_of(others),
        )


def _convert_to_float8(module: nn.Module, fits: list[str], recipe: str, native: bool) -> None:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    from trainer.float8.layers import Float8Linear

    linear = {path: module.get_submodule(path) for path in fits}
    config = replace(Float8LinearConfig.from_recipe_name(recipe), emulate=not native)
    convert_to_float8_training(module, config=config, module_filter_fn=lambda child, path: path in linear)
    for path, before in linear.items():
        after = module.get_submodule(path)
        after.__class__ = Float8Linear
        _keep_attributes(before, after)


def _convert_to_mx(layers: list[nn.Module], native: bool) -> None:
    from torchao.prototype.moe_training import mxfp8_linear
    from torchao.prototype.mx_formats.config import ScaleCalculationMode
    from torchao.quantization.quantize_.common.kernel_preference import KernelPreference

    from trainer.float8.layers import MXLinear

    product = partial(
        mxfp8_linear._to_mxfp8_then_scaled_mm,
        kernel_preference=KernelPreference.AUTO if native else KernelPreference.EMULATED,
        scale_calculation_mode=ScaleCalculationMode.RCEIL,
    )
    for layer in layers:
        layer.__class__ = MXLinear
        vars(layer)["product"] = product


def has_float8(recipe: str) -> bool:
    """Whether this machine's GPU multiplies in 8 bits by a recipe; elsewhere that is emulated."""
    return torch.cuda.is_available() and torch.cuda.get_device_capability() >= NATIVE_FLOAT8[recipe]


def restore_linear_layers(module: nn.Module) -> None:
    """Undo `convert_linear_layers`, which an earlier run may have done."""
    for _, child in _converted(module, "MXLinear"):
        child.__class__ = nn.Linear
        vars(child).pop("product", None)  # a layer under two names comes twice
    _restore(module, [name for name, _ in _converted(module, "Float8Linear")])


def restore_odd_parts(module: nn.Module) -> None:
    """Undo `convert_linear_layers` where a part of a split weight has sizes that GPUs do not multiply."""
    odd = [name for name, child in _converted(module, "Float8Linear") if _has_odd_parts(child.weight)]
    _restore(module, odd)
    if odd:
        log.info("not in 8 bits, because sizes of their parts are not multiples of %d: %s", ROWS, first_of(odd))


def layers_in_8_bits(module: nn.Module) -> list[Any]:
    """Return the layers that `convert_linear_layers` has made."""
    return [child for _, child in _converted(module, "MXLinear", "Float8Linear")]


def _converted(module: nn.Module, *kinds: str) -> list[tuple[str, Any]]:
    """Return the layers of these classes of `trainer.float8.layers`, by all their names."""
    layers = sys.modules.get("trainer.float8.layers")
    if layers is None:  # not imported: nothing was converted
        return []
    classes = tuple(getattr(layers, kind) for kind in kinds)
    return [(name, child) for name, child in module.named_modules(remove_duplicate=False) if isinstance(child, classes)]


def _restore(module: nn.Module, names: list[str]) -> None:
    restored: dict[int, nn.Linear] = {}
    for name in names:
        layer = module.get_submodule(name)
        if id(layer) not in restored:
            restored[id(layer)] = _restored(layer)
        module.set_submodule(name, restored[id(layer)])


def _has_odd_parts(weight: Any) -> bool:
    from torch.distributed.tensor import DTensor, Shard

    if not isinstance(weight, DTensor):
        return False
    parts = zip(weight.device_mesh.shape, weight.placements, strict=True)
    return any(isinstance(place, Shard) and weight.shape[place.dim] % (ROWS * number) != 0 for number, place in parts)


def _restored(layer: Any) -> nn.Linear:
    linear = nn.Linear(layer.in_features, layer.out_features, bias=layer.bias is not None, device="meta")
    linear._parameters.update(layer._parameters)
    _keep_attributes(layer, linear)
    return linear.train(layer.training)


def _keep_attributes(before: nn.Module, after: nn.Module) -> None:
    """Give a layer the hooks of the one that it replaces, and the attributes that a user has set."""
    known = {*vars(after), *_OF_FLOAT8}
    vars(after).update({name: value for name, value in vars(before).items() if "hook" in name or name not in known})


_OF_FLOAT8 = ("config", "linear_mm_config", *(f"scaling_type_{what}" for what in ("input", "weight", "grad_output")))
"""The attributes that torchao adds to a layer."""
