"""Views of Lightning's loops and connectors have Lightning's values at each hook, and are read only."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from operator import attrgetter
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

pytest.importorskip("pytorch_lightning", reason="compares with Lightning, which is not installed")

import torch
from torch.utils.data import DataLoader, IterableDataset

from tests.helpers.lightning_runs import LIGHTNING, OURS, Library
from tests.helpers.toy import Toy, loader, quiet
from tests.messages import raises_recorded
from trainer import ConfigError, DataModule, TrainModule

pytestmark = pytest.mark.filterwarnings("ignore")

COUNTS = [f"epoch_loop.batch_progress.{of}.{count}" for of in ("current", "total") for count in ("ready", "completed")]
PATHS = (
    *("max_epochs", "min_epochs", "max_steps", "min_steps", "batch_idx", "total_batch_idx"),
    *(f"epoch_progress.current.{count}" for count in ("ready", "started", "processed", "completed")),
    *("epoch_progress.total.ready", "epoch_progress.total.completed", *COUNTS),
    *("epoch_loop.batch_progress.current.processed", "epoch_loop.batch_progress.total.processed"),
    *("epoch_loop.batch_progress.is_last_batch", "epoch_loop.global_step", "epoch_loop.batch_idx"),
    *("epoch_loop.total_batch_idx", "epoch_loop._batches_that_stepped"),
)
FROM_TRAINING_ON = ("max_batches", "epoch_loop.val_loop.max_batches", "epoch_loop.val_loop.num_dataloaders")
"""Known later in Lightning."""
HOOKS = (
    *("on_fit_start", "on_train_start", "on_train_epoch_start", "on_train_batch_start", "on_before_backward"),
    *("on_before_optimizer_step", "on_after_backward", "on_train_batch_end", "on_validation_start"),
    *("on_validation_batch_end", "on_validation_end", "on_train_epoch_end", "on_train_end", "on_fit_end"),
)
EARLY = ["on_fit_start", "sanity"]


def seen(library: Library, folder: Path, resumed: bool = False, **settings: Any) -> list[Any]:
    """Return the values at each hook of a run."""
    rows: list[Any] = []

    def note(hook: str, trainer: Any) -> None:
        values = {path: attrgetter(path)(trainer.fit_loop) for path in PATHS}
        values["accumulates"] = trainer.fit_loop.epoch_loop._should_accumulate()
        values["defined"] = trainer.fit_loop.epoch_loop.val_loop._data_source.is_defined()
        where = hook if not trainer.sanity_checking else "sanity"
        if where not in EARLY:
            values |= {path: attrgetter(path)(trainer.fit_loop) for path in FROM_TRAINING_ON}
            values["loader"] = trainer.fit_loop._combined_loader.flattened == [train]
        if trainer.training and where not in EARLY:
            values["logs"] = trainer._logger_connector.should_update_logs
        rows.append((where, values))

    def noting(hook: str) -> Callable[..., None]:
        return lambda self, trainer, *others: note(hook, trainer)

    callback = type("Notes", (library.Callback,), {hook: noting(hook) for hook in HOOKS})()

    class Net(library.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(4, 1)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            note("training_step", self.trainer)
            return self.layer(batch[0]).square().mean()

        def validation_step(self, batch: Any, batch_idx: int) -> None: ...

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    off = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary"), False)
    keeps = library.ModelCheckpoint(dirpath=folder, save_top_k=-1)
    given = {"max_epochs": 2, "accelerator": "cpu", "log_every_n_steps": 3, "default_root_dir": folder, **settings}
    train, val, start = loader(5), loader(2), None
    if resumed:
        library.Trainer(**off, **given, callbacks=[keeps, callback]).fit(Net(), train, val)
        start, given = keeps.best_model_path, {**given, "max_epochs": 4}
        rows.clear()
    trainer = library.Trainer(**off, **given, callbacks=[keeps, callback])
    trainer.fit(Net(), train, val, ckpt_path=start)
    rows.append(("after", {path: attrgetter(path)(trainer.fit_loop) for path in PATHS}))
    return rows


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"accumulate_grad_batches": 2},
        {"val_check_interval": 2, "limit_train_batches": 4},
        {"check_val_every_n_epoch": 2, "limit_val_batches": 1},
        {"fast_dev_run": True},
    ],
    ids=str,
)
def test_loops_have_lightnings_values_at_each_hook(settings: dict[str, Any], tmp_path: Path) -> None:
    theirs = seen(LIGHTNING, tmp_path / "theirs", **settings)
    ours = seen(OURS, tmp_path / "ours", **settings)
    assert [hook for hook, _ in ours] == [hook for hook, _ in theirs]
    for number, ((hook, one), (_, other)) in enumerate(zip(ours, theirs, strict=True)):
        assert one == other, f"{number}: {hook}"


def test_a_resumed_run_continues_the_counts(tmp_path: Path) -> None:
    ours, theirs = (
        [
            row
            for row in seen(library, tmp_path / library.name, resumed=True, num_sanity_val_steps=0)
            if "batch" in row[0]
        ]
        for library in (OURS, LIGHTNING)
    )
    assert len(ours) == len(theirs) > 20
    for one, other in zip(ours, theirs, strict=True):
        assert one == other


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(list(loader(2).dataset))  # type: ignore[call-overload]


@pytest.mark.parametrize("of", ["nothing", "call", "module", "data module", "None of the module"])
def test_a_source_of_loaders_is_defined(of: str) -> None:
    found = []
    for library in (OURS, LIGHTNING):

        class Net(library.Module):  # type: ignore[misc]
            def __init__(self) -> None:
                super().__init__()
                self.layer = torch.nn.Linear(4, 1)

            def training_step(self, batch: Any, batch_idx: int) -> Any:
                return self.layer(batch[0]).square().mean()

            def validation_step(self, batch: Any, batch_idx: int) -> None: ...

            def configure_optimizers(self) -> Any:
                found.append(self.trainer.fit_loop.epoch_loop.val_loop._data_source.is_defined())
                return torch.optim.SGD(self.parameters(), lr=0.1)

        class Data(library.DataModule):  # type: ignore[misc]
            def train_dataloader(self) -> Any:
                return loader(2)

            def val_dataloader(self) -> Any:
                return loader(2)

        if "module" in of and "data" not in of:
            Net.val_dataloader = lambda self: None if "None" in of else loader(2)
        off = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing"), False)
        trainer = library.Trainer(**off, max_epochs=1, accelerator="cpu", num_sanity_val_steps=0, limit_val_batches=0)
        if of == "data module":
            trainer.fit(Net(), datamodule=Data())
        else:
            trainer.fit(Net(), loader(2), loader(2) if of == "call" else None)
    assert found == [of != "nothing"] * 2


def test_what_is_not_known_is_answered_in_words() -> None:
    trainer = quiet(max_epochs=1)
    for path in (
        *("fit_loop.running_loss", "fit_loop.epoch_loop._results", "fit_loop._data_fetcher", "_results"),
        *("_checkpoint_connector.restore", "fit_loop.epoch_loop.batch_progress.current.started"),
        *("validate_loop.batch_progress", "_logger_connector.should_update_logs", "_data_connector"),
    ):
        with raises_recorded(AttributeError):
            attrgetter(path)(trainer)
    with raises_recorded(AttributeError):
        trainer.fit_loop.max_epochs = 3  # type: ignore[attr-defined]
    with raises_recorded(AttributeError):
        trainer.fit_loop = None  # type: ignore[attr-defined]
    trainer.fit(Toy(), DataLoader(Stream(), batch_size=4))
    assert trainer.fit_loop.total_batch_idx == 1  # type: ignore[attr-defined]
    with raises_recorded(AttributeError):
        trainer.fit_loop.epoch_loop.batch_progress.is_last_batch  # type: ignore[attr-defined]  # noqa: B018


def test_views_of_other_stages() -> None:
    trainer: Any = quiet(max_epochs=1)
    trainer.test(Toy(), [loader(2), loader(3)], verbose=False)
    assert (trainer.test_loop.max_batches, trainer.test_loop.num_dataloaders) == ([2, 3], 2)
    assert len(trainer.test_loop._combined_loader.flattened) == 2
    trainer.validate(Toy(), loader(4), verbose=False)
    assert trainer.validate_loop.max_batches == [4]
    trainer.predict(Toy(), loader(5))
    assert trainer.predict_loop.max_batches == [5]


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"accelerator": "cpu", "devices": "auto"},
        {"accelerator": "cpu", "devices": 1},
        {"accelerator": "cpu", "devices": 2},
        {"accelerator": "cpu", "devices": "3", "strategy": "ddp"},
    ],
    ids=str,
)
def test_an_accelerator_connector_chooses_as_lightnings(arguments: dict[str, Any]) -> None:
    from pytorch_lightning.strategies import DDPStrategy as Theirs
    from pytorch_lightning.trainer.connectors.accelerator_connector import _AcceleratorConnector as Other

    from trainer.strategies import DDPStrategy
    from trainer.trainer.connectors.accelerator_connector import (  # type: ignore[import-not-found]
        _AcceleratorConnector,
    )

    one, other = _AcceleratorConnector(**arguments), Other(**arguments)
    for name in (
        *("_accelerator_flag", "_devices_flag", "_parallel_devices", "is_distributed"),
        "strategy.root_device",
    ):
        assert attrgetter(name)(one) == attrgetter(name)(other), name
    assert isinstance(one.strategy, DDPStrategy) == isinstance(other.strategy, Theirs)
    assert isinstance(one.strategy, torch.nn.Module) is False
    with raises_recorded(AttributeError):
        one.strategy = None
    trainer: Any = quiet(max_epochs=1)
    assert isinstance(trainer._accelerator_connector, _AcceleratorConnector)
    trainer.fit(Toy(), loader(2))
    assert trainer._accelerator_connector.strategy is trainer.strategy
    assert trainer._checkpoint_connector._ckpt_path is None


# -- module.trainer ----------------------------------------------------------------------------------------------------


class Inner(TrainModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        loss = self.layer(features).square().mean()
        self.log("inner", loss)
        return loss


class Outer(Toy):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner()
        self.trainers: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.trainers.append(self.trainer)
        return self.inner(batch[0]) + super().training_step(batch, batch_idx)


def test_a_trainer_can_be_assigned_between_runs(tmp_path: Path) -> None:
    module, first, second = Outer(), quiet(max_epochs=1), quiet(max_epochs=1)
    module.trainer = first
    assert module.trainer is module.inner.trainer is first
    assert (module.global_step, module.current_epoch, module.logger) == (0, 0, None)
    assert not any("trainer" in key for key in module.state_dict())
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        with raises_recorded(ConfigError):
            _ = other.inner.trainer
    second.fit(module, loader())
    assert set(map(id, module.trainers)) == {id(second)}
    assert module.trainer is module.inner.trainer is second
    assert "inner" in second.callback_metrics
    assert (first.global_step, second.global_step) == (0, 8)
    second.save_checkpoint(tmp_path / "point")
    assert Outer.load_from_checkpoint(tmp_path / "point").global_step == 0
    module.trainer = first
    first.fit(module, loader())
    assert module.trainer is first
    module.trainer = None  # type: ignore[assignment]
    with raises_recorded(ConfigError):
        _ = module.inner.trainer
    for double in (Mock(), Mock(), None):  # as tests give
        module.trainer = double  # type: ignore[assignment]
    data = DataModule()
    data.trainer = first
    assert data.trainer is first


def test_what_cannot_be_assigned_is_refused() -> None:
    class Changes(Toy):
        def on_train_start(self) -> None:
            self.trainer = self.trainer
            self.trainer = quiet()

    with raises_recorded(ConfigError):
        quiet(max_epochs=1).fit(Changes(), loader())
    with raises_recorded(ConfigError):
        Toy().trainer = "cpu"  # type: ignore[assignment]


def test_a_loop_of_ones_own_is_refused_in_words() -> None:
    from trainer.compat.inside import EvaluationLoop

    class Prints(EvaluationLoop):
        """As torch-uncertainty's, for a table of its own."""

    with raises_recorded(ConfigError):
        Prints(quiet(), "test", "test", inference_mode=True)  # type: ignore[arg-type]
