"""One run of `fit`, `validate`, `test` or `predict`: everything before the loop, and after it, whatever happens."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from trainer.callbacks.base import HOOKS, NOT_ON_MODULES, check_hooks, in_calling_order
from trainer.checkpoint.content import restore_training
from trainer.checkpoint.format import read_checkpoint
from trainer.data.datamodule import DataModule
from trainer.errors import ConfigError, did_you_mean, raise_problems
from trainer.loaders import make_feeds
from trainer.metrics import MetricLog
from trainer.module import TrainModule
from trainer.optimizers import ManualOptimizer, needs_closure, read_optimizers
from trainer.plan import with_module_callbacks
from trainer.progress import Progress
from trainer.run_directory import choose_run_dir, find_checkpoint
from trainer.runtime.environment import detect_environment
from trainer.runtime.failure import report_failure
from trainer.runtime.launch import die_with_parent, launch_processes
from trainer.runtime.seed import derive_seed, seed_everything, set_deterministic
from trainer.runtime.stop import StopSwitch, exit_code

if TYPE_CHECKING:
    from trainer.trainer import Trainer

log = logging.getLogger("trainer")

MODULE_HOOKS = [hook for hook in HOOKS if hook not in NOT_ON_MODULES] + [
    name for name in vars(TrainModule) if name.startswith("on_")
]

TRANSFER_HOOKS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")

ELSEWHERE = {
    "training_epoch_end": "on_train_epoch_end",
    "validation_epoch_end": "on_validation_epoch_end",
    "test_epoch_end": "on_test_epoch_end",
    "optimizer_step": "on_before_optimizer_step, or automatic_optimization = False",
    "optimizer_zero_grad": "on_before_zero_grad, or automatic_optimization = False",
    "backward": "on_before_backward, or automatic_optimization = False with manual_backward",
}
"""Methods of other trainers' modules that would never be called here, and what to define instead."""


@contextmanager
def running(
    trainer: Trainer, stage: str, module: TrainModule, data: Any, datamodule: Any, ckpt_path: Any
) -> Iterator[None]:
    """Bring everything up for `stage`, run the body, and take it down again.

    `data`: the loaders given by the caller, by stage. Starts the processes if there are several and they are not there.
    """
    check(trainer, stage, module, datamodule, ckpt_path)
    _start_processes(trainer)
    trainer.stage, trainer.stop_reason = stage, None
    trainer.module, trainer.datamodule = module, datamodule
    try:
        _set_up(trainer, data, ckpt_path)
        with torch.autograd.set_detect_anomaly(trainer.settings.detect_anomaly):
            yield
        _finish(trainer)
        # The first process to exit would have the others ended, in the middle of their closing work.
        trainer.strategy.barrier()
    except BaseException as error:
        # No collectives here: the other processes may be anywhere.
        if isinstance(error, Exception):
            report_failure(trainer.stop_switch.store, trainer.rank, trainer.world_size, error)
        with suppress(Exception):
            trainer.hooks.on_exception(trainer, module, error)
            _finish(trainer)
        raise
    finally:
        _tear_down(trainer)
    if trainer.stop_reason is not None and exit_code(trainer.stop_reason) and not _interactive():
        sys.exit(exit_code(trainer.stop_reason))


def _finish(trainer: Trainer) -> None:
    if trainer.datamodule is not None:
        trainer.datamodule.teardown(str(trainer.stage))
    trainer.hooks.teardown(trainer, trainer.module, str(trainer.stage))


def check(trainer: Trainer, stage: str, module: Any, datamodule: Any, ckpt_path: Any) -> None:
    """Find everything that can be known to be wrong before a process is started, and report it at once."""
    if isinstance(module, type):
        raise ConfigError(f"{stage}() got the class {module.__name__}; give it an object: {module.__name__}(...).")
    if not isinstance(module, TrainModule):
        raise ConfigError(
            f"{stage}() takes a trainer.TrainModule as its first argument, and got a {type(module).__name__}. "
            "Subclass TrainModule, or hold your model as an attribute of one."
        )
    if datamodule is not None and not isinstance(datamodule, DataModule):
        raise ConfigError(f"datamodule= takes a trainer.DataModule, and got a {type(datamodule).__name__}.")
    name = type(module).__name__
    problems = check_hooks(module, MODULE_HOOKS)
    problems += [
        f"{name}.{method} would never be called. Define {instead} instead."
        for method, instead in ELSEWHERE.items()
        if hasattr(type(module), method)
    ]
    if stage == "fit":
        problems += [
            f"{name} has no {method}: define it."
            for method in ("training_step", "configure_optimizers")
            if not module.overrides(method)
        ]
        if not module.automatic_optimization:
            problems += _not_with_manual_optimization(trainer)
    if isinstance(ckpt_path, str) and ckpt_path not in ("last", "best") and not Path(ckpt_path).exists():
        guess = did_you_mean(ckpt_path, ["last", "best"])
        problems.append(f"ckpt_path={ckpt_path!r} does not exist.{guess} Give 'last', 'best' or a checkpoint folder.")
    raise_problems(problems, f"{stage}({name})")


def _not_with_manual_optimization(trainer: Trainer) -> list[str]:
    settings = trainer.settings
    problems = []
    if settings.accumulate_grad_batches != 1:
        problems.append(
            "accumulate_grad_batches needs automatic optimization: with automatic_optimization = False your "
            "training_step decides when to step."
        )
    if settings.gradient_clip_val is not None:
        problems.append(
            "gradient_clip_val needs automatic optimization: with automatic_optimization = False call "
            "self.clip_gradients(optimizer, value) in training_step."
        )
    return problems


