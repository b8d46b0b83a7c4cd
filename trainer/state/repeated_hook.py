"""repeating: call the first hook of an epoch again in a resumed epoch, without its changes of the state."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from copy import deepcopy
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from trainer.callback import Callback
from trainer.checkpoint.shards import Shard
from trainer.metrics.state import kept_torchmetrics
from trainer.runs.hook_checks import users_callbacks
from trainer.state.averaged_weights import own_part

if TYPE_CHECKING:
    from trainer.loop.run import Run


def begins_epochs(run: Run) -> bool:
    """Whether the user's module or a user's callback does something as an epoch begins."""
    return bool(users_callbacks(run.callbacks, "on_train_epoch_start")) or run.module.overrides("on_train_epoch_start")


@contextmanager
def repeating(run: Run) -> Iterator[None]:
    """Undo at the end the changes of `on_train_epoch_start` to the state of a checkpoint, which has them already.

    The hook is called for objects that a checkpoint does not hold, such as lists that are made for each epoch.
    Collective.
    """
    users = users_callbacks(run.callbacks, "on_train_epoch_start")
    mine = begins_epochs(run)
    if run.generators.to_restore is not None and run.generators.of_epoch is not None:
        run.generators.set_state(run.generators.of_epoch)  # it draws the same numbers as in the run before
    # Copies are made only where user code could change something: they take as much host memory as the weights.
    kept = _kept(run, users) if any(run.strategy.processes.all_gather_object(mine)) else []
    with run.hook_changes.repeating():
        yield
    for restore in kept:
        restore()


def _kept(run: Run, users: list[Callback]) -> list[Callable[[], object]]:
    """Return functions that put back the state, as in a checkpoint, of all parts of a run, and of these callbacks."""
    weights = {name: _on_host(entry) for name, entry in run.strategy.module_state().items()}
    restore: list[Callable[[], object]] = [partial(run.strategy.load_module_state, weights, hooks=False)]
    restore += [_kept_state(optimizer) for optimizer in run.optimizers]
    owners = [config.scheduler for config in run.scheduler_configs], [run.datamodule] if run.datamodule else []
    for owner in (*chain(*owners), *users):
        if state := owner.state_dict():
            restore.append(partial(owner.load_state_dict, deepcopy(state)))
    restore.append(kept_torchmetrics(run.metrics))
    of_module = run.module.on_save_checkpoint, run.module.on_load_checkpoint
    hooks = [of_module] if run.module.overrides("on_save_checkpoint") else []
    for one in users:
        if type(one).on_save_checkpoint is not Callback.on_save_checkpoint:
            given = run.module.trainer, run.module
            hooks.append((partial(one.on_save_checkpoint, *given), partial(one.on_load_checkpoint, *given)))
    for save, load in hooks:
        entries: dict[str, Any] = {}
        with suppress(LookupError):  # of a hook that changes entries which others have put into a checkpoint
            save(entries)
            restore.append(partial(load, deepcopy(entries)))
    return restore


def _on_host(entry: Any) -> Any:
    if isinstance(entry, Shard):
        return replace(entry, local=_on_host(entry.local))
    return entry.detach().to("cpu", copy=True) if isinstance(entry, torch.Tensor) else entry


def _kept_state(optimizer: Optimizer) -> Callable[[], object]:
    states = {key: dict(state) if isinstance(state, dict) else state for key, state in optimizer.state.items()}
    local = [own_part(leaf) for leaf in tree_leaves(states) if isinstance(leaf, torch.Tensor)]
    values = [_on_host(tensor) for tensor in local]

    @torch.no_grad()
    def put_back() -> None:
        optimizer.state.clear()
        optimizer.state.update(states)
        for tensor, value in zip(local, values, strict=True):
            tensor.copy_(value)

    return put_back
