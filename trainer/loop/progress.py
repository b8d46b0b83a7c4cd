"""The counters of a run, and what goes by them: its activity, the epochs of its loaders, and its end."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

from trainer.data.loader import Loaders
from trainer.distributed.process_group import SingleProcess
from trainer.fault_tolerance.collective_check import listen
from trainer.fault_tolerance.deadline import Deadline
from trainer.fault_tolerance.signals import EXIT_RETRY
from trainer.fault_tolerance.stop import StopCoordinator, exit_code
from trainer.fault_tolerance.watchdog import Watchdog
from trainer.runs.resolved_config import ResolvedConfig
from trainer.state.held_generators import Generators
from trainer.strategy import Strategy

log = logging.getLogger("trainer")


@dataclass
class Progress:
    """Counters of a run. All are plain integers, saved in every checkpoint."""

    step: int = 0
    """Completed steps (`trainer.global_step`): one per window, for any number of optimizers."""
    epoch: int = 0
    """The epoch in progress, counted from 0."""
    batch: int = 0
    """Micro-batches of this epoch consumed (not merely fetched) by each process."""
    samples: int = 0
    """Samples consumed by all processes together since the start, if the loader knows their number."""
    epoch_ended: bool = False
    """True after the end of an epoch (validation, schedulers, metrics): a resumed run starts the next epoch."""
    validated_step: int = -1
    """The step of the last validation, so that a resumed run does not validate twice at the same step."""
    epoch_started: bool = False
    """True from `on_train_epoch_start` on: what that hook logs and draws does not count again in a resumed run."""
    window: int = 0
    """Micro-batches of the last step; 0: not known."""
    batches_before: int = 0
    """Micro-batches consumed in the epochs before this one."""
    batches_of_last_epoch = 0  # follows from the others, so checkpoints do not have it

    @property
    def epoch_of_step(self) -> int:
        """The epoch of the last step: between two epochs, and after the last, the one that has ended."""
        return self.epoch - int(self.batch == 0 and self.epoch > 0)

    def validated(self) -> None:
        self.validated_step = self.step

    def split_batches(self, parts: int) -> None:
        """Count the parts of batches from now on, instead of whole batches."""
        self.batch *= parts
        self.window *= parts
        self.batches_before *= parts

    def count_in_batches(self, batch: int, before: int, now: int) -> None:
        """Turn the counters from micro-batches of `before` samples into micro-batches of `now`.

        Args:
            batch: the micro-batches of this epoch.
        """
        self.batch, self.window, self.batches_before = batch, 0, self.batches_before * before // now

    def next_epoch(self) -> None:
        self.epoch += 1
        self.batches_before += self.batch
        self.batches_of_last_epoch = self.batch
        self.batch = 0
        self.epoch_started = self.epoch_ended = False

    def resume(self, state: dict[str, Any]) -> None:
        """Take the counters of a checkpoint to continue from; after the end of an epoch, begin the next one."""
        self.load_state_dict(state)
        if self.epoch_ended:
            self.next_epoch()

    def state_dict(self) -> dict[str, Any]:
        return asdict(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for field in fields(self):
            setattr(self, field.name, state[field.name])


ActivityName = Literal["sanity checking", "training", "validating"]
_FIRST_ACTIVITY: dict[str, ActivityName] = {"fit": "training", "validate": "validating"}


class Activity:
    """The part of a stage in progress. An error leaves it unchanged, for `on_exception`.

    Args:
        stage: "fit", "validate", "test" or "predict"; None: nothing has run.
    """

    batch: tuple[int, int] | None = None
    """The loader and the batch of the evaluation in progress."""

    def __init__(self, stage: str | None) -> None:
        self._stage = stage
        self.name: ActivityName | None = _FIRST_ACTIVITY.get(stage or "")
        """Training lasts from the first hook of a `fit` to its last, except for validations; None: something else."""

    @property
    def evaluating(self) -> bool:
        """Whether validation, also of the sanity check, or test is in progress."""
        return self.name in ("validating", "sanity checking") or self._stage == "test"

    @contextmanager
    def during(self, name: ActivityName) -> Iterator[None]:
        """Evaluate in the block, and then continue with what was in progress."""
        before, self.name = self.name, name
        yield
        self.name = before

    def end(self) -> None:
        """End the stage."""
        self.name = None


class DelayedSaves:
    """The checkpoints that hooks ask for before a step, a validation or an epoch is complete."""

    delays = False
    """True while a checkpoint would hold a part of a validation or of an epoch's end."""
    logged_before: Mapping[int, dict[str, Any]] = {}
    """The states of the loggers, by id, from before the validation that was left."""
    objects: Mapping[str, Any] = {}
    """The additions of hooks to the newest checkpoint that only its single file contains."""

    def __init__(self) -> None:
        self._saves: list[Callable[[], None]] = []

    @contextmanager
    def delayed(self) -> Iterator[None]:
        """Write the checkpoints that hooks in the block ask for at its end."""
        self.delays = True
        yield
        self.delays = False
        saves, self._saves = self._saves, []
        for save in saves:
            save()

    def keep_objects(self, objects: Mapping[str, Any]) -> None:
        """Keep what only the single file of the checkpoint that is being saved will contain."""
        self.objects = objects

    def add(self, save: Callable[[], None]) -> None:
        """Write a checkpoint at the end of the block, unless `drop` is called before."""
        self._saves.append(save)

    def end_delay(self) -> None:
        """Write checkpoints at once in the rest of the block."""
        self.delays = False

    def drop(self, logged: Mapping[int, dict[str, Any]]) -> None:
        """Write no checkpoint that the validation in progress has asked for: it was left, and comes again.

        Args:
            logged: the states of the loggers from before it, which checkpoints have from now on.
        """
        self._saves.clear()
        self.logged_before = logged


