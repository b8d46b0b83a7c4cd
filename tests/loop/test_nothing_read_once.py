"""What belongs to a moment is asked of users' objects then: loaders of an epoch, states of streams, sizes of data."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_leaves
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    Sampler,
    SequentialSampler,
    TensorDataset,
)

from tests.helpers.compare import QUIET
from tests.helpers.programs.objects import CountingSampler
from trainer import Callback, Trainer, TrainModule
from trainer.callbacks import BasePredictionWriter
from trainer.data import CombinedLoader

EPOCHS = 4


def numbers(first: int, number: int) -> TensorDataset:
    return TensorDataset(torch.arange(first, first + number, dtype=torch.float32).unsqueeze(1))


class Net(TrainModule):
    """Writes down the samples of each epoch."""

    def __init__(self, loader: Any = None) -> None:
        super().__init__()
        self.layer, self.loader = nn.Linear(1, 1), loader
        self.seen: dict[int, list[int]] = {}

    def train_dataloader(self) -> Any:
        return self.loader(self.trainer.current_epoch)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        (inputs,) = batch if isinstance(batch, list) else (batch,)
        self.seen.setdefault(self.trainer.current_epoch, []).extend(inputs.flatten().int().tolist())
        self.log("mean", inputs.mean(), on_step=False, on_epoch=True)
        return self.layer(inputs / 1000).square().mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("v", batch[0].mean() if isinstance(batch, list) else batch.mean())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Stop(Callback):
    """Saves after a step, before the loader is asked for more, and ends the run by an error."""

    def __init__(self, step: int, path: Path) -> None:
        self.step, self.path = step, path

    def on_train_step_end(self, trainer: Any, module: Any) -> None:
        if trainer.global_step == self.step:
            trainer.save_checkpoint(self.path)
            raise KeyError("stop")


def fitted(folder: Path, module: Net, loader: Any = None, ckpt: Path | None = None, **options: Any) -> Net:
    given = {**QUIET, "seed": 1, "max_epochs": EPOCHS, "enable_checkpointing": False, "logger": False, **options}
    Trainer(default_root_dir=folder, **given).fit(module, loader, ckpt_path=ckpt)
    return module


def resumed_epochs(folder: Path, make: Any, step: int, **options: Any) -> tuple[dict[int, Any], dict[int, Any]]:
    """Return the samples by epoch of a run, and of one that was stopped after a step and resumed."""
    whole = fitted(folder, make(), **options).seen
    before, path = make(), folder / f"at-{step}"
    with pytest.raises(KeyError, match="stop"):
        fitted(folder, before, callbacks=[Stop(step, path)], **options)
    after = fitted(folder, make(), ckpt=path, **options).seen
    return whole, {epoch: before.seen.get(epoch, []) + after.get(epoch, []) for epoch in range(EPOCHS)}


class Stream(IterableDataset[Any]):
    """Keeps its epoch and place; the other designs differ in what begins an epoch."""

    def __init__(self) -> None:
        self.epoch = self.index = 0

    def __iter__(self) -> Iterator[Any]:
        order = [*range(7)]
        random.Random(self.epoch).shuffle(order)
        while self.index < len(order):
            self.index += 1
            yield torch.tensor([100.0 * self.epoch + order[self.index - 1]])
        self.end()

    def end(self) -> None:
        self.index = 0

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "index": self.index}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epoch, self.index = state["epoch"], state["index"]


class WithEpoch(Stream):
    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


class Resets(WithEpoch):
    def set_epoch(self, epoch: int) -> None:
        self.epoch, self.index = epoch, 0

    def end(self) -> None:
        pass


class Counts(Stream):
    """Begins its next epoch by itself."""

    def end(self) -> None:
        self.epoch, self.index = self.epoch + 1, 0


class OwnLoader:
    def __init__(self, stream: Any) -> None:
        self.stream = stream
        for name in ("set_epoch", "state_dict", "load_state_dict"):
            if hasattr(stream, name):
                setattr(self, name, getattr(stream, name))

    def __iter__(self) -> Iterator[Any]:
        samples = iter(self.stream)
        while batch := list(itertools.islice(samples, 2)):
            yield torch.stack(batch)


class Noisy(Dataset[Any]):
    """Draws a part of each sample from the global generator."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        return torch.tensor([1000.0 * index]) + torch.randint(0, 1000, (1,))


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # which torchdata calls
@pytest.mark.parametrize("limit", [None, 3])
@pytest.mark.parametrize("step", [2, 3, 4, 5])
def test_samples_with_random_numbers_are_drawn_again_by_a_loader_with_a_state(
    step: int, limit: int | None, tmp_path: Path
) -> None:
    """Also at the end of an epoch, where torchdata's loader first finishes what the state has finished."""
    torchdata = pytest.importorskip("torchdata.stateful_dataloader")

    def made(epoch: int) -> Any:
        data = Noisy()
        sampler = torchdata.sampler.StatefulDistributedSampler(data, 1, 0, seed=1)
        return torchdata.StatefulDataLoader(data, 2, sampler=sampler)

    whole, resumed = resumed_epochs(tmp_path, lambda: Net(made), step, limit_train_batches=limit)
    assert resumed == whole
    assert whole[0] != whole[1]


