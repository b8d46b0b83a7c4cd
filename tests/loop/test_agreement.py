"""Processes that disagree are reported before the first step, with both values; what may differ goes through."""

from __future__ import annotations

import json
import logging
import os
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import Enum
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset, Sampler, Subset, TensorDataset, default_collate

import trainer
from tests.helpers.processes import fork_python, run_distributed
from tests.helpers.strategy_models import FEATURES, MLP
from tests.helpers.strategy_runs import WAYS, Way, run_each, skip_if_missing
from tests.tiers import selected
from trainer import Callback, ConfigError, Trainer, TrainModule
from trainer.callbacks import (
    CSVLogger,
    EarlyStopping,
    GradientAccumulationScheduler,
    LearningRateMonitor,
    ModelCheckpoint,
    ModelSummary,
    ProgressBar,
    Timer,
    WeightAveraging,
)
from trainer.data.combined_loader import CombinedLoader
from trainer.data.fingerprints import function_fingerprint
from trainer.distributed.process_group import TorchProcessGroup
from trainer.model.weights import AbsentParameter
from trainer.optimizers import TimedScheduler
from trainer.runs import facts
from trainer.runs.compare_ranks import as_text, compare, describe_tensor
from trainer.runs.facts import as_texts, describe_layer, facts_of_optimizers, facts_of_schedulers

pytestmark = pytest.mark.timeout(600)

NAMES = ("DDP x2", "FSDP x2", "ZeRO-2 x2", "ZeRO-3 x2")


class OfASet(Sampler[int]):
    """Begins with an index that depends on the process, as the order of a set of texts does; no attribute shows it."""

    def __len__(self) -> int:
        return 16

    def __iter__(self) -> Iterator[int]:
        first = int(os.environ["RANK"])
        return iter([(first + number) % 16 for number in range(16)])


class Chosen(MLP):
    """The module of which one thing is another on rank 1."""

    def __init__(self, other: str) -> None:
        super().__init__()
        self.other = other
        for name in ("high", "low") if other == "order of buffers" else ("low", "high"):
            self.register_buffer(name, torch.zeros(1))
        if other == "width":
            self.layers[2], self.layers[4] = nn.Linear(16, 24), nn.Linear(24, 1)
        elif other == "dtype":
            self.layers[4].double()
        elif other == "frozen":
            self.layers[0].requires_grad_(False)
        elif other == "layer":
            self.extra = nn.Linear(FEATURES, 1)
        elif other == "buffer":
            self.register_buffer("mean", torch.zeros(3))
        elif other == "not persistent":
            self.register_buffer("low", torch.zeros(1), persistent=False)
        elif other == "many buffers":
            for number in range(20):
                self.register_buffer(f"number_{number}", torch.zeros(1))
        elif other == "order":
            weight = self.layers[0].weight
            del self.layers[0].weight
            self.layers[0].weight = weight  # behind the bias now
        elif other == "strides":
            self.layers[2].weight = nn.Parameter(self.layers[2].weight.detach().t())
        elif other == "tied":
            self.layers[2].bias = self.layers[0].bias
        elif other == "manual":
            self.automatic_optimization = False
        elif other == "eval mode":
            self.layers[2].eval()
        elif other == "dropout":
            self.layers[1] = nn.Dropout(0.5)

    def configure_model(self) -> None:
        if self.other == "built late":
            self.late = nn.Linear(2, 2)

    def configure_optimizers(self) -> Any:
        lr = 0.1 if self.other == "lr" else 0.01
        kind = torch.optim.SGD if self.other == "optimizer" else torch.optim.AdamW
        groups: Any = [{"params": [p for p in self.parameters() if p.requires_grad], "weight_decay": 0.0}]
        if self.other == "other parameters":
            groups[0]["params"].reverse()
        if self.other == "weight_decay":
            groups[0]["weight_decay"] = 0.5
        optimizer: Any = kind(groups, lr=lr)
        if self.other == "option of its own":
            optimizer.rho = 0.5
        if self.other == "no scheduler":
            return optimizer
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=7 if self.other == "step_size" else 5)
        config = {"scheduler": scheduler, "interval": "epoch" if self.other == "interval" else "step"}
        if self.other == "frequency":
            config["frequency"] = 2
        return [optimizer], [config]


