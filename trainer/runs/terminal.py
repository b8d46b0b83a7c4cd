"""Text and tables on a terminal, in its width: numbers and names are not cut, columns are left out.

rich was tried: its tables cut numbers in narrow terminals (`0.1…` of 0.123456), and rich is not always installed.
"""

from __future__ import annotations

import os
import sys
import textwrap
from collections.abc import Iterable, Sequence
from contextlib import suppress
from itertools import chain
from typing import Any, NamedTuple, TextIO

from trainer.callback import Callback

GAP = 2
"""Spaces between two columns of a table."""
LEAST_NAME = 12
"""Columns of the first column of a table at least, where it is folded."""


def columns_of(stream: Any) -> int | None:
    """Return the width of a terminal in characters, or `COLUMNS` if the terminal does not know it; else None."""
    try:
        if not stream.isatty():
            return None
        return os.get_terminal_size(stream.fileno()).columns or int(os.environ.get("COLUMNS", "")) or None
    except (AttributeError, OSError, ValueError):  # a stream of a notebook or a test, or a closed one
        return None


def padded(text: str, width: int, right: bool = False) -> str:
    """Return a text with spaces up to a width, after it, or before it if it is aligned to the `right`."""
    return text.rjust(width) if right else text.ljust(width)


def _lines_of(text: str, columns: int, indent: str, break_long_words: bool) -> list[str]:
    """Return the lines of a text that is broken between words, with an indent before all but the first."""
    wrapper = textwrap.TextWrapper(columns, subsequent_indent=indent, break_on_hyphens=False)
    wrapper.break_long_words = break_long_words
    return wrapper.wrap(text)


def wrapped(text: str, columns: int | None, indent: str = "    ") -> str:
    """Return a text whose lines are broken between words where they are longer than a terminal is wide.

    Args:
        columns: the width; None: change nothing.
        indent: begins the further lines, after the indent of the first one.
    """
    if columns is None:
        return text
    return "\n".join(line if len(line) <= columns else _broken(line, columns, indent) for line in text.split("\n"))


def _broken(line: str, columns: int, indent: str) -> str:
    own = line[: len(line) - len(line.lstrip())]
    return "\n".join(_lines_of(line, columns, own + indent, break_long_words=False))


class FittedTable(NamedTuple):
    """The part of a table for which there is room."""

    rows: list[list[str]]
    """A first cell that is too long continues in further rows."""
    kept: list[int]
    """The numbers of the columns in `rows`."""
    left_out: list[str]
    """The heads of the other columns."""


def fitted(
    rows: Sequence[Sequence[str]], columns: int | None, first_to_go: Sequence[int], beside: int = 0
) -> FittedTable:
    """Return a table in the width of a terminal.

    Columns are left out until there is room for the rest, and where that is not enough, the first column is folded.

    Args:
        rows: the cells, with the heads as the first row.
        columns: the width; None: the full table.
        first_to_go: the numbers of the columns that may be left out, in that order.
        beside: characters of each line beside the cells and the gaps between them.
    """
    widths = [max(map(len, cells)) for cells in zip(*rows, strict=True)]
    kept = list(range(len(widths)))
    missing = sum(widths) + GAP * (len(widths) - 1) + beside - (columns or sys.maxsize)
    left_out = []
    for number in first_to_go:
        if missing > 0:
            kept.remove(number)
            left_out.append(number)
            missing -= widths[number] + GAP
    cells = [[row[number] for number in kept] for row in rows]
    if missing > 0:
        room = max(widths[0] - missing, LEAST_NAME)
        cells = [*chain.from_iterable(_folded(row, room) for row in cells)]
    return FittedTable(cells, kept, [rows[0][number] for number in sorted(left_out)])


def _folded(row: list[str], room: int) -> list[list[str]]:
    """Return a row and further ones that hold the rest of its first cell."""
    first, *others = row
    parts = _lines_of(first, room, " ", break_long_words=True) or [first]
    return [[parts[0], *others], *([part, *[""] * len(others)] for part in parts[1:])]


def print_text(callbacks: Iterable[Callback], text: str, file: TextIO | None = None, flush: bool = True) -> None:
    """Print through the first callback that draws on the terminal, else to `file`."""
    if any(callback.print_text(text, file) for callback in callbacks):
        return
    stream = sys.stdout if file is None else file
    if stream is not None:
        # Not `print`: Ray Train replaces it in its workers by one that also logs, so each text would be there twice.
        with suppress(OSError):  # a training continues where its output cannot be written
            stream.write(text)
            if flush:
                stream.flush()
