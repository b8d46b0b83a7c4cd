"""A checkpoint as one file in Lightning's shape: what is in it, who reads it, and how it goes with its folder."""

from __future__ import annotations

import argparse
import dataclasses
import enum
import math
import os
import shutil
from collections import Counter, defaultdict
from datetime import timedelta
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.helpers.processes import fork_python
from tests.helpers.saving import At, fit, steps, there
from tests.helpers.toy import Toy, loader, quiet
from tests.messages import raises_recorded
from trainer import Callback, CheckpointError, ConfigError, DataModule, TrainModule
from trainer.callbacks import ModelCheckpoint
from trainer.checkpoint.format import read_checkpoint
from trainer.checkpoint.manifest import verify_checkpoint
from trainer.cli.checkpoint.from_lightning import convert
from trainer.testing import fault, flip_byte

OPTIONS = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}


class Module(Toy):
    """Has a momentum, a schedule, hyperparameters, and an entry of its own."""

    def __init__(self, lr: float = 0.1) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.loaded: Any = None

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=self.hparams.lr, momentum=0.9)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["mine"] = {"numbers": [1, 2], "tensor": torch.ones(2)}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.loaded = checkpoint["mine"]["numbers"], checkpoint["epoch"], checkpoint["global_step"]


class Noise(Module):
    """Draws random numbers, whose state only a file of this package has."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return super().training_step(batch, batch_idx) * (1 + torch.rand(()))


class Data(DataModule):
    """Has hyperparameters and a state."""

    def __init__(self, size: int = 4) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.position = 0

    def train_dataloader(self) -> Any:
        return loader(5, self.hparams.size, shuffle=True)

    def state_dict(self) -> dict[str, Any]:
        return {"position": 7}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.position = state_dict["position"]


class Counts(Callback):
    """A user's callback with a state."""

    count = 0

    def state_dict(self) -> dict[str, Any]:
        return {"count": 5}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.count = state_dict["count"]


def weights(module: torch.nn.Module) -> list[torch.Tensor]:
    return [*module.state_dict().values()]


def seeded(kind: type[Module]) -> Module:
    torch.manual_seed(1)
    return kind()


def equal(one: torch.nn.Module, other: torch.nn.Module) -> bool:
    return all(map(torch.equal, weights(one), weights(other)))


def test_the_file_has_lightnings_entries_and_torch_reads_it_as_weights_alone() -> None:
    trainer = quiet(max_epochs=2, callbacks=[Counts()])
    trainer.fit(module := Module(), datamodule=Data())
    trainer.save_checkpoint("one.ckpt", single_file=True)
    assert sorted(os.listdir()) == ["one.ckpt", "runs"]
    read = torch.load("one.ckpt", weights_only=True)
    assert (read["epoch"], read["global_step"], read["hyper_parameters"]) == (2, 10, {"lr": 0.1})
    assert (read["datamodule_hyper_parameters"], read["Data"]) == ({"size": 4}, {"position": 7})
    assert read["mine"]["numbers"] == [1, 2]
    assert read["callbacks"] == {"Counts": {"count": 5}}
    assert [*read["optimizer_states"][0]["state"]] == [0, 1]
    assert read["optimizer_states"][0]["param_groups"][0]["params"] == [0, 1]
    assert read["lr_schedulers"][0]["last_epoch"] == 2
    assert all(map(torch.equal, read["state_dict"].values(), weights(module)))
    os.remove("one.ckpt")


def test_a_training_continues_from_the_file_alone_with_the_same_bits() -> None:
    whole, first, second = seeded(Noise), seeded(Noise), Noise()
    quiet(max_steps=12).fit(whole, datamodule=Data())
    save = At(step7=lambda trainer: trainer.save_checkpoint("one.ckpt", single_file=True))
    quiet(max_steps=7, callbacks=[save]).fit(first, datamodule=Data())  # inside the second epoch
    data = Data()
    trainer = quiet(max_steps=12)
    trainer.fit(second, datamodule=data, ckpt_path="one.ckpt")
    assert equal(second, whole)
    assert (data.position, second.loaded) == (7, ([1, 2], 1, 7))
    assert trainer.ckpt_path == str(Path("one.ckpt").absolute())
    assert [name for name in os.listdir() if name != "runs"] == ["one.ckpt"]


class Color(enum.Enum):
    RED = 1
    BLUE = (1, 2)


