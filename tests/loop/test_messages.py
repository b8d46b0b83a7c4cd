"""Messages are visible by default, and a program's own logging configuration is not changed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.processes import fork_python
from tests.helpers.toy import Toy, loader, quiet
from trainer.callbacks import CSVLogger

TRAIN = """
import logging
{before}
import torch
from trainer import Trainer, TrainModule

class Net(TrainModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(2, 1)
    def training_step(self, batch, batch_idx):
        return self.net(batch).mean()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)

for _ in range(2):
    trainer = Trainer(max_steps=1, devices={devices}, accelerator="cpu", logger=False, enable_checkpointing=False,
                      enable_progress_bar=False, enable_model_summary=False)
    trainer.fit(Net(), torch.zeros(4, 2).split(2))
logging.getLogger("trainer.own").warning("a warning of rank %d", trainer.rank)
"""


def stderr_of(before: str = "", devices: int = 1) -> list[str]:
    return fork_python(TRAIN.format(before=before, devices=devices)).wait().check().stderr.splitlines()


@pytest.mark.parametrize("devices", [1, 2])
def test_rank_0_says_what_was_chosen_and_all_warn(devices: int) -> None:
    lines = stderr_of(devices=devices)
    processes = f"{devices} process" + "es" * (devices > 1)
    chosen = [line for line in lines if "cpu" in line and processes in line and "32-true" in line]
    assert len(chosen) == 2  # once for each of the two runs, and not for each process
    assert sum("a warning of rank" in line for line in lines) == devices


@pytest.mark.parametrize("every", [3, 4])
def test_a_run_says_where_it_writes_and_that_it_logs_no_step(every: int, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "trainer")
    quiet(logger=CSVLogger(), max_steps=3, log_every_n_steps=every).fit(Toy(), loader())
    assert [one for one in caplog.messages if one.startswith("run directory:")] == [
        f"run directory: {Path('runs/version_0').absolute()}"
    ]
    told = [one for one in caplog.messages if "log_every_n_steps=4 is more than the 3 steps" in one]
    assert len(told) == (every == 4)
    assert ("train_loss" in Path("runs/version_0/metrics.csv").read_text()) == (every == 3)


def test_a_level_that_was_set_stays() -> None:
    assert stderr_of('logging.getLogger("trainer").setLevel("WARNING")') == ["a warning of rank 0"]


def test_a_programs_own_logging_is_used() -> None:
    lines = stderr_of('logging.basicConfig(level="INFO", format="mine: %(message)s")')
    assert len(lines) == 3
    assert all(line.startswith("mine: ") for line in lines)


def test_a_network_interface_that_does_not_exist_is_named() -> None:
    finished = fork_python(TRAIN.format(before="", devices=2), env={"GLOO_SOCKET_IFNAME": "nope0"}).wait()
    assert finished.returncode == 1
    assert "GLOO_SOCKET_IFNAME names" in finished.stderr
    assert "nope0" in finished.stderr
