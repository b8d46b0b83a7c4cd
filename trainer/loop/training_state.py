"""What a checkpoint contains: everything that a run needs to go on as if it had never stopped."""

from __future__ import annotations

import logging
import platform
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import torch

from trainer.callback import Callback
from trainer.checkpoint.format import open_checkpoint, read_checkpoint
from trainer.checkpoint.process_group import SINGLE_PROCESS, ProcessGroup
from trainer.checkpoint.shards import Shard
from trainer.checkpoint.storage import StoragePath
from trainer.errors import CheckpointError
from trainer.metrics.state import load_metrics_state, metrics_state
from trainer.profiling import CHECKPOINT
from trainer.progress import Progress
from trainer.seed import rng_state
from trainer.strategy import Strategy, synchronize_buffers

if TYPE_CHECKING:
    from trainer.trainer import Trainer

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
"""What `trainer.loop.training_state.collect` gives, as far as reading relies on it; there may be more."""

PER_PROCESS = ("rng", "loader", "metrics")


SHARDED_KEYS = ("model", "optimizers")
"""Keys whose tensors may be divided among processes, because none has room for the whole."""


def load_training_state(
    path: str | StoragePath, verify: bool = True, divided: bool = False, peers: ProcessGroup = SINGLE_PROCESS
) -> dict[str, Any]:
    """As `read_checkpoint`, of one that a Trainer wrote.

    Args:
        path: the checkpoint's folder.
        verify: check the hashes of its files.
        divided: leave the tensors of `SHARDED_KEYS` in the files, as `StoredTensor`s; all `peers` call this, and share
            the work of verifying.

    Raises:
        CheckpointError: it cannot be read; or something is missing in it, or is not what a Trainer writes.
    """
    checkpoint = open_checkpoint(path, SHARDED_KEYS, verify, peers) if divided else read_checkpoint(path, verify=verify)
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
            f"{path} is not that of a training, or of another version of this package: {'; '.join(problems)}. For the "
            "weights alone: load_from_checkpoint, or trainer checkpoint export."
        )
    return checkpoint


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


log = logging.getLogger("trainer")


def collect(trainer: Trainer) -> dict[str, Any]:
    """The whole state of a run as data; of tensors that are divided, this process's part. Collective."""
    strategy = trainer.strategy
    synchronize_buffers(strategy)
    own = {
        "rng": rng_state(trainer.device),
        "loader": trainer.train_loader.state_dict() if trainer.train_loader else {},
        "metrics": metrics_state(trainer.metrics),
    }
    per_rank = strategy.processes.all_gather_object(own)
    return {
        "model": strategy.module_state(),
        "optimizers": [strategy.optimizer_state(optimizer) for optimizer in trainer.optimizers],
        "schedulers": [config.scheduler.state_dict() for config in trainer.scheduler_configs],
        "scaler": strategy.scaler.state_dict() if strategy.scaler is not None else {},
        "progress": trainer.progress.state_dict(),
        "global_micro_batch": _global_micro_batch(trainer),
        "rng": [state["rng"] for state in per_rank],
        "loader": [state["loader"] for state in per_rank],
        "metrics": [state["metrics"] for state in per_rank],
        "callback_metrics": dict(trainer.callback_metrics),
        "callbacks": {
            key: state for key, c in callbacks_by_state_key(trainer.callbacks).items() if (state := c.state_dict())
        },
        "data": trainer.datamodule.state_dict() if trainer.datamodule is not None else {},
        "hyperparameters": trainer.hyperparameters(),
        "config": trainer.resolved_config,
        "seed": trainer.seed,
        "run_dir": str(trainer.run_dir),
        "world_size": strategy.processes.world_size,
        "strategy": strategy.name,
        "precision": strategy.precision.name,
        "versions": {"torch": str(torch.__version__), "python": platform.python_version()},
    }


def save_state(
    trainer: Trainer, write: Callable[[dict[str, Any], dict[str, Any]], None], info: Mapping[str, Any]
) -> None:
    """See `Trainer.save_with`."""
    trainer.meet(f"save_with at step {trainer.global_step}")
    with trainer.phase(CHECKPOINT):
        begun = trainer.begin_save()
        state = collect(trainer)
        trainer.hooks.on_save_checkpoint(trainer, trainer.module, state)
        if trainer.is_global_zero:
            for logger in trainer.loggers:
                logger.flush()
        problem = None
        if trainer.is_global_zero or trainer.strategy.shards_state:
            try:
                write(state, {"step": trainer.global_step, "epoch": trainer.current_epoch, **info})
            except Exception as error:
                problem = error
        problems = trainer.strategy.processes.all_gather_object(problem)
        trainer.end_save(begun)
    for problem in problems:
        if problem is not None:
            raise problem