@dataclasses.dataclass
class Settings:
    color: Color = Color.RED
    place: Path = Path("a")


def test_hyperparameters_come_back_from_the_file_alone_with_their_classes() -> None:
    class Described(Toy):
        def __init__(self, **values: Any) -> None:
            super().__init__()
            self.save_hyperparameters()

    values = {"settings": Settings(Color.BLUE), "place": Path("b"), "pair": (1, (2, Path("c"))), "dtype": torch.float16}
    values |= {"space": argparse.Namespace(color=Color.RED), "nested": {"a": {"b": [Color.RED]}}}
    trainer = quiet(max_steps=1)
    trainer.fit(Described(**values), loader())
    trainer.save_checkpoint("one.ckpt", single_file=True)
    torch.load("one.ckpt", weights_only=True)
    assert Described.load_from_checkpoint("one.ckpt").hparams == values


def test_what_a_folder_can_have_comes_back_from_the_file_alone() -> None:
    kept: dict[str, Any] = {"array": np.arange(3.0), "number": np.float32(0.5), "pair": (1, {2: "b"}), "nothing": None}
    kept |= {"counts": Counter("aab"), "numbers": defaultdict(int, a=1), "lists": defaultdict(list), "odd": math.inf}

    class Adds(Toy):
        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            checkpoint["kept"] = kept

        def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            assert np.array_equal(checkpoint["kept"].pop("array"), kept["array"])
            assert checkpoint["kept"] == {name: value for name, value in kept.items() if name != "array"}
            kinds = [dict if type(value) is defaultdict else type(value) for value in kept.values()]
            assert [*map(type, checkpoint["kept"].values())] == kinds[1:]
            self.checked = True

    trainer = quiet(max_steps=1, callbacks=[Counts()])
    trainer.fit(Adds(), loader())
    trainer.save_checkpoint("one.ckpt", single_file=True)
    assert Adds.load_from_checkpoint("one.ckpt").checked


def test_values_that_only_hold_what_they_are_given_are_read() -> None:
    values = {"a": timedelta(3), "b": {1, 2}, "c": frozenset([1]), "d": range(3), "e": torch.float16, "f": Path("a")}
    torch.save({"state_dict": Toy().state_dict(), **values}, "one.ckpt")
    assert quiet().test(Toy(), loader(), ckpt_path="one.ckpt")


def test_a_file_is_as_large_as_its_folder() -> None:
    class Large(Toy):
        def __init__(self) -> None:
            super().__init__()
            self.more, self.tied = torch.nn.Linear(500, 500), torch.nn.Linear(500, 500)
            self.tied.weight = self.more.weight

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters())

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            return super().training_step(batch, batch_idx) + self.tied(self.more(torch.ones(2, 500))).mean()

    callback = ModelCheckpoint("kept", "model", single_file=True)
    fit([callback], module=Large())
    folder = sum(file.stat().st_size for file in os.scandir("kept/model"))
    assert os.path.getsize(callback.best_model_path) < folder * 1.1
    shutil.copy(callback.best_model_path, "copy.ckpt")
    loaded = Large.load_from_checkpoint("copy.ckpt")
    assert loaded.tied.weight is loaded.more.weight


def test_evaluations_and_load_from_checkpoint_read_the_file() -> None:
    trainer = quiet(max_epochs=1)
    trainer.fit(module := Module(0.2), datamodule=Data(2))
    trainer.save_checkpoint("one.ckpt", single_file=True)
    assert equal(Module.load_from_checkpoint("one.ckpt"), module)
    assert Module.load_from_checkpoint("one.ckpt").hparams == {"lr": 0.2}
    assert (Data.load_from_checkpoint("one.ckpt").position, Data.load_from_checkpoint("one.ckpt").hparams.size) == (
        7,
        2,
    )
    expected = quiet().validate(module, loader())
    assert quiet().validate(Module(), loader(), ckpt_path="one.ckpt") == expected
    assert quiet().test(Module(), loader(), ckpt_path="one.ckpt") == expected
    assert len(quiet().predict(Module(), loader(), ckpt_path="one.ckpt")) == 8


