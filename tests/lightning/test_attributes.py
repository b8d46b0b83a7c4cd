"""What scripts ask of the trainer and its optimizers has Lightning's value and type."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pytorch_lightning", reason="compares with Lightning, which is not installed")

import torch

from tests.helpers.lightning_runs import LIGHTNING, OURS, Library
from tests.helpers.toy import loader

pytestmark = pytest.mark.filterwarnings("ignore")


def asked(library: Library, folder: Path, **settings: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}

    class Net(library.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(4, 1)

        def on_train_start(self) -> None:
            trainer, optimizer = self.trainer, self.optimizers()
            found["limits"] = trainer.max_epochs, trainer.max_steps
            found["precision"] = (
                trainer.precision == "32-true",
                trainer.precision == "bf16-mixed",
                f"{trainer.precision}",
            )
            found["is an optimizer"] = (
                isinstance(optimizer, torch.optim.Optimizer),
                isinstance(optimizer, torch.optim.SGD),
            )
            self.schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.layer(batch[0]).square().mean()

        def on_train_batch_end(self, *args: Any) -> None:
            self.schedule.step()
            found["rate"] = self.optimizers().param_groups[0]["lr"]

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    off = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing"), False)
    trainer = library.Trainer(accelerator="cpu", devices=1, default_root_dir=folder, **off, **settings)
    trainer.fit(Net(), loader(3))
    return found


@pytest.mark.parametrize("settings", [{"max_epochs": 1}, {"max_steps": 2}], ids=str)
def test_they_are_those_of_lightning(settings: dict[str, int], tmp_path: Path) -> None:
    theirs = asked(LIGHTNING, tmp_path / "theirs", **settings)
    assert asked(OURS, tmp_path / "ours", **settings) == theirs
    assert theirs["rate"] < 0.05


class Remembers:
    """The members of a logger in Lightning's words."""

    name, version = "remembers", 0
    parameters: Any = None

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        self.parameters = dict(params)

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None: ...


@pytest.mark.filterwarnings("ignore")
def test_a_logger_gets_the_hyperparameters_of_module_and_data_in_one_dict(tmp_path: Path) -> None:
    got = []
    for package in ("pytorch_lightning", "trainer"):
        pl: Any = importlib.import_module(package)
        importlib.import_module(f"{package}.loggers")

        class Data(pl.LightningDataModule):  # type: ignore[misc]
            def __init__(self, batch_size: int = 8) -> None:
                super().__init__()
                self.save_hyperparameters()

            def train_dataloader(self) -> Any:
                return loader(2)

        class Module(pl.LightningModule):  # type: ignore[misc]
            def __init__(self, width: int = 1) -> None:
                super().__init__()
                self.save_hyperparameters()
                self.layer = torch.nn.Linear(4, width)

            def training_step(self, batch: Any, batch_idx: int) -> Any:
                return self.layer.weight.sum()

            def configure_optimizers(self) -> Any:
                return torch.optim.SGD(self.parameters(), lr=0.1)

        logger = type("Logger", (Remembers, pl.loggers.Logger), {})()
        trainer = pl.Trainer(max_epochs=1, logger=logger, default_root_dir=tmp_path, enable_progress_bar=False)
        trainer.fit(Module(), Data())
        got.append((logger.parameters, str(trainer.state.fn), f"{trainer.state.status}"))
    assert got[0] == got[1] == ({"batch_size": 8, "width": 1}, "TrainerFn.FITTING", "TrainerStatus.FINISHED")


# -- what a script asks after a run ------------------------------------------------------------------------------------


