"""What only a GPU shows: copies that race with later work, generators, memory that ends, products in 8 bits."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.helpers.compare import QUIET, as_floats, assert_same_bits
from tests.helpers.processes import run_distributed, run_python
from trainer import Callback, Engine, Trainer, TrainModule
from trainer.callbacks import (
    BoundProfiler,
    DeviceStatsMonitor,
    EMAWeightAveraging,
    JSONLLogger,
    ModelCheckpoint,
    ThroughputMonitor,
)
from trainer.checkpoint.format import read_checkpoint

pytestmark = pytest.mark.gpu

WIDTH, ROWS = 256, 96
ON_ONE_GPU: dict[str, Any] = {"accelerator": "cuda", "devices": 1, **QUIET}


class Net(TrainModule):
    """A perceptron with dropout, large enough that copies of it take time."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Dropout(0.1), nn.Linear(4 * width, width), nn.LayerNorm(width)
        )
        self.head = nn.Linear(width, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.net(x))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = nn.functional.cross_entropy(self(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", nn.functional.cross_entropy(self(batch[0]), batch[1]))

    def predict_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self(batch[0])

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=3e-4, fused=True)


def loader(batch_size: int = 8, width: int = WIDTH, **options: Any) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(ROWS, width, generator=generator)
    return DataLoader(TensorDataset(x, torch.randint(16, (ROWS,), generator=generator)), batch_size, **options)


def build() -> Net:
    torch.manual_seed(3)
    return Net()


def fit(strategy: str, folder: Path, steps: int, ckpt_path: str | None = None, **settings: Any) -> Any:
    """Train with checkpoints at every third step, on this process."""
    callbacks = [ModelCheckpoint(folder, save_top_k=-1, every_n_train_steps=3), *settings.pop("callbacks", [])]
    options = {"max_steps": steps, "max_epochs": -1, "seed": 5, "enable_checkpointing": True, **settings}
    trainer = Trainer(strategy=strategy, **{**ON_ONE_GPU, **options, "callbacks": callbacks})
    module = build()
    trainer.fit(module, loader(shuffle=True), ckpt_path=ckpt_path)
    return {
        "weights": {name: value.cpu() for name, value in trainer.full_state_dict(everywhere=True).items()},
        "logged": as_floats(trainer.callback_metrics),
        "checkpoints": {path.name: str(path) for path in folder.iterdir() if path.is_dir() and path.name != "last"},
    }


STRATEGIES = ("single_device", "ddp", "fsdp", "deepspeed_stage_1", "deepspeed_stage_2", "deepspeed_stage_3")


def stopped_and_resumed(strategy: str, root: str, settings: dict[str, Any]) -> Any:
    through = fit(strategy, Path(root, "through"), 18, **settings)
    first = fit(strategy, Path(root, "first"), 9, **settings)
    last = max(first["checkpoints"].values(), key=lambda path: Path(path).stat().st_mtime_ns)
    return through, fit(strategy, Path(root, "second"), 18, last, **settings)


@pytest.mark.parametrize("settings", [{}, {"precision": "16-mixed", "accumulate_grad_batches": 2}], ids=["32", "16"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_resumed_run_has_the_same_bits(strategy: str, settings: dict[str, Any], tmp_path: Path) -> None:
    """With dropout on the GPU, whose generator a checkpoint has to hold."""
    if strategy.startswith("deepspeed"):
        pytest.importorskip("deepspeed")
    ((through, resumed),) = run_distributed(stopped_and_resumed, 1, strategy, str(tmp_path), settings)
    assert_same_bits(resumed["weights"], through["weights"])
    assert resumed["logged"] == through["logged"]


def test_a_checkpoint_in_the_background_holds_the_step_at_which_it_was_taken(tmp_path: Path) -> None:
    """Later steps change the weights while the copy to the host is on its way."""
    found = {}
    for background in (False, True):
        folder = tmp_path / str(background)
        checkpoint = ModelCheckpoint(folder, save_top_k=-1, every_n_train_steps=3, async_save=background)
        torch.manual_seed(3)
        options = {"max_steps": 24, "max_epochs": -1, "seed": 5, "enable_checkpointing": True}
        Trainer(**{**ON_ONE_GPU, **options}, callbacks=[checkpoint]).fit(Net(1024), loader(width=1024))
        found[background] = {
            path.name: read_checkpoint(path, keys=["model", "optimizers"])
            for path in folder.iterdir()
            if path.is_dir() and not path.is_symlink()
        }
    assert len(found[True]) >= 4
    assert_same_bits(found[True], found[False])


class NoWaiting(Callback):
    """Have torch raise an error where the host waits for the GPU between two flushes."""

    runs_last = True

    def on_train_step_end(self, trainer: Trainer, module: TrainModule) -> None:
        if trainer.global_step in (13, 23):
            torch.cuda.set_sync_debug_mode("error" if trainer.global_step == 13 else "default")


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"gradient_clip_val": 1.0},
        {"accumulate_grad_batches": 2},
        {"precision": "bf16-mixed"},
        {"precision": "bf16-true"},
        {"strategy": "ddp"},
        {"strategy": "fsdp", "gradient_clip_val": 1.0},
        {"callbacks": EMAWeightAveraging},
        {"callbacks": ThroughputMonitor},
        {"callbacks": DeviceStatsMonitor},
    ],
    ids=str,
)
def test_the_host_does_not_wait_between_two_flushes(settings: dict[str, Any], tmp_path: Path) -> None:
    run_distributed(train_without_waiting, 1, settings)


