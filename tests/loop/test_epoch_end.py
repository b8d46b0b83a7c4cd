"""The end of an epoch and of a training: what is known, what steps, what is written, in which order."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.toy import Toy, loader, quiet
from tests.messages import raises_recorded
from trainer import Callback, ConfigError, Trainer
from trainer.callbacks import CSVLogger, EarlyStopping, ModelCheckpoint, Timer
from trainer.checkpoint.directory import CheckpointDirectory

# -- schedulers with a monitored value ---------------------------------------------------------------------------------


class Plateau(Toy):
    """Its ReduceLROnPlateau halves the learning rate after each epoch that is not better; records what it was given."""

    def __init__(self, monitor: str, **options: Any) -> None:
        super().__init__()
        self.monitor, self.options = monitor, options
        self.given: list[tuple[int, float]] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.log("by_epoch", float(self.global_step), on_step=False, on_epoch=True)
        self.log("by_both", float(self.global_step), on_step=True, on_epoch=True)
        self.log("by_step", float(self.global_step))
        return self._loss(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", float(self.global_step))

    def on_train_epoch_end(self) -> None:
        self.log("at_end", 10.0 * self.current_epoch)

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        self.given.append((self.global_step, float(metric)))
        scheduler.step(metric)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "monitor": self.monitor, **self.options},
        }


@pytest.mark.parametrize(
    ("monitor", "options", "settings", "given"),
    [
        ("by_epoch", {}, {}, [(4, 1.5), (8, 5.5), (12, 9.5)]),
        ("by_both", {}, {}, [(4, 1.5), (8, 5.5), (12, 9.5)]),
        ("by_both_epoch", {}, {"val_check_interval": 2}, [(4, 1.5), (8, 5.5), (12, 9.5)]),
        ("by_both_step", {}, {}, [(4, 3.0), (8, 7.0), (12, 11.0)]),
        ("by_step", {}, {}, [(4, 3.0), (8, 7.0), (12, 11.0)]),
        ("at_end", {}, {}, [(4, 0.0), (8, 10.0), (12, 20.0)]),
        ("val", {}, {}, [(4, 4.0), (8, 8.0), (12, 12.0)]),
        ("val", {}, {"val_check_interval": 3}, [(4, 3.0), (8, 7.0), (12, 11.0)]),
        ("val", {}, {"check_val_every_n_epoch": 2}, [(8, 8.0)]),
        ("val", {"frequency": 2}, {}, [(8, 8.0)]),
        ("by_step", {"interval": "step", "frequency": 5}, {}, [(5, 4.0), (10, 9.0)]),
        ("val", {"interval": "step"}, {"val_check_interval": 2}, [(step, float(step)) for step in range(2, 13, 2)]),
    ],
)
def test_a_plateau_scheduler_is_given_each_value_once_when_it_is_complete(
    monitor: str, options: dict[str, Any], settings: dict[str, Any], given: list[tuple[int, float]]
) -> None:
    module = Plateau(monitor, **options)
    quiet(max_epochs=3, **settings).fit(module, loader(4), loader(1))
    assert module.given == given


@pytest.mark.parametrize("interval", [2, 1.0])
@pytest.mark.parametrize("saves", [{"every_n_train_steps": 1}, {"monitor": "val", "mode": "min", "save_top_k": -1}])
def test_a_plateau_scheduler_of_steps_takes_each_validation_once_over_a_break(
    saves: dict[str, Any], interval: float, tmp_path: Path
) -> None:
    class Break(Callback):
        def on_checkpoint_saved(self, trainer: Trainer, module: Any, path: str) -> None:
            if trainer.global_step >= at:
                raise KeyboardInterrupt

    def run(module: Plateau, folder: str, *callbacks: Callback) -> Plateau:
        settings = {"max_epochs": 2, "val_check_interval": interval, "enable_checkpointing": True}
        keep = ModelCheckpoint(**saves, save_last=True)
        trainer = quiet(callbacks=[keep, *callbacks], default_root_dir=tmp_path / folder, **settings)
        trainer.fit(module, loader(4), loader(2), ckpt_path="last")
        return module

    unbroken = run(Plateau("val", interval="step"), "unbroken").given
    assert unbroken == [(step, float(step)) for step in range(1, 9) if step % (2 if interval == 2 else 4) == 0]
    for at in (2, 3, 4):
        first, second = Plateau("val", interval="step"), Plateau("val", interval="step")
        with pytest.raises(KeyboardInterrupt):
            run(first, str(at), Break())
        assert first.given + run(second, str(at)).given == unbroken, at


@pytest.mark.parametrize(("max_steps", "interval"), [(8, 1.0), (6, 2), (8, 2), (6, 1.0)])
def test_a_break_after_the_last_step_loses_nothing_of_what_follows(
    max_steps: int, interval: float, tmp_path: Path
) -> None:
    """The checkpoint of the last step comes before the validation and the end of the epoch."""

    class Break(Callback):
        def on_checkpoint_saved(self, trainer: Trainer, module: Any, path: str) -> None:
            if trainer.global_step == max_steps:
                raise KeyboardInterrupt

    def run(name: str, *callbacks: Callback) -> tuple[bytes, dict[str, float], Any]:
        module, folder = Plateau("val"), tmp_path / name
        trainer = quiet(
            max_steps=max_steps,
            val_check_interval=interval,
            enable_checkpointing=True,
            callbacks=[ModelCheckpoint(folder, every_n_train_steps=1), *callbacks],
            logger=CSVLogger(folder),
            log_every_n_steps=1,
        )
        trainer.fit(module, loader(4), loader(2), ckpt_path="last")
        metrics = {key: float(value) for key, value in trainer.callback_metrics.items()}
        return (folder / "metrics.csv").read_bytes(), metrics, module.given

    whole = run("whole")
    with pytest.raises(KeyboardInterrupt):
        run("broken", Break())
    resumed = run("broken")
    assert resumed[:2] == whole[:2]
    assert resumed[2] == [given for given in whole[2] if given[0] == max_steps]
    assert run("broken")[:2] == whole[:2]  # a finished run that is started again


class Unsized:
    """Batches without a length: an epoch's last one is not known before the next is asked for."""

    def __iter__(self) -> Any:
        return iter(loader(4))


