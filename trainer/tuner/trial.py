"""Trial: a short training of copies, which leaves the originals unchanged."""

from __future__ import annotations

import copy
import logging
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import NoneType
from typing import Any

import torch

from trainer.callback import Callback
from trainer.data.datamodule import DataModule
from trainer.data.untouched import untouched
from trainer.errors import ConfigError
from trainer.model.copies import deepcopy_with_functions
from trainer.module import TrainModule
from trainer.optimizers import parse_optimizers
from trainer.seed import global_seed
from trainer.settings import ARGUMENTS, Settings
from trainer.state.held_generators import isolated_with, parts_of
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
    prepare: Callable[[TrainModule, DataModule | None], None] | None = None,
    **arguments: Any,
) -> None:
    """Train a copy of the module for some steps, with a trainer's settings, without callbacks, loggers and schedulers.

    The module, the data module, the loader and the random numbers stay unchanged, also after an error.

    Args:
        callback: the trial's only callback.
        prepare: called with the copies before the trial.
        arguments: of the trial's Trainer, in place of the settings.

    Raises:
        ConfigError: the module or the data cannot be copied.
    """
    # A copy shares the generators in the class, at module level and in closures with the original.
    owners = parts_of({"module": module}, {}) | ({} if datamodule is None else {"data module": datamodule})
    isolated = isolated_with(owners, (), torch.device("cpu"))
    with isolated, ExitStack() as cleanup, _quiet(), tempfile.TemporaryDirectory() as folder:
        memo: dict[int, Any] = {}
        try:
            module = deepcopy_with_functions(module, memo)
            datamodule, strategy = deepcopy_with_functions(datamodule, memo), copy.deepcopy(settings.strategy, memo)
        except Exception as error:
            words = f"the tuner cannot copy the module and the data module: {error}."
            raise ConfigError(f"{words} Build in `setup` or `configure_model` what cannot be copied.") from error
        if loader is not None:
            loader = cleanup.enter_context(untouched(loader, memo))
        source: Any = module if datamodule is None else datamodule
        make = source.train_dataloader
        # The program may own the result; copies are not copied again.
        copies = {id(one): one for one in memo.values()}
        source.train_dataloader = lambda: cleanup.enter_context(untouched(make(), copies, is_new=True))
        _leave_out_schedulers(module)
        module.configure_callbacks = list  # type: ignore[method-assign]
        if prepare is not None:
            prepare(module, datamodule)
        own = {name: getattr(settings, name) for name in ARGUMENTS}
        if own["accumulate_grad_batches"] == "auto":
            own["accumulate_grad_batches"] = 1
        if own["seed"] is None:  # a new one for each trial would have each draw other samples
            own["seed"] = global_seed() or 0
        given = {"callbacks": [callback], "max_steps": max_steps, "default_root_dir": folder, "strategy": strategy}
        Trainer(**{**own, **WITHOUT, **given, **arguments}).fit(module, loader, datamodule=datamodule)


def _leave_out_schedulers(module: TrainModule) -> None:
    configure = module.configure_optimizers

    def optimizers_only() -> Any:
        calls_step = not module.overrides("lr_scheduler_step")
        return parse_optimizers(configure(), type(module).__name__, module.automatic_optimization, calls_step)[0]

    module.configure_optimizers = optimizers_only  # type: ignore[method-assign]


@contextmanager
def _quiet() -> Iterator[None]:
    """Hide the messages at the start of each training."""
    log = logging.getLogger("trainer")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(level)


COPIED = ("num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "generator", "persistent_workers")


def loader_like(loader: Any, **changes: Any) -> Any:
    """Return a DataLoader like another one, with other options.

    Raises:
        ConfigError: the loader is not a plain DataLoader, or has its own batch sampler and `batch_size` changes.
    """
    from torch.utils.data import BatchSampler, DataLoader, IterableDataset

    plain = type(getattr(loader, "batch_sampler", None)) in (BatchSampler, NoneType)
    if type(loader) is not DataLoader or ("batch_size" in changes and not plain):
        raise ConfigError(
            f"the loader is a {type(loader).__name__}, or has its own batch sampler: give a plain DataLoader, or use "
            "an attribute batch_size of the module or the data module in train_dataloader"
        )
    options = {name: getattr(loader, name) for name in COPIED} | changes
    options["persistent_workers"] &= options["num_workers"] > 0
    if not plain:
        return DataLoader(loader.dataset, batch_sampler=loader.batch_sampler, **options)
    options = {"batch_size": loader.batch_size, "drop_last": loader.drop_last, **options}
    if not isinstance(loader.dataset, IterableDataset):
        options["sampler"] = loader.sampler
    return DataLoader(loader.dataset, **options)
