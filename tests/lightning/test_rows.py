"""Rows of the table of differences that concern arguments: Lightning takes what is refused here."""

from __future__ import annotations

import dataclasses
import inspect
import os
import warnings
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pytorch_lightning", reason="compares with Lightning, which is not installed")

import torch
import torchmetrics
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.wrappers import Running

from tests.helpers.lightning_runs import LIGHTNING, OURS, Library, Record, Scenario, loader, run
from tests.helpers.lightning_scenarios import Part, StepLR, with_optimizer
from tests.helpers.processes import run_distributed
from tests.messages import raises_recorded
from trainer import ConfigError, Tuner
from trainer.settings import NONE_IS_DEFAULT, Settings

fit = lambda trainer, module: trainer.fit(module, loader(), loader(seed=8))  # noqa: E731


def misspelt(module: Any) -> Any:
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": StepLR(optimizer, 1), "intervall": "step"}}


def metric_by_step(make: Callable[[], Any], call: Callable[[Any, torch.Tensor], object]) -> Callable[..., Any]:
    class Module(Part):
        def __init__(self) -> None:
            super().__init__()
            self.metric = make()

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            call(self.metric, batch[1])
            self.log("metric", self.metric, on_step=True, on_epoch=True)
            return super().training_step(batch, batch_idx)

    return Module


