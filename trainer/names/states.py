"""Lightning's words for the state of a Trainer."""

from __future__ import annotations

import os
from dataclasses import dataclass
from enum import Enum, StrEnum


class TextEnum(StrEnum):
    """An enumeration of texts, equal to these texts in any case."""

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Enum):
            other = other.value
        return isinstance(other, str) and self.value.lower() == other.lower()

    def __hash__(self) -> int:
        return hash(self.value.lower())

    def __str__(self) -> str:
        """Return `TrainerFn.FITTING` and the like, as Lightning does."""
        return f"{type(self).__name__}.{self.name}"

    def __format__(self, specification: str) -> str:
        return format(str(self), specification)


class TrainerStatus(TextEnum):
    """Whether the newest run is running, and else how it ended."""

    INITIALIZING = "initializing"
    RUNNING = "running"
    FINISHED = "finished"
    INTERRUPTED = "interrupted"

    @property
    def stopped(self) -> bool:
        """Whether nothing runs any more."""
        return self in (TrainerStatus.FINISHED, TrainerStatus.INTERRUPTED)


class TrainerFn(TextEnum):
    """The method that runs."""

    FITTING = "fit"
    VALIDATING = "validate"
    TESTING = "test"
    PREDICTING = "predict"


class RunningStage(TextEnum):
    """The part of the run in progress."""

    TRAINING = "train"
    SANITY_CHECKING = "sanity_check"
    VALIDATING = "validate"
    TESTING = "test"
    PREDICTING = "predict"

    @property
    def evaluating(self) -> bool:
        """Whether this is a validation or test."""
        return self in (RunningStage.VALIDATING, RunningStage.TESTING, RunningStage.SANITY_CHECKING)

    @property
    def dataloader_prefix(self) -> str | None:
        """The beginning of the name of the method that gives the loaders."""
        return "val" if self in (RunningStage.VALIDATING, RunningStage.SANITY_CHECKING) else self.value


class GradClipAlgorithmType(TextEnum):
    """The values of `gradient_clip_algorithm`."""

    VALUE = "value"
    NORM = "norm"


@dataclass(frozen=True)
class TrainerState:
    """The state of a Trainer when it was asked for; to change it, call `fit` and the like, or `trainer.stop`."""

    status: TrainerStatus
    fn: TrainerFn | None
    stage: RunningStage | None

    @property
    def finished(self) -> bool:
        """Whether the newest run came to its end."""
        return self.status == TrainerStatus.FINISHED

    @property
    def stopped(self) -> bool:
        """Whether nothing runs any more."""
        return self.status.stopped


def state_of(stage: str | None, last_stage: str | None, activity: str | None, interrupted: bool) -> TrainerState:
    """Return the state of a Trainer.

    Args:
        stage: what runs now; None: nothing.
        last_stage: what ran last; None: nothing has run.
        activity: "training", "validating" or "sanity checking", in `fit` and `validate`.
        interrupted: an error or a signal ended the last run.
    """
    if last_stage is None:
        return TrainerState(TrainerStatus.INITIALIZING, None, None)
    if stage is None:
        status = TrainerStatus.INTERRUPTED if interrupted else TrainerStatus.FINISHED
        return TrainerState(status, TrainerFn(last_stage), None)
    parts = {"training": "train", "validating": "validate", "sanity checking": "sanity_check"}
    return TrainerState(TrainerStatus.RUNNING, TrainerFn(stage), RunningStage(parts.get(activity or "", stage)))


LIGHTNING_VERSION = "2.6.6"
"""The version of Lightning whose names are served."""
AS_LIGHTNING = "TRAINER_AS_LIGHTNING"
"""The environment variable of processes that run as Lightning: see `trainer run-as-lightning`."""


def runs_as_lightning() -> bool:
    """Whether the programs of this process were written for Lightning, and expect its names and files."""
    return AS_LIGHTNING in os.environ
