"""`trainer fit --dry-run` checks a large training on a small machine, and starts and writes nothing."""

from __future__ import annotations

import json
import os
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.helpers.processes import run_python
from tests.helpers.project import Command, done
from trainer import Strategy, TrainModule
from trainer.cli.doctor.results import gib
from trainer.distributed.fake_process_group import fake_process_group
from trainer.distributed.process_group import SingleProcess
from trainer.precision import resolve_precision
from trainer.strategies import STRATEGIES

MODEL = """\
import torch
from torch.utils.data import DataLoader, TensorDataset
from trainer import DataModule, TrainModule

print("the user's file speaks")


class Block(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.layer = torch.nn.Linear(width, width, bias=False)

    def forward(self, x):
        return x + self.layer(x)


class Net(TrainModule):
    def __init__(self, width: int = 64, manual: bool = False):
        super().__init__()
        self.automatic_optimization = not manual
        self.width = width

    def configure_model(self):
        self.blocks = torch.nn.Sequential(Block(self.width), Block(self.width), Block(self.width))

    def training_step(self, batch, batch_idx):
        return self.blocks(batch[0]).sum()

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters())


class Data(DataModule):
    def __init__(self, samples: int = 1000, size: int = 4):
        super().__init__()
        self.samples, self.size = samples, size

    def prepare_data(self):
        open("downloaded", "w").close()

    def setup(self, stage):
        if not self.samples:
            raise FileNotFoundError("/cluster/data")

    def train_dataloader(self):
        return DataLoader(TensorDataset(torch.zeros(self.samples, 1)), batch_size=self.size, shuffle=True)
"""
CONFIG = "module: net.py:Net\ndata: net.py:Data\ntrainer: {max_epochs: 3}\n"


@pytest.fixture
def net(project: Path) -> Path:
    (project / "net.py").write_text(MODEL)
    (project / "run.yaml").write_text(CONFIG)
    return project


@pytest.fixture
def dry(command: Command, net: Path) -> Command:
    """Run a dry run in this process; return the exit code, the lines, and the errors."""

    def run(*arguments: str) -> tuple[int, str, str]:
        before = sorted(os.listdir(net))
        code, out, err = command("fit", "--config", "run.yaml", "--dry-run", *arguments)
        assert sorted(os.listdir(net)) == before, "it has written something"
        assert not dist.is_initialized()
        assert "LOCAL_WORLD_SIZE" not in os.environ
        return code, out, err

    return run


def printed(out: str, subject: str) -> list[str]:
    """Return status and text of the lines on a subject."""
    rows = [line.split(maxsplit=1) for line in out.splitlines()]
    return [
        f"{row[0]} {row[1].removeprefix(subject).strip()}" for row in rows if row[1:] and row[1].startswith(subject)
    ]


# -- what a training on many processes is ------------------------------------------------------------------------------


def test_replicas_on_a_thousand_processes(dry: Command) -> None:
    out, _ = done(dry("--world-size", "1024", "--data.samples", "9000", "--trainer.accumulate_grad_batches", "2"))
    assert printed(out, "processes") == ["OK 1024 on cuda, 8 on each machine"]
    assert printed(out, "strategy") == ["OK ddp (auto: 1024 processes), precision 32-true"]
    assert printed(out, "global batch") == ["OK 4 samples x 2 micro-batches x 1024 data-parallel ranks = 8,192 samples"]
    (epoch,) = printed(out, "epoch")
    assert epoch.startswith("WARN 9,000 samples in 2 steps; the last one has 808 of 8,192 samples, in 1 of 2 micro-")
    assert printed(out, "steps") == ["OK 6 in all"]
    # Weights and gradients of 4 bytes, and Adam's two averages.
    (memory,) = printed(out, "memory")
    assert f"ddp: {gib(4 * 4 * 3 * 64 * 64)}, " in memory
    assert out.endswith("5 OK, 1 WARN, 0 FAIL; nothing was started, nothing written\n")


@pytest.mark.parametrize(("world", "share"), [(8, 3 * 64 * 8), (1024, 3 * 64)])
def test_shards(dry: Command, world: int, share: int) -> None:
    out, _ = done(dry("--world-size", str(world), "--trainer.strategy", "fsdp"))
    lines = printed(out, "layout")
    assert lines[:2] == [
        f"OK mesh: {world} shard",
        "OK gathered one at a time: 3 x Block (blocks.0 to blocks.2), and the rest",
    ]
    assert lines[2:] == [
        f"OK this process holds {share:,} of 12,288 elements; without copies each has {12288 // world:,}"
    ]
    (memory,) = printed(out, "memory")
    assert f"fsdp: {gib(16 * share)}, " in memory


