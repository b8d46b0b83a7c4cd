"""End a run, after its last batch or after an error."""

from __future__ import annotations

import logging
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch

from trainer.checkpoint.disk import WriteError
from trainer.distributed.environment import detect_environment
from trainer.distributed.process_group import SingleProcess
from trainer.distributed.slurm import requeue
from trainer.errors import INSTEAD_OF_PENALTIES, CheckpointError, ConfigError, TrainerError, explain_torch_error
from trainer.fault_tolerance.failure import exit_in_time, report_failure
from trainer.fault_tolerance.signals import EXIT_RETRY
from trainer.fault_tolerance.stop import exit_code
from trainer.launchers.restarts import exit_code_is_free, restart_safe_exit_code
from trainer.loop.callback_list import call_all
from trainer.loop.progress import Clock
from trainer.loop.run import Run
from trainer.runs.run_directory import note_end
from trainer.runs.terminal import print_text
from trainer.strategy import Strategy

log = logging.getLogger("trainer")

_STATE_ERRORS = (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, AssertionError, RuntimeError)
"""The errors that an optimizer may raise when it loads the state of another one."""


def finish(run: Run) -> None:
    """Call the teardown hooks, log why a training was stopped, and wait for the other processes."""
    run.clock.watchdog.expect_slow_work()
    if run.stage == "fit":
        require_saved(run)
    run.tear_down()
    if run.stage == "fit" and run.strategy.processes.is_global_zero:
        report_end(run)
    run.clock.shut_down()


def report_end(run: Run) -> None:
    """Note in the run directory that a training has ended, or log why it was stopped and how to continue it."""
    code, stopped = exit_code(run.clock.stop_reason), f"stopped after step {run.progress.step}: {run.clock.stop_reason}"
    if code:
        print_text(run.callbacks, f"{stopped}. {_resume_advice(run)}\n")
        return
    if _has_saved(run):
        note_end(run)
    if run.clock.stop_reason:
        log.info(stopped)


def _has_saved(run: Run) -> bool:
    return any(callback.last_model_path for callback in run.checkpoint_callbacks)


def _resume_advice(run: Run) -> str:
    if _has_saved(run):
        last = run.session.argument("ckpt_path", "last")
        return f"To go on, start it again with {last}; it writes into {run.session.run_dir}."
    return "This run has written no checkpoint: started again as now, it begins where this one has begun."


def require_saved(run: Run) -> None:
    """Raise WriteError if the last weights could not be saved, so that the process does not exit with success.

    If the run is to be started again (exit code 75), the problem is only logged: it resumes from the newest checkpoint.
    """
    problems = [problem for callback in run.checkpoint_callbacks if (problem := callback.unsaved) is not None]
    if not problems:
        return
    message = (
        f"training has ended at step {run.progress.step}, and its last weights are NOT SAVED: "
        f"{'; '.join(map(str, problems))}"
    )
    if exit_code(run.clock.stop_reason) != EXIT_RETRY or not exit_code_is_free():
        raise WriteError(message)
    run.strategy.processes.log.error(
        "%s The exit code stays %d: the run that is started again repeats what is not saved.", message, EXIT_RETRY
    )


def end_with_error(run: Run, error: BaseException) -> None:
    """Report an error that ends the run, and call its hooks, without collectives: other processes may be anywhere.

    Raises:
        ConfigError: there is advice for torch's error; see `explain_torch_error` and `TrainableParameters.explain`.
        CheckpointError: the state of the optimizer or scheduler came from a checkpoint, and does not fit.
    """
    run.clock.coordinator.failed()
    run.clock.watchdog.stop()
    processes, explained = run.strategy.processes, _explain(run, error)
    if explained is not None:
        explained.__cause__ = error  # which is reported with it
    report_failure(run.clock.coordinator.store, processes.rank, processes.world_size, explained or error)
    with exit_in_time("on_exception or teardown") if processes.world_size > 1 else nullcontext():
        with log_secondary_errors("on_exception"):
            of_data = [run.datamodule.on_exception] if run.datamodule is not None else []
            call_all([run.hooks.on_exception, *of_data], error)
        with log_secondary_errors("teardown"):
            run.tear_down()
    if explained is not None:
        raise explained from error


