"""accumulate_grad_batches="auto" splits batches that do not fit, with the numbers of the batch itself."""

from __future__ import annotations

import resource
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.helpers.compare import assert_same_bits
from tests.helpers.processes import run_distributed
from tests.helpers.toy import quiet
from tests.messages import raises_recorded
from trainer import Callback, ConfigError, Trainer, TrainModule, seed_everything
from trainer.callbacks import BadStepGuard, GradientAccumulationScheduler, ModelCheckpoint
from trainer.checkpoint.format import read_checkpoint
from trainer.model import memory_limit

SAMPLES, BATCH = 44, 12


class Hungry(TrainModule):
    """A regression that reserves `megabytes` for each sample of its batch.

    Nothing is written there, so that gigabytes cost nothing; they are more than other tests can have left in the heap.
    """

    def __init__(self, megabytes: int = 0) -> None:
        seed_everything(3)
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        self.megabytes, self.calls = megabytes, 0
        self.register_buffer("seen", torch.zeros(()))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.calls += 1
        self.seen += len(batch["x"])
        if self.megabytes:
            torch.empty(len(batch["x"]) * self.megabytes * 2**18)
        loss = nn.functional.mse_loss(self.net(batch["x"]), batch["y"])
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", nn.functional.mse_loss(self.net(batch["x"]), batch["y"]))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class Rows(torch.utils.data.Dataset[Any]):
    def __init__(self) -> None:
        self.x = torch.randn(SAMPLES, 4, generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"x": self.x[index], "y": self.x[index].sum()[None], "text": f"row {index}"}


def loader(batch_size: int = BATCH) -> DataLoader[Any]:
    return DataLoader(Rows(), batch_size, shuffle=True)


class Sizes(Callback):
    """The samples of each micro-batch, and how often there was a validation."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.texts: list[int] = []
        self.validations = 0

    def on_train_batch_start(self, trainer: Trainer, module: TrainModule, batch: Any, batch_idx: int) -> None:
        self.sizes.append(len(batch["x"]))
        self.texts.append(len(batch["text"]))

    def on_validation_end(self, trainer: Trainer, module: TrainModule) -> None:
        self.validations += 1


@pytest.fixture
def little_memory(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that limits the memory that a trial may take."""

    def limit(megabytes: int) -> None:
        monkeypatch.setattr(memory_limit, "free_memory", lambda: megabytes * 2**20)

    return limit


def fit(module: Hungry, window: Any, batch_size: int = BATCH, **options: Any) -> tuple[Trainer, Sizes]:
    sizes = Sizes()
    more = options.pop("callbacks", [])
    settings = {"max_epochs": 2, "accumulate_grad_batches": window, "callbacks": [sizes, *more], **options}
    trainer = quiet(**settings)
    trainer.fit(module, loader(batch_size), loader(), ckpt_path="last" if options.get("enable_checkpointing") else None)
    return trainer, sizes


def test_a_batch_that_fits_stays_as_it_is_to_the_last_bit() -> None:
    plain, auto = Hungry(), Hungry()
    fit(plain, 1)
    _, sizes = fit(auto, "auto")
    assert sizes.sizes == [12, 12, 12, 8] * 2
    assert auto.calls == 8  # the trial was a copy's
    assert_same_bits(auto.state_dict(), plain.state_dict())


class Drawing(Rows):
    """Rows with noise of generators of their own, and a count."""

    def __init__(self) -> None:
        super().__init__()
        self.numpy, self.torch, self.count = np.random.default_rng(5), torch.Generator().manual_seed(2), 0

    def __getitem__(self, index: int) -> dict[str, Any]:
        self.count += 1
        row = super().__getitem__(index)
        noise = self.numpy.random() + float(torch.rand((), generator=self.torch)) + self.count / 100
        return {**row, "x": row["x"] + noise}


def test_the_batches_of_the_trial_change_nothing_of_the_data() -> None:
    plain, auto = Hungry(), Hungry()
    for module, window in ((plain, 1), (auto, "auto")):
        quiet(max_epochs=2, accumulate_grad_batches=window).fit(module, DataLoader(Drawing(), BATCH, shuffle=True))
    assert_same_bits(auto.state_dict(), plain.state_dict())


def test_a_batch_that_does_not_fit_is_split_with_the_same_gradients(little_memory: Any) -> None:
    """12 samples take 6 GB: 6 fit into 4.5 GB and what torch itself takes."""
    plain, auto = Hungry(), Hungry(500)
    fit(plain, 1, val_check_interval=2)
    little_memory(5000)
    trainer, sizes = fit(auto, "auto", val_check_interval=2)
    assert sizes.sizes == [6, 6, 6, 6, 6, 6, 6, 2] * 2
    assert sizes.texts == sizes.sizes
    assert sizes.validations == 4
    assert trainer.global_step == 8
    assert trainer.progress.samples == 2 * SAMPLES
    for ours, theirs in zip(auto.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)
    assert float(auto.seen) == 2 * SAMPLES


