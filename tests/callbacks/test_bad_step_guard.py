"""BadStepGuard refuses bad steps on all processes, and a run that skips or goes back is exact."""

from __future__ import annotations

import csv
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.helpers.compare import assert_same_bits
from tests.helpers.strategy_runs import WAYS, run_each, skip_if_missing
from tests.helpers.toy import quiet
from tests.messages import raises_recorded
from tests.tiers import selected
from trainer import Callback, ConfigError, Trainer, TrainModule, seed_everything
from trainer.callbacks import BadStepGuard, CSVLogger, ModelCheckpoint
from trainer.checkpoint.format import read_checkpoint
from trainer.errors import TrainerError

NAMES = ("DDP x2", "FSDP x2", "ZeRO-1 x2", "ZeRO-2 x2", "ZeRO-3 x2")
SAMPLES, GLOBAL_BATCH = 96, 8
BAD = 45
"""The sample that is damaged: in batch 5 of epoch 0, which two processes split."""


class Net(TrainModule):
    def __init__(self) -> None:
        seed_everything(5)
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 1))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = nn.functional.mse_loss(self.net(batch[0]), batch[1])
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def data(bad: str, micro_batch: int = GLOBAL_BATCH, **options: Any) -> DataLoader[Any]:
    features = torch.randn(SAMPLES, 4, generator=torch.Generator().manual_seed(1))
    targets = features.sum(1, keepdim=True)
    if bad == "nan":
        features[BAD, 0] = torch.nan
    elif bad == "inf":
        targets[BAD] = torch.inf
    elif bad == "spike":
        targets[BAD + 48] = 1e4  # later, when there are losses to compare with
    return DataLoader(TensorDataset(features, targets), batch_size=micro_batch, **options)


class Steps(Callback):
    """The step and rate after each step, and the batches seen."""

    def __init__(self) -> None:
        self.steps: list[tuple[int, float]] = []
        self.batches: list[int] = []

    def on_train_step_end(self, trainer: Trainer, module: TrainModule) -> None:
        self.steps.append((trainer.global_step, trainer.optimizers[0].param_groups[0]["lr"]))

    def on_train_batch_end(self, trainer: Trainer, module: TrainModule, outputs: Any, batch: Any, index: int) -> None:
        self.batches.append(index)


@pytest.mark.parametrize("bad", ["nan", "inf", "spike"])
def test_a_skipped_step_changes_nothing_but_the_cursor(bad: str, tmp_path: Path) -> None:
    guard, steps, module = BadStepGuard("skip"), Steps(), Net()
    trainer = quiet(max_epochs=1, callbacks=[guard, steps], default_root_dir=tmp_path)
    trainer.fit(module, data(bad))
    assert trainer.global_step == 11
    assert [step for step, _ in steps.steps] == list(range(1, 12))
    assert [rate for _, rate in steps.steps] == pytest.approx([0.01 * 0.9**k for k in range(1, 12)])
    assert steps.batches == list(range(12))
    assert trainer.progress.samples == SAMPLES
    assert all(torch.isfinite(p).all() for p in module.parameters())
    number = 11 if bad == "spike" else 5
    row = json.loads((trainer.run_dir / "bad_steps.jsonl").read_text())
    assert (row["epoch"], row["batch"], row["step"], row["action"]) == (0, number, number, "skip")
    assert row["samples"] == [[list(range(8 * number, 8 * number + 8))]]
    assert len(guard.bad_steps) == 1
    # The logged values of the epoch are those of the good batches.
    assert torch.isfinite(trainer.callback_metrics["loss_epoch"])
    assert float(trainer.callback_metrics["loss_epoch"]) < 100


def test_the_weights_are_those_of_a_run_without_the_batch() -> None:
    """Without dropout, so that a batch that is not there draws nothing."""
    weights = []
    for bad in ("nan", None):
        module = Net()
        module.net[1] = nn.Identity()
        full = data("nan").dataset
        kept = [k for k in range(SAMPLES) if bad or not 40 <= k < 48]
        loader = DataLoader(torch.utils.data.Subset(full, kept), batch_size=8)
        quiet(max_epochs=1, callbacks=[BadStepGuard("skip")]).fit(module, loader)
        weights.append(module.state_dict())
    assert_same_bits(weights[0], weights[1])