class LoaderEpochs:
    """The epochs for which loaders are made: with `reload_dataloaders_every_n_epochs` new ones every few epochs.

    Args:
        every: the number of epochs between two reloads; 0: the loaders of the first epoch stay.
        progress, generators: of the run.
    """

    def __init__(self, every: int, progress: Progress, generators: Generators) -> None:
        self._every, self._progress, self._generators = every, progress, generators

    def made_for(self, epoch: int) -> int:
        """Return the epoch for which the loaders of an epoch are made."""
        return epoch - epoch % self._every if self._every else 0

    def same_loaders(self, epoch: int) -> bool:
        """Whether an epoch has the same loaders as the epoch in progress."""
        return self.made_for(epoch) == self.made_for(self._progress.epoch)

    def validate(self, every_n_epochs: int | None) -> bool:
        """Whether one of the epochs with the present loaders ends with a validation, or may contain one."""
        first = self.made_for(self._progress.epoch)
        return every_n_epochs is None or (first + self._every) // every_n_epochs > first // every_n_epochs

    def call_when_due(self, reload: Callable[[], None]) -> None:
        """Set the function that makes new loaders."""
        self._reload = reload

    def reload_if_due(self) -> None:
        """Make new loaders if the present ones were made for another epoch. Collective."""
        if self.made_for(self._progress.epoch) != self._generators.epoch_of_loaders:
            self._generators.begin_loaders()
            self._reload()

    @contextmanager
    def asking(self) -> Iterator[None]:
        """Ask the user for loaders in the block: the epoch shown there is the one for which they are made."""
        epoch = self._progress.epoch
        self._progress.epoch = self._generators.epoch_of_loaders = self.made_for(epoch)
        try:
            yield
        finally:
            self._progress.epoch = epoch


class ValidationClock:
    """Says, by the clock of rank 0, after which steps validation is due.

    Args:
        seconds: between two validations.
        processes: of the run; with several the clock is read every `every_n_steps` steps, since that is a collective.
    """

    def __init__(self, seconds: float, processes: SingleProcess, every_n_steps: int) -> None:
        self.seconds, self.processes = seconds, processes
        self.every_n_steps = every_n_steps if processes.world_size > 1 else 1
        self._last = time.monotonic()
        self._decided = (0, False)

    def is_due(self, step: int) -> bool:
        """Return True if a validation is due after `step`; the same answer however often it is asked. Collective."""
        if self._decided[0] != step:
            is_up = False
            if step % self.every_n_steps == 0:
                is_up = self.processes.broadcast_object(time.monotonic() - self._last >= self.seconds)
            if is_up:
                self._last = time.monotonic()
            self._decided = (step, is_up)
        return self._decided[1]


