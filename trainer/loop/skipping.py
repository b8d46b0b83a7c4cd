"""Skip a batch whose `training_step` returned None, or the rest of an epoch, on all processes together."""

from __future__ import annotations

import dis
import inspect
import logging
from collections.abc import Iterator
from copy import deepcopy
from typing import Any

import torch

from trainer.data.loader import Batch, Divisor
from trainer.errors import ConfigError
from trainer.loop.run import Run
from trainer.seed import isolated_rng
from trainer.strategy import SkippedBatch

log = logging.getLogger("trainer")


def may_skip_batches(run: Run) -> bool:
    """Whether the code of the module's `training_step` returns None in some cases, so that processes have to agree."""
    step = _function(run, "training_step")
    if not run.module.automatic_optimization or run.strategy.shards_state:
        return False
    return can_return(step, none=True) and can_return(step, none=False)


def may_end_epochs(run: Run) -> bool:
    """Whether the code of the module's `on_train_batch_start` returns something."""
    return run.module.overrides("on_train_batch_start") and can_return(_function(run, "on_train_batch_start"), False)


def _function(run: Run, name: str) -> Any:
    return vars(run.module).get(name) or getattr(type(run.module), name)


def can_return(function: Any, none: bool) -> bool:
    """Whether a `return` of the function gives the constant None (`none`), or anything else; True for unknown code."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    if code is None:
        return True
    before = None
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("RETURN_VALUE", "RETURN_CONST"):
            if instruction.is_jump_target:  # of a conditional expression, such as `-1 if done else None`
                return True
            given = instruction if instruction.opname == "RETURN_CONST" else before
            constant = given is not None and given.opname in ("LOAD_CONST", "RETURN_CONST")
            if (constant and given is not None and given.argval is None) == none:
                return True
        before = instruction
    return False


def ends_epoch(run: Run, position: int) -> bool:
    """Whether the module's `on_train_batch_start` returned -1 on any process, before a window's batch. Collective.

    Raises:
        ConfigError: the strategy cannot drop the gradients of the batches before, or of a closure.
    """
    answer = run.hooks.module_answer
    ends = isinstance(answer, int) and answer == -1
    if run.strategy.processes.world_size > 1:
        ends = bool(run.strategy.processes.sum(torch.tensor(int(ends))))
    if ends and (run.closure_needed or (position > 0 and run.strategy.shards_state)):
        raise ConfigError(
            "on_train_batch_start returned -1 in the middle of a step, whose gradients "
            f"strategy {run.strategy.name!r} cannot drop: return -1 at the first batch of an accumulation window, and "
            "with an optimizer that needs no closure."
        )
    run.epoch_ended_by_module = ends
    return ends


def skip_batch(run: Run, outputs: SkippedBatch | None, divisor: Divisor, window: int) -> None:
    """Skip a micro-batch whose `training_step` returned None: its items count nowhere.

    Args:
        window: the micro-batches of the step.

    Raises:
        ConfigError: the batch cannot be skipped.
    """
    name, strategy = f"{type(run.module).__name__}.training_step", run.strategy
    several = strategy.processes.world_size > 1
    if not can_return(_function(run, "training_step"), none=False):
        raise ConfigError(
            f"{name} returned None; what is needed is the loss, a tensor with one element and a gradient. Did you "
            "forget 'return loss'? To optimize by hand, set automatic_optimization = False."
        )
    if run.closure_needed or (strategy.shards_state and (several or window > 1)):
        raise ConfigError(
            f"{name} returned None, and a batch cannot be skipped with an optimizer that needs a closure, nor with "
            f"strategy {strategy.name!r} on several processes or with accumulation. Leave the batch out of the data, "
            "return a loss of zero (the model's loss * 0), or use strategy='ddp'."
        )
    if several and not run.may_skip_batches:
        raise ConfigError(
            f"{name} returned None, but there is no 'return None' in its own code, by which the processes know that "
            "they have to agree on skipping a batch: write 'if loss is None: return None' in training_step itself."
        )
    if not run.reported_skipping:
        log.warning("%s returned None at step %d: the batch is skipped", name, run.progress.step + 1)
    run.reported_skipping = run.may_skip_batches = True
    run.skipped_share += 1.0 if divisor is None else float(1 / divisor)
    if outputs is not None:
        strategy.backward(outputs.loss)


def end_window_with_skipped(run: Run) -> None:
    """Make the gradients those of the mean over all items that were not skipped. Collective.

    `run.skipped_window` is True if nothing is left, so that there is no update.
    """
    processes, share = run.strategy.processes, run.skipped_share
    run.skipped_share = 0.0
    if processes.world_size > 1:
        share = float(processes.sum(torch.tensor(share, dtype=torch.float64))) / processes.world_size
    run.skipped_window = share > 1 - 1e-9
    if share == 0:
        return
    for parameter in run.module.parameters():
        if run.skipped_window:
            parameter.grad = None
        elif parameter.grad is not None:
            parameter.grad /= 1 - share


def is_exhausted(run: Run, windows: Iterator[list[Batch]]) -> bool:
    """Whether the epoch has no further window; a loader that has no length is asked for one. Collective.

    The state of the loader and the random numbers in a checkpoint stay those before the question.
    """
    loader = run.train_loader
    assert loader is not None
    if loader.samples_per_epoch is not None or loader.length not in (None, loader.limit):
        return run.progress.batch == loader.length
    run.loader_state = deepcopy(loader.state_dict())
    with isolated_rng(run.strategy.device):
        if next(windows, None) is not None:
            return False
    run.loader_state = None
    return True
