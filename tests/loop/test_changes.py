"""A resumed run says what has changed since its checkpoint was written, and refuses what would spoil an epoch."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, ExponentialLR, LambdaLR, LinearLR, SequentialLR, StepLR
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    Subset,
    TensorDataset,
    WeightedRandomSampler,
)

from tests.helpers.processes import run_distributed
from tests.helpers.toy import quiet
from tests.messages import raises_recorded
from trainer import ConfigError, TrainModule
from trainer.callbacks import EarlyStopping, EMAWeightAveraging, GradientAccumulationScheduler, ModelCheckpoint


class Net(TrainModule):
    def __init__(self, lr: float = 0.1, dropout: float = 0.1, frozen: bool = False, step_size: int = 3) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(4, 4), nn.Dropout(dropout))
        self.last = nn.Linear(4, 1)
        self.first.requires_grad_(not frozen)
        self.lr, self.step_size = lr, step_size

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return nn.functional.mse_loss(self.last(self.first(batch[0])), batch[1])

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, self.step_size)]


class Backwards(Sampler[int]):
    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.size - 1, -1, -1))


def data(samples: int = 64) -> TensorDataset:
    return TensorDataset(torch.zeros(samples, 4), torch.zeros(samples, 1))


def fit(folder: Path, steps: int, loader: Any, module: Any = None, **options: Any) -> int:
    """Train on; return the steps."""
    call = {name: options.pop(name) for name in ("ckpt_path", "allow_changes") if name in options}
    checkpoints: Any = [
        *options.pop("add", []),
        ModelCheckpoint(every_n_train_steps=1, dirpath=folder, save_top_k=-1, filename="{step}"),
        ModelCheckpoint(every_n_epochs=1, dirpath=folder, save_top_k=-1, filename="{epoch}"),
    ]
    trainer = quiet(
        max_steps=steps, default_root_dir=folder, callbacks=checkpoints, enable_checkpointing=True, **options
    )
    trainer.fit(module or Net(), loader, **call)
    return trainer.global_step


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return checkpoints of 20 steps, 16 of them in the first epoch."""
    folder = tmp_path_factory.mktemp("written")
    fit(folder, 20, DataLoader(data(), 4, shuffle=True))
    return folder


LOADERS: dict[str, Any] = {
    "fewer": lambda: DataLoader(data(48), 4, shuffle=True),
    "more": lambda: DataLoader(data(80), 4, shuffle=True),
    "in order": lambda: DataLoader(data(), 4),
    "sampler": lambda: DataLoader(data(), 4, sampler=Backwards(64)),
    "replacement": lambda: DataLoader(data(), 4, sampler=RandomSampler(data(), replacement=True)),
    "list": lambda: [tuple(data(4).tensors)] * 16,
    "both": lambda: DataLoader(data(48), 4),
}


