"""The notebook of the docs runs in a Jupyter kernel: widgets, an interrupt, resuming, two processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.helpers.processes import ROOT

REFUSED = """
from trainer import ConfigError
try:
    Trainer(devices=2, accelerator="cpu").fit(Circle(), train)
except ConfigError as error:
    print(error)
"""


def test_the_notebook_runs_in_a_kernel(tmp_path: Path) -> None:
    nbformat = pytest.importorskip("nbformat")
    nbclient = pytest.importorskip("nbclient")
    pytest.importorskip("ipywidgets")
    notebook = nbformat.read(ROOT / "docs" / "in-a-notebook.ipynb", as_version=4)
    notebook.cells = [cell for cell in notebook.cells if "starts-a-server" not in cell.metadata.get("tags", [])]
    notebook.cells.append(nbformat.v4.new_code_cell(REFUSED))
    nbclient.NotebookClient(notebook, timeout=240, resources={"metadata": {"path": str(tmp_path)}}).execute()

    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    _, fitted, interrupted, resumed, launched, refused = (outputs_of(cell) for cell in cells)
    assert "application/vnd.jupyter.widget-view+json" in fitted
    assert "(20, " in interrupted["text/plain"]
    assert resumed["text/plain"] == "64"
    assert launched["text/plain"].count("0.") == 2
    assert "as a function by trainer.launch(function, devices=2)" in refused["text"]


def outputs_of(cell: Any) -> dict[str, str]:
    """Return what a cell shows, by its type; the printed text under "text"."""
    found: dict[str, str] = {"text": ""}
    for output in cell.outputs:
        found["text"] += output.get("text", "")
        found.update(output.get("data", {}))
    return found
