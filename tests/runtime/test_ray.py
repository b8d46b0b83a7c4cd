"""Ray Train for real, on a cluster of this machine: our runs join it, are restarted by it, and end with the same bits."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.harness import run_python
from tests.runtime.training import steps_of, weights_of

NEEDS_RAY = pytest.mark.skipif(find_spec("ray") is None, reason='needs Ray: pip install "exact-trainer[ray]"')
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

CLUSTER = "ray.init(num_cpus=2, include_dashboard=False, object_store_memory=80 * 1024**2)"

COMMAND = f"""\
import sys, ray
from trainer.cli.main import main

{CLUSTER}
code = main(sys.argv[1:])
ray.shutdown()
sys.exit(code)
"""

OWN_JOB = f"""\
import sys, ray
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

folder = sys.argv[1]


def train_loop_per_worker(config):
    import torch.distributed as dist
    from trainer import Trainer
    from trainer.callbacks import ModelCheckpoint
    from users import Data, Net, Steps

    assert dist.is_initialized()
    trainer = Trainer(
        default_root_dir=f"{{folder}}/runs", accelerator="cpu", max_steps={STEPS}, seed=1, logger=False,
        enable_progress_bar=False, enable_model_summary=False,
        callbacks=[ModelCheckpoint(every_n_train_steps={EVERY}), Steps(f"{{folder}}/own", kill=0)],
    )
    assert trainer.world_size == 2
    trainer.fit(Net(), datamodule=Data())


{CLUSTER}
TorchTrainer(
    train_loop_per_worker,
    scaling_config=ScalingConfig(num_workers=2),
    run_config=RunConfig(storage_path=f"{{folder}}/ray", failure_config=FailureConfig(max_failures=1)),
).fit()
ray.shutdown()
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A configuration, its module, and what two processes without Ray make of them, below `plain`."""
    (tmp_path / "users.py").write_text(USERS)
    (tmp_path / "run.yaml").write_text(CONFIG)
    words = ["fit", "--config", "run.yaml", "--trainer.devices", "2"]
    run_python("-m", "trainer", *words, cwd=tmp_path, timeout=200).check()
    assert steps_of(tmp_path / "plain") == list(range(1, STEPS + 1))
    return tmp_path


def check_it_was_killed_and_went_on(folder: Path, plain: Path, runs: Path) -> None:
    """Each step once, but for those since the last checkpoint, in one run directory; the same bits as without Ray."""
    assert (folder / "killed").exists()
    last = KILLED_AFTER // EVERY * EVERY
    done = steps_of(folder, rank=0)
    assert done[-STEPS + last :] == list(range(last + 1, STEPS + 1))
    assert done[: last + 3] == list(range(1, KILLED_AFTER + 1))
    assert len(done) <= STEPS + KILLED_AFTER - last + 1
    assert [path.name for path in runs.iterdir() if path.name.startswith("version_")] == ["version_0"]
    assert weights_of(folder) == weights_of(plain)


@NEEDS_RAY
def test_a_killed_worker_of_the_command_line(project: Path) -> None:
    (project / "command.py").write_text(COMMAND)
    words = ["fit", "--config", "run.yaml", "--ray", "num_workers=2", "max_failures=1", f"storage_path={project}/ray"]
    change = ["--trainer.callbacks.1.folder", "killed", "--trainer.callbacks.1.kill", "1"]
    result = run_python("command.py", *words, *change, cwd=project, timeout=280).check()
    assert "started again after a failure" in result.stdout + result.stderr
    assert f"after {STEPS} steps" in result.stdout or "run directory:" in result.stdout + result.stderr
    check_it_was_killed_and_went_on(project / "killed", project / "plain", project / "ray")


@NEEDS_RAY
def test_a_killed_worker_of_a_job_of_the_users(project: Path) -> None:
    (project / "job.py").write_text(OWN_JOB)
    run_python("job.py", str(project), cwd=project, timeout=280).check()
    check_it_was_killed_and_went_on(project / "own", project / "plain", project / "runs")
