"""Search a learning rate with optuna, whose callback stops trials that are worse than others."""

import optuna
import pytorch_lightning as pl
import torch
from optuna_integration import PyTorchLightningPruningCallback
from result import write
from sklearn.datasets import load_diabetes
from torch.utils.data import DataLoader, TensorDataset

features, target = load_diabetes(return_X_y=True)
features, target = torch.tensor(features, dtype=torch.float32) * 20, torch.tensor(target, dtype=torch.float32) / 100
train = DataLoader(TensorDataset(features[:320], target[:320]), batch_size=64)
validation = DataLoader(TensorDataset(features[320:440], target[320:440]), batch_size=60)


class Linear(pl.LightningModule):
    """A linear regression."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layer = torch.nn.Linear(10, 1)

    def training_step(self, batch, batch_idx):
        return torch.nn.functional.mse_loss(self.layer(batch[0]).squeeze(1), batch[1])

    def validation_step(self, batch, batch_idx) -> None:
        self.log("val_loss", torch.nn.functional.mse_loss(self.layer(batch[0]).squeeze(1), batch[1]))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), self.hparams.rate)


def objective(trial: optuna.Trial) -> float:
    pl.seed_everything(1)
    module = Linear(trial.suggest_float("rate", 1e-4, 1e-1, log=True))
    trainer = pl.Trainer(
        max_epochs=4,
        accelerator="cpu",
        enable_checkpointing=False,
        enable_progress_bar=False,
        callbacks=[PyTorchLightningPruningCallback(trial, monitor="val_loss")],
    )
    trainer.logger.log_hyperparams(trial.params)
    trainer.fit(module, train, validation)
    weights.append(module)
    return trainer.callback_metrics["val_loss"].item()


weights = []
pruner = optuna.pruners.MedianPruner(n_startup_trials=1, n_warmup_steps=0)
study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=1), pruner=pruner)
study.optimize(objective, n_trials=6)
write(
    states=[trial.state.name for trial in study.trials],
    values=[trial.intermediate_values for trial in study.trials],
    rates=[trial.params["rate"] for trial in study.trials],
    weights=weights,
)
