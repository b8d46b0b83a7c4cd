"""Do something on rank 0 only: call a function, log, warn."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

from trainer.distributed.environment import detect_environment

T = TypeVar("T")
log = logging.getLogger("trainer")


class RankZeroOnly:
    """The decorator `rank_zero_only`: the function is called on rank 0; elsewhere `default` is returned."""

    _rank: int | None = None

    @property
    def rank(self) -> int:
        """The rank of this process. A program that starts processes itself may set it."""
        return detect_environment().rank if self._rank is None else self._rank

    @rank.setter
    def rank(self, rank: int) -> None:
        self._rank = rank

    def __call__(self, function: Callable[..., T], default: Any = None) -> Callable[..., Any]:
        @wraps(function)
        def on_rank_zero(*args: Any, **options: Any) -> Any:
            return function(*args, **options) if self.rank == 0 else default

        return on_rank_zero


rank_zero_only = RankZeroOnly()


@rank_zero_only
def rank_zero_info(*args: Any, stacklevel: int = 4, **options: Any) -> None:
    """Log on rank 0, as `logging.info` does."""
    log.info(*args, **options)


@rank_zero_only
def rank_zero_debug(*args: Any, stacklevel: int = 4, **options: Any) -> None:
    """Log on rank 0, as `logging.debug` does."""
    log.debug(*args, **options)


@rank_zero_only
def rank_zero_warn(message: str | Warning, stacklevel: int = 4, **options: Any) -> None:
    """Warn on rank 0, as `warnings.warn` does."""
    warnings.warn(message, stacklevel=stacklevel, **options)


def rank_prefixed_message(message: str, rank: int | None) -> str:
    """Return a message that begins with the rank."""
    return message if rank is None else f"[rank: {rank}] {message}"


class WarningCache(set[str]):
    """Warns once of each message, on rank 0."""

    def warn(self, message: str, stacklevel: int = 5, **options: Any) -> None:
        """Warn, unless this message was given before."""
        if message not in self:
            self.add(message)
            rank_zero_warn(message, stacklevel=stacklevel, **options)

    def info(self, message: str, stacklevel: int = 5, **options: Any) -> None:
        """Log, unless this message was given before."""
        if message not in self:
            self.add(message)
            rank_zero_info(message, **options)

    deprecation = warn
