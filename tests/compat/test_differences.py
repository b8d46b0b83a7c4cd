from __future__ import annotations

from pathlib import Path

from trainer.compat.differences import DIFFERENCES, table

PAGE = Path(__file__).resolve().parents[2] / "docs" / "migrating.md"


def test_the_page_shows_the_table() -> None:
    assert table() in PAGE.read_text(), "paste the output of: python -m trainer.compat.differences"


def test_names_of_rows_are_unique() -> None:
    assert len({row.name for row in DIFFERENCES}) == len(DIFFERENCES)