class Grows(Callback):
    def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
        data = trainer.train_dataloader.dataset
        data.tensors = numbers(0, 6 + 4 * trainer.current_epoch).tensors


def test_samples_that_are_gone_are_named(tmp_path: Path) -> None:
    def made(epoch: int) -> Any:
        return DataLoader(numbers(0, 6), 2)

    path = tmp_path / "at"
    with pytest.raises(KeyError, match="stop"):
        fitted(tmp_path, Net(made), callbacks=[Grows(), Stop(4, path)], max_epochs=3)
    with pytest.raises(Exception, match="began with 10 samples to choose from, and this run has 6"):
        fitted(tmp_path, Net(made), ckpt=path, max_epochs=3)


def test_a_ready_batch_and_a_filtered_one_count_as_their_samples(tmp_path: Path) -> None:
    def filtered(samples: Any) -> Any:
        return torch.stack([one for (one,) in samples if one[0] != 1])

    ready = DataLoader(numbers(0, 10), batch_size=None, sampler=BatchSampler(SequentialSampler(range(10)), 4, False))
    for loader, mean in ((ready, 4.5), (DataLoader(numbers(0, 10), 4, collate_fn=filtered), 44 / 9)):
        module = fitted(tmp_path, Net(), loader, max_epochs=1)
        assert float(module.trainer.callback_metrics["mean"]) == pytest.approx(mean)


class Curriculum(Sampler[int]):
    """Has more samples in each epoch, of which `set_epoch` tells it."""

    def __init__(self) -> None:
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return 4 + 2 * self.epoch

    def __iter__(self) -> Iterator[int]:
        return iter(range(10 * self.epoch, 10 * self.epoch + len(self)))


class Counting(Curriculum):
    """Counts its epochs itself, in its attributes or in a state."""

    set_epoch = None  # type: ignore[assignment]

    def __iter__(self) -> Iterator[int]:
        yield from super().__iter__()
        self.epoch += 1


class CountingWithState(Counting):
    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epoch = state["epoch"]


class Shuffling(Sampler[int]):
    """Draws its order when it is told the epoch, in place: how often it is told counts, too."""

    def __init__(self) -> None:
        self.order, self.told = list(range(8)), list[int]()

    def set_epoch(self, epoch: int) -> None:
        self.told.append(epoch)
        random.shuffle(self.order)

    def __len__(self) -> int:
        return 8

    def __iter__(self) -> Iterator[int]:
        return iter(self.order)


@pytest.mark.parametrize("kind", ["sampler", "batch sampler", "own sampler of a subclass"])
def test_each_epoch_is_told_once(kind: str, tmp_path: Path) -> None:
    def made(epoch: int) -> Any:
        samplers.append(sampler := Shuffling())
        if kind == "batch sampler":
            return DataLoader(numbers(0, 8), batch_sampler=BatchSampler(sampler, 2, False))
        return (DataLoader if kind == "sampler" else OfAPackage)(numbers(0, 8), 2, sampler=sampler)

    for step in (1, 3, 4, 6):
        samplers: list[Shuffling] = []
        whole, resumed = resumed_epochs(tmp_path, lambda: Net(made), step, max_epochs=3)
        assert samplers[0].told == [0, 1, 2]
        if kind == "own sampler of a subclass":  # whose state nobody knows
            continue
        assert {epoch: resumed[epoch] for epoch in whole} == whole, step


