"""Check a DeepSpeed configuration against what the installed DeepSpeed reads."""

from __future__ import annotations

import functools
import re
import typing
from collections.abc import Mapping, Sequence
from typing import Any

from trainer.errors import did_you_mean

AUTO = "auto"

READ_BY_THE_ENGINE = ("activation_checkpointing", "aio", "autotuning", "flops_profiler", "sequence_parallel_size")
"""Keys that `DeepSpeedConfig` does not look up: it hands the dict to other parts of DeepSpeed (0.19.8), which do."""

MODELS = {
    "zero_optimization": "zero_config",
    "fp16": "float16_config",
    "bf16": "bfloat16_config",
    "bfloat16": "bfloat16_config",
    "compile": "compile_config",
    "tensor_parallel": "tensor_parallel_config",
    "hybrid_engine": "hybrid_engine",
}
"""Sections that DeepSpeed reads with a pydantic model, and where its configuration object keeps that."""

ACCELERATE_EQUIVALENTS = {
    "zero_stage": '{"zero_optimization": {"stage": ...}}',
    "offload_optimizer": '{"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}',
    "offload_optimizer_device": '{"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}',
    "offload_param_device": '{"zero_optimization": {"offload_param": {"device": "cpu"}}}',
    "zero3_init_flag": "nothing: layers built in the module's configure_model are sharded when it has ended",
    "zero3_save_16bit_model": '{"zero_optimization": {"stage3_gather_16bit_weights_on_model_save": true}}',
    "deepspeed_config_file": "DeepSpeedStrategy(config=<that file>)",
    "mixed_precision": "Trainer(precision='16-mixed' or 'bf16-mixed')",
    "distributed_type": "Trainer(strategy='deepspeed')",
    "deepspeed_config": "what stands under it, as DeepSpeed's own JSON",
}
"""Keys of Accelerate's plugin and of its configuration file, and what to give here."""

UNSUPPORTED = {
    "pipeline": "the pipeline engine has a loop of its own",
    "sequence_parallel_size": "it needs DeepSpeed's own attention and data loader",
    "autotuning": "it starts its own runs",
}


@functools.cache
def known_keys() -> frozenset[str]:
    """Return the keys that the installed DeepSpeed reads at the top level.

    DeepSpeed has no model for its top level and ignores other keys without a word, so its reader is given a dict that
    records what it looks up.
    """
    from deepspeed.runtime.config import DeepSpeedConfig

    class Recorder(dict[str, Any]):
        def get(self, key: str, default: Any = None) -> Any:
            read.add(key)
            return super().get(key, default)

        def __contains__(self, key: object) -> bool:
            read.add(str(key))
            return super().__contains__(key)

        def __getitem__(self, key: str) -> Any:
            read.add(key)
            return super().__getitem__(key)

        def keys(self) -> Any:  # `key in config.keys()`
            return self

        def __copy__(self) -> Recorder:
            return self

    read = set(READ_BY_THE_ENGINE)
    DeepSpeedConfig(Recorder(train_micro_batch_size_per_gpu=1))
    return frozenset(read)


def key_problems(config: Mapping[str, Any]) -> list[str]:
    """Return the keys and values that the installed DeepSpeed does not take, one sentence each; `"auto"` is skipped."""
    problems = []
    for key, value in config.items():
        if key not in known_keys() and key in ACCELERATE_EQUIVALENTS:
            problems.append(f"{key!r} is not a DeepSpeed key. Use {ACCELERATE_EQUIVALENTS[key]}.")
        elif key not in known_keys():
            suggestion = did_you_mean(key, sorted(known_keys()))
            problems.append(f"{key!r} is not a DeepSpeed key, and it would be ignored.{suggestion}")
        elif key in UNSUPPORTED and value not in (None, False, 1, {}, AUTO):
            problems.append(f"{key!r} cannot be used with the trainer: {UNSUPPORTED[key]}. Remove it.")
        elif value != AUTO:
            problems += _section_problems(key, value)
    return problems


def complete_config_problems(config: Mapping[str, Any]) -> list[str]:
    """Return why DeepSpeed refuses a configuration without `"auto"` of which each section is right by itself."""
    # DeepSpeed compares the global batch with the number of processes, which may not have been joined yet.
    return _objections({key: value for key, value in config.items() if key != "train_batch_size"}, "")


def default_of(section: str, path: tuple[str, ...]) -> Any:
    """Return the default that DeepSpeed's model of a section has, as JSON holds it.

    Raises:
        KeyError: the section has no model, or that has no such field.
    """
    default = _fields(section, path[:-1])[path[-1]].get_default(call_default_factory=True)
    default = getattr(default, "value", default)
    # DeepSpeed's integers print themselves as 5e8.
    return int(default) if isinstance(default, int) and not isinstance(default, bool) else default


def _section_problems(key: str, value: Any) -> list[str]:
    """Return DeepSpeed's objections to one top-level entry."""
    if key in (*MODELS, "optimizer", "scheduler") and not isinstance(value, Mapping):
        return [f"{key}={value!r}: give an object, as in DeepSpeed's documentation: {{...}}."]
    if key in ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"):
        return [] if type(value) is int and value > 0 else [f"{key}={value!r}: give an integer from 1, or 'auto'."]
    if key == "gradient_clipping":
        number = type(value) in (int, float) and value >= 0
        return [] if number else [f"{key}={value!r}: give a number, 0 for no clipping, or 'auto'."]
    return _objections({key: _without_auto(value)}, key)


def _without_auto(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_auto(part) for key, part in value.items() if part != AUTO}
    return value


def _objections(config: dict[str, Any], key: str) -> list[str]:
    from deepspeed.runtime.config import DeepSpeedConfig
    from pydantic import ValidationError

    try:
        DeepSpeedConfig({"train_micro_batch_size_per_gpu": 1, **config})
    except ValidationError as error:
        return [_sentence(key, dict(found)) for found in error.errors()]
    # DeepSpeed objects with every kind of exception, KeyError too.
    except Exception as error:
        text = re.sub(r"\s+", " ", str(error)).strip()
        return [f"{key}: {text}" if key and key not in text else text]
    return []


def _sentence(section: str, found: dict[str, Any]) -> str:
    """Return the message for one of pydantic's findings; `section` is empty where it is not known."""
    path = tuple(str(part) for part in found["loc"])
    where = ".".join(path if not section or path[0] == section else (section, *path))
    if found["type"] == "extra_forbidden" and section in MODELS:
        return f"{where!r} is not a DeepSpeed key.{did_you_mean(path[-1], _fields(section, path[:-1]))}"
    return f"{where}={found['input']!r}: {found['msg'].removeprefix('Value error, ')}."


def _fields(section: str, path: Sequence[str]) -> dict[str, Any]:
    """Return the fields of the model at a path inside a section's, under every name that DeepSpeed takes."""
    from deepspeed.runtime.config import DeepSpeedConfig

    model: Any = type(getattr(DeepSpeedConfig({"train_micro_batch_size_per_gpu": 1}), MODELS[section]))
    fields = _names(model)
    for name in path:
        annotation = fields[name].annotation  # such as Optional[Model]
        fields = _names(next(m for m in (annotation, *typing.get_args(annotation)) if hasattr(m, "model_fields")))
    return fields


def _names(model: Any) -> dict[str, Any]:
    return {**model.model_fields, **{field.alias: field for field in model.model_fields.values() if field.alias}}
