"""The configs of Hugging Face models in a module, which `from_pretrained` needs in addition to their weights."""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Iterable
from itertools import chain
from pathlib import Path
from typing import Any

from torch import nn

from trainer.model.blocks import outermost


def hugging_face_models(module: nn.Module) -> dict[str, dict[str, Any]]:
    """Return, by the prefix of its weights' names, the config of each Hugging Face model in a module, as JSON data.

    With the config goes whether the model ties its embeddings, which `config.json` may leave to a default. A model that
    PEFT has changed has other weights than its class, and is left out.
    """
    found: dict[str, dict[str, Any]] = {}
    for prefix, model in outermost(module, _is_model).items():
        if hasattr(model, "peft_config"):
            continue
        config = model.config
        generation = getattr(model, "generation_config", None)
        found[prefix] = {
            "config": {**json.loads(config.to_json_string()), "architectures": [type(model).__name__]},
            "generation_config": None if generation is None else json.loads(generation.to_json_string()),
            "tied": bool(getattr(config.get_text_config(), "tie_word_embeddings", True)),
        }
    return found


def _is_model(module: nn.Module) -> bool:
    """Whether this is a model of Hugging Face, or one that PEFT has changed."""
    if hasattr(type(module), "save_pretrained") and hasattr(getattr(module, "config", None), "get_text_config"):
        return True
    return hasattr(module, "peft_config")


_PROCESSORS = {"PreTrainedTokenizerBase", "ProcessorMixin", "ImageProcessingMixin", "FeatureExtractionMixin"}
"""The base classes of what prepares a model's inputs."""


def processing_files(owners: Iterable[object]) -> dict[str, str]:
    """Return the files of the first tokenizer, processor and the like among the attributes of some objects.

    Returns:
        Names -> texts. A file that is not text, which only old tokenizers have, is left out.
    """
    files: dict[str, str] = {}
    for value in chain.from_iterable(vars(owner).values() for owner in owners):
        if not _PROCESSORS.isdisjoint(kind.__name__ for kind in type(value).__mro__):
            with tempfile.TemporaryDirectory() as folder:
                value.save_pretrained(folder)
                for path in sorted(Path(folder).iterdir()):
                    if is_processing_file(path.name) and path.is_file():
                        files.setdefault(path.name, path.read_text(encoding="utf-8"))
    return files


def is_processing_file(name: str) -> bool:
    """Whether a name is of a text file that comes with a model, other than the model's own files."""
    return re.fullmatch(r"(?!config|generation_config|model)[a-z0-9_]{1,60}\.(json|txt|jinja)", name) is not None
