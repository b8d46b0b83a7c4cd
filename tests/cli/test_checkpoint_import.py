"""`trainer checkpoint import` takes weights and hyperparameters from Lightning's files, and runs no code of theirs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

import trainer as trainer_package
from tests.helpers.project import Command, refused
from tests.messages import raises_recorded
from trainer import CheckpointError, TrainModule
from trainer.checkpoint.format import read_checkpoint
from trainer.checkpoint.manifest import read_manifest
from trainer.cli.checkpoint.from_lightning import convert


class Net(TrainModule):
    def __init__(self, width: int = 1) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layer = torch.nn.Linear(width, 2)


class Touch:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (str(self.path),)


def test_a_file_of_lightnings_is_taken(command: Command) -> None:
    pl = pytest.importorskip("pytorch_lightning")

    class Old(pl.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self, width: int) -> None:
            super().__init__()
            self.save_hyperparameters()
            self.layer = torch.nn.Linear(width, 2)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters())

        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
            return self.layer(batch).sum()

    old = Old(3)
    trainer = pl.Trainer(
        max_epochs=1, accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False
    )
    with pytest.warns():  # of workers, and steps to log
        trainer.fit(old, torch.utils.data.DataLoader(torch.ones(4, 3)))
    trainer.save_checkpoint("old.ckpt")
    code, out, err = command("checkpoint", "import", "old.ckpt", "new")
    assert (code, err) == (0, "")
    assert "new: 2 weights and 1 hyperparameters, of epoch 1, step 4" in out
    assert "fit(ckpt_path='new'): with the states of all optimizers (1) and schedulers (0)" in out
    new = Net.load_from_checkpoint("new")
    assert new.hparams.width == 3
    assert torch.equal(new.layer.weight, old.layer.weight)
    with raises_recorded(CheckpointError):
        convert("old.ckpt", "new", force=False)
    convert("old.ckpt", "new", force=True)


def test_what_is_taken_of_a_file_and_what_is_left_is_reported() -> None:
    of_module: dict[str, Any] = {
        "folder": Path("a/b"),
        "rate": numpy.float32(0.5),
        "shape": torch.Size([1, 2]),
        "kind": torch.float32,
    }
    of_module["raw"] = b"abc"
    entries = {
        "state_dict": torch.nn.Linear(2, 1).state_dict(),
        "hyper_parameters": of_module,
        "datamodule_hyper_parameters": {"batch_size": 4},
        "Data": {"position": 3},
        "ema_state_dict": {"weight": torch.ones(1)},
        "object": b"abc",
        "nothing": [],
        "callbacks": {},
        "loops": {},
        "pytorch-lightning_version": "2.6",
    }
    torch.save(entries, "old.ckpt")
    said = convert("old.ckpt", "new", force=False)
    assert said.endswith("not taken: hyperparameter raw (a bytes), object")
    state = read_checkpoint("new")
    assert state["added"]["Data"] == {"position": 3}
    assert [*state["added"]] == ["Data", "ema_state_dict", "nothing"]
    stored = state["hyperparameters"]
    of_module = {"folder": "a/b", "rate": 0.5, "shape": (1, 2), "kind": "float32"}
    of_names = {"folder": "path", "shape": "Size", "kind": "dtype"}
    of_names["raw"] = "left out"
    kinds = {"module": {name: [kind, None, None] for name, kind in of_names.items()}, "data": {}}
    assert stored == {"module": of_module, "data": {"batch_size": 4}, "kinds": kinds}


def test_what_would_run_code_is_refused_and_does_not_run(command: Command, tmp_path: Path) -> None:
    torch.save({"state_dict": {"a": torch.ones(1)}, "hyper_parameters": Touch(tmp_path / "ran")}, "bad.ckpt")
    refused(command, "checkpoint", "import", "bad.ckpt", "new")
    assert not (tmp_path / "ran").exists()
    assert not (tmp_path / "new").exists()


def test_other_files_are_refused_in_words(command: Command) -> None:
    Path("empty.ckpt").write_bytes(b"")
    Path("text.ckpt").write_text("text")
    torch.save([1], "list.ckpt")
    torch.save({"model": {}}, "other.ckpt")
    for name in ("empty", "text", "list", "other"):
        with raises_recorded(CheckpointError):
            convert(f"{name}.ckpt", "new", force=False)
    code, _, err = command("checkpoint", "import", "nowhere.ckpt", "new")
    assert (code, "nowhere.ckpt is not a file" in err) == (1, True)


def module_of(library: Any, kind: str) -> Any:
    class Net(library.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1))

        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
            return self.layers(batch).square().mean()

        def configure_optimizers(self) -> Any:
            optimizer = getattr(torch.optim, kind)(self.parameters(), lr=0.01)
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
            return [optimizer], [{"scheduler": scheduler, "interval": "step"}]

    return Net()


@pytest.mark.parametrize("kind", ["AdamW", "Adam", "SGD", "RMSprop"])
@pytest.mark.filterwarnings("ignore")
def test_a_training_of_lightnings_goes_on_here_with_the_same_bits(kind: str, tmp_path: Path) -> None:
    pl = pytest.importorskip("pytorch_lightning")
    rows = torch.randn(12, 3, generator=torch.Generator().manual_seed(1))
    weights = []
    for library in (pl, None):
        options = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "accelerator": "cpu"}
        if library is not None:
            torch.manual_seed(3)
            module = module_of(library, kind)
            for epochs in (1, 3):
                trainer = library.Trainer(max_epochs=epochs, enable_model_summary=False, **options)
                ckpt_path = tmp_path / "1.ckpt" if epochs > 1 else None
                trainer.fit(module, torch.utils.data.DataLoader(rows, 4), ckpt_path=ckpt_path)
                trainer.save_checkpoint(tmp_path / f"{epochs}.ckpt")
        else:
            said = convert(str(tmp_path / "1.ckpt"), str(tmp_path / "imported"), force=False)
            assert "with the states of all optimizers (1) and schedulers (1)" in said
            module = module_of(trainer_package, kind)
            ours = trainer_package.Trainer(max_epochs=3, enable_model_summary=False, **options)
            ours.fit(module, torch.utils.data.DataLoader(rows, 4), ckpt_path=tmp_path / "imported")
            assert ours.global_step == 9
        weights.append(module.state_dict())
    assert all(torch.equal(value, weights[1][name]) for name, value in weights[0].items())


def seen_module(base: Any, groups: str = "one") -> Any:
    """Return a module that notes the batches of each epoch, with weights of one shape in another order."""

    class Net(base.LightningModule if hasattr(base, "LightningModule") else base.TrainModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(1)
            self.a, self.b, self.c = (torch.nn.Linear(3, 3) for _ in range(3))
            self.seen: list[tuple[int, int]] = []

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.seen.append((self.trainer.current_epoch, int(batch[0][0]) // 4))
            return self.c(self.b(self.a(batch[1]).tanh()).tanh()).square().mean()

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("v", self.c(batch[1]).square().mean())

        def configure_optimizers(self) -> Any:
            b, a, c = ([*one.parameters()] for one in (self.b, self.a, self.c))
            decayed = {"params": [b[0], *a, c[0]], "weight_decay": 0.1}
            return torch.optim.AdamW([*b, *a, *c] if groups == "one" else [decayed, {"params": [b[1], c[1]]}], lr=0.02)

    return Net()


WRITTEN: dict[str, tuple[dict[str, Any], dict[str, Any], int]] = {
    "end of epoch": ({}, {}, -1),
    "monitor": ({"monitor": "v"}, {}, -1),
    "after the epoch's hooks": ({"save_on_train_epoch_end": True}, {}, -1),
    "every 5 steps": ({"every_n_train_steps": 5}, {}, -2),
    "every 8 steps": ({"every_n_train_steps": 8}, {}, -1),
    "inside epochs": ({"monitor": "v"}, {"val_check_interval": 4}, -2),
    "two micro-batches": ({}, {"accumulate_grad_batches": 2}, -1),
    "two micro-batches, every 3 steps": ({"every_n_train_steps": 3}, {"accumulate_grad_batches": 2}, -2),
}
"""Options of Lightning's ModelCheckpoint and Trainer, and which of its files is taken."""