def test_a_file_in_memory_is_read() -> None:
    trainer = quiet(max_epochs=1)
    trainer.fit(module := Module(0.2), datamodule=Data(2))
    trainer.save_checkpoint("one.ckpt", single_file=True)
    content = torch.load("one.ckpt", weights_only=True)
    content["hyper_parameters"]["lr"] = 0.4
    torch.save(content, memory := BytesIO())
    memory.seek(0)
    loaded = Module.load_from_checkpoint(memory)
    assert equal(loaded, module)
    assert loaded.hparams == {"lr": 0.4}
    with open("one.ckpt", "rb") as file:
        assert equal(Module.load_from_checkpoint(file), module)


def test_a_changed_file_is_read_and_not_the_folder_beside_it() -> None:
    callback = ModelCheckpoint("kept", single_file=True)
    fit([callback], module=Module())
    changed = torch.load(callback.best_model_path, weights_only=True)
    changed["state_dict"]["layer.bias"] += 1
    changed["hyper_parameters"]["lr"] = 0.3
    torch.save(changed, callback.best_model_path)
    module = Module.load_from_checkpoint(callback.best_model_path)
    assert torch.equal(module.layer.bias, changed["state_dict"]["layer.bias"])
    assert module.hparams.lr == 0.3


def test_files_and_folders_are_kept_and_deleted_together() -> None:
    callback = steps(dirpath="kept", single_file=True, monitor="train_loss", save_top_k=2)
    fit([callback], 6)
    names = there("kept")
    assert sorted(path.name for path in Path("kept").glob("*.ckpt")) == [f"{name}.ckpt" for name in names]
    assert callback.best_model_path == str(Path("kept").absolute() / f"{callback.best}.ckpt")
    assert callback.last_model_path == str(Path("kept").absolute() / f"{callback.last}.ckpt")
    assert next(iter(callback.best_k_models)) == callback.best_model_path
    assert all(verify_checkpoint(Path("kept") / name) == [] for name in names)
    shutil.copy(callback.best_model_path, "copy.ckpt")
    assert equal(Toy.load_from_checkpoint("copy.ckpt"), Toy.load_from_checkpoint(f"kept/{callback.best}"))


def test_a_file_that_the_user_deletes_leaves_the_folder_to_the_retention() -> None:
    callback = steps(dirpath="kept", single_file=True, save_top_k=1)
    fit([callback, At(step3=lambda trainer: os.remove(callback.last_model_path))], 5)
    assert sorted(os.listdir("kept")) == ["last.json", "step=5", "step=5.ckpt"]
    os.remove(callback.last_model_path)
    assert quiet().validate(Toy(), loader(), ckpt_path="kept/step=5")


@pytest.mark.parametrize("save_last", [True, "link", None])
def test_last_is_a_link_to_the_newest_file_where_it_was_asked_for(save_last: Any) -> None:
    fit([steps(dirpath="kept", single_file=True, save_last=save_last)], 3)
    assert os.path.islink("kept/last.ckpt") == bool(save_last)
    if save_last:
        assert torch.load("kept/last.ckpt", weights_only=True)["global_step"] == 3
        assert quiet().validate(Toy(), loader(), ckpt_path="kept/last.ckpt")


def test_a_file_that_is_called_last_stays() -> None:
    callback = ModelCheckpoint("kept", "last", save_last=True, single_file=True)
    fit([callback])
    assert not os.path.islink("kept/last.ckpt")
    assert torch.load("kept/last.ckpt", weights_only=True)["global_step"] == 6


def test_a_resumed_run_writes_the_files_that_are_missing(caplog: pytest.LogCaptureFixture) -> None:
    options = {"dirpath": "kept", "save_top_k": -1, "filename": "{step}"}
    fit([steps(**options)], 3)
    flip_byte("kept/step=1/checkpoint.json", 20)
    trainer = quiet(max_epochs=2, callbacks=[steps(**options, single_file=True)], enable_checkpointing=True)
    trainer.fit(Toy(), loader(3), ckpt_path="last")
    assert [path.name for path in sorted(Path("kept").glob("*.ckpt"))] == [f"step={n}.ckpt" for n in range(2, 7)]
    assert "step=1 was written, and" in caplog.text


def test_a_file_of_another_is_not_replaced() -> None:
    Path("kept").mkdir()
    Path("kept/step=1.ckpt").write_text("mine")
    callback = steps(dirpath="kept", single_file=True, save_top_k=-1)
    fit([callback], 2)
    assert Path("kept/step=1.ckpt").read_text() == "mine"
    assert callback.last_model_path.endswith("step=2.ckpt")
    assert "step=1-v1" in there("kept")


