"""A new process has the callbacks' states outside of training, too; that none can be written is known early."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.helpers.processes import run_distributed
from tests.helpers.toy import Toy, loader, quiet
from tests.messages import raises_recorded
from trainer import Callback, CheckpointError, DataModule
from trainer.callbacks import EarlyStopping, ModelCheckpoint
from trainer.model.weights import load_weights


class Counts(Callback):
    """A callback with a state that an evaluation uses."""

    def __init__(self) -> None:
        self.seen = 0
        self.at: dict[str, int] = {}

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen = state["seen"]

    def on_train_step_end(self, trainer: Any, module: Any) -> None:
        self.seen += 1

    def on_validation_start(self, trainer: Any, module: Any) -> None:
        self.at["validate"] = self.seen

    def on_test_start(self, trainer: Any, module: Any) -> None:
        self.at["test"] = self.seen

    def on_predict_start(self, trainer: Any, module: Any) -> None:
        self.at["predict"] = self.seen


class Data(DataModule):
    words = 0

    def train_dataloader(self) -> Any:
        return loader(4)

    val_dataloader = test_dataloader = predict_dataloader = train_dataloader

    def state_dict(self) -> dict[str, Any]:
        return {"words": 7}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.words = state["words"]


def trained(folder: Path, **options: Any) -> str:
    trainer = quiet(max_epochs=1, callbacks=[Counts(), EarlyStopping("val_loss")], default_root_dir=folder, **options)
    trainer.fit(Toy(), datamodule=Data())
    trainer.save_checkpoint(folder / "saved")
    return str(folder / "saved")


@pytest.mark.parametrize("stage", ["validate", "test", "predict"])
def test_an_evaluation_gives_callbacks_and_data_their_state(stage: str, tmp_path: Path) -> None:
    path, counts, data = trained(tmp_path), Counts(), Data()
    getattr(quiet(callbacks=[counts]), stage)(Toy(), datamodule=data, ckpt_path=path)
    assert (counts.at[stage], data.words) == (4, 7)


def both(folder: Path) -> list[int]:
    counts = Counts()
    quiet(callbacks=[counts], devices=2, strategy="fsdp").test(Toy(), loader(4), ckpt_path=folder / "saved")
    return [counts.at["test"]]


def test_on_two_processes_with_shards(tmp_path: Path) -> None:
    trained(tmp_path)
    assert run_distributed(both, 2, tmp_path) == [[4], [4]]


def test_the_list_of_checkpoints_stays_that_of_the_training(tmp_path: Path) -> None:
    saves = ModelCheckpoint(every_n_train_steps=2, save_top_k=-1)
    counts = Counts()
    trainer = quiet(max_steps=8, callbacks=[counts, saves], enable_checkpointing=True, default_root_dir=tmp_path)
    trainer.fit(Toy(), loader(8))
    first, last = min(saves.kept), saves.last_model_path
    trainer.test(Toy(), loader(1), ckpt_path=Path(last).parent / first)
    assert counts.at["test"] == 2
    assert saves.last_model_path == last


def test_a_state_that_does_not_fit_is_reported_by_the_name_of_its_callback(tmp_path: Path) -> None:
    path = trained(tmp_path)

    class Other(Counts):
        state_key = "Counts"

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.seen = state["another"]

    with raises_recorded(CheckpointError):
        quiet(callbacks=[Other()]).test(Toy(), loader(1), ckpt_path=path)


class Adapter(Toy):
    """A module that saves a part of its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.base = torch.nn.Linear(4, 4)
        self.base.requires_grad_(False)
        self.base.weight.data.fill_(0.25)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["model"] = {name: value for name, value in checkpoint["model"].items() if "base" not in name}
        checkpoint["vocabulary"] = ["a", "b"]


class Mends(Adapter):
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.vocabulary = checkpoint["vocabulary"]
        checkpoint["model"] = {**self.state_dict(), **checkpoint["model"]}


class Lenient(Adapter):
    def __init__(self) -> None:
        super().__init__()
        self.strict_loading = False  # of the object, as in Lightning


def test_load_from_checkpoint_calls_the_hook_of_the_module(tmp_path: Path) -> None:
    trainer = quiet(max_steps=1, default_root_dir=tmp_path)
    trainer.fit(Adapter(), loader(1))
    trainer.save_checkpoint(tmp_path / "saved")
    weights = trainer.module.layer.weight
    loaded = Mends.load_from_checkpoint(tmp_path / "saved")
    assert (loaded.vocabulary, loaded.layer.weight.equal(weights)) == (["a", "b"], True)
    assert loaded.base.weight.eq(0.25).all()
    assert Lenient.load_from_checkpoint(tmp_path / "saved").layer.weight.equal(weights)
    with raises_recorded(CheckpointError):
        Adapter.load_from_checkpoint(tmp_path / "saved")


