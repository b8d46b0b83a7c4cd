"""Settings: the arguments of `Trainer`, with their help texts and the checks that need neither torch nor a process."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from trainer.arguments import describe_annotation, fits, hints_of, kept_path, local_path, with_python_numbers
from trainer.errors import ConfigError, did_you_mean
from trainer.names.misses import is_default, words_for

if TYPE_CHECKING:
    from trainer.callback import Callback
    from trainer.logger import Logger
    from trainer.precision import Precision
    from trainer.strategy import Strategy


def argument(default: Any, help: str, least: int | None = None) -> Any:
    """Return a field of `Settings`, whose `help` is shown by `trainer fit --help`; `least`: the smallest number."""
    return dataclasses.field(default=default, metadata={"help": help, "least": least})


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The arguments of `Trainer`, all by keyword."""

    accelerator: str = argument(
        "auto",
        'Kind of device: "cpu", "cuda" (or "gpu"), "mps", "tpu", another that torch.accelerator has, or "auto": the '
        "best there is.",
    )
    devices: int | str | list[int] = argument(
        "auto",
        'Devices on this machine: a number, -1 or "auto" for all GPUs (one process on CPU), or a list of GPU numbers.',
    )
    num_nodes: int = argument(1, "Machines that take part; each one starts this same program (with torchrun).", least=1)
    strategy: str | Strategy = argument(
        "auto",
        'Where it runs: a name such as "ddp" or "fsdp"; "auto" (ddp for several devices); or a Strategy object with '
        "options.",
    )
    precision: str | int | Precision = argument(
        "32-true", 'Numbers: a name such as "32-true" or "bf16-mixed", or a Precision object.'
    )

    max_epochs: int | None = argument(
        None,
        "Stop after this many epochs. Default: 1000 when neither max_steps nor max_time is given. -1: no limit.",
        least=-1,
    )
    max_steps: int | None = argument(
        None, "Stop after this many steps (updates of the weights). Default: no limit.", least=-1
    )
    max_time: str | timedelta | dict[str, float] | float | None = argument(
        None, 'Stop after this much training time: "DD:HH:MM:SS", a timedelta, {"hours": 2}, or seconds.'
    )
    deadline: str | datetime | None = argument(
        None, 'Stop and save before this time, such as "2026-05-31T18:00" (local time, or with a zone: "...+02:00").'
    )
    deadline_margin: float | None = argument(
        None,
        "Seconds to stop before the deadline. Default: estimated from the times of steps, validations and saves.",
        least=0,
    )
    min_epochs: int | None = argument(None, "Ignore early stopping before this many epochs.", least=0)
    min_steps: int | None = argument(
        None,
        "Ignore early stopping before this many steps. Without min_epochs, the first epoch is completed, too.",
        least=0,
    )

    limit_train_batches: int | float = argument(
        1.0,
        "Batches per training epoch and process: a number (int), or a fraction of the loader (float); 0: no training.",
        least=0,
    )
    limit_val_batches: int | float = argument(
        1.0, "The same for each validation loader; 0 turns validation off.", least=0
    )
    limit_test_batches: int | float = argument(1.0, "The same for each test loader.", least=0)
    limit_predict_batches: int | float = argument(1.0, "The same for each prediction loader.", least=0)
    overfit_batches: int | float = argument(
        0, "Train and validate on this many (or this fraction of) training batches, unshuffled; 0: off.", least=0
    )
    fast_dev_run: bool | int = argument(
        False,
        "Run one batch (or this many) of everything, without loggers and checkpoints, to see that the code works.",
        least=0,
    )

    val_check_interval: int | float | str | timedelta | dict[str, float] = argument(
        1.0,
        'Validate every so many training batches (int), fraction of an epoch (float), or time: "00:01:00:00", a '
        "timedelta.",
    )
    check_val_every_n_epoch: int | None = argument(
        1, "Validate in every n-th epoch only; None: val_check_interval counts batches across epochs.", least=1
    )
    num_sanity_val_steps: int = argument(
        2, "Validation batches run before training, to find errors early; -1: all, 0: none.", least=-1
    )

    accumulate_grad_batches: int | Literal["auto"] = argument(
        1,
        'Micro-batches per step (the window). "auto": one batch, split where it does not fit into the memory.',
        least=1,
    )
    gradient_clip_val: float | None = argument(
        None, "Clip gradients at this value before every step; None: do not.", least=0
    )
    gradient_clip_algorithm: Literal["norm", "value"] = argument(
        "norm", "Clip the global norm over all parameters, or each element's value."
    )

    log_every_n_steps: int = argument(
        50,
        "Steps between two flushes of the log: values are reduced, read and sent to loggers. 0: by epoch only.",
        least=0,
    )
    callbacks: Callback | list[Callback] | None = argument(
        None, "Callbacks, which are called at the hooks of a run; see trainer/callback.py."
    )
    logger: bool | Logger | list[Logger] = argument(
        True, "Loggers. True: a CSV file, and TensorBoard where it is installed."
    )
    enable_progress_bar: bool = argument(True, "Show a progress bar (plain lines where there is no terminal).")
    enable_checkpointing: bool = argument(
        True, "Write checkpoints; the default is one after every epoch, the newest kept."
    )
    enable_model_summary: bool = argument(True, "Print a table of the model's layers at the start.")
    default_root_dir: str | Path = argument("runs", "Run directories are made here: version_0, version_1, ...")

    max_restarts: int = argument(
        0,
        "Start all processes again, from the last checkpoint, when one of them fails: this many times at most.",
        least=0,
    )
    watchdog_seconds: float | None = argument(
        1800.0, "Several processes: end, with all stacks, when one does nothing for so long; None, 0: never.", least=0
    )

    seed: int | None = argument(
        None,
        "Seed of everything random: weights, dropout, order of the data. Default: seed_everything's, or a new one.",
        least=0,
    )
    seed_per_sample: bool = argument(
        False,
        "Seed random augmentation for each sample, not each micro-batch: the same on any number of processes. Slower.",
    )
    use_distributed_sampler: bool = argument(
        True, "Split DataLoaders over the processes. False: each process gets what its own sampler gives."
    )
    reload_dataloaders_every_n_epochs: int = argument(
        0, "Ask the module or data module for new loaders every so many epochs; 0: never.", least=0
    )
    sync_batchnorm: bool = argument(
        False, "BatchNorm over the batches of all processes (torch.nn.SyncBatchNorm); needs GPUs."
    )
    plugins: Any = argument(
        None, "Lightning's plugins: a precision, a CheckpointIO, a cluster environment, or TorchSyncBatchNorm."
    )
    deterministic: bool | Literal["warn"] = argument(
        False, "Use only deterministic algorithms (torch.use_deterministic_algorithms)."
    )
    benchmark: bool | None = argument(
        None, "Let cuDNN try algorithms, if not deterministic (torch.backends.cudnn.benchmark). Default: torch's own."
    )
    detect_anomaly: bool = argument(
        False, "Find the operation that made a gradient NaN, and refuse a loss that is not finite. Slow."
    )
    inference_mode: bool = argument(True, "Evaluate under torch.inference_mode; False: torch.no_grad.")
    profiler: str | Callback | None = argument(
        None,
        'Where the time goes: "bound" says what to change, "simple" prints a table, "torch" traces; or a callback.',
    )
    compile: bool | str | dict[str, Any] = argument(
        False, 'torch.compile in place: True, "blocks", a mode such as "max-autotune", or its arguments (and "blocks").'
    )
    activation_checkpointing: str | int | list[Any] | Callable[..., bool] | None = argument(
        None, 'Blocks whose activations are computed again in the backward: "auto", class names, or as in find_blocks.'
    )

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if type(value) is type(field.default) and value == field.default:
                continue
            default = value is None and field.name in NONE_IS_DEFAULT
            object.__setattr__(self, field.name, field.default if default else with_python_numbers(value))
        for name in ("gradient_clip_val", "watchdog_seconds"):
            if isinstance(value := getattr(self, name), (int, float)) and value == 0:  # off
                object.__setattr__(self, name, None)

    def problems(self) -> list[str]:
        """Return the problems of the values, one sentence each; objects are checked by `runs.resolved_config`."""
        wrong: dict[str, str] = {}
        for field in dataclasses.fields(self):
            value, default = getattr(self, field.name), field.default
            if type(value) is type(default) and value == default:
                continue
            if problem := self._problem_of(field):
                wrong[field.name] = problem
        fitting = dataclasses.replace(self, **{name: getattr(Settings, name) for name in wrong})
        of_values = [*_wrong_numbers(fitting), *_wrong_times(fitting), *_contradictions(fitting)]
        return [*wrong.values(), *of_values]

    def _problem_of(self, field: dataclasses.Field[Any]) -> str | None:
        """Return the problem of a value that does not fit its annotation, or is too small."""
        name, value, least = field.name, getattr(self, field.name), field.metadata["least"]
        annotation = hints_of(Settings.__init__, Settings)[name]
        if not fits(value, annotation):
            return f"{name}={value!r}: give {describe_annotation(annotation)}."
        if least is not None and isinstance(value, (int, float)) and value < least:
            return f"{name}={value!r}: give a number from {least}."
        if isinstance(value, int) and value > sys.maxsize:
            return f"{name}={value!r}: give at most {sys.maxsize}, which Python can count to."
        return None

    def logs_at(self, step: int) -> bool:
        """Return True if the log is flushed after this many steps."""
        return self.log_every_n_steps > 0 and step % self.log_every_n_steps == 0

    @property
    def window(self) -> int:
        """Return the micro-batches of a run's first step; 1 for "auto"."""
        return 1 if self.accumulate_grad_batches == "auto" else self.accumulate_grad_batches

    @property
    def max_seconds(self) -> float | None:
        """Return `max_time` in seconds."""
        return None if self.max_time is None else read_duration(self.max_time, "max_time")

    @property
    def validation_seconds(self) -> float | None:
        """Return `val_check_interval` in seconds, if it is a time."""
        interval = self.val_check_interval
        is_time = isinstance(interval, (str, timedelta, dict))
        return read_duration(interval, "val_check_interval") if is_time else None

    @property
    def least_epochs(self) -> int:
        """Return the epochs before which a stop is deferred; with `min_steps` alone 1, as in Lightning."""
        return int(self.min_steps is not None) if self.min_epochs is None else self.min_epochs

    @cached_property
    def root(self) -> Path:
        """Return `default_root_dir` as an absolute path, fixed at the first call."""
        return kept_path(self.default_root_dir)

    @property
    def latest_end(self) -> datetime | None:
        """Return `deadline` with a time zone."""
        return None if self.deadline is None else read_deadline(self.deadline)


