"""Write the state of a training to a checkpoint, and restore a training from its entries."""

from __future__ import annotations

import logging
import os
import platform
from collections.abc import Callable, Mapping
from dataclasses import asdict, fields
from typing import Any

import torch
from torch.optim import Optimizer

from trainer.callback import Callback
from trainer.checkpoint.format import open_checkpoint, read_checkpoint
from trainer.checkpoint.process_group import SINGLE_PROCESS, ProcessGroup
from trainer.checkpoint.serialization import serialize
from trainer.checkpoint.storage import StoragePath
from trainer.data.transfer import move_to
from trainer.errors import CheckpointError
from trainer.loop.run import Run
from trainer.metrics.monitor import Measured
from trainer.metrics.state import load_metrics_state, metrics_state
from trainer.optimizers import SchedulerConfig
from trainer.progress import Progress
from trainer.seed import derive_seed, rng_state, seed_everything
from trainer.strategy import synchronize_buffers

log = logging.getLogger("trainer")

# -- writing -----------------------------------------------------------------------------------------------------------


def training_state(run: Run) -> dict[str, Any]:
    """Return, as data, everything needed to resume a run as if it had never stopped. Collective.

    Of sharded tensors this process's shards. `KINDS` lists the type of each entry; the functions below restore the
    entries.
    """
    strategy = run.strategy
    synchronize_buffers(strategy)
    own = {
        "rng": rng_state(strategy.device),
        "loader": run.loader_state or (run.train_loader.state_dict() if run.train_loader else {}),
        "metrics": metrics_state(run.metrics),
        "stop": run.postponed_stop,
    }
    if strategy.processes.world_size > 1:
        # Unpickling a tensor of an accelerator would make each process use the accelerators of all others.
        own = move_to(own, _on_cpu)
    per_rank = strategy.processes.all_gather_object(own)
    return {
        "model": strategy.module_state(),
        "optimizers": [strategy.optimizer_state(optimizer) for optimizer in run.optimizers],
        "schedulers": [config.scheduler.state_dict() for config in run.scheduler_configs],
        "scaler": strategy.scaler.state_dict() if strategy.scaler is not None else {},
        "progress": run.progress.state_dict(),
        "global_micro_batch": _global_micro_batch(run),
        "rng": [state["rng"] for state in per_rank],
        "loader": [state["loader"] for state in per_rank],
        "metrics": [state["metrics"] for state in per_rank],
        "callback_metrics": dict(run.session.callback_metrics),
        "measured": {name: asdict(measured) for name, measured in run.session.measured.items()},
        "scheduler_values": [config.value_step for config in run.scheduler_configs],
        "postponed_stop": next((state["stop"] for state in per_rank if state["stop"] is not None), None),
        "callbacks": {
            key: state for key, c in callbacks_by_state_key(run.callbacks).items() if (state := c.state_dict())
        },
        "data": run.datamodule.state_dict() if run.datamodule is not None else {},
        "hyperparameters": run.hyperparameters(),
        "config": run.session.config_text,
        "seed": run.session.seed,
        "run_dir": str(run.session.run_dir),
        "world_size": strategy.processes.world_size,
        "strategy": strategy.name,
        "precision": strategy.precision.name,
        "versions": {"torch": str(torch.__version__), "python": platform.python_version()},
    }


def check_storable(optimizers: list[Optimizer], schedulers: list[SchedulerConfig]) -> None:
    """Check that a checkpoint can hold the optimizers' options and the schedulers' states, before the first step.

    Raises:
        CheckpointError: it cannot; the message names the field.
    """
    groups = [[{**group, "params": []} for group in optimizer.param_groups] for optimizer in optimizers]
    serialize([{"param_groups": of_one} for of_one in groups], "optimizers")
    serialize([config.scheduler.state_dict() for config in schedulers], "schedulers")


KINDS: dict[str, tuple[type, ...]] = {
    "model": (dict,),
    "optimizers": (list,),
    "schedulers": (list,),
    "scaler": (dict,),
    "progress": (dict,),
    "rng": (list,),
    "loader": (list,),
    "metrics": (list,),
    "callback_metrics": (dict,),
    "callbacks": (dict,),
    "data": (dict,),
    "hyperparameters": (dict,),
    "config": (str, type(None)),
    "seed": (int,),
    "run_dir": (str,),
    "world_size": (int,),
    "strategy": (str,),
    "precision": (str,),
    "versions": (dict,),
}
"""The types of the required entries; further entries are allowed."""

PER_PROCESS = ("rng", "loader", "metrics")
"""Entries that are lists with one item per process."""

SHARDED_KEYS = ("model", "optimizers")
"""Entries whose tensors may be sharded, because they may not fit into the memory of one process."""

# -- reading, in running order -----------------------------------------------------------------------------------------


