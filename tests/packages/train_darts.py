"""Forecast a series of darts' own generator with N-BEATS, with its checkpoints and a model that was saved."""

import numpy as np
from darts.models import NBEATSModel
from darts.utils.timeseries_generation import gaussian_timeseries, linear_timeseries, sine_timeseries
from pytorch_lightning.callbacks import EarlyStopping
from result import write

np.random.seed(0)
series = sum(
    (sine_timeseries(length=80, value_frequency=0.1), gaussian_timeseries(length=80, std=0.05)),
    start=linear_timeseries(length=80, end_value=1.0),
).astype(np.float32)
train, validation = series[:60], series[48:]
model = NBEATSModel(
    input_chunk_length=8,
    output_chunk_length=4,
    n_epochs=4,
    num_stacks=2,
    num_blocks=1,
    layer_widths=8,
    random_state=1,
    batch_size=64,  # all windows: the batches are shuffled
    model_name="nbeats",
    work_dir="darts",
    save_checkpoints=True,
    pl_trainer_kwargs={
        "accelerator": "cpu",
        "enable_progress_bar": False,
        "callbacks": [EarlyStopping("val_loss", patience=3)],
    },
)
model.fit(train, val_series=validation)
metrics = dict(model.trainer.callback_metrics)
best = NBEATSModel.load_from_checkpoint("nbeats", work_dir="darts", best=True)
last = NBEATSModel.load_from_checkpoint("nbeats", work_dir="darts", best=False)
model.save("saved.pt")
saved = NBEATSModel.load("saved.pt")
write(
    metrics=metrics,
    weights=model.model,
    predicted=model.predict(4).values(),
    best=best.predict(4, series=train).values(),
    last=last.predict(4, series=train).values(),
    saved=saved.predict(4, series=train).values(),
)
