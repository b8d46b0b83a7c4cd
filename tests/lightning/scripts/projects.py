"""Shapes of public projects: a forecaster that predicts by itself, metrics read in the sanity check."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import BasePredictionWriter, Callback, EarlyStopping
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

from tests.lightning.scripts.shared import loader, noted, quiet


class Predictions(BasePredictionWriter):
    def __init__(self) -> None:
        super().__init__(write_interval="batch")
        self.outputs: list[Any] = []

    def write_on_batch_end(
        self, trainer: Any, pl_module: Any, prediction: Any, batch_indices: Any, batch: Any, batch_idx: int, loader: int
    ) -> None:
        self.outputs.append((prediction, batch_idx))


class Forecaster(pl.LightningModule):
    def __init__(self, learning_rate: float = 0.01, patience: int = 0, **kwargs: Any) -> None:
        super().__init__()
        self.save_hyperparameters(ignore=["loss"])
        self.outputs: list[Any] = []
        self.seen = 0

    @property
    def current_stage(self) -> str:
        return {"train": "train", "predict": "predict"}.get(self.trainer.state.stage.value, "val")

    def step(self, batch: Any) -> Any:
        loss = nn.functional.cross_entropy(self(batch[0]), batch[1])
        self.log(f"{self.current_stage}_loss", loss, on_step=self.training, on_epoch=True, batch_size=len(batch[0]))
        return {"loss": loss, "n": len(batch[0])}

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        out = self.step(batch)
        noted(out["loss"])
        self.outputs.append(out)
        return out

    def on_train_epoch_end(self) -> None:
        self.on_epoch_end(self.outputs)
        self.outputs.clear()

    def on_epoch_end(self, outputs: Any) -> None:  # a helper of this class: no trainer calls it
        self.seen += sum(out["n"] for out in outputs)

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        return self.step(batch)

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self(batch[0])

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams.learning_rate)
        schedule = {
            "scheduler": ReduceLROnPlateau(optimizer, patience=self.hparams.patience),
            "monitor": "val_loss",
            "frequency": self.trainer.check_val_every_n_epoch,
            "strict": False,
        }
        return {"optimizer": optimizer, "lr_scheduler": schedule}

    def predict(self, data: Any, **settings: Any) -> Any:
        writer = Predictions()
        pl.Trainer(callbacks=[writer], inference_mode=False, **settings).predict(self, data)
        return torch.cat([one for one, _ in writer.outputs]).tolist()


class Attention(Forecaster):
    def __init__(self, inputs: int = 8, hidden_size: int = 4, **kwargs: Any) -> None:
        self.save_hyperparameters()  # before the base class is made
        super().__init__(**kwargs)
        self.net = nn.Sequential(nn.Linear(inputs, hidden_size), nn.ReLU(), nn.Linear(hidden_size, 2))

    def forward(self, x: torch.Tensor) -> Any:
        return self.net(x)


class MetricsOfEachCheck(Callback):
    def __init__(self) -> None:
        self.found: list[Any] = []

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        values = {name: value.item() for name, value in trainer.callback_metrics.items() if name.startswith("val")}
        self.found.append((trainer.sanity_checking, values))

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.found.append(sorted(trainer.callback_metrics))


def forecaster(folder: Path) -> Any:
    torch.manual_seed(0)
    module, look = Attention(hidden_size=5, learning_rate=0.03), MetricsOfEachCheck()
    settings = quiet(folder, max_epochs=3, gradient_clip_val=0.1, enable_checkpointing=True)
    trainer = pl.Trainer(**settings, callbacks=[EarlyStopping("val_loss", mode="min"), look])
    trainer.fit(module, loader(), loader(16, 8, 2))
    best = Attention.load_from_checkpoint(trainer.checkpoint_callback.best_model_path)
    predictions = best.predict(loader(16, 8, 3), **quiet(folder))
    return module, (predictions, module.seen, look.found, dict(best.hparams))
