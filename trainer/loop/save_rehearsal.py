"""Find state that no checkpoint can hold: before the first step, and in optimizers' states after it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch

from trainer.checkpoint.hook_checkpoint import saved_by_hooks
from trainer.checkpoint.optimizer_state import options_of
from trainer.checkpoint.serialization import serialize
from trainer.checkpoint.writing import serialize_state
from trainer.errors import CheckpointError, printable
from trainer.loop.callback_list import CallbackList
from trainer.loop.run import Run
from trainer.module import TrainModule
from trainer.runs.callback_states import callbacks_by_state_key
from trainer.state.held_generators import without_generators
from trainer.state.no_trace import keep_users

log = logging.getLogger("trainer")

_STEPS_TO_A_STATE = 10
"""Steps after which an optimizer without a state is taken for one that never has any. A first update may be left out:
the loss scale is too large, or `training_step` steps another optimizer."""


def rehearse_save(run: Run) -> None:
    """Check that a checkpoint can hold what users, hooks, optimizers and schedulers give it, but for weights.

    Their methods are called as in a save, and their plain attributes are put back. One that fails may need what a
    validation or the first step makes: it ends nothing, and the first save calls it again. Collective.

    Raises:
        CheckpointError: names everything that cannot be stored.
    """
    processes, problem = run.strategy.processes, None
    with run.generators.isolated():
        restore = [*keep_users(run)]
        state = _rehearsed_state(run)
        if processes.is_global_zero or run.strategy.shards_state:
            try:
                serialize_state(state)
            except CheckpointError as error:
                problem = error
        for put_back in restore:
            put_back()
    # Else a collective in a method that has failed on another process would be paired with ours.
    processes.wait_for_all("the rehearsal of a checkpoint, before the first step")
    problem = next(filter(None, processes.all_gather_object(problem)), None)
    if problem is not None:
        raise CheckpointError(f"no checkpoint could be written of this training: {problem}")


def _rehearsed_state(run: Run) -> dict[str, Any]:
    """Return the entries of a checkpoint that users provide, as far as they exist before the first step."""
    module, data, failed = run.module, run.datamodule, list[str]()

    def tried(what: str, method: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return method(*arguments)
        except Exception as error:
            failed.append(f"{what} ({type(error).__name__}: {error})")
            return {}

    callbacks = callbacks_by_state_key(run.callbacks)
    groups = [[{**options_of(group), "params": []} for group in optimizer.param_groups] for optimizer in run.optimizers]
    state = {
        "model": tried("state_dict of the module", module.state_dict),
        "optimizers": [{"state": {}, "param_groups": of_one} for of_one in groups],
        "schedulers": [without_generators(config.scheduler.state_dict()) for config in run.scheduler_configs],
        "progress": run.progress.state_dict(),
        "callbacks": {key: tried(f"state_dict of {key}", one.state_dict) for key, one in callbacks.items()},
        "data": {} if data is None else tried("state_dict of the data module", data.state_dict),
        "hyperparameters": run.hyperparameters(),
    }
    with saved_by_hooks(state) as shown:
        for one in run.hooks.callbacks:
            hook = CallbackList([one], module.trainer, module, run.phase).on_save_checkpoint
            tried(f"on_save_checkpoint of {type(one).__name__}", hook, shown)
    state["model"] = _beside_weights(module, state["model"])
    if failed:
        words = "failed in the rehearsal of a checkpoint; the first save calls it again: %s"
        log.info(words, printable("; ".join(failed)))
    return state


def check_buffers_storable(module: TrainModule) -> None:
    """Check that a checkpoint can hold a module's buffers, before a strategy sends them to other processes.

    Raises:
        CheckpointError: it cannot; the message names the entry.
    """
    serialize(_beside_weights(module, module.state_dict()), "model")


def _beside_weights(module: TrainModule, entries: dict[str, Any]) -> dict[str, Any]:
    weights = dict(module.named_parameters(remove_duplicate=False))
    return {name: one for name, one in entries.items() if name not in weights and _is_saved_unchanged(one)}


def _is_saved_unchanged(value: Any) -> bool:
    """Whether the strategy saves a value unchanged; it turns some others into plain tensors."""
    return not isinstance(value, torch.Tensor) or (type(value) is torch.Tensor and not value.is_meta)


def check_states_storable(run: Run) -> None:
    """Check after the first update, once, that a checkpoint can hold the optimizers' states. Collective.

    Raises:
        CheckpointError: it cannot; the message names the field.
    """
    states = [run.strategy.optimizer_state(optimizer) for optimizer in run.optimizers]
    updated = run.module.automatic_optimization and run.strategy.scaler is None and not run.guards.skipping.whole_step
    has_state = any(one["state"] or one.keys() & {"common", "extra", "parts"} for one in states)
    if updated or has_state or run.progress.step >= _STEPS_TO_A_STATE:
        run.mark_states_checked()
    try:
        serialize(states, "optimizers", exact=True)
    except CheckpointError as error:
        raise CheckpointError(
            f"after step {run.progress.step}, no checkpoint can be written of this training: {error} Use another "
            "optimizer, or train with enable_checkpointing=False."
        ) from None
