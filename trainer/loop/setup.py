"""Set up a run: the steps between `fit` (or validate, test, predict) and the first batch, in running order."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

from trainer.arguments import kept_path
from trainer.checkpoint.directory import POINTERS
from trainer.checkpoint.disk import replace_notes
from trainer.checkpoint.format import evaluated_weights
from trainer.checkpoint.hook_checkpoint import loaded_by_hooks
from trainer.checkpoint.left_out import report_left_out
from trainer.checkpoint.lightning_file import as_folder, file_at
from trainer.checkpoint.pretrained import open_weights, refuse_adapters_of_other_weights, weights_for
from trainer.checkpoint.storage import StoragePath, kept_storage_path
from trainer.data.datamodule import DataModule
from trainer.data.worker_processes import workers_end_with_this_process
from trainer.distributed.environment import detect_environment
from trainer.distributed.process_group import SingleProcess
from trainer.distributed.slurm import was_requeued
from trainer.errors import ConfigError, restoring
from trainer.fault_tolerance.collective_check import end_listening
from trainer.fault_tolerance.forked_child import end_forked_child
from trainer.fault_tolerance.signals import keep_exit_code
from trainer.launchers.launcher import die_with_parent, launch_processes
from trainer.launchers.restarts import RestartRecord, max_restarts
from trainer.loop.auto_accumulation import find_fitting_batches, split_batches
from trainer.loop.loaders import make_loaders
from trainer.loop.progress import Clock
from trainer.loop.run import Run, Session
from trainer.loop.save_rehearsal import check_buffers_storable
from trainer.loop.step import STEP_OVERRIDES
from trainer.loop.teardown import end_with_error, exit_if_stopped, finish, will_exit
from trainer.loop.training_state import (
    choose_seed,
    drawing_as_before,
    load_training_state,
    load_weights,
    restore_data,
    restore_training,
)
from trainer.model.activation_checkpointing import disable_activation_checkpointing
from trainer.model.compile import start_compiling
from trainer.model.dispatched import refuse_dispatched
from trainer.model.unsupported import refuse_lazy, use_separate_elements
from trainer.module import TrainModule
from trainer.optimizers import check_parameters, parse_optimizers
from trainer.runs.changes_since_checkpoint import report_changes
from trainer.runs.describe import start_line
from trainer.runs.facts import RunFacts
from trainer.runs.preflight_checks import check_call
from trainer.runs.resolved_config import ResolvedConfig, step_options
from trainer.runs.run_directory import (
    beginning_of,
    choose_logger_folders,
    choose_run_dir,
    find_after_restart,
    find_again,
    find_checkpoint,
    locked_folders,
    noted_end,
    of_rank_zero,
    refuse_weights_alone,
    share_dirpaths,
)
from trainer.runs.save_pretrained import gather_to_save
from trainer.runs.terminal import columns_of, wrapped
from trainer.seed import set_deterministic
from trainer.settings import DEFAULT_MAX_EPOCHS
from trainer.state.hook_changes import as_made
from trainer.strategy import Strategy, given_checkpoint_io

log = logging.getLogger("trainer")


@contextmanager
def start_run(
    config: ResolvedConfig,
    session: Session,
    stage: str,
    module: TrainModule,
    data: dict[str, Any],
    datamodule: DataModule | None,
    ckpt_path: str | Path | None,
    adopt: Callable[[Run], object],
    allow_changes: Collection[str] = (),
    weights: str | Path | None = None,
) -> Iterator[Run]:
    """Set up a stage, yield the complete `Run`, and tear the stage down.

    Follows the order of the pseudocode at the top of trainer/callback.py. `cleanup` undoes the changes outside of the
    run, also after an error.

    Args:
        config: the choices made from the settings.
        session: the state shared with earlier runs.
        stage: "fit", "validate", "test" or "predict".
        module, datamodule, ckpt_path: the user's arguments.
        data: the user's loaders, by stage.
        adopt: called with the run before any user code, to attach the trainer to modules. Returns the first argument
            of hooks.
        allow_changes: names of `GROUPS` in `runs/facts.py`, which may differ from the run that wrote the checkpoint.
        weights: pretrained weights to start `fit` from, unless there is a checkpoint.
    """
    check_call(config, session.stage, stage, module, data, datamodule, ckpt_path, allow_changes, weights)
    start_processes(config)
    run = Run(config, session, stage, module, datamodule)
    with workers_end_with_this_process(), ExitStack() as cleanup:
        cleanup.callback(run.end)
        caller = adopt(run)
        run.bind_hooks(caller)
        try:
            cleanup.callback(run.strategy.teardown)
            join_processes(config, cleanup)
            run.strategy.processes.log.info("%s", start_line(config, stage))
            if run.settings.fast_dev_run:
                cleanup.enter_context(run.generators.isolated(keeps_new=True))
            run.connect_callbacks(caller)
            run.facts.agree_on_settings(stage, config, run.callbacks)
            cleanup.callback(stop_listening, run.strategy.processes, run.clock)
            run.listen_for_stops()
            checkpoint = open_run_directory(run, ckpt_path, cleanup)
            choose_logger_folders(run, ckpt_path)
            run.seed_processes(choose_seed(run.settings.seed, checkpoint, run.strategy.processes))
            prepare_data(run, data, checkpoint)
            build_module(run, checkpoint, cleanup, weights)
            cleanup.callback(run.loaders.close)
            run.loaders.needed()
            run.facts.agree_on_loaders(run.loaders.all(), run.train_loader)
            if run.settings.fast_dev_run:
                cleanup.enter_context(run.loaders.kept_places())
            restore_micro_batch_size(run, checkpoint)
            run.loader_epochs.call_when_due(partial(reload_loaders, run, data))
            if stage == "fit":
                build_optimizers(run)
            run.track_hook_changes(cleanup)
            restore_training(run, checkpoint)
            if stage == "fit":
                find_fitting_batches(run)
            report_restored(run, checkpoint, allow_changes)
            run.watch_numbers()
            start_watchdog(run, cleanup)
            with torch.autograd.set_detect_anomaly(run.settings.detect_anomaly):
                yield run
            finish(run)
        except BaseException as error:
            end_forked_child(run.pid, error)
            run.clock.interrupt()
            end_with_error(run, error)
            raise
    run.clock.coordinator.send_again(run.clock.stop_reason)
    exit_if_stopped(run.clock, run.strategy.processes)


def start_processes(config: ResolvedConfig) -> None:
    """Start the other processes, unless a launcher has started them."""
    number, restarts = config.num_processes, config.settings.max_restarts
    if detect_environment().source == "single process":
        if number > 1 or restarts:
            for logger in config.loggers:
                logger.folder_of_files.tell_children()
            launch_processes(number, restarts, config.device_type)
    elif restarts > max_restarts() and detect_environment().rank == 0:
        log.warning("max_restarts=%d has no effect here: give torchrun --max-restarts %d", restarts, restarts)
    die_with_parent()


def join_processes(config: ResolvedConfig, cleanup: ExitStack) -> None:
    """Choose this process's device, and join the other processes."""
    config.strategy.setup_environment(config.device_type, config.precision, config.device_ids)
    configure_logging(config.strategy.processes.rank)
    cleanup.callback(set_deterministic(config.settings.deterministic, config.settings.benchmark))
    if (plugin := given_checkpoint_io(config.strategy)) is not None:
        cleanup.callback(plugin.teardown)


