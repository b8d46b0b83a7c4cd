"""The contents of a trainer's checkpoint: the entries that are written are those whose types are checked."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.optim import SGD
from torch.utils.data import DataLoader

from tests.helpers.compare import QUIET
from tests.helpers.strategy_models import GPT
from tests.helpers.toy import Toy, loader, quiet
from trainer import Trainer
from trainer.loop.training_state import KINDS, load_training_state


def test_each_entry_has_a_kind(tmp_path: Path) -> None:
    module = GPT(tied=True)
    trainer = Trainer(accelerator="cpu", max_steps=1, **QUIET)
    trainer.fit(module, DataLoader(module.data(8), 4))
    trainer.save_checkpoint(tmp_path / "c")
    # Of some settings alone: an average of the weights, what a checkpoint of trained weights leaves out, split batches,
    # gradients that wait in the middle of a step, what hooks add.
    of_some = {"added", "average", "evaluated", "base", "fitting_samples", "gradients"}
    kinds = {name.removesuffix("?") for name in KINDS} - of_some
    assert load_training_state(tmp_path / "c").keys() == kinds


class NoisySGD(SGD):
    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.noise = torch.Generator()


@pytest.mark.parametrize(("of", "told"), [("nothing", False), ("module", True), ("optimizer", True)])
def test_generators_of_which_a_checkpoint_has_no_state_are_named(
    of: str, told: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Noisy(Toy):
        def configure_optimizers(self) -> Any:
            return (NoisySGD if of == "optimizer" else SGD)(self.parameters(), 0.1)

    module = Noisy()
    if of == "module":
        module.noise = np.random.default_rng(1)  # type: ignore[assignment]
    caplog.set_level(logging.INFO)
    quiet(max_steps=1, enable_checkpointing=True, default_root_dir=tmp_path).fit(module, loader(1))
    assert ("random generators in attributes" in caplog.text) == told
