"""The contents of a trainer's checkpoint: the entries that are written are those whose types are checked."""

from __future__ import annotations

from pathlib import Path

from torch.utils.data import DataLoader

from tests.helpers.compare import QUIET
from tests.helpers.strategy_models import GPT
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