def weights_seen(
    library: Library, folder: Path, calls: tuple[str, ...], **settings: Any
) -> tuple[list[Any], bool, bool]:
    """Return the weight that each of the `calls` after `fit` has seen, and what is known of checkpoints."""

    class Falls(library.Module):  # type: ignore[misc]
        """The first of its three epochs is the best."""

        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(1))

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return -self.weight.sum()

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val_loss", self.weight.abs().sum())
            seen.append(self.weight.item())

        def test_step(self, batch: Any, batch_idx: int) -> None:
            seen.append(self.weight.item())

        def predict_step(self, batch: Any, batch_idx: int) -> None:
            seen.append(self.weight.item())

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=1.0)

    seen: list[float] = []
    module, data = Falls(), loader(1)
    best = library.ModelCheckpoint(monitor="val_loss", mode="min")
    off = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary"), False)
    options = {"accelerator": "cpu", "devices": 1, "default_root_dir": folder, "callbacks": [best]}
    trainer = library.Trainer(**{"max_epochs": 3, **options, **off, **settings})
    trainer.fit(module, data, data)
    seen.clear()
    for call in calls:
        stage, _, given = call.partition(" ")
        trainer_call = getattr(trainer, stage)
        if given == "module":
            trainer_call(module, data)
        else:
            trainer_call(dataloaders=data, **({"ckpt_path": given} if given else {}))
    return seen, trainer.checkpoint_callback is best, best.best_model_path == ""


CALLS = ["validate", "test", "predict", "validate module", "test module", "predict module", "test best"]


@pytest.mark.parametrize("last", ["validate", "test", "predict"])
@pytest.mark.parametrize("before", [(), *((one,) for one in CALLS), ("validate module", "test module")], ids=str)
def test_evaluation_without_a_module_takes_the_best_weights_whatever_was_evaluated_before(
    before: tuple[str, ...], last: str, tmp_path: Path
) -> None:
    theirs = weights_seen(LIGHTNING, tmp_path / "theirs", (*before, last))
    assert weights_seen(OURS, tmp_path / "ours", (*before, last)) == theirs
    assert theirs[0][-1] == 1.0


def test_a_fast_dev_run_knows_its_checkpoint_callback(tmp_path: Path) -> None:
    theirs = weights_seen(LIGHTNING, tmp_path / "theirs", ("test module",), fast_dev_run=True)
    assert weights_seen(OURS, tmp_path / "ours", ("test module",), fast_dev_run=True) == theirs == ([1.0], True, True)


def ignored(library: Library) -> list[dict[str, Any]]:
    """Return the hyperparameters of classes that leave out what was kept before."""

    class Base(library.Module):  # type: ignore[misc]
        def __init__(self, a: int = 1, b: int = 2, c: int = 3) -> None:
            super().__init__()
            self.save_hyperparameters()

    class Without(Base):
        def __init__(self, a: int = 1, b: int = 2, d: int = 4) -> None:
            super().__init__(a, b)
            self.save_hyperparameters(ignore=["b"])

    class OfTheBase(Base):
        def __init__(self, b: int = 2) -> None:
            super().__init__(b=b)
            self.save_hyperparameters(ignore="c")

    class Added(Base):
        def __init__(self, a: int = 1, b: int = 2) -> None:
            super().__init__(a, b)
            self.hparams["z"] = 1
            self.save_hyperparameters(ignore=["b", "z"])

    class Entries(Base):
        def __init__(self, b: int = 2) -> None:
            super().__init__(b=b)
            self.save_hyperparameters({"b": 5, "q": 1}, ignore=["b"])

    class Twice(library.Module):  # type: ignore[misc]
        def __init__(self, a: int = 1, b: int = 2) -> None:
            super().__init__()
            self.save_hyperparameters(ignore="b")
            self.save_hyperparameters("b")

    modules = [cls() for cls in (Base, Without, OfTheBase, Added, Entries, Twice)]
    return [dict(values) for one in modules for values in (one.hparams, one.hparams_initial)]


def test_ignored_hyperparameters_are_left_out_where_a_base_class_kept_them() -> None:
    assert ignored(OURS) == ignored(LIGHTNING)


def test_freeze_returns_the_module() -> None:
    for library in (OURS, LIGHTNING):
        module = library.Module()
        assert module.freeze() is module


# -- data modules and loaders ------------------------------------------------------------------------------------------


def of_both(make: Callable[[Any, Any], Any]) -> tuple[Any, Any]:
    """Return what `make` returns for Lightning and for this package: their base classes of data modules and modules."""
    modules = [importlib.import_module(name) for name in ("pytorch_lightning", "trainer")]
    return make(modules[0], modules[0].LightningDataModule), make(modules[1], modules[1].LightningDataModule)


def batches(samples: int) -> Any:
    return torch.utils.data.DataLoader(Samples(samples), batch_size=2)