@pytest.mark.parametrize(("monitor", "frequency"), [("val", 1), ("val", 3), ("val", 8), ("by_step", 4)])
def test_a_plateau_scheduler_of_steps_does_the_same_on_data_without_a_length(
    monitor: str, frequency: int, tmp_path: Path
) -> None:
    def run(data: Any, steps: list[int]) -> list[tuple[int, float]]:
        given: list[tuple[int, float]] = []
        for max_steps in steps:
            module = Plateau(monitor, interval="step", frequency=frequency)
            folder = tmp_path / f"{type(data).__name__}-{steps}"
            trainer = quiet(max_steps=max_steps, max_epochs=4, enable_checkpointing=True, default_root_dir=folder)
            trainer.fit(module, data, loader(1), ckpt_path="last")
            given += module.given
        return given

    sized = run(loader(4), [16])
    assert len(sized) == {1: 4, 3: 3, 8: 2, 4: 4}[frequency]
    assert run(Unsized(), [16]) == run(Unsized(), [3, 4, 6, 8, 16]) == sized


@pytest.mark.parametrize("interval", ["epoch", "step"])
def test_a_plateau_scheduler_of_a_misspelt_name(interval: str) -> None:
    with raises_recorded(ConfigError):
        quiet(max_epochs=2).fit(Plateau("vall", interval=interval), loader(4), loader(1))


@pytest.mark.parametrize("trigger", [{}, {"every_n_train_steps": 3}])
def test_a_checkpoint_of_an_epochs_end_has_the_plateau_schedulers_step(trigger: dict[str, int], tmp_path: Path) -> None:
    def run(epochs: int, folder: str) -> tuple[list[tuple[int, float]], float]:
        module, checkpoint = Plateau("at_end"), ModelCheckpoint(**trigger)  # type: ignore[arg-type]
        trainer = quiet(
            max_epochs=epochs, default_root_dir=tmp_path / folder, enable_checkpointing=True, callbacks=checkpoint
        )
        trainer.fit(module, loader(4), loader(1), ckpt_path="last")
        return module.given, trainer.optimizers[0].param_groups[0]["lr"]

    unbroken, lr = run(4, "unbroken")
    parts = [run(epochs, "parts") for epochs in (1, 2, 4)]
    assert [given for part, _ in parts for given in part] == unbroken == [(4, 0), (8, 10), (12, 20), (16, 30)]
    assert parts[-1][1] == lr == 0.125


# -- an end inside an epoch --------------------------------------------------------------------------------------------


