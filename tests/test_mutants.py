"""The list of mutants names lines that are there, and the tests that find them."""

from __future__ import annotations

import ast

from tests.mutants import MUTANTS, ROOT, changes, drawn


def test_each_changed_line_is_there_and_stays_python() -> None:
    for mutant in MUTANTS:
        _, lines, index = mutant.lines(ROOT)
        lines[index] = lines[index].replace(mutant.before, mutant.after)
        ast.parse("".join(lines))


def test_each_mutant_names_tests_that_are_there() -> None:
    files = {word.partition("::")[0] for mutant in MUTANTS for word in mutant.tests.split() if "/" in word}
    assert not [name for name in files if not (ROOT / name).exists()]
    assert all(mutant.tests for mutant in MUTANTS)


def test_conditions_numbers_and_statements_are_changed() -> None:
    source = "def f(x, y):\n    if x > 1:\n        x.y = 0\n    print(x)\n    return not y\n"
    assert {(mutant.before, mutant.after) for mutant in changes(source, "file.py")} == {
        ("if x > 1:", "if (not (x > 1)):"),
        ("if x > 1:", "if x > 2:"),
        ("x.y = 0", "pass"),
        ("x.y = 0", "x.y = 1"),
        ("print(x)", "pass"),
        ("return not y", "return (not (not y))"),
    }


def test_the_seed_decides_what_is_drawn() -> None:
    assert drawn(ROOT, seed=3, number=5) == drawn(ROOT, seed=3, number=5) != drawn(ROOT, seed=4, number=5)
