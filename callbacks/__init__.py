"""What happens beside the loop: one file per callback, and the table of their names."""

from __future__ import annotations

if __name__ != "trainer.callbacks":
    raise ImportError(
        f"this folder was imported as {__name__!r}; it is a part of the trainer package. "
        "Write `from trainer.callbacks import ...`, and see that no folder of the repository is on sys.path itself."
    )

from trainer.callbacks.accumulate import GradientAccumulationScheduler
from trainer.callbacks.base import Callback, Logger
from trainer.callbacks.checkpoint import ModelCheckpoint
from trainer.callbacks.csv_logger import CSVLogger
from trainer.callbacks.early_stopping import EarlyStopping
from trainer.callbacks.lambda_callback import LambdaCallback
from trainer.callbacks.lr_monitor import LearningRateMonitor
from trainer.callbacks.model_summary import ModelSummary
from trainer.callbacks.prediction_writer import PredictionWriter, read_predictions
from trainer.callbacks.profiler import SimpleProfiler
from trainer.callbacks.progress import ProgressBar
from trainer.callbacks.step_times import StepTimes
from trainer.callbacks.tensorboard import TensorBoardLogger
from trainer.callbacks.throughput import ThroughputMonitor
from trainer.callbacks.timer import Timer
from trainer.callbacks.torch_profiler import TorchProfiler
from trainer.errors import unknown

__all__ = [
    "CALLBACKS",
    "LOGGERS",
    "PROFILERS",
    "CSVLogger",
    "Callback",
    "EarlyStopping",
    "GradientAccumulationScheduler",
    "LambdaCallback",
    "LearningRateMonitor",
    "Logger",
    "ModelCheckpoint",
    "ModelSummary",
    "PredictionWriter",
    "ProgressBar",
    "SimpleProfiler",
    "StepTimes",
    "TensorBoardLogger",
    "ThroughputMonitor",
    "Timer",
    "TorchProfiler",
    "callback_named",
    "read_predictions",
]

CALLBACKS: dict[str, type[Callback]] = {
    callback.__name__: callback
    for callback in (
        CSVLogger,
        EarlyStopping,
        GradientAccumulationScheduler,
        LambdaCallback,
        LearningRateMonitor,
        ModelCheckpoint,
        ModelSummary,
        PredictionWriter,
        ProgressBar,
        SimpleProfiler,
        StepTimes,
        TensorBoardLogger,
        ThroughputMonitor,
        Timer,
        TorchProfiler,
    )
}
"""Every callback of this package by name."""

LOGGERS: dict[str, type[Logger]] = {"csv": CSVLogger, "tensorboard": TensorBoardLogger}
PROFILERS: dict[str, type[Callback]] = {"simple": SimpleProfiler, "torch": TorchProfiler}


def callback_named(name: str) -> type[Callback]:
    """The class of that name.

    Raises:
        ConfigError: there is none.
    """
    if name not in CALLBACKS:
        raise unknown("callback", name, CALLBACKS)
    return CALLBACKS[name]