class Ends(Callback):
    """Records the last hooks and what is known in them."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def on_checkpoint_saved(self, trainer: Trainer, module: Any, path: str) -> None:
        self.seen.append(("saved", trainer.global_step))

    def on_train_epoch_end(self, trainer: Trainer, module: Any) -> None:
        self.seen.append(("epoch end", trainer.global_step, float(trainer.callback_metrics["mean"])))

    def on_train_end(self, trainer: Trainer, module: Any) -> None:
        self.seen.append(("end", trainer.global_step))


class Mean(Toy):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.log("mean", float(self.global_step), on_step=False, on_epoch=True)
        if self.global_step == 5 and self.at_6 is not None:
            self.at_6(self.trainer)
        return self._loss(batch)

    at_6: Any = None

    def on_train_epoch_end(self) -> None:
        self.ended = self.global_step

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", 1.0)


ENDS: dict[str, tuple[dict[str, Any], list[Callback], Any]] = {
    "max_steps": ({"max_steps": 6}, [], None),
    "stop": ({}, [], lambda trainer: trainer.stop("enough")),
    "early stopping": ({"val_check_interval": 2}, [EarlyStopping("val", patience=2)], None),
    "timer": ({}, [], lambda trainer: setattr(trainer.callbacks[0], "duration", 0.0)),
}


@pytest.mark.parametrize("how", ENDS)
def test_an_end_for_good_inside_an_epoch_publishes_it_after_its_checkpoint(how: str, tmp_path: Path) -> None:
    settings, more, at_6 = ENDS[how]
    ends, module = Ends(), Mean()
    module.at_6 = at_6
    callbacks = [Timer(1e6), ends, *more, ModelCheckpoint()]
    trainer = quiet(max_epochs=9, enable_checkpointing=True, callbacks=callbacks, default_root_dir=tmp_path, **settings)
    trainer.fit(module, loader(4), loader(1))
    last = [("saved", 6), ("epoch end", 6, 4.5), ("end", 6)]
    assert [one for one in ends.seen if one[1] > 4] == last
    assert (module.ended, trainer.current_epoch) == (6, 1)


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGUSR1"])
def test_a_signal_inside_an_epoch_ends_no_epoch(name: str, tmp_path: Path) -> None:
    ends, module = Ends(), Mean()
    module.at_6 = lambda trainer: os.kill(os.getpid(), getattr(signal, name))
    trainer = quiet(
        max_epochs=9, enable_checkpointing=True, callbacks=[ends, ModelCheckpoint()], default_root_dir=tmp_path
    )
    with pytest.raises(SystemExit):
        trainer.fit(module, loader(4), loader(1))
    # What the last hooks change is no part of the checkpoint with which the run goes on.
    assert [one for one in ends.seen if one[1] > 4] == [("saved", 6), ("end", 6)]


def test_going_on_from_an_end_inside_an_epoch_is_exact(tmp_path: Path) -> None:
    def run(folder: str, *steps: int) -> tuple[Ends, dict[str, torch.Tensor], str]:
        for number in steps:
            ends = Ends()
            trainer = quiet(
                max_steps=number,
                enable_checkpointing=True,
                callbacks=[ends, ModelCheckpoint()],
                default_root_dir=tmp_path / folder,
                logger=CSVLogger(),
                log_every_n_steps=1,
            )
            module = Mean()
            trainer.fit(module, loader(4, shuffle=True), loader(1), ckpt_path="last")
        return ends, module.state_dict(), (trainer.run_dir / "metrics.csv").read_text()

    (unbroken, weights, rows), (last, same, other_rows) = run("unbroken", 8), run("parts", 3, 6, 8)
    assert unbroken.seen[-3:] == last.seen[-3:] == [("epoch end", 8, 5.5), ("saved", 8), ("end", 8)]
    assert all(torch.equal(weights[name], same[name]) for name in weights)
    assert rows == other_rows
    # Started again, a run that is complete ends no epoch.
    ends, *_ = run("parts", 8)
    assert ends.seen == [("end", 8)]


# -- loaders that do not know their length -----------------------------------------------------------------------------


class Stream(torch.utils.data.IterableDataset[Any]):
    """Samples that draw from the global random numbers when they are read."""

    def __iter__(self) -> Any:
        for features, target in loader(4).dataset:
            yield features + torch.rand(1), target


@pytest.mark.parametrize("steps", [3, 4, 6, 8])
@pytest.mark.parametrize("limit", [1.0, 100])
def test_max_steps_with_a_loader_of_unknown_length(steps: int, limit: float, tmp_path: Path) -> None:
    def run(data: Any, folder: str) -> list[Any]:
        ends = Ends()
        callbacks = [ends, ModelCheckpoint(monitor="val", save_top_k=-1, filename="{step}")]
        trainer = quiet(
            max_steps=steps,
            limit_train_batches=limit,
            enable_checkpointing=True,
            callbacks=callbacks,
            default_root_dir=tmp_path / folder,
        )
        trainer.fit(Mean(), data, loader(1))
        return [ends.seen, trainer.current_epoch, trainer.checkpoint_callbacks[0].kept]  # type: ignore[attr-defined]

    known = run(loader(4), "known")
    assert run(torch.utils.data.DataLoader(Stream(), batch_size=4), "unknown") == known


def test_looking_for_a_further_batch_changes_nothing(tmp_path: Path) -> None:
    def run(folder: str, *steps: int) -> dict[str, torch.Tensor]:
        for number in steps:
            trainer = quiet(max_steps=number, enable_checkpointing=True, default_root_dir=tmp_path / folder)
            module, data = Mean(), torch.utils.data.DataLoader(Stream(), batch_size=4)
            trainer.fit(module, data, loader(1), ckpt_path="last")
        return module.state_dict()

    unbroken, parts = run("unbroken", 7), run("parts", 3, 4, 6, 7)
    assert all(torch.equal(unbroken[name], parts[name]) for name in unbroken)


class Draws(Toy):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self._loss(batch) * torch.rand(())


class SavesBefore(Callback):
    """Writes a checkpoint before the first step of its run, and stops the run."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_start(self, trainer: Trainer, module: Any) -> None:
        torch.rand(7)
        trainer.save_checkpoint(self.path)
        trainer.stop("saved")