ARGUMENTS = tuple(field.name for field in dataclasses.fields(Settings))
"""The names of the Trainer's arguments."""


_LIMITS = ("limit_train_batches", "limit_val_batches", "limit_test_batches", "limit_predict_batches")
PROFILERS = {
    "simple": "SimpleProfiler",
    "bound": "BoundProfiler",
    "advanced": "AdvancedProfiler",
    "torch": "TorchProfiler",
    "pytorch": "TorchProfiler",
}
"""Names for `Trainer(profiler=)` -> classes of `trainer.callbacks`."""
NONE_IS_DEFAULT = (
    *_LIMITS,
    *("precision", "val_check_interval", "num_sanity_val_steps", "gradient_clip_algorithm", "log_every_n_steps"),
    *("logger", "enable_progress_bar", "enable_checkpointing", "enable_model_summary"),
    *("default_root_dir", "deterministic"),
)
"""Arguments with the default None in Lightning: None stands for the default of this class."""


def wrong_names(positional: Collection[object], unknown: Mapping[str, object]) -> list[str]:
    """Return a problem for positional arguments, and one for each name that `Trainer` does not take."""
    problems = ["Trainer takes its arguments by keyword, for example Trainer(max_epochs=3)."] if positional else []
    strangers = [name for name, value in unknown.items() if not is_default("Trainer", name, value)]
    words = words_for("Trainer()", strangers)
    for name in strangers:
        hint = did_you_mean(name, ARGUMENTS, words) or " trainer fit --help lists them all."
        problems.append(f"Trainer has no argument {name!r}.{hint}")
    return problems


