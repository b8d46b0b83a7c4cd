"""End a run, after its last batch or after an error."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

from trainer.callback import print_text
from trainer.distributed.environment import detect_environment
from trainer.distributed.slurm import requeue
from trainer.errors import explain_torch_error
from trainer.fault_tolerance.failure import exit_in_time, limit_exit, report_failure
from trainer.fault_tolerance.stop import EXIT_RETRY, exit_code
from trainer.launchers.restarts import restart_safe_exit_code
from trainer.loop.run import Run

log = logging.getLogger("trainer")


def finish(run: Run) -> None:
    """Call the teardown hooks, print why a training was stopped, and wait for the other processes."""
    run.watchdog.allow_slow = True
    call_teardown_hooks(run)
    if run.stage == "fit" and exit_code(run.stop_reason) and run.strategy.processes.is_global_zero:
        words = (
            f"stopped after step {run.progress.step}: {run.stop_reason}. "
            f"To go on, start it again with ckpt_path='last'; it writes into {run.session.run_dir}.\n"
        )
        print_text(run.callbacks, words)
    run.shutting_down = True
    # When the first process exits, the launcher may end the others in the middle of their teardown.
    run.strategy.processes.barrier()
    run.stop_coordinator.done()


def end_with_error(run: Run, error: BaseException) -> None:
    """Report an error that ends the run, and call its hooks, without collectives: other processes may be anywhere.

    Raises:
        ConfigError: there is advice for torch's error; see `explain_torch_error`.
    """
    run.stop_coordinator.failed()
    run.watchdog.stop()
    explained = explain_torch_error(error)
    if isinstance(error, Exception):
        report_failure(
            run.stop_coordinator.store,
            run.strategy.processes.rank,
            run.strategy.processes.world_size,
            explained or error,
        )
    several = run.strategy.processes.world_size > 1
    if several:
        limit_exit()
    with exit_in_time("on_exception or teardown") if several else nullcontext():
        with log_secondary_errors("on_exception"):
            run.hooks.on_exception(error)
            if run.datamodule is not None:
                run.datamodule.on_exception(error)
        with log_secondary_errors("teardown"):
            call_teardown_hooks(run)
    if explained is not None:
        raise explained from error


def call_teardown_hooks(run: Run) -> None:
    """Call `teardown` of the data module, the callbacks and the module, once."""
    if run.torn_down:
        return
    run.torn_down = True
    if run.datamodule is not None:
        run.datamodule.teardown(run.stage)
    run.hooks.teardown(run.stage)


@contextmanager
def log_secondary_errors(what: str) -> Iterator[None]:
    """Log errors raised by the block, without masking the one that ends the run."""
    try:
        yield
    except Exception:
        log.warning("%s failed too, while the run was ending with an error:", what, exc_info=True)


def detach(run: Run) -> None:
    """End the run for the module and the data module, which stay attached to the trainer; nothing can be logged."""
    run.session.stage, run.collective_check = None, None
    run.training = run.validating = run.sanity_checking = False
    run.metrics.end("the run has ended: log inside of fit, validate or test.")
    run.module.untoggle_optimizer()


def exit_if_stopped(run: Run) -> None:
    """Exit with the code of a signal or deadline that stopped the run, except in an interactive session."""
    code = exit_code(run.stop_reason)
    if run.stop_reason is None or not code or in_interactive_session():
        return
    if code == EXIT_RETRY and run.strategy.processes.is_global_zero:
        requeue()
    sys.exit(restart_safe_exit_code(code, run.strategy.processes.store))


def in_interactive_session() -> bool:
    """Return True if a stopped run must not exit Python.

    That is in a REPL or notebook, and in a worker of Ray, which treats SystemExit as a failure.
    """
    interactive = hasattr(sys, "ps1") or sys.flags.interactive == 1 or "ipykernel" in sys.modules
    return interactive or detect_environment().source == "Ray Train"