@pytest.mark.parametrize("bad", ["nan", "spike"])
def test_statistics_of_norms_are_those_without_the_batch(bad: str) -> None:
    """The forward of a bad batch changes them before its loss is known."""
    weights = []
    for there in (True, False):
        module, full = Net(), data(bad).dataset
        module.net[1] = nn.BatchNorm1d(8)
        module.net.register_buffer("replaced", torch.zeros(()))
        first = 88 if bad == "spike" else 40
        kept = [k for k in range(SAMPLES) if there or not first <= k < first + 8]
        trainer = quiet(max_epochs=1, callbacks=[BadStepGuard("skip"), Replaces()])
        trainer.fit(module, DataLoader(torch.utils.data.Subset(full, kept), batch_size=8))
        weights.append(module.state_dict())
    assert_same_bits(weights[0], weights[1])


class Replaces(Callback):
    """Put another tensor in the place of a buffer, in each step."""

    def on_before_backward(self, trainer: Trainer, module: TrainModule, loss: torch.Tensor) -> None:
        module.net.replaced = module.net.replaced + 1


def test_raise_names_the_step_and_its_samples_before_the_weights_change(tmp_path: Path) -> None:
    module, steps = Net(), Steps()
    trainer = quiet(max_epochs=1, callbacks=[BadStepGuard(), steps], default_root_dir=tmp_path)
    with raises_recorded(TrainerError):
        trainer.fit(module, data("nan"))
    assert all(torch.isfinite(p).all() for p in module.parameters())
    assert trainer.global_step == 5


@pytest.mark.parametrize("clip", [(None, "norm"), (0.5, "norm"), (0.5, "value")])
def test_gradients_alone_that_are_not_finite(clip: tuple[Any, str]) -> None:
    class Infinite(Net):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            loss = super().training_step(batch, batch_idx)
            if batch_idx == 2:
                loss = loss + (self.net[0].bias.sum() * 0).abs().sqrt()
            return loss

    guard = BadStepGuard("skip")
    trainer = quiet(max_epochs=1, gradient_clip_val=clip[0], gradient_clip_algorithm=clip[1], callbacks=[guard])
    module = Infinite()
    trainer.fit(module, data(""))
    assert [bad.batch for bad in guard.bad_steps] == [2]
    assert "norm of the gradients" in guard.bad_steps[0].reason
    assert all(torch.isfinite(p).all() for p in module.parameters())


def test_accumulation_refuses_the_full_window() -> None:
    guard, steps = BadStepGuard("skip"), Steps()
    trainer = quiet(max_epochs=1, accumulate_grad_batches=2, callbacks=[guard, steps])
    trainer.fit(Net(), data("nan"))
    assert trainer.global_step == 5
    assert [(bad.batch, bad.batches) for bad in guard.bad_steps] == [(4, 2)]
    assert steps.batches == list(range(12))


@pytest.mark.filterwarnings("ignore:Detected call of")  # the first step overflows
def test_overflows_of_the_loss_scale_are_no_bad_steps() -> None:
    guard = BadStepGuard("skip", z_score=None)
    trainer = quiet(max_epochs=2, precision="16-mixed", callbacks=[guard])
    module = Net()
    trainer.fit(module, data("nan"))
    assert trainer.global_step == 22
    assert [bad.batch for bad in guard.bad_steps] == [5, 5]
    assert all(torch.isfinite(p).all() for p in module.parameters())


def test_a_run_of_bad_steps_ends_with_an_error() -> None:
    class Never(Net):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            return super().training_step(batch, batch_idx) * float("nan")

    with raises_recorded(TrainerError):
        quiet(max_epochs=1, callbacks=[BadStepGuard("skip", max_bad_steps=3)]).fit(Never(), data(""))


# -- going back --------------------------------------------------------------------------------------------------------


def _guarded(action: str, folder: Path, way: str = "single", **settings: Any) -> Trainer:
    return WAYS[way].trainer(
        seed=3,
        default_root_dir=folder,
        enable_checkpointing=True,
        logger=[CSVLogger(folder / "log")],
        log_every_n_steps=1,
        num_sanity_val_steps=0,
        callbacks=[BadStepGuard(action), ModelCheckpoint(dirpath=folder / "ck", every_n_train_steps=3, save_top_k=-1)],  # type: ignore[arg-type]
        **settings,
    )


def _rows(folder: Path) -> list[dict[str, str]]:
    with open(folder / "log" / "metrics.csv") as file:
        return list(csv.DictReader(file))