def full_state(strategy: Strategy, everywhere: bool) -> dict[str, torch.Tensor]:
    """See `Trainer.full_state_dict`. One tensor after the other travels, so that only the result takes memory."""
    wanted = everywhere or strategy.processes.is_global_zero
    state: dict[str, torch.Tensor] = {}
    known: dict[int, torch.Tensor] = {}
    for name, value in strategy.module_state().items():
        if not isinstance(value, Shard):
            state[name] = value.detach().to("cpu", copy=True) if isinstance(value, torch.Tensor) else value
            continue
        if id(value) not in known:
            parts = strategy.processes.all_gather_object((value.extent, value.local.detach().reshape(-1).cpu()))
            known[id(value)] = whole = torch.empty(value.shape if wanted else 0, dtype=value.local.dtype)
            for extent, part in parts if wanted else ():
                if extent.numel:
                    extent.view_in(whole).copy_(part.view(extent.count, extent.length))
        state[name] = known[id(value)]
    return state if wanted else {}


def restore_training(trainer: Trainer, checkpoint: dict[str, Any]) -> None:
    """Give optimizers, schedulers, counters, metrics and callbacks their state back (weights and RNG go separately).

    Raises:
        CheckpointError: the checkpoint was written with other optimizers or schedulers.
    """
    strategy, rank = trainer.strategy, trainer.strategy.processes.rank
    _same_number("optimizers", checkpoint["optimizers"], trainer.optimizers)
    _same_number("schedulers", checkpoint["schedulers"], trainer.scheduler_configs)
    for optimizer, state in zip(trainer.optimizers, checkpoint["optimizers"], strict=True):
        strategy.load_optimizer_state(optimizer, state)
    for config, state in zip(trainer.scheduler_configs, checkpoint["schedulers"], strict=True):
        config.scheduler.load_state_dict(state)
    if strategy.scaler is not None and checkpoint["scaler"]:
        strategy.scaler.load_state_dict(checkpoint["scaler"])
    trainer.progress.load_state_dict(checkpoint["progress"])
    trainer.callback_metrics.update(checkpoint["callback_metrics"])
    if trainer.progress.epoch_ended:
        trainer.progress.next_epoch()
    # On another number of processes a process takes over the sums of several, or of none.
    load_metrics_state(trainer.metrics, checkpoint["metrics"][rank :: strategy.processes.world_size], trainer.device)
    _move_cursor(trainer, checkpoint["global_micro_batch"])
    same_world = checkpoint["world_size"] == strategy.processes.world_size
    if same_world and trainer.train_loader and checkpoint["loader"][rank]:
        trainer.train_loader.load_state_dict(checkpoint["loader"][rank])
    for key, callback in callbacks_by_state_key(trainer.callbacks).items():
        if key in checkpoint["callbacks"]:
            callback.load_state_dict(checkpoint["callbacks"][key])
    if trainer.datamodule is not None and checkpoint["data"]:
        trainer.datamodule.load_state_dict(checkpoint["data"])


def _global_micro_batch(trainer: Trainer) -> int | None:
    """Samples of a micro-batch over all processes; None: unknown."""
    size = trainer.train_loader.batch_size if trainer.train_loader is not None else None
    return None if size is None else size * trainer.world_size


def _move_cursor(trainer: Trainer, before: int | None) -> None:
    """The place in the epoch, which was counted in micro-batches of `before` samples, in those of this run."""
    feed, now = trainer.train_loader, _global_micro_batch(trainer)
    if feed is None or before is None or now is None or before == now:
        return
    consumed = trainer.progress.batch * before
    if feed.samples_per_epoch is not None and feed.max_length is not None and consumed >= feed.samples_per_epoch:
        trainer.progress.batch = feed.max_length
        return
    trainer.progress.batch, again = divmod(consumed, now)
    if again:
        log.warning(
            "the checkpoint lies inside one of this run's batches of %d samples (over all processes): %d samples of "
            "this epoch are used a second time",
            now,
            again,
        )


def callbacks_by_state_key(callbacks: list[Callback]) -> dict[str, Callback]:
    """Callbacks by the name of their state; a second one of a kind gets a number."""
    by_key: dict[str, Callback] = {}
    for callback in callbacks:
        key, number = callback.state_key, 1
        while key in by_key:
            number += 1
            key = f"{callback.state_key}-{number}"
        by_key[key] = callback
    return by_key


def _same_number(what: str, saved: list[Any], current: list[Any]) -> None:
    if len(saved) != len(current):
        raise CheckpointError(
            f"the checkpoint has {len(saved)} {what}, but configure_optimizers gave {len(current)}: use the same ones "
            "to resume, or load_from_checkpoint for a new training from these weights."
        )