def train_without_waiting(settings: dict[str, Any]) -> None:
    kind = settings.pop("callbacks", None)
    callbacks = [NoWaiting(), *([kind()] if kind else [])]
    options = {"max_steps": 30, "max_epochs": -1, "log_every_n_steps": 12, "logger": JSONLLogger(), **settings}
    try:
        data = DataLoader(loader().dataset, 2, pin_memory=True)
        Trainer(**{**ON_ONE_GPU, **options}, callbacks=callbacks).fit(build(), data)
    finally:
        torch.cuda.set_sync_debug_mode("default")


# -- precisions --------------------------------------------------------------------------------------------------------


def losses(precision: str, **settings: Any) -> list[float]:
    class Losses(Callback):
        def on_train_step_end(self, trainer: Trainer, module: TrainModule) -> None:
            found.append(trainer.read_metrics()["loss"])

    found: list[float] = []
    options = {"max_steps": 10, "max_epochs": -1, "log_every_n_steps": 1, "seed": 5, "precision": precision}
    torch.manual_seed(3)
    module = Net()
    module.net[2].p = 0.0  # compiled dropout draws other numbers
    Trainer(**{**ON_ONE_GPU, **options, **settings}, callbacks=Losses()).fit(module, loader(16))
    return found


@pytest.mark.parametrize(
    ("precision", "bound"),
    [("bf16-mixed", 1e-2), ("16-mixed", 1e-2), ("bf16-true", 0.2), ("fp8", 5e-2), ("fp8-rowwise", 5e-2)],
)
@pytest.mark.parametrize("settings", [{}, {"compile": True}], ids=["eager", "compiled"])
def test_losses_are_near_those_of_float32(precision: str, bound: float, settings: dict[str, Any]) -> None:
    if precision.startswith("fp8"):
        pytest.importorskip("torchao")
        if torch.cuda.get_device_capability() < (8, 9):
            pytest.skip("this GPU has no products in 8 bits")
    expected = losses("32-true")
    found = losses(precision, **settings)
    assert found == pytest.approx(expected, rel=bound)
    assert found != pytest.approx(expected, rel=1e-6)


# -- memory and errors -------------------------------------------------------------------------------------------------