def _run(name: str, folder: str, action: str, bad: str, pieces: tuple[int, ...]) -> dict[str, Any]:
    """Train to 18 steps, in pieces that end at these steps; return what is left of it."""
    way, path = WAYS[name], Path(folder)
    for steps in pieces:
        trainer = _guarded(action, path, name, max_steps=steps)
        module = Net()
        trainer.fit(module, data(bad, way.micro_batch, shuffle=bad == "nan"), ckpt_path="last")
    weights = {key: value.tolist() for key, value in trainer.full_state_dict(True).items()}
    guard = next(one for one in trainer.callbacks if isinstance(one, BadStepGuard))
    return {
        "weights": weights,
        "step": trainer.global_step,
        "samples": trainer.progress.samples,
        "left_out": sorted(guard.left_out),
    }


@pytest.mark.parametrize("bad", ["nan", "spike"])
def test_rewind_goes_on_from_the_checkpoint_without_the_batch(bad: str, tmp_path: Path) -> None:
    result = _run("single", str(tmp_path), "rewind", bad, (18,))
    assert result["step"] == 18
    assert len(result["left_out"]) >= 1
    rows = _rows(tmp_path)
    assert [int(row["step"]) for row in rows if row["loss_step"]] == list(range(1, 19))
    assert all(float(row["loss_step"]) < 100 for row in rows if row["loss_step"])
    state = read_checkpoint(tmp_path / "ck" / "epoch=1-step=18")
    assert state["progress"]["step"] == 18
    assert state["callbacks"]["BadStepGuard"]["left_out"] == [list(one) for one in result["left_out"]]


def test_a_stop_in_a_validation_at_the_batch_that_is_left_out_is_obeyed_there(tmp_path: Path) -> None:
    class Validated(Net):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            pass

        def on_validation_end(self) -> None:
            self.trainer.stop("validated")

    trainer = _guarded("rewind", tmp_path, max_epochs=1, val_check_interval=6)
    trainer.fit(Validated(), data("nan"), data(""))
    assert trainer.global_step == 5


def test_a_checkpoint_of_the_step_gone_back_to_that_was_written_after_it_is_deleted_in_time(tmp_path: Path) -> None:
    folders = [tmp_path / "first", tmp_path / "second"]
    savers = [ModelCheckpoint(folder, every_n_train_steps=3) for folder in folders]
    trainer = quiet(max_epochs=1, callbacks=[*savers, BadStepGuard("rewind")], enable_checkpointing=True)
    trainer.fit(Net(), data("nan"))
    for saver, folder in zip(savers, folders, strict=True):
        assert [path.name for path in folder.iterdir() if path.name.startswith("epoch=")] == ["epoch=0-step=11"]
        assert saver.last_model_path == str(folder / "epoch=0-step=11")


@pytest.mark.parametrize("action", ["skip", "rewind"])
def test_a_resume_in_between_changes_no_bit(action: str, tmp_path: Path) -> None:
    unbroken = _run("single", str(tmp_path / "unbroken"), action, "nan", (18,))
    for pieces in ((4, 18), (5, 8, 18), (9, 13, 18)):
        broken = _run("single", str(tmp_path / str(pieces)), action, "nan", pieces)
        if action == "skip":  # the last step of a piece is a checkpoint more to go back to
            assert broken == unbroken
        assert broken["step"] == 18
        assert broken["samples"] == unbroken["samples"]
        assert broken["left_out"] == unbroken["left_out"]
        assert [row["step"] for row in _rows(tmp_path / str(pieces))] == [
            row["step"] for row in _rows(tmp_path / "unbroken")
        ]


def test_rewind_ends_with_the_bits_of_a_run_that_was_resumed_there(tmp_path: Path) -> None:
    """A second process resumes from the same checkpoint, and is asked to leave out the same batch."""
    unbroken = _run("single", str(tmp_path), "rewind", "nan", (18,))
    ((epoch, batch),) = unbroken["left_out"]
    guard = BadStepGuard("skip")
    guard_state: dict[str, Any] = {}

    class Tell(Callback):
        def on_load_checkpoint(self, trainer: Trainer, module: TrainModule, checkpoint: dict[str, Any]) -> None:
            checkpoint["callbacks"]["BadStepGuard"]["left_out"] = [[epoch, batch]]
            guard_state.update(checkpoint["callbacks"]["BadStepGuard"])

    trainer = quiet(max_steps=18, callbacks=[guard, Tell()])
    module = Net()
    before = max(step for step in range(3, 18, 3) if 12 * epoch + batch >= step)
    trainer.fit(module, data("nan", shuffle=True), ckpt_path=tmp_path / "ck" / f"epoch={epoch}-step={before}")
    assert guard.bad_steps == []
    assert {key: value.tolist() for key, value in module.state_dict().items()} == unbroken["weights"]


