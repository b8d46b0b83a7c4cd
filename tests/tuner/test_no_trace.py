"""Searches, checks and dry runs leave everything as it was: drawn modules, loaders, callbacks and searches."""

from __future__ import annotations

import collections
import random
import types
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, Subset, TensorDataset

from tests.helpers.toy import Toy, quiet
from tests.messages import raises_recorded
from tests.tiers import Inputs
from trainer import Callback, ConfigError, DataModule, Tuner
from trainer.callbacks import EarlyStopping, ModelCheckpoint, StochasticWeightAveraging
from trainer.logger import Logger
from trainer.model.reachable import OwnGenerator

SAMPLES = 24
OURS = ("_trainer", "_wrapper", "_hparams")
"""Attributes that the trainer gives modules; the last one when it is asked for, empty."""


def samples() -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(SAMPLES, 4, generator=torch.Generator().manual_seed(1))
    return x, x.sum(1, keepdim=True)


class Counting(Dataset[Any]):
    """A map-style dataset that changes as it is read."""

    def __init__(self) -> None:
        self.data, self.reads, self.seen = samples(), 0, []

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        self.reads += 1
        self.seen.append(index)
        return self.data[0][index], self.data[1][index]


class Stream(IterableDataset[Any]):
    """Goes on where it was left."""

    def __init__(self) -> None:
        self.data, self.place = samples(), 4

    def __iter__(self) -> Iterator[Any]:
        while self.place < SAMPLES:
            self.place += 1
            yield self.data[0][self.place - 1], self.data[1][self.place - 1]
        self.place = 0


class StatefulStream(Stream):
    def state_dict(self) -> dict[str, Any]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.place = state["place"]


class Opened(StatefulStream):
    """Cannot be copied, as an open file."""

    def __deepcopy__(self, memo: Any) -> Any:
        raise TypeError("cannot pickle '_io.TextIOWrapper' object")


class OwnLoader:
    """Batches of a stream, with the stream's state."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream

    def __iter__(self) -> Iterator[Any]:
        return iter(DataLoader(self.stream, 4))

    def state_dict(self) -> dict[str, Any]:
        return dict(self.stream.state_dict())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.stream.load_state_dict(state)


class Moving(Sampler[int]):
    """Begins each epoch elsewhere, with numbers of its own."""

    def __init__(self) -> None:
        self.begin, self.generator = 0, np.random.default_rng(4)

    def __len__(self) -> int:
        return SAMPLES

    def __iter__(self) -> Iterator[int]:
        first = int(self.generator.integers(SAMPLES))
        self.begin += 5
        yield from ((index + first + self.begin) % SAMPLES for index in range(SAMPLES))


class Noisy(Counting):
    """Draws from generators of its own, one of them in a part of it."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(8)
        self.transforms = [Jitter()]

    def __getitem__(self, index: int) -> Any:
        x, y = self.data[0][index], self.data[1][index]
        for transform in self.transforms:
            x = transform(x)
        return x + torch.rand(4, generator=self.generator), y


class Jitter:
    def __init__(self) -> None:
        self.random = random.Random(9)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.random.random()


def shuffled() -> Any:
    return DataLoader(TensorDataset(*samples()), 4, shuffle=True, generator=torch.Generator().manual_seed(5))


LOADERS: dict[str, Callable[[], Any]] = {
    "shuffled": shuffled,
    "counting": lambda: DataLoader(Counting(), 4),
    "own sampler": lambda: DataLoader(TensorDataset(*samples()), 4, sampler=Moving()),
    "stream": lambda: DataLoader(Stream(), 4),
    "stateful stream": lambda: DataLoader(StatefulStream(), 4),
    "cannot be copied": lambda: OwnLoader(Opened()),
    "list": lambda: [(x, y) for x, y in zip(*(part.split(4) for part in samples()), strict=True)],
}