def test_a_short_batch_is_padded_and_a_bad_one_named(little_memory: Any) -> None:
    little_memory(2000)
    guard, module = BadStepGuard("skip"), Hungry(500)
    data = Rows()
    data.x[7] = torch.nan
    sizes = Sizes()
    trainer = quiet(max_epochs=1, accumulate_grad_batches="auto", callbacks=[guard, sizes])
    trainer.fit(module, DataLoader(data, BATCH))
    parts = trainer.accumulate_grad_batches  # 4, or fewer where the process has memory left over
    size = BATCH // parts
    assert parts > 1
    assert sizes.sizes[: 3 * parts] == [size] * (3 * parts)
    assert len(sizes.sizes) == 4 * parts
    assert sum(sizes.sizes[3 * parts :]) == 9
    (bad,) = guard.bad_steps
    assert (bad.batch, bad.batches) == (0, parts)
    assert bad.samples == [[list(range(first, first + size)) for first in range(0, BATCH, size)]]


def test_a_resumed_run_splits_as_before_and_has_the_same_bits(little_memory: Any, tmp_path: Path) -> None:
    weights = []
    for name, pieces in (("unbroken", (8,)), ("broken", (1, 4, 8))):
        little_memory(5000)
        for steps in pieces:
            module = Hungry(500)
            keep = ModelCheckpoint(tmp_path / name, save_top_k=-1)
            options = {"enable_checkpointing": True, "callbacks": [keep], "max_steps": steps}
            _, sizes = fit(module, "auto", **options)
            assert max(sizes.sizes) == 6
            little_memory(100_000)  # what was decided holds
        weights.append(module.state_dict())
        assert read_checkpoint(keep.last_model_path)["fitting_samples"] == 6
    assert_same_bits(weights[1], weights[0])


def _on_two(rank_without_memory: int) -> dict[str, Any]:
    import os

    module = Hungry(500)
    rank = int(os.environ["RANK"])
    with pytest.MonkeyPatch.context() as patch:
        free = 5000 if rank == rank_without_memory else 100_000
        patch.setattr(memory_limit, "free_memory", lambda: free * 2**20)
        trainer, sizes = fit(module, "auto", BATCH // 2, strategy="ddp", devices=2)
    return {"sizes": sizes.sizes, "weights": trainer.full_state_dict(True), "steps": trainer.global_step}


def test_two_processes_agree() -> None:
    plain = Hungry()
    fit(plain, 1)
    first, second = run_distributed(_on_two, 2, 1)
    assert first["sizes"][:3] == second["sizes"][:3] == [3, 3, 3]
    assert first["steps"] == 8
    assert_same_bits(first["weights"], second["weights"])
    for name, value in plain.named_parameters():
        torch.testing.assert_close(first["weights"][name], value.detach(), rtol=1e-4, atol=1e-6)


def test_what_cannot_be_is_said_before_the_first_step(little_memory: Any) -> None:
    with raises_recorded(ConfigError):
        quiet(accumulate_grad_batches="automatic")
    with raises_recorded(ConfigError):
        quiet(strategy="fsdp", accumulate_grad_batches="auto")
    with raises_recorded(ConfigError):
        fit(Hungry(), "auto", callbacks=[GradientAccumulationScheduler({1: 2})])
    with raises_recorded(ConfigError):
        quiet(accumulate_grad_batches="auto", max_steps=1).fit(Hungry(), [{"x": torch.ones(2, 4)}])
    manual = Hungry()
    manual.automatic_optimization = False
    with raises_recorded(ConfigError):
        fit(manual, "auto")
    little_memory(200)
    with raises_recorded(ConfigError):
        fit(Hungry(2000), "auto")
    little_memory(5000)

    class TimeFirst(Hungry):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            torch.empty(batch[0].shape[1] * 500 * 2**18)
            return self.net(batch[0]).square().mean()

    data = TensorDataset(torch.randn(24, 3, 4))
    collated = DataLoader(data, 12, collate_fn=lambda rows: [torch.stack([row[0] for row in rows], 1)])
    with raises_recorded(ConfigError):
        quiet(accumulate_grad_batches="auto", max_steps=1).fit(TimeFirst(), collated)


def test_the_limit_of_the_shell_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    """`ulimit -v` is a memory limit as any other."""
    monkeypatch.setattr(memory_limit, "free_memory", lambda: None)
    fit(Hungry(1), "auto", max_epochs=1)  # what a process's first run imports and its threads reserve is no batch's
    pages = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages + 10_000 * 2**20, hard))
    try:
        _, sizes = fit(Hungry(1000), "auto", max_epochs=1)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    assert max(sizes.sizes) == 6
