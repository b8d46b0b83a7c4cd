"""Forecast the package's own generated series with a temporal fusion transformer, and predict with the best one."""

import lightning.pytorch as pl
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from pytorch_forecasting import TemporalFusionTransformer, TimeSeriesDataSet
from pytorch_forecasting.data.examples import generate_ar_data
from pytorch_forecasting.metrics import QuantileLoss
from result import write


class Losses(pl.Callback):
    """The loss of each step."""

    def __init__(self) -> None:
        self.steps = []

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx) -> None:
        """Note it."""
        self.steps.append(float(outputs["loss"]))


pl.seed_everything(42)
data = generate_ar_data(seasonality=10.0, timesteps=60, n_series=6, seed=42)
data["static"] = "2"
training = TimeSeriesDataSet(
    data[lambda rows: rows.time_idx <= 50],
    time_idx="time_idx",
    target="value",
    group_ids=["series"],
    static_categoricals=["static"],
    max_encoder_length=20,
    max_prediction_length=5,
    time_varying_unknown_reals=["value"],
)
validation = TimeSeriesDataSet.from_dataset(training, data, min_prediction_idx=51)
# Neither shuffled nor with dropout: the order of the batches, and the numbers drawn, are others in each program.
batches = training.to_dataloader(train=True, batch_size=32, num_workers=0, shuffle=False)
validated = validation.to_dataloader(train=False, batch_size=32, num_workers=0)
model = TemporalFusionTransformer.from_dataset(
    training,
    learning_rate=0.03,
    hidden_size=8,
    attention_head_size=1,
    hidden_continuous_size=4,
    dropout=0.0,
    loss=QuantileLoss(),
    log_interval=2,
    optimizer="adam",
    reduce_on_plateau_patience=4,
)
losses = Losses()
best = ModelCheckpoint(dirpath="checkpoints", monitor="val_loss", mode="min")
trainer = pl.Trainer(
    max_epochs=3,
    accelerator="cpu",
    gradient_clip_val=0.1,
    limit_train_batches=6,
    enable_model_summary=False,
    enable_progress_bar=False,
    logger=CSVLogger("logs"),
    log_every_n_steps=2,
    callbacks=[EarlyStopping("val_loss", patience=5, mode="min"), LearningRateMonitor(), losses, best],
)
trainer.fit(model, batches, validated)
tested = trainer.test(model, validated)
loaded = TemporalFusionTransformer.load_from_checkpoint(best.best_model_path)
quiet = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False}
write(
    losses=losses.steps,
    metrics=trainer.callback_metrics,
    weights=model,
    tested=tested,
    loaded=loaded,
    predicted=loaded.predict(validated, trainer_kwargs=quiet),
    quantiles=loaded.predict(validated, mode="quantiles", trainer_kwargs=quiet),
)
