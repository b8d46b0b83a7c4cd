"""Scripts in Lightning's words, run with Lightning and with only their imports changed: equal to the bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

pytest.importorskip("pytorch_lightning", reason="compares with Lightning, which is not installed")

import torch

from tests.lightning.scripts.shared import LOSSES
from tests.lightning.test_differential import close

pytestmark = pytest.mark.filterwarnings("ignore")

SCRIPTS = {
    "classifiers": ("tutorial", "hydra_template", "transformer"),
    "generative": ("gan", "wgan", "vae", "diffusion_with_ema"),
    "representations": ("byol", "clip", "moco"),
    "sequences": ("truncated_backpropagation", "graphs", "dqn", "language_model"),
    "overrides": (
        *("warmup_in_optimizer_step", "skipped_steps", "scaled_backward"),
        *("norms_logged", "sharpness_aware"),
    ),
    "data": (
        *("dict_of_loaders", "combined_min_size", "combined_max_size", "combined_cycle", "data_module", "resumed"),
    ),
    "callbacks": (*("backbone_finetuning", "metrics_in_every_hook", "weight_averaging", "prediction_writer"),),
    "logs": ("own_logger", "ways_to_log", "hooks_in_order", "weighted_tasks"),
    "projects": ("forecaster",),
    "states": (
        *("averaged_by_hand", "two_of_a_class", "distilled", "nested_hyperparameters", "names_of_checkpoints", "ppo"),
    ),
}
"""Files of `scripts/` -> their functions: each trains in a folder, and returns its module and what it noted."""


def changed(text: str, package: str) -> str:
    """Return a script that imports `package`: no other line changes."""
    lines = [
        line.replace("pytorch_lightning", package) if line.startswith(("import ", "from ")) else line
        for line in text.splitlines()
    ]
    return "\n".join(lines)


def script(file: str, name: str, package: str) -> Callable[[Path], Any]:
    path = Path(__file__).parent / "scripts" / f"{file}.py"
    module = ModuleType(f"{file}_with_{package}")
    exec(compile(changed(path.read_text(), package), str(path), "exec"), vars(module))
    function: Callable[[Path], Any] = getattr(module, name)
    return function


@pytest.mark.parametrize(("file", "name"), [(file, name) for file, names in SCRIPTS.items() for name in names])
def test_only_the_imports_change(file: str, name: str, tmp_path: Path) -> None:
    runs = []
    for package in ("pytorch_lightning", "trainer"):
        LOSSES.clear()
        (folder := tmp_path / package).mkdir()
        module, noted = script(file, name, package)(folder)
        runs.append((torch.stack(LOSSES), module.state_dict(), noted))
    (losses, weights, noted), (our_losses, our_weights, our_noted) = runs
    assert torch.equal(losses, our_losses)
    assert weights.keys() == our_weights.keys()
    assert all(torch.equal(value, our_weights[key]) for key, value in weights.items())
    assert close(noted, our_noted), (noted, our_noted)
