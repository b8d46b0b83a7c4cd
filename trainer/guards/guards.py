"""Guards: the watchers of a run's steps."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from torch.optim import Optimizer

from trainer.callback import StepGuard
from trainer.data.loader import Loaders
from trainer.errors import ConfigError
from trainer.guards.bad_steps import BadSteps
from trainer.guards.gradient_norms import GradientNorms
from trainer.guards.nonfinite import NonFiniteMonitor
from trainer.guards.optimizer_options import OptionsCheck
from trainer.guards.skipped_batches import SkippedBatches
from trainer.guards.trainable_parameters import NewParameters, TrainableParameters
from trainer.metrics.metric_log import MetricLog
from trainer.module import TrainModule
from trainer.optimizers import parameters_of, require_trainable
from trainer.strategy import ChangingBuffers, Strategy

if TYPE_CHECKING:
    from trainer.loop.callback_list import CallbackList
    from trainer.loop.progress import Progress


class Guards:
    """All watchers of a run's steps. They do not know the run.

    Args:
        module, strategy, progress, metrics: of the run.
        options: compares the optimizers' options with each gathering of `metrics`.
    """

    trainable: TrainableParameters | None = None
    """Notices a change of the trainable parameters; None on one process, and outside of `fit`."""
    new_parameters: NewParameters | None = None
    """Warns of untrained parameters; None on several processes, under sharding, and outside of `fit`."""
    bad_steps: BadSteps | None = None
    """Judges each step, with a `StepGuard` among the callbacks; None: every step changes the weights."""
    buffers: ChangingBuffers | None = None
    """The buffers that steps change; None on one process, and outside of `fit`."""
    _followed: Collection[str] = ()
    """The buffers that steps have changed in the run that wrote the checkpoint."""

    def __init__(
        self,
        module: TrainModule,
        strategy: Strategy,
        progress: Progress,
        metrics: MetricLog,
        options: OptionsCheck,
    ) -> None:
        self._module, self._strategy, self._progress, self._metrics = module, strategy, progress, metrics
        self.options = options
        self.nonfinite = NonFiniteMonitor(module, strategy, metrics, progress)
        self.gradient_norms = GradientNorms(strategy, metrics)
        self.skipping = SkippedBatches(module, strategy, progress)
        self._optimizers: list[Optimizer] = []
        self._unjudged: list[Optimizer] = []
        """The optimizers that the first epoch's first hook has to give something to train."""

    def watch_optimizers(self, optimizers: list[Optimizer], frozen: list[Optimizer]) -> None:
        """Watch the parameters of these optimizers, and on several processes their options.

        Args:
            optimizers, frozen: those of the training, and those of them that do not train anything yet.
        """
        self._optimizers, self._unjudged = optimizers, frozen
        if self._strategy.processes.world_size > 1:
            self.options.begin(optimizers)
            self.trainable = TrainableParameters(self._module, self._strategy, optimizers)
        elif not self._strategy.collective_forward:  # those that gather refuse new parameters themselves
            self.new_parameters = NewParameters(self._module, optimizers)

    def resume(self, followed: Collection[str]) -> None:
        """Keep the names of the buffers that steps have changed in the run that wrote the checkpoint."""
        self._followed = followed

    @property
    def followed_buffers(self) -> Collection[str]:
        """The names of the buffers that steps have changed, for checkpoints."""
        return self._followed if self.buffers is None else self.buffers.names

    def begin_training(self, hooks: CallbackList, loaders: Loaders, closure_needed: bool) -> None:
        """Watch the steps, with the methods that the module has after the first hooks.

        Args:
            hooks, loaders: of the training.
            closure_needed: the optimizer evaluates the loss several times per step.
        """
        if self._strategy.processes.world_size > 1:
            self.buffers = ChangingBuffers(self._strategy, self._followed)
        trains = bool(parameters_of(self._optimizers))
        self.skipping.begin_training(hooks, loaders, closure_needed, trains)

    def begin_epoch(self) -> None:
        """Require, in the first epoch, that the optimizers train something: its first hook may have unfrozen it."""
        unjudged, self._unjudged = self._unjudged, []
        require_trainable(unjudged, type(self._module).__name__)

    def judge_steps(self, guard: StepGuard, loaders: Loaders, measures: bool) -> None:
        """Judge each step by a guard's losses.

        Args:
            measures: clipping does not find the norm of the gradients.
        """
        self.bad_steps = BadSteps(
            self._strategy, self._progress, self._metrics, self.gradient_norms, loaders, guard, measures
        )

    def check_numbers(self, training: bool) -> None:
        """Report numbers that are not finite, and parameters that nothing trains. Call this after values were read."""
        if training and self.new_parameters is not None:
            self.new_parameters.report()
        self.nonfinite.check_values(self._optimizers if training else [], updated=not self.skipping.whole_step)

    @property
    def refused(self) -> int:
        """The number of steps that were bad."""
        return 0 if self.bad_steps is None else self.bad_steps.refused

    @property
    def windows_without_step(self) -> int:
        """The windows that have begun and are not steps yet; refused ones, which never will be, do not count."""
        return self._metrics.window - self._metrics.repeats - self._progress.step - self.refused

    @property
    def windows(self) -> int:
        """The number of windows whose forward this process has begun, if it is one of several."""
        return 0 if self.trainable is None else self.trainable.windows

    def explain(self, raised_in: str) -> ConfigError | None:
        """Return a ConfigError for an error that a change of the trainable parameters has caused; None for others.

        Args:
            raised_in: the module that has raised the error.
        """
        return None if self.trainable is None else self.trainable.explain(raised_in)