@pytest.mark.parametrize("case", LOADERS)
def test_other_data_are_refused_within_an_epoch_and_reported_at_its_end(
    case: str, written: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make = LOADERS[case]
    with raises_recorded(ConfigError) as error:
        fit(tmp_path, 22, make(), ckpt_path=written / "step=8")
    names = str(error.value).split("allow_changes=")[1].split("]")[0]
    allowed = [name.strip("'") for name in names.removeprefix("[").split(", ")]
    with caplog.at_level(logging.WARNING, "trainer"):
        assert fit(tmp_path, 10, make(), ckpt_path=written / "step=8", allow_changes=allowed) == 10
        assert "dataset" not in caplog.text
        assert fit(tmp_path, 18, make(), ckpt_path=written / "epoch=0") == 18
    assert caplog.text.count("was written:") == 1
    assert f"changed since {written / 'epoch=0'} was written:" in caplog.text


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
def test_another_order_is_reported_when_all_of_an_epoch_is_used(
    written: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "trainer"):
        assert fit(tmp_path, 18, DataLoader(data(), 4), ckpt_path=written / "step=16") == 18
    assert "shuffle: shuffled in the checkpoint, and in order here" in caplog.text


def test_another_seed_is_another_order(written: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    other = {"seed": 7}
    with raises_recorded(ConfigError):
        fit(tmp_path, 10, DataLoader(data(), 4, shuffle=True), ckpt_path=written / "step=8", **other)
    with caplog.at_level(logging.WARNING, "trainer"):
        loader = DataLoader(data(), 4, shuffle=True)
        fit(tmp_path, 10, loader, ckpt_path=written / "step=8", allow_changes=["seed"], **other)
        assert caplog.text == ""
        fit(tmp_path, 18, loader, ckpt_path=written / "epoch=0", **other)
    assert re.search(r"was written:\n  seed: \d+ in the checkpoint, and 7 here", caplog.text)


def test_another_seed_changes_nothing_in_order(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    fit(tmp_path, 3, DataLoader(data(), 4))
    with caplog.at_level(logging.WARNING, "trainer"):
        assert fit(tmp_path, 5, DataLoader(data(), 4), ckpt_path=tmp_path / "step=3", seed=7) == 5
    assert "and 7 here" in caplog.text  # the noise of dropout is another


STRIDE, FACTOR, ITERATED = 1, 0.9, 0


def factor(step: int) -> float:
    return FACTOR**step


class Strided(Backwards):
    def __iter__(self) -> Iterator[int]:
        global ITERATED
        ITERATED += 1
        return iter([number * STRIDE % self.size for number in range(self.size)])


def test_globals_that_samplers_and_schedules_read_are_compared(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def go_on(steps: int, **options: Any) -> None:
        module = Scheduled(lambda optimizer: {"scheduler": LambdaLR(optimizer, lambda step: factor(step))})
        fit(tmp_path, steps, DataLoader(data(), 4, sampler=Strided(64)), module, **options)

    go_on(3)
    with caplog.at_level(logging.WARNING, "trainer"):
        go_on(4, ckpt_path=tmp_path / "step=3")
        assert caplog.text == ""
        monkeypatch.setattr(f"{__name__}.FACTOR", 0.5)
        go_on(4, ckpt_path=tmp_path / "step=3")
    assert "schedulers: LambdaLR, global FACTOR in lr_lambdas: 0.9 in the checkpoint, and 0.5 here\n" in caplog.text
    monkeypatch.setattr(f"{__name__}.STRIDE", 3)
    with raises_recorded(ConfigError):
        go_on(5, ckpt_path=tmp_path / "step=3")


class Configured(Net):
    def __init__(self, margin: float, sizes: tuple[int, ...] = (1, 2), inner: Any = None, root: str = "/data") -> None:
        super().__init__()
        self.save_hyperparameters()


def test_changed_hyperparameters_are_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def go_on(steps: int, module: Configured, **options: Any) -> None:
        fit(tmp_path, steps, DataLoader(data(), 4), module, **options)

    go_on(3, Configured(0.5, inner={"depth": 2}))
    step3 = tmp_path / "step=3"
    with caplog.at_level(logging.WARNING, "trainer"):
        go_on(4, Configured(0.5, inner={"depth": 2}, root="/other"), ckpt_path=step3)
        assert caplog.text == ""
        go_on(4, Configured(0.1), ckpt_path=step3, allow_changes=["hyperparameters"])
        assert caplog.text == ""
        go_on(4, Configured(0.1, sizes=(1, 3), inner={"depth": 4}), ckpt_path=step3)
    (message,) = [one.getMessage() for one in caplog.records]
    for line in (
        "margin: 0.5 in the checkpoint, and 0.1 here",
        "sizes: [1, 2] in the checkpoint, and [1, 3] here",
        "inner/depth: 2 in the checkpoint, and 4 here",
    ):
        assert f"\n  hyperparameters: {line}" in message


def test_what_is_no_change_is_not_reported(written: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "trainer"):
        for name in ("step=1", "step=8", "epoch=0", "step=20"):
            fit(tmp_path, 22, DataLoader(data(), 4, shuffle=True), ckpt_path=written / name)
    assert caplog.text == ""


@pytest.mark.parametrize(
    ("module", "settings", "name", "line"),
    [
        ({"lr": 0.2}, {}, "optimizers", "SGD, lr: 0.1 in the checkpoint, and 0.2 here"),
        ({"step_size": 5}, {}, "schedulers", "StepLR, step_size: 3 in the checkpoint, and 5 here"),
        (
            {"dropout": 0.3},
            {},
            "module",
            "first.1: Dropout(p=0.1, inplace=False) in the checkpoint, and Dropout(p=0.3, inplace=F",
        ),
        ({"frozen": True}, {}, "module", "first.0.weight, frozen: missing in the checkpoint, and yes here"),
        ({}, {"accumulate_grad_batches": 2}, "settings", "accumulate_grad_batches: 1 in the checkpoint, and 2 here"),
        ({}, {"limit_train_batches": 12}, "settings", "limit_train_batches: 1.0 in the checkpoint, and 12 here"),
        ({}, {"seed_per_sample": True}, "settings", "seed_per_sample: False in the checkpoint, and True here"),
        ({}, {"precision": "bf16-mixed"}, "settings", "precision: 32-true in the checkpoint, and bf16-mixed here"),
    ],
    ids=["lr", "schedule", "dropout", "frozen", "window", "limit", "seeds", "precision"],
)
def test_other_changes_are_reported_in_one_message(
    module: Any, settings: Any, name: str, line: str, written: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def resume(**more: Any) -> str:
        caplog.clear()
        with caplog.at_level(logging.WARNING, "trainer"):
            loader = DataLoader(data(), 4, shuffle=True)
            fit(tmp_path, 10, loader, Net(**module), ckpt_path=written / "step=8", **settings, **more)
        return caplog.text

    text = resume()
    assert f"{name}: {line}" in text
    assert text.count("was written:") == 1
    assert f"fit(..., allow_changes=['{name}']) silences this warning" in text
    assert resume(allow_changes=[name]) == ""


class Groups(Net):
    """A net whose optimizer has a group with decay, and one without: `swapped` are the other way round."""

    def __init__(self, swapped: bool) -> None:
        super().__init__()
        self.swapped = swapped

    def configure_optimizers(self) -> Any:
        named = dict(self.named_parameters())
        parts = [[p for name, p in named.items() if name.endswith(kind)] for kind in ("weight", "bias")]
        first, second = reversed(parts) if self.swapped else parts
        return torch.optim.SGD([{"params": first, "weight_decay": 0.1}, {"params": second}], lr=0.1)


def test_groups_with_other_parameters_are_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    loader = DataLoader(data(), 4)
    fit(tmp_path, 2, loader, Groups(False))
    with caplog.at_level(logging.WARNING, "trainer"):
        fit(tmp_path, 3, loader, Groups(False), ckpt_path=tmp_path / "step=2")
        assert caplog.text == ""
        fit(tmp_path, 3, loader, Groups(True), ckpt_path=tmp_path / "step=2")
    assert (
        "optimizers: SGD, group 0, parameters: ['first.0.weight', 'last.weight'] in the checkpoint, and ['first.0.bias'"
        in caplog.text
    )
    assert caplog.text.count("The checkpoint's options of optimizers are used.") == 1


class Pad:
    def __init__(self, to: int) -> None:
        self.to = to

    def __call__(self, samples: list[Any]) -> Any:
        return torch.utils.data.default_collate(samples)


def ema(decay: float) -> Any:
    return EMAWeightAveraging(decay=decay)


def stopping(patience: int) -> Any:
    return EarlyStopping("loss", patience=patience, strict=False)


def accumulating(window: int) -> Any:
    return GradientAccumulationScheduler({8: window})


@pytest.mark.parametrize(
    ("then", "now", "line"),
    [
        (
            {"add": ema(0.9)},
            {"add": ema(0.8)},
            "callbacks: EMAWeightAveraging.decay: 0.9 in the checkpoint, and 0.8 here",
        ),
        (
            {"add": stopping(3)},
            {"add": stopping(4)},
            "callbacks: EarlyStopping(loss).patience: 3 in the checkpoint, and 4 here",
        ),
        ({"add": accumulating(2)}, {}, "settings: schedule of accumulation: [{8: 2}] in the checkpoint, and [] here"),
        ({}, {"gradient_clip_val": 0.5}, "settings: gradient_clip_val: None in the checkpoint, and 0.5 here"),
        ({"collate_fn": Pad(3)}, {"collate_fn": Pad(4)}, "collate_fn: Pad "),
        ({}, {"collate_fn": lambda samples: Pad(1)(samples)}, "collate_fn: default_collate "),
        ({}, {"values": 1.0}, "contents: TensorDataset.tensors: 2 lists "),
    ],
    ids=["average", "stopping", "accumulation", "clipping", "collate", "default collate", "contents"],
)
def test_other_callbacks_collate_functions_and_contents_are_reported(
    then: Any, now: Any, line: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def train(steps: int, case: dict[str, Any], **more: Any) -> str:
        options = {"add": None, "collate_fn": None, "values": 0.0} | case
        added, collate, values = (options.pop(name) for name in ("add", "collate_fn", "values"))
        samples = TensorDataset(torch.full((64, 4), values), torch.zeros(64, 1))
        loader = DataLoader(samples, 4, shuffle=True, collate_fn=collate)
        caplog.clear()
        with caplog.at_level(logging.WARNING, "trainer"):
            fit(tmp_path, steps, loader, add=[] if added is None else [added], **options, **more)
        return caplog.text

    train(2, then)
    begin = {"ckpt_path": tmp_path / "step=2"}
    assert train(3, then, **begin) == ""
    text = train(3, now, **begin)
    assert line in text
    assert (text.count(" in the checkpoint, and "), text.count("was written:")) == (1, 1)
    assert train(3, now, allow_changes=[line.split(":")[0]], **begin) == ""


class Counting(Dataset[Any]):
    """Samples, with the numbers that a dataset and a collate function may keep while they are used."""

    def __init__(self) -> None:
        self.times, self.cached = [0] * 64, np.zeros((64, 4), np.float32)

    def __len__(self) -> int:
        return len(self.times)

    def __getitem__(self, index: int) -> Any:
        self.times[index] += 1
        self.cached[index] = index
        return data(1)[0]

    def collate(self, samples: list[Any]) -> Any:
        self.batches = getattr(self, "batches", 0) + 1
        return Pad(1)(samples)


def test_what_data_change_in_themselves_is_no_change(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def train(steps: int, samples: Counting, **more: Any) -> None:
        loader = DataLoader(samples, 4, shuffle=True, collate_fn=samples.collate)
        fit(tmp_path, steps, loader, **more)

    samples = Counting()
    with caplog.at_level(logging.WARNING, "trainer"):
        train(2, samples)
        train(18, samples, ckpt_path=tmp_path / "step=2")  # in the same process, with a cache that is half full
        train(20, samples, ckpt_path=tmp_path / "step=18")
        train(21, Counting(), ckpt_path=tmp_path / "step=20")  # as in a new process
    assert caplog.text == ""


class Typed(Net):
    """A net with a buffer, of dtypes of the test's choice."""

    def __init__(self, buffer: torch.dtype = torch.float32, weights: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.register_buffer("scale", torch.full((1,), 2.5).to(buffer))
        self.register_buffer("unsaved", torch.full((1,), 2.5).to(buffer), persistent=False)
        self.last.to(weights)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        output: torch.Tensor = self.last(self.first(batch[0]).to(self.last.weight.dtype))
        return output.square().mean()


@pytest.fixture(scope="module")
def typed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("typed")
    fit(folder, 2, DataLoader(data(), 4, shuffle=True), Typed())
    return folder / "step=2"


@pytest.mark.parametrize(
    ("dtypes", "lines"),
    [
        ({}, []),
        (
            {"weights": torch.float64},
            ["last.bias, dtype: torch.float32 in the checkpoint, and torch.float64 here", "last.weight, dtype"],
        ),
        (
            {"buffer": torch.float64},
            ["scale, dtype: torch.float32 in the checkpoint, and torch.float64 here", "unsaved, dtype: "],
        ),
    ],
    ids=["none", "weights", "buffer"],
)
def test_other_dtypes_are_reported(
    dtypes: Any, lines: list[str], typed: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def resume(**more: Any) -> str:
        caplog.clear()
        with caplog.at_level(logging.WARNING, "trainer"):
            fit(tmp_path, 3, DataLoader(data(), 4, shuffle=True), Typed(**dtypes), ckpt_path=typed, **more)
        return caplog.text

    text = resume()
    assert [line for line in lines if line not in text] == []
    assert (text.count(", dtype: "), text.count("was written:")) == (len(lines), int(lines != []))
    assert resume(allow_changes=["module"]) == ""
    if lines:  # the precision is what has changed, and decides on dtypes
        assert ", dtype: " not in resume(precision="64-true")


def test_a_buffer_that_would_cut_off_the_saved_values_is_refused(typed: Path, tmp_path: Path) -> None:
    loader, module = DataLoader(data(), 4, shuffle=True), Typed(buffer=torch.int64)
    with raises_recorded(ConfigError):
        fit(tmp_path, 3, loader, module, ckpt_path=typed)
    assert fit(tmp_path, 3, loader, module, ckpt_path=typed, allow_changes=["module"]) == 3


def test_a_batch_of_another_size_is_reported_and_goes_on(
    written: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "trainer"):
        fit(tmp_path, 10, DataLoader(data(), 8, shuffle=True), ckpt_path=written / "step=8")
    assert "batch_size: 4 over all processes in the checkpoint, and 8 over all processes here" in caplog.text


def test_nothing_left_is_reported(written: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "trainer"):
        assert fit(tmp_path, 6, DataLoader(data(), 4, shuffle=True), ckpt_path=written / "step=8") == 8
    assert [r.message for r in caplog.records] == [
        "nothing is left to train: the checkpoint has 8 steps, and max_steps=6"
    ]


@pytest.mark.parametrize("given", [["data"], "dataset", [3], True], ids=["unknown", "text", "number", "flag"])
def test_names_that_are_none_are_refused(given: Any, tmp_path: Path) -> None:
    with raises_recorded(ConfigError):
        fit(tmp_path, 1, DataLoader(data(), 4), allow_changes=given)


def resume_on_two(written: str, folder: str) -> list[str]:
    outcomes = []
    for size, samples in ((2, 64), (2, 48)):
        loader = DataLoader(data(samples), size, shuffle=True)
        try:
            trainer = quiet(max_steps=10, default_root_dir=folder, devices=2, strategy="ddp")
            trainer.fit(Net(), loader, ckpt_path=f"{written}/step=8")
            outcomes.append("done")
        except ConfigError as error:
            outcomes.append(str(error))
    return outcomes


def test_another_number_of_processes_is_no_change(written: Path, tmp_path: Path) -> None:
    for done, refused in run_distributed(resume_on_two, 2, str(written), str(tmp_path)):
        assert done == "done"
        assert "dataset: TensorDataset, 64 samples in the checkpoint, and TensorDataset, 48 samples here" in refused


# -- what one looks at to see a change ---------------------------------------------------------------------------------


class Given(Sampler[int]):
    """Gives indices that it was made with."""

    def __init__(self, order: Any) -> None:
        self.order = order

    def __len__(self) -> int:
        return len(self.order)

    def __iter__(self) -> Iterator[int]:
        return iter(self.order)


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(data())


def loader_of(kind: str, other: bool) -> Any:
    if kind == "indices":
        return DataLoader(Subset(data(128), range(64 * other, 64 + 64 * other)), 4, shuffle=True)
    if kind == "parts":
        sizes = (16, 48) if other else (32, 32)
        return DataLoader(ConcatDataset([data(size) for size in sizes]), 4, shuffle=True)
    if kind in ("files", "numbers"):
        folder = mkdtemp()  # another one each time, like a disk of its own for each job
        kept = [f"{folder}/{number}" for number in range(64)] if kind == "files" else np.arange(64)
        return DataLoader(Kept(kept[:: -1 if other else 1]), 4)
    if kind == "wrapped":
        return DataLoader(Kept(Subset(data(80), range(16 * other, 64 + 16 * other))), 4)
    if kind == "weights":
        return DataLoader(data(), 4, sampler=WeightedRandomSampler([1.0 + other * one for one in range(64)], 64))
    if kind == "order":
        return DataLoader(data(), 4, sampler=Given([*range(63, -1, -1)] if other else [*range(64)]))
    if kind == "list":
        return DataLoader(data(), 4, sampler=[*range(63, -1, -1)] if other else [*range(64)])
    if kind == "array":
        return DataLoader(data(), 4, sampler=np.arange(64)[:: -1 if other else 1])
    if kind == "batches":
        batches = [[*range(start, min(start + 5, 64))] for start in range(0, 64, 5)]
        return DataLoader(data(), batch_sampler=[*reversed(batches)] if other else batches)
    return DataLoader(Stream(), 2 if other else 4)


@pytest.mark.parametrize(
    "kind",
    ["indices", "parts", "weights", "order", "list", "array", "batches", "files", "numbers", "wrapped", "stream"],
)
def test_other_samples_behind_the_same_length_are_refused_within_an_epoch(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fit(tmp_path, 3, loader_of(kind, False))
    with caplog.at_level(logging.WARNING, "trainer"):
        fit(tmp_path, 4, loader_of(kind, False), ckpt_path=tmp_path / "step=3")
    assert caplog.text == ""
    with raises_recorded(ConfigError):
        fit(tmp_path, 5, loader_of(kind, True), ckpt_path=tmp_path / "step=3")


class Kept(Dataset[Any]):
    """Samples of a list of file names, of numbers, or of another dataset."""

    def __init__(self, kept: Any) -> None:
        self.kept = kept

    def __len__(self) -> int:
        return len(self.kept)

    def __getitem__(self, index: int) -> Any:
        return data(1)[0]


class Scheduled(Net):
    """A net with a schedule of the test's choice."""

    def __init__(self, schedule: Any) -> None:
        super().__init__()
        self.schedule = schedule

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        return [optimizer], [{"interval": "step", **self.schedule(optimizer)}]


def two_stages(last: int) -> Any:
    def schedule(optimizer: Any) -> Any:
        stages = [LinearLR(optimizer, total_iters=2), CosineAnnealingLR(optimizer, T_max=last)]
        return {"scheduler": SequentialLR(optimizer, stages, milestones=[2])}

    return schedule


def warm_up(steps: int) -> Any:
    return lambda optimizer: {"scheduler": LambdaLR(optimizer, lambda step: min(1.0, step / steps))}


class WarmUp:
    def __init__(self, steps: int) -> None:
        self.steps = steps

    def __call__(self, step: int) -> float:
        return min(1.0, step / self.steps)

    def at(self, step: int) -> float:
        return self(step) if self.steps else 1.0


def by(make: Any) -> Any:
    return lambda optimizer: {"scheduler": LambdaLR(optimizer, make)}


def enclosing(options: dict[str, Any]) -> Any:
    return by(lambda step: min(1.0, step / options["warm up"][0]))


@pytest.mark.parametrize(
    ("then", "now", "message"),
    [
        (by(WarmUp(9)), by(WarmUp(8)), "LambdaLR, WarmUp.steps: 9 in the checkpoint, and 8 here\n"),
        (by(WarmUp(9).at), by(WarmUp(8).at), "LambdaLR, self.steps in lr_lambdas: 9 in the checkpoint, and 8 here\n"),
        (
            enclosing({"warm up": [9]}),
            enclosing({"warm up": [8]}),
            "options in lr_lambdas: {warm up: [9]} in the checkpoint, and {warm up: [8]} here\n",
        ),
        (two_stages(9), two_stages(8), "CosineAnnealingLR.T_max: 9 in the checkpoint, and 8 here\n"),
        (
            warm_up(9),
            warm_up(8),
            "{steps: 9}]] in the checkpoint, and [warm_up.<locals>.<lambda>.<locals>.<lambda>[1.0, {steps: 8}]] here\n",
        ),
        (
            lambda optimizer: {"scheduler": StepLR(optimizer, 3), "frequency": 2},
            lambda optimizer: {"scheduler": StepLR(optimizer, 3), "frequency": 1},
            "StepLR, frequency: 2 in the checkpoint, and 1 here\n",
        ),
    ],
    ids=["object", "method", "enclosed", "inside", "function", "frequency"],
)
def test_what_is_in_a_schedule_is_compared_and_what_is_used_is_true(
    then: Any, now: Any, message: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def resume(schedule: Any, **more: Any) -> str:
        caplog.clear()
        with caplog.at_level(logging.WARNING, "trainer"):
            fit(tmp_path, 5, DataLoader(data(), 4), Scheduled(schedule), ckpt_path=tmp_path / "step=3", **more)
        return caplog.text.replace("'", "").replace("checkpoints", "checkpoint's")

    fit(tmp_path, 3, DataLoader(data(), 4), Scheduled(then))
    assert resume(then) == ""
    assert message in resume(now)
    assert resume(now, allow_changes=["schedulers"]) == ""


def test_a_scheduler_of_another_kind_cannot_take_the_state_of_the_former(tmp_path: Path) -> None:
    fit(tmp_path, 3, DataLoader(data(), 4), Scheduled(lambda optimizer: {"scheduler": StepLR(optimizer, 3)}))
    other = Scheduled(lambda optimizer: {"scheduler": ExponentialLR(optimizer, 0.5)})
    with raises_recorded(ConfigError):
        fit(tmp_path, 5, DataLoader(data(), 4), other, ckpt_path=tmp_path / "step=3")
