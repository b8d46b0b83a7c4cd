"""Tables and texts in the width of a terminal: nothing is cut, columns are left out and named."""

from __future__ import annotations

import io
import sys

import pytest

from tests.helpers.terminal import Terminal
from trainer.runs.terminal import columns_of, fitted, wrapped

ROWS = [
    ["name", "step", "loss"],
    ["lr=0.1/version_0", "120", "0.693147"],
    ["lr=0.1,width=32/version_10", "7", "12.5"],
]


def test_only_a_terminal_has_a_width(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    terminal = Terminal(columns=40)
    assert columns_of(terminal.stream) == 40
    terminal.text()
    assert columns_of(terminal.stream) is None  # closed
    unknown = Terminal(columns=0)
    assert columns_of(unknown.stream) is None
    for text, columns in (("40", 40), ("0", None), ("many", None)):
        monkeypatch.setenv("COLUMNS", text)
        assert columns_of(unknown.stream) == columns
    unknown.text()
    assert columns_of(io.StringIO()) is None
    assert columns_of(None) is None
    assert columns_of(sys.__stdin__) is None or sys.__stdin__.isatty()


def test_a_table_is_complete_where_there_is_room() -> None:
    for columns in (None, 42, 43, 200):
        table = fitted(ROWS, columns, first_to_go=(1, 2))
        assert (table.rows, table.kept, table.left_out) == (ROWS, [0, 1, 2], [])


def test_columns_are_left_out_in_the_order_given() -> None:
    table = fitted(ROWS, 41, first_to_go=(1, 2))
    assert (table.kept, table.left_out) == ([0, 2], ["step"])
    assert table.rows[1] == ["lr=0.1/version_0", "0.693147"]
    assert fitted(ROWS, 44, (1, 2), beside=3).left_out == ["step"]
    assert fitted(ROWS, 30, (1, 2)).left_out == ["step", "loss"]


def test_names_are_folded_where_nothing_else_may_go() -> None:
    table = fitted(ROWS, 30, first_to_go=(1,))
    assert table.left_out == ["step"]
    assert table.rows[1] == ["lr=0.1/version_0", "0.693147"]
    first, second = table.rows[2:]
    assert (first[1], second[1]) == ("12.5", "")
    assert (first[0] + second[0]).replace(" ", "") == "lr=0.1,width=32/version_10"
    assert all(len(row[0]) <= 20 for row in table.rows)
    assert [len(row[0]) for row in fitted(ROWS, 10, ()).rows][3:] == [12, 12, 4]  # and not below a least width


@pytest.mark.parametrize("columns", [20, 30, 60])
def test_a_text_is_broken_between_words(columns: int) -> None:
    text = "  fit: cpu (auto: no MPS), 1 process, precision 32-true\nshort"
    lines = wrapped(text, columns).split("\n")
    assert max(map(len, lines)) <= columns
    assert [word for line in lines for word in line.split()] == text.split()
    assert all(line.startswith("      ") for line in lines[1:-1])
    assert wrapped(text, None) == text
    assert wrapped("/a/path/of/fifty/characters", 10) == "/a/path/of/fifty/characters"