def test_resuming_and_testing_take_the_folder_of_an_unchanged_file(monkeypatch: pytest.MonkeyPatch) -> None:
    callback = steps(dirpath="kept", single_file=True, save_top_k=-1, filename="{step}")
    fit([callback], 5)
    monkeypatch.setattr("trainer.checkpoint.lightning_file.import_file", None)  # no other process is needed
    trainer = quiet(max_steps=4)
    trainer.fit(Toy(), loader(5), ckpt_path="kept/step=3.ckpt")
    assert trainer.ckpt_path == str(Path("kept/step=3.ckpt").absolute())
    callbacks = [ModelCheckpoint("other", single_file=True)]
    trainer = quiet(max_steps=6, callbacks=callbacks, enable_checkpointing=True)
    trainer.fit(Toy(), loader(5), ckpt_path=callback.best_model_path)
    assert trainer.test(dataloaders=loader())


def test_a_damaged_file_is_named() -> None:
    trainer = quiet(max_epochs=1)
    trainer.fit(Toy(), loader())
    trainer.save_checkpoint("one.ckpt", single_file=True)
    good = Path("one.ckpt").read_bytes()
    place, refused = good.index(trainer.module.layer.weight.detach().numpy().tobytes()), 0
    for at in (place, *range(3, len(good), len(good) // 60)):
        Path("one.ckpt").write_bytes(good)
        flip_byte(Path("one.ckpt"), at)
        try:
            convert("one.ckpt", "out", force=True)
            assert all(map(torch.equal, read_checkpoint("out")["model"].values(), weights(trainer.module)))
        except CheckpointError:  # some bytes mean nothing
            refused += 1
    assert refused > 20
    Path("one.ckpt").write_bytes(good)
    flip_byte(Path("one.ckpt"), place)
    with pytest.raises(CheckpointError, match=r"one\.ckpt cannot be read"):
        Toy.load_from_checkpoint("one.ckpt")
    Path("one.ckpt").write_bytes(good[:-100])
    with pytest.raises(CheckpointError, match=r"one\.ckpt cannot be read"):
        quiet().test(Toy(), loader(), ckpt_path="one.ckpt")


class Touch:
    """Makes a folder when it is unpickled."""

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, ("ran",)


def test_a_hostile_file_is_refused_and_runs_nothing() -> None:
    torch.save({"state_dict": Toy().state_dict(), "mine": Touch()}, "one.ckpt")
    for read in (
        lambda: Toy.load_from_checkpoint("one.ckpt"),
        lambda: quiet(max_epochs=1).fit(Toy(), loader(), ckpt_path="one.ckpt"),
        lambda: quiet().test(Toy(), loader(), ckpt_path="one.ckpt"),
    ):
        with pytest.raises(CheckpointError, match="would run code"):
            read()
    assert "ran" not in os.listdir()


@pytest.mark.parametrize("entries", [{"info": 3}, {"info": {}, "entries": {"rng": {"data": {"$tensor": "a"}}}}, []])
def test_a_file_whose_own_entries_are_broken_is_refused(entries: Any) -> None:
    torch.save({"state_dict": Toy().state_dict(), "trainer_checkpoint": entries}, "one.ckpt")
    with pytest.raises(CheckpointError, match=r"one\.ckpt cannot be read"):
        Toy.load_from_checkpoint("one.ckpt")


SCRIPT = """
import sys
from tests.checkpoint.test_lightning_file import train
train(sys.argv[1])
"""


def train(folder: str, ckpt_path: str | None = None) -> TrainModule:
    """Train a few steps with a file at each, under one name or several."""
    name = "{step}" if folder == "several" else "model"
    callback = ModelCheckpoint(folder, name, every_n_train_steps=1, save_top_k=1, single_file=True)
    trainer = quiet(max_steps=4, callbacks=[callback], enable_checkpointing=True, default_root_dir=f"{folder}-runs")
    trainer.fit(module := seeded(Noise), datamodule=Data(), ckpt_path=ckpt_path)
    return module


@pytest.mark.parametrize("folder", ["several", "one"])
@pytest.mark.parametrize("count", [1, 2, 3, 5])
@pytest.mark.parametrize("point", ["after_file", "after_rename", "before_pointer", "after_pointer", "in_removal"])
def test_a_kill_leaves_a_file_and_a_folder_that_fit(folder: str, point: str, count: int) -> None:
    count = {"after_file": 5 + count * 3}.get(point, count)
    fork_python("-c", SCRIPT, folder, env=fault(point, count=count)).wait()
    for file in Path(folder).glob("*.ckpt"):  # whatever there is can be read
        read = torch.load(file, weights_only=True)
        module = Toy.load_from_checkpoint(file)
        assert all(map(torch.equal, read["state_dict"].values(), weights(module)))
    whole = train("whole")
    assert equal(train(folder, "last"), whole)
    names = there(folder)
    assert sorted(os.listdir(folder)) == sorted([*names, *(f"{name}.ckpt" for name in names), "last.json"])
    for name in names:
        read = torch.load(f"{folder}/{name}.ckpt", weights_only=True)
        assert read["global_step"] == read_checkpoint(f"{folder}/{name}")["progress"]["step"]


def test_a_background_write_makes_the_file_too() -> None:
    callback = steps(dirpath="kept", single_file=True, async_save=True, save_top_k=1)
    fit([callback], 4)
    assert sorted(os.listdir("kept")) == ["last.json", "step=4", "step=4.ckpt"]
    assert torch.load(callback.best_model_path, weights_only=True)["global_step"] == 4


def test_a_file_that_cannot_be_written_ends_the_run_or_warns(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", full)
    with raises_recorded(CheckpointError):
        fit([steps(dirpath="kept", single_file=True)])
    assert there("kept") == ["step=1"]
    trainer = quiet(max_steps=1)
    trainer.fit(Toy(), loader())
    with raises_recorded(CheckpointError):
        trainer.save_checkpoint("one.ckpt", single_file=True)
    assert not Path("one.ckpt").exists()


def test_a_url_is_refused_for_a_file() -> None:
    with raises_recorded(ConfigError):
        ModelCheckpoint("memory://bucket/run", single_file=True)
    trainer = quiet(max_steps=1)
    trainer.fit(Toy(), loader())
    with raises_recorded(ConfigError):
        trainer.save_checkpoint("memory://bucket/one.ckpt", single_file=True)


def test_a_process_that_runs_as_lightning_has_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAINER_AS_LIGHTNING", "1")
    trainer = quiet(max_epochs=1, enable_checkpointing=True)
    trainer.fit(module := Toy(), loader())
    best = trainer.checkpoint_callback.best_model_path
    assert torch.load(best)["state_dict"].keys() == module.state_dict().keys()
    shutil.copy(best, "copy.ckpt")
    with open(best, "rb") as file:
        assert file.read() == Path("copy.ckpt").read_bytes()
    assert trainer.test(dataloaders=loader()) == quiet().test(Toy(), loader(), ckpt_path="copy.ckpt")
    trainer.save_checkpoint("one")
    os.remove("one")
    trainer.save_checkpoint("folder", single_file=False)
    assert os.path.isdir("folder")


def test_where_it_has_folders_alone_the_end_names_the_argument(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("TRAINER_AS_LIGHTNING", "1")
    callback = ModelCheckpoint("memory://bucket/alone")
    trainer = fit([callback])
    assert callback.best_model_path.startswith("memory://bucket/alone/")
    assert "ModelCheckpoint(single_file=True)" in caplog.text
    trainer.save_checkpoint("memory://bucket/saved")
    assert Toy.load_from_checkpoint("memory://bucket/saved")


def test_a_dry_run_writes_no_file() -> None:
    callback = ModelCheckpoint("kept", single_file=True)
    quiet(fast_dev_run=True, callbacks=[callback], enable_checkpointing=True).fit(Toy(), loader())
    assert (callback.best_model_path, os.path.exists("kept")) == ("", False)


def test_a_hook_that_changes_the_weights_changes_them_in_the_file() -> None:
    class Renames(Toy):
        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            checkpoint["state_dict"] = {f"net.{name}": value for name, value in checkpoint["state_dict"].items()}

        def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            weights = checkpoint["state_dict"].items()
            checkpoint["state_dict"] = {name.removeprefix("net."): value for name, value in weights}

    callback = ModelCheckpoint("kept", single_file=True)
    fit([callback], module=(module := Renames()))
    shutil.copy(callback.best_model_path, "copy.ckpt")
    assert [*torch.load("copy.ckpt", weights_only=True)["state_dict"]] == ["net.layer.weight", "net.layer.bias"]
    assert equal(Renames.load_from_checkpoint("copy.ckpt"), module)
