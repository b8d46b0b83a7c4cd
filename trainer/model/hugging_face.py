"""The configs of Hugging Face models in a module, which `from_pretrained` needs in addition to their weights."""

from __future__ import annotations

import json
from typing import Any

from torch import nn


def hugging_face_models(module: nn.Module) -> dict[str, dict[str, Any]]:
    """Return, by the prefix of its weights' names, the config of each Hugging Face model in a module, as JSON data.

    With the config goes whether the model ties its embeddings, which `config.json` may leave to a default.
    """
    found: dict[str, dict[str, Any]] = {}
    for name, model in module.named_modules():
        prefix = f"{name}." if name else ""
        outer = any(prefix.startswith(other) for other in found)
        if outer or not hasattr(type(model), "save_pretrained") or hasattr(model, "peft_config"):
            continue
        config: Any = getattr(model, "config", None)
        if not hasattr(config, "to_json_string") or not hasattr(config, "get_text_config"):
            continue
        generation = getattr(model, "generation_config", None)
        found[prefix] = {
            "config": {**json.loads(config.to_json_string()), "architectures": [type(model).__name__]},
            "generation_config": None if generation is None else json.loads(generation.to_json_string()),
            "tied": bool(getattr(config.get_text_config(), "tie_word_embeddings", True)),
        }
    return found
