"""The state of a training in a file of Lightning's: optimizer, schedulers, and the place in the data."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from typing import Any

import torch

from trainer.callbacks import CALLBACKS
from trainer.checkpoint.optimizer_state import extra_of
from trainer.checkpoint.serialization import serialize
from trainer.errors import CheckpointError
from trainer.loop.progress import Progress
from trainer.seed import rng_state


def training_of(read: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries that `fit(ckpt_path=)` needs to continue: all but weights and hyperparameters.

    The metrics and random numbers of the file's training are not taken: Lightning does not store them.

    Args:
        read: a checkpoint of Lightning's.

    Raises:
        CheckpointError: there is no optimizer, or it is not data.
    """
    try:
        return _training_of(read)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        words = f"its optimizer, schedulers or loops are not as Lightning writes them ({type(error).__name__}: {error})"
        raise CheckpointError(words) from None


def _training_of(read: Mapping[str, Any]) -> dict[str, Any]:
    states, schedulers = read.get("optimizer_states"), read.get("lr_schedulers", [])
    if not states:
        raise CheckpointError("it has no state of an optimizer")
    optimizers = [_optimizer(state) for state in states]
    serialize([optimizers, schedulers], "its optimizers and schedulers")
    progress = _progress(read)
    callbacks = _callbacks(read.get("callbacks") or {})
    if len(optimizers) > 1:  # Lightning counts the steps of all
        progress.step = progress.batches_before + progress.batch
    return {
        **weights_alone(asdict(progress)),
        "optimizers": optimizers,
        "schedulers": schedulers,
        "scaler": read.get("MixedPrecision") or {},
        "hook_changes": [{"values": {}, "groups": [len(one["param_groups"]) for one in optimizers]}],
        "callbacks": callbacks,
        "callback_identities": {key: {"of": key, "made_with": ""} for key in callbacks},
        "scheduler_values": [-1] * len(schedulers),
    }


def weights_alone(counters: dict[str, Any]) -> dict[str, Any]:
    """Return the same entries for weights from which no training continues."""
    return {
        "optimizers": [],
        "schedulers": [],
        "scaler": {},
        "progress": counters,
        "global_micro_batch": None,
        "rng": [rng_state()],
        "epoch_rng": [{"epoch": 0, "loaders": {}, "hook": {}}],
        "loader": [{}],
        "metrics": [{"train": {}, "hooks": {}, "objects": {}}],
        "hook_changes": [{"values": {}, "groups": []}],
        "callback_metrics": {},
        "measured": {},
        "scheduler_values": [],
        "postponed_stop": None,
        "followed_buffers": [],
        "callbacks": {},
        "data": {},
        "hyperparameters": {},
        "config": None,
        "seed": 0,
        "run_dir": "",
        "world_size": 1,
        "reader_of": [0],
        "reporters": [0],
        "strategy": "unknown",
        "precision": "32-true",
        "facts": {},
        "versions": {"torch": str(torch.__version__), "python": sys.version.split()[0]},
    }


def _optimizer(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return an optimizer's state by position: only the optimizer that the module makes has the names and the class."""
    groups, values = state.get("param_groups", []), state.get("state", {})
    positions = [position for group in groups for position in group["params"]]
    options = [{option: value for option, value in group.items() if option != "params"} for group in groups]
    more = {"common": {key: one for key, one in values.items() if key not in positions}, "extra": extra_of(state)}
    return {
        **{key: value for key, value in more.items() if value},
        "kind": "",
        "state": {str(position): dict(values[position]) for position in positions if values.get(position)},
        "param_groups": [
            {**of_group, "params": [*map(str, group["params"])]}
            for of_group, group in zip(options, groups, strict=True)
        ],
        "by_position": True,
    }


def _callbacks(states: Mapping[str, Any]) -> dict[str, Any]:
    """Return the states of the user's callbacks: those of Lightning's own are of another shape here."""
    found = {}
    for key, state in states.items():
        if isinstance(state, dict) and str(key).partition("{")[0] not in CALLBACKS:
            with suppress(CheckpointError):
                serialize(state, key)
                found[key] = state
    return found


def _progress(read: Mapping[str, Any]) -> Progress:
    """Return the place in the data: after an epoch's end, or inside it."""
    progress = Progress(step=int(read.get("global_step", 0)), epoch=int(read.get("epoch", 0)))
    fit = read.get("loops", {}).get("fit_loop", {})
    epochs = fit.get("epoch_progress", {}).get("current", {})
    batches = fit.get("epoch_loop.batch_progress", {})
    # ModelCheckpoint saves in hooks, before Lightning counts the batch, or the epoch, as completed.
    progress.batches_before = int(batches.get("total", {}).get("processed", 0))
    if epochs.get("ready", 0) <= epochs.get("processed", 0):
        progress.epoch = int(epochs.get("processed", progress.epoch))
        return progress  # between two epochs
    if batches.get("is_last_batch"):
        progress.epoch_ended = True
    else:
        progress.batch = int(batches.get("current", {}).get("processed", 0))
        progress.batches_before -= progress.batch
    return progress
