"""Trainer: the loop, in running order."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime, timedelta
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import torch
from torch.optim import Optimizer
from typing_extensions import Never

from trainer.callback import Callback, Logger
from trainer.checkpoint.writing import write_checkpoint
from trainer.data.datamodule import DataModule
from trainer.data.loader import Batch
from trainer.errors import ConfigError, raise_problems
from trainer.fault_tolerance.stop import exit_code
from trainer.loop.accumulation import StepOutputs, checked_loss, loss_divisors
from trainer.loop.describe import describe
from trainer.loop.evaluation import (
    evaluate,
    no_gradients,
    predict,
    sanity_check,
    test_moments,
    validate_during_fit,
    validation_moments,
)
from trainer.loop.manual import manual_step
from trainer.loop.resolved_config import settings_problems
from trainer.loop.run import RunState
from trainer.loop.setup import running
from trainer.loop.training_state import save_state
from trainer.metrics.metric_log import MetricScope
from trainer.module import TrainModule
from trainer.optimizers import monitored_value, zero_grad_fast
from trainer.precision import Precision
from trainer.profiling import BACKWARD, DATA, FORWARD, OPTIMIZER, each_wait
from trainer.seed import seed_everything
from trainer.settings import ARGUMENTS, Settings, wrong_names
from trainer.strategy import Strategy

log = logging.getLogger("trainer")


class Trainer(RunState):
    """Runs a `TrainModule`: `Trainer(max_epochs=3).fit(module, train_loader, val_loader)`.

    `trainer.settings.Settings` explains the arguments, and so does `trainer fit --help`. The loop has no branch on
    strategy, device or precision; `trainer.describe()` prints what was chosen and why.

    Raises:
        ConfigError: listing everything that is wrong with the arguments.
    """

    def __init__(
        self,
        *positional: Never,
        accelerator: str = "auto",
        devices: int | str | list[int] = "auto",
        num_nodes: int = 1,
        strategy: str | Strategy = "auto",
        precision: str | int | Precision = "32-true",
        max_epochs: int | None = None,
        max_steps: int | None = None,
        max_time: str | timedelta | dict[str, float] | float | None = None,
        deadline: str | datetime | None = None,
        deadline_margin: float | None = None,
        min_epochs: int | None = None,
        min_steps: int | None = None,
        limit_train_batches: int | float = 1.0,
        limit_val_batches: int | float = 1.0,
        limit_test_batches: int | float = 1.0,
        limit_predict_batches: int | float = 1.0,
        overfit_batches: int | float = 0,
        fast_dev_run: bool | int = False,
        val_check_interval: int | float = 1.0,
        check_val_every_n_epoch: int = 1,
        num_sanity_val_steps: int = 2,
        accumulate_grad_batches: int = 1,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: Literal["norm", "value"] = "norm",
        log_every_n_steps: int = 50,
        callbacks: Callback | list[Callback] | None = None,
        logger: bool | Logger | list[Logger] = True,
        enable_progress_bar: bool = True,
        enable_checkpointing: bool = True,
        enable_model_summary: bool = True,
        default_root_dir: str | Path = "runs",
        max_restarts: int = 0,
        watchdog_seconds: float | None = 1800.0,
        seed: int | None = None,
        seed_per_sample: bool = False,
        deterministic: bool | Literal["warn"] = False,
        benchmark: bool | None = None,
        detect_anomaly: bool = False,
        inference_mode: bool = True,
        profiler: str | Callback | None = None,
        compile: bool | str | dict[str, Any] = False,
        activation_checkpointing: str | int | list[Any] | Callable[..., bool] | None = None,
        **unknown: Never,
    ) -> None:
        arguments = locals()
        settings = Settings(**{name: arguments[name] for name in ARGUMENTS})
        problems = [*wrong_names(positional, unknown), *settings_problems(settings)]
        raise_problems(problems, "the Trainer's arguments")
        super().__init__(settings)
        if settings.seed is not None:
            seed_everything(settings.seed)

    # -- what users call -----------------------------------------------------------------------------------------------

    def fit(
        self,
        module: TrainModule,
        train_dataloaders: Any = None,
        val_dataloaders: Any = None,
        datamodule: DataModule | None = None,
        ckpt_path: str | Path | None = None,
    ) -> None:
        """Train.

        Args:
            module: what to train.
            train_dataloaders: a DataLoader or any iterable of batches; default: the data module's or the module's.
            val_dataloaders: one, a list, or a dict of them by name.
            datamodule: gives the loaders instead.
            ckpt_path: go on from a checkpoint: a folder, "best", or "last", which starts afresh if there is none yet,
                so that a job is restarted by the same command.

        Raises:
            ConfigError: before the first step, wherever it can be known.
            SystemExit: 130 after SIGINT, 143 after SIGTERM, 75 after SIGUSR1 or before a deadline: when the step is
                finished and saved (not in a REPL or notebook).
        """
        data = {"train": train_dataloaders, "val": val_dataloaders}
        with running(self, "fit", module, data, datamodule, ckpt_path):
            self._start_training()
            while not self._finished():
                self._train_epoch()
            self._end_training()

    def validate(
        self,
        module: TrainModule,
        dataloaders: Any = None,
        datamodule: DataModule | None = None,
        ckpt_path: str | Path | None = None,
    ) -> dict[str, float]:
        """Run `validation_step` over the validation loaders; returns what was logged, reduced over all processes.

        Every sample counts exactly once, on any number of processes. `ckpt_path` as in `fit`; None: the weights as they
        are.
        """
        with running(self, "validate", module, {"val": dataloaders}, datamodule, ckpt_path):
            self.validating = True
            return evaluate(self, validation_moments(self), self.val_loaders, no_gradients(self))

    def test(
        self,
        module: TrainModule,
        dataloaders: Any = None,
        datamodule: DataModule | None = None,
        ckpt_path: str | Path | None = None,
    ) -> dict[str, float]:
        """As `validate`, with `test_step` and the test loaders."""
        with running(self, "test", module, {"test": dataloaders}, datamodule, ckpt_path):
            return evaluate(self, test_moments(self), self.test_loaders, no_gradients(self))

    def predict(
        self,
        module: TrainModule,
        dataloaders: Any = None,
        datamodule: DataModule | None = None,
        ckpt_path: str | Path | None = None,
        return_predictions: bool = False,
    ) -> list[Any] | None:
        """Run `predict_step` over the prediction loaders.

        Results go to callbacks such as PredictionWriter, batch by batch, and are kept in memory only with
        `return_predictions`: then this process's outputs come back in order.
        """
        with running(self, "predict", module, {"predict": dataloaders}, datamodule, ckpt_path):
            outputs = predict(self, self.predict_loaders)
            if return_predictions:
                return list(outputs)
            for _ in outputs:
                pass
            return None

    def stop(self, reason: str) -> None:
        """Ask for the end of `fit`: all processes stop after the same step. Any process may call it, at any time.

        Ignored before `min_steps` and `min_epochs`.
        """
        least_steps, least_epochs = self.settings.min_steps or 0, self.settings.min_epochs or 0
        epochs_done = self.progress.epoch + int(self.progress.batch == self.num_training_batches)
        if self.progress.step < least_steps or epochs_done < least_epochs:
            log.info("not stopping yet (%s): min_steps=%s, min_epochs=%s", reason, least_steps, least_epochs)
            return
        self.stop_coordinator.request(reason)

    def save_checkpoint(self, path: str | Path, info: dict[str, Any] | None = None) -> None:
        """Write a checkpoint folder at `path`, or at a URL such as s3://bucket/name.

        Collective: every process must call it, at the end of a step.

        Raises:
            CheckpointError: it could not be written; nothing is left at `path` then.
        """
        if "module" not in vars(self):
            raise ConfigError("save_checkpoint: nothing has run yet, so there is nothing to save: call fit first.")
        self.meet("save_checkpoint")
        if self.stage == "fit":
            # What was logged until now belongs to this step, not to the one after a resume.
            self.read_metrics()
        self.save_with(
            lambda state, about: write_checkpoint(path, state, info=about, process_group=self.checkpoint_group),
            info or {},
        )
        if self.is_global_zero:
            self.hooks.on_checkpoint_saved(self, self.module, str(path))

    def save_with(self, write: Callable[[dict[str, Any], dict[str, Any]], None], info: Mapping[str, Any]) -> None:
        """Give the whole state of the run, and `info` with step and epoch, to `write` on rank 0. Collective.

        Where the state is divided (`strategy.shards_state`), each process's `write` gets its part, to write it together
        with `self.checkpoint_group`. An error that `write` raises is raised on every process.
        """
        save_state(self, write, info)

    def describe(self) -> str:
        """The run in words: what was chosen and why, and the loop with the callbacks in place. Also printed."""
        text = describe(self)
        self.print(text)
        return text

    # -- the loop ------------------------------------------------------------------------------------------------------

    def _start_training(self) -> None:
        self.has_fit = True
        for logger in self.loggers if self.is_global_zero else ():
            logger.log_hyperparameters(self.hyperparameters())
        self.hooks.on_fit_start(self, self.module)
        if self.progress.step == 0:
            sanity_check(self)
        self.weights_loss_by_items = self.module.overrides("num_items")
        self.module.train()
        self.training = True
        self.hooks.on_train_start(self, self.module)

    def _train_epoch(self) -> None:
        self._start_epoch()
        if self.validation_due() and self.progress.validated_step != self.progress.step:
            validate_during_fit(self)
        for window in self._windows():
            with self.metrics.recording(self.metrics.train):
                if self.closure_needed:
                    outputs, data, _ = self._step_with_closure(window)
                else:
                    outputs, data, _ = self._train_step(window)
                    self._update()
                self._count(window)
                self.hooks.on_train_batch_end(self, self.module, outputs, data, self.progress.batch - 1)
            self._end_step()
            if self.val_loaders and self.validation_due():
                validate_during_fit(self)
            if self._stopped_inside_epoch():
                return
        self._end_epoch()

    def _start_epoch(self) -> None:
        """The first hook of an epoch; also where a resumed run goes on with its random numbers."""
        resumed = self.progress.batch > 0
        if not resumed:
            self.restore_rng()
        # In the middle of an epoch the hook is called a second time: what it logs and draws has been done before.
        scope = MetricScope(batches=False, steps=False) if resumed else self.metrics.hook_metrics
        with self.metrics.recording(scope):
            self.hooks.on_train_epoch_start(self, self.module)
        self.restore_rng()

    def _windows(self) -> Iterator[list[Batch]]:
        """The epoch's batches, a step's worth at a time; shorter at the end. All processes get the same number."""
        assert self.train_loader is not None
        batches = each_wait(self.phase, DATA, self.train_loader.iterate(self.progress.epoch, self.progress.batch))
        uneven = self.world_size > 1 and self.train_loader.samples_per_epoch is None
        while True:
            window = list(islice(batches, self.accumulate_grad_batches))
            if uneven:
                window = window[: min(self.strategy.processes.all_gather_object(len(window)))]
            if not window:
                return
            yield window

    def _train_step(self, window: list[Batch]) -> StepOutputs:
        """Forward and backward of each micro-batch; the gradients are complete after it."""
        module, hooks, strategy, metrics, phase = self.module, self.hooks, self.strategy, self.metrics, self.phase
        metrics.start_window()
        if not module.automatic_optimization:
            return manual_step(self, window)
        for optimizer in self.optimizers:
            hooks.on_before_zero_grad(self, module, optimizer)
            zero_grad_fast(optimizer)
        losses: list[torch.Tensor] = []
        last = len(window) - 1
        for position, divisor in enumerate(loss_divisors(window, module, strategy, self.weights_loss_by_items)):
            data, batch_idx = self.transfer(window[position].data, 0), self.progress.batch + position
            metrics.start_batch(data, window[position].samples)
            hooks.on_train_batch_start(self, module, data, batch_idx)
            with strategy.gradient_sync(last=position == last):
                with phase(FORWARD):
                    outputs = strategy.call("training_step", data, batch_idx)
                self.watchdog.heartbeats += 1  # here: in the backward, processes wait for those that are not there yet
                loss = checked_loss(outputs, module, self.settings.detect_anomaly)
                if divisor is not None:
                    loss = loss / divisor
                hooks.on_before_backward(self, module, loss)
                with phase(BACKWARD):
                    strategy.backward(loss)
                hooks.on_after_backward(self, module)
            losses.append(loss)
            if position < last:
                hooks.on_train_batch_end(self, module, outputs, data, batch_idx)
        return outputs, data, losses

    def _update(self) -> None:
        """Clip and step every optimizer."""
        if not self.module.automatic_optimization:
            return
        for optimizer in self.optimizers:
            self._before_optimizer_step(optimizer)
            with self.phase(OPTIMIZER):
                self.strategy.step(optimizer)
        self.strategy.end_step()

    def _before_optimizer_step(self, optimizer: Optimizer) -> None:
        self.strategy.unscale(optimizer)
        self.hooks.on_before_optimizer_step(self, self.module, optimizer)
        if self.clips:
            settings = self.settings
            self.module.configure_gradient_clipping(
                optimizer, settings.gradient_clip_val, settings.gradient_clip_algorithm
            )

    def _step_with_closure(self, window: list[Batch]) -> StepOutputs:
        """For optimizers that evaluate the loss several times a step (LBFGS)."""
        evaluations: list[StepOutputs] = []

        def closure() -> torch.Tensor:
            evaluations.append(self._train_step(window))
            self._before_optimizer_step(self.optimizers[0])
            return torch.stack([loss.detach() for loss in evaluations[-1][2]]).sum()

        with self.phase(OPTIMIZER):
            self.strategy.step(self.optimizers[0], closure)
        return evaluations[-1]

    def _count(self, window: list[Batch]) -> None:
        """Count the step as done, and step the schedulers that go by steps."""
        progress = self.progress
        self.watchdog.heartbeats += 1
        self.watchdog.allow_slow = False
        progress.step += 1
        progress.batch += len(window)
        for batch in window:
            progress.samples += batch.total or 0
        if self.scheduler_configs and self.module.automatic_optimization:
            self._step_schedulers("step", progress.step)

    def _end_step(self) -> None:
        """Flush the log if it is time, and call the hook after which the step is wholly done."""
        if self.progress.step % self.settings.log_every_n_steps == 0:
            # Before a checkpoint of this step is written: a resumed run does not log the step again.
            self.log_to_loggers(self.metrics.read_step())
        self.hooks.on_train_step_end(self, self.module)

    def _end_epoch(self) -> None:
        progress = self.progress
        if progress.batch == 0 and self.max_epochs is None:
            raise ConfigError("an epoch without a single training batch never reaches max_steps: give it data.")
        if not self.module.automatic_optimization and self.manual_steps == 0:
            log.warning("training_step stepped no optimizer in a whole epoch: call self.optimizers().step() in it")
        if self._epoch_validates() and progress.validated_step != progress.step:
            validate_during_fit(self)
        if self.module.automatic_optimization:
            self._step_schedulers("epoch", progress.epoch + 1)
        # A value logged by step only is known to callbacks, too: that of the last step.
        self.update_metrics(self.metrics.read_step())
        self.log_to_loggers(self.metrics.read_epoch(self.metrics.train))
        progress.epoch_ended = True
        self.hooks.on_train_epoch_end(self, self.module)
        self.log_to_loggers(self.metrics.read_epoch(self.metrics.hook_metrics))
        progress.next_epoch()

    def _end_training(self) -> None:
        self.stop_reason = self.stop_reason or self.stop_coordinator.finish(self.progress.step)
        # Not among the values of an unfinished epoch, which a resumed run goes on with.
        closing = MetricScope(batches=False, steps=False)
        with self.metrics.recording(closing):
            self.hooks.on_train_end(self, self.module)
            self.log_to_loggers(self.metrics.read_epoch(closing))
            self.training = False
            self.hooks.on_fit_end(self, self.module)

    # -- when ----------------------------------------------------------------------------------------------------------

    def _finished(self) -> bool:
        """Whether the run is at its end, between two epochs."""
        self.stop_reason = self.stop_reason or self.stop_coordinator.check(self.progress.step)
        out_of_epochs = self.max_epochs is not None and self.progress.epoch >= self.max_epochs
        return self.stop_reason is not None or out_of_epochs or self._out_of_steps()

    def _stopped_inside_epoch(self) -> bool:
        """Whether to leave the epoch unfinished. After its last batch only a signal does that."""
        self.stop_reason = self.stop_reason or self.stop_coordinator.check(self.progress.step)
        if self.stop_reason is None and not self._out_of_steps():
            return False
        return exit_code(self.stop_reason) != 0 if self.progress.batch == self.num_training_batches else True

    def _out_of_steps(self) -> bool:
        last = self.settings.max_steps
        return last is not None and -1 < last <= self.progress.step

    def validation_due(self) -> bool:
        """Whether val_check_interval asks for validation after the window just done."""
        batch, interval, length = self.progress.batch, self.val_check_interval, self.num_training_batches
        if not self.val_loaders or batch == 0 or (interval == 1.0 and isinstance(interval, float)):
            return False
        if not self._epoch_may_validate():
            return False
        every = interval if isinstance(interval, int) else max(1, int((length or 1) * interval))
        window = batch % self.accumulate_grad_batches or self.accumulate_grad_batches
        return batch % every < window

    def _epoch_validates(self) -> bool:
        """Whether validation is due at the end of this epoch."""
        interval = self.val_check_interval
        return bool(self.val_loaders) and isinstance(interval, float) and interval == 1.0 and self._epoch_may_validate()

    def _epoch_may_validate(self) -> bool:
        every = 1 if self.settings.fast_dev_run else self.settings.check_val_every_n_epoch
        return (self.progress.epoch + 1) % every == 0

    def _step_schedulers(self, interval: str, count: int) -> None:
        for config in self.scheduler_configs:
            if not config.is_due(interval, count):
                continue
            value = None
            if config.reduce_on_plateau:
                value = monitored_value(self.read_metrics(), config)
                if value is None:
                    continue
            self.module.lr_scheduler_step(config.scheduler, value)