def stop_listening(processes: SingleProcess, clock: Clock) -> None:
    """Restore the former signal handlers; after a stop, keep its exit code whatever signal follows."""
    if will_exit(clock):
        keep_exit_code()
    end_listening(processes, clock.coordinator)


def open_run_directory(run: Run, ckpt_path: str | Path | None, cleanup: ExitStack) -> dict[str, Any] | None:
    """Choose the run directory and lock it; find the checkpoint to start from and read it."""
    strategy, session = run.strategy, run.session
    file = None if ckpt_path is None or ckpt_path in POINTERS else file_at(ckpt_path)
    if file is not None and strategy.processes.is_global_zero:
        plugin = given_checkpoint_io(strategy)
        load = None if plugin is None else lambda path: plugin.load_checkpoint(str(path))
        ckpt_path = cleanup.enter_context(as_folder(file, load))
    found = resolve_checkpoint_and_run_dir(run, ckpt_path) if strategy.processes.is_global_zero else (None, None)
    path, run_dir = of_rank_zero(strategy.processes, found[0]), Path(str(of_rank_zero(strategy.processes, found[1])))
    run.set_paths(run_dir, path, file)
    share_dirpaths(run)
    cleanup.enter_context(locked_folders(run))
    path = find_again(run, ckpt_path, path)
    run.set_paths(run_dir, path, file)
    if run.stage == "fit":
        session.remember_beginning(beginning_of(run, path))
        if strategy.processes.is_global_zero and not run.settings.fast_dev_run:
            note_configuration(run)
    if path is None:
        return None
    if run.stage == "fit":
        report_left_out(path, strategy.processes.is_global_zero)
    as_made(run.module)
    # "last" was verified when it was found.
    return load_training_state(path, ckpt_path != "last", strategy.shards_state, strategy.processes)


