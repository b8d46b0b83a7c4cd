"""`trainer checkpoint import` takes weights and hyperparameters from Lightning's files, and runs no code of theirs."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from tests.helpers.project import Command
from trainer import CheckpointError, TrainModule
from trainer.cli.checkpoint.from_lightning import convert


class Net(TrainModule):
    def __init__(self, width: int = 1) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layer = torch.nn.Linear(width, 2)


class Touch:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (str(self.path),)


def test_a_file_of_lightnings_is_taken(command: Command, tmp_path: Path) -> None:
    pl = pytest.importorskip("pytorch_lightning")

    class Old(pl.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self, width: int) -> None:
            super().__init__()
            self.save_hyperparameters()
            self.layer = torch.nn.Linear(width, 2)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters())

        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
            return self.layer(batch).sum()

    old = Old(3)
    trainer = pl.Trainer(
        max_epochs=1, accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False
    )
    with pytest.warns():  # of workers, and steps to log
        trainer.fit(old, torch.utils.data.DataLoader(torch.ones(4, 3)))
    trainer.save_checkpoint("old.ckpt")
    code, out, err = command("checkpoint", "import", "old.ckpt", "new")
    assert (code, err) == (0, "")
    assert "new: 2 weights and 1 hyperparameters, of epoch 1, step 4" in out
    assert "not taken: optimizer_states" in out
    new = Net.load_from_checkpoint("new")
    assert new.hparams.width == 3
    assert torch.equal(new.layer.weight, old.layer.weight)
    with pytest.raises(CheckpointError, match="new"):
        convert("old.ckpt", "new", force=False)
    convert("old.ckpt", "new", force=True)


def test_what_would_run_code_is_refused_and_does_not_run(command: Command, tmp_path: Path) -> None:
    torch.save({"state_dict": {"a": torch.ones(1)}, "hyper_parameters": Touch(tmp_path / "ran")}, "bad.ckpt")
    code, _, err = command("checkpoint", "import", "bad.ckpt", "new")
    assert code == 1
    assert "would run code" in err
    assert "mkdir" in err
    assert not (tmp_path / "ran").exists()
    assert not (tmp_path / "new").exists()


def test_other_files_are_refused_in_words(command: Command) -> None:
    Path("empty.ckpt").write_bytes(b"")
    Path("text.ckpt").write_text("text")
    torch.save([1], "list.ckpt")
    torch.save({"model": {}}, "other.ckpt")
    for name, words in {"empty": "damaged", "text": "torch.save", "list": "a list", "other": "state_dict"}.items():
        with pytest.raises(CheckpointError, match=words):
            convert(f"{name}.ckpt", "new", force=False)
    code, _, err = command("checkpoint", "import", "nowhere.ckpt", "new")
    assert (code, "nowhere.ckpt is no file" in err) == (1, True)
