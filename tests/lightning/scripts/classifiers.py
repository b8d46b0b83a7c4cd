"""Supervised training, as tutorials and templates have it."""

from functools import partial

import pytorch_lightning as pl
import torch
import torch.nn.functional as F  # noqa: N812
import torchmetrics
from pytorch_lightning import LightningDataModule, LightningModule, Trainer, seed_everything
from pytorch_lightning.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint, TQDMProgressBar
from pytorch_lightning.loggers import CSVLogger
from pytorch_lightning.utilities.rank_zero import rank_zero_info
from pytorch_lightning.utilities.types import STEP_OUTPUT
from torch import nn
from torch.utils.data import DataLoader

from tests.lightning.scripts.shared import dataset, loader, noted, quiet, ready


class LitClassifier(LightningModule):
    def __init__(self, in_dim: int = 8, hidden: int = 16, lr: float = 1e-2):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(in_dim, hidden), nn.ReLU(), nn.Dropout(0.2), nn.Linear(hidden, 2))
        self.train_acc = torchmetrics.Accuracy("multiclass", num_classes=2)
        self.val_acc = torchmetrics.Accuracy("multiclass", num_classes=2)

    def forward(self, x):
        return self.net(x)

    def _shared_step(self, batch):
        x, y = batch
        logits = self(x)
        return F.cross_entropy(logits, y), logits.argmax(1), y

    def training_step(self, batch, batch_idx) -> STEP_OUTPUT:
        loss, preds, y = self._shared_step(batch)
        self.train_acc(preds, y)
        self.log("train_loss", loss, on_step=True, on_epoch=True, prog_bar=True, logger=True, sync_dist=True)
        self.log("train_acc", self.train_acc, on_step=False, on_epoch=True)
        return {"loss": noted(loss), "preds": preds}

    def validation_step(self, batch, batch_idx):
        loss, preds, y = self._shared_step(batch)
        self.val_acc.update(preds, y)
        self.log_dict({"val_loss": loss, "val_acc": self.val_acc}, prog_bar=True, on_epoch=True, sync_dist=True)

    def test_step(self, batch, batch_idx):
        loss, _, _ = self._shared_step(batch)
        self.log("test_loss", loss)

    def predict_step(self, batch, batch_idx, dataloader_idx=0):
        return self(batch[0]).argmax(1)

    def on_train_epoch_end(self):
        super().on_train_epoch_end()
        rank_zero_info("epoch %d", self.current_epoch)

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=self.hparams.lr)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5), "interval": "epoch"}]


def tutorial(folder):
    seed_everything(7, workers=True)
    checkpoint = ModelCheckpoint(
        dirpath=folder / "checkpoints",
        monitor="val_loss",
        mode="min",
        save_top_k=2,
        filename="{epoch}-{val_loss:.3f}",
        save_last=True,
        save_weights_only=True,
    )
    callbacks = [checkpoint, EarlyStopping("val_loss", patience=5), LearningRateMonitor("epoch"), TQDMProgressBar(10)]
    logger = CSVLogger(folder, name="csv", version=0)
    settings = {**quiet(folder), "enable_progress_bar": True, "enable_checkpointing": True}
    trainer = Trainer(**{**settings, "max_epochs": 3, "callbacks": callbacks, "logger": logger})
    model = LitClassifier()
    trainer.fit(model=model, train_dataloaders=ready(), val_dataloaders=ready(24, seed=2))
    (val,) = trainer.validate(model, loader(24, seed=2), verbose=False)
    (test,) = trainer.test(model, dataloaders=loader(24, seed=3), verbose=False)
    predictions = torch.cat(trainer.predict(model, loader(24, seed=3))).tolist()
    best = LitClassifier.load_from_checkpoint(checkpoint_path=checkpoint.best_model_path)
    loaded = best(dataset(4)[:][0]).detach().isfinite().all().item()
    names = (trainer.logger.name, trainer.logger.version, len(checkpoint.best_k_models), best.hparams.hidden, loaded)
    return model, (val, test, predictions, *names)


class SimpleNet(nn.Module):
    def __init__(self, size: int = 8):
        super().__init__()
        self.model = nn.Sequential(nn.Linear(8, size), nn.BatchNorm1d(size), nn.ReLU(), nn.Linear(size, 2))

    def forward(self, x):
        return self.model(x)