def test_the_mesh_of_hybrid_sharding(dry: Command) -> None:
    hybrid = (
        *("--world-size", "16", "--trainer.strategy", "fsdp", "--trainer.strategy.sharding_strategy", "HYBRID_SHARD"),
    )
    code, out, _ = dry(*hybrid, "--nproc-per-node", "4", "--no-data")
    assert code == 0
    assert printed(out, "layout")[0] == "OK mesh: 4 replicate x 4 shard"
    assert f": {gib(16 * 12288 // 4)}, " in printed(out, "memory")[0]
    code, out, _ = dry(*hybrid, "--trainer.strategy.device_mesh", "[2, 8]", "--no-data")
    assert printed(out, "layout")[0] == "OK mesh: 2 replicate x 8 shard"
    assert f": {gib(16 * 12288 // 8)}, " in printed(out, "memory")[0]
    code, out, _ = dry(*hybrid, "--trainer.strategy.device_mesh", "[3, 4]", "--no-data")
    assert code == 1
    assert "FAIL device_mesh=(3, 4): give (replicas, shards) whose product is 16" in printed(out, "strategy")[0]


@pytest.mark.skipif(find_spec("deepspeed") is None, reason="needs deepspeed")
def test_deepspeed(dry: Command) -> None:
    three = ("--trainer.strategy", "deepspeed_stage_3", "--trainer.precision", "bf16-mixed", "--no-data")
    out, _ = done(dry("--world-size", "8", *three))
    # 2 bytes for a weight and for its gradient, 12 for the master copy and Adam's averages.
    assert f"deepspeed_stage_3: {gib(16 * 12288 // 8)}, " in printed(out, "memory")[0]
    _, out, _ = dry("--world-size", "1024", *three, "--trainer.strategy.offload_optimizer", "cpu")
    assert f"deepspeed_stage_3: {gib(4 * 12288 // 1024)}, " in printed(out, "memory")[0]
    assert "on the host for each process" in printed(out, "memory")[0]


@pytest.mark.skipif(find_spec("deepspeed") is None, reason="needs deepspeed")
def test_a_json_with_another_batch_size_than_the_data(dry: Command) -> None:
    message = ("--trainer.strategy", "deepspeed_stage_2", "--trainer.strategy.config")
    code, out, _ = dry("--world-size", "8", *message, "{train_micro_batch_size_per_gpu: 3}")
    assert code == 1
    assert "train_micro_batch_size_per_gpu=3 in the DeepSpeed configuration" in " ".join(printed(out, "strategy"))


@pytest.mark.skipif(find_spec("deepspeed") is None, reason="needs deepspeed")
def test_a_json_whose_batch_cannot_be_split(dry: Command) -> None:
    message = ("--trainer.strategy", "deepspeed", "--trainer.strategy.config")
    code, out, _ = dry("--world-size", "8", *message, "{zero_optimization: {stage: 2, offload_optimizer: 7}}")
    assert code == 1
    assert "offload_optimizer" in printed(out, "strategy")[0]
    sizes = "{train_batch_size: 100, train_micro_batch_size_per_gpu: 4, gradient_accumulation_steps: 2}"
    code, out, _ = dry("--world-size", "8", *message, sizes)
    assert code == 1
    assert "micro-batch 4 x window 2 x processes 8 = 64" in " ".join(printed(out, "strategy"))


# -- what is wrong -----------------------------------------------------------------------------------------------------


def test_everything_that_cannot_be_is_reported_at_once(dry: Command) -> None:
    mesh = ("--trainer.strategy", "fsdp", "--trainer.strategy.device_mesh", "[2, 2]", "--device-memory", "1e-6")
    code, out, _ = dry("--world-size", "8", *mesh, "--module.manual", "true", "--trainer.gradient_clip_val", "1")
    assert code == 1
    wrong = [line for line in out.splitlines() if line.startswith("FAIL")]
    assert [line.split()[1] for line in wrong] == ["strategy", "module", "memory"]
    assert "self.clip_gradients" in wrong[1]


def test_the_memory_of_a_device(dry: Command) -> None:
    large = ("--world-size", "16", "--trainer.strategy", "fsdp", "--module.width", "65536", "--no-data")
    code, out, _ = dry(*large, "--device-memory", "40")  # 48 GiB of weights, and never in memory here
    (memory,) = printed(out, "memory")
    assert code == 1
    assert memory.startswith("FAIL fsdp: 12.0 GiB, at times ")
    typed = "--config run.yaml --devices 8 --num-nodes 2 --module.width=65536"
    assert memory.endswith(f"more than 40 GiB: compare the strategies, trainer estimate {typed}")
    out, _ = done(dry("--world-size", "1024", *large[2:], "--device-memory", "50"))
    assert printed(out, "memory")[0].startswith("OK fsdp: 0.2 GiB, at times 48.0 GiB more")


