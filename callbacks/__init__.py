"""The callbacks, a line for each: the file, and the class as users import it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if __name__ != "trainer.callbacks":
    raise ImportError(
        f"this folder was imported as {__name__!r}; it is a part of the trainer package. "
        "Write `from trainer.callbacks import ...`, and see that no folder of the repository is on sys.path itself."
    )

from trainer.callback import Callback as Callback
from trainer.callbacks.advanced_profiler import AdvancedProfiler as AdvancedProfiler
from trainer.callbacks.advanced_profiler import PassThroughProfiler as PassThroughProfiler
from trainer.callbacks.advanced_profiler import Profiler as Profiler
from trainer.callbacks.bad_step_guard import BadStepGuard as BadStepGuard
from trainer.callbacks.bound_profiler import BoundProfiler as BoundProfiler
from trainer.callbacks.checkpoint import ModelCheckpoint as ModelCheckpoint
from trainer.callbacks.csv_logger import CSVLogger as CSVLogger
from trainer.callbacks.device_stats_monitor import DeviceStatsMonitor as DeviceStatsMonitor
from trainer.callbacks.early_stopping import EarlyStopping as EarlyStopping
from trainer.callbacks.finetuning import BackboneFinetuning as BackboneFinetuning
from trainer.callbacks.finetuning import BaseFinetuning as BaseFinetuning
from trainer.callbacks.grad_norm_monitor import GradNormMonitor as GradNormMonitor
from trainer.callbacks.gradient_accumulation import GradientAccumulationScheduler as GradientAccumulationScheduler
from trainer.callbacks.jsonl_logger import JSONLLogger as JSONLLogger
from trainer.callbacks.lambda_callback import LambdaCallback as LambdaCallback
from trainer.callbacks.lr_monitor import LearningRateMonitor as LearningRateMonitor
from trainer.callbacks.mlflow_logger import MLFlowLogger as MLFlowLogger
from trainer.callbacks.model_summary import ModelSummary as ModelSummary
from trainer.callbacks.on_exception_checkpoint import OnExceptionCheckpoint as OnExceptionCheckpoint
from trainer.callbacks.prediction_writer import BasePredictionWriter as BasePredictionWriter
from trainer.callbacks.prediction_writer import PredictionWriter as PredictionWriter
from trainer.callbacks.prediction_writer import read_predictions as read_predictions
from trainer.callbacks.profiler import SimpleProfiler as SimpleProfiler
from trainer.callbacks.progress_bar import ProgressBar as ProgressBar
from trainer.callbacks.progress_bar import TQDMProgressBar as TQDMProgressBar
from trainer.callbacks.replica_check import ReplicaCheck as ReplicaCheck
from trainer.callbacks.rich_model_summary import RichModelSummary as RichModelSummary
from trainer.callbacks.rich_progress_bar import RichProgressBar as RichProgressBar
from trainer.callbacks.rich_progress_bar import RichProgressBarTheme as RichProgressBarTheme
from trainer.callbacks.run_record import RunRecord as RunRecord
from trainer.callbacks.stochastic_weight_averaging import StochasticWeightAveraging as StochasticWeightAveraging
from trainer.callbacks.straggler_monitor import StragglerMonitor as StragglerMonitor
from trainer.callbacks.tensorboard import TensorBoardLogger as TensorBoardLogger
from trainer.callbacks.throughput import ThroughputMonitor as ThroughputMonitor
from trainer.callbacks.timer import Timer as Timer
from trainer.callbacks.torch_profiler import TorchProfiler as TorchProfiler
from trainer.callbacks.wandb_logger import WandbLogger as WandbLogger
from trainer.callbacks.weight_averaging import EMAWeightAveraging as EMAWeightAveraging
from trainer.callbacks.weight_averaging import WeightAveraging as WeightAveraging
from trainer.logger import Logger as Logger
from trainer.logger import Tracker as Tracker
from trainer.names.added import Table as _Table
from trainer.names.paths import answer_further_names as _answer_further_names

CALLBACKS: _Table[type[Callback]] = _Table(
    {
        name: kind
        for name, kind in list(globals().items())
        if isinstance(kind, type) and issubclass(kind, Callback) and kind not in (Callback, Logger, Tracker)
    },
    "trainer.callbacks",
)
"""Every callback and logger by the name of its class. All are imported with the first `Trainer`, so they import heavy
packages inside the functions that need them."""

_answer_further_names(
    "trainer.callbacks",
    *("checkpoint", "device_stats_monitor", "early_stopping", "finetuning", "lr_monitor", "model_summary"),
    *("on_exception_checkpoint", "prediction_writer", "rich_model_summary", "timer", "weight_averaging"),
)

if not TYPE_CHECKING:  # with it, a type checker would accept every name

    def __dir__() -> list[str]:
        import sys

        from trainer.errors import public_names

        return sorted(public_names(sys.modules[__name__]))