def load_training_state(
    path: str | StoragePath, verify: bool = True, sharded: bool = False, peers: ProcessGroup = SINGLE_PROCESS
) -> dict[str, Any]:
    """Read a checkpoint of a Trainer, and check its entries.

    Args:
        path: the checkpoint's folder.
        verify: check the hashes of its files.
        sharded: return the tensors of `SHARDED_KEYS` as `StoredTensor`s, unread. Collective over `peers`, which share
            the verification.

    Raises:
        CheckpointError: the checkpoint cannot be read, or an entry is missing or of another type.
    """
    checkpoint = open_checkpoint(path, SHARDED_KEYS, verify, peers) if sharded else read_checkpoint(path, verify=verify)
    problems = []
    for name, kinds in KINDS.items():
        if name not in checkpoint:
            problems.append(f"it has no {name!r}")
        elif type(checkpoint[name]) not in kinds:
            problems.append(f"{name!r} is a {type(checkpoint[name]).__name__}")
    if not problems:
        problems = _wrong_counters(checkpoint["progress"]) + _wrong_lengths(checkpoint)
    if problems:
        raise CheckpointError(
            f"{path} is no checkpoint of a training, or one of another version of this package: {'; '.join(problems)}. "
            "For the weights alone: load_from_checkpoint, or trainer checkpoint export."
        )
    return checkpoint


def restore_seed(run: Run, checkpoint: Mapping[str, Any] | None) -> None:
    """Seed the run with the seed of the settings, else of the checkpoint, else with a new one for all ranks.

    Each process derives its own random numbers from the seed; the initial weights are equal.
    """
    given, session, strategy = run.settings.seed, run.session, run.strategy
    if given is not None:
        session.seed = given
    elif checkpoint is not None:
        session.seed = checkpoint["seed"]
    else:
        session.seed = strategy.processes.broadcast_object(int.from_bytes(os.urandom(4), "little"))
    if checkpoint is not None and run.stage == "fit" and checkpoint["seed"] != session.seed:
        log.warning(
            "the checkpoint was written with seed=%s, this run has seed=%d: the order of the samples changes here",
            checkpoint["seed"],
            session.seed,
        )
    if given is not None and strategy.processes.rank > 0:
        # Rank 0 continues with the generators that Trainer(seed=...) has seeded, as a single process does.
        seed_everything(derive_seed(given, strategy.processes.rank))


def restore_weights(run: Run, checkpoint: Mapping[str, Any] | None) -> None:
    """Load the checkpoint's weights, if there is a checkpoint. Called after `setup_module`."""
    if checkpoint is not None:
        run.strategy.load_module_state(checkpoint["model"], run.module.strict_loading)
        log.info("restored %s", run.resumed_from)


def restore_training(run: Run, checkpoint: Mapping[str, Any] | None) -> None:
    """Restore optimizers, schedulers, counters, metrics, callbacks and random numbers.

    Does nothing without a checkpoint. Stages other than `fit` restore the counters only.

    Raises:
        CheckpointError: the checkpoint was written with other optimizers or schedulers.
    """
    if checkpoint is None:
        return
    if run.stage != "fit":
        run.progress.load_state_dict(checkpoint["progress"])
        return
    strategy, rank = run.strategy, run.strategy.processes.rank
    _require_same_number("optimizers", checkpoint["optimizers"], run.optimizers)
    _require_same_number("schedulers", checkpoint["schedulers"], run.scheduler_configs)
    for optimizer, state in zip(run.optimizers, checkpoint["optimizers"], strict=True):
        strategy.load_optimizer_state(optimizer, state)
    for config, state in zip(run.scheduler_configs, checkpoint["schedulers"], strict=True):
        config.scheduler.load_state_dict(state)
    if strategy.scaler is not None and checkpoint["scaler"]:
        strategy.scaler.load_state_dict(checkpoint["scaler"])
    run.progress.load_state_dict(checkpoint["progress"])
    run.session.callback_metrics.update(checkpoint["callback_metrics"])
    # Checkpoints of earlier versions have none of these three.
    run.session.measured.update({name: Measured(**one) for name, one in checkpoint.get("measured", {}).items()})
    for config, step in zip(run.scheduler_configs, checkpoint.get("scheduler_values", ()), strict=False):
        config.value_step = step
    run.postponed_stop = checkpoint.get("postponed_stop")
    if run.progress.epoch_ended:
        run.progress.next_epoch()
    # With another number of processes, a process merges the values of several processes, or of none.
    load_metrics_state(run.metrics, checkpoint["metrics"][rank :: strategy.processes.world_size], strategy.device)
    _move_cursor(run, checkpoint["global_micro_batch"])
    if checkpoint["world_size"] == strategy.processes.world_size:
        run.rng_to_restore = checkpoint["rng"][rank]
        if run.train_loader and checkpoint["loader"][rank]:
            run.train_loader.load_state_dict(checkpoint["loader"][rank])
    else:
        log.info(
            "the checkpoint was written by %d processes and is read by %d: the order of the samples stays the "
            "same, other random numbers (dropout) differ",
            checkpoint["world_size"],
            strategy.processes.world_size,
        )
    if run.config.max_epochs is not None and run.progress.epoch >= run.config.max_epochs:
        log.warning("nothing is left to train: max_epochs=%d are done; raise it to go on", run.config.max_epochs)
    _restore_callbacks(run, checkpoint)