DEFAULT_MAX_EPOCHS = 1000
"""Epochs of a `fit` without max_epochs, max_steps and max_time."""


def error_of(attempt: Callable[[], object]) -> list[str]:
    """Return the message of the ConfigError that a function raises; empty if it raises none."""
    try:
        attempt()
    except ConfigError as error:
        return [str(error)]
    return []


def _wrong_numbers(settings: Settings) -> list[str]:
    problems = []
    for name in (*_LIMITS, "overfit_batches", "val_check_interval"):
        value = getattr(settings, name)
        if isinstance(value, float) and not 0 <= value <= 1:
            problems.append(f"{name}={value!r}: give a number of batches (int), or a fraction from 0.0 to 1.0 (float).")
    if settings.val_check_interval == 0:
        problems.append("val_check_interval=0: to turn validation off use limit_val_batches=0.")
    return problems


def _wrong_times(settings: Settings) -> list[str]:
    problems = [
        *error_of(lambda: local_path(settings.default_root_dir, "default_root_dir")),
        *error_of(lambda: settings.max_seconds),
        *error_of(lambda: settings.validation_seconds),
        *error_of(lambda: _refuse_late_deadline(settings.latest_end)),
    ]
    interval = settings.val_check_interval
    if settings.check_val_every_n_epoch is None and isinstance(interval, float):
        problems.append(
            f"check_val_every_n_epoch=None with val_check_interval={interval}: give the number of batches (an int) or "
            "the time between validations."
        )
    return problems