@pytest.mark.parametrize("steps", [3, 4])
@pytest.mark.parametrize("streams", [False, True])
def test_a_checkpoint_before_the_first_step_of_a_resumed_run_is_exact(
    steps: int, streams: bool, tmp_path: Path
) -> None:
    def run(start: Path | None, **settings: Any) -> tuple[dict[str, torch.Tensor], Path]:
        trainer = quiet(max_epochs=2, enable_checkpointing=True, default_root_dir=tmp_path, **settings)
        module, data = Draws(), loader(4, shuffle=True)
        trainer.fit(module, torch.utils.data.DataLoader(Stream(), 4) if streams else data, ckpt_path=start)
        return module.state_dict(), Path(trainer.checkpoint_callback.last_model_path)  # type: ignore[union-attr]

    unbroken, _ = run(None)
    run(run(None, max_steps=steps)[1], callbacks=SavesBefore(tmp_path / "before"))
    parts, _ = run(tmp_path / "before")
    assert all(torch.equal(unbroken[name], parts[name]) for name in unbroken)


# -- a stop before the least -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("least", "steps"),
    [
        ({"min_steps": 5}, 5),
        ({"min_steps": 2}, 4),
        ({"min_epochs": 0, "min_steps": 2}, 2),
        ({"min_epochs": 2}, 8),
        ({"min_epochs": 1, "min_steps": 6}, 6),
        ({}, 1),
    ],
)
def test_a_stop_is_obeyed_when_the_least_is_done(least: dict[str, int], steps: int) -> None:
    class Once(Callback):
        def on_train_step_end(self, trainer: Trainer, module: Any) -> None:
            if trainer.global_step == 1:
                trainer.stop("enough")

    trainer = quiet(max_epochs=9, callbacks=Once(), **least)
    trainer.fit(Toy(), loader(4))
    assert (trainer.global_step, trainer.stop_reason) == (steps, "enough")


def test_a_stop_that_waits_is_part_of_the_checkpoint(tmp_path: Path) -> None:
    def run(steps: int) -> Trainer:
        trainer = quiet(
            max_steps=steps, max_epochs=9, min_epochs=2, enable_checkpointing=True, default_root_dir=tmp_path
        )
        module = Mean()
        module.at_6 = None
        if steps == 3:
            trainer_stops = type(
                "Stops", (Callback,), {"on_train_step_end": lambda self, trainer, module: trainer.stop("enough")}
            )
            trainer = quiet(
                max_steps=steps,
                min_epochs=2,
                enable_checkpointing=True,
                callbacks=trainer_stops(),
                default_root_dir=tmp_path,
            )
        trainer.fit(module, loader(4), ckpt_path="last")
        return trainer

    run(3)
    trainer = run(100)
    assert (trainer.global_step, trainer.stop_reason) == (8, "enough")
    assert CheckpointDirectory(trainer.run_dir / "checkpoints").info("epoch=1-step=8")["step"] == 8