SETTINGS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "seed": ({"seed": 1}, {"seed": 2}, "seed: 1 on rank 0, and 2 on rank 1"),
    "no seed": ({"seed": 1}, {"seed": None}, "seed: 1 on rank 0, and None on rank 1"),
    "clipping": ({}, {"gradient_clip_val": 0.5}, "gradient_clip_val: None on rank 0, and 0.5 on rank 1"),
    "window": ({}, {"accumulate_grad_batches": 2}, "accumulate_grad_batches: 1 on rank 0, and 2 on rank 1"),
    "max_steps": ({"max_steps": 3}, {"max_steps": 4}, "max_steps: 3 on rank 0, and 4 on rank 1"),
    "max_epochs": ({}, {"max_epochs": 2}, "max_epochs: 1 on rank 0, and 2 on rank 1"),
    "interval": ({}, {"val_check_interval": 2}, "val_check_interval: 1.0 on rank 0, and 2 on rank 1"),
    "limit": ({}, {"limit_train_batches": 2}, "limit_train_batches: 1.0 on rank 0, and 2 on rank 1"),
    "flushes": ({}, {"log_every_n_steps": 7}, "log_every_n_steps: 1 on rank 0, and 7 on rank 1"),
    "max_time": ({}, {"max_time": "00:00:10:00"}, "max_time: None on rank 0, and '00:00:10:00' on rank 1"),
    "precision": ({}, {"precision": "bf16-mixed"}, "precision: ['32-true', torch.float32, None] on rank 0, and ['bf16"),
    "no checkpoints": (
        {"enable_checkpointing": True},
        {"enable_checkpointing": False},
        "enable_checkpointing: True on rank 0, and False on rank 1",
    ),
    "callback missing": (
        {"callbacks": [EarlyStopping("val_loss"), ProgressBar()]},
        {"callbacks": [ProgressBar()]},
        "callbacks: [EarlyStopping] on rank 0, and [] on rank 1\nGive",
    ),
    "checkpoint missing": (
        {"callbacks": ModelCheckpoint(), "enable_checkpointing": True},
        {"callbacks": None, "enable_checkpointing": True, "fast_dev_run": True},
        "fast_dev_run: False on rank 0, and True on rank 1",
    ),
    "what is saved": (
        {"callbacks": ModelCheckpoint(), "enable_checkpointing": True},
        {"callbacks": ModelCheckpoint(save_weights_only=True), "enable_checkpointing": True},
        "ModelCheckpoint.save_weights_only: False on rank 0, and True on rank 1",
    ),
    "patience": (
        {"callbacks": EarlyStopping("val_loss", patience=3)},
        {"callbacks": EarlyStopping("val_loss", patience=4)},
        "EarlyStopping.patience: 3 on rank 0, and 4 on rank 1",
    ),
    "second of a class": (
        {"callbacks": [ModelCheckpoint(), ModelCheckpoint("b")], "enable_checkpointing": True},
        {"callbacks": [ModelCheckpoint(), ModelCheckpoint("b", every_n_train_steps=2)], "enable_checkpointing": True},
        "ModelCheckpoint number 2.every_n_train_steps: None on rank 0, and 2 on rank 1",
    ),
    "schedule of windows": (
        {"callbacks": GradientAccumulationScheduler({0: 1, 3: 2})},
        {"callbacks": GradientAccumulationScheduler({0: 1, 4: 2})},
        "GradientAccumulationScheduler.scheduling: {0: 1, 3: 2} on rank 0, and {0: 1, 4: 2} on rank 1",
    ),
    "function": (
        {"callbacks": WeightAveraging(avg_fn=lambda average, now, count: average)},
        {"callbacks": WeightAveraging(avg_fn=lambda average, now, count: now)},
        "WeightAveraging.avg_fn, fingerprint of its code and values: '",
    ),
    "timer": ({}, {"callbacks": Timer("00:01:00:00")}, "callbacks: [] on rank 0, and [Timer] on rank 1"),
}
MODULES = {
    "width": "parameter layers.2.weight: '[16, 16] torch.float32, trained' on rank 0, and '[24, 16] torch.float32",
    "dtype": "parameter layers.4.bias: '[1] torch.float32, trained' on rank 0, and '[1] torch.float64",
    "frozen": "parameter layers.0.weight: '[16, 6] torch.float32, trained' on rank 0, and '[16, 6] torch.float32, froz",
    "layer": "parameter extra.weight: missing on rank 0, and '[1, 6] torch.float32, trained' on rank 1",
    "buffer": "buffer mean: missing on rank 0, and '[3] torch.float32' on rank 1",
    "not persistent": "buffer low: '[1] torch.float32' on rank 0, and '[1] torch.float32, not in the state_dict' on",
    "many buffers": "buffer number_0: missing on rank 0, and '[1] torch.float32' on rank 1",
    "order of buffers": "buffer low, buffer high, ",
    "built late": "parameter late.weight: missing on rank 0, and '[2, 2] torch.float32, trained' on rank 1",
    "lr": "AdamW, initial_lr: 0.01 on rank 0, and 0.1 on rank 1",
    "weight_decay": "AdamW, weight_decay: 0.0 on rank 0, and 0.5 on rank 1",
    "other parameters": "AdamW, parameters: ['layers.0.weight', 'layers.0.bias', 'layers.2.weight'",
    "optimizer": "optimizers: [AdamW] on rank 0, and [SGD] on rank 1",
    "no scheduler": "schedulers: [StepLR] on rank 0, and [] on rank 1",
    "step_size": "StepLR, step_size: 5 on rank 0, and 7 on rank 1",
    "interval": "StepLR, interval: 'step' on rank 0, and 'epoch' on rank 1",
    "frequency": "StepLR, frequency: 1 on rank 0, and 2 on rank 1",
    "order": "parameter layers.0.weight, parameter layers.0.bias",
    "strides": "and '[16, 16] torch.float32, strides [1, 16], trained' on rank 1",
    "tied": "parameter layers.2.bias: '[16] torch.float32, trained' on rank 0, and missing on rank 1",
    "dropout": "layers.1: 'Tanh()' on rank 0, and 'Dropout(p=0.5, inplace=False)' on rank 1",
    "eval mode": "layers in eval mode: [] on rank 0, and ['layers.2'] on rank 1",
    "manual": "automatic_optimization: True on rank 0, and False on rank 1",
    "option of its own": "AdamW, rho: missing on rank 0, and 0.5 on rank 1",
}
FOLDERS = "saved-by-rank-0' on rank 0, and "


def another_collate(samples: Any) -> Any:
    return default_collate(samples)


