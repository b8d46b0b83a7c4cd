"""The state of a training in a file of Lightning's: optimizer, schedulers, and the place in the data."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch

from trainer.checkpoint.optimizer_state import extra_of
from trainer.checkpoint.serialization import serialize
from trainer.errors import CheckpointError
from trainer.loop.progress import Progress
from trainer.seed import rng_state

_ADAM = ("Adam", "AdamW")


def training_of(read: Mapping[str, Any], kind: str | None) -> dict[str, Any]:
    """Return the entries that `fit(ckpt_path=)` needs to continue: all but weights and hyperparameters.

    The metrics and random numbers of the file's training are not taken: Lightning does not store them.

    Args:
        read: a checkpoint of Lightning's.
        kind: the name of the optimizer's class, which the file does not have; None to find it by its options.

    Raises:
        CheckpointError: there is not one optimizer, or no class of torch's has its options, or it is not data.
    """
    try:
        return _training_of(read, kind)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        words = f"its optimizer, schedulers or loops are not as Lightning writes them ({type(error).__name__}: {error})"
        raise CheckpointError(words) from None


def _training_of(read: Mapping[str, Any], kind: str | None) -> dict[str, Any]:
    states = read.get("optimizer_states")
    if not isinstance(states, list) or len(states) != 1:
        raise CheckpointError("it does not have the state of exactly one optimizer")
    schedulers = read.get("lr_schedulers", [])
    optimizer = _optimizer(states[0], kind)
    serialize([optimizer, schedulers], "its optimizer and schedulers")
    return {
        "optimizers": [optimizer],
        "schedulers": schedulers,
        "scaler": {},
        "progress": asdict(_progress(read)),
        "global_micro_batch": None,
        "rng": [rng_state()],
        "epoch_rng": [{"epoch": 0, "loaders": {}, "hook": {}}],
        "loader": [{}],
        "metrics": [{"train": {}, "hooks": {}, "objects": {}}],
        "hook_changes": [{"values": {}, "groups": [len(optimizer["param_groups"])]}],
        "callback_metrics": {},
        "measured": {},
        "scheduler_values": [-1] * len(schedulers),
        "postponed_stop": None,
        "followed_buffers": [],
        "callbacks": {},
        "data": {},
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


def _optimizer(state: Mapping[str, Any], kind: str | None) -> dict[str, Any]:
    """Return an optimizer's state by position: only the optimizer that the module makes has the names."""
    groups, values = state.get("param_groups", []), state.get("state", {})
    positions = [position for group in groups for position in group["params"]]
    options = [{option: value for option, value in group.items() if option != "params"} for group in groups]
    more = {"common": {key: one for key, one in values.items() if key not in positions}, "extra": extra_of(state)}
    return {
        **{key: value for key, value in more.items() if value},
        "kind": kind or _kind(options[0]),
        "state": {str(position): dict(values[position]) for position in positions if values.get(position)},
        "param_groups": [
            {**of_group, "params": [*map(str, group["params"])]}
            for of_group, group in zip(options, groups, strict=True)
        ],
        "by_position": True,
    }


def _kind(options: Mapping[str, Any]) -> str:
    """Return the class of torch's optimizer that has these options."""
    parameter = [torch.nn.Parameter(torch.zeros(1))]
    by_options: dict[str, set[str]] = {}
    everything: dict[str, Any] = vars(torch.optim)
    optimizers = {name: one for name, one in everything.items() if isinstance(one, type) and hasattr(one, "step")}
    for name, optimizer in optimizers.items():
        try:
            by_options[name] = set(optimizer(parameter, lr=0.1).defaults)
        except (TypeError, ValueError):
            continue  # it takes other arguments
    given = set(options) - {"initial_lr", "max_lr", "min_lr", "max_momentum", "base_momentum", "swa_lr"}
    found = [name for name, known in by_options.items() if known == given]
    if set(found) == set(_ADAM):
        return "AdamW" if options.get("decoupled_weight_decay") else "Adam"
    if len(found) != 1:
        raise CheckpointError("the class of its optimizer is not there: name it with --optimizer AdamW or the like")
    return found[0]


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
