"""Several loaders, data modules, own transfers, checkpoints."""

import pytorch_lightning as pl
import torch
import torch.nn.functional as F  # noqa: N812
from pytorch_lightning.callbacks import Callback, ModelCheckpoint
from pytorch_lightning.utilities import CombinedLoader
from torch import nn
from torch.utils.data import DataLoader, random_split

from tests.lightning.scripts.shared import dataset, loader, noted, quiet


class Multi(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 2)
        self.seen = []

    def cross_entropy(self, batch):
        return F.cross_entropy(self.layer(batch[0]), batch[1])

    def training_step(self, batch, batch_idx):
        if isinstance(batch, dict):
            batch = [batch["a"], batch["b"]]
        present = [part for part in batch if part is not None]
        self.seen.append(len(present))
        return noted(sum(self.cross_entropy(part) for part in present) / len(present))

    def validation_step(self, batch, batch_idx, dataloader_idx):
        self.log(f"val_{dataloader_idx}", self.cross_entropy(batch), add_dataloader_idx=False)
        self.log("val_loss", self.cross_entropy(batch))

    def train_dataloader(self):
        return {"a": loader(48), "b": loader(24, seed=9)}

    def val_dataloader(self):
        return [loader(16, seed=2), loader(24, seed=3)]

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def dict_of_loaders(folder):
    pl.seed_everything(103)
    model = Multi()
    trainer = pl.Trainer(**quiet(folder, max_epochs=2, reload_dataloaders_every_n_epochs=1))
    trainer.fit(model)
    return model, (model.seen, trainer.validate(model, verbose=False))


def combined(mode):
    def script(folder):
        pl.seed_everything(107)
        model = Multi()
        trainer = pl.Trainer(**quiet(folder, max_epochs=2))
        loaders = CombinedLoader([loader(48), loader(24, seed=9)], mode=mode)
        trainer.fit(model, loaders, model.val_dataloader())
        return model, (model.seen, trainer.global_step, trainer.num_training_batches)

    return script


combined_min_size, combined_max_size, combined_cycle = map(combined, ("min_size", "max_size", "max_size_cycle"))


class TabularData(pl.LightningDataModule):
    def __init__(self, batch_size: int = 8, **kwargs):
        super().__init__()
        self.save_hyperparameters()
        self.batch_size, self.dims, self.loads = batch_size, (8,), []

    def prepare_data(self):
        dataset(1)

    def setup(self, stage: str):
        if stage == "fit" or stage is None:
            full = dataset(48)
            self.train, self.val = random_split(full, [40, 8], generator=torch.Generator().manual_seed(42))
        if stage == "test" or stage is None:
            self.test = dataset(16, seed=5)
        if stage == "predict":
            self.predict = dataset(16, seed=6)

    def train_dataloader(self):
        self.loads.append(self.trainer.current_epoch)
        return DataLoader(self.train, batch_size=self.batch_size)

    def val_dataloader(self):
        return DataLoader(self.val, batch_size=self.batch_size)

    def test_dataloader(self):
        return DataLoader(self.test, batch_size=self.batch_size)

    def predict_dataloader(self):
        return DataLoader(self.predict, batch_size=self.batch_size)

    def transfer_batch_to_device(self, batch, device, dataloader_idx):
        return super().transfer_batch_to_device(batch, device, dataloader_idx)

    def on_after_batch_transfer(self, batch, dataloader_idx):
        if self.trainer.training:
            batch[0] = batch[0] + 0.1
        return batch

    def state_dict(self):
        return {"loads": len(self.loads)}

    def load_state_dict(self, state_dict):
        self.loaded = state_dict


class Regressor(pl.LightningModule):
    def __init__(self, cfg):
        super().__init__()
        self.save_hyperparameters(cfg)
        self.layer = nn.Linear(8, self.hparams.out)
        self.batch_sizes = []

    def forward(self, x):
        return self.layer(x)

    def training_step(self, batch, batch_idx):
        return noted(F.cross_entropy(self(batch[0]), batch[1]))

    def validation_step(self, batch, batch_idx):
        self.log("v", F.cross_entropy(self(batch[0]), batch[1]), on_epoch=True)

    test_step = validation_step

    def predict_step(self, batch, batch_idx):
        return self(batch[0])

    def on_save_checkpoint(self, checkpoint):
        checkpoint["mine"] = {"weights": len(checkpoint["state_dict"])}

    def on_load_checkpoint(self, checkpoint):
        self.mine = checkpoint["mine"]
        assert checkpoint["state_dict"].keys() == self.state_dict().keys()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def data_module(folder):
    pl.seed_everything(109)
    model, data = Regressor({"out": 2, "name": "x"}), TabularData(batch_size=8, extra=1)
    checkpoints = ModelCheckpoint(dirpath=folder / "kept", save_last=True, monitor="v", mode="min")
    settings = quiet(folder, max_epochs=2, callbacks=[checkpoints], enable_checkpointing=True)
    trainer = pl.Trainer(**settings, reload_dataloaders_every_n_epochs=1)
    trainer.fit(model, datamodule=data)
    trainer.save_checkpoint(folder / "end.ckpt")
    (result,) = trainer.test(model, datamodule=data, verbose=False)
    predictions = trainer.predict(model, datamodule=data)
    again = Regressor.load_from_checkpoint(folder / "end.ckpt", map_location="cpu")
    equal = all(torch.equal(p, q) for p, q in zip(model.parameters(), again.parameters(), strict=True))
    return model, (result, len(predictions), data.loads, again.mine, equal, dict(again.hparams), data.hparams.extra)


class Stop(Callback):
    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.current_epoch == 1 and batch_idx == trainer.num_training_batches - 1:
            trainer.should_stop = True


def resumed(folder):
    """Stopped after two epochs, resumed to four."""
    pl.seed_everything(113)
    model = Regressor({"out": 2})
    first = pl.Trainer(**quiet(folder, max_epochs=4, callbacks=[Stop()]))
    first.fit(model, loader())
    first.save_checkpoint(folder / "two.ckpt")
    model = Regressor(cfg={"out": 2})
    second = pl.Trainer(**quiet(folder, max_epochs=4))
    second.fit(model, loader(), ckpt_path=str(folder / "two.ckpt"))
    return model, (first.global_step, second.global_step, second.current_epoch, model.mine)