LOADERS: dict[str, tuple[Any, str]] = {
    "collate_fn": (
        lambda: DataLoader(MLP.data(16), 4, collate_fn=another_collate),
        f"the training loader, collate_fn: 'default_collate (collate.py:{default_collate.__code__.co_firstlineno})' on",
    ),
    "samples": (lambda: DataLoader(MLP.data(20), 4), "the training loader, samples in an epoch: 16 on rank 0, and 20"),
    "batch size": (
        lambda: DataLoader(MLP.data(16), 2),
        "the training loader, batch_size: 4 on rank 0, and 2",
    ),
    "shuffled": (
        lambda: DataLoader(MLP.data(16), 4, shuffle=True),
        "the training loader, sampler: SequentialSampler on rank 0, and RandomSampler on rank 1",
    ),
    "indices": (
        lambda: DataLoader(Subset(MLP.data(32), range(16, 32)), 4),
        "the training loader, indices of its dataset: missing on rank 0, and '16 numbers (",
    ),
    "a list": (
        lambda: list(DataLoader(MLP.data(16), 4)),
        "the training loader, kind: 'split by the trainer' on rank 0, and 'iterated by each process' on rank 1",
    ),
}


class Called:
    """A schedule that is an object."""

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def __call__(self, step: int) -> float:
        return self.factor if step else 1.0


def of_a_global(step: int) -> float:
    return FACTOR if step else 1.0


FACTOR = 1.0


def in_a_dict(numbers: dict[str, float]) -> Callable[[int], float]:
    return lambda step: numbers["factor"] if step else 1.0


def in_a_tuple(numbers: tuple[float, ...]) -> Callable[[int], float]:
    return lambda step: numbers[0] if step else 1.0


def once(numbers: dict[str, int]) -> Callable[[int], float]:
    return lambda step: 0.5 if step == numbers["at"] else 1.0


SCHEDULES: dict[str, Callable[[int], Callable[[int], float]]] = {
    "global": lambda rank: of_a_global,
    "dict in the closure": lambda rank: in_a_dict({"factor": 1.0 + rank}),
    "object": lambda rank: Called(1.0 + rank),
    "tuple": lambda rank: in_a_tuple((1.0 + rank,)),
    "of steps in another order": lambda rank: once({"at": 1 + rank}),
}
"""Schedules of the learning rate that differ between ranks, which their code does not show."""


class Scheduled(MLP):
    def __init__(self, schedule: Callable[[int], float]) -> None:
        super().__init__()
        self.schedule = schedule

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, self.schedule)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


class ChangesMomentum(Callback):
    def __init__(self, value: float) -> None:
        self.value = value

    def on_train_start(self, trainer: Trainer, module: TrainModule) -> None:
        trainer.optimizers[0].param_groups[0]["momentum"] = self.value


OPTION = "Strategy, timeout_seconds: 900.0 on rank 0, and 901.0 on rank 1"
KIND = "\n  strategy: "
VERSIONS = {
    "this package": f"this package: {trainer.__version__!r} on rank 0, and '0' on rank 1",
    "python": f"python: '3.{sys.version_info.minor}' on rank 0, and '3.99' on rank 1",
    "torch": ".another' on rank 1",
}
STAGE = "stage: 'fit' on rank 0, and 'validate' on rank 1"
VALIDATION = "loaders: ['the training loader', 'the evaluation loader'] on rank 0, and ['the training loader'] on"


def fit(
    way: Way, module: TrainModule, train: Any, val: Any, settings: dict[str, Any], stage: str = "fit"
) -> str | None:
    """Return the error of a run, or None."""
    defaults = {"seed": 1, "max_epochs": 1, "log_every_n_steps": 1, "watchdog_seconds": 60}
    trainer = way.trainer(**{**defaults, **settings})
    try:
        trainer.fit(module, train, val) if stage == "fit" else trainer.validate(module, val)
    except ConfigError as error:
        return str(error)
    return None


def data() -> Any:
    return DataLoader(MLP.data(16), 4)


def run_all(name: str, cells: list[tuple[str, str]]) -> dict[str, str | None]:
    """Run those of the cases that are wanted of this way; return their errors."""
    rank, way = int(os.environ["RANK"]), WAYS[name]
    found: dict[str, str | None] = {}

    def run(case: str, *args: Any) -> None:
        if (name, case) in cells:
            found[case] = fit(*args)

    for case, (*by_rank, _) in SETTINGS.items():
        run(f"settings {case}", way, Chosen(""), data(), data(), by_rank[rank])
    saving = ModelCheckpoint(f"saved-by-rank-{rank}")
    run("folders of shards", way, Chosen(""), data(), None, {"callbacks": saving, "enable_checkpointing": True})
    for case in MODULES:
        run(f"module {case}", way, Chosen(case if rank else ""), data(), None, {})
    global FACTOR
    FACTOR = 1.0 + rank
    for case, schedule in SCHEDULES.items():
        flushes = {"log_every_n_steps": 50 if "another order" in case else 1}
        run(f"schedule {case}", way, Scheduled(schedule(rank)), data(), None, flushes)
    changes = ChangesMomentum(0.1 * rank)
    run("options of a callback", way, Scheduled(Called(1.0)), data(), None, {"callbacks": changes})
    for case, (other, _) in LOADERS.items():
        run(f"loader {case}", way, Chosen(""), other() if rank else data(), None, {})
    combined = CombinedLoader([data(), data()], ("min_size", "max_size")[rank])
    run("loader combined", way, Chosen(""), combined, None, {})
    in_order = DataLoader(MLP.data(16), 4, sampler=OfASet())
    run("loader order", way, Chosen(""), in_order, None, {})
    run("loader order of a part", way, Chosen(""), CombinedLoader([data(), in_order]), None, {})
    run("loader order of validation", way, Chosen(""), data(), in_order, {})
    other = Way(way.strategy, 2, (*way.options, ("timeout_seconds", 900.0 + rank)))
    run("strategy option", other, Chosen(""), data(), None, {})
    run("strategy class", WAYS["FSDP x2"] if rank else way, Chosen(""), data(), None, {})
    with pytest.MonkeyPatch.context() as patch:
        if rank:
            patch.setattr(facts, "__version__", "0")
            patch.setattr(facts, "sys", SimpleNamespace(version_info=(3, 99)))
            patch.setattr(torch, "__version__", type(torch.__version__)(f"{torch.__version__}.another"))
        for library in VERSIONS:
            run(f"versions of {library}", way, Chosen(""), data(), None, {})
    run("call stage", way, Chosen(""), data(), data(), {}, ("fit", "validate")[rank])
    run("loader validation", way, Chosen(""), data(), None if rank else data(), {})
    return found