class Growing(Resets):
    """A stream whose length and samples follow from its epoch."""

    def __len__(self) -> int:
        return 4 + 2 * self.epoch

    def __iter__(self) -> Iterator[Any]:
        while self.index < len(self):
            self.index += 1
            yield torch.tensor([10.0 * self.epoch + self.index - 1])
        self.end()


class GrowingBySelf(Growing):
    set_epoch = None  # type: ignore[assignment]

    def end(self) -> None:
        self.epoch, self.index = self.epoch + 1, 0


class OwnWithLength(OwnLoader):
    def __len__(self) -> int:
        return len(self.stream) // 2


OF_AN_EPOCH: dict[str, Any] = {
    "sampler": lambda: DataLoader(numbers(0, 60), 2, sampler=Curriculum()),
    "sampler in a batch sampler": lambda: DataLoader(
        numbers(0, 60), batch_sampler=BatchSampler(Curriculum(), 2, False)
    ),
    "sampler that counts": lambda: DataLoader(numbers(0, 60), 2, sampler=Counting()),
    "sampler with a state": lambda: DataLoader(numbers(0, 60), 2, sampler=CountingWithState()),
    "stream": lambda: DataLoader(Growing(), 2),
    "stream that counts": lambda: DataLoader(GrowingBySelf(), 2),
    "own loader": lambda: OwnWithLength(Growing()),
    "own loader that counts": lambda: OwnWithLength(GrowingBySelf()),
    "combined": lambda: CombinedLoader([DataLoader(Growing(), 2), DataLoader(numbers(90, 2), 1)], "sequential"),
}