class Hungry(Net):
    """Needs 64 MiB for each sample."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        torch.empty(len(batch[0]) << 26, dtype=torch.uint8, device=self.device)
        return super().training_step(batch, batch_idx)


def train_with_little_memory() -> tuple[int, int]:
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((1 << 30) / total)
    torch.manual_seed(3)
    trainer = Trainer(**ON_ONE_GPU, max_epochs=1, accumulate_grad_batches="auto", seed=5)
    trainer.fit(Hungry(), loader(32))
    return trainer.train_dataloader.parts, trainer.global_step


def test_batches_that_do_not_fit_are_split() -> None:
    ((parts, steps),) = run_distributed(train_with_little_memory, 1)
    assert parts == 4  # 8 samples take 512 MiB of 1 GiB; 16 would take all
    assert steps == 3


def test_memory_that_ends_is_reported(tmp_path: Path) -> None:
    source = (
        "import torch\nfrom trainer import Trainer\nfrom tests.test_cuda import Hungry, loader\n"
        "torch.cuda.set_per_process_memory_fraction((1 << 30) / torch.cuda.get_device_properties(0).total_memory)\n"
        "Trainer(accelerator='cuda', devices=1, max_epochs=1, logger=False).fit(Hungry(), loader(32))\n"
    )
    done = run_python(source, cwd=tmp_path).check(1)
    assert "CUDA out of memory" in done.stderr


def test_an_error_of_a_kernel_is_the_one_that_is_reported(tmp_path: Path) -> None:
    """After it nothing can be read from the GPU, so that a checkpoint at the error is impossible."""
    source = (
        "import torch\nfrom trainer import Trainer\nfrom trainer.callbacks import OnExceptionCheckpoint\n"
        "from tests.test_cuda import Net, loader\n"
        "class Wrong(Net):\n"
        "    def training_step(self, batch, batch_idx):\n"
        "        return super().training_step([batch[0], batch[1] + 16 * (self.trainer.global_step == 3)], batch_idx)\n"
        "Trainer(accelerator='cuda', devices=1, max_epochs=2, logger=False,\n"
        "        callbacks=OnExceptionCheckpoint('.')).fit(Wrong(), loader())\n"
    )
    done = run_python(source, cwd=tmp_path).check(1)
    assert "device-side assert" in done.stderr
    assert not list(tmp_path.glob("*.partial"))


# -- the rest ----------------------------------------------------------------------------------------------------------


def test_the_profiler_of_bounds_measures_the_device(tmp_path: Path) -> None:
    profiler = BoundProfiler(first_step=4, steps=4)
    Trainer(**ON_ONE_GPU, max_epochs=1, profiler=profiler, default_root_dir=tmp_path).fit(build(), loader())
    text = profiler.summary()
    assert "Bound by" in text
    assert "idle" in text


def test_statistics_of_the_device_are_logged(tmp_path: Path) -> None:
    logger = JSONLLogger(tmp_path)
    options = {"max_epochs": 1, "log_every_n_steps": 4, "logger": logger}
    Trainer(**{**ON_ONE_GPU, **options}, callbacks=[DeviceStatsMonitor(), ThroughputMonitor()]).fit(build(), loader())
    logged = "".join(path.read_text() for path in tmp_path.rglob("*.jsonl"))
    assert "allocated_bytes.all.peak" in logged


def test_predictions_come_to_the_host() -> None:
    module = build()
    predictions = Trainer(**ON_ONE_GPU).predict(module, loader())
    assert {prediction.device.type for prediction in predictions} == {"cpu"}
    with torch.no_grad():
        expected = torch.cat([module.eval().cpu()(x) for x, _ in loader()])
    torch.testing.assert_close(torch.cat(predictions), expected, atol=1e-4, rtol=1e-4)


def test_a_loop_of_ones_own() -> None:
    torch.manual_seed(3)
    with Engine(accelerator="cuda", devices=1, precision="bf16-mixed") as engine:
        net = Net()
        model, optimizer = engine.setup(net, net.configure_optimizers())
        for x, y in engine.setup_dataloaders(loader()):
            assert x.device.type == "cuda"
            loss = nn.functional.cross_entropy(model(x), y)
            engine.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
    assert math.isfinite(loss.item())


def train_in_the_background_of_a_copy(workers: int) -> list[float]:
    found: list[float] = []

    class Sums(TrainModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(1, 1)

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            kept.append(batch[0].sum(dtype=torch.float64))
            return self.layer(batch[0][:, :1]).mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    kept: list[torch.Tensor] = []
    rows = torch.arange(64.0)[:, None].expand(64, 1 << 18)
    data = DataLoader(TensorDataset(rows), 4, num_workers=workers, pin_memory=True)
    Trainer(**ON_ONE_GPU, max_epochs=1).fit(Sums(), data)
    found += [float(total) for total in kept]
    return found


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_arrive_complete(workers: int) -> None:
    (found,) = run_distributed(train_in_the_background_of_a_copy, 1, workers)
    assert found == [float(sum(range(first, first + 4)) << 18) for first in range(0, 64, 4)]
