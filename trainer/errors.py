"""What goes wrong, in words that name the fix."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class TrainerError(Exception):
    """Base of all errors raised by this package."""


class ConfigError(TrainerError, ValueError):
    """The user asked for something that cannot be: says what was given, what is allowed, what to type."""


class CheckpointError(TrainerError):
    """A checkpoint cannot be written or read: names the file or field."""


class MissingPackageError(TrainerError, ImportError):
    """An optional package is needed: names the extra to install."""

    def __init__(self, package: str, extra: str, needed_for: str) -> None:
        super().__init__(
            f"{needed_for} needs the package {package!r}, which is not installed. "
            f'Install it with: pip install "exact-trainer[{extra}]"'
        )


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """`" Did you mean 'ddp'?"`, or an empty string when nothing known is close to `name`."""
    by_lower = {candidate.lower(): candidate for candidate in known}
    close = difflib.get_close_matches(name.lower(), by_lower, n=1, cutoff=0.6)
    return f" Did you mean {by_lower[close[0]]!r}?" if close else ""


def unknown(kind: str, name: object, known: Iterable[str]) -> ConfigError:
    """The error for a name that is not in a table.

    >>> str(unknown("strategy", "dpd", ["ddp", "single_device"]))
    "unknown strategy 'dpd'. Did you mean 'ddp'? Known: ddp, single_device."
    """
    names = sorted(known)
    return ConfigError(f"unknown {kind} {name!r}.{did_you_mean(str(name), names)} Known: {', '.join(names)}.")


def raise_problems(problems: list[str], subject: str) -> None:
    """Raise one `ConfigError` that lists every problem; do nothing when there is none."""
    if len(problems) == 1:
        raise ConfigError(problems[0])
    if problems:
        lines = "\n".join(f"  - {problem}" for problem in problems)
        raise ConfigError(f"{len(problems)} problems in {subject}:\n{lines}")
