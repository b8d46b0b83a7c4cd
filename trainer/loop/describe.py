"""A run in words."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainer.callback import HOOKS, Callback, Logger

if TYPE_CHECKING:
    from trainer.loop.run import RunState


def describe(run: RunState) -> str:
    """What was chosen and why, the effective batch, and the loop with the callbacks in place."""
    plan, settings = run.plan, run.settings
    lines = [
        f"device      {plan.device_type} ({plan.reasons['device']})",
        f"processes   {plan.num_processes} ({plan.reasons['devices']})",
        f"strategy    {plan.strategy} ({plan.reasons['strategy']})",
        f"precision   {plan.precision.name} ({plan.reasons['precision']})",
        *([f"compile     {plan.compilation.describe()}"] if plan.compilation is not None else []),
        f"step        {run.accumulate_grad_batches} micro-batch(es) on {plan.num_processes} process(es)"
        + _global_batch(run),
        f"length      {_length(run)}",
        f"clipping    {_clipping(run)}",
        f"log         every {settings.log_every_n_steps} steps to {_names(run.loggers) or 'no logger'}",
        f"run dir     {run.run_dir}",
        "",
        "fit",
        *_moments(run, "  ", ("setup", "on_fit_start", "on_train_start")),
        "  for each epoch:",
        *_moments(run, "    ", ("on_train_epoch_start",)),
        f"    for each window of {run.accumulate_grad_batches} micro-batch(es):",
        *_moments(run, "      ", ("on_train_batch_start",)),
        "      training_step, backward",
        *_moments(run, "      ", ("on_after_backward", "on_before_optimizer_step")),
        "      optimizer step",
        *_moments(run, "      ", ("on_train_batch_end", "on_train_step_end")),
        f"    validation: {_validation(run)}",
        *_moments(run, "      ", ("on_validation_start", "on_validation_batch_end", "on_validation_epoch_end")),
        *_moments(run, "      ", ("on_validation_end",)),
        *_moments(run, "    ", ("on_train_epoch_end",)),
        *_moments(run, "  ", ("on_train_end", "on_fit_end", "teardown")),
    ]
    return "\n".join(lines)


def start_line(run: RunState) -> str:
    """What was chosen, in one line."""
    plan = run.plan
    processes = f"{plan.num_processes} process{'' if plan.num_processes == 1 else 'es'}"
    device = f"{plan.device_type} ({plan.reasons['device']})"
    return f"{run.stage}: {device}, {processes}, strategy {plan.strategy}, precision {plan.precision.name}"


def _moments(run: RunState, indent: str, hooks: tuple[str, ...]) -> list[str]:
    """A line for each moment that somebody uses."""
    assert set(hooks) <= set(HOOKS)
    ordered = sorted(run.callbacks, key=lambda callback: callback.runs_last)
    used = {hook: [c for c in ordered if getattr(type(c), hook) is not getattr(Callback, hook)] for hook in hooks}
    return [f"{indent}{hook}: {_names(callbacks)}" for hook, callbacks in used.items() if callbacks]


def _names(callbacks: list[Callback] | list[Logger]) -> str:
    return ", ".join(type(callback).__name__ for callback in callbacks)


def _global_batch(run: RunState) -> str:
    size = run.train_loader.batch_size if run.train_loader is not None else None
    if size is None:
        return ""
    total = size * run.accumulate_grad_batches * run.plan.num_processes
    return f" x {size} samples = global batch {total}"


def _length(run: RunState) -> str:
    limits = [
        f"{run.max_epochs} epochs" if run.max_epochs is not None else "",
        f"{run.max_steps} steps" if run.max_steps is not None else "",
        f"{run.settings.max_time}" if run.settings.max_time is not None else "",
    ]
    return ", or ".join(limit for limit in limits if limit) or "no limit"


def _clipping(run: RunState) -> str:
    settings = run.settings
    return (
        "none"
        if settings.gradient_clip_val is None
        else (f"by {settings.gradient_clip_algorithm} at {settings.gradient_clip_val}")
    )


def _validation(run: RunState) -> str:
    settings = run.settings
    interval = settings.val_check_interval
    epochs = "epoch" if settings.check_val_every_n_epoch == 1 else f"{settings.check_val_every_n_epoch} epochs"
    if isinstance(interval, int):
        return f"every {interval} batches"
    return f"after every {epochs}" if interval == 1.0 else f"{1 / interval:.3g} times per epoch, every {epochs}"
