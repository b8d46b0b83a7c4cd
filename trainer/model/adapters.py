"""The adapters of PEFT in a module: their configs, and the names of their weights in PEFT's own files."""

from __future__ import annotations

import copy
import json
import os
import tempfile
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from torch import nn

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"


def adapters(module: nn.Module, names: Iterable[str]) -> dict[str, dict[str, dict[str, Any]]]:
    """Return what each adapter's folder holds besides tensors, by the prefix of its model's weights and its name.

    Args:
        names: the names of the module's weights and buffers.

    Returns:
        For each adapter the `config`, as JSON data, and `weights`: the name in PEFT's file -> that in the module. None
        for `weights` of a method that computes them.
    """
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for name, model in module.named_modules():
        if not (hasattr(type(model), "get_base_model") and hasattr(model, "peft_config")):
            continue
        prefix = f"{name}." if name else ""
        own = [other.removeprefix(prefix) for other in names if other.startswith(prefix)]
        found[prefix] = {
            adapter: {"config": _config(model, config), "weights": _weights(model, adapter, prefix, own)}
            for adapter, config in model.peft_config.items()
        }
    return found


def without_adapters(module: nn.Module, names: Iterable[str]) -> dict[str, str | None]:
    """Return for each name of a module's tensors the one that it would have without PEFT; None: PEFT has added it."""
    wrapped = {path for path, child in module.named_modules() if _wraps_layer(child)}
    models = {path for path, child in module.named_modules() if _configs(child)}
    return {name: _without_adapter(name.split("."), wrapped, models) for name in names}


def options_made_of_weights(module: nn.Module) -> list[str]:
    """Name the options of PEFT that compute adapters from the weights that a model has when they are added."""
    found = []
    for model in module.modules():
        for config in _configs(model).values():
            start = getattr(config, "init_lora_weights", True)
            if getattr(config, "use_dora", False):
                found.append("use_dora=True")
            if isinstance(start, str) and start not in ("gaussian", "orthogonal"):
                found.append(f"init_lora_weights={start!r}")
            if getattr(config, "trainable_token_indices", None):
                found.append("trainable_token_indices")
    return list(dict.fromkeys(found))


def _configs(model: nn.Module) -> Mapping[str, Any]:
    """Return the configs of the adapters of a model; what a module of the user keeps under that name is not one."""
    configs = getattr(model, "peft_config", None)
    return configs if isinstance(configs, Mapping) else {}


def _wraps_layer(child: nn.Module) -> bool:
    is_pefts = type(child).__module__.startswith("peft.")
    return is_pefts and not {"base_layer", "original_module"}.isdisjoint(child._modules)


def _without_adapter(parts: list[str], wrapped: set[str], models: set[str]) -> str | None:
    kept: list[str] = []
    number = 0
    while number < len(parts):
        owner, part = ".".join(parts[:number]), parts[number]
        if owner in models and part == "prompt_encoder":
            return None
        if owner not in wrapped:
            kept.append(part)
        elif part == "modules_to_save":
            number += 1  # the adapter's name
        elif part not in ("base_layer", "original_module", "token_adapter"):
            return None
        number += 1
    return ".".join(kept)


def _config(model: Any, config: Any) -> dict[str, Any]:
    """Return the contents of the config file as the model's `save_pretrained` writes them."""
    config, mapping = copy.copy(config), None
    config.inference_mode = True
    if config.base_model_name_or_path is None:
        config.base_model_name_or_path = getattr(model.get_base_model(), "name_or_path", None) or None
    if config.task_type is None:
        base = type(model.get_base_model())
        mapping = {"base_model_class": base.__name__, "parent_library": base.__module__}
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder, auto_mapping_dict=mapping)
        read: dict[str, Any] = json.loads((Path(folder) / CONFIG_FILE).read_text(encoding="utf-8"))
    return read


def _weights(model: Any, adapter: str, prefix: str, names: list[str]) -> dict[str, str] | None:
    """Return the names of the weights: PEFT chooses and renames among names that stand for themselves."""
    from peft import get_peft_model_state_dict

    config = model.peft_config[adapter]
    base = config.base_model_name_or_path
    try:
        # Without the name of a model on the hub, which PEFT would ask in every checkpoint for the vocabulary's size.
        config.base_model_name_or_path = base if base and os.path.isdir(base) else None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            chosen = get_peft_model_state_dict(model, {name: name for name in names}, adapter)
    except Exception:  # a method's own code, which may compute with the weights
        return None
    finally:
        config.base_model_name_or_path = base
    if not chosen or not all(isinstance(name, str) for name in chosen.values()):
        return None
    return {theirs: f"{prefix}{name}" for theirs, name in chosen.items()}