class OfEither(Net):
    """Also takes the batches of several loaders."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return super().training_step(batch[0] if isinstance(batch, tuple) else batch, batch_idx)


@pytest.mark.parametrize("limit", [None, 0.5])
@pytest.mark.parametrize("kind", OF_AN_EPOCH)
def test_an_epoch_has_the_length_that_it_begins_with(kind: str, limit: float | None, tmp_path: Path) -> None:
    """Of data that become longer from epoch to epoch: known from the epoch's number, or from a state."""
    if limit is not None and "counts" in kind + "counts" * ("state" in kind):
        pytest.skip("such data count their epochs where they are read to their end")
    extra = [90, 91] if kind == "combined" else []
    plain = {epoch: [*range(10 * epoch, 10 * epoch + 4 + 2 * epoch), *extra] for epoch in range(3)}
    batches = {epoch: (len(samples) - len(extra)) // 2 + len(extra) for epoch, samples in plain.items()}
    if limit is not None:
        batches = {epoch: int(number * limit) for epoch, number in batches.items()}
        plain = {epoch: plain[epoch][: 2 * number] for epoch, number in batches.items()}
    options = {"max_epochs": 3, "limit_train_batches": limit}
    for step in {1, batches[0], batches[0] + 1, sum(batches.values()) - 1}:
        whole, resumed = resumed_epochs(tmp_path, lambda: OfEither(lambda _: OF_AN_EPOCH[kind]()), step, **options)
        assert whole == plain
        assert {epoch: resumed[epoch] for epoch in plain} == plain, step


def counting() -> Any:
    return DataLoader(numbers(0, 6), 2, sampler=CountingSampler(6))


def in_order() -> Any:
    return DataLoader(numbers(90, 4), 1)


NOTHING_LEFT: dict[str, tuple[Any, int | None, int]] = {
    "sampler": (counting, 2, 2),
    "sequential": (lambda: CombinedLoader([counting(), in_order()], "sequential"), None, 5),
    "sequential, at its limit": (lambda: CombinedLoader([in_order(), counting()], "sequential"), 5, 5),
    "together, at their limit": (lambda: CombinedLoader([counting(), in_order()], "max_size"), 2, 2),
    "in rounds": (lambda: CombinedLoader([in_order(), counting()], "max_size_cycle"), None, 4),
    "in rounds, at their limit": (lambda: CombinedLoader([in_order(), counting()], "max_size_cycle"), 4, 4),
}
"""A loader of which one part counts its epochs itself; the limit; a step at which nothing is left of that part."""


@pytest.mark.parametrize("kind", NOTHING_LEFT)
def test_an_epoch_of_which_nothing_is_left_has_begun(kind: str, tmp_path: Path) -> None:
    made, limit, step = NOTHING_LEFT[kind]

    class Firsts(Net):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            tensors = [one.flatten() for one in tree_leaves(batch) if one is not None]
            return super().training_step(torch.cat(tensors).unsqueeze(1), batch_idx)

    whole, resumed = resumed_epochs(tmp_path, lambda: Firsts(lambda _: made()), step, limit_train_batches=limit)
    assert whole[0] != whole[1]
    assert resumed == whole


def test_the_sanity_check_leaves_validation_data_as_they_were(tmp_path: Path) -> None:
    trainer = Trainer(default_root_dir=tmp_path, **{**QUIET, "max_epochs": 1, "logger": False, "seed": 1})
    trainer.fit(Net(), DataLoader(numbers(0, 2), 2), DataLoader(WithEpoch(), 2))
    assert float(trainer.callback_metrics["v"]) == pytest.approx(3.0)
    trainer.fit(Net(), DataLoader(numbers(0, 2), 2), iter([torch.full((1, 1), float(n)) for n in range(5)]))
    assert float(trainer.callback_metrics["v"]) == pytest.approx(2.0)


class Source:
    """Counts on where it was left."""

    def __init__(self) -> None:
        self.place = {"next": 0}

    def __iter__(self) -> Iterator[torch.Tensor]:
        while True:
            self.place["next"] += 1
            yield torch.full((1, 1), float(self.place["next"]))


class SourceWithLength(Source):
    def __len__(self) -> int:
        return 100


class Reading(IterableDataset[Any]):
    def __init__(self, source: Any) -> None:
        self.source = source

    def __iter__(self) -> Iterator[Any]:
        yield from self.source


def workers(dataset: Any) -> Any:
    return DataLoader(dataset, None, num_workers=1, persistent_workers=True)


PLACES: dict[str, Any] = {
    "of a loader": Source,
    "of a loader with a length": SourceWithLength,
    "in an object of a dataset": lambda: DataLoader(Reading(Source()), None),
    "in a loader's loader": lambda: Reading(DataLoader(Reading(Source()), None)),
    "of two loaders together": lambda: CombinedLoader([DataLoader(Reading(Source()), None), Source()], "min_size"),
    "of persistent workers": lambda: workers(Reading(Source())),
    "in an iterator": lambda: DataLoader(Reading(iter([torch.full((1, 1), float(n)) for n in range(9)])), None),
    "in an iterator of an object": lambda: Reading(Reading(iter([torch.full((1, 1), float(n)) for n in range(9)]))),
}


@pytest.mark.parametrize("name", PLACES)
def test_the_sanity_check_leaves_the_place_of_a_stream_without_a_state(name: str, tmp_path: Path) -> None:
    class Validated(Net):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            if not self.trainer.sanity_checking:
                validated[-1].append({int(one) for one in tree_leaves(batch[0]) if one is not None})

    settings = {**QUIET, "max_epochs": 2, "limit_val_batches": 2, "logger": False, "seed": 1}
    validated: list[Any] = []
    for steps in (0, 1):
        validated.append([])
        trainer = Trainer(default_root_dir=tmp_path, num_sanity_val_steps=steps, **settings)
        trainer.fit(Validated(), DataLoader(numbers(0, 2), 2), PLACES[name]())
    assert validated[1] == validated[0]


class OfAPackage(DataLoader[Any]):
    """A subclass, as of torch_geometric or monai, whose order is drawn where it is iterated."""


class Wrapper:
    """Around a plain DataLoader, as many projects have one."""

    def __init__(self, *args: Any, **options: Any) -> None:
        self.loader = DataLoader(*args, **options)

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        yield from self.loader


@pytest.mark.parametrize("kind", [OfAPackage, Wrapper])
def test_persistent_workers_go_on_with_the_order_that_was_drawn(kind: Any, tmp_path: Path) -> None:
    """Torch draws one number less where it begins again with the workers that it has."""

    def made(epoch: int) -> Any:
        return kind(numbers(0, 24), 4, shuffle=True, num_workers=1, persistent_workers=True)

    whole, resumed = resumed_epochs(tmp_path, lambda: Net(made), 9)
    assert resumed == whole
    assert whole[0] != whole[1]


@pytest.mark.parametrize("kind", [DataLoader, OfAPackage, Wrapper])
def test_overfit_batches_trains_on_the_same_batches_in_each_epoch(kind: Any, tmp_path: Path) -> None:
    seen = fitted(tmp_path, Net(), kind(numbers(0, 12), 2, shuffle=True), overfit_batches=2).seen
    assert [sorted(seen[epoch]) for epoch in range(EPOCHS)] == [sorted(seen[0])] * EPOCHS


class Epochs(Sampler[int]):
    """Writes down the epochs that it is given."""

    def __init__(self) -> None:
        self.given: list[int] = []

    def set_epoch(self, epoch: int) -> None:
        self.given.append(epoch)

    def __len__(self) -> int:
        return 2

    def __iter__(self) -> Iterator[int]:
        return iter(range(2))


class OfTwo(Net):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return super().training_step(batch["long"], batch_idx)


def test_a_loader_that_begins_again_within_an_epoch_is_in_the_epoch_of_the_run(tmp_path: Path) -> None:
    """Else `files[epoch % n]`, or a curriculum, would read what is no epoch."""
    sampler = Epochs()
    loaders = {"long": DataLoader(numbers(0, 8), 2), "short": DataLoader(numbers(0, 2), 1, sampler=sampler)}
    fitted(tmp_path, OfTwo(), loaders, max_epochs=2)
    assert [epoch for epoch, _ in itertools.groupby(sampler.given)] == [0, 1]


class Indices(BasePredictionWriter):
    def __init__(self) -> None:
        super().__init__("batch")
        self.found: list[tuple[list[int], list[int]]] = []

    def write_on_batch_end(self, trainer: Any, module: Any, prediction: Any, indices: Any, batch: Any, *_: Any) -> None:
        self.found.append((list(indices), batch[0].flatten().int().tolist()))


class Predicts(Net):
    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self.layer(batch[0])


def test_the_indices_of_predictions_are_known_however_many_batches_are_loaded_ahead(tmp_path: Path) -> None:
    writer = Indices()
    trainer = Trainer(default_root_dir=tmp_path, **{**QUIET, "callbacks": [writer], "logger": False})
    trainer.predict(Predicts(), DataLoader(numbers(0, 600), 1, num_workers=2, prefetch_factor=200))
    assert writer.found == [([number], [number]) for number in range(600)]


@pytest.mark.parametrize("limit", [1.0, 2])
def test_an_iterator_that_two_fits_read_loses_no_batch_between_them(limit: float, tmp_path: Path) -> None:
    stream = (torch.full((1, 1), float(number)) for number in itertools.count())
    runs = [fitted(tmp_path, Net(), stream, max_epochs=-1, max_steps=3, limit_train_batches=limit) for _ in range(2)]
    assert [[number for epoch in run.seen.values() for number in epoch] for run in runs] == [[0, 1, 2], [3, 4, 5]]


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # which torchdata calls
def test_one_loader_with_a_state_keeps_a_place_for_training_and_one_for_validation(tmp_path: Path) -> None:
    kind = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader

    def trained(step: int | None = None, ckpt: Path | None = None) -> Net:
        torch.manual_seed(0)
        loader: Any = kind(numbers(0, 12), 2, shuffle=True)
        module = Net()
        trainer = Trainer(
            **{**QUIET, "seed": 1, "enable_checkpointing": False, "logger": False},
            max_epochs=2,
            val_check_interval=3,
            default_root_dir=tmp_path,
            callbacks=[Stop(step, tmp_path / "saved")] if step else [],
        )
        with pytest.raises(KeyError) if step else nullcontext():
            trainer.fit(module, loader, loader, ckpt_path=ckpt)
        return module

    whole = trained()
    trained(step=4)  # after a validation inside the epoch
    resumed = trained(ckpt=tmp_path / "saved")
    assert resumed.seen == {0: whole.seen[0][8:], 1: whole.seen[1]}
    assert torch.equal(resumed.layer.weight, whole.layer.weight)
