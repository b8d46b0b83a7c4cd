"""The list of mutants names lines that are there, and the tests that find them."""

from __future__ import annotations

import ast
from fnmatch import fnmatchcase

from tests.mutants import EQUIVALENT, MUTANTS, ROOT, TIERS, changes, drawn
from tests.tiers import SLOW


def test_each_changed_line_is_there_and_stays_python() -> None:
    for mutant in (*MUTANTS, *(mutant for mutant, _ in EQUIVALENT)):
        _, lines, index = mutant.lines(ROOT)
        lines[index] = lines[index].replace(mutant.before, mutant.after)
        ast.parse("".join(lines))


def test_each_mutant_names_tests_that_are_there() -> None:
    missing = []
    for mutant in MUTANTS:
        file, _, test = mutant.tests.partition(" ")[0].partition("::")
        source = (ROOT / file).read_text()
        if f"\ndef {test or 'test_'}" not in source or mutant.tier not in TIERS:
            missing.append(mutant)
    assert not missing


def test_those_of_the_quick_tier_name_no_slow_file() -> None:
    files = {mutant.tests.partition(":")[0].removeprefix("tests/") for mutant in MUTANTS if mutant.tier == "quick"}
    assert not [name for name in files if any(fnmatchcase(name, pattern) for pattern in SLOW)]


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
