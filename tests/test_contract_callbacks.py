"""Callbacks that change or judge a training do so alike under every strategy, and are exact over breaks: one table."""

from __future__ import annotations

import csv
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import AdamW
from torch.optim.lr_scheduler import ExponentialLR
from torch.utils.data import DataLoader, TensorDataset

from tests.helpers.compare import as_floats, assert_same_bits
from tests.helpers.strategy_runs import WAYS, run_each, skip_if_missing
from tests.tiers import selected
from trainer import Callback, TrainModule, seed_everything
from trainer.callbacks import (
    BackboneFinetuning,
    BadStepGuard,
    BaseFinetuning,
    CSVLogger,
    EMAWeightAveraging,
    GradNormMonitor,
    ModelCheckpoint,
    StochasticWeightAveraging,
    WeightAveraging,
)
from trainer.checkpoint.format import read_checkpoint
from trainer.errors import ConfigError

pytestmark = pytest.mark.timeout(1200)  # the fixture runs all cells of the test

NAMES = (
    *("single", "DDP x1", "DDP x2", "FSDP x1", "FSDP x2", "FSDP 2x2"),
    *(f"ZeRO-{stage} x{processes}" for stage in (1, 2, 3) for processes in (1, 2)),
)
SAMPLES, GLOBAL_BATCH, WINDOW, EPOCHS = 48, 8, 2, 4
STEPS = EPOCHS * SAMPLES // GLOBAL_BATCH // WINDOW
BREAKS = (1, 6, 10)
"""Steps after which a run is broken off: an epoch has three, so that 6 is at the end of one."""
BAD_SAMPLE = 29


class HeadFirst(BaseFinetuning):
    """Train the head, from the second epoch on the last layer too, and from the third on the first."""

    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.backbone, train_bn=False)

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch in (1, 2):
            self.unfreeze_and_add_param_group(pl_module.backbone[2 * (2 - epoch) :], optimizer)


@dataclass(frozen=True)
class Item:
    """A callback, and what its run needs."""

    make: Callable[[], Callback]
    bad_sample: bool = False
    refused: str = ""
    """What a strategy of DeepSpeed says before the start."""


ITEMS = {
    "WeightAveraging": Item(WeightAveraging),
    "WeightAveraging, on the host": Item(lambda: WeightAveraging(device="cpu", use_buffers=False)),
    "EMAWeightAveraging": Item(lambda: EMAWeightAveraging(decay=0.8)),
    "EMAWeightAveraging, later": Item(
        lambda: EMAWeightAveraging(
            decay=0.8, update_every_n_steps=2, update_starting_at_step=3, update_starting_at_epoch=2
        )
    ),
    "StochasticWeightAveraging": Item(lambda: StochasticWeightAveraging(0.01, 2, annealing_epochs=2)),
    "BadStepGuard, skip": Item(lambda: BadStepGuard("skip"), bad_sample=True),
    "BadStepGuard, rewind": Item(lambda: BadStepGuard("rewind"), bad_sample=True),
    "BaseFinetuning": Item(HeadFirst, refused="flattens those that train at the start: use 'ddp' or 'fsdp'"),
    "BackboneFinetuning": Item(lambda: BackboneFinetuning(1), refused="flattens those that train at the start"),
    "GradNormMonitor": Item(GradNormMonitor),
}


class Net(TrainModule):
    """A backbone and a head; `plain` without what depends on the number of processes or on random numbers."""

    def __init__(self, plain: bool) -> None:
        seed_everything(4)
        super().__init__()
        norm, dropout = (nn.Identity(), nn.Identity()) if plain else (nn.BatchNorm1d(8), nn.Dropout(0.2))
        self.backbone = nn.Sequential(nn.Linear(4, 8), norm, nn.Tanh(), nn.Linear(8, 8), dropout, nn.Tanh())
        self.head = nn.Linear(8, 1)

    def _loss(self, batch: Any) -> torch.Tensor:
        return nn.functional.mse_loss(self.head(self.backbone(batch[0])), batch[1])

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = self._loss(batch)
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self._loss(batch))

    def configure_optimizers(self) -> Any:
        optimizer = AdamW([p for p in self.parameters() if p.requires_grad], lr=0.02)
        return [optimizer], [{"scheduler": ExponentialLR(optimizer, 0.95), "interval": "step"}]


def data(micro_batch: int, bad_sample: bool = False, shuffle: bool = False) -> DataLoader[Any]:
    features = torch.randn(SAMPLES, 4, generator=torch.Generator().manual_seed(1))
    targets = features.sum(1, keepdim=True)
    if bad_sample:
        features[BAD_SAMPLE] = torch.nan
    return DataLoader(TensorDataset(features, targets), micro_batch, shuffle=shuffle)


