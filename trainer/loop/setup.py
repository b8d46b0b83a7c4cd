"""One run of `fit`, `validate`, `test` or `predict`: everything before the loop, and after it, whatever happens."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import SGD, Adam, AdamW, Optimizer

from trainer.callback import build_callback_list
from trainer.checkpoint.storage import StoragePath, as_storage_path
from trainer.data.datamodule import DataModule
from trainer.distributed.environment import detect_environment
from trainer.distributed.slurm import requeue, was_requeued
from trainer.errors import ConfigError, did_you_mean, explain_torch_error, raise_problems
from trainer.fault_tolerance.collective_check import CollectiveCheck
from trainer.fault_tolerance.failure import report_failure
from trainer.fault_tolerance.stop import EXIT_RETRY, StopCoordinator, exit_code
from trainer.launchers.launcher import die_with_parent, launch_processes
from trainer.launchers.restarts import RestartRecord, max_restarts, restart_safe_exit_code
from trainer.loop.checks import datamodule_problems, module_problems
from trainer.loop.describe import start_line
from trainer.loop.loaders import check_same_everywhere, make_loaders, micro_batch_of
from trainer.loop.resolved_config import step_config, with_module_callbacks
from trainer.loop.run_directory import (
    choose_run_dir,
    find_after_restart,
    find_checkpoint,
    lock_folders,
    release_folders,
)
from trainer.loop.training_state import load_training_state, restore_training
from trainer.metrics.metric_log import MetricLog
from trainer.model.activation_checkpointing import disable_activation_checkpointing
from trainer.model.compile import start_compiling
from trainer.module import TrainModule
from trainer.optimizers import ManualOptimizer, check_parameters, needs_closure, parse_optimizers
from trainer.profiling import phase_of
from trainer.progress import Progress
from trainer.seed import derive_seed, seed_everything, set_deterministic
from trainer.settings import DEFAULT_MAX_EPOCHS
from trainer.strategy import wrapping_problems

if TYPE_CHECKING:
    from trainer.trainer import Trainer

log = logging.getLogger("trainer")

TRANSFER_HOOKS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")


@contextmanager
def running(
    trainer: Trainer, stage: str, module: TrainModule, data: Any, datamodule: Any, ckpt_path: Any
) -> Iterator[None]:
    """Bring everything up for `stage`, run the body, and take it down again.

    `data`: the loaders given by the caller, by stage. Starts the processes if there are several and they are not there.
    """
    check(trainer, stage, module, data, datamodule, ckpt_path)
    _start_processes(trainer)
    trainer.stage, trainer.stop_reason = stage, None
    trainer.module, trainer.datamodule = module, datamodule
    try:
        _set_up(trainer, data, ckpt_path)
        with torch.autograd.set_detect_anomaly(trainer.settings.detect_anomaly):
            yield
        trainer.watchdog.allow_slow = True
        call_teardown_hooks(trainer)
        _say_why_it_stopped(trainer)
        trainer.shutting_down = True
        # The first process to exit would have the others ended, in the middle of their closing work.
        trainer.strategy.processes.barrier()
        trainer.stop_coordinator.done()
    except BaseException as error:
        # No collectives here: the other processes may be anywhere.
        trainer.stop_coordinator.failed()
        trainer.watchdog.stop()
        explained = explain_torch_error(error)
        if isinstance(error, Exception):
            report_failure(trainer.stop_coordinator.store, trainer.rank, trainer.world_size, explained or error)
        with log_secondary_errors("on_exception"):
            trainer.hooks.on_exception(trainer, module, error)
        with log_secondary_errors("teardown"):
            call_teardown_hooks(trainer)
        _leave_no_empty_run_dir(trainer)
        if explained is not None:
            raise explained from error
        raise
    finally:
        _tear_down(trainer)
    if trainer.stop_reason is not None and exit_code(trainer.stop_reason) and not in_interactive_session():
        if exit_code(trainer.stop_reason) == EXIT_RETRY and trainer.is_global_zero:
            requeue()
        sys.exit(restart_safe_exit_code(exit_code(trainer.stop_reason), trainer.strategy.processes.store))


def _say_why_it_stopped(trainer: Trainer) -> None:
    if trainer.stage == "fit" and exit_code(trainer.stop_reason):
        trainer.print(
            f"stopped after step {trainer.global_step}: {trainer.stop_reason}. "
            f"To go on, start it again with ckpt_path='last'; it writes into {trainer.run_dir}."
        )


def _leave_no_empty_run_dir(trainer: Trainer) -> None:
    """A run that failed before it wrote anything leaves no directory behind, nor changes which one is the newest."""
    if trainer.is_global_zero and trainer.stage == "fit" and trainer.progress.step == 0:
        release_folders(trainer)
        with suppress(OSError):
            trainer.run_dir.rmdir()


@contextmanager
def log_secondary_errors(what: str) -> Iterator[None]:
    """An error in here is told, and does not hide the one that ends the run."""
    try:
        yield
    except Exception:
        log.warning("%s failed too, while the run was ending with an error:", what, exc_info=True)


def call_teardown_hooks(trainer: Trainer) -> None:
    if trainer.datamodule is not None:
        trainer.datamodule.teardown(str(trainer.stage))
    trainer.hooks.teardown(trainer, trainer.module, str(trainer.stage))


def check(trainer: Trainer, stage: str, module: Any, data: Any, datamodule: Any, ckpt_path: Any) -> None:
    """Find everything that can be known to be wrong before a process is started, and report it at once."""
    if trainer.stage is not None:
        raise ConfigError(f"{stage}() was called while {trainer.stage}() runs: make another Trainer for it.")
    if isinstance(module, type):
        raise ConfigError(f"{stage}() got the class {module.__name__}; give it an object: {module.__name__}(...).")
    if not isinstance(module, TrainModule):
        raise ConfigError(
            f"{stage}() takes a trainer.TrainModule as its first argument, and got a {type(module).__name__}. "
            "Subclass TrainModule, or hold your model as an attribute of one."
        )
    problems = module_problems(module, stage) or wrapping_problems(module, trainer.strategy)
    problems += _wrong_data(stage, data, datamodule)
    if stage == "fit":
        settings = trainer.settings
        steps = step_config(settings, micro_batch_size=micro_batch_of(data.get("train")))
        plan = trainer.plan
        problems += trainer.strategy.problems(trainer.precision, plan.device_type, plan.num_processes, steps, module)
        if not module.automatic_optimization:
            problems += _not_with_manual_optimization(trainer)
    if not isinstance(ckpt_path, (str, Path, type(None))):
        problems.append(f"ckpt_path={ckpt_path!r}: give 'last', 'best' or the path of a checkpoint folder.")
    elif not checkpoint_may_exist(ckpt_path):
        guess = did_you_mean(str(ckpt_path), ["last", "best"])
        problems.append(
            f"ckpt_path={str(ckpt_path)!r} does not exist.{guess} Give 'last', 'best' or a checkpoint folder."
        )
    raise_problems(problems, f"{stage}({type(module).__name__})")


def checkpoint_may_exist(ckpt_path: Any) -> bool:
    """Whether there can be such a checkpoint; `.../last` and `.../best` are looked for later."""
    if ckpt_path in (None, "last", "best"):
        return True
    place = as_storage_path(ckpt_path)
    return place.exists() or (place.name in ("last", "best") and place.parent.exists())


def _wrong_data(stage: str, data: dict[str, Any], datamodule: Any) -> list[str]:
    """Data modules where loaders are expected, and the other way round."""
    problems = []
    for loaders in data.values():
        if isinstance(loaders, DataModule):
            problems.append(
                f"{stage}() got the data module {type(loaders).__name__} as a loader: give it as datamodule=."
            )
        elif isinstance(loaders, type):
            problems.append(f"{stage}() got the class {loaders.__name__} in the place of a loader: give an object.")
    if isinstance(datamodule, type):
        problems.append(f"datamodule= got the class {datamodule.__name__}; give an object: {datamodule.__name__}(...).")
    elif isinstance(datamodule, DataModule):
        problems += datamodule_problems(datamodule)
        if any(loaders is not None for loaders in data.values()):
            problems.append(f"{stage}() got loaders and a datamodule, which gives loaders too: pass only one of them.")
    elif datamodule is not None:
        problems.append(f"datamodule= takes a trainer.DataModule, and got a {type(datamodule).__name__}.")
    return problems


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
    number, restarts = trainer.plan.num_processes, trainer.settings.max_restarts
    if detect_environment().source == "single process":
        if number > 1 or restarts:
            launch_processes(number, restarts, trainer.plan.device_type)
    elif restarts > max_restarts() and detect_environment().rank == 0:
        log.warning("max_restarts=%d has no effect here: give torchrun --max-restarts %d", restarts, restarts)
    die_with_parent()


def _set_up(trainer: Trainer, data: Any, ckpt_path: Any) -> None:
    """In the order of the pseudocode at the top of trainer/callback.py."""
    stage, module, strategy = trainer.stage, trainer.module, trainer.strategy
    assert stage is not None
    strategy.setup_environment(trainer.plan.device_type, trainer.precision, trainer.plan.device_ids)
    processes = strategy.processes
    configure_logging(processes.rank)
    if processes.rank == 0:
        log.info("%s", start_line(trainer))
    trainer.undo_deterministic = set_deterministic(trainer.settings.deterministic, trainer.settings.benchmark)
    module.attach(trainer)
    if trainer.datamodule is not None:
        trainer.datamodule.attach(trainer)
    trainer.callbacks = with_module_callbacks(trainer.plan.callbacks, module.configure_callbacks())
    trainer.phase = phase_of(trainer.callbacks)
    trainer.hooks = build_callback_list(trainer.callbacks, module, trainer.phase)
    trainer.progress_bar_metrics.clear()
    trainer.progress = Progress() if stage == "fit" else trainer.progress
    trainer.optimizers, trainer.scheduler_configs, trainer.manual_optimizers = [], [], []
    trainer.has_transfer_hooks = module.overrides_any(TRANSFER_HOOKS)
    trainer.metrics = MetricLog(module, processes.all_gather_object, trainer.phase)
    if stage == "predict":
        trainer.metrics.disabled_reason = "predict() logs nothing. Return values from predict_step, or use test()."
    trainer.stop_coordinator = StopCoordinator(processes.store, processes.rank, processes.world_size)
    # Not the signals of an evaluation: there is nothing to save.
    trainer.stop_coordinator.install(signals=stage == "fit")

    places = _places(trainer, ckpt_path) if trainer.is_global_zero else None
    path, trainer.run_dir = processes.broadcast_object(places)  # type: ignore[misc]  # rank 0 has them
    lock_folders(trainer)
    _write_config(trainer)
    # "last" has been verified when it was found.
    verify = ckpt_path != "last"
    checkpoint = load_training_state(path, verify, strategy.shards_state, processes) if path is not None else None
    _seed(trainer, checkpoint)
    _prepare_data(trainer)
    if trainer.datamodule is not None:
        trainer.datamodule.setup(stage)
    trainer.hooks.setup(trainer, module, stage)
    with strategy.init_context(module, will_load_checkpoint=checkpoint is not None):
        module.configure_model()
    if checkpoint is not None:
        trainer.hooks.on_load_checkpoint(trainer, module, checkpoint)
    disable_activation_checkpointing(module)
    policy = trainer.settings.activation_checkpointing if stage == "fit" else None
    strategy.setup_module(module, stage == "fit", policy)
    if trainer.plan.compilation is not None:
        trainer.undo_compile = start_compiling(trainer, trainer.plan.compilation)
    if checkpoint is not None:
        strategy.load_module_state(checkpoint["model"])
        log.info("restored %s", path)
    make_loaders(trainer, data)
    check_same_everywhere(trainer)
    if stage == "fit":
        _set_up_training(trainer, checkpoint)
    elif checkpoint is not None:
        trainer.progress.load_state_dict(checkpoint["progress"])
    _start_watching(trainer)


def _places(trainer: Trainer, ckpt_path: Any) -> tuple[StoragePath | None, Path]:
    """On rank 0: the checkpoint to begin with, and the run directory. After a restart the run goes on with its own."""
    record = RestartRecord() if trainer.stage == "fit" else None
    path = find_after_restart(trainer, record.former) if record is not None and record.former is not None else None
    if path is not None:
        ckpt_path = "last"
        log.info("started again after a failure")
    else:
        ckpt_path = ckpt_path or ("last" if record is not None and was_requeued() else None)
        path = find_checkpoint(trainer, ckpt_path)
    run_dir = choose_run_dir(trainer, ckpt_path, path)
    if record is not None:
        record.remember(str(run_dir))
    return path, run_dir


def _start_watching(trainer: Trainer) -> None:
    """The threads that look at the clock while the loop runs."""
    switch, limit = trainer.stop_coordinator, trainer.settings.watchdog_seconds
    rank, world_size = trainer.rank, trainer.world_size
    trainer.shutting_down, trainer.meeting = False, None
    if switch.store is not None:
        trainer.meeting = CollectiveCheck(
            switch.store, rank, world_size, lambda: trainer.metrics.window + 10**9 * trainer.shutting_down
        )
    trainer.watchdog.start(switch.store, rank, world_size, limit, lambda: trainer.global_step, trainer.meeting)
    if trainer.deadline is not None and trainer.stage == "fit":
        trainer.deadline.start(switch)


def _set_up_training(trainer: Trainer, checkpoint: dict[str, Any] | None) -> None:
    module, strategy, settings = trainer.module, trainer.strategy, trainer.settings
    optimizers, trainer.scheduler_configs = parse_optimizers(module.configure_optimizers(), type(module).__name__)
    check_parameters(optimizers, module, shared=not module.automatic_optimization)
    if trainer.settings.max_epochs is None and trainer.max_epochs == DEFAULT_MAX_EPOCHS:
        log.warning("no max_epochs, max_steps or max_time is given: training for %d epochs", DEFAULT_MAX_EPOCHS)
    assert trainer.train_loader is not None
    for hint in performance_hints(strategy.device, trainer.train_loader.pinned, optimizers):
        log.info("faster: %s", hint)
    steps = step_config(
        settings,
        accumulate_grad_batches=trainer.accumulate_grad_batches,
        micro_batch_size=trainer.train_loader.batch_size,
        schedulers=[config.scheduler for config in trainer.scheduler_configs],
        run_dir=None if settings.fast_dev_run else trainer.run_dir,
    )
    trainer.optimizers = strategy.setup_optimizers(optimizers, steps)
    trainer.clips = settings.gradient_clip_val is not None or module.overrides("configure_gradient_clipping")
    trainer.closure_needed = module.automatic_optimization and any(needs_closure(o) for o in trainer.optimizers)
    if trainer.closure_needed and (
        len(optimizers) > 1 or strategy.processes.world_size > 1 or strategy.scaler is not None
    ):
        raise ConfigError(
            f"{type(optimizers[0]).__name__} evaluates the loss several times a step: use it as the only optimizer, on "
            "one process, without loss scaling."
        )
    trainer.manual_backwards = trainer.manual_steps = 0
    trainer.manual_optimizers = [ManualOptimizer(optimizer, trainer) for optimizer in trainer.optimizers]
    trainer.rng_to_restore = None
    if checkpoint is not None:
        restore_training(trainer, checkpoint)
        if trainer.max_epochs is not None and trainer.progress.epoch >= trainer.max_epochs:
            log.warning("nothing is left to train: max_epochs=%d are done; raise it to go on", trainer.max_epochs)
        if checkpoint["world_size"] == strategy.processes.world_size:
            trainer.rng_to_restore = checkpoint["rng"][strategy.processes.rank]
        else:
            log.info(
                "the checkpoint was written by %d processes and is read by %d: the order of the samples stays the "
                "same, dropout and the like differ",
                checkpoint["world_size"],
                strategy.processes.world_size,
            )


def _write_config(trainer: Trainer) -> None:
    config, training = trainer.resolved_config, trainer.stage == "fit" and not trainer.settings.fast_dev_run
    if config is not None and training and trainer.is_global_zero:
        (trainer.run_dir / "config.yaml").write_text(config)


def _seed(trainer: Trainer, checkpoint: dict[str, Any] | None) -> None:
    """Everything random follows from one seed; each process draws its own numbers, the weights are alike."""
    given = trainer.settings.seed
    if given is None and checkpoint is not None:
        trainer.seed = checkpoint["seed"]
    elif given is None:
        trainer.seed = trainer.strategy.processes.broadcast_object(int.from_bytes(os.urandom(4), "little"))
    else:
        trainer.seed = given
        if checkpoint is not None and trainer.stage == "fit" and checkpoint["seed"] != given:
            log.warning(
                "the checkpoint was written with seed=%s, this run has seed=%d: the order of the samples changes here",
                checkpoint["seed"],
                given,
            )
    if given is not None and trainer.rank > 0:
        # Rank 0 goes on with the numbers of Trainer(seed=...), like a single process would.
        seed_everything(derive_seed(trainer.seed, trainer.rank))


def _prepare_data(trainer: Trainer) -> None:
    strategy, data = trainer.strategy, trainer.datamodule
    if data is not None and (
        strategy.processes.local_rank == 0 if data.prepare_data_per_node else strategy.processes.is_global_zero
    ):
        data.prepare_data()
    if strategy.processes.local_rank == 0:
        trainer.module.prepare_data()
    trainer.strategy.processes.barrier()


def _tear_down(trainer: Trainer) -> None:
    release_folders(trainer)
    trainer.watchdog.stop()
    trainer.meeting = None
    if trainer.deadline is not None:
        trainer.deadline.stop()
    trainer.stop_coordinator.uninstall()
    trainer.undo_deterministic()
    trainer.undo_compile()
    trainer.undo_compile = lambda: None
    trainer.strategy.teardown()
    trainer.module.attach(None)
    trainer.module.untoggle_optimizer()
    if trainer.datamodule is not None:
        trainer.datamodule.attach(None)
    trainer.stage, trainer.training, trainer.validating, trainer.sanity_checking = None, False, False, False


def in_interactive_session() -> bool:
    """Whether a stopped run gives control back instead of ending Python.

    So it does where somebody types into this Python, and in a worker of Ray, which takes SystemExit for a failure.
    """
    interactive = hasattr(sys, "ps1") or sys.flags.interactive == 1 or "ipykernel" in sys.modules
    return interactive or detect_environment().source == "Ray Train"


HAVE_FUSED = (Adam, AdamW, SGD)
"""The optimizers that torch can run as one kernel on CUDA, and does not unless it is asked to."""


def performance_hints(device: torch.device, pinned: bool | None, optimizers: Iterable[Optimizer]) -> list[str]:
    """One sentence each; nothing for devices other than CUDA.

    Args:
        device: the one that trains.
        pinned: whether the training loader gives batches in pinned memory; None: it is no DataLoader.
        optimizers: as the user made them.
    """
    if device.type != "cuda":
        return []
    hints = []
    if pinned is False:
        hints.append("DataLoader(pin_memory=True) lets batches be copied to the GPU beside the computation")
    for optimizer in optimizers:
        if type(optimizer) in HAVE_FUSED and not any(
            group.get("fused") or group.get("capturable") for group in optimizer.param_groups
        ):
            hints.append(f"{type(optimizer).__name__}(fused=True) updates all parameters in one kernel")
    return hints


class _Shown(logging.StreamHandler):  # type: ignore[type-arg]
    """To stderr, wherever that leads at the moment of the message."""

    def emit(self, record: logging.LogRecord) -> None:
        self.setStream(sys.stderr)
        super().emit(record)


def configure_logging(rank: int) -> None:
    """From now on the logger "trainer" writes to stderr: rank 0 what was chosen and why, every process its warnings.

    Nothing happens where the program has a handler for it already (`logging.basicConfig`), and a level that was set
    (`logging.getLogger("trainer").setLevel("WARNING")`) stays.
    """
    log = logging.getLogger("trainer")
    if not log.hasHandlers():
        log.addHandler(_Shown())
        if log.level == logging.NOTSET:
            log.setLevel(logging.INFO if rank == 0 else logging.WARNING)
