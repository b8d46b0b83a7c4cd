"""Register the classes whose objects processes may send each other; does not import torch, for a fast command line."""

from __future__ import annotations

from typing import TypeVar

from trainer.errors import CheckpointError, ConfigError

C = TypeVar("C", bound=type)

ERRORS: dict[str, type[Exception]] = {"CheckpointError": CheckpointError, "ConfigError": ConfigError}
RECORDS: dict[str, type] = {}


def sendable(kind: C) -> C:
    """Allow objects of a class in messages between processes: a class decorator.

    Args:
        kind: an exception that takes one text, a NamedTuple, or a dataclass, of fields that `encoding.to_bytes` takes.
    """
    (ERRORS if issubclass(kind, Exception) else RECORDS)[kind.__name__] = kind
    return kind
