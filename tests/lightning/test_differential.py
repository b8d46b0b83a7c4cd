"""The same module, data, seeds and settings through Lightning and through this package: equal, or in the table."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pytorch_lightning", reason="compares with Lightning, which is not installed")

from tests.helpers.lightning_runs import LIGHTNING, OURS, PIECES, Record, Scenario, run
from tests.helpers.lightning_scenarios import SCENARIOS

PAGE = Path(__file__).resolve().parents[2] / "docs" / "migrating.md"


def close(theirs: Any, ours: Any) -> bool:
    """Compare nested values; numbers to a relative 1e-6."""
    if isinstance(theirs, float) and isinstance(ours, float):
        return theirs == pytest.approx(ours, rel=1e-6, abs=1e-7, nan_ok=True)
    if isinstance(theirs, list | tuple) and isinstance(ours, list | tuple):
        return len(theirs) == len(ours) and all(map(close, theirs, ours))
    if isinstance(theirs, dict) and isinstance(ours, dict):
        return theirs.keys() == ours.keys() and all(close(theirs[key], ours[key]) for key in theirs)
    return bool(theirs == ours)


def differing(scenario: Scenario, theirs: Record, ours: Record) -> dict[str, tuple[Any, Any]]:
    """Return the pieces in which the two runs differ. Training has equal bits unless gradients are accumulated."""
    found = {}
    for piece in PIECES:
        one, other = getattr(theirs, piece), getattr(ours, piece)
        exact = scenario.exact and piece in ("losses", "rates", "weights")
        if not (one == other if exact else close(one, other)):
            found[piece] = (one, other)
    return found


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
def test_lightning_and_this_package_do_the_same(scenario: Scenario, tmp_path: Path) -> None:
    found = differing(scenario, run(LIGHTNING, scenario, tmp_path), run(OURS, scenario, tmp_path))
    unexpected = {piece: values for piece, values in found.items() if piece not in scenario.differs}
    assert not unexpected, f"not in the table of differences: {unexpected}"
    assert set(scenario.differs) == set(found), "the table names a difference that is none any more"


def test_every_difference_named_by_a_scenario_is_a_row_of_the_page() -> None:
    tables = PAGE.read_text().split("| about | Lightning | here |")[1:]
    rows = [line.split("|")[1].strip() for table in tables for line in table.splitlines() if line.startswith("| ")]
    named = {row for scenario in SCENARIOS for row in scenario.differs.values()}
    assert named <= set(rows)
    assert len(set(rows)) == len(rows)