def _restore_callbacks(run: Run, checkpoint: Mapping[str, Any]) -> None:
    """Restore the callbacks and the data module; a warning names those that only the checkpoint has."""
    callbacks = callbacks_by_state_key(run.callbacks)
    for key, callback in callbacks.items():
        if key in checkpoint["callbacks"]:
            callback.load_state_dict(checkpoint["callbacks"][key])
    if run.datamodule is not None and checkpoint["data"]:
        run.datamodule.load_state_dict(checkpoint["data"])
    unused = [f"the callback {key}" for key in checkpoint["callbacks"] if key not in callbacks]
    unused += ["the data module"] if run.datamodule is None and checkpoint["data"] else []
    if unused and run.strategy.processes.is_global_zero and not run.settings.fast_dev_run:
        log.warning(
            "the checkpoint has the state of %s, which this run does not have: that state is not used, and later "
            "checkpoints lack it. To go on with it, give the same callbacks and data module.",
            ", ".join(unused),
        )


# -- saving ------------------------------------------------------------------------------------------------------------


def save_state(run: Run, write: Callable[[dict[str, Any], dict[str, Any]], None], info: Mapping[str, Any]) -> None:
    """Pass the run's state to `write`; see `Trainer.save_with`. Collective."""
    strategy = run.strategy
    with run.saving_checkpoint():
        if run.stage == "fit":
            run.flush_step()  # a resumed run does not log the step again
        state = training_state(run)
        run.hooks.on_save_checkpoint(state)
        if strategy.processes.is_global_zero:
            for logger in run.loggers:
                logger.flush()
        problem = None
        if strategy.processes.is_global_zero or strategy.shards_state:
            try:
                write(state, {"step": run.progress.step, "epoch": run.progress.epoch, **info})
            except Exception as error:
                problem = error
        problems = strategy.processes.all_gather_object(problem)
    for problem in problems:
        if problem is not None:
            raise problem


def _on_cpu(leaf: Any) -> Any:
    return leaf.cpu() if isinstance(leaf, torch.Tensor) else leaf


# -- parts -------------------------------------------------------------------------------------------------------------


def _global_micro_batch(run: Run) -> int | None:
    """Return the samples of a micro-batch, summed over all processes; None: unknown."""
    size = run.train_loader.batch_size if run.train_loader is not None else None
    return None if size is None else size * run.strategy.processes.world_size


def _move_cursor(run: Run, before: int | None) -> None:
    """Convert the cursor from micro-batches of `before` samples to micro-batches of this run."""
    loader, now = run.train_loader, _global_micro_batch(run)
    if loader is None or before is None or now is None or before == now:
        return
    consumed = run.progress.batch * before
    if loader.samples_per_epoch is not None and loader.max_length is not None and consumed >= loader.samples_per_epoch:
        run.progress.batch = loader.max_length
        return
    run.progress.batch, again = divmod(consumed, now)
    if again:
        log.warning(
            "the checkpoint lies inside one of this run's batches of %d samples (over all processes): %d samples of "
            "this epoch are used a second time",
            now,
            again,
        )


def callbacks_by_state_key(callbacks: list[Callback]) -> dict[str, Callback]:
    """Return the callbacks by `state_key`; further callbacks with the same key get a number."""
    by_key: dict[str, Callback] = {}
    for callback in callbacks:
        key, number = callback.state_key, 1
        while key in by_key:
            number += 1
            key = f"{callback.state_key}-{number}"
        by_key[key] = callback
    return by_key


def _require_same_number(what: str, saved: list[Any], current: list[Any]) -> None:
    if len(saved) != len(current):
        raise CheckpointError(
            f"the checkpoint has {len(saved)} {what}, but configure_optimizers gave {len(current)}: use the same ones "
            "to resume, or load_from_checkpoint for a new training from these weights."
        )


def _wrong_counters(progress: dict[str, Any]) -> list[str]:
    return [
        f"'progress' has no {field.name!r} that is a number"
        for field in fields(Progress)
        if type(progress.get(field.name)) not in (int, bool) or progress[field.name] < -1
    ]


def _wrong_lengths(checkpoint: dict[str, Any]) -> list[str]:
    size = checkpoint["world_size"]
    return [
        f"{name!r} has {len(checkpoint[name])} entries for {size} processes"
        for name in PER_PROCESS
        if len(checkpoint[name]) != size
    ]
