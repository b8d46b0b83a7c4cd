"""Lightning loads and continues files that were written here; its own files are given directly to `fit` and `test`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import trainer as ours
from trainer.callbacks import ModelCheckpoint

pl = pytest.importorskip("pytorch_lightning")
pytestmark = pytest.mark.filterwarnings("ignore")
ROWS = torch.randn(20, 4, generator=torch.Generator().manual_seed(1))


def classes(library: Any, kind: str) -> tuple[Any, Any, Any]:
    """Return a module, a data module and a callback of a library; all keep something in a checkpoint."""

    class Module(library.LightningModule):  # type: ignore[misc]
        def __init__(self, lr: float = 0.1, width: int = 4) -> None:
            super().__init__()
            self.save_hyperparameters()
            self.losses: list[float] = []
            torch.manual_seed(3)
            self.layers = torch.nn.Sequential(torch.nn.Linear(width, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 1))

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = self.layers(batch[0]).square().mean() + self.layers(batch[0]).sum() / 1000
            self.losses.append(float(loss.detach()))
            return loss

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val", self.layers(batch[0]).square().mean())

        test_step = validation_step

        def configure_optimizers(self) -> Any:
            body, head = [*self.layers[:2].parameters()], [*self.layers[2].parameters()]
            groups = [{"params": head}, {"params": body, "lr": 0.05}]
            optimizer = getattr(torch.optim, kind)(groups, lr=self.hparams.lr, weight_decay=0.01)
            return [optimizer], [torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 3], 0.5)]

        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            checkpoint["mine"] = {"seen": len(self.losses)}

        def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            self.seen = checkpoint["mine"]["seen"]

    class Data(library.LightningDataModule):  # type: ignore[misc]
        def __init__(self, size: int = 4) -> None:
            super().__init__()
            self.save_hyperparameters()
            self.position = 0

        def train_dataloader(self) -> Any:
            return DataLoader(TensorDataset(ROWS), self.hparams.size)

        def val_dataloader(self) -> Any:
            return DataLoader(TensorDataset(ROWS[:8]), 4)

        test_dataloader = val_dataloader

        def state_dict(self) -> dict[str, Any]:
            return {"position": 7}

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            self.position = state_dict["position"]

    return Module, Data, counts_of(library)


def counts_of(library: Any) -> Any:
    """Return a callback with a state."""

    class Counts(library.Callback):  # type: ignore[misc]
        count = 0

        def state_dict(self) -> dict[str, Any]:
            return {"count": 5}

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            self.count = state_dict["count"]

    return Counts


def make(library: Any, callbacks: Any = (), **settings: Any) -> Any:
    off: dict[str, Any] = {"enable_progress_bar": False, "enable_model_summary": False, "num_sanity_val_steps": 0}
    off |= {"logger": False, "accelerator": "cpu", "enable_checkpointing": False}
    return library.Trainer(callbacks=[*callbacks], **{**off, **settings})


def write(where: str, kind: str) -> str:
    """Train here for two epochs, and return the file."""
    module, data, counts = classes(ours, kind)
    callback = ModelCheckpoint("kept", "{epoch}", save_top_k=-1, single_file=True)
    callbacks = [counts(), callback]
    trainer = make(ours, callbacks, max_epochs=2, enable_checkpointing=True)
    trainer.fit(module(), datamodule=data())
    if where == "after fit":
        trainer.save_checkpoint("written.ckpt", single_file=True)
    return callback.last_model_path if where == "kept" else "written.ckpt"


@pytest.mark.parametrize("kind", ["SGD", "AdamW"])
@pytest.mark.parametrize("where", ["kept", "after fit"])
def test_lightning_continues_with_the_same_losses(where: str, kind: str) -> None:
    file = write(where, kind)
    module, data, counts = classes(pl, kind)
    make(pl, max_epochs=4).fit(whole := module(), datamodule=data())
    loaded = module.load_from_checkpoint(file)
    assert dict(loaded.hparams) == {"lr": 0.1, "width": 4}
    assert data.load_from_checkpoint(file).position == 7
    callback, datamodule = counts(), data()
    trainer = make(pl, [callback], max_epochs=4)
    trainer.fit(again := module(), datamodule=datamodule, ckpt_path=file)
    assert again.losses == whole.losses[10:]
    assert all(map(torch.equal, again.state_dict().values(), whole.state_dict().values()))
    assert (trainer.global_step, trainer.current_epoch, callback.count, datamodule.position) == (20, 4, 5, 7)
    assert again.seen == 10
    assert trainer.lr_scheduler_configs[0].scheduler.last_epoch == 4


def test_lightning_continues_inside_an_epoch_as_from_its_own_file() -> None:
    losses = []
    for library in (pl, ours):
        module, data, _ = classes(library, "SGD")

        class Saves(library.Callback):  # type: ignore[misc, name-defined]
            def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
                if trainer.global_step == 7:
                    options = {} if trainer.__module__.startswith("pytorch") else {"single_file": True}
                    trainer.save_checkpoint("written.ckpt", **options)

        make(library, [Saves()], max_epochs=2).fit(module(), datamodule=data())
        module, data, _ = classes(pl, "SGD")
        trainer = make(pl, max_epochs=3)
        trainer.fit(again := module(), datamodule=data(), ckpt_path="written.ckpt")
        losses.append((again.losses, trainer.global_step))
        Path("written.ckpt").unlink()
    assert losses[0] == losses[1]


@pytest.mark.parametrize("kind", ["SGD", "AdamW", "NAdam"])
def test_a_file_of_lightnings_is_given_to_fit_test_and_load_from_checkpoint(kind: str) -> None:
    theirs, their_data, their_counts = classes(pl, kind)
    make(pl, max_epochs=4).fit(whole := theirs(), datamodule=their_data())
    callback = pl.callbacks.ModelCheckpoint("kept", "{epoch}")
    stopped = make(pl, [their_counts(), callback], max_epochs=2, enable_checkpointing=True)
    stopped.fit(half := theirs(), datamodule=their_data())
    file = callback.best_model_path
    module, data, counts = classes(ours, kind)
    assert module.load_from_checkpoint(file).hparams == {"lr": 0.1, "width": 4}
    found = make(ours).test(module(), datamodule=data(), ckpt_path=file)
    assert found[0]["val"] == pytest.approx(make(pl).test(half, datamodule=their_data())[0]["val"])
    ours_callback, datamodule = counts(), data()
    trainer = make(ours, [ours_callback], max_epochs=4)
    trainer.fit(again := module(), datamodule=datamodule, ckpt_path=file)
    assert again.losses == whole.losses[10:]
    assert all(map(torch.equal, again.state_dict().values(), whole.state_dict().values()))
    assert (trainer.global_step, ours_callback.count, datamodule.position, again.seen) == (20, 5, 7, 10)
    assert [path.name for path in Path("kept").iterdir()] == ["epoch=1.ckpt"]


@pytest.mark.parametrize("other", ["SGD", "Adagrad"])
def test_another_optimizer_than_the_files_is_refused(other: str) -> None:
    theirs, their_data, _ = classes(pl, "AdamW")
    trainer = make(pl, max_epochs=1)
    trainer.fit(theirs(), datamodule=their_data())
    trainer.save_checkpoint("written.ckpt")
    module, data, _ = classes(ours, other)
    with pytest.raises(ours.CheckpointError, match="has the options"):
        make(ours, max_epochs=2).fit(module(), datamodule=data(), ckpt_path="written.ckpt")


def test_a_file_without_the_state_of_a_training_is_for_evaluations() -> None:
    theirs, their_data, _ = classes(pl, "SGD")
    trainer = make(pl, max_epochs=1)
    trainer.fit(theirs(), datamodule=their_data())
    trainer.save_checkpoint("written.ckpt", weights_only=True)
    module, data, _ = classes(ours, "SGD")
    assert make(ours).test(module(), datamodule=data(), ckpt_path="written.ckpt")
    with pytest.raises(ours.CheckpointError, match="weights only"):
        make(ours, max_epochs=2).fit(module(), datamodule=data(), ckpt_path="written.ckpt")


@pytest.mark.parametrize("library", [pl, ours])
def test_hyperparameters_in_one_argument_come_back_in_it(library: Any) -> None:
    def module_of(base: Any) -> Any:
        class Module(base.LightningModule):  # type: ignore[misc]
            def __init__(self, config: Any) -> None:
                super().__init__()
                self.save_hyperparameters(config)
                self.layer = torch.nn.Linear(config["width"], 1)

            def training_step(self, batch: Any, batch_idx: int) -> Any:
                return self.layer(batch[0]).sum()

            def configure_optimizers(self) -> Any:
                return torch.optim.SGD(self.parameters(), lr=0.1)

        return Module

    trainer = make(library, max_epochs=1)
    trainer.fit(module_of(library)({"width": 4}), DataLoader(TensorDataset(ROWS), 4))
    trainer.save_checkpoint("written.ckpt", **({"single_file": True} if library is ours else {}))
    for reader in (pl, ours):
        assert module_of(reader).load_from_checkpoint("written.ckpt").layer.in_features == 4


def test_two_optimizers_continue() -> None:
    def module_of(base: Any) -> Any:
        class Module(base.LightningModule):  # type: ignore[misc]
            automatic_optimization = False

            def __init__(self) -> None:
                super().__init__()
                self.automatic_optimization = False
                torch.manual_seed(1)
                self.one, self.two = torch.nn.Linear(4, 4), torch.nn.Linear(4, 1)

            def training_step(self, batch: Any, batch_idx: int) -> None:
                for optimizer in self.optimizers():
                    loss = self.two(self.one(batch[0])).square().mean()
                    optimizer.zero_grad()
                    self.manual_backward(loss)
                    optimizer.step()

            def configure_optimizers(self) -> Any:
                return [torch.optim.AdamW(self.one.parameters()), torch.optim.SGD(self.two.parameters(), 0.1, 0.9)]

        return Module

    data = DataLoader(TensorDataset(ROWS), 4)
    whole = module_of(pl)()
    make(pl, max_epochs=3).fit(whole, data)
    for writer in (pl, ours):
        trainer = make(writer, max_epochs=1)
        trainer.fit(module_of(writer)(), data)
        trainer.save_checkpoint(f"{writer.__name__}.ckpt", **({"single_file": True} if writer is ours else {}))
        for reader in (pl, ours):
            again, continued = module_of(reader)(), make(reader, max_epochs=3)
            continued.fit(again, data, ckpt_path=f"{writer.__name__}.ckpt")
            assert all(map(torch.equal, again.state_dict().values(), whole.state_dict().values()))
            assert continued.global_step == {pl: 30, ours: 15}[reader]