def test_without_a_checkpoint_yet_rewind_skips(tmp_path: Path) -> None:
    trainer = quiet(
        max_epochs=1,
        enable_checkpointing=True,
        default_root_dir=tmp_path,
        callbacks=[BadStepGuard("rewind"), ModelCheckpoint(dirpath=tmp_path / "ck")],
    )
    trainer.fit(Net(), data("nan"))
    assert trainer.global_step == 11


class Ends(Callback):
    """The batches for which `is_last_batch` was true, within the step and after it."""

    def __init__(self) -> None:
        self.inside: list[int] = []
        self.after: list[int] = []

    def on_before_backward(self, trainer: Trainer, module: TrainModule, loss: torch.Tensor) -> None:
        if trainer.is_last_batch:
            self.inside.append(trainer.progress.batch)

    def on_train_batch_end(self, trainer: Trainer, module: TrainModule, outputs: Any, batch: Any, index: int) -> None:
        if trainer.is_last_batch:
            self.after.append(index)


@pytest.mark.parametrize("every", [1, 4])
def test_bad_steps_one_after_the_other_leave_out_no_good_one(every: int, tmp_path: Path) -> None:
    """With values that no logger has got yet, so that the run goes back to unflushed ones."""
    loader, ends = data(""), Ends()
    for sample in (40, 48, 57, 80):
        loader.dataset.tensors[0][sample] = torch.nan
    guard = BadStepGuard("rewind")
    trainer = quiet(
        max_epochs=1,
        enable_checkpointing=True,
        default_root_dir=tmp_path,
        callbacks=[guard, ends, ModelCheckpoint(dirpath=tmp_path / "ck", every_n_train_steps=every, save_top_k=-1)],
    )
    trainer.fit(Net(), loader)
    assert [bad.batch for bad in guard.bad_steps] == [5, 6, 7, 10]
    assert {bad.reason for bad in guard.bad_steps} == {"the loss is nan (limit inf) on reader 0"}
    assert trainer.global_step == 8
    assert (ends.inside, ends.after) == ([11], [11])


def test_the_last_batch_is_reported_after_a_skipped_step() -> None:
    ends = Ends()
    quiet(max_epochs=1, callbacks=[BadStepGuard("skip"), ends]).fit(Net(), data("nan"))
    assert (ends.inside, ends.after) == ([11], [11])


class LogsLosses(Callback):
    """As callbacks do: logs the loss that `on_train_batch_end` gets."""

    def on_train_batch_end(self, trainer: Trainer, module: TrainModule, outputs: Any, batch: Any, index: int) -> None:
        trainer.log("seen", outputs["loss"], on_step=True, on_epoch=True)
        trainer.log("seen_in_epoch", outputs["loss"], on_step=False, on_epoch=True, reduce_fx="max")


@pytest.mark.parametrize("action", ["skip", "rewind"])
def test_what_the_last_hook_of_a_bad_step_logs_is_dropped_too(action: str, tmp_path: Path) -> None:
    saves = ModelCheckpoint(every_n_train_steps=2)
    callbacks, saving = [saves, BadStepGuard(action), LogsLosses()], {"enable_checkpointing": True}
    trainer = quiet(max_epochs=1, callbacks=callbacks, default_root_dir=tmp_path, **saving)
    trainer.fit(Net(), data("nan"))
    values = trainer.callback_metrics
    assert float(values["seen_epoch"]) == pytest.approx(float(values["loss_epoch"]), rel=1e-6)
    assert torch.isfinite(values["seen_in_epoch"])


def test_a_run_for_development_saves_nothing_to_go_back_to() -> None:
    quiet(fast_dev_run=2, callbacks=[BadStepGuard("rewind"), ModelCheckpoint()]).fit(Net(), data(""))


# -- wrong inputs ------------------------------------------------------------------------------------------------------


def test_wrong_uses_are_refused_before_the_start() -> None:
    with raises_recorded(ConfigError):
        BadStepGuard("ignore")  # type: ignore[arg-type]
    with raises_recorded(ConfigError):
        BadStepGuard(window=0)
    module = Net()
    module.automatic_optimization = False
    with raises_recorded(ConfigError):
        quiet(callbacks=BadStepGuard("skip")).fit(module, data(""))

    class Closure(Net):
        def configure_optimizers(self) -> Any:
            return torch.optim.LBFGS(self.parameters())

    with raises_recorded(ConfigError):
        quiet(callbacks=BadStepGuard("skip")).fit(Closure(), data(""))


# -- every strategy ----------------------------------------------------------------------------------------------------


