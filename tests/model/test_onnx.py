"""`to_onnx` exports a module in eval mode, or names the package that torch's exporter needs."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.messages import raises_recorded
from trainer import TrainModule
from trainer.errors import ConfigError, MissingPackageError


class Dropped(TrainModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Sequential(nn.Linear(4, 2), nn.Dropout(0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.layer(x)
        return output


def test_without_a_sample_it_is_asked_for() -> None:
    with raises_recorded(ConfigError):
        Dropped().to_onnx("model.onnx")


@pytest.mark.skipif(find_spec("onnxscript") is not None, reason="onnxscript is installed")
def test_the_missing_package_is_named(tmp_path: Path) -> None:
    module = Dropped()
    with raises_recorded(MissingPackageError):
        module.to_onnx(tmp_path / "model.onnx", torch.ones(3, 4))
    assert module.training


@pytest.mark.filterwarnings("ignore:.isinstance.treespec, LeafSpec:FutureWarning")  # by torch's exporter itself
def test_the_file_computes_what_the_module_does(tmp_path: Path) -> None:
    pytest.importorskip("onnxscript", reason="torch's exporter needs onnxscript")
    runtime = pytest.importorskip("onnxruntime", reason="onnxruntime runs the file")
    module, sample = Dropped(), torch.randn(3, 4)
    module.to_onnx(tmp_path / "model.onnx", sample)
    assert module.training
    session = runtime.InferenceSession(tmp_path / "model.onnx")
    (output,) = session.run(None, {session.get_inputs()[0].name: sample.numpy()})
    torch.testing.assert_close(torch.from_numpy(output), module.eval()(sample))
