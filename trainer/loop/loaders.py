"""Which loaders a stage runs on: given by the caller, by the data module, or by the module."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import Dataset, IterableDataset

from trainer.data.adapters import make_batch_loader, named_loaders
from trainer.data.loader import BatchLoader
from trainer.data.sharded_loader import is_plain
from trainer.errors import ConfigError

if TYPE_CHECKING:
    from trainer.trainer import Trainer

log = logging.getLogger("trainer")


def refuse_data(loaders: Any, stage: str) -> None:
    """Refuse what can be iterated but holds no batches: a dataset (it yields single samples), a tensor, a text.

    Raises:
        ConfigError: with how to make a loader of it.
    """
    several = list(loaders.values()) if isinstance(loaders, Mapping) else loaders
    inside = [one for one in several if isinstance(one, Dataset)] if isinstance(several, (list, tuple)) else []
    for loader in [loaders, *inside]:
        if isinstance(loader, Dataset) and not isinstance(loader, IterableDataset):
            raise ConfigError(
                f"{stage}() got the dataset {type(loader).__name__} in the place of a loader. Give it batches: "
                "DataLoader(dataset, batch_size=32)."
            )
        if isinstance(loader, (torch.Tensor, str, Path)):
            raise ConfigError(
                f"{stage}() got a {type(loader).__name__} in the place of a loader. Give a DataLoader, for example "
                "DataLoader(TensorDataset(inputs, targets), batch_size=32)."
            )


def micro_batch_of(loader: Any) -> int | None:
    """Samples of a micro-batch on one process, if the loader is one that is divided among them; None: not known."""
    return loader.batch_size if is_plain(loader) else None


def make_loaders(trainer: Trainer, given: dict[str, Any]) -> None:
    """Make the feeds of the stage: training and validation for fit, else the stage's own.

    Raises:
        ConfigError: there is no loader, or an empty one.
    """
    settings, module = trainer.settings, trainer.module
    trainer.train_loader, trainer.val_loaders, trainer.test_loaders, trainer.predict_loaders = None, {}, {}, {}
    source = trainer.datamodule if trainer.datamodule is not None else module
    if trainer.stage == "fit":
        train = given["train"] if given["train"] is not None else source.train_dataloader()
        if train is None:
            raise _no_loader(trainer, "train_dataloaders", "train_dataloader")
        trainer.train_loader = _train_feed(trainer, train)
        val = given["val"] if given["val"] is not None else source.val_dataloader()
        refuse_data(val, "fit")
        if settings.overfit_batches:
            val = train if module.overrides("validation_step") else None
        if module.overrides("validation_step"):
            limit = _limit(trainer, settings.overfit_batches or settings.limit_val_batches)
            trainer.val_loaders = _evaluation_feeds(trainer, val, limit)
        elif val is not None:
            log.warning("%s has no validation_step: the validation loader is not used", type(module).__name__)
    elif trainer.stage == "validate":
        loaders = given["val"] if given["val"] is not None else source.val_dataloader()
        trainer.val_loaders = _needed(trainer, loaders, settings.limit_val_batches, "val_dataloader")
    elif trainer.stage == "test":
        loaders = given["test"] if given["test"] is not None else source.test_dataloader()
        trainer.test_loaders = _needed(trainer, loaders, settings.limit_test_batches, "test_dataloader")
    else:
        loaders = given["predict"] if given["predict"] is not None else source.predict_dataloader()
        trainer.predict_loaders = _needed(trainer, loaders, settings.limit_predict_batches, "predict_dataloader")


def check_same_everywhere(trainer: Trainer) -> None:
    """Collective: every process has loaders over the same samples, of which each gets its part.

    Raises:
        ConfigError: they differ; processes would wait for each other in the middle of an epoch.
    """
    feeds = {**trainer.val_loaders, **trainer.test_loaders, **trainer.predict_loaders}
    counts = {f"evaluation loader {name!r}": feed.samples_per_epoch for name, feed in feeds.items()}
    if trainer.train_loader is not None:
        counts["training loader"] = trainer.train_loader.samples_per_epoch
    there = trainer.strategy.processes.all_gather_object(counts)
    rank = next((rank for rank, theirs in enumerate(there) if theirs != there[0]), None)
    if rank is None:
        return
    name = next(name for name in {**there[0], **there[rank]} if there[0].get(name) != there[rank].get(name))
    raise ConfigError(
        f"the {name} has {there[0].get(name)} samples in an epoch on rank 0, and {there[rank].get(name)} on rank "
        f"{rank}. Give every process the whole dataset: the trainer divides it. Look for files, splits or filters that "
        "depend on the rank or on a random number without a seed."
    )


def _train_feed(trainer: Trainer, loader: Any) -> BatchLoader:
    settings = trainer.settings
    refuse_data(loader, "fit")
    if settings.limit_train_batches == 0:
        raise ConfigError("limit_train_batches=0 leaves fit() nothing to train on: give a number above 0.")
    feed = make_batch_loader(
        loader,
        rank=trainer.rank,
        world_size=trainer.world_size,
        seed=trainer.seed,
        training=True,
        limit=_limit(trainer, settings.overfit_batches or settings.limit_train_batches),
        shuffle=False if settings.overfit_batches else None,
        seed_per_sample=settings.seed_per_sample,
    )
    if feed.note is not None:
        log.info("%s", feed.note)
    if feed.one_shot and trainer.max_epochs not in (0, 1) and trainer.max_steps is None:
        raise ConfigError(
            "the training loader can be iterated only once, but max_epochs allows more than one epoch: pass something "
            "that can be iterated again (a list, a DataLoader), or set max_epochs=1."
        )
    _check_intervals(trainer, feed)
    return feed


def _check_intervals(trainer: Trainer, feed: BatchLoader) -> None:
    interval, length = trainer.val_check_interval, feed.length
    if length is None and isinstance(interval, float) and interval < 1.0:
        raise ConfigError(
            f"val_check_interval={interval} is a fraction of an epoch, but the training loader does not tell its "
            "length: give a number of batches (an int)."
        )
    if length is not None and isinstance(interval, int) and interval > length > 0:
        raise ConfigError(
            f"val_check_interval={interval} is more than the {length} training batches of an epoch, so validation "
            "would never run. Give a smaller number, or use check_val_every_n_epoch."
        )


def _evaluation_feeds(trainer: Trainer, loaders: Any, limit: int | float) -> dict[str, BatchLoader]:
    if limit == 0:
        return {}
    return {
        name: make_batch_loader(
            loader,
            name=name,
            rank=trainer.rank,
            world_size=trainer.world_size,
            seed=trainer.seed,
            training=False,
            limit=limit,
            shuffle=False if trainer.settings.overfit_batches else None,
            seed_per_sample=trainer.settings.seed_per_sample,
            pad=trainer.strategy.collective_forward,
        )
        for name, loader in named_loaders(loaders).items()
    }


def _needed(trainer: Trainer, loaders: Any, limit: int | float, method: str) -> dict[str, BatchLoader]:
    if loaders is None:
        raise _no_loader(trainer, "dataloaders", method)
    refuse_data(loaders, str(trainer.stage))
    return _evaluation_feeds(trainer, loaders, _limit(trainer, limit))


def _limit(trainer: Trainer, limit: int | float) -> int | float:
    return int(trainer.settings.fast_dev_run) or limit


def _no_loader(trainer: Trainer, argument: str, method: str) -> ConfigError:
    stage, source = trainer.stage, trainer.datamodule if trainer.datamodule is not None else trainer.module
    return ConfigError(
        f"{stage}() has nothing to run on: pass {argument}=, or define {method} in {type(source).__name__} "
        f"(or pass datamodule=)."
    )