def train(name: str, item: str, folder: Path, plain: bool, ends: tuple[int, ...]) -> dict[str, Any]:
    """Train in pieces that end at these steps; return all that may not depend on the pieces."""
    way = WAYS[name]
    for piece, steps in enumerate(ends):
        torch.manual_seed(100 + piece)  # A new process has other random numbers than the old one.
        trainer = way.trainer(
            max_steps=steps,
            seed=3,
            accumulate_grad_batches=WINDOW,
            gradient_clip_val=0.5,
            val_check_interval=4,
            log_every_n_steps=1,
            num_sanity_val_steps=0,
            default_root_dir=folder,
            enable_checkpointing=True,
            logger=[CSVLogger(folder / "log")],
            callbacks=[ITEMS[item].make(), ModelCheckpoint(folder / "kept", every_n_train_steps=1, save_top_k=-1)],
        )
        module = Net(plain)
        loader = data(way.micro_batch, ITEMS[item].bad_sample, shuffle=True)
        trainer.fit(module, loader, data(way.micro_batch), ckpt_path="last")
    (path,) = (folder / "kept").glob(f"*step={trainer.global_step}")
    saved = read_checkpoint(path)
    with open(folder / "log" / "metrics.csv") as file:
        rows = list(csv.reader(file))
    return {
        "weights": trainer.full_state_dict(everywhere=True),
        "in the checkpoint": {key: saved.get(key) for key in ("model", "average", "optimizers", "progress")},
        "callbacks": {key: state for key, state in saved["callbacks"].items() if "ModelCheckpoint" not in key},
        "metrics": as_floats(trainer.callback_metrics),
        "rows": rows,
    }


def run_cells(name: str, cells: list[tuple[str, str]], folder: str) -> dict[str, dict[str, Any]]:
    """Run the items that are asked of a way: in one go, in pieces, and without what makes processes differ."""
    results: dict[str, dict[str, Any]] = {}
    for item in [item for way, item in cells if way == name]:
        path = Path(folder) / name.replace(" ", "-") / item.replace(" ", "-")
        try:
            results[item] = {
                "unbroken": train(name, item, path / "unbroken", False, (STEPS,)),
                "broken": train(name, item, path / "broken", False, (*BREAKS, STEPS)),
                "plain": train(name, item, path / "plain", True, (STEPS,)),
            }
        except ConfigError as error:
            results[item] = {"refused": str(error), "written": path.exists()}
    return results


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    cells = selected(request, "name", "item")
    wanted = {*cells, *(("single", item) for _, item in cells)}
    return run_each(run_cells, {name for name, _ in wanted}, sorted(wanted), str(tmp_path_factory.mktemp("callbacks")))


@pytest.mark.parametrize("item", ITEMS)
@pytest.mark.parametrize("name", NAMES)
def test_alike_under_every_strategy_and_exact_over_breaks(name: str, item: str, results: dict[str, list[Any]]) -> None:
    skip_if_missing(name)
    ranks, (single,) = [rank[item] for rank in results[name]], [rank[item] for rank in results["single"]]
    if "refused" in ranks[0]:
        assert WAYS[name].strategy.startswith("deepspeed")
        assert ITEMS[item].refused
        for rank in ranks:
            assert ITEMS[item].refused in rank["refused"]
            assert not rank["written"]
        return
    assert not (ITEMS[item].refused and name.startswith("ZeRO"))
    for rank in ranks:
        assert_same_bits(rank["broken"], rank["unbroken"], f"{name}, {item}")
        for run in ("unbroken", "plain"):
            assert_same_bits(rank[run]["weights"], ranks[0][run]["weights"], f"{name}, {item}: ranks differ")
            assert all(torch.isfinite(value).all() for value in rank[run]["weights"].values())
    torch.testing.assert_close(ranks[0]["plain"]["weights"], single["plain"]["weights"], rtol=1e-3, atol=1e-4)
    ours, theirs = (run["plain"]["in the checkpoint"] for run in (ranks[0], single))
    assert ours["progress"]["step"] == theirs["progress"]["step"] == STEPS
    torch.testing.assert_close(ours["average"] or {}, theirs["average"] or {}, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(
        {key: torch.tensor(value) for key, value in ranks[0]["plain"]["metrics"].items()},
        {key: torch.tensor(value) for key, value in single["plain"]["metrics"].items()},
        rtol=1e-3,
        atol=1e-4,
    )
