"""Forecast a seasonal series with DeepAR and a feed-forward network, and with a predictor that was saved."""

import tempfile
from pathlib import Path

import lightning.pytorch as pl
import numpy as np
import pandas as pd
import torch
from gluonts.dataset.pandas import PandasDataset
from gluonts.torch import DeepAREstimator, PyTorchPredictor, SimpleFeedForwardEstimator
from gluonts.transform import ValidationSplitSampler
from lightning.pytorch.callbacks import Callback
from result import write

LENGTH = 6


class Losses(Callback):
    """The loss of each step."""

    def __init__(self) -> None:
        self.steps = []

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx) -> None:
        """Note it."""
        self.steps.append(float(outputs["loss"]))


def trained(kind, windows, **options):
    """Train one, and return what it has computed."""
    pl.seed_everything(1)
    losses = Losses()
    trainer = {"max_epochs": 3, "accelerator": "cpu", "enable_progress_bar": False, "callbacks": [losses]}
    estimator = kind(
        prediction_length=LENGTH,
        context_length=2 * LENGTH,
        batch_size=8,
        num_batches_per_epoch=10,
        lr=0.01,
        train_sampler=windows,
        trainer_kwargs={**trainer, "enable_model_summary": False},
        **options,
    )
    output = estimator.train_model(series, validation_data=series)
    torch.manual_seed(2)
    forecast = next(iter(output.predictor.predict(series))).mean
    with tempfile.TemporaryDirectory() as folder:
        output.predictor.serialize(Path(folder))
        loaded = PyTorchPredictor.deserialize(Path(folder))
    torch.manual_seed(2)
    again = next(iter(loaded.predict(series))).mean
    return {"losses": losses.steps, "weights": output.trained_net, "predicted": forecast, "loaded": again}


days = pd.period_range("2010-01-01", periods=96, freq="D")
values = 10 + 3 * np.sin(2 * np.pi * np.arange(96) / 7) + np.random.default_rng(0).normal(0, 0.2, 96)
series = PandasDataset({"a": pd.DataFrame({"target": values.astype("float32")}, index=days)}, freq="D")

small = {"hidden_size": 8, "num_layers": 1, "freq": "D"}
last = ValidationSplitSampler(min_future=LENGTH)
write(
    feed_forward=trained(SimpleFeedForwardEstimator, last, hidden_dimensions=[8]),
    deep_ar=trained(DeepAREstimator, last, **small),
    # By default windows are drawn from numpy's generator.
    drawn_windows=trained(DeepAREstimator, None, **small),
)