@pytest.mark.parametrize("kind", [Mends, Lenient])
@pytest.mark.parametrize("stage", ["fit", "test"])
def test_a_part_of_the_weights_is_resumed_and_tested(kind: Any, stage: str, tmp_path: Path) -> None:
    trainer = quiet(max_steps=1, default_root_dir=tmp_path)
    trainer.fit(kind(), loader(2))
    trainer.save_checkpoint(tmp_path / "saved")
    module = kind()
    getattr(quiet(max_steps=1), stage)(module, loader(2), ckpt_path=tmp_path / "saved")
    assert module.layer.weight.equal(trainer.module.layer.weight)
    with raises_recorded(CheckpointError):
        getattr(quiet(max_steps=1), stage)(Adapter(), loader(2), ckpt_path=tmp_path / "saved")


class Grown(Toy):
    """A module with one trained layer more than the checkpoint's."""

    strict_loading = False

    def __init__(self) -> None:
        super().__init__()
        self.added = torch.nn.Linear(4, 4)


def test_a_resumed_run_with_another_trained_layer_is_refused_with_what_to_use(tmp_path: Path) -> None:
    trainer = quiet(max_steps=1, default_root_dir=tmp_path)
    trainer.fit(Toy(), loader(2))
    trainer.save_checkpoint(tmp_path / "saved")
    with raises_recorded(CheckpointError):
        quiet(max_steps=2).fit(Grown(), loader(2), ckpt_path=tmp_path / "saved")
    module = Grown.load_from_checkpoint(tmp_path / "saved")
    assert module.layer.weight.equal(trainer.module.layer.weight)
    quiet(max_steps=1).fit(module, loader(2))


class Odd(torch.optim.SGD):
    """An optimizer whose state has something that a checkpoint cannot hold."""

    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["seen"] = {len}


class WithOdd(Toy):
    def configure_optimizers(self) -> Any:
        return Odd(self.parameters(), lr=0.1)


def test_a_state_that_no_checkpoint_can_hold_is_reported_after_the_first_step(tmp_path: Path) -> None:
    counts = Counts()
    trainer = quiet(max_epochs=1, callbacks=[counts], enable_checkpointing=True, default_root_dir=tmp_path)
    with raises_recorded(CheckpointError):
        trainer.fit(WithOdd(), loader(8))
    assert trainer.global_step == 1
    quiet(max_epochs=1, default_root_dir=tmp_path).fit(WithOdd(), loader(8))  # without checkpoints it trains


def test_states_are_looked_at_until_they_are_there_and_no_longer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from trainer.strategy import Strategy

    calls: list[int] = []
    real = Strategy.optimizer_state
    monkeypatch.setattr(Strategy, "optimizer_state", lambda *args: calls.append(1) or real(*args))  # type: ignore[func-returns-value]
    saves = ModelCheckpoint(every_n_train_steps=30)
    options: dict[str, Any] = {"enable_checkpointing": True, "callbacks": [saves], "default_root_dir": tmp_path}
    quiet(max_steps=29, **options).fit(Toy(), loader(30))  # SGD without a state
    assert len(calls) == 1 + 1  # and the last checkpoint


def test_states_of_bitsandbytes_are_stored(tmp_path: Path) -> None:
    bitsandbytes = pytest.importorskip("bitsandbytes")

    class Small(Toy):
        def __init__(self) -> None:
            super().__init__()
            self.wide = torch.nn.Linear(128, 64)

        def configure_optimizers(self) -> Any:
            return bitsandbytes.optim.AdamW8bit(self.parameters(), lr=0.1, min_8bit_size=1024)

        def _loss(self, batch: Any) -> torch.Tensor:
            return super()._loss(batch) + self.wide(batch[0].repeat(1, 32)).square().mean()

    def fit(steps: int, path: Path | None = None) -> Any:
        torch.manual_seed(0)
        trainer = quiet(max_steps=steps, default_root_dir=tmp_path)
        trainer.fit(Small(), loader(8), ckpt_path=path)
        return trainer

    unbroken = fit(4).full_state_dict()
    fit(2).save_checkpoint(tmp_path / "saved")
    resumed = fit(4, tmp_path / "saved").full_state_dict()
    assert all(value.equal(unbroken[name]) for name, value in resumed.items())


def test_weights_that_do_not_fit_are_reported_in_words_that_a_terminal_shows() -> None:
    with pytest.raises(CheckpointError) as reported:
        load_weights(nn.Linear(1, 1), {})
    assert '    Missing key(s) in state_dict: "weight", "bias"' in str(reported.value)
