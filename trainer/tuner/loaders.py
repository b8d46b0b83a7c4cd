"""A DataLoader like another one, with some options changed."""

from __future__ import annotations

from typing import Any

from trainer.errors import ConfigError

COPIED = ("num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "generator", "persistent_workers")


def loader_like(loader: Any, **changes: Any) -> Any:
    """Return a DataLoader like another one, with other options.

    Raises:
        ConfigError: the loader is not a plain DataLoader, or has its own batch sampler and `batch_size` changes.
    """
    from torch.utils.data import BatchSampler, DataLoader, IterableDataset

    plain = type(loader) is DataLoader and type(loader.batch_sampler) in (BatchSampler, type(None))
    if type(loader) is not DataLoader or ("batch_size" in changes and not plain):
        raise ConfigError(
            f"the loader is a {type(loader).__name__}, or has a batch sampler of its own: give a plain DataLoader, or "
            "a module or data module with an attribute batch_size, from which train_dataloader makes the loader"
        )
    options = {name: getattr(loader, name) for name in COPIED} | changes
    options["persistent_workers"] &= options["num_workers"] > 0
    if not plain:
        return DataLoader(loader.dataset, batch_sampler=loader.batch_sampler, **options)
    options = {"batch_size": loader.batch_size, "drop_last": loader.drop_last, **options}
    if not isinstance(loader.dataset, IterableDataset):
        options["sampler"] = loader.sampler
    return DataLoader(loader.dataset, **options)
