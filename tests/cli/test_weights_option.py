"""`trainer fit --weights`: pretrained weights, and what is said if they are not there."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from trainer.cli.main import main

MODULE = """
import torch
from torch.utils.data import DataLoader, TensorDataset
from trainer import TrainModule

class Net(TrainModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(3, 1)

    def training_step(self, batch, batch_idx):
        return self.layer(batch[0]).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.0)

    def train_dataloader(self):
        return DataLoader(TensorDataset(torch.ones(4, 3)), 4)

    def on_train_end(self):
        print("weights", self.layer.weight.tolist())
"""


@pytest.fixture
def arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net.py").write_text(MODULE)
    return ["fit", "--module", "net.py:Net", "--trainer.max_steps", "1", "--trainer.accelerator", "cpu"]


def test_a_run_starts_from_the_weights(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_file({"weight": torch.tensor([[1.0, 2.0, 3.0]]), "bias": torch.zeros(1)}, tmp_path / "model.safetensors")
    assert main([*arguments, "--weights", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "weights [[1.0, 2.0, 3.0]]" in printed
    assert "checkpoints:" in printed
    assert "validate it:" not in printed  # there is no validation_step
    assert main([*arguments, "--weights", ".", "--print-config"]) == 0
    assert f"weights: {tmp_path}" in capsys.readouterr().out