def note_configuration(run: Run) -> None:
    """Write the configuration into the run directory; log the directory of a run that was started from Python."""
    if run.session.config_text is not None:  # then the command line names it at the end
        replace_notes(run.session.run_dir / "config.yaml", run.session.config_text.encode())
    elif run.loggers or run.checkpoint_callbacks:
        log.info("run directory: %s", run.session.run_dir)


def resolve_checkpoint_and_run_dir(run: Run, ckpt_path: str | Path | None) -> tuple[StoragePath | None, Path]:
    """Return, on rank 0, the checkpoint to start from and the run directory, which a restarted run keeps."""
    if run.stage != "fit":
        return _with_run_dir(run, ckpt_path, find_checkpoint(run, ckpt_path))
    record = RestartRecord()  # which counts the fits of the script
    path = None if record.former is None else find_after_restart(run, record.former)
    if path is not None:
        ckpt_path = "last"
        log.info("started again after a failure")
    else:
        if was_requeued():
            ckpt_path = ckpt_path or "last"
        path = find_checkpoint(run, ckpt_path)
        if path is not None:
            path = refuse_weights_alone(run, ckpt_path, path)
    path, run_dir = _with_run_dir(run, ckpt_path, path)
    record.remember(str(run_dir))
    return path, run_dir


def _with_run_dir(run: Run, ckpt_path: str | Path | None, path: StoragePath | None) -> tuple[StoragePath | None, Path]:
    """Return a checkpoint and the run directory, as paths that a change of the working directory leaves unchanged."""
    path = None if path is None else kept_storage_path(path)
    return path, kept_path(choose_run_dir(run, ckpt_path, path))


def prepare_data(run: Run, given: dict[str, Any], checkpoint: dict[str, Any] | None) -> None:
    """Call `prepare_data`, once per node or once overall, and then the `setup` hooks.

    The hooks of callbacks and module may ask for `estimated_stepping_batches`, which needs the loaders: those `given`,
    or those that the data module can make by then.
    """
    processes, data = run.strategy.processes, run.datamodule
    if data is not None and (processes.local_rank == 0 if data.prepare_data_per_node else processes.is_global_zero):
        data.prepare_data()
    if processes.local_rank == 0:
        run.module.prepare_data()
    processes.barrier()
    if data is not None:
        data.setup(run.stage)
    run.loaders.make_when_needed(partial(make_first_loaders, run, given, checkpoint))
    run.hooks.setup(run.stage)


def build_module(
    run: Run, checkpoint: dict[str, Any] | None, cleanup: ExitStack, weights: str | Path | None = None
) -> None:
    """Build the module's layers, move and wrap them, compile them, and load the checkpoint's or pretrained weights."""
    module, strategy, training = run.module, run.strategy, run.stage == "fit"
    is_full = checkpoint is not None and "base" not in checkpoint
    pretrained = None if weights is None or is_full else open_weights(weights)
    loads_all = module.strict_loading and (is_full or pretrained is not None)
    with strategy.init_context(module, will_load_checkpoint=loads_all):
        build_layers(run)
    if pretrained is not None:
        pretrained = weights_for(module, pretrained, module.key_mapping, module.strict_loading)
        if checkpoint is None:  # which has the adapters
            refuse_adapters_of_other_weights(module, pretrained)
        run.facts.agree_on_weights(pretrained)
    if training and run.checkpoint_callbacks:
        check_buffers_storable(module)  # which else only the first checkpoint would
    if checkpoint is not None:
        if not training:
            checkpoint["model"] = evaluated_weights(checkpoint)
        with loaded_by_hooks(checkpoint) as shown:
            run.hooks.on_load_checkpoint(shown)
    disable_activation_checkpointing(module)
    strategy.setup_module(module, training, run.settings.activation_checkpointing if training else None)
    gather_to_save(run)
    if run.config.compilation is not None:
        cleanup.callback(start_compiling(module, run.config.compilation, lambda: run.progress.step))
    if pretrained is not None:
        strategy.load_module_state(pretrained, module.strict_loading)
        log.info("started from the weights of %s", weights)
    restore_weights(run, checkpoint)
    run.generators.share()  # rank 0 may have drawn numbers for the layers that it alone has built
    run.allow_weights()