class Samples(torch.utils.data.Dataset[torch.Tensor]):
    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.ones(4)


class Stream(torch.utils.data.IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(3))


def test_arguments_of_from_datasets_go_to_the_constructor() -> None:
    def made(library: Any, base: Any) -> list[Any]:
        class Named(base):  # type: ignore[misc]
            def __init__(self, batch_size: int = 1, more: int = 2) -> None:
                super().__init__()
                self.got = batch_size, more

        class TakesAny(base):  # type: ignore[misc]
            def __init__(self, **options: Any) -> None:
                super().__init__()
                self.got = options

        class Neither(base):  # type: ignore[misc]
            got = None

        modules = [kind.from_datasets(batches(5).dataset, batch_size=4) for kind in (Named, TakesAny, Neither)]
        modules.append(Named.from_datasets(batches(5).dataset, more=3))
        return [(one.got, one.train_dataloader().batch_size) for one in modules]

    theirs, ours = of_both(made)
    assert ours == theirs
    assert ours[0] == ((4, 2), 4)


def test_a_loader_that_is_not_defined_is_an_error() -> None:
    def refusals(library: Any, base: Any) -> list[bool]:
        class Calls(base):  # type: ignore[misc]
            def train_dataloader(self) -> Any:
                return super().train_dataloader()

        calls = [Calls().train_dataloader]
        for one in (base(), library.LightningModule()):
            calls += [getattr(one, f"{name}_dataloader") for name in ("train", "val", "test", "predict")]
        found = []
        for call in calls:
            with pytest.raises(
                importlib.import_module(f"{library.__name__}.utilities.exceptions").MisconfigurationException
            ):
                found.append(call())
        return [library.utilities.model_helpers.is_overridden("val_dataloader", base()), bool(found)]

    theirs, ours = of_both(refusals)
    assert ours == theirs == [False, False]


@pytest.mark.parametrize("start", [0, 0.0, 1, 1.0, 1.5, -1, -0.5, 2, 0.5])
def test_swa_starts_where_lightnings_may(start: float) -> None:
    def taken(library: Any, base: Any) -> bool:
        try:
            library.callbacks.StochasticWeightAveraging(swa_lrs=0.1, swa_epoch_start=start)
        except Exception:
            return False
        return True

    theirs, ours = of_both(taken)
    assert ours == theirs


@pytest.mark.parametrize("every", [1, 2, 3])
@pytest.mark.parametrize("sanity", [0, 2])
def test_validation_loaders_are_made_where_there_is_a_validation(every: int, sanity: int, tmp_path: Path) -> None:
    """But for the one at the start, which Lightning makes before the first validation."""

    def asked_for(library: Any, base: Any) -> list[str]:
        class Net(library.LightningModule):  # type: ignore[misc]
            def __init__(self) -> None:
                super().__init__()
                self.layer = torch.nn.Linear(4, 1)
                self.asked: list[str] = []

            def training_step(self, batch: Any, batch_idx: int) -> Any:
                return self.layer(batch).square().mean()

            def validation_step(self, batch: Any, batch_idx: int) -> None:
                if not self.trainer.sanity_checking and batch_idx == 0:
                    self.asked.append(f"validation {self.current_epoch}")

            def train_dataloader(self) -> Any:
                self.asked.append(f"train {self.current_epoch}")
                return batches(4)

            def val_dataloader(self) -> Any:
                self.asked.append(f"val {self.current_epoch}")
                return batches(4)

            def configure_optimizers(self) -> Any:
                return torch.optim.SGD(self.parameters(), lr=0.1)

        off = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing"), False)
        options = {
            "accelerator": "cpu",
            "devices": 1,
            "default_root_dir": tmp_path,
            "num_sanity_val_steps": sanity,
            **off,
        }
        options |= {"reload_dataloaders_every_n_epochs": 1, "check_val_every_n_epoch": every}
        module = Net()
        library.Trainer(max_epochs=6, **options).fit(module)
        return module.asked

    theirs, ours = of_both(asked_for)
    first = {"val 0", "train 0"}
    assert [one for one in ours if one not in first] == [one for one in theirs if one not in first]
    assert ours[:2] == ["train 0", "val 0"]
