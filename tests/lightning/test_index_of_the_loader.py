"""The row "index of the loader" of the table of differences is true of both libraries."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pytorch_lightning", reason="compares with Lightning, which is not installed")

from tests.helpers.lightning_runs import LIGHTNING, OURS, Library, Scenario, loader, run
from tests.helpers.lightning_scenarios import Part


class With(Part):
    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int) -> None:
        self.record.noted.append(dataloader_idx)


class Without(Part):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.record.noted.append(batch_idx)


def evaluated(library: Library, with_index: bool, folder: Path) -> Any:
    loaders = [loader(3)] if with_index else [loader(3), loader(3)]
    part = With if with_index else Without
    scenario = Scenario("", part, action=lambda trainer, module: trainer.validate(module, loaders))
    return run(library, scenario, folder).noted


@pytest.mark.parametrize("with_index", [True, False])
def test_a_step_may_have_the_index_or_not(with_index: bool, tmp_path: Path) -> None:
    with pytest.raises((RuntimeError, TypeError), match="dataloader_idx"):
        evaluated(LIGHTNING, with_index, tmp_path)
    assert evaluated(OURS, with_index, tmp_path) == ([0] if with_index else [0, 0])
