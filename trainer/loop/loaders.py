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

from trainer.callback import Callback
from trainer.data.adapters import make_batch_loader, named_loaders
from trainer.data.loader import BatchLoader
from trainer.data.sharded_loader import is_plain
from trainer.errors import ConfigError, raise_problems
from trainer.loop.run import Run
from trainer.module import TrainModule
from trainer.runs.hook_checks import EVALUATION_ARGUMENTS, parameters_of, takes
from trainer.settings import Settings

log = logging.getLogger("trainer")

EVALUATED: dict[str, Literal["val", "test", "predict"]] = {"validate": "val", "test": "test", "predict": "predict"}
"""The kind of loader that a stage evaluates."""


def refuse_data(loaders: Any, stage: str) -> None:
    """Refuse iterables without batches: datasets (which yield single samples), tensors, strings and paths.

    Raises:
        ConfigError: `loaders` is or contains one; the message says how to make a loader.
    """
    several = list(loaders.values()) if isinstance(loaders, Mapping) else loaders
    inside = [one for one in several if isinstance(one, Dataset)] if isinstance(several, (list, tuple)) else []
    for loader in [loaders, *inside]:
        if isinstance(loader, Dataset) and not isinstance(loader, IterableDataset):
            raise ConfigError(
                f"{stage}() got the dataset {type(loader).__name__} instead of a loader. Give it batches: "
                "DataLoader(dataset, batch_size=32)."
            )
        if isinstance(loader, (torch.Tensor, str, Path)):
            raise ConfigError(
                f"{stage}() got a {type(loader).__name__} instead of a loader. Give a DataLoader, for example "
                "DataLoader(TensorDataset(inputs, targets), batch_size=32)."
            )


def make_loaders(run: Run, given: dict[str, Any]) -> None:
    """Make the run's loaders from those `given`, by stage, or those of the data module or module.

    Raises:
        ConfigError: a loader is missing or empty.
    """
    settings, source = run.settings, run.datamodule if run.datamodule is not None else run.module
    if run.stage == "fit":
        train = given["train"] if given["train"] is not None else source.train_dataloader()
        if train is None:
            raise _no_loader(run, "train_dataloaders", "train_dataloader")
        batch_loader = _train_loader(run, train)
        run.loaders.set_training(batch_loader, train)
        val = given["val"] if given["val"] is not None else source.val_dataloader()
        refuse_data(val, "fit")
        run.loaders.set_evaluation("val", _val_loaders_of_fit(run, train, val), val)
        if run.val_loaders:
            _check_intervals(run, batch_loader)
    else:
        kind = EVALUATED[run.stage]
        method, limit = f"{kind}_dataloader", getattr(settings, f"limit_{kind}_batches")
        loaders = given[kind] if given[kind] is not None else getattr(source, method)()
        run.loaders.set_evaluation(kind, _needed(run, loaders, limit, method), loaders)
    if len(run.loaders.evaluated) > 1:
        _check_loader_index(run)


def _val_loaders_of_fit(run: Run, train: Any, val: Any) -> dict[str, BatchLoader]:
    settings, name = run.settings, type(run.module).__name__
    if not run.module.overrides("validation_step"):
        if val is not None and not settings.overfit_batches and run.strategy.processes.is_global_zero:
            log.warning("%s has no validation_step: the validation loader is not used", name)
        return {}
    limit = _limit(settings, settings.overfit_batches or settings.limit_val_batches)
    loaders = _evaluation_loaders(run, train if settings.overfit_batches else val, limit)
    if not loaders and limit and run.strategy.processes.is_global_zero:
        log.warning("%s has a validation_step, but there is no validation loader: nothing is validated", name)
    return loaders


def _check_loader_index(run: Run) -> None:
    """Check that the hooks and the step of an evaluation can take the index of one of several loaders.

    A step with just `batch` and `batch_idx` does without.

    Raises:
        ConfigError: one cannot, such as a step that takes other arguments by keyword only.
    """
    name = "validation" if run.stage in ("fit", "validate") else str(run.stage)
    hooks = [f"on_{name}_batch_start", f"on_{name}_batch_end"]
    of_callbacks: list[Any] = run.callbacks
    methods = [(one, hook, parameters_of(getattr(Callback, hook))) for one in of_callbacks for hook in hooks]
    methods += [(run.module, hook, parameters_of(getattr(TrainModule, hook))) for hook in hooks]
    step = f"{name}_step"
    if any(p.kind in (p.KEYWORD_ONLY, p.VAR_KEYWORD) for p in signature(getattr(run.module, step)).parameters.values()):
        methods.append((run.module, step, EVALUATION_ARGUMENTS))
    raise_problems(
        [
            f"{type(owner).__name__}.{method} cannot take dataloader_idx by position, and there are several loaders: "
            f"define {method}({', '.join(['self', *expected])})."
            for owner, method, expected in methods
            if getattr(owner, method) is not None and not takes(getattr(owner, method), len(expected))
        ],
        f"{run.stage}({type(run.module).__name__})",
    )


def _train_loader(run: Run, loader: Any) -> BatchLoader:
    settings = run.settings
    refuse_data(loader, "fit")
    if settings.limit_train_batches == 0 and not settings.overfit_batches and not settings.fast_dev_run:
        log.warning("limit_train_batches=0: nothing is trained")
    limit = _limit(settings, settings.overfit_batches or settings.limit_train_batches)
    batch_loader = _batch_loader(run, loader, "", limit, training=True)
    if batch_loader.note is not None:
        log.info("%s", batch_loader.note)
    if batch_loader.one_shot and run.config.max_epochs not in (0, 1) and run.config.max_steps is None:
        raise ConfigError(
            "the training loader can be iterated only once, but max_epochs allows more than one epoch: pass something "
            "that can be iterated again (a list, a DataLoader), or set max_epochs=1."
        )
    return batch_loader


def _check_intervals(run: Run, batch_loader: BatchLoader) -> None:
    interval, length = run.config.val_check_interval, batch_loader.length
    if run.settings.check_val_every_n_epoch is None:
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
        named = {name: _apart(train) if loader is train else loader for name, loader in named.items()}
    return {name: _batch_loader(run, loader, name, limit, training=False) for name, loader in named.items()}


def _apart(loader: DataLoader[Any]) -> DataLoader[Any]:
    """Return a copy over the same dataset, because a loader with a state has one place, that of its newest iterator."""
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


def _needed(run: Run, loaders: Any, limit: int | float, method: str) -> dict[str, BatchLoader]:
    if loaders is None and limit != 0:
        raise _no_loader(run, "dataloaders", method)
    refuse_data(loaders, str(run.stage))
    return _evaluation_loaders(run, loaders, _limit(run.settings, limit))


def _limit(settings: Settings, limit: int | float) -> int | float:
    return int(settings.fast_dev_run) or limit


def _no_loader(run: Run, argument: str, method: str) -> ConfigError:
    stage, source = run.stage, run.datamodule if run.datamodule is not None else run.module
    if source.overrides(method):
        return ConfigError(f"{type(source).__name__}.{method} returned None. Did you forget 'return'?")
    return ConfigError(
        f"{stage}() has nothing to run on: define {method} in {type(source).__name__}, or pass {argument}= or "
        "datamodule= (on the command line: --data)."
    )
