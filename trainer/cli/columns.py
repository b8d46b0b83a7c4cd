"""Align the cells of a table, and print help in the width of the terminal."""

from __future__ import annotations

import re
import sys
import textwrap
from collections.abc import Collection, Iterable, Sequence
from typing import TextIO

from trainer.runs.terminal import columns_of, fitted, padded, wrapped

WIDEST = 110
"""Characters of a line of help at most."""
LEAST_WORDS = 24
"""Columns of a description that stands next to its term; with less room it stands below."""
COMMANDS = ("trainer ", "python ", "pip ", "eval ", "srun ", "torchrun ", "tensorboard ")
"""Beginnings of lines that are typed: a terminal breaks them, and they are copied as one line."""


def in_columns(rows: Iterable[Sequence[str]], right: Collection[int]) -> list[str]:
    """Return a line for each row; the columns of these numbers are aligned to the right."""
    table = list(rows)
    widths = [max(map(len, cells)) for cells in zip(*table, strict=True)]
    lines = []
    for row in table:
        cells = [padded(cell, widths[number], number in right) for number, cell in enumerate(row)]
        lines.append("  ".join(cells).rstrip())
    return lines


def fitted_lines(
    rows: Sequence[Sequence[str]], right: Collection[int], first_to_go: Sequence[int], elsewhere: str, beside: int = 0
) -> list[str]:
    """Return a line for each row, in the width of the terminal on stdout, and one that names the columns left out.

    Args:
        right: the numbers of the columns that are aligned to the right.
        first_to_go: the numbers of the columns that may be left out, in that order.
        elsewhere: the options that show all columns.
        beside: characters of each line beside the table.
    """
    columns = columns_of(sys.stdout)
    table = fitted(rows, columns, first_to_go, beside)
    lines = in_columns(table.rows, right=[place for place, number in enumerate(table.kept) if number in right])
    if table.left_out and columns is not None:
        names = ", ".join(filter(None, table.left_out))
        lines += wrapped(f"left out: {names} ({elsewhere} shows all)", columns - beside).split("\n")
    return lines


def help_width() -> int:
    """Return the number of characters of a line of help: the width of the terminal on stdout, at most `WIDEST`."""
    return min(columns_of(sys.stdout) or WIDEST, WIDEST)


def print_fitted(text: str, file: TextIO | None = None) -> None:
    """Print a text; a terminal gets lines of its width."""
    stream = sys.stdout if file is None else file
    print(fitted_text(text, columns_of(stream)), end="", file=stream, flush=True)


def fitted_text(text: str, columns: int | None) -> str:
    """Return a text whose longer lines are broken, descriptions next to or below their terms; commands stay whole.

    Args:
        columns: the width; None: change nothing.
    """
    if columns is None:
        return text
    return "\n".join(line if len(line) <= columns else _fitted_line(line, columns) for line in text.split("\n"))


def _fitted_line(line: str, columns: int) -> str:
    own = line[: len(line) - len(line.lstrip())]
    described = re.fullmatch(r"(\s*\S.*?)(\s{2,})(\S.*)", line)
    term, gap, words = described.groups() if described is not None else ("", "", line.lstrip())
    if words.startswith(COMMANDS) or line.lstrip().startswith(COMMANDS):
        return line
    if not term:
        return wrapped(line, columns)
    start = len(term + gap)
    if columns - start >= max(LEAST_WORDS, *map(len, words.split())):
        return _filled(words, columns, term + gap, " " * start)
    below = f"{own}    "
    return f"{fitted_text(term, columns)}\n{_filled(words, columns, below, below)}"


def _filled(words: str, columns: int, first: str, others: str) -> str:
    wrapper = textwrap.TextWrapper(columns, first, others, break_long_words=False, break_on_hyphens=False)
    return wrapper.fill(words)