@pytest.mark.parametrize("groups", ["one", "two"])
@pytest.mark.parametrize("kind", WRITTEN)
@pytest.mark.filterwarnings("ignore")
def test_a_file_of_lightnings_model_checkpoint_goes_on_at_its_next_batch(kind: str, groups: str) -> None:
    pl = pytest.importorskip("pytorch_lightning")
    of_callback, of_trainer, which = WRITTEN[kind]
    rows = torch.randn(32, 3, generator=torch.Generator().manual_seed(1))
    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.arange(32), rows), 4)
    options = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    options |= {"num_sanity_val_steps": 0, **of_trainer}
    whole, broken, ours = seen_module(pl, groups), seen_module(pl, groups), seen_module(trainer_package, groups)
    pl.Trainer(max_epochs=4, enable_checkpointing=False, **options).fit(whole, data, data)
    callback = pl.callbacks.ModelCheckpoint("files", "{step}", save_top_k=-1, **of_callback)
    pl.Trainer(max_epochs=2, callbacks=[callback], **options).fit(broken, data, data)
    file = sorted(Path("files").iterdir(), key=lambda path: int(path.stem.split("=")[1]))[which]
    done = torch.load(file, weights_only=False)["loops"]["fit_loop"]["epoch_loop.batch_progress"]["total"]["processed"]
    assert "with the states of all optimizers (1)" in convert(str(file), "imported", force=False)
    trainer = trainer_package.Trainer(max_epochs=4, enable_checkpointing=False, **options)
    trainer.fit(ours, data, data, ckpt_path="imported")
    assert ours.seen == whole.seen[done:]
    for name, value in whole.state_dict().items():
        assert torch.equal(ours.state_dict()[name], value), name


