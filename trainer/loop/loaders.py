"""Make the loaders of a stage from the arguments of the call, the data module or the module."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from copy import copy, deepcopy
from inspect import signature
from pathlib import Path
from typing import Any, Literal

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from trainer.data.adapters import make_batch_loader, named_loaders
from trainer.data.loader import BatchLoader
from trainer.data.sharded_loader import is_plain
from trainer.errors import ConfigError
from trainer.loop.run import Run
from trainer.runs.hook_checks import takes
from trainer.runs.resolved_config import ResolvedConfig
from trainer.settings import Settings

log = logging.getLogger("trainer")

EVALUATED: dict[str, Literal["val", "test", "predict"]] = {"validate": "val", "test": "test", "predict": "predict"}
"""The kind of loader that a stage evaluates."""


def refuse_data(loaders: Any, stage: str) -> None:
    """Refuse iterables without batches: datasets (which yield single samples), tensors, strings and paths.

    Raises:
        ConfigError: `loaders` is or contains one; the message says how to make a loader.
    """
    several = [*loaders.values()] if isinstance(loaders, Mapping) else loaders
    for loader in [loaders, *several] if isinstance(several, (list, tuple)) else [loaders]:
        is_dataset = isinstance(loader, Dataset) and not isinstance(loader, IterableDataset)
        if is_dataset or (loader is loaders and isinstance(loader, (torch.Tensor, str, Path))):
            raise ConfigError(
                f"{stage}() got a {type(loader).__name__} instead of a loader. Give it batches: DataLoader(dataset, "
                "batch_size=32), for example with TensorDataset(inputs, targets)."
            )


def make_loaders(run: Run, given: dict[str, Any], keeps_val: bool = False) -> None:
    """Make the run's loaders from the ones `given`, by stage, or from the data module's or module's.

    Args:
        keeps_val: leave the validation loaders of a `fit` as they are.

    Raises:
        ConfigError: a loader is missing or empty.
    """
    source = run.datamodule if run.datamodule is not None else run.module

    def given_or_made(kind: str) -> Any:
        method = f"{kind}_dataloader"
        return getattr(source, method)() if given[kind] is None and source.overrides(method) else given[kind]

    if run.stage == "fit":
        train = given_or_made("train")
        _require(run, train, "train_dataloaders", "train_dataloader")
        run.loaders.set_training(_train_loader(run, train), train)
        if keeps_val:
            return
        val = given_or_made("val")
        refuse_data(val, "fit")
        run.loaders.set_evaluation("val", _val_loaders_of_fit(run, train, val), val)
        if run.loaders.val:
            _check_intervals(run.config, run.num_training_batches)
    else:
        kind = EVALUATED[run.stage]
        loaders, limit = given_or_made(kind), getattr(run.settings, f"limit_{kind}_batches")
        if limit != 0:
            _require(run, loaders, "dataloaders", f"{kind}_dataloader")
        run.loaders.set_evaluation(kind, _evaluation_loaders(run, loaders, _limit(run.settings, limit)), loaders)
    if len(run.loaders.evaluated) > 1:
        _check_loader_index(run)


def _val_loaders_of_fit(run: Run, train: Any, val: Any) -> dict[str, BatchLoader]:
    settings, name = run.settings, type(run.module).__name__
    if not run.module.overrides("validation_step"):
        if val is not None and not settings.overfit_batches:
            run.values.report_once(f"{name} has no validation_step: the validation loader is not used")
        return {}
    limit = _limit(settings, settings.overfit_batches or settings.limit_val_batches)
    loaders = _evaluation_loaders(run, train if settings.overfit_batches else val, limit)
    if limit and not loaders:
        run.values.report_once(f"{name} has a validation_step, but there is no validation loader: nothing is validated")
    return loaders


def _check_loader_index(run: Run) -> None:
    """Check that a step can take the index of one of several loaders, which is passed by position.

    Raises:
        ConfigError: it takes the index by keyword only.
    """
    name = f"{'validation' if run.loaders.val else run.stage}_step"
    step = getattr(run.module, name)
    by_keyword = any(p.kind in (p.KEYWORD_ONLY, p.VAR_KEYWORD) for p in signature(step).parameters.values())
    if by_keyword and not takes(step, 3):
        raise ConfigError(
            f"{type(run.module).__name__}.{name} cannot take dataloader_idx by position, and there are several "
            f"loaders: define {name}(self, batch, batch_idx, dataloader_idx=0)."
        )


def _train_loader(run: Run, loader: Any) -> BatchLoader:
    settings = run.settings
    limit = _limit(settings, settings.overfit_batches or settings.limit_train_batches)
    if limit == 0:
        log.warning("limit_train_batches=0: nothing is trained")
    batch_loader = _batch_loader(run, loader, "", limit, training=True)
    if batch_loader.note is not None:
        log.info("%s", batch_loader.note)
    if batch_loader.one_shot and run.config.max_epochs not in (0, 1) and run.config.max_steps is None:
        raise ConfigError(
            "the training loader can be iterated only once, but max_epochs allows more than one epoch: pass something "
            "that can be iterated again (a list, a DataLoader), or set max_epochs=1."
        )
    return batch_loader


def _check_intervals(config: ResolvedConfig, length: int | None) -> None:
    """Raise ConfigError if an epoch of this length, or of an unknown one, cannot have the validations asked for."""
    interval = config.val_check_interval
    if config.settings.check_val_every_n_epoch is None:
        return
    if length is None and isinstance(interval, float) and interval < 1.0:
        raise ConfigError(
            f"val_check_interval={interval} is a fraction of an epoch, but the training loader has no length: give "
            "a number of batches (an int)."
        )
    if length is not None and isinstance(interval, int) and interval > length > 0:
        raise ConfigError(
            f"val_check_interval={interval} is more than the {length} training batches of an epoch, so validation "
            "would never run. Give a smaller number, or set check_val_every_n_epoch=None to count over epochs."
        )


def _evaluation_loaders(run: Run, loaders: Any, limit: int | float) -> dict[str, BatchLoader]:
    named = named_loaders(loaders) if limit != 0 else {}
    train = run.loaders.given.get("train")
    if isinstance(train, DataLoader) and not is_plain(train):
        named = {name: _separate_copy(train) if loader is train else loader for name, loader in named.items()}
    return {name: _batch_loader(run, loader, name, limit, training=False) for name, loader in named.items()}


def _separate_copy(loader: DataLoader[Any]) -> DataLoader[Any]:
    """Return a copy over the same dataset: a loader with a state knows only the place of its newest iterator."""
    same = copy(loader)
    parts = deepcopy((loader.sampler, loader.batch_sampler), {id(loader.dataset): loader.dataset})
    vars(same).update(sampler=parts[0], batch_sampler=parts[1], _iterator=None)
    return same


def _batch_loader(run: Run, loader: Any, name: str, limit: int | float, *, training: bool) -> BatchLoader:
    return make_batch_loader(
        loader,
        name=name,
        rank=run.strategy.processes.reader,
        world_size=run.strategy.processes.readers,
        seed=run.session.seed,
        training=training,
        limit=limit,
        shuffle=False if run.settings.overfit_batches else None,
        seed_per_sample=run.settings.seed_per_sample,
        split=run.settings.use_distributed_sampler,
        pad=run.strategy.collective_forward,
    )


def _require(run: Run, loaders: Any, argument: str, method: str) -> None:
    """Raise ConfigError for a loader that is missing or yields no batches."""
    if loaders is not None:
        refuse_data(loaders, run.stage)
        return
    source = run.datamodule if run.datamodule is not None else run.module
    if source.overrides(method):
        raise ConfigError(f"{type(source).__name__}.{method} returned None. Did you forget 'return'?")
    raise ConfigError(
        f"{run.stage}() has nothing to run on: define {method} in {type(source).__name__}, or pass {argument}= or "
        "datamodule= (on the command line: --data)."
    )


def _limit(settings: Settings, limit: int | float) -> int | float:
    return int(settings.fast_dev_run) or limit
