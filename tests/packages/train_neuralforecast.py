"""Forecast the airline passengers with NHITS, with early stopping, cross-validation, and a copy from files."""

import torch
from neuralforecast import NeuralForecast
from neuralforecast.models import NHITS
from neuralforecast.utils import AirPassengersDF
from result import write

quiet = {"accelerator": "cpu", "enable_progress_bar": False, "enable_model_summary": False, "logger": False}
model = NHITS(
    h=12,
    input_size=24,
    max_steps=20,
    val_check_steps=5,
    early_stop_patience_steps=3,
    mlp_units=[[16, 16]] * 3,
    batch_size=4,
    windows_batch_size=None,  # all windows: otherwise some are drawn
    random_seed=1,
    **quiet,
)
forecast = NeuralForecast(models=[model], freq="ME")
forecast.fit(AirPassengersDF, val_size=12)
trained = forecast.models[0]
predicted = forecast.predict()["NHITS"]
forecast.save("saved", overwrite=True, save_dataset=True)
loaded = NeuralForecast.load("saved")
again = loaded.predict()["NHITS"]
crossed = forecast.cross_validation(AirPassengersDF, val_size=12, n_windows=2)["NHITS"]
write(
    losses=[loss for _, loss in trained.train_trajectories],
    validated=[loss for step, loss in trained.valid_trajectories if step > 0],  # step 0: the sanity check
    weights=trained,
    predicted=predicted.to_numpy(),
    loaded=torch.as_tensor(again.to_numpy()),
    crossed=crossed.to_numpy(),
)