class Net(Toy):
    """Changes buffers, metrics and attributes in each step, and has callbacks that write."""

    def __init__(self, drawn: random.Random, loader: Any = None) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.Dropout(0.3))
        self.net[0].bias.requires_grad_(drawn.random() < 0.5)
        self.register_buffer("queue", torch.zeros(4))
        self.register_buffer("pointer", torch.zeros((), dtype=torch.long), persistent=False)
        self.through = lambda x: self.net(x)
        self.net[0].weight.register_hook(lambda gradient: self.outputs.append("hook"))
        self.lr, self.steps, self.outputs, self.nested = 0.1, 0, [], {"last": [], "newest": collections.deque(maxlen=3)}
        self.plain, self.array, self.words = torch.zeros(2), np.zeros(2), collections.Counter()
        self.by_kind, self.pair, self.known = collections.defaultdict(list), ([], torch.zeros(1)), {0}
        self.draws = torch.Generator().manual_seed(6), {"numpy": np.random.default_rng(7)}
        self.own = [EarlyStopping("train_loss", patience=1), ModelCheckpoint(every_n_train_steps=1), Own(), Keeps()]
        self.own = drawn.sample(self.own, drawn.randint(0, 4))
        self._loader = loader
        if drawn.random() < 0.5:
            metrics = pytest.importorskip("torchmetrics")
            self.total = metrics.MeanMetric()
        if drawn.random() < 0.1:
            self.net.compile(backend="eager")

    def configure_callbacks(self) -> Any:
        return list(self.own)

    def train_dataloader(self) -> Any:
        return self._loader

    def _loss(self, batch: Any) -> torch.Tensor:
        self.queue[self.pointer % 4] = batch[0].mean() + torch.rand(())
        self.pointer += 1
        self.steps += 1
        self.plain += 1
        self.array += torch.rand((), generator=self.draws[0]).item()
        self.words[str(self.draws[1]["numpy"].integers(3))] += 1
        self.by_kind[self.steps % 2].append(self.steps)
        self.pair[0].append(self.steps)
        self.pair[1].add_(1)
        self.known.add(self.steps)
        self.outputs.append(self.steps)
        self.nested["last"].append(self.steps)
        self.nested["newest"].append(random.random() + np.random.random())
        self.new = self.steps
        loss = super()._loss([self.through(batch[0]), batch[1]])
        if "total" in self._modules:
            self.total.update(loss.detach())
        return loss

    def configure_optimizers(self) -> Any:
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        return torch.optim.SGD(trained, lr=self.lr, momentum=0.9)


class Own(Callback):
    """A callback of the user that keeps something and writes something."""

    def __init__(self) -> None:
        self.calls = 0

    def on_train_batch_end(self, *arguments: Any) -> None:
        self.calls += 1


class Keeps(Logger):
    def __init__(self) -> None:
        self.kept: list[Any] = []

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        self.kept.append(metrics)
        Path("kept.txt").write_text(str(metrics))


class Data(DataModule):
    def __init__(self, loader: Any) -> None:
        super().__init__()
        self.loader, self.batch_size = loader, 4

    def train_dataloader(self) -> Any:
        return self.loader


def snapshot(value: Any, depth: int = 0) -> Any:
    """Return what a value contains, as data that can be compared."""
    if isinstance(value, torch.Tensor):
        return (str(value.dtype), value.requires_grad, value.detach().double().tolist())
    if isinstance(value, (torch.Generator, np.random.Generator)):
        state: Any = value.get_state() if isinstance(value, torch.Generator) else value.bit_generator.state
        return snapshot(state, depth + 1)
    if isinstance(value, dict):
        return {str(name): snapshot(one, depth + 1) for name, one in value.items()}
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, (list, tuple, collections.deque, set)):
        return [snapshot(one, depth + 1) for one in value]
    if isinstance(value, (type, types.FunctionType, types.MethodType, types.ModuleType)) or depth > 7:
        return None
    inside = {name: one for name, one in getattr(value, "__dict__", {}).items() if name not in OURS}
    return snapshot(inside, depth + 1) if inside else repr(value) if isinstance(value, (int, float, str)) else None


def everything(*objects: Any) -> Any:
    generators = [torch.get_rng_state(), np.random.get_state()[1].tolist(), list(random.getstate()[1])]
    return snapshot([objects, generators, sorted(map(str, Path().rglob("*")))])


def difference(one: Any, other: Any, path: str = "") -> str:
    """Return the first place in which two snapshots differ."""
    if isinstance(one, dict) and isinstance(other, dict) and one.keys() == other.keys():
        return next((d for name in one if (d := difference(one[name], other[name], f"{path}.{name}"))), "")
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        return next((d for n in range(len(one)) if (d := difference(one[n], other[n], f"{path}.{n}"))), "")
    if isinstance(one, dict) and isinstance(other, dict):
        one, other = sorted(one), sorted(other)
    return "" if one == other else f"{path}: {str(one)[:900]} != {str(other)[:900]}"


def search(kind: str, drawn: random.Random, tuner: Tuner, module: Net, data: dict[str, Any]) -> None:
    if kind == "lr_find":
        tuner.lr_find(module, **data, num_training=drawn.choice([2, 5]), update_attr=False)
    elif kind == "scale_batch_size":
        tuner.scale_batch_size(module, **data, init_val=4, max_trials=1, steps_per_trial=2)
    else:
        tuner.throughput(module, **data, steps_per_trial=2)


