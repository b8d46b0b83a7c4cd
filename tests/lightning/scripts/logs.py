"""Loggers of one's own, and values that are logged in every way."""

import pytorch_lightning as pl
import torch
import torch.nn.functional as F  # noqa: N812
import torchmetrics
from pytorch_lightning.callbacks import Callback, EarlyStopping, ModelCheckpoint
from pytorch_lightning.loggers import Logger
from pytorch_lightning.loggers.logger import rank_zero_experiment
from pytorch_lightning.utilities import rank_zero_only
from torch import nn

from tests.lightning.scripts.shared import loader, noted, quiet, ready


class Net(pl.LightningModule):
    def __init__(self, lr: float = 0.05, width: int = 8, **kwargs):
        super().__init__()
        self.save_hyperparameters()
        self.layers = nn.Sequential(nn.Linear(8, width), nn.Tanh(), nn.Linear(width, 2))

    def forward(self, x):
        return self.layers(x)

    def cross_entropy(self, batch):
        return F.cross_entropy(self(batch[0]), batch[1])

    def training_step(self, batch, batch_idx):
        loss = self.cross_entropy(batch)
        self.log("train_loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        return noted(loss)

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.cross_entropy(batch), prog_bar=True, logger=True)

    def test_step(self, batch, batch_idx):
        self.log("test_loss", self.cross_entropy(batch))

    def predict_step(self, batch, batch_idx):
        return self(batch[0])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.hparams.lr)


class Rows(Logger):
    """Keeps everything in lists."""

    def __init__(self, save_dir):
        super().__init__()
        self._save_dir, self._experiment = save_dir, None
        self.rows, self.hyperparameters, self.calls = [], [], []

    @property
    def name(self):
        return "rows"

    @property
    def version(self):
        return "v0"

    @property
    def save_dir(self):
        return self._save_dir

    @property
    @rank_zero_experiment
    def experiment(self):
        if self._experiment is None:
            self._experiment = {"made": 1}
        return self._experiment

    @rank_zero_only
    def log_hyperparams(self, params, *args, **kwargs):
        self.hyperparameters.append(dict(params))

    @rank_zero_only
    def log_metrics(self, metrics, step=None):
        self.rows.append((step, {name: float(value) for name, value in metrics.items() if name != "epoch"}))

    @rank_zero_only
    def save(self):
        super().save()
        self.calls.append("save")

    @rank_zero_only
    def finalize(self, status):
        self.calls.append(("finalize", status))

    def after_save_checkpoint(self, checkpoint_callback):
        self.calls.append(("after", checkpoint_callback.monitor))


def own_logger(folder):
    pl.seed_everything(163)
    logger, model = Rows(str(folder)), Net(extra=3)
    settings = quiet(folder, max_epochs=2, logger=logger, log_every_n_steps=2, enable_checkpointing=True)
    trainer = pl.Trainer(**settings, callbacks=[ModelCheckpoint(monitor="val_loss", dirpath=folder / "kept")])
    trainer.fit(model, loader(), loader(16))
    logger.experiment["mine"] = 1
    trainer.logger.log_metrics({"manual": 1.0}, step=99)
    rows = [values for _, values in logger.rows]  # steps are counted from 1 here: see the table of differences
    return model, (rows, logger.hyperparameters, logger.calls[-1], logger.experiment, trainer.logger.version)


class Several(Net):
    """Each name another place: by step or epoch, on the bar, in the logger, reduced by other functions."""

    def __init__(self):
        super().__init__()
        self.mean = torchmetrics.MeanMetric()
        self.auroc = torchmetrics.AUROC(task="multiclass", num_classes=2)
        self.confusion = torchmetrics.ConfusionMatrix(task="multiclass", num_classes=2)

    def training_step(self, batch, batch_idx):
        logits = self(batch[0])
        loss = F.cross_entropy(logits, batch[1])
        self.log("max", loss, on_step=False, on_epoch=True, reduce_fx="max")
        self.log("min", loss, on_step=False, on_epoch=True, reduce_fx=torch.min)
        self.log("sum", loss, on_step=False, on_epoch=True, reduce_fx=torch.sum)
        self.log("both", loss, on_step=True, on_epoch=True)
        self.log("integer", 3)
        self.log("double", loss.double(), on_epoch=True)
        self.log("true", True)
        self.mean.update(loss)
        self.log("mean", self.mean, on_epoch=True, on_step=False)
        self.auroc(logits.softmax(-1), batch[1])
        self.log("auroc", self.auroc, on_epoch=True, on_step=True, metric_attribute="auroc")
        self.confusion.update(logits.argmax(-1), batch[1])
        hidden = {"hidden/a": loss, "hidden/b": loss * 2}
        self.log_dict(hidden, prog_bar=True, logger=False, on_epoch=True, on_step=False, sync_dist=True)
        return noted(loss)

    def on_train_epoch_end(self):
        counts = self.confusion.compute()
        self.confusion.reset()
        self.log("true_negatives", counts[0, 0].float())
        self.log("count", float(counts.sum()), prog_bar=True)