@pytest.mark.filterwarnings("ignore")
def test_an_optimizer_that_does_not_fit_the_imported_one_is_refused() -> None:
    pl = pytest.importorskip("pytorch_lightning")
    options = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.arange(8), torch.ones(8, 3)), 4)
    trainer = pl.Trainer(max_epochs=1, enable_checkpointing=False, **options)
    trainer.fit(seen_module(pl, "two"), data)
    trainer.save_checkpoint("old.ckpt")
    convert("old.ckpt", "imported", force=False)
    ours = trainer_package.Trainer(max_epochs=2, enable_checkpointing=False, **options)
    with raises_recorded(CheckpointError):
        ours.fit(seen_module(trainer_package, "one"), data, ckpt_path="imported")


def test_weights_alone_are_taken_for_a_new_training(tmp_path: Path) -> None:
    layer = torch.nn.Linear(2, 1)
    for state in (None, []):
        torch.save({"state_dict": layer.state_dict(), "optimizer_states": state}, tmp_path / "old.ckpt")
        said = convert(str(tmp_path / "old.ckpt"), str(tmp_path / "out"), force=True)
        assert "starts again" in said
        assert read_manifest(tmp_path / "out").info["weights_only"]


@pytest.mark.parametrize(
    ("entry", "value"),
    [
        ("state_dict", {"weight": [1.0]}),
        ("state_dict", {1: torch.ones(1)}),
        ("state_dict", {"a": torch.eye(2).to_sparse()}),
        ("epoch", "a"),
        ("epoch", -1),
        ("global_step", [1]),
        ("hyper_parameters", 3),
        ("hyper_parameters", {1: 2}),
        ("datamodule_hyper_parameters", [2]),
    ],
)
def test_an_entry_of_another_kind_is_refused(entry: str, value: object) -> None:
    torch.save({"state_dict": torch.nn.Linear(2, 1).state_dict(), entry: value}, "old.ckpt")
    with raises_recorded(CheckpointError):
        convert("old.ckpt", "new", force=False)
    assert not Path("new").exists()


@pytest.mark.parametrize(
    "broken",
    [
        {"optimizer_states": [3]},
        {"optimizer_states": [{"param_groups": [{}], "state": {}}]},
        {"optimizer_states": [{"param_groups": [[]], "state": []}]},
        {"loops": 3},
        {"loops": {"fit_loop": {"epoch_progress": {"current": {"ready": "a"}}}}},
        {"lr_schedulers": 3},
    ],
    ids=str,
)
def test_a_broken_training_leaves_the_weights(broken: dict[str, Any]) -> None:
    layer = torch.nn.Linear(2, 1)
    full = {"state_dict": layer.state_dict(), "optimizer_states": [torch.optim.SGD(layer.parameters()).state_dict()]}
    torch.save(full | broken, "old.ckpt")
    assert "starts again with these weights" in convert("old.ckpt", "new", force=False)