def _refuse_late_deadline(deadline: datetime | None) -> None:
    if deadline is not None and deadline <= datetime.now().astimezone():
        raise ConfigError(f"deadline={str(deadline)!r} is over: give one in the future, or none.")


def _contradictions(settings: Settings) -> list[str]:
    problems = []
    for unit in ("epochs", "steps"):
        minimum, maximum = getattr(settings, f"min_{unit}"), getattr(settings, f"max_{unit}")
        if minimum is not None and maximum is not None and 0 <= maximum < minimum:
            problems.append(f"min_{unit}={minimum} is more than max_{unit}={maximum}.")
    if settings.overfit_batches and settings.limit_train_batches != 1.0:
        problems.append("overfit_batches and limit_train_batches both limit the training batches: choose one.")
    return problems


# -- times -------------------------------------------------------------------------------------------------------------


def read_duration(duration: str | timedelta | dict[str, float] | float | None, name: str = "duration") -> float | None:
    """Return a duration in seconds, and None for None.

    Args:
        duration: "DD:HH:MM:SS" (one or two digits each), a timedelta, a dict of timedelta's arguments, or seconds.
        name: of the argument, for the error.

    Raises:
        ConfigError: `duration` has another form, or is negative.
    """
    if duration is None:
        return None
    seconds: Any = duration
    try:
        if isinstance(duration, str):
            units = ("days", "hours", "minutes", "seconds")
            seconds = dict(zip(units, map(int, duration.split(":")), strict=True))
        if isinstance(seconds, dict):
            seconds = timedelta(**seconds)
    except (TypeError, ValueError, OverflowError):
        seconds = None
    if isinstance(seconds, timedelta):
        seconds = seconds.total_seconds()
    if not fits(seconds, float) or seconds < 0:
        raise ConfigError(
            f"{name}={duration!r}: give 'DD:HH:MM:SS' (such as '00:12:00:00'), a timedelta, a dict such as "
            "{'hours': 2}, or seconds (a number), from 0."
        )
    return float(seconds)


def read_deadline(value: str | datetime) -> datetime:
    """Return an ISO 8601 string or a datetime as a datetime with a time zone, by default the local one.

    Raises:
        ConfigError: `value` cannot be read.
    """
    try:
        found = datetime.fromisoformat(value) if isinstance(value, str) else value
    except ValueError:
        raise ConfigError(f"deadline={value!r}: give a datetime or ISO 8601, such as '2026-05-31T18:00'.") from None
    return found.astimezone()