class Clock:
    """The end of a run: by its own limits, a stop that a process asks for, the deadline, or the watchdog.

    Args:
        config, strategy, progress, loaders: of the run.
    """

    stop_reason: str | None = None
    """The reason why all processes stop; None: they continue."""
    postponed_stop: str | None = None
    """The reason of a stop that waits for `min_epochs` and `min_steps`."""
    ends = False
    """True from the last hooks of the last epoch or of training on: checkpoints hold the end of the training. False if
    the run is to be started again."""
    shutting_down = False
    """True while only the last collective of the run is left."""
    interrupted = False
    """True if an error or a signal has ended the run."""
    is_over = False
    """True if a run is started again that had ended: its checkpoints and logs stay unchanged."""
    validations: ValidationClock | None = None
    """Says when a validation is due, if `val_check_interval` is a time."""

    def __init__(self, config: ResolvedConfig, strategy: Strategy, progress: Progress, loaders: Loaders) -> None:
        self._settings, self._strategy, self._progress, self._loaders = config.settings, strategy, progress, loaders
        self.coordinator = StopCoordinator(None)
        self.watchdog = Watchdog()
        latest, margin = config.settings.latest_end, config.settings.deadline_margin
        self.deadline = Deadline(latest, margin) if latest else None
        last_step = None if config.settings.fast_dev_run else config.max_steps
        self.last_step = math.inf if last_step is None else last_step
        """The step after which training ends, if nothing ends it before."""
        self.last_epoch = math.inf if config.max_epochs is None else config.max_epochs
        """The number of epochs after which training ends, if nothing ends it before."""

    def listen(self, begun: Callable[[], int], signals: bool) -> None:
        """Listen for stops and failures of the processes, and check their collective calls; see `listen`."""
        self.coordinator = listen(self._strategy.processes, begun, signals)

    def postpone(self, reason: str | None) -> None:
        """Restore a checkpoint's request to stop, which waits for `min_epochs` and `min_steps`."""
        self.postponed_stop = reason

    def interrupt(self) -> None:
        """Remember that an error has ended the run."""
        self.interrupted = True

    def leave_unchanged(self) -> None:
        """Write no checkpoints and logs: the steps after the last checkpoint were logged before."""
        self.is_over = True

    def begin_training(self) -> None:
        """Measure the time between two validations from now on."""
        seconds, every = self._settings.validation_seconds, self._settings.log_every_n_steps or 50
        if seconds is not None:
            self.validations = ValidationClock(seconds, self._strategy.processes, every)

    def stop(self, reason: str) -> None:
        """Request a stop, which waits for `min_epochs` and `min_steps`."""
        if self.reached_minimum:
            self.coordinator.request(reason)
        elif self.postponed_stop is None:
            self.postponed_stop = reason
            least = f"min_steps={self._settings.min_steps}, min_epochs={self._settings.least_epochs}"
            log.info("stopping later (%s): %s", reason, least)

    @property
    def reached_minimum(self) -> bool:
        """Whether `min_epochs` and `min_steps` are done."""
        progress, loader, settings = self._progress, self._loaders.train, self._settings
        epochs_done = progress.epoch + int(loader is not None and progress.batch == loader.length)
        return progress.step >= (settings.min_steps or 0) and epochs_done >= settings.least_epochs

    def stops(self) -> bool:
        """Return True if all processes stop at this boundary of a step or epoch. Call this once per boundary."""
        if self.postponed_stop is not None and self.reached_minimum:
            self.coordinator.request(self.postponed_stop)
        if self.stop_reason is None:
            self.stop_reason = self.coordinator.check(self._progress.step)
        return self.stop_reason is not None

    def is_complete(self, epochs: int) -> bool:
        """Whether the training is complete, with the steps done so far and this number of epochs."""
        return self._progress.step >= self.last_step or epochs >= self.last_epoch

    def decide_end(self) -> None:
        """Decide at the end of an epoch, before its checkpoint is written, whether it is the last one."""
        ends = self.stops() or self.is_complete(self._progress.epoch + 1)
        self.ends = ends and not exit_code(self.stop_reason)

    def take_last_stop(self, complete: bool) -> None:
        """Wait until all processes have trained, and stop if one of them was asked to.

        Args:
            complete: nothing is left to train, so the run need not be started again.
        """
        processes = self._strategy.processes
        if self.stop_reason is None:
            processes.wait_for_all("the end of training")
            wanted = processes.all_gather_object(self.coordinator.wanted)
            self.stop_reason = next(filter(None, wanted), None)
        if complete and exit_code(self.stop_reason) == EXIT_RETRY:
            processes.log.info("%s came when nothing was left to train.", self.stop_reason)
            self.stop_reason = None
        self.ends = not exit_code(self.stop_reason)

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Suspend the watchdog while the block writes a checkpoint, and report the duration to the deadline."""
        self.watchdog.heartbeats += 1
        self.watchdog.expect_slow_work()
        begun = time.monotonic()
        try:
            yield
        finally:
            self.watchdog.heartbeats += 1
            self.watchdog.allow_slow = False
            if self.deadline is not None:
                self.deadline.saved(time.monotonic() - begun)

    def shut_down(self) -> None:
        """Wait for the other processes, by the last collective of the run."""
        self.shutting_down = True
        # When the first process exits, the launcher may end the others in the middle of their teardown.
        self._strategy.processes.barrier()
        self.coordinator.done()