def _start_processes(trainer: Trainer) -> None:
    if detect_environment().source == "single process" and trainer.plan.num_processes > 1:
        launch_processes(trainer.plan.num_processes)
    die_with_parent()


def _set_up(trainer: Trainer, data: Any, ckpt_path: Any) -> None:
    """In the order of the pseudocode at the top of trainer/callbacks/base.py."""
    stage, module, strategy = trainer.stage, trainer.module, trainer.strategy
    assert stage is not None
    strategy.setup_environment(trainer.plan.device_type, trainer.precision)
    trainer.undo_deterministic = set_deterministic(trainer.settings.deterministic, trainer.settings.benchmark)
    module.attach(trainer)
    if trainer.datamodule is not None:
        trainer.datamodule.attach(trainer)
    trainer.callbacks = with_module_callbacks(trainer.plan.callbacks, module.configure_callbacks())
    trainer.hooks = in_calling_order(trainer.callbacks, module)
    trainer.progress = Progress() if stage == "fit" else trainer.progress
    trainer.optimizers, trainer.scheduler_configs, trainer.manual_optimizers = [], [], []
    trainer.moves_batches_itself = module.overrides_any(TRANSFER_HOOKS)
    trainer.metrics = MetricLog(module, strategy.gather_objects)
    trainer.stop_switch = StopSwitch(strategy.store, strategy.rank, strategy.world_size)
    if stage == "fit":
        trainer.stop_switch.install()

    path = strategy.broadcast_object(find_checkpoint(trainer, ckpt_path) if trainer.is_global_zero else None)
    trainer.run_dir = strategy.broadcast_object(choose_run_dir(trainer, ckpt_path, path))
    checkpoint = read_checkpoint(path) if path is not None else None
    _seed(trainer, checkpoint)
    _prepare_data(trainer)
    if trainer.datamodule is not None:
        trainer.datamodule.setup(stage)
    trainer.hooks.setup(trainer, module, stage)
    with strategy.init_context():
        module.configure_model()
    if checkpoint is not None:
        trainer.hooks.on_load_checkpoint(trainer, module, checkpoint)
    strategy.setup_module(module, for_training=stage == "fit")
    if checkpoint is not None:
        strategy.load_module_state(checkpoint["model"])
        log.info("restored %s", path)
    make_feeds(trainer, data)
    if stage == "fit":
        _set_up_training(trainer, checkpoint)
    elif checkpoint is not None:
        trainer.progress.load_state_dict(checkpoint["progress"])


def _set_up_training(trainer: Trainer, checkpoint: dict[str, Any] | None) -> None:
    module, strategy, settings = trainer.module, trainer.strategy, trainer.settings
    optimizers, trainer.scheduler_configs = read_optimizers(module.configure_optimizers(), type(module).__name__)
    clip_norm = settings.gradient_clip_val if settings.gradient_clip_algorithm == "norm" else None
    trainer.optimizers = strategy.setup_optimizers(optimizers, clip_norm)
    trainer.clips = settings.gradient_clip_val is not None or module.overrides("configure_gradient_clipping")
    trainer.closure_needed = module.automatic_optimization and any(needs_closure(o) for o in trainer.optimizers)
    if trainer.closure_needed and (len(optimizers) > 1 or strategy.world_size > 1 or strategy.scaler is not None):
        raise ConfigError(
            f"{type(optimizers[0]).__name__} evaluates the loss several times a step: use it as the only optimizer, on "
            "one process, without loss scaling."
        )
    trainer.manual_optimizers = [ManualOptimizer(optimizer, trainer) for optimizer in trainer.optimizers]
    trainer.rng_to_restore = None
    if checkpoint is not None:
        restore_training(trainer, checkpoint)
        if checkpoint["world_size"] == strategy.world_size:
            trainer.rng_to_restore = checkpoint["rng"][strategy.rank]
        else:
            log.info(
                "the checkpoint was written by %d processes and is read by %d: the order of the samples stays the same, "
                "dropout and the like differ",
                checkpoint["world_size"],
                strategy.world_size,
            )


def _seed(trainer: Trainer, checkpoint: dict[str, Any] | None) -> None:
    """Everything random follows from one seed; each process draws its own numbers, the weights are alike."""
    given = trainer.settings.seed
    if given is None and checkpoint is not None:
        trainer.seed = checkpoint["seed"]
    elif given is None:
        trainer.seed = trainer.strategy.broadcast_object(int.from_bytes(os.urandom(4), "little"))
    else:
        trainer.seed = given
    if given is not None and trainer.rank > 0:
        # Rank 0 goes on with the numbers of Trainer(seed=...), like a single process would.
        seed_everything(derive_seed(trainer.seed, trainer.rank))


def _prepare_data(trainer: Trainer) -> None:
    strategy, data = trainer.strategy, trainer.datamodule
    if data is not None and (strategy.local_rank == 0 if data.prepare_data_per_node else strategy.is_global_zero):
        data.prepare_data()
    if strategy.local_rank == 0:
        trainer.module.prepare_data()
    trainer.strategy.barrier()


def _tear_down(trainer: Trainer) -> None:
    trainer.stop_switch.uninstall()
    trainer.undo_deterministic()
    trainer.strategy.teardown()
    trainer.module.attach(None)
    trainer.module.untoggle_optimizer()
    if trainer.datamodule is not None:
        trainer.datamodule.attach(None)
    trainer.stage, trainer.training, trainer.validating, trainer.sanity_checking = None, False, False, False


def _interactive() -> bool:
    """Whether somebody types into this Python: then a stopped run gives the prompt back instead of ending Python."""
    return hasattr(sys, "ps1") or sys.flags.interactive == 1 or "ipykernel" in sys.modules
