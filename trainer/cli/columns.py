"""Align the cells of a table."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence


def in_columns(rows: Iterable[Sequence[str]], right: Collection[int]) -> list[str]:
    """Return a line for each row; the columns of these numbers are aligned to the right."""
    columns = [
        [cell.rjust(width) if number in right else cell.ljust(width) for cell in cells]
        for number, cells in enumerate(zip(*rows, strict=True))
        for width in [max(map(len, cells))]
    ]
    return ["  ".join(row).rstrip() for row in zip(*columns, strict=True)]
