"""Programs that were written for Lightning run unchanged: its modules lead here, its other names fail when used."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from trainer.compat import finder
from trainer.names.states import AS_LIGHTNING, LIGHTNING_VERSION

pytorch_lightning = pytest.importorskip("pytorch_lightning")
LINE = f"running as Lightning {LIGHTNING_VERSION}:"
TRAIN = """
import pickle
import lightning.pytorch as pl
import torch

class Net(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
    def training_step(self, batch, batch_idx):
        return self.layer(batch).pow(2).mean()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

if __name__ == "__main__":
    loader = torch.utils.data.DataLoader(torch.ones(4, 4), batch_size=2)
    options = dict(max_epochs=1, logger=False, enable_progress_bar=False, enable_model_summary=False)
    trainer = pl.Trainer(accelerator="cpu", devices=DEVICES, **options)
    trainer.fit(Net(), loader)
    if trainer.global_rank == 0:
        copies = pickle.loads(pickle.dumps(trainer.callbacks))
        assert [type(one) for one in copies] == [type(one) for one in trainer.callbacks]
        entries = torch.load(trainer.checkpoint_callback.best_model_path)
        print(pl.Trainer.__module__, trainer.world_size, sorted(entries)[-1])
"""


def python(*arguments: str, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run Python in a folder, without the settings of this process."""
    own = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", AS_LIGHTNING)}
    own |= {"PYTHONPATH": os.getcwd(), "OMP_NUM_THREADS": "1", **environment}
    return subprocess.run(
        [sys.executable, *arguments], cwd=folder, env=own, capture_output=True, text=True, timeout=300
    )


def as_lightning(text: str, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a program by `trainer run-as-lightning`."""
    (folder / "program.py").write_text(textwrap.dedent(text))
    return python("-m", "trainer", "run-as-lightning", "program.py", *arguments, folder=folder)


def test_modules_and_versions(tmp_path: Path) -> None:
    done = as_lightning(
        """
        import importlib.metadata, importlib.util, sys
        import lightning, lightning.pytorch as pl, pytorch_lightning, lightning_fabric
        import pytorch_lightning.callbacks.early_stopping as stopping
        import lightning.pytorch.callbacks, trainer.callbacks
        from lightning.pytorch import *
        from lightning.fabric.utilities.imports import _TORCH_GREATER_EQUAL_2_1, _IS_WINDOWS
        from lightning_utilities.core.rank_zero import rank_zero_only as theirs

        assert lightning.Trainer is pl.Trainer is pytorch_lightning.Trainer is Trainer is trainer.Trainer
        assert pl.callbacks is trainer.callbacks and stopping.EarlyStopping is trainer.callbacks.EarlyStopping
        assert lightning_fabric.seed_everything is trainer.seed_everything
        assert {one.__version__ for one in (lightning, pl, pytorch_lightning, lightning_fabric)} == {"2.6.6"}
        assert importlib.metadata.version("lightning") == importlib.metadata.version("pytorch-lightning") == "2.6.6"
        assert importlib.util.find_spec("lightning") and not importlib.util.find_spec("lightning.nothing")
        assert "Trainer" in dir(pl) and trainer.__version__ != "2.6.6"
        assert _TORCH_GREATER_EQUAL_2_1 and theirs.rank == 0
        print(sys.argv, __name__, sys.path[0] != "" )
        sys.exit(3)
        """,
        tmp_path,
        "--lr",
        "1",
    )
    assert done.returncode == 3, done.stderr
    assert done.stdout == "['program.py', '--lr', '1'] __main__ True\n"
    assert done.stderr.count(LINE) == 1


def test_the_version_is_that_of_the_installed_lightning() -> None:
    assert pytorch_lightning.__version__ == LIGHTNING_VERSION
    folder = Path(finder.__file__).parent / "as_lightning"
    metadata = [file.read_text() for file in folder.glob("*.dist-info/METADATA")]
    assert len(metadata) == 2
    assert all(f"\nVersion: {LIGHTNING_VERSION}\n" in text for text in metadata)


@pytest.mark.parametrize("devices", [1, 2])
def test_a_program_trains_and_reads_its_checkpoint_as_a_file(devices: int, tmp_path: Path) -> None:
    done = as_lightning(TRAIN.replace("DEVICES", str(devices)), tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == f"trainer.trainer {devices} trainer_checkpoint"
    assert done.stderr.count(LINE) == 1


def test_children_run_as_lightning(tmp_path: Path) -> None:
    done = as_lightning(
        """
        import multiprocessing, subprocess, sys
        import torch

        class Data(torch.utils.data.Dataset):
            def __len__(self):
                return 1
            def __getitem__(self, index):
                import pytorch_lightning
                return pytorch_lightning.Trainer.__module__

        def child(queue):
            import lightning.pytorch as pl
            queue.put(pl.Trainer.__module__)

        if __name__ == "__main__":
            for method in ("spawn", "fork", "forkserver"):
                context = multiprocessing.get_context(method)
                queue = context.Queue()
                process = context.Process(target=child, args=(queue,))
                process.start()
                loader = torch.utils.data.DataLoader(Data(), num_workers=1, multiprocessing_context=method)
                print(queue.get(timeout=100), next(iter(loader))[0], flush=True)
                process.join()
            program = "import lightning_fabric, lightning; print(lightning.Trainer.__module__)"
            subprocess.run([sys.executable, "-c", program], check=True)
        """,
        tmp_path,
    )
    assert done.stdout.split() == ["trainer.trainer"] * 7, done.stderr
    assert done.stderr.count(LINE) == 1


def test_a_program_may_ask_for_it_itself(tmp_path: Path) -> None:
    done = python(
        "-c", "import trainer.compat.lightning, pytorch_lightning; pytorch_lightning.Trainer()", folder=tmp_path
    )
    assert (done.returncode, done.stderr.count(LINE)) == (0, 1)
    late = python("-c", "import pytorch_lightning, trainer.compat.lightning", folder=tmp_path)
    assert late.stderr.endswith("Import trainer.compat.lightning before it.\n")


def test_nothing_of_it_is_there_where_it_is_not_used(tmp_path: Path) -> None:
    program = (
        "import sys, trainer; trainer.Trainer(); import pytorch_lightning\n"
        "loaded = [one for one in sys.modules if one.startswith('trainer.compat')]\n"
        "print(loaded, pytorch_lightning.Trainer is trainer.Trainer)"
    )
    assert python("-c", program, folder=tmp_path).stdout == "[] False\n"


@pytest.mark.parametrize("arguments", [[], ["nothing.py"], ["-m"]])
def test_the_command_names_what_is_missing(arguments: list[str], tmp_path: Path) -> None:
    done = python("-m", "trainer", "run-as-lightning", *arguments, folder=tmp_path)
    assert done.returncode == 2
    assert "Give a Python file, or -m" in done.stderr


def test_a_module_is_run(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("import sys, lightning; print(sys.argv[1:], lightning.Trainer.__module__)")
    done = python("-m", "trainer", "run-as-lightning", "-m", "own", "-x", folder=tmp_path)
    assert done.stdout == "['-x'] trainer.trainer\n"


def test_the_rank_can_be_set(monkeypatch: pytest.MonkeyPatch) -> None:
    from trainer.distributed.rank_zero import RankZeroOnly

    only = RankZeroOnly()
    calls: list[int] = []
    assert only.rank == 0
    only.rank = 1
    only(calls.append)(1)
    assert (only.rank, calls) == (1, [])
