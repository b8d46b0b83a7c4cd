"""Settings that cannot work on XLA devices raise an error before the first step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.optim import AdamW
from torch.utils.data import DataLoader

from tests.helpers.compare import QUIET
from tests.helpers.processes import ROOT, run_python
from tests.helpers.strategy_models import MLP
from trainer import Trainer
from trainer.errors import ConfigError
from trainer.strategies.xla.strategy import XlaFsdpStrategy, XlaStrategy

FIT = """
import os
os.environ.pop("XLA_USE_SPMD", None)  # of the process that has started this one
import torch
{before}
from tests.helpers.compare import QUIET
from tests.helpers.strategy_models import MLP
from torch.utils.data import DataLoader
from trainer import Trainer
try:
    Trainer({how}, max_steps=2, **QUIET).fit(MLP(), DataLoader(MLP.data(16), 8))
except Exception as error:
    print(type(error).__name__, error)
else:
    print("trained")
"""


@pytest.mark.parametrize(
    ("before", "expected"),
    [
        (
            "import torch_xla; torch.ones(1, device=torch_xla.device())",
            "a device of torch_xla was used before the run",
        ),
        ("torch.ones(1, requires_grad=True).sum().backward()", "a backward pass ran in this process before"),
        ("import torch_xla, torch_xla.runtime as xr; xr.use_spmd(); torch_xla.device()", "trained"),
        ("", "trained"),
    ],
)
def test_what_ran_before(before: str, expected: str) -> None:
    how = 'strategy="xla"' if before else 'accelerator="tpu"'
    result = run_python(FIT.format(before=before, how=how)).check()
    assert expected in result.stdout
    assert ("ConfigError" in result.stdout) == (expected != "trained")
    if not before:  # else torch_xla itself has set up logging
        (start,) = [line for line in result.stderr.splitlines() if line.startswith("fit: ")]
        assert "xla (tpu: torch_xla 2.9.0, because torch_tpu is not installed)" in start
        assert start in " ".join((ROOT / "docs" / "tpu.md").read_text().split())


AFTER = """
import os
os.environ.pop("XLA_USE_SPMD", None)
import torch, torch_xla
from tests.helpers.compare import QUIET
from tests.helpers.strategy_models import MLP
from trainer import Trainer
trainer = Trainer(strategy="xla", max_steps=2, **QUIET)
torch.ones(1, device=torch_xla.device())
try:
    trainer.fit(MLP(), ckpt_path="nowhere")
except Exception as error:
    print(type(error).__name__, error)
"""


def test_a_device_used_after_the_trainer_was_made_is_reported_with_all_that_is_wrong() -> None:
    output = run_python(AFTER).check().stdout
    assert "ConfigError" in output
    assert "a device of torch_xla was used before the run" in output
    assert "ckpt_path='nowhere' does not exist" in output


@pytest.mark.parametrize("name", ["xla", "xla_fsdp"])
def test_several_processes_are_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="one process, and 2 are asked for"):
        Trainer(strategy=name, devices=2)
    # As torchrun starts them: torch_xla would make two worlds of one.
    for variable, value in {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}.items():
        monkeypatch.setenv(variable, str(value))
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "29555")
    with pytest.raises(ConfigError, match="each would train alone"):
        Trainer(strategy=name)


def test_numbers_of_devices_that_mean_one_process_are_taken() -> None:
    for devices in ("auto", 1, -1, "-1"):
        trainer = Trainer(strategy="xla", devices=devices, **QUIET)
        assert trainer.config.num_processes == 1


def test_the_accelerator_chooses_the_strategy_and_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    trainer = Trainer(accelerator="tpu", **QUIET)
    assert trainer.strategy.name == "xla"
    trainer.describe()
    text = capsys.readouterr().out
    assert "device      xla (tpu: torch_xla 2.9.0, because torch_tpu is not installed)" in text
    assert "strategy    xla (auto: torch_xla's devices)" in text
    with pytest.raises(ConfigError, match="use strategy='xla' or 'xla_fsdp'"):
        Trainer(accelerator="tpu", strategy="ddp")
    with pytest.raises(ConfigError, match="not on 'cpu'"):
        Trainer(accelerator="cpu", strategy="xla")


@pytest.mark.parametrize("precision", ["16-mixed", "16-true"])
def test_float16_is_refused(precision: str) -> None:
    with pytest.raises(ConfigError, match="use precision='bf16-mixed'"):
        Trainer(strategy="xla", precision=precision)


class Fused(MLP):
    def configure_optimizers(self) -> Any:
        return AdamW(self.parameters(), fused=True)


@pytest.mark.parametrize("strategy", [XlaStrategy(), XlaFsdpStrategy()])
def test_fused_optimizers_are_refused(strategy: Any) -> None:
    with pytest.raises(ConfigError, match=r"AdamW\(fused=True\) has no version for XLA"):
        Trainer(strategy=strategy, **QUIET).fit(Fused(), DataLoader(MLP.data(16), 8))


def test_sparse_gradients_are_refused() -> None:
    module = MLP()
    module.words = torch.nn.Embedding(3, 2, sparse=True)
    with pytest.raises(ConfigError, match="strategy 'xla' cannot take the sparse gradients of layers: words"):
        Trainer(strategy="xla", **QUIET).fit(module, DataLoader(MLP.data(16), 8))


def test_compilation_by_torch_is_refused() -> None:
    with pytest.raises(ConfigError, match="compile= has no effect on torch_xla's devices"):
        Trainer(strategy="xla", compile=True, **QUIET).fit(MLP(), DataLoader(MLP.data(16), 8))


def test_a_block_called_by_name_cannot_be_recomputed() -> None:
    class ByName(MLP):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layers(input=x)[:, 0]

    layers = {"activation_checkpointing": lambda name, _: name == "layers"}
    with pytest.raises(ConfigError, match=r"Sequential was called with input=: pass them by position"):
        Trainer(strategy="xla", **layers, **QUIET).fit(ByName(), DataLoader(MLP.data(16), 8))
