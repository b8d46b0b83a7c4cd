"""Check a DeepSpeed configuration against what the installed DeepSpeed reads."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from trainer.errors import did_you_mean

AUTO = "auto"

READ_BY_THE_ENGINE = ("activation_checkpointing", "aio", "autotuning", "flops_profiler", "sequence_parallel_size")
"""Keys that `DeepSpeedConfig` does not look up: it hands the dict to other parts of DeepSpeed (0.19.8), which do."""

SIZES = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")

UNSUPPORTED = {
    "pipeline": "the pipeline engine has its own loop",
    "sequence_parallel_size": "it needs DeepSpeed's own attention and data loader",
    "autotuning": "it starts its own runs",
    "data_efficiency": "it needs DeepSpeed's own data loader",
    "torch_autocast": "give Trainer(precision='bf16-mixed' or '16-mixed')",
}
"""Keys that may be off only."""


@functools.cache
def known_keys() -> frozenset[str]:
    """Return the keys that the installed DeepSpeed reads at the top level.

    DeepSpeed silently ignores unknown keys at the top level, so its reader gets a dict that records what it looks up.
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
        if key not in known_keys():
            suggestion = did_you_mean(key, sorted(known_keys()))
            problems.append(f"{key!r} is not a DeepSpeed key, and it would be ignored.{suggestion}")
        elif key in UNSUPPORTED and not _is_off(value):
            problems.append(f"{key!r} cannot be used with the trainer: {UNSUPPORTED[key]}. Remove it.")
        # DeepSpeed compares the global batch with the number of processes, which may not have been joined yet.
        elif value != AUTO and key not in SIZES:
            problems += _objections(key, without_auto(value))
    if config.get("gradient_allreduce_op") == "sum":
        problems.append('gradient_allreduce_op="sum" would change the gradients: the trainer averages them.')
    return problems


def _is_off(value: Any) -> bool:
    return value in (None, False, 1, {}, AUTO) or (isinstance(value, dict) and value.get("enabled") is False)


def without_auto(value: Any) -> Any:
    """Return a configuration or a part of one without the keys whose value is "auto"."""
    if isinstance(value, Mapping):
        return {key: without_auto(part) for key, part in value.items() if part != AUTO}
    return value


def _objections(key: str, value: Any) -> list[str]:
    """Return DeepSpeed's own objections to one top-level entry."""
    from deepspeed.runtime.config import DeepSpeedConfig
    from pydantic import ValidationError

    try:
        DeepSpeedConfig({"train_micro_batch_size_per_gpu": 1, key: value})
    except ValidationError as error:
        found = [(".".join([key, *map(str, one["loc"])]), one["input"], one["msg"]) for one in error.errors()]
        return [f"{path}={part!r}: {message}." for path, part, message in found]
    # DeepSpeed objects with every kind of exception, KeyError too.
    except Exception as error:
        return [f"{key}: {' '.join(str(error).split())}"]
    return []