def ways_to_log(folder):
    pl.seed_everything(167)
    model = Several()
    trainer = pl.Trainer(**quiet(folder, max_epochs=2, log_every_n_steps=1))
    trainer.fit(model, loader(44))
    values = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return model, (values, sorted(trainer.progress_bar_metrics), sorted(trainer.logged_metrics))


CALLS = []


def noting(name):
    def hook(self, *args, **kwargs):
        CALLS.append((type(self).__name__, name))

    return hook


PLACES = ("start", "end", "epoch_start", "epoch_end", "batch_start", "batch_end")
HOOKS = [f"on_{stage}_{place}" for stage in ("train", "validation", "test", "predict") for place in PLACES]
HOOKS += ["on_fit_start", "on_fit_end", "on_before_backward", "on_after_backward", "on_before_optimizer_step"]
OF_CALLBACKS = ["on_sanity_check_start", "on_sanity_check_end"]
CallbackOrder = type("CallbackOrder", (Callback,), {name: noting(name) for name in HOOKS + OF_CALLBACKS})
ModuleOrder = type("ModuleOrder", (Net,), {name: noting(name) for name in HOOKS})


def hooks_in_order(folder):
    pl.seed_everything(179)
    CALLS.clear()
    model = ModuleOrder()
    limits = {"limit_train_batches": 2, "limit_val_batches": 1, "limit_predict_batches": 1}
    trainer = pl.Trainer(**quiet(folder, max_epochs=2, callbacks=[CallbackOrder()], **limits))
    trainer.fit(model, ready(), ready(16))
    trainer.validate(model, ready(8), verbose=False)
    trainer.test(model, ready(8), verbose=False)
    trainer.predict(model, ready(8))
    return model, list(CALLS)


class Tasks(pl.LightningModule):
    """Several tasks, weighted by their uncertainty; a loader each."""

    def __init__(self, tasks=("a", "b")):
        super().__init__()
        self.tasks = tasks
        self.encoder = nn.Linear(8, 8)
        self.heads = nn.ModuleDict({task: nn.Linear(8, 2) for task in tasks})
        self.accuracies = nn.ModuleDict(
            {task: torchmetrics.Accuracy(task="multiclass", num_classes=2) for task in tasks}
        )
        self.log_variances = nn.Parameter(torch.zeros(len(tasks)))
        self.outputs = [[] for _ in tasks]

    def training_step(self, batch, batch_idx):
        total = 0
        for task, variance in zip(self.tasks, self.log_variances, strict=True):
            inputs, targets = batch[task]
            loss = F.cross_entropy(self.heads[task](self.encoder(inputs).relu()), targets)
            total = total + torch.exp(-variance) * loss + variance
            self.log(f"train/{task}", loss, batch_size=len(inputs))
        return noted(total)

    def validation_step(self, batch, batch_idx, dataloader_idx):
        task, (inputs, targets) = self.tasks[dataloader_idx], batch
        logits = self.heads[task](self.encoder(inputs).relu())
        loss = F.cross_entropy(logits, targets)
        self.accuracies[task](logits, targets)
        self.log("val_loss", loss)
        self.log(f"val/{task}/loss", loss, add_dataloader_idx=False)
        self.log(f"val/{task}/acc", self.accuracies[task], add_dataloader_idx=False, on_epoch=True)
        self.outputs[dataloader_idx].append(loss)

    def on_validation_epoch_end(self):
        self.log("val_mean", torch.stack([torch.stack(losses).mean() for losses in self.outputs]).mean())
        for losses in self.outputs:
            losses.clear()

    def configure_optimizers(self):
        heads = [*self.heads.parameters(), self.log_variances]
        groups = [{"params": self.encoder.parameters()}, {"params": heads, "lr": 0.1}]
        return torch.optim.Adam(groups, lr=0.01)


def weighted_tasks(folder):
    pl.seed_everything(181)
    model, val = Tasks(), [loader(16, seed=5), loader(24, seed=6)]
    trainer = pl.Trainer(**quiet(folder, max_epochs=2, callbacks=[EarlyStopping("val_mean", patience=5)]))
    trainer.fit(model, {"a": loader(32), "b": loader(48, seed=4)}, val)
    results = trainer.validate(model, val, verbose=False)
    return model, (results, trainer.num_val_batches, trainer.num_training_batches, trainer.global_step)