def _both(name: str, folder: str) -> dict[str, Any]:
    path = Path(folder) / name.replace(" ", "-")
    results = {
        "skip": _run(name, str(path / "skip"), "skip", "nan", (18,)),
        "skip, resumed": _run(name, str(path / "skip-resumed"), "skip", "nan", (6, 18)),
        "spike": _run(name, str(path / "spike"), "skip", "spike", (18,)),
        "rewind": _run(name, str(path / "rewind"), "rewind", "nan", (18,)),
        "rewind, resumed": _run(name, str(path / "rewind-resumed"), "rewind", "nan", (9, 18)),
    }
    try:
        _guarded("raise", path / "raise", name, max_steps=18).fit(
            Net(), data("nan", WAYS[name].micro_batch, shuffle=True)
        )
    except TrainerError as error:
        results["raise"] = str(error)
    return results


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("guarded")


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest, folder: Path) -> dict[str, list[Any]]:
    return run_each(_both, selected(request, "name"), str(folder))


@pytest.mark.parametrize("name", NAMES)
def test_every_strategy_refuses_the_same_steps(name: str, results: dict[str, list[Any]], folder: Path) -> None:
    skip_if_missing(name)
    first, second = results[name]
    assert first["raise"] == second["raise"]
    assert "the loss is nan (limit inf) on reader" in first["raise"]
    assert {key: first[key] for key in first if key != "raise"} == {k: second[k] for k in second if k != "raise"}
    assert first["skip, resumed"] == first["skip"]
    assert first["rewind, resumed"] == first["rewind"]
    for key in ("skip", "spike", "rewind"):
        assert first[key]["step"] == 18
        flat = torch.cat([torch.tensor(value).flatten() for value in first[key]["weights"].values()])
        assert torch.isfinite(flat).all()
    rows = _rows(folder / name.replace(" ", "-") / "rewind")
    assert [int(row["step"]) for row in rows if row["loss_step"]] == list(range(1, 19))
    notes = folder / name.replace(" ", "-") / "skip"
    (found,) = notes.glob("**/bad_steps.jsonl")
    row = json.loads(found.read_text().splitlines()[0])
    assert len(row["samples"]) == 2
    assert BAD in [index for reader in row["samples"] for batch in reader for index in batch]


@pytest.mark.parametrize("kind", ["damaged", "a link", "a pipe", "no folder"])
def test_a_file_of_bad_steps_that_cannot_be_used_ends_no_training(kind: str, tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("precious\n")

    class Prepare(Callback):
        def on_train_start(self, trainer: Trainer, module: TrainModule) -> None:
            path = trainer.run_dir / "bad_steps.jsonl"
            path.parent.mkdir(parents=True, exist_ok=True)
            if kind == "damaged":
                path.write_bytes(b"{no json\n[1]\n\xff\n")
            elif kind == "a link":
                path.symlink_to(precious)
            elif kind == "a pipe":
                os.mkfifo(path)
            else:
                shutil.rmtree(path.parent)
                path.parent.touch()

    module = Net()
    trainer = quiet(max_epochs=1, callbacks=[BadStepGuard("skip"), Prepare()], default_root_dir=tmp_path / "runs")
    trainer.fit(module, data("nan"))
    assert trainer.global_step == 11
    assert precious.read_text() == "precious\n"
    if kind != "no folder":
        lines = (trainer.run_dir / "bad_steps.jsonl").read_bytes().splitlines()
        assert json.loads(lines[-1])["batch"] == 5
        assert len(lines) == (4 if kind == "damaged" else 1)


def test_a_run_goes_back_past_a_checkpoint_that_could_not_be_written(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"

    class Refuse(Callback):
        """Have the write of step 5 fail in the background."""

        def on_train_step_end(self, trainer: Trainer, module: TrainModule) -> None:
            if trainer.global_step == 5:
                (checkpoint,) = trainer.checkpoint_callbacks
                assert checkpoint.newest_on_disk()
                folder.rename(tmp_path / "away")
                folder.touch()

        def on_train_batch_start(self, trainer: Trainer, module: TrainModule, batch: Any, index: int) -> None:
            if folder.is_file():
                (checkpoint,) = trainer.checkpoint_callbacks
                checkpoint.newest_on_disk()
                folder.unlink()
                (tmp_path / "away").rename(folder)

    saving = ModelCheckpoint(
        folder, every_n_train_steps=1, save_top_k=-1, filename="{step}", async_save=True, on_write_error="warn"
    )
    trainer = quiet(
        max_epochs=1,
        callbacks=[BadStepGuard("rewind"), Refuse(), saving],
        enable_checkpointing=True,
        default_root_dir=tmp_path,
    )
    trainer.fit(Net(), data("nan"))
    assert trainer.global_step == 11