KINDS = ("lr_find", "scale_batch_size", "throughput")


@pytest.mark.filterwarnings("ignore:Encountered `nan` values")  # of torchmetrics, at rates that are too high
def test_a_search_leaves_everything_as_it_was(inputs: Inputs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer.tuner.tuner.settings_to_try", lambda present, device_type: iter(()))
    monkeypatch.setattr("trainer.tuner.lr_finder.MOST_RATES", 1)
    monkeypatch.setattr("trainer.tuner.lr_finder.LEAST_STEPS", 2)
    for drawn in islice(inputs, 0, None, 3):  # each is several trainings
        kind, name = drawn.choice(KINDS), drawn.choice(list(LOADERS))
        where = drawn.choice(["argument", "module", "data module"])
        name = "shuffled" if kind == "scale_batch_size" else name
        where = "argument" if kind == "scale_batch_size" or name == "cannot be copied" else where
        loader = LOADERS[name]()
        module = Net(drawn, loader if where == "module" else None)
        datamodule = Data(loader) if where == "data module" else None
        data = {"train_dataloaders": loader if where == "argument" else None, "datamodule": datamodule}
        trainer = quiet(max_epochs=1, callbacks=[Own()], seed=drawn.choice([3, None]))
        kept = [module, loader, datamodule, trainer.callbacks, module.own]
        before = everything(*kept)
        search(kind, drawn, Tuner(trainer), module, data)
        assert not difference(before, everything(*kept)), f"{drawn}, {kind}, {name}, {where}"


class Transformed(Counting):
    def __init__(self, transform: Callable[[Any], Any]) -> None:
        super().__init__()
        self.transform = transform

    def __getitem__(self, index: int) -> Any:
        return self.transform(super().__getitem__(index))


@pytest.mark.parametrize("search", ["lr_find", "scale_batch_size"])
def test_closures_of_a_loader_are_as_they_were(search: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def made() -> tuple[DataLoader[Any], Callable[[], tuple[Any, ...]]]:
        random_numbers, count, seen = np.random.default_rng(3), 0, collections.Counter[str]()

        def transform(sample: Any) -> Any:
            seen["transform"] += 1
            return sample[0] + float(random_numbers.random()), sample[1]

        def collate(batch: Any) -> Any:
            nonlocal count
            count += 1
            seen["collate"] += 1
            return torch.utils.data.default_collate(batch)

        state = lambda: (count, dict(seen), random_numbers.bit_generator.state)  # noqa: E731
        return DataLoader(Transformed(transform), 4, collate_fn=collate), state

    loader, state = made()
    before = state()
    getattr(Tuner(quiet(max_epochs=1)), search)(Toy(), loader)
    assert state() == before


AT_MODULE_LEVEL = random.Random(7)


class Sharing(Toy):
    """Draws from generators that a copy of the module shares."""

    of_class, in_a_dict = np.random.default_rng(7), {"generator": torch.Generator().manual_seed(7)}
    fails = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        noise = torch.rand((), generator=self.in_a_dict["generator"]) + self.of_class.random()
        assert not self.fails
        return super().training_step([batch[0] + noise + AT_MODULE_LEVEL.random(), batch[1]], batch_idx)


class SharingData(Data):
    of_data = random.Random(7)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return [batch[0] + self.of_data.random(), batch[1]]


@pytest.mark.parametrize("fails", [False, True])
def test_generators_that_a_copy_shares_are_as_they_were(fails: bool) -> None:
    shared = [AT_MODULE_LEVEL, SharingData.of_data, Sharing.of_class, Sharing.in_a_dict["generator"]]
    states = lambda: [snapshot(OwnGenerator(one).get_state()) for one in shared]  # noqa: E731
    before, module = states(), Sharing()
    module.fails = fails
    with pytest.raises(AssertionError) if fails else nullcontext():
        Tuner(quiet(max_epochs=1)).lr_find(module, datamodule=SharingData(shuffled()), update_attr=False)
    assert states() == before


def test_data_that_would_be_used_up_are_refused() -> None:
    batches = iter(LOADERS["list"]())
    generator = (batch for batch in batches)
    with raises_recorded(ConfigError):
        Tuner(quiet()).lr_find(Toy(), generator)
    assert len(list(generator)) == 6


@pytest.mark.parametrize("settings", [{"fast_dev_run": 2}, {"enable_checkpointing": False, "max_epochs": 1}])
def test_callbacks_of_the_module_do_not_write_where_nothing_may_be_written(settings: dict[str, Any]) -> None:
    module = Net(random.Random(1), shuffled())
    module.own = [ModelCheckpoint(every_n_train_steps=1), Own()]
    quiet(**settings).fit(module)
    assert [path for path in Path().rglob("*") if path.is_file()] == []
    assert module.own[1].calls > 0


def test_a_dry_run_leaves_data_generators_and_files_as_they_were(inputs: Inputs) -> None:
    for drawn in islice(inputs, 0, None, 3):
        name = drawn.choice([one for one in LOADERS if one not in ("counting", "stream")])
        loader, module = LOADERS[name](), Net(drawn)
        module.own = [one for one in module.own if not isinstance(one, (Own, EarlyStopping))]
        trainer = quiet(fast_dev_run=drawn.choice([True, 2, 9]), seed=drawn.choice([3, None]))
        before = everything(loader, module.own)
        trainer.fit(module, loader)
        assert not difference(before, everything(loader, module.own)), f"{drawn}, {name}"


def trained(drawn: int, change: Callable[[Net], None] = lambda module: None, **settings: Any) -> Any:
    """Return everything but the files after a training."""
    torch.manual_seed(drawn)
    module, loader = Net(random.Random(drawn)), LOADERS["own sampler" if drawn % 2 else "stateful stream"]()
    module.own = []
    change(module)
    trainer = quiet(max_epochs=2, seed=drawn, **settings)
    trainer.fit(module, loader, [shuffled(), DataLoader(Subset(Noisy(), range(8)), 4)])
    return everything(module, loader, trainer.optimizers[0].state_dict()["state"])[
        :-1
    ]  # a second run has another folder


@pytest.mark.parametrize("drawn", range(3))
def test_a_sanity_check_leaves_everything_as_it_was(drawn: int) -> None:
    assert not difference(trained(drawn), trained(drawn, num_sanity_val_steps=2))


class Unset:
    """Fails in an unusual way where it has no attribute."""

    __slots__ = ("there",)

    def __getattr__(self, name: str) -> Any:
        raise KeyError(name)


class Reads(dict[str, Any]):
    def values(self) -> Any:
        raise OSError("not mounted")


class Odd(Net):
    """Has what cannot be copied, or not be written to; its observer gets its shape in the first batch."""

    def __init__(self) -> None:
        super().__init__(random.Random(1))
        self.own = []
        self.register_buffer("graph", torch.eye(4).to_sparse())
        self.register_buffer("mask", torch.ones(1, 4).expand(3, 4))
        self.register_buffer("observed", torch.zeros(0))
        with torch.inference_mode():
            self.table = torch.ones(2)
        self.frozen = [nn.Parameter(torch.ones(2), requires_grad=False), nn.UninitializedParameter(requires_grad=False)]
        self.bytes = {"read only": np.frombuffer(b"12345678", np.uint8), "wide": np.broadcast_to(np.ones(2), (3, 2))}
        self.entropy, self.unset, self.reads = random.SystemRandom(), Unset(), Reads(a=1)
        vars(self)["fixed"] = 3
        self.later = np.zeros(2)

    @property
    def fixed(self) -> int:
        return 3

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        if not len(self.observed):
            self.observed.resize_(4).zero_()
        self.observed += 1
        self.later.flags.writeable = False
        return super().validation_step(batch, batch_idx)


@pytest.mark.parametrize("checked", [0, 2])
def test_what_cannot_be_put_back_stops_no_training(checked: int) -> None:
    module = Odd()
    quiet(max_epochs=2, num_sanity_val_steps=checked).fit(module, shuffled(), shuffled())
    assert module.observed.tolist() == [12.0] * 4  # of two validations of six batches


@pytest.mark.parametrize("drawn", [1, 3])
def test_the_trial_of_a_batch_leaves_everything_as_it_was(drawn: int) -> None:
    assert not difference(trained(drawn), trained(drawn, accumulate_grad_batches="auto"))


@pytest.mark.parametrize("drawn", range(3))
@pytest.mark.parametrize("ends", [{}, {"max_steps": 9}], ids=["at the end of an epoch", "inside an epoch"])
def test_the_pass_for_the_averages_statistics_leaves_everything_as_it_was(
    drawn: int, ends: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def with_average() -> Any:
        return trained(drawn, callbacks=[StochasticWeightAveraging(0.05, swa_epoch_start=1)], **ends)

    names = ("running_mean", "running_var", "num_batches_tracked")

    def without_statistics(state: Any) -> Any:
        if isinstance(state, dict):
            return {name: without_statistics(one) for name, one in state.items() if name not in names}
        return [without_statistics(one) for one in state] if isinstance(state, list) else state

    after = without_statistics(with_average())
    monkeypatch.setattr("trainer.callbacks.stochastic_weight_averaging.redo_batch_statistics", lambda run: {})
    assert not difference(without_statistics(with_average()), after)
