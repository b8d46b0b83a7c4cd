"""Trial: a short training of copies, which leaves the originals as they were."""

from __future__ import annotations

import copy
import logging
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.data import DataLoader

from trainer.callback import Callback
from trainer.data.datamodule import DataModule
from trainer.errors import ConfigError
from trainer.module import TrainModule
from trainer.optimizers import parse_optimizers
from trainer.seed import isolated_rng
from trainer.settings import ARGUMENTS, Settings
from trainer.trainer import Trainer

WITHOUT: dict[str, Any] = {
    "logger": False,
    "enable_progress_bar": False,
    "enable_checkpointing": False,
    "enable_model_summary": False,
    "num_sanity_val_steps": 0,
    "limit_val_batches": 0,
    "max_epochs": -1,
    "min_epochs": None,
    "min_steps": None,
    "max_time": None,
    "deadline": None,
    "fast_dev_run": False,
    "max_restarts": 0,
    "profiler": None,
    "detect_anomaly": False,
}
"""Settings of a trial in place of the user's."""


def run_trial(
    settings: Settings,
    module: TrainModule,
    loader: Any,
    datamodule: DataModule | None,
    callback: Callback,
    max_steps: int,
    schedules: bool = False,
    prepare: Callable[[TrainModule, DataModule | None], None] | None = None,
    arguments: Mapping[str, Any] | None = None,
) -> None:
    """Train a copy of the module for some steps, with a trainer's settings but without its callbacks and loggers.

    The module, the data module and the random numbers stay as they were, also after an error.

    Args:
        callback: the trial's only callback.
        schedules: have the module's schedulers step.
        prepare: called with the copies before the trial.
        arguments: of the trial's Trainer, in place of the settings.
    """
    try:
        module, datamodule, strategy = copy.deepcopy((module, datamodule, settings.strategy))
    except Exception as error:
        raise ConfigError(
            f"the tuner works with copies of the module and the data module, and cannot copy them ({error}): build in "
            "`setup` or `configure_model` what cannot be copied."
        ) from error
    if not schedules:
        _leave_out_schedulers(module)
    if prepare is not None:
        prepare(module, datamodule)
    own = {name: getattr(settings, name) for name in ARGUMENTS}
    with isolated_rng(), _same_generators(loader), _quiet(), tempfile.TemporaryDirectory() as folder:
        if own["accumulate_grad_batches"] == "auto":
            own["accumulate_grad_batches"] = 1
        given = {"callbacks": [callback], "max_steps": max_steps, "default_root_dir": folder, "strategy": strategy}
        Trainer(**{**own, **WITHOUT, **given, **(arguments or {})}).fit(module, loader, datamodule=datamodule)


def _leave_out_schedulers(module: TrainModule) -> None:
    configure = module.configure_optimizers

    def optimizers_only() -> Any:
        calls_step = not module.overrides("lr_scheduler_step")
        return parse_optimizers(configure(), type(module).__name__, module.automatic_optimization, calls_step)[0]

    module.configure_optimizers = optimizers_only  # type: ignore[method-assign]


@contextmanager
def _same_generators(loader: Any) -> Iterator[None]:
    """Restore the generators of a DataLoader and its sampler at the end."""
    parts: list[Any] = [loader, loader.sampler] if isinstance(loader, DataLoader) else []
    generators = [part.generator for part in parts if isinstance(getattr(part, "generator", None), torch.Generator)]
    states = [generator.get_state() for generator in generators]
    try:
        yield
    finally:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)


@contextmanager
def _quiet() -> Iterator[None]:
    """Leave out what each start of a training logs."""
    log = logging.getLogger("trainer")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(level)
