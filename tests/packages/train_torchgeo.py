"""Classify scikit-learn's digits as images with torchgeo's task and data module, and with the best checkpoint."""

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from result import write
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, Dataset
from torchgeo.datamodules import NonGeoDataModule
from torchgeo.trainers import ClassificationTask


class Digits(Dataset):
    """Three channels of 32 x 32."""

    def __init__(self, split="train", **options) -> None:
        first, last = {"train": (0, 64), "val": (64, 96), "test": (96, 128)}[split]
        images, labels = load_digits(n_class=3, return_X_y=True)
        small = torch.tensor(images[first:last], dtype=torch.float32).reshape(-1, 1, 8, 8) / 16
        self.images = torch.nn.functional.interpolate(small, size=32).expand(-1, 3, -1, -1).contiguous()
        self.labels = torch.tensor(labels[first:last])

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index):
        return {"image": self.images[index], "label": self.labels[index]}


class DigitsModule(NonGeoDataModule):
    """The package's own, with its normalization, but the training data in order."""

    mean = torch.tensor(0.3)
    std = torch.tensor(0.4)

    def train_dataloader(self):
        return DataLoader(self.train_dataset, batch_size=self.batch_size)


class Losses(pl.Callback):
    """The loss of each step."""

    def __init__(self) -> None:
        self.steps = []

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx) -> None:
        """Note it."""
        self.steps.append(float(outputs["loss"]))


pl.seed_everything(1)
data = DigitsModule(Digits, batch_size=16, num_workers=0)
task = ClassificationTask(model="resnet18", weights=None, in_channels=3, num_classes=3, lr=0.01, patience=2)
losses = Losses()
best = ModelCheckpoint(dirpath="checkpoints", monitor="val_loss", mode="min", save_last=True)
trainer = pl.Trainer(
    max_epochs=3,
    accelerator="cpu",
    enable_progress_bar=False,
    enable_model_summary=False,
    logger=CSVLogger("logs"),
    log_every_n_steps=1,
    callbacks=[best, EarlyStopping("val_loss", patience=3, mode="min"), losses],
)
trainer.fit(task, datamodule=data)
metrics = dict(trainer.callback_metrics)
trained = {"losses": losses.steps, "metrics": metrics, "rate": trainer.optimizers[0].param_groups[0]["lr"]}
tested = trainer.test(task, datamodule=data)
loaded = ClassificationTask.load_from_checkpoint(best.best_model_path, weights_only=False)
predicted = trainer.predict(loaded, DataLoader(Digits("test"), batch_size=16))
write(**trained, weights=task, tested=tested, loaded=loaded, predicted=torch.cat(predicted))
