"""Callbacks of one's own and of the library."""

import pytorch_lightning as pl
import torch
import torch.nn.functional as F  # noqa: N812
from pytorch_lightning.callbacks import (
    BaseFinetuning,
    BasePredictionWriter,
    Callback,
    StochasticWeightAveraging,
)
from torch import nn

from tests.lightning.scripts.shared import loader, noted, quiet


class Net(pl.LightningModule):
    def __init__(self, lr=0.1):
        super().__init__()
        self.save_hyperparameters()
        self.backbone = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU())
        self.head = nn.Linear(8, 2)

    def forward(self, x):
        return self.head(self.backbone(x))

    def training_step(self, batch, batch_idx):
        loss = F.cross_entropy(self(batch[0]), batch[1])
        self.log("train_loss", loss)
        return noted(loss)

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", F.cross_entropy(self(batch[0]), batch[1]))

    def predict_step(self, batch, batch_idx):
        return self(batch[0])

    def configure_optimizers(self):
        parameters = filter(lambda p: p.requires_grad, self.parameters())
        return torch.optim.SGD(parameters, lr=self.hparams.lr, momentum=0.9)


class MilestonesFinetuning(BaseFinetuning):
    def __init__(self, milestones=(1, 2), train_bn=False):
        super().__init__()
        self.milestones, self.train_bn = milestones, train_bn

    def freeze_before_training(self, pl_module):
        self.freeze(modules=pl_module.backbone, train_bn=self.train_bn)

    def finetune_function(self, pl_module, epoch, optimizer):
        if epoch == self.milestones[0]:
            self.unfreeze_and_add_param_group(pl_module.backbone[0], optimizer, train_bn=self.train_bn)
        elif epoch == self.milestones[1]:
            self.unfreeze_and_add_param_group(pl_module.backbone[1:], optimizer, lr=0.01, train_bn=True)


def backbone_finetuning(folder):
    pl.seed_everything(131)
    model = Net()
    trainer = pl.Trainer(**quiet(folder, max_epochs=3, callbacks=[MilestonesFinetuning()]))
    trainer.fit(model, loader())
    return model, [(len(group["params"]), group["lr"]) for group in trainer.optimizers[0].param_groups]


class EveryHook(Callback):
    """Notes where the trainer stands in each hook."""

    def __init__(self):
        self.seen = []

    def on_train_epoch_start(self, trainer, pl_module):
        self.seen.append(("epoch", trainer.current_epoch, trainer.training, trainer.state.fn == "fit"))

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.seen.append((batch_idx, trainer.global_step, len(batch)))

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.seen.append((sorted(outputs), trainer.is_last_batch))
        pl_module.log("of_callback", outputs["loss"] * 2)

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        self.seen.append(type(optimizer).__name__)

    def on_validation_epoch_end(self, trainer, pl_module):
        self.seen.append((trainer.validating, trainer.sanity_checking, sorted(trainer.callback_metrics)[:1]))
        self.log("val_of_callback", 1.0)

    def on_fit_end(self, trainer, pl_module):
        self.seen.append((trainer.limit_val_batches, trainer.max_epochs, trainer.num_val_batches))


class MetricsEverywhere(Net):
    def on_train_start(self):
        self.log("of_start", 1.0)

    def on_train_epoch_start(self):
        self.log("of_epoch_start", float(self.current_epoch))

    def on_train_batch_start(self, batch, batch_idx):
        self.log("of_batch_start", float(batch_idx))

    def on_after_backward(self):
        super().on_after_backward()
        self.log("of_backward", self.head.weight.grad.abs().sum())

    def on_before_optimizer_step(self, optimizer):
        self.log("norm", sum(p.grad.norm() ** 2 for p in self.parameters()) ** 0.5)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        super().on_train_batch_end(outputs, batch, batch_idx)
        self.log("of_batch_end", outputs["loss"], on_step=True, on_epoch=True)

    def on_train_epoch_end(self):
        self.log("rate", self.optimizers().param_groups[0]["lr"])

    def on_validation_epoch_end(self):
        self.log("of_validation", 3.0, prog_bar=True)

    def on_validation_end(self):
        super().on_validation_end()


def metrics_in_every_hook(folder):
    pl.seed_everything(137)
    model, callback = MetricsEverywhere(), EveryHook()
    trainer = pl.Trainer(**quiet(folder, max_epochs=2, callbacks=[callback], num_sanity_val_steps=0))
    trainer.fit(model, loader(), loader(16, seed=2))
    return model, (callback.seen, {name: value.item() for name, value in trainer.callback_metrics.items()})


def weight_averaging(folder):
    pl.seed_everything(149)
    model = Net()
    model.backbone = nn.Linear(8, 8)  # without BatchNorm, whose statistics take a further epoch
    averaging = StochasticWeightAveraging(
        swa_lrs=0.05, swa_epoch_start=2, annealing_epochs=1, avg_fn=lambda mean, new, n: mean + (new - mean) / (n + 1)
    )
    trainer = pl.Trainer(**quiet(folder, max_epochs=4, callbacks=averaging))
    trainer.fit(model, loader())
    return model, trainer.global_step


class Writer(BasePredictionWriter):
    def __init__(self, write_interval):
        super().__init__(write_interval)
        self.written = []

    def write_on_batch_end(self, trainer, pl_module, prediction, batch_indices, batch, batch_idx, dataloader_idx):
        self.written.append((batch_idx, dataloader_idx, prediction.shape, list(batch_indices)))

    def write_on_epoch_end(self, trainer, pl_module, predictions, batch_indices):
        self.written.append((len(predictions), [list(one) for one in batch_indices[0]]))


def prediction_writer(folder):
    pl.seed_everything(157)
    model, writer = Net(), Writer("batch_and_epoch")
    trainer = pl.Trainer(**quiet(folder, max_epochs=1, callbacks=[writer]))
    trainer.fit(model, loader())
    trainer.predict(model, loader(16, seed=2), return_predictions=False)
    return model, writer.written
