"""Runs on a local Ray cluster survive killed workers, and end with the same bits."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.helpers.processes import run_python
from tests.helpers.training import steps_of, weights_of

STEPS, EVERY, KILLED_AFTER = 20, 5, 13

USERS = f"""\
import os, torch
from torch.utils.data import DataLoader, TensorDataset
from trainer import Callback, DataModule, TrainModule


class Net(TrainModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Dropout(0.3), torch.nn.Linear(8, 1))

    def training_step(self, batch, batch_idx):
        return self.net(batch[0]).pow(2).mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class Data(DataModule):
    def train_dataloader(self):
        values = torch.randn(64, 3, generator=torch.Generator().manual_seed(0))
        return DataLoader(TensorDataset(values), batch_size=4, shuffle=True)


class Steps(Callback):
    def __init__(self, folder: str, kill: int | None = None):
        self.folder, self.kill = folder, kill
        os.makedirs(folder, exist_ok=True)

    def on_train_step_end(self, trainer, module, *args):
        with open(f"{{self.folder}}/steps-{{trainer.rank}}", "a") as file:
            file.write(f"{{trainer.global_step}}\\n")
        mark = f"{{self.folder}}/killed"
        if trainer.rank == self.kill and trainer.global_step == {KILLED_AFTER} and not os.path.exists(mark):
            open(mark, "w").close()
            os.kill(os.getpid(), 9)

    def on_fit_end(self, trainer, module):
        if trainer.rank == 0:
            torch.save(module.state_dict(), f"{{self.folder}}/weights")
"""

CONFIG = f"""\
module: users.py:Net
data: users.py:Data
trainer:
  accelerator: cpu
  max_steps: {STEPS}
  seed: 1
  logger: false
  enable_progress_bar: false
  enable_model_summary: false
  callbacks:
    - class_path: ModelCheckpoint
      every_n_train_steps: {EVERY}
    - class_path: users.py:Steps
      folder: plain
"""

JOB = f"""\
import sys, ray
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from trainer.cli.main import main

folder = sys.argv[1]


def train_loop_per_worker(config):
    import torch.distributed as dist
    from trainer import Trainer
    from trainer.callbacks import ModelCheckpoint
    from users import Data, Net, Steps

    group = dist.group.WORLD
    assert group is not None
    trainer = Trainer(
        default_root_dir=f"{{folder}}/own", accelerator="cpu", max_steps={STEPS}, seed=1, logger=False,
        enable_progress_bar=False, enable_model_summary=False,
        callbacks=[ModelCheckpoint(every_n_train_steps={EVERY}), Steps(f"{{folder}}/own", kill=0)],
    )
    trainer.fit(Net(), datamodule=Data())
    assert trainer.world_size == 2 and dist.group.WORLD is group


ray.init(num_cpus=2, include_dashboard=False, object_store_memory=80 * 1024**2)
TorchTrainer(
    train_loop_per_worker,
    scaling_config=ScalingConfig(num_workers=2),
    run_config=RunConfig(storage_path=f"{{folder}}/ray", failure_config=FailureConfig(max_failures=1)),
).fit()
code = main(sys.argv[2:])
ray.shutdown()
sys.exit(code)
"""


@pytest.mark.timeout(900)
@pytest.mark.skipif(find_spec("ray") is None, reason='needs Ray: pip install "ray[train]"')
def test_killed_workers_in_a_job_of_the_users_and_of_the_command(tmp_path: Path) -> None:
    """Both run in one job, and neither may resume the other's run; rank 0 is killed in one, rank 1 in the other."""
    for name, text in (("users.py", USERS), ("run.yaml", CONFIG), ("job.py", JOB)):
        (tmp_path / name).write_text(text)
    fit = ("fit", "--config", "run.yaml")
    run_python("-m", "trainer", *fit, "--trainer.devices", "2", cwd=tmp_path).check()
    assert steps_of(tmp_path / "plain") == list(range(1, STEPS + 1))

    on_ray = ("--ray", "num_workers=2", "max_failures=1", f"storage_path={tmp_path}/command")
    change = ("--trainer.callbacks.1.folder", "command", "--trainer.callbacks.1.kill", "1")
    run_python("job.py", str(tmp_path), *fit, *on_ray, *change, cwd=tmp_path).check()
    for name, killed in (("own", 0), ("command", 1)):
        check_it_went_on(tmp_path / name, killed, expected=weights_of(tmp_path / "plain"))


def check_it_went_on(folder: Path, killed: int, expected: str) -> None:
    """Check that the run resumed in the same run directory and ended with the same bits as without Ray."""
    assert (folder / "killed").exists()
    last = KILLED_AFTER // EVERY * EVERY
    assert steps_of(folder, killed) == [*range(1, KILLED_AFTER + 1), *range(last + 1, STEPS + 1)]
    assert [path.name for path in folder.iterdir() if path.name.startswith("version_")] == ["version_0"]
    assert weights_of(folder) == expected