def restore_weights(run: Run, checkpoint: dict[str, Any] | None) -> None:
    """Load the weights of the checkpoint, if the run starts from one."""
    if checkpoint is not None:
        with restoring("the weights"):
            load_weights(run.strategy, checkpoint)
        log.info("restored %s", run.origin)


def build_layers(run: Run) -> None:
    """Call `configure_model`, and refuse layers that the strategy cannot have."""
    module, strategy = run.module, run.strategy
    module.configure_model()
    if run.config.sync_batchnorm and strategy.processes.world_size > 1:
        torch.nn.SyncBatchNorm.convert_sync_batchnorm(module)
    check_built(module, strategy, run.facts, run.stage == "fit")


def check_built(module: TrainModule, strategy: Strategy, facts: RunFacts, training: bool) -> None:
    """Check that the strategy can take a module whose layers are built, the same on all processes. Collective."""
    if training or strategy.shards_state:
        refuse_lazy(module)
    use_separate_elements(module)
    facts.agree_on_module(module, training)
    converts = strategy.precision.weights not in (None, torch.float32)
    refuse_dispatched(module, training, strategy.shards_state, converts)


def make_first_loaders(run: Run, given: dict[str, Any], checkpoint: dict[str, Any] | None) -> None:
    """Restore the state that loaders may depend on (counters, the data module), and make the loaders."""
    if checkpoint is not None:
        if run.stage == "fit" and run.settings.reload_dataloaders_every_n_epochs:
            run.progress.resume(checkpoint["progress"])
        restore_data(run.datamodule, checkpoint)
    with run.loader_epochs.asking(), drawing_as_before(run, checkpoint):
        make_loaders(run, given)


def restore_micro_batch_size(run: Run, checkpoint: dict[str, Any] | None) -> None:
    """Split batches as the run that wrote the checkpoint did, with accumulate_grad_batches="auto"."""
    fitting = None if checkpoint is None else checkpoint.get("fitting_samples")
    if fitting is not None and run.stage == "fit":
        run.session.remember_fitting(fitting)
        split_batches(run)


def reload_loaders(run: Run, data: dict[str, Any]) -> None:
    """Ask the data module or module for new loaders. Collective."""
    run.loaders.close()
    with run.loader_epochs.asking():
        make_loaders(run, data, keeps_val=not run.loader_epochs.validate(run.settings.check_val_every_n_epoch))
    assert run.train_loader is not None
    run.facts.agree_on_loaders(run.loaders.all(), run.train_loader)
    split_batches(run)
    run.facts.record_data(run.train_loader)


def report_restored(run: Run, checkpoint: dict[str, Any] | None, allow_changes: Collection[str]) -> None:
    """Report changes since the checkpoint, and leave a run that has ended unchanged. Collective."""
    report_changes(run, checkpoint, allow_changes)
    if run.stage != "fit" or run.resumed_from is None or run.settings.fast_dev_run:
        return
    step = run.progress.step
    noted = run.strategy.processes.broadcast_object(noted_end(run.session.run_dir)) or {"step": -1, "epochs": 0}
    ended = noted["step"] == step
    epochs = noted["epochs"] if ended else run.progress.epoch
    early = [reason for callback in run.callbacks if (reason := callback.reason_to_stop()) is not None]
    if step >= run.clock.last_step:
        end = f"the checkpoint has {step} steps, and max_steps={run.clock.last_step}"
    elif epochs >= run.clock.last_epoch:
        end = f"max_epochs={run.clock.last_epoch} are done; raise it to go on"
    elif early and run.clock.reached_minimum:
        end = early[0]
    else:
        return
    if ended:
        run.clock.leave_unchanged()
    run.values.report_once(f"nothing is left to train: {end}")


