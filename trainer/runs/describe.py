"""Describe a run: the choices and their reasons."""

from __future__ import annotations

from pathlib import Path

from trainer.callback import HOOKS, Callback
from trainer.logger import Logger
from trainer.runs.resolved_config import ResolvedConfig
from trainer.settings import Settings


class PrintedText(str):
    """A text that has been printed: as the last line of a notebook's cell it is not shown again."""

    __slots__ = ()

    def _ipython_display_(self) -> None: ...


def describe(
    config: ResolvedConfig, callbacks: list[Callback], window: int, micro_batch: int | None, run_dir: Path
) -> str:
    """Return the choices and their reasons, the global batch, and the loop with its callbacks.

    Args:
        config: the choices.
        callbacks: of the trainer, and of the module if it is known.
        window: micro-batches per step.
        micro_batch: samples of a micro-batch on one process; None: not known.
        run_dir: the run directory.
    """
    settings = config.settings
    interval = f"every {settings.log_every_n_steps} steps" if settings.log_every_n_steps else "at the end of epochs"
    batches = _number_of(window, "micro-batch")
    lines = [
        f"device      {config.device_type} ({config.reasons['device']})",
        f"processes   {config.num_processes} ({config.reasons['devices']})",
        f"strategy    {config.strategy} ({config.reasons['strategy']})",
        f"precision   {config.precision.name} ({config.reasons['precision']})",
        *([f"compile     {config.compilation.describe()}"] if config.compilation is not None else []),
        f"step        {batches} on {_number_of(config.num_processes, 'process')}"
        + _global_batch(config, window, micro_batch),
        f"length      {_length(config)}",
        f"clipping    {_clipping(settings)}",
        f"log         {interval} to {_names(config.loggers) or 'no logger'}",
        f"run dir     {run_dir}",
        "",
        "fit",
        *_hooks(callbacks, "  ", ("setup", "on_fit_start", "on_train_start")),
        "  for each epoch:",
        *_hooks(callbacks, "    ", ("on_train_epoch_start",)),
        f"    for each window of {batches}:",
        *_hooks(callbacks, "      ", ("on_train_batch_start",)),
        "      training_step, backward",
        *_hooks(callbacks, "      ", ("on_after_backward", "on_before_optimizer_step")),
        "      optimizer step",
        *_hooks(callbacks, "      ", ("on_train_batch_end", "on_train_step_end")),
        f"    validation: {_validation(settings)}",
        *_hooks(callbacks, "      ", ("on_validation_start", "on_validation_batch_end", "on_validation_epoch_end")),
        *_hooks(callbacks, "      ", ("on_validation_end",)),
        *_hooks(callbacks, "    ", ("on_train_epoch_end",)),
        *_hooks(callbacks, "  ", ("on_train_end", "on_fit_end", "teardown")),
    ]
    return "\n".join(lines)


def start_line(config: ResolvedConfig, stage: str) -> str:
    """Return device, processes, strategy and precision of a run, in one line."""
    device = f"{config.device_type} ({config.reasons['device']})"
    processes = _number_of(config.num_processes, "process")
    return f"{stage}: {device}, {processes}, strategy {config.strategy}, precision {config.precision.name}"


def _number_of(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}es"


def _hooks(callbacks: list[Callback], indent: str, hooks: tuple[str, ...]) -> list[str]:
    """Return a line for each hook that a callback overrides."""
    assert set(hooks) <= set(HOOKS)
    ordered = sorted(callbacks, key=lambda callback: callback.runs_last)
    used = {hook: [c for c in ordered if getattr(type(c), hook) is not getattr(Callback, hook)] for hook in hooks}
    return [f"{indent}{hook}: {_names(callbacks)}" for hook, callbacks in used.items() if callbacks]


def _names(callbacks: list[Callback] | list[Logger]) -> str:
    return ", ".join(type(callback).__name__ for callback in callbacks)


def _global_batch(config: ResolvedConfig, window: int, micro_batch: int | None) -> str:
    if micro_batch is None:
        return ""
    total = micro_batch * window * config.num_processes
    return f" x {micro_batch} samples = global batch {total}"


def _length(config: ResolvedConfig) -> str:
    limits = {" epochs": config.max_epochs, " steps": config.max_steps, "": config.settings.max_time}
    return ", or ".join(f"{limit}{unit}" for unit, limit in limits.items() if limit is not None) or "no limit"


def _clipping(settings: Settings) -> str:
    if settings.gradient_clip_val is None:
        return "none"
    return f"by {settings.gradient_clip_algorithm} at {settings.gradient_clip_val}"


def _validation(settings: Settings) -> str:
    interval = settings.val_check_interval
    epochs = "epoch" if settings.check_val_every_n_epoch == 1 else f"{settings.check_val_every_n_epoch} epochs"
    if settings.validation_seconds is not None:
        return f"every {settings.validation_seconds:g} seconds"
    if not isinstance(interval, float):
        return f"every {interval} batches"
    return f"after every {epochs}" if interval == 1.0 else f"{1 / interval:.3g} times per epoch, every {epochs}"