EXPECTED = {
    **{f"settings {case}": expected for case, (_, _, expected) in SETTINGS.items()},
    "folders of shards": FOLDERS,
    **{f"module {case}": expected for case, expected in MODULES.items()},
    **{f"loader {case}": expected for case, (_, expected) in LOADERS.items()},
    **dict.fromkeys((f"schedule {case}" for case in SCHEDULES), "group 0, lr: 0.01 on rank 0, and 0.02 on rank 1"),
    "schedule of steps in another order": "sum of the learning rates so far, by their order: 0.0",
    "options of a callback": "group 0, momentum: 0.0 on rank 0, and 0.1 on rank 1\nBy step 1 the",
    "loader validation": VALIDATION,
    "loader combined": "the training loader, mode: 'min_size' on rank 0, and 'max_size' on rank 1",
    "loader order": "the training loader, order of its OfASet: ",
    "loader order of a part": "the training loader, loader 1, order of its OfASet: ",
    "loader order of validation": "the evaluation loader, order of its OfASet: ",
    "strategy option": OPTION,
    "strategy class": KIND,
    **{f"versions of {name}": expected for name, expected in VERSIONS.items()},
    "call stage": STAGE,
}


def run_both(name: str, cells: list[tuple[str, str]]) -> dict[str, Any]:
    return {**run_all(name, cells), "warnings": warned(name)}


OF_EACH_WAY = (
    "settings seed",
    "settings what is saved",
    "folders of shards",
    "module width",
    "module layer",
    "module order of buffers",
    "module built late",
    "module lr",
    "module other parameters",
    "schedule object",
    "options of a callback",
    "loader samples",
    "loader order",
    "loader validation",
    "strategy option",
    "call stage",
)
"""Cases that run under every strategy; the comparison of the others does not depend on it."""
CELLS = [(name, case) for name in NAMES for case in EXPECTED if name == NAMES[0] or case in OF_EACH_WAY]


@pytest.fixture(scope="module")
def reported(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    names, cells = selected(request, "name"), selected(request, "name", "case")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("runs"))
        return run_each(run_both, [name for name in NAMES if name in names], cells)


@pytest.mark.parametrize(("name", "case"), CELLS)
def test_what_differs_is_reported_on_both_ranks_before_the_first_step(name: str, case: str, reported: Any) -> None:
    skip_if_missing(name)
    if case == "folders of shards" and name == "DDP x2":  # only rank 0 writes
        assert [rank[case] for rank in reported[name]] == [None, None]
        return
    for rank in reported[name]:
        assert rank[case] is not None, "the run went on"
        assert "the processes do not agree:\n  " in rank[case]
        assert EXPECTED[case] in rank[case]
        assert ("\n  and more\n" in rank[case]) == (case == "module many buffers")
        assert "Look for what depends on the rank, the time, the machine, or random numbers" in rank[case]


# -- layers that are sharded as they are built ------------------------------------------------------------------------


class BuiltLate(MLP):
    def configure_model(self) -> None:
        self.late = nn.Linear(2, 2 + torch.distributed.get_rank())


def build_on(name: str) -> dict[str, str | None]:
    ways = {place: Way(WAYS[name].strategy, 2, (("init_device", place),)) for place in ("cpu", "mixed", "meta")}
    return {place: fit(way, BuiltLate(), data(), None, {}) for place, way in ways.items()}


@pytest.mark.parametrize("name", ["FSDP x2", "ZeRO-3 x2"])
def test_layers_that_differ_are_reported_wherever_they_are_built(name: str, tmp_path: Path, monkeypatch: Any) -> None:
    skip_if_missing(name)
    monkeypatch.chdir(tmp_path)
    for rank in run_each(build_on, [name])[name]:
        for messages in rank.values():
            assert "parameter late.weight: '[2, 2] torch.float32, trained' on rank 0, and '[3, 2]" in messages


# -- files -------------------------------------------------------------------------------------------------------------