def test_blocks_that_are_not_there(dry: Command) -> None:
    code, out, _ = dry(
        "--world-size", "8", "--trainer.strategy", "fsdp", "--trainer.activation_checkpointing", "[Blok]"
    )
    assert code == 1
    assert "no submodule of Net with a forward is one of ['Blok']" in printed(out, "layout")[0]


def test_data_that_is_elsewhere_is_no_failure(dry: Command) -> None:
    out, _ = done(dry("--world-size", "8", "--data.samples", "0"))
    (line,) = printed(out, "data")
    assert line.startswith("WARN it cannot be read here: FileNotFoundError: /cluster/data.")
    assert "--no-data" in line
    code, out, _ = dry("--world-size", "8", "--data.samples", "0", "--no-data")
    assert (code, printed(out, "data")) == (0, [])


def test_an_interval_that_no_epoch_reaches(dry: Command, net: Path) -> None:
    """The interval fits an epoch of one process, and not of many."""
    step = "    def validation_step(self, batch, batch_idx):\n        pass\n\n    def configure_optimizers"
    text = MODEL.replace("    def configure_optimizers", step)
    text += "\n    def val_dataloader(self):\n        return self.train_dataloader()\n"
    (net / "other.py").write_text(text)
    message = ("--module", "other.py:Net", "--data", "other.py:Data", "--trainer.val_check_interval", "100")
    assert dry("--world-size", "1", *message)[0] == 0
    code, out, _ = dry("--world-size", "8", *message)
    assert code == 1
    assert "val_check_interval=100 is more than the 32 training batches of an epoch" in printed(out, "data")[0]
    assert "set check_val_every_n_epoch=None" in printed(out, "data")[0]


# -- where it runs -----------------------------------------------------------------------------------------------------


def test_gpus_are_asked_for_where_there_are_none(dry: Command) -> None:
    for message in (("--trainer.accelerator", "gpu"), ("--trainer.accelerator", "cuda"), ()):
        out, _ = done(dry("--world-size", "8", "--no-data", *message))
        assert printed(out, "processes") == ["OK 8 on cuda, 8 on each machine"]
    code, out, _ = dry(
        "--no-data", "--trainer.accelerator", "cpu", "--trainer.devices", "4", "--trainer.num_nodes", "2"
    )
    assert printed(out, "processes") == ["OK 8 on cpu, 4 on each machine"]
    code, out, _ = dry("--no-data", "--world-size", "8", "--trainer.accelerator", "mps", "--trainer.strategy", "fsdp")
    assert code == 1
    assert "does not run on MPS" in printed(out, "strategy")[0]


def test_json_stands_alone(net: Path) -> None:
    """The dry run is a process of its own, without other threads, connections or output."""
    message = ("--dry-run", "--world-size", "64", "--trainer.strategy", "fsdp", "--json")
    result = run_python("-m", "trainer", "fit", "--config", "run.yaml", *message, cwd=net).check(0)
    found = json.loads(result.stdout)
    assert found["ok"]
    assert {check["subject"] for check in found["checks"]} >= {"processes", "strategy", "layout", "epoch", "memory"}
    assert "the user's file speaks" in result.stderr


# -- the parts ---------------------------------------------------------------------------------------------------------


class Empty(TrainModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2, device="meta")


@pytest.mark.parametrize("name", [name for name in STRATEGIES if not name.startswith("xla")])
def test_every_strategy_has_a_dry_run(name: str) -> None:
    strategy = STRATEGIES[name]()
    strategy.processes = SingleProcess(world_size=4)
    with fake_process_group(4, 2):
        assert (dist.get_world_size(), os.environ["GROUP_WORLD_SIZE"]) == (4, "2")
        assert all(isinstance(line, str) for line in strategy.dry_run(Empty(), resolve_precision("32-true")))
    assert not dist.is_initialized()


def test_a_strategy_of_the_user_needs_no_dry_run() -> None:
    assert Strategy().dry_run(Empty(), resolve_precision("32-true")) == []


def test_the_group_is_gone_after_an_error() -> None:
    with pytest.raises(ZeroDivisionError), fake_process_group(8, 8):
        dist.all_reduce(torch.ones(1).div_(1 // 0))
    assert not dist.is_initialized()
    assert "WORLD_SIZE" not in os.environ