REFUSED: dict[str, Callable[[Library], Scenario]] = {
    "an unknown key of a schedule": lambda library: Scenario("", with_optimizer(misspelt)),
    "an empty training loader": lambda library: Scenario("", action=lambda t, m: t.fit(m, [], loader())),
    "two limits": lambda library: Scenario("", settings={"overfit_batches": 2, "limit_train_batches": 2}),
    "min_steps above max_steps": lambda library: Scenario("", settings={"min_steps": 5, "max_steps": 2}),
    "min_epochs above max_epochs": lambda library: Scenario(
        "", settings={"min_epochs": 5, "max_epochs": 2, "fast_dev_run": True}
    ),
    "a metric by step that was updated only": lambda library: Scenario(
        "", metric_by_step(torchmetrics.MeanMetric, lambda metric, y: metric.update(y))
    ),
    "a metric by step that keeps no value of the batch": lambda library: Scenario(
        "", metric_by_step(lambda: Running(torchmetrics.MeanMetric()), lambda metric, y: metric(y))
    ),
    "patience": lambda library: Scenario(
        "", callbacks=lambda *_: [library.EarlyStopping("val_loss", patience=0)], action=fit
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_settings_that_only_lightning_takes(name: str, tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert isinstance(run(LIGHTNING, REFUSED[name](LIGHTNING), tmp_path), Record)
    with pytest.raises(ConfigError):
        run(OURS, REFUSED[name](OURS), tmp_path)


def test_none_means_the_default_where_it_does_in_lightning() -> None:
    theirs = inspect.signature(LIGHTNING.Trainer).parameters
    ours = {field.name: field.default for field in dataclasses.fields(Settings)}
    both = {name for name in ours.keys() & theirs.keys() if theirs[name].default is None}
    assert {name for name in both if ours[name] is not None} == set(NONE_IS_DEFAULT)


@pytest.mark.parametrize("name", ["ModelCheckpoint", "EarlyStopping", "LearningRateMonitor"])
def test_callbacks_take_none_where_lightnings_do(name: str) -> None:
    theirs = inspect.signature(getattr(LIGHTNING, name)).parameters
    both = [one for one in inspect.signature(getattr(OURS, name)).parameters if one in theirs]
    given: dict[str, Any] = {one: None for one in both if theirs[one].default is None}
    required = {"monitor": "loss"} if name == "EarlyStopping" else {}
    assert getattr(OURS, name)(**given, **required) is not None
    assert given


class Promises:
    """An iterable of three batches with a length of its own."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[Any]:
        yield from list(loader())[:3]


@pytest.mark.parametrize("length", [2, 4])
def test_a_loader_that_keeps_no_promise(length: int, tmp_path: Path) -> None:
    for action in (
        lambda t, m: t.fit(m, Promises(length), loader()),
        lambda t, m: t.fit(m, loader(), Promises(length)),
    ):
        assert run(LIGHTNING, Scenario("", action=action), tmp_path).end["global_step"] in (2 * min(length, 3), 8)
        with raises_recorded(ConfigError):
            run(OURS, Scenario("", action=action), tmp_path)


def test_the_counters_after_evaluating_a_checkpoint(tmp_path: Path) -> None:
    def fit_and_validate(trainer: Any, module: Any) -> None:
        trainer.fit(module, loader(), loader(seed=8))
        trainer.validate(module, loader(seed=8), ckpt_path="best")

    keep = lambda library, record, folder: [library.ModelCheckpoint(monitor="loss", mode="max", save_top_k=1)]  # noqa: E731
    action = Scenario("", callbacks=keep, action=fit_and_validate, settings={"max_epochs": 3})
    theirs, ours = (run(library, action, tmp_path) for library in (LIGHTNING, OURS))
    assert theirs.end["global_step"] == 12
    assert ours.end["global_step"] == int(ours.best[0].rpartition("=")[2]) < 12


def test_a_batch_that_is_none_is_named() -> None:
    scenario = Scenario("", action=lambda t, m: t.fit(m, [*loader(), None], loader()))
    with raises_recorded(ConfigError):
        run(OURS, scenario, Path("unused"))


def test_checkpoints_of_one_name(tmp_path: Path) -> None:
    for library, expected in ((LIGHTNING, {"fixed.ckpt"}), (OURS, {"fixed", "fixed-v1"})):
        folder = tmp_path / library.ModelCheckpoint.__module__
        callbacks = lambda library, record, _, to=folder: [  # noqa: E731
            library.ModelCheckpoint(dirpath=to, filename="fixed", save_top_k=-1, save_last=False)
        ]
        run(library, Scenario("", callbacks=callbacks, action=fit, settings={"max_epochs": 2}), tmp_path)
        assert {path.name for path in folder.iterdir() if path.suffix != ".json"} == expected


@pytest.mark.parametrize("of", ["the loader", "the sampler"])
def test_a_generator_of_a_loader_or_sampler_gives_lightnings_order_only(of: str, tmp_path: Path) -> None:
    orders = {}
    for library in (LIGHTNING, OURS):
        for seed in (1, 2):
            seen: list[int] = []

            class Dataset(torch.utils.data.Dataset[Any]):
                def __len__(self) -> int:
                    return 8

                def __getitem__(self, index: int, to: list[int] = seen) -> Any:
                    to.append(index)
                    return torch.ones(4), torch.ones(1)

            own = {"generator": torch.Generator().manual_seed(seed)}
            sampler = torch.utils.data.RandomSampler(range(8), **own)
            options: Any = {"shuffle": True, **own} if of == "the loader" else {"sampler": sampler}
            data = torch.utils.data.DataLoader(Dataset(), batch_size=2, **options)
            torch.manual_seed(3)
            run(library, Scenario("", action=lambda t, m, d=data: t.fit(m, d), settings={"max_epochs": 1}), tmp_path)
            orders[library.name, seed] = seen
    assert orders[LIGHTNING.name, 1] != orders[LIGHTNING.name, 2]
    assert sorted(orders[OURS.name, 1]) == [*range(8)]
    assert orders[OURS.name, 1] not in (orders[LIGHTNING.name, 1], [*range(8)])


def test_the_folder_of_a_logger(tmp_path: Path) -> None:
    found = {}
    for library in (LIGHTNING, OURS):
        loggers = import_module(f"{library.Module.__module__.partition('.')[0]}.loggers")
        for name in ({}, {"name": "mine"}):
            logger = loggers.CSVLogger(tmp_path / library.name, **name)
            run(library, Scenario("", action=fit, settings={"max_epochs": 1, "logger": logger}), tmp_path)
            found[library.name, *name] = Path(logger.log_dir).relative_to(tmp_path / library.name).as_posix()
    assert found[LIGHTNING.name,] == "lightning_logs/version_0"
    assert found[OURS.name,] == "."
    assert (found[LIGHTNING.name, "name"], found[OURS.name, "name"]) == ("mine/version_0", "mine/version_0")


def test_what_hooks_see_of_stage_last_batch_and_a_value_of_the_epochs_start(tmp_path: Path) -> None:
    class Module(Part):
        def setup(self, stage: str) -> None:
            self.record.noted.append((type(stage) is str, stage == "fit"))

        def on_train_epoch_start(self) -> None:
            self.log("started", self.current_epoch + 3.0)
            self.record.noted.append((self.trainer.is_last_batch, self.trainer.callback_metrics.get("started")))

    theirs, ours = (run(library, Scenario("", Module), tmp_path).noted for library in (LIGHTNING, OURS))
    assert theirs == [(False, True), (False, 3.0), (True, 4.0)]
    assert ours == [(True, True), (False, None), (False, 3.0)]


def test_the_hooks_of_a_finished_run(tmp_path: Path) -> None:
    names = ("on_fit_start", "on_train_start", "on_train_epoch_start", "on_train_epoch_end", "on_train_end")

    hooks = {name: lambda self, name=name: self.record.noted.append(name) for name in (*names, "on_fit_end")}
    Module = type("Notes", (Part,), hooks)  # noqa: N806

    def again(trainer: Any, module: Any) -> None:
        trainer.fit(module, loader())
        saved = f"{trainer.default_root_dir}/saved"
        trainer.save_checkpoint(saved)
        trainer.fit(module, loader(), ckpt_path=saved)

    scenario = Scenario("", Module, {"max_steps": 2, "max_epochs": -1}, action=again)
    theirs, ours = (run(library, scenario, tmp_path / library.name).noted for library in (LIGHTNING, OURS))
    assert ours == [*names, "on_fit_end"] * 2
    assert theirs == [*names, "on_fit_end", "on_fit_start", "on_fit_end"]


def test_limits_that_the_trainer_names(tmp_path: Path) -> None:
    for library, sanity, limit in ((LIGHTNING, 0, 2), (OURS, -1, 1.0)):

        def act(trainer: Any, module: Any) -> None:
            fit(trainer, module)
            module.record.noted.append((trainer.num_sanity_val_steps, trainer.limit_val_batches))
            module.record.noted.append((trainer.num_training_batches, trainer.num_val_batches))

        settings = {"fast_dev_run": 2, "num_sanity_val_steps": -1}
        noted = run(library, Scenario("", action=act, settings=settings), tmp_path).noted
        assert noted == [(sanity, limit), (2, [2])]


class Table(Part):
    """A module's part that has a table of positions."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.arange(300.0))


def test_what_stays_in_float32(tmp_path: Path) -> None:
    for library, dtype in ((LIGHTNING, torch.bfloat16), (OURS, torch.float32)):

        def act(trainer: Any, module: Any) -> None:
            fit(trainer, module)
            module.record.noted += [module.table.dtype, next(module.parameters()).dtype]

        settings = {"precision": "bf16-true", "max_epochs": 1}
        assert run(library, Scenario("", Table, settings, action=act), tmp_path).noted == [dtype, torch.bfloat16]


def test_the_suggested_learning_rate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For a regression with noise, by batches of 8."""
    from pytorch_lightning.tuner import Tuner as LightningTuner

    monkeypatch.chdir(tmp_path)
    numbers = torch.Generator().manual_seed(3)
    x = torch.randn(512, 8, generator=numbers)
    y = x @ torch.randn(8, 1, generator=numbers) + 0.5 * torch.randn(512, 1, generator=numbers)
    quiet = {"enable_progress_bar": False, "logger": False, "max_epochs": 1, "accelerator": "cpu"}
    found = {}
    for library, tuner in ((LIGHTNING, LightningTuner), (OURS, Tuner)):

        class Net(library.Module):  # type: ignore[misc, name-defined]
            def __init__(self) -> None:
                super().__init__()
                torch.manual_seed(0)
                self.layer, self.lr = torch.nn.Linear(8, 1), 1e-3

            def training_step(self, batch: Any, batch_idx: int) -> Any:
                return torch.nn.functional.mse_loss(self.layer(batch[0]), batch[1])

            def configure_optimizers(self) -> Any:
                return torch.optim.SGD(self.parameters(), self.lr)

        torch.manual_seed(3)
        data = DataLoader(TensorDataset(x, y), 8, shuffle=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found[library.name] = tuner(library.Trainer(**quiet)).lr_find(Net(), data).suggestion()
    assert found[LIGHTNING.name] < 1e-6
    assert 0.01 < found[OURS.name] < 0.5


class FirstInputs(Part):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.record.noted.extend(batch[0][:, 0].tolist())
        return super().training_step(batch, batch_idx)


def first_samples(folder: str) -> dict[str, list[float]]:
    """Return the samples of an epoch on this process of two, in each library."""
    os.environ["TORCHELASTIC_RUN_ID"] = "test"  # by which Lightning knows that its processes are there
    settings = {"devices": 2, "strategy": "ddp", "max_epochs": 1}
    scenario = Scenario("", FirstInputs, settings, action=lambda t, m: t.fit(m, loader(24)))
    return {library.name: run(library, scenario, Path(folder)).noted for library in (LIGHTNING, OURS)}


def test_data_in_order_on_several_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    ranks = run_distributed(first_samples, 2, str(tmp_path))
    steps: dict[str, list[list[float]]] = {}
    for name in ranks[0]:
        steps[name] = [sorted(x for rank in ranks for x in rank[name][at : at + 3]) for at in range(0, 12, 3)]
    in_order = [sorted(batch[0][:, 0].tolist()) for batch in loader(24, 6)]
    assert steps[OURS.name] == in_order
    assert steps[LIGHTNING.name] != in_order