def _explain(run: Run, error: BaseException) -> TrainerError | None:
    """Return the first explanation of an error of torch or of the user's code; None if there is none."""
    if not isinstance(error, Exception) or isinstance(error, TrainerError):
        return None
    modules = [frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(error.__traceback__)]
    return (
        run.guards.explain(modules[-1])
        or _explain_shards(run.strategy, error, modules)
        or explain_torch_error(error)
        or _explain_restored_state(run, error, modules)
    )


_SHARD_MODULES = ("torch.distributed.tensor", "torch.nn.utils.prune", "torch.nn.utils.parametriz")
"""Beginnings of the modules of torch whose errors are about sharded parameters."""
_SHARD_WORDS = ("DTensor", "invalid python storage", "FSDP does not support deepcopy", "_distributed_c10d.ProcessGroup")
"""Words in other such errors; the last two are of copies."""


def _explain_shards(strategy: Strategy, error: Exception, modules: list[str]) -> ConfigError | None:
    """Return a ConfigError for torch's error about a sharded parameter that user code has used as a full one."""
    of_torch = any(module.startswith(_SHARD_MODULES) for module in modules)
    if not strategy.shards_state or not (of_torch or any(words in str(error) for words in _SHARD_WORDS)):
        return None
    return ConfigError(
        f"a parameter was used here as a full tensor, and strategy {strategy.name!r} keeps shards of the "
        "parameters. In a hook, on all processes, use it within `with trainer.full_parameters(module):` (write=True to "
        f"change it); within a step call the layer, instead of using its parameter. {INSTEAD_OF_PENALTIES} Pruning and "
        "copy.deepcopy come before fit or in configure_model, and an optimizer that needs full parameters needs "
        f"strategy 'ddp'.\ntorch said: {(str(error) or type(error).__name__).splitlines()[0]}"
    )


def _explain_restored_state(run: Run, error: Exception, modules: list[str]) -> CheckpointError | None:
    """Return a CheckpointError for an error inside torch's optimizers and schedulers whose states were restored."""
    if run.resumed_from is None or run.stage != "fit" or not isinstance(error, _STATE_ERRORS):
        return None
    in_torch = any(module.startswith("torch.optim") for module in modules)
    if not in_torch or isinstance(error, torch.OutOfMemoryError):
        return None
    return CheckpointError(
        f"the optimizer or scheduler cannot go on from the state in {run.origin} "
        f"({type(error).__name__}: {error}): that is damaged, or does not fit the code. To start anew from its weights "
        "alone: load_from_checkpoint, and fit without ckpt_path."
    )


@contextmanager
def log_secondary_errors(what: str) -> Iterator[None]:
    """Log errors raised by the block, without masking the one that ends the run."""
    try:
        yield
    except Exception:
        log.warning("%s failed too, while the run was ending with an error:", what, exc_info=True)


def exit_if_stopped(clock: Clock, processes: SingleProcess) -> None:
    """Exit with the code of a signal or deadline that stopped the run, except in an interactive session."""
    if not will_exit(clock):
        return
    code = exit_code(clock.stop_reason)
    if code == EXIT_RETRY and processes.is_global_zero:
        requeue()
    sys.exit(restart_safe_exit_code(code, processes.store))


def will_exit(clock: Clock) -> bool:
    """Whether a signal or deadline has stopped the run, and it ends this process."""
    return clock.shutting_down and exit_code(clock.stop_reason) != 0 and not in_interactive_session()


def in_interactive_session() -> bool:
    """Return True if a stopped run must not exit Python.

    That is in a REPL or notebook (IPython's shells set sys.ps1, too, and a program that only executes notebooks imports
    ipykernel without being one), and in a worker of Ray, which treats SystemExit as a failure.
    """
    interactive = hasattr(sys, "ps1") or sys.flags.interactive == 1
    return interactive or detect_environment().source == "Ray Train"