def saving_and_configured(name: str) -> dict[str, Any]:
    """Return the errors of a JSON file that has another content on each rank, and of a path that depends on it."""
    rank = int(os.environ["RANK"])
    folder = Path(f"machine-{rank}")
    folder.mkdir()
    (folder / "ds.json").write_text(json.dumps({"zero_optimization": {"stage": 2, "reduce_bucket_size": 1000 + rank}}))
    os.chdir(folder)
    of_json = fit(Way("deepspeed", 2, (("config", "ds.json"),)), Chosen(""), data(), None, {})
    os.chdir("..")
    trainer = WAYS[name].trainer(seed=1, max_epochs=1, watchdog_seconds=60)
    trainer.fit(Chosen(""), data())
    try:
        trainer.save_checkpoint(f"by-rank-{rank}")
    except ConfigError as error:
        return {"json": of_json, "path": str(error)}
    return {"json": of_json, "path": None}


def test_contents_of_files_and_places_of_shards_are_compared(tmp_path: Path, monkeypatch: Any) -> None:
    skip_if_missing("ZeRO-2 x2")
    monkeypatch.chdir(tmp_path)
    for messages in run_each(saving_and_configured, ["ZeRO-2 x2"])["ZeRO-2 x2"]:
        assert "DeepSpeedStrategy, content of config: " in messages["json"]
        assert "1000" in messages["json"]
        assert "1001" in messages["json"]
        assert "path: 'folder by-rank-0' on rank 0, and 'folder by-rank-1' on rank 1" in messages["path"]


# -- what may differ ---------------------------------------------------------------------------------------------------


class Slow(Dataset[Any]):
    """An own dataset with a place on the disk."""

    def __init__(self, root: str) -> None:
        self.root = root

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> Any:
        return [tensor[index] for tensor in MLP.data(16).tensors]


class OnlyHere(Callback):
    """A callback that a user gives to one rank."""


def legitimate(name: str) -> dict[str, Any]:
    """Train with all that may differ, and return the weights."""
    rank = int(os.environ["RANK"])
    only_here = [OnlyHere(), ProgressBar(), LearningRateMonitor(), ModelSummary()] if rank == 0 else [ModelSummary(2)]
    folder = "shared" if name != "DDP x2" else f"checkpoints-of-rank-{rank}"
    trainer = Trainer(
        strategy=WAYS[name].trainer().strategy,
        devices="auto" if rank else 2,
        accelerator="auto" if rank else "cpu",
        seed=1,
        max_epochs=1,
        default_root_dir=f"runs-of-rank-{rank}",
        callbacks=[*only_here, ModelCheckpoint(dirpath=folder, every_n_train_steps=1, verbose=rank == 0)],
        logger=CSVLogger(f"csv-of-rank-{rank}") if rank == 0 else False,
        profiler="simple" if rank == 0 else None,
        enable_progress_bar=rank == 0,
        enable_model_summary=rank == 0,
        max_restarts=rank,
        deadline=datetime.now() + timedelta(hours=1, seconds=rank),
        deadline_margin=10.0 + rank,
        watchdog_seconds=60 + rank,
    )
    module = Chosen("")
    module.hparams["rank"] = rank
    trainer.fit(module, DataLoader(Slow(f"/data/{rank}"), 4, num_workers=rank), data())
    return {"steps": trainer.global_step, "weights": trainer.full_state_dict(everywhere=True)}


@pytest.mark.parametrize("name", NAMES)
def test_paths_loggers_and_callbacks_of_one_rank_may_differ(name: str, tmp_path: Path, monkeypatch: Any) -> None:
    skip_if_missing(name)
    monkeypatch.chdir(tmp_path)
    first, second = run_each(legitimate, [name])[name]
    assert first["steps"] == second["steps"] == 2
    for key, value in first["weights"].items():
        assert torch.equal(value, second["weights"][key])


def uneven(name: str) -> tuple[int, int | None]:
    """Train on iterables of other lengths, from other places."""
    rank = int(os.environ["RANK"])
    batches = list(DataLoader(MLP.data(16), 4))[: 3 + rank]
    trainer = WAYS[name].trainer(seed=1, max_epochs=1, watchdog_seconds=60)
    trainer.fit(Chosen(""), batches, batches[rank:])
    return trainer.global_step, trainer.num_training_batches


