"""The packages for TPUs are found without importing them, and errors explain what is missing."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from tests.helpers.processes import ROOT, run_python
from tests.messages import raises_recorded
from trainer import Trainer
from trainer.distributed.tpu import ENVIRONMENT, choose_tpu_stack, torch_xla_problem, tpu_is_there
from trainer.errors import ConfigError
from trainer.strategies import STRATEGIES

WITHOUT_XLA = pytest.mark.skipif(torch_xla_problem() is None, reason="torch_xla is installed here")


def install(package: str, version: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Write the files that pip would install; importing the package would fail."""
    (folder / package).mkdir()
    (folder / package / "__init__.py").write_text("raise RuntimeError('imported')\n")
    about = folder / f"{package}-{version}.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")
    monkeypatch.syspath_prepend(folder)


@WITHOUT_XLA
def test_neither_is_installed() -> None:
    device_type, reason = choose_tpu_stack()
    assert device_type is None
    assert reason.startswith("torch_tpu is not installed, and torch_xla is not installed")
    assert "pip install torch==2.9.0 torch_xla==2.9.0" in reason
    assert not tpu_is_there()


def test_the_environment_of_the_messages_is_that_of_the_docs() -> None:
    assert ENVIRONMENT.replace(" && ", "\n") in (ROOT / "docs" / "tpu.md").read_text()


@WITHOUT_XLA
def test_torch_xla_for_another_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install("torch_xla", "1.99.3", tmp_path, monkeypatch)
    problem = torch_xla_problem()
    assert problem is not None
    assert f"torch_xla 1.99.3 needs torch 1.99, and this is torch {torch.__version__}" in problem
    assert "pip install torch==2.9.0 torch_xla==2.9.0" in problem
    with raises_recorded(ConfigError):
        Trainer(accelerator="tpu")


@WITHOUT_XLA
def test_torch_xla_that_fits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    minor = ".".join(torch.__version__.split(".")[:2])
    install("torch_xla", f"{minor}.0", tmp_path, monkeypatch)
    assert choose_tpu_stack() == ("xla", f"torch_xla {minor}.0, because torch_tpu is not installed")
    trainer = Trainer(accelerator="tpu", logger=False, enable_checkpointing=False)
    assert trainer.strategy.name == "xla"
    assert trainer.config.reasons["strategy"] == "auto: torch_xla's devices"
    assert trainer.config.reasons["device"] == f"tpu: torch_xla {minor}.0, because torch_tpu is not installed"
    with raises_recorded(ConfigError):
        Trainer(accelerator="tpu", strategy="ddp")
    assert "torch_xla" not in sys.modules


@WITHOUT_XLA
def test_torchtpu_without_a_tpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install("torch_tpu", "0.2.0", tmp_path, monkeypatch)
    device_type, reason = choose_tpu_stack()
    assert device_type is None
    assert reason.startswith("torch_tpu is installed but sees no TPU, and torch_xla is not installed")


@WITHOUT_XLA
@pytest.mark.parametrize("name", ["xla", "xla_fsdp"])
def test_the_strategies_name_the_environment_that_they_need(name: str) -> None:
    with pytest.raises(ConfigError) as error:
        Trainer(strategy=name, devices=2, precision="16-mixed")
    text = str(error.value)
    assert f"strategy {name!r}: torch_xla is not installed" in text
    assert "pip install torch==2.9.0 torch_xla==2.9.0" in text
    assert "drives all devices from one process, and 2 are asked for" in text
    assert "TPUs do not compute in precision '16-mixed'" in text


@pytest.mark.parametrize("name", ["xla", "xla_fsdp"])
def test_another_accelerator_is_refused(name: str) -> None:
    problems = STRATEGIES[name]().problems(Trainer(accelerator="cpu").precision, "cpu", 1)
    assert any("runs on torch_xla's devices, not on 'cpu'" in problem for problem in problems)
    problems = STRATEGIES[name]().problems(Trainer(accelerator="cpu").precision, "tpu", 1)
    assert any("use strategy='ddp' or 'fsdp'" in problem for problem in problems)


ON_TPU = """
import torch
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend
# As with TorchTPU, torch knows the device now. Nothing runs there.
_setup_privateuseone_for_python_backend("tpu")
touched = []
torch.tpu.manual_seed_all = touched.append
torch.tpu.device_count = lambda: 4
from tests.helpers.compare import QUIET
from trainer import Trainer
from trainer.distributed.process_group import SingleProcess
from trainer.errors import ConfigError
"""


@WITHOUT_XLA
def test_where_torch_knows_the_device_the_ordinary_strategies_take_it(tmp_path: Path) -> None:
    about = tmp_path / "torch_tpu-0.2.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: torch_tpu\nVersion: 0.2.0\n")
    script = """
for accelerator, strategy in [("tpu", "auto"), ("auto", "auto"), ("tpu", "fsdp")]:
    config = Trainer(accelerator=accelerator, strategy=strategy, seed=5, **QUIET).config
    print(config.device_type, config.num_processes, config.strategy.name, config.reasons["device"], sep="; ")
print(touched)  # or the processes that are started could not have the chips
strategy = Trainer(accelerator="tpu", devices=1, **QUIET).strategy
strategy.processes = SingleProcess(local_rank=3)
print(strategy._choose_device("tpu", None), touched)
try:
    Trainer(accelerator="tpu", devices=[1, 2])
except ConfigError as error:
    print(str(error).partition(".")[0])
"""
    installed = f"import sys\nsys.path.append({str(tmp_path)!r})\n"
    output = run_python(installed + ON_TPU + script).check().stdout
    assert output.splitlines() == [
        "tpu; 4; ddp; tpu: TorchTPU 0.2.0 has registered the device",
        "tpu; 4; ddp; auto: TorchTPU 0.2.0 has registered the device",
        "tpu; 4; fsdp; tpu: TorchTPU 0.2.0 has registered the device",
        "[]",
        "tpu:0 [5]",
        "devices=[1, 2]: up to 4 tpu devices can be used (CUDA_VISIBLE_DEVICES hides GPUs)",
    ]


@WITHOUT_XLA
def test_processes_that_share_no_chips_are_reported_how_to() -> None:
    place = {"RANK": 1, "LOCAL_RANK": 1, "WORLD_SIZE": 4, "LOCAL_WORLD_SIZE": 4, "MASTER_ADDR": "x", "MASTER_PORT": 1}
    env = {name: str(value) for name, value in place.items()}
    script = ON_TPU + "Trainer(accelerator='tpu', **QUIET); print('made')"
    result = run_python(script, env=env)
    assert "torchrun started 4 processes, and TorchTPU has given them no chips" in result.stderr
    assert "python -m torch.tpu.distributed" in result.stderr
    env["TORCH_TPU_SLICEBUILDER_ADDRESSES"] = "localhost:1,localhost:2,localhost:3,localhost:4"
    assert run_python(script, env=env).check().stdout == "made\n"
