"""What happens beside the loop: one file per callback, and the table of their names."""

from __future__ import annotations

if __name__ != "trainer.callbacks":
    raise ImportError(
        f"this folder was imported as {__name__!r}; it is a part of the trainer package. "
        "Write `from trainer.callbacks import ...`, and see that no folder of the repository is on sys.path itself."
    )

from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from trainer.callback import Callback, Logger
from trainer.errors import unknown_name_error

if TYPE_CHECKING:
    from trainer.callbacks.checkpoint import ModelCheckpoint
    from trainer.callbacks.csv_logger import CSVLogger
    from trainer.callbacks.early_stopping import EarlyStopping
    from trainer.callbacks.gradient_accumulation import GradientAccumulationScheduler
    from trainer.callbacks.lambda_callback import LambdaCallback
    from trainer.callbacks.lr_monitor import LearningRateMonitor
    from trainer.callbacks.model_summary import ModelSummary
    from trainer.callbacks.prediction_writer import PredictionWriter, read_predictions
    from trainer.callbacks.profiler import SimpleProfiler
    from trainer.callbacks.progress_bar import ProgressBar
    from trainer.callbacks.straggler_monitor import StragglerMonitor
    from trainer.callbacks.tensorboard import TensorBoardLogger
    from trainer.callbacks.throughput import ThroughputMonitor
    from trainer.callbacks.timer import Timer
    from trainer.callbacks.torch_profiler import TorchProfiler

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
    "StragglerMonitor",
    "TensorBoardLogger",
    "ThroughputMonitor",
    "Timer",
    "TorchProfiler",
    "callback_named",
    "read_predictions",
]

HOMES = {
    "CSVLogger": "csv_logger",
    "EarlyStopping": "early_stopping",
    "GradientAccumulationScheduler": "gradient_accumulation",
    "LambdaCallback": "lambda_callback",
    "LearningRateMonitor": "lr_monitor",
    "ModelCheckpoint": "checkpoint",
    "ModelSummary": "model_summary",
    "PredictionWriter": "prediction_writer",
    "ProgressBar": "progress_bar",
    "SimpleProfiler": "profiler",
    "StragglerMonitor": "straggler_monitor",
    "TensorBoardLogger": "tensorboard",
    "ThroughputMonitor": "throughput",
    "Timer": "timer",
    "TorchProfiler": "torch_profiler",
}
"""In which file of this folder each callback is."""

Kind = TypeVar("Kind", bound=Callback)


class Table(Mapping[str, type[Kind]], Generic[Kind]):
    """Classes by name. One is imported when it is asked for: most runs use a few of them."""

    def __init__(self, classes: Mapping[str, str]) -> None:
        self._classes = classes

    def __getitem__(self, name: str) -> type[Kind]:
        kind: type[Kind] = __getattr__(self._classes[name])
        return kind

    def __iter__(self) -> Iterator[str]:
        return iter(self._classes)

    def __len__(self) -> int:
        return len(self._classes)

    def __contains__(self, name: object) -> bool:
        return name in self._classes


CALLBACKS: Mapping[str, type[Callback]] = Table({name: name for name in HOMES})
"""Every callback of this package by name."""

LOGGERS: Mapping[str, type[Logger]] = Table({"csv": "CSVLogger", "tensorboard": "TensorBoardLogger"})
PROFILERS: Mapping[str, type[Callback]] = Table({"simple": "SimpleProfiler", "torch": "TorchProfiler"})


def callback_named(name: str) -> type[Callback]:
    """The class of that name.

    Raises:
        ConfigError: there is none.
    """
    if name not in CALLBACKS:
        raise unknown_name_error("callback", name, CALLBACKS)
    return CALLBACKS[name]


def __getattr__(name: str) -> Any:
    file = "prediction_writer" if name == "read_predictions" else HOMES.get(name)
    if file is None:
        raise AttributeError(f"module 'trainer.callbacks' has no attribute {name!r}")
    return getattr(import_module(f"trainer.callbacks.{file}"), name)