def build_optimizers(run: Run) -> None:
    """Get optimizers and schedulers from the module, check them, and pass them to the strategy."""
    module, strategy, settings = run.module, run.strategy, run.settings
    automatic, calls_step = module.automatic_optimization, not module.overrides("lr_scheduler_step")
    configured = module.configure_optimizers()
    if configured is None:
        strategy.processes.log.warning(
            "configure_optimizers returned None: this run has no optimizer. To train, end it with 'return optimizer'."
        )
    optimizers, schedulers = parse_optimizers(configured, type(module).__name__, automatic, calls_step)
    check_parameters(optimizers, module, shared=not automatic)
    assert run.train_loader is not None
    run.facts.agree_on_optimizers(module, optimizers, schedulers)
    run.facts.record_data(run.train_loader)
    give_hints(run)
    steps = step_options(
        settings,
        accumulate_grad_batches=run.session.accumulate_grad_batches,
        micro_batch_size=run.train_loader.batch_size,
        schedulers=[config.scheduler for config in schedulers],
        run_dir=None if settings.fast_dev_run else run.session.run_dir,
        reuses_memory=run.reuses_memory,
        compiles_module=run.config.compilation is not None and run.config.compilation.blocks is None,
    )
    run.set_up_optimizers(optimizers, schedulers, steps)
    alone = len(optimizers) == 1 and strategy.processes.world_size == 1 and strategy.scaler is None
    if run.closure_needed and (not alone or run.step_guard is not None or module.overrides_any(STEP_OVERRIDES)):
        raise ConfigError(
            f"{type(optimizers[0]).__name__} evaluates the loss several times a step: use it as the only optimizer, on "
            f"one process, without loss scaling, BadStepGuard, and overrides of {' and '.join(STEP_OVERRIDES)}."
        )


def give_hints(run: Run) -> None:
    """Log settings that the user may not have meant."""
    settings = run.settings
    planned, every = run.estimated_stepping_batches, settings.log_every_n_steps
    if run.loggers and planned < every:
        log.info(
            "log_every_n_steps=%d is more than the %d steps of this run: loggers get no value of a single step. Give a "
            "smaller number, or self.log(..., on_epoch=True).",
            every,
            planned,
        )
    if settings.max_epochs is None and run.config.max_epochs == DEFAULT_MAX_EPOCHS:
        log.warning("no max_epochs, max_steps or max_time is given: training for %d epochs", DEFAULT_MAX_EPOCHS)


def start_watchdog(run: Run, cleanup: ExitStack) -> None:
    """Start the threads of the watchdog and the deadline."""
    stop, strategy = run.clock.coordinator, run.strategy
    rank, world_size = strategy.processes.rank, strategy.processes.world_size
    cleanup.callback(run.clock.watchdog.stop)
    limit, steps = run.settings.watchdog_seconds, lambda: run.progress.step
    folder = None if run.settings.fast_dev_run else run.session.run_dir
    run.clock.watchdog.start(stop.store, rank, world_size, limit, steps, folder)
    if run.clock.deadline is not None and run.stage == "fit":
        cleanup.callback(run.clock.deadline.stop)
        run.clock.deadline.start(stop)


class _Shown(logging.StreamHandler):  # type: ignore[type-arg]
    """Writes to the value of `sys.stderr` at the time of each message. Facts are broken in the width of a terminal;
    warnings are not, which may hold a command to copy."""

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        return wrapped(text, columns_of(self.stream)) if record.levelno == logging.INFO else text

    def emit(self, record: logging.LogRecord) -> None:
        self.setStream(sys.stderr)
        super().emit(record)


def configure_logging(rank: int) -> None:
    """Log to stderr: messages from level INFO on rank 0, warnings on every process.

    Does nothing if the program has a handler for the logger "trainer" (`logging.basicConfig`); keeps a level that was
    set (`logging.getLogger("trainer").setLevel("WARNING")`).
    """
    log = logging.getLogger("trainer")
    if not log.hasHandlers():
        log.addHandler(_Shown())
        if log.level == logging.NOTSET:
            log.setLevel(logging.INFO)
    for handler in log.handlers:
        if isinstance(handler, _Shown):  # perhaps of the process that this one was forked from
            handler.setLevel(logging.INFO if rank == 0 else logging.WARNING)