@pytest.mark.parametrize("name", NAMES[:1])
def test_iterables_of_other_lengths_are_allowed(name: str, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_each(uneven, [name])[name] == [(3, 3)] * 2


# -- what is a warning -------------------------------------------------------------------------------------------------


class Kept(Dataset[Any]):
    """A dataset that keeps its samples, of which rank 1 may have others."""

    def __init__(self, shift: float = 0.0) -> None:
        self.kept = list(MLP.data(16).tensors[0] + shift)
        self.samples = MLP.data(16)

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> Any:
        return self.samples[index]


class Hooked(MLP):
    def __init__(self, kind: str, rank: int) -> None:
        super().__init__()
        layer: Any = self.layers[0]
        if kind == "on both" or (kind and rank):
            layer.register_forward_hook(lambda module, given, output: output)
        if kind == "gradient" and rank:
            layer.weight.register_hook(lambda gradient: gradient)


class Logging(MLP):
    """Logs a name with another reduction on each process, and in other steps."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx % 2 == self.trainer.rank:
            self.log("of some", 1.0)
        self.log("extra", 1.0, on_epoch=True, reduce_fx=("mean", "max")[self.trainer.rank])
        return super().training_step(batch, batch_idx)


class Warnings(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if "nothing is validated" not in record.getMessage():
            self.texts.append(record.getMessage())


def warned(name: str) -> dict[str, str]:
    """Return the warnings of runs, or the error."""
    rank, way = int(os.environ["RANK"]), WAYS[name]

    def run(module: TrainModule, train: Any, val: Any = None) -> str:
        handler = Warnings()
        logging.getLogger("trainer").addHandler(handler)
        error = fit(way, module, train, val, {})
        logging.getLogger("trainer").removeHandler(handler)
        return error or "\n".join(handler.texts)

    other = DataLoader(Kept(rank), 4)
    found = {"samples": run(MLP(), other), "hooks": run(Hooked("layer", rank), data())}
    found |= {"equal samples": run(MLP(), DataLoader(Kept(), 4)), "equal hooks": run(Hooked("on both", rank), data())}
    if name != "DDP x2":  # the rest is the same under every strategy
        return found
    found["tensors"] = run(MLP(), DataLoader(TensorDataset(*(one + rank for one in MLP.data(16).tensors)), 4))
    found["combined"] = run(Combined(), CombinedLoader([data(), other]))
    found["validation"] = run(MLP(), data(), other)
    found["hooks of a parameter"] = run(Hooked("gradient", rank), data())
    found["names reduction"] = run(Logging(), data(), DataLoader(MLP.data(2), 1))
    return found


class Combined(MLP):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch[0], batch_idx)


WARNED = {
    "samples": "samples differ between processes:\n  the training loader, Kept.kept: ",
    "tensors": "the training loader, TensorDataset.tensors: 2 lists (",
    "combined": "the training loader, loader 1, Kept.kept: ",
    "validation": "the evaluation loader, Kept.kept: ",
    "hooks": "hooks differ between processes:\n  forward hooks of layers.0: missing on rank 0, and Hooked.__init__.<",
    "hooks of a parameter": "backward hooks of layers.0.weight: missing on rank 0, and Hooked.",
    "names reduction": "the processes do not agree on the reduction: reduce_fx='mean'",
}


@pytest.mark.parametrize("name", NAMES)
def test_what_may_be_a_mistake_is_a_warning_on_rank_0(name: str, reported: Any) -> None:
    skip_if_missing(name)
    first, second = [rank["warnings"] for rank in reported[name]]
    assert {case: text for case, text in first.items() if WARNED.get(case, "") not in text} == {}
    assert {case: text for case, text in first.items() if text and case not in WARNED} == {}
    assert {case for case, text in second.items() if text} == {"names reduction"} & first.keys()


# -- the comparison ----------------------------------------------------------------------------------------------------


def compare_on_four() -> str | None:
    """Compare three values on four processes, of which one and two differ."""
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo")
    half = rank // 2
    facts = {"lr": 0.1 if rank != 2 else 0.2, "names": {"a", "b"}, "many": [0] * 100 + [1 + half]}
    facts |= {"early": [1 + half] + [0] * 100, "short": "x" * 100 + str(half)}
    try:
        compare(TorchProcessGroup(rank, rank, 4), iter(facts.items()), "Give all the same.")
    except ConfigError as error:
        return str(error)
    return None


def compare_names() -> list[str]:
    """Compare values that have other names on rank 1, and one that rank 0 alone has."""
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo")
    messages = []
    options = {f"option {number}": number for number in range(20)}
    for by_rank in (
        ({"a": 1, "b": 2}, {"c": 1, "d": 2}),
        ({"a": 1, "b": 2}, {"a": 1}),
        ({"kind": 1, **options}, {"kind": 2}),
        (options, dict.fromkeys(options, "another")),
    ):
        with pytest.raises(ConfigError) as error:
            compare(TorchProcessGroup(rank, rank, 2), iter(by_rank[rank].items()), "Give all the same.")
        messages.append(str(error.value))
    return messages


def test_names_differ_though_the_values_are_the_same(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    for other_names, alone, another_kind, many in run_distributed(compare_names):
        assert "c: missing on rank 0, and 1 on rank 1" in other_names
        assert "b: 2 on rank 0, and missing on rank 1" in alone
        # The options follow from the kind.
        assert another_kind.splitlines()[1:-1] == ["  kind: 1 on rank 0, and 2 on rank 1"]
        assert len(many.splitlines()[1:-1]) == 13
        assert many.splitlines()[-2] == "  and more"


def test_of_many_ranks_each_value_is_named_once(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    messages = run_distributed(compare_on_four, 4)
    assert len(set(messages)) == 1
    lines = messages[0].splitlines()
    assert lines[1] == "  lr: 0.1 on ranks 0, 1, 3, and 0.2 on rank 2"
    assert re.fullmatch(r"  many: \.{3}[0, ]+1\] on ranks 0, 1, and \.{3}[0, ]+2\] on ranks 2, 3", lines[2]), lines[2]
    assert len(lines[2]) < 300
    assert re.fullmatch(r"  early: \[1[, 0]+\.{3} on ranks 0, 1, and \[2[, 0]+\.{3} on ranks 2, 3", lines[3]), lines[3]
    assert lines[4] == f"  short: '{'x' * 100}0' on ranks 0, 1, and '{'x' * 100}1' on ranks 2, 3"
    assert lines[5].startswith("Give all the same. Look for")


class Colour(Enum):
    RED = 1


@dataclass
class Range:
    low: int
    high: Any = None


def test_texts_of_values_have_no_addresses_order_of_sets_or_paths() -> None:
    assert as_text({"b": {3, 1}, "a": (True, None)}) == as_text({"a": [True, None], "b": {1, 3}})
    assert as_text([Path("/a"), "/b/c", "~/d"]) == "[a path, a path, a path]"
    assert as_text([object(), data, MLP]) == "[object, data[16, 4], MLP]"
    assert as_text(torch.tensor(0.5)) == as_text(0.5) != as_text(0.25)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (b"ab", "b'ab'"),
        (timedelta(hours=1), "datetime.timedelta(seconds=3600)"),
        (datetime(2026, 5, 1), "datetime.datetime(2026, 5, 1, 0, 0)"),
        (torch.float16, "torch.float16"),
        (Colour.RED, "<Colour.RED: 1>"),
        (frozenset({2, 1}), "{1, 2}"),
        (torch.zeros(2, 3), "[[0.0, 0.0, 0.0], [0.0, 0.0, 0.0]]"),
        (torch.zeros(20, 30), "[20, 30] torch.float32"),
        (torch.zeros(20, 30).t(), "[30, 20] torch.float32, strides [1, 30]"),
        (np.float64(0.5), "0.5"),
        (np.arange(3), "[0, 1, 2]"),
        (np.zeros(200), "ndarray"),
        (torch.zeros(2, 3).to_sparse(), "[2, 3] torch.float32"),
        (torch.zeros(1, device="meta"), "[1] torch.float32"),
        (Range, "Range"),
        (partial(min, 3, default=4), "min([3, {'default': 4}])"),
        ("x" * 200, "'" + "x" * 200 + "'"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_texts_of_values(value: Any, text: str) -> None:
    assert as_text(value) == text


def test_texts_of_parameters_that_are_elsewhere() -> None:
    assert describe_tensor(nn.parameter.UninitializedParameter()) == "None torch.float32"
    assert describe_tensor(AbsentParameter(torch.zeros(1).expand(2, 3), requires_grad=False)) == "[2, 3] torch.float32"
    partitioned = nn.Parameter(torch.empty(0))
    partitioned.ds_shape = torch.Size([4, 5])  # type: ignore[attr-defined]
    assert describe_tensor(partitioned) == "[4, 5] torch.float32"


class Addressed(nn.Module):
    def extra_repr(self) -> str:
        return f"{object()}, 3"


class Unprintable(nn.Module):
    def extra_repr(self) -> str:
        raise AttributeError("not built yet")


def test_texts_of_sets_dataclasses_and_layers() -> None:
    assert as_text({"d", "b", "a", "c"}) == "{'a', 'b', 'c', 'd'}"
    assert as_text(Range(1, Path("/a"))) == "Range{'high': a path, 'low': 1}"
    assert describe_layer(Addressed()) == "Addressed(<object object>, 3)"
    assert describe_layer(Unprintable()) == "Unprintable()"


# -- what is compared of an object -------------------------------------------------------------------------------------


def schedule(warm_up: int, step: int = 0) -> Any:
    return lambda epoch: min(1.0, epoch / warm_up)


def decayed(epoch: int, total: int) -> float:
    return 1.0 - epoch / total


def scheduler_facts(warm_up: int, total: int, step_size: int) -> dict[str, object]:
    module = MLP()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    kinds = torch.optim.lr_scheduler
    inner = [kinds.StepLR(optimizer, step_size), kinds.ConstantLR(optimizer)]
    schedulers = [
        kinds.SequentialLR(optimizer, inner, milestones=[step_size]),
        kinds.ChainedScheduler(inner),
        kinds.LambdaLR(optimizer, schedule(warm_up)),
        kinds.LambdaLR(optimizer, partial(decayed, total=total)),
    ]
    found = facts_of_schedulers([TimedScheduler(one) for one in schedulers])
    return dict(as_texts(found))


@pytest.mark.parametrize(
    ("other", "names"),
    [
        ((3, 9, 2), set()),
        ((4, 9, 2), {"LambdaLR, lr_lambdas"}),
        ((3, 8, 2), {"LambdaLR number 2, lr_lambdas"}),
        (
            (3, 9, 5),
            {"SequentialLR, StepLR.step_size", "SequentialLR, milestones", "ChainedScheduler, StepLR.step_size"},
        ),
    ],
    ids=["nothing", "closure", "partial", "inside"],
)
def test_schedulers_inside_of_schedulers_and_functions_are_compared(other: Any, names: set[str]) -> None:
    one, two = scheduler_facts(3, 9, 2), scheduler_facts(*other)
    assert {name for name in one | two if one.get(name) != two.get(name)} == names


def facts_of(*groups: dict[str, Any], monitor: str | None = None, **options: Any) -> dict[str, str]:
    """Return the facts of an optimizer with these options for each layer, and of its schedule."""
    module = nn.Sequential(*(nn.Linear(1, 1) for _ in groups))
    named = [{"params": layer.parameters(), **group} for layer, group in zip(module, groups, strict=True)]
    optimizer = torch.optim.Adam(named, **options)
    schedule = TimedScheduler(torch.optim.lr_scheduler.StepLR(optimizer, 1), monitor=monitor)
    return as_texts({**facts_of_optimizers(module, [optimizer]), **facts_of_schedulers([schedule])})


def test_optimizers_differ_by_the_options_of_each_group() -> None:
    one, two = facts_of({"lr": 0.1}, {"lr": 0.2}), facts_of({"lr": 0.1}, {"lr": 0.3}, monitor="loss")
    differing = {name for name in one | two if one.get(name) != two.get(name)}
    assert differing == {
        "Adam, group 1, lr",
        "Adam, group 1, initial_lr",
        "StepLR, base_lrs",
        "StepLR, _last_lr",
        "StepLR, monitor",
    }
    assert one["Adam, group 1, parameters"] == "['1.weight', '1.bias']"
    assert facts_of({"lr": 0.1})["Adam, lr"] == "0.1"


def test_functions_differ_by_their_numbers() -> None:
    texts = [as_text(one) for one in (lambda step: 0.5**step, lambda step: 0.9**step, schedule(3), schedule(4))]
    assert len(set(texts)) == 4
    assert as_text(schedule(3)) == as_text(schedule(3))
    assert "warm_up" in as_text(schedule(3))
    assert as_text(lambda step, power=2: step**power) != as_text(lambda step, power=3: step**power)


class Averages:
    def __init__(self, decay: float) -> None:
        self.decay = decay

    def __call__(self, average: Any, now: Any, count: int) -> Any:
        return average * self.decay + now * (1 - self.decay)

    def method(self, average: Any, now: Any, count: int) -> Any:
        return self(average, now, count)


def averaging(decays: dict[str, Any]) -> Any:
    inner = lambda average, now: average * decays["all"] + now * (1 - decays["all"])  # noqa: E731
    return lambda average, now, count: inner(average, now)


def by_global(average: Any, now: Any, count: int) -> Any:
    return average * FACTOR


FUNCTIONS: dict[str, Callable[[float], Any]] = {
    "object": Averages,
    "its method": lambda value: Averages(value).method,
    "partial": lambda value: partial(by_global, count=value),
    "partial of an object": lambda value: partial(Averages(value), count=1),
    "function in the closure of a function": lambda value: averaging({"all": value}),
    "list in a closure": lambda value: enclosing([1.0, value]),
    "tensor in a closure": lambda value: enclosing(torch.tensor([value])),
    "keyword default": lambda value: eval(f"lambda a, b, n, *, decay={value}: a * decay"),
    "number in a lambda": lambda value: eval(f"lambda a, b, n: (lambda: a * {value})()"),
    "name in a lambda": lambda value: (lambda a, b, n: torch.maximum(a, b)) if value == 1 else torch_minimum(),
    "text": lambda value: eval(f"lambda a, b, n: getattr(a, 'mul{'' if value == 1 else '_'}')(b)"),
}
"""Functions of a callback that differ by one value, somewhere."""


def torch_minimum() -> Any:
    return lambda a, b, n: torch.minimum(a, b)


@pytest.mark.parametrize("kind", FUNCTIONS)
def test_what_a_function_computes_has_a_fingerprint(kind: str) -> None:
    make = FUNCTIONS[kind]
    assert function_fingerprint(make(1.0)) == function_fingerprint(make(1.0))
    assert function_fingerprint(make(1.0)) != function_fingerprint(make(2.0))


def test_a_fingerprint_is_that_of_another_process_too(monkeypatch: pytest.MonkeyPatch) -> None:
    first = function_fingerprint(by_global)
    monkeypatch.setattr(sys.modules[__name__], "FACTOR", 7.0)
    assert function_fingerprint(by_global) != first
    assert function_fingerprint("text") is function_fingerprint(None) is None
    source = (
        "from torch.optim.swa_utils import get_ema_avg_fn\nfrom trainer.data.fingerprints import function_fingerprint\n"
        "print(function_fingerprint(get_ema_avg_fn(0.5)), function_fingerprint(lambda x: x in {'a', 'b', 'c'}))\n"
    )
    # Two processes with other hash seeds, by which a set has another order.
    assert len({fork_python(source, number=number).wait().check().stdout for number in range(2)}) == 1


class EveryOtherStep(WeightAveraging):
    """Averages on rank 1 in other steps than on rank 0."""

    def __init__(self, ranks: int) -> None:
        super().__init__()
        self.ranks = ranks

    def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
        return step_idx is not None and step_idx % 2 == int(os.environ["RANK"]) * self.ranks


class Stateful(Averages):
    """Averages by what is known only to the process."""

    def __call__(self, average: Any, now: Any, count: int) -> Any:
        return average + (now - average) / (2 + int(os.environ["RANK"]))


def average_differently(name: str) -> list[str | None]:
    callbacks = [EveryOtherStep(1), EveryOtherStep(0), WeightAveraging(avg_fn=Stateful(0.5))]
    settings = [{"callbacks": callback, "max_steps": 3, "max_epochs": 2} for callback in callbacks]
    return [fit(WAYS[name], Chosen(""), data(), None, one) for one in settings]


def test_averages_that_differ_are_reported() -> None:
    by_way = run_each(average_differently, ["DDP x2", "FSDP x2"])
    for name, by_rank in by_way.items():
        for steps, none, values in by_rank:
            assert "updates of the averages: 2 on rank 0, and 1 on rank 1" in steps
            assert none is None
            assert name != "DDP x2" or "bits of the average of layers.0.weight: " in values


def enclosing(value: Any) -> Any:
    return lambda: value


def enclosing_nothing() -> Any:
    function = lambda: late  # noqa: E731
    if not function:
        late = 1
    return function


def test_functions_differ_by_what_they_enclose() -> None:
    texts = [as_text(enclosing(value)) for value in (True, False, 2, 2.5, "cosine", "linear")]
    assert len(set(texts)) == 6
    assert as_text(enclosing(object())) == as_text(enclosing_nothing()).replace("_nothing", "")