class HydraModule(LightningModule):
    def __init__(self, net: torch.nn.Module, optimizer, scheduler, compile: bool) -> None:
        super().__init__()
        self.save_hyperparameters(logger=False, ignore=["net"])
        self.net = net
        self.criterion = torch.nn.CrossEntropyLoss()
        self.train_acc = torchmetrics.Accuracy(task="multiclass", num_classes=2)
        self.val_acc = torchmetrics.Accuracy(task="multiclass", num_classes=2)
        self.train_loss = torchmetrics.MeanMetric()
        self.val_loss = torchmetrics.MeanMetric()
        self.val_acc_best = torchmetrics.MaxMetric()

    def forward(self, x):
        return self.net(x)

    def on_train_start(self) -> None:
        self.val_loss.reset()
        self.val_acc.reset()
        self.val_acc_best.reset()

    def model_step(self, batch):
        x, y = batch
        logits = self.forward(x)
        return self.criterion(logits, y), torch.argmax(logits, dim=1), y

    def training_step(self, batch, batch_idx):
        loss, preds, targets = self.model_step(batch)
        self.train_loss(loss)
        self.train_acc(preds, targets)
        self.log("train/loss", self.train_loss, on_step=False, on_epoch=True, prog_bar=True)
        self.log("train/acc", self.train_acc, on_step=False, on_epoch=True, prog_bar=True)
        return noted(loss)

    def on_train_epoch_end(self) -> None:
        pass

    def validation_step(self, batch, batch_idx) -> None:
        loss, preds, targets = self.model_step(batch)
        self.val_loss(loss)
        self.val_acc(preds, targets)
        self.log("val/loss", self.val_loss, on_step=False, on_epoch=True, prog_bar=True)
        self.log("val/acc", self.val_acc, on_step=False, on_epoch=True, prog_bar=True)

    def on_validation_epoch_end(self) -> None:
        self.val_acc_best(self.val_acc.compute())
        self.log("val/acc_best", self.val_acc_best.compute(), sync_dist=True, prog_bar=True)

    def setup(self, stage: str) -> None:
        if self.hparams.compile and stage == "fit":
            self.net = torch.compile(self.net)

    def configure_optimizers(self):
        optimizer = self.hparams.optimizer(params=self.trainer.model.parameters())
        if self.hparams.scheduler is not None:
            scheduler = self.hparams.scheduler(optimizer=optimizer)
            schedule = {"scheduler": scheduler, "monitor": "val/loss", "interval": "epoch", "frequency": 1}
            return {"optimizer": optimizer, "lr_scheduler": schedule}
        return {"optimizer": optimizer}


class HydraData(LightningDataModule):
    def __init__(self, data_dir: str = "data/", batch_size: int = 8, num_workers: int = 0, pin_memory: bool = False):
        super().__init__()
        self.save_hyperparameters(logger=False)
        self.data_train = None
        self.batch_size_per_device = batch_size

    @property
    def num_classes(self) -> int:
        return 2

    def prepare_data(self) -> None:
        pass

    def setup(self, stage=None) -> None:
        if self.trainer is not None:
            if self.hparams.batch_size % self.trainer.world_size != 0:
                raise RuntimeError("batch size is not divisible by the number of devices")
            self.batch_size_per_device = self.hparams.batch_size // self.trainer.world_size
        if not self.data_train:
            self.data_train, self.data_val = dataset(48), dataset(24, seed=2)

    def train_dataloader(self):
        return DataLoader(self.data_train, self.batch_size_per_device, num_workers=self.hparams.num_workers)

    def val_dataloader(self):
        return DataLoader(self.data_val, self.batch_size_per_device, pin_memory=self.hparams.pin_memory)

    def teardown(self, stage=None) -> None:
        pass

    def state_dict(self):
        return {}

    def load_state_dict(self, state_dict) -> None:
        pass


def hydra_template(folder):
    seed_everything(12345, workers=True)
    optimizer = partial(torch.optim.Adam, lr=0.01)
    scheduler = partial(torch.optim.lr_scheduler.ReduceLROnPlateau, mode="min", factor=0.1, patience=1)
    model = HydraModule(SimpleNet(), optimizer, scheduler, compile=False)
    trainer = Trainer(**quiet(folder, max_epochs=3, deterministic=False, check_val_every_n_epoch=1))
    trainer.fit(model=model, datamodule=HydraData(), ckpt_path=None)
    best = trainer.callback_metrics["val/acc_best"].item()
    return model, (sorted(trainer.callback_metrics), best, trainer.num_devices, trainer.lightning_module is model)


class TransformerClassifier(pl.LightningModule):
    def __init__(self, lr=1e-3, warmup=4):
        super().__init__()
        self.save_hyperparameters()
        self.embed = nn.Linear(8, 16)
        self.encoder = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)
        self.head = nn.Linear(16, 2)
        self.outputs = []

    def forward(self, x):
        return self.head(self.encoder(self.embed(x).unsqueeze(1))[:, 0])

    def training_step(self, batch, batch_idx):
        loss = F.cross_entropy(self(batch[0]), batch[1])
        self.log("train_loss", loss)
        return noted(loss)

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        self.outputs.append(F.cross_entropy(self(batch[0]), batch[1]))
        self.log("val_loss", self.outputs[-1])

    def on_validation_epoch_end(self):
        self.log("val_mean", torch.stack(self.outputs).mean(), prog_bar=True)
        self.outputs.clear()

    def configure_optimizers(self):
        no_decay = ["bias", "norm"]
        groups = [
            {"params": [p for n, p in self.named_parameters() if not any(part in n for part in no_decay)]},
            {"params": [p for n, p in self.named_parameters() if any(part in n for part in no_decay)]},
        ]
        groups[0]["weight_decay"], groups[1]["weight_decay"] = 0.01, 0.0
        optimizer = torch.optim.AdamW(groups, lr=self.hparams.lr)
        total = self.trainer.estimated_stepping_batches

        def rate(step):
            return min(1, (step + 1) / self.hparams.warmup) * (1 - step / (total + 1))

        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step", "name": "lr"}}

    def lr_scheduler_step(self, scheduler, metric):
        scheduler.step()


def transformer(folder):
    pl.seed_everything(5)
    model = TransformerClassifier()
    trainer = pl.Trainer(**quiet(folder, max_epochs=2, val_check_interval=0.5, gradient_clip_val=1.0, precision=32))
    loaders = [ready(16, seed=2), ready(24, seed=4)]
    trainer.fit(model, ready(), loaders)
    results = trainer.validate(model, loaders, verbose=False)
    return model, (results, trainer.num_training_batches, trainer.num_val_batches)
