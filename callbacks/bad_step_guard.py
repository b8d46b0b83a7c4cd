"""BadStepGuard: what to do about a step whose loss or gradients are not finite, or whose loss is a spike."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from trainer.arguments import PositiveFloat, PositiveInt
from trainer.callback import Checkpoint, StepGuard, problem_of_several
from trainer.checkpoint.disk import open_regular, reason, replace_notes
from trainer.checkpoint.manifest import read_manifest
from trainer.checkpoint.schema import NUMBER, Integer, require
from trainer.errors import CheckpointError
from trainer.guards.bad_steps import BadStep, BadStepError, LossWindow, explain

if TYPE_CHECKING:
    from trainer.module import TrainModule
    from trainer.runs.resolved_config import ResolvedConfig
    from trainer.trainer import Trainer

log = logging.getLogger("trainer")


class BadStepGuard(StepGuard):
    """Refuse steps whose loss or gradients are not finite, or whose loss is far above the last ones.

    All processes refuse the same step. A loss is judged where it is computed, and a bad one makes the gradients NaN:
    the norm that clipping needs anyway informs all processes, and is read once per step. Refused steps are written to
    `bad_steps.jsonl` in the run directory with their batches and the indices of their samples.

    Args:
        action: "raise": end the run with a `BadStepError` before the weights change. "skip": the batches are consumed,
            but no step is counted, no optimizer or scheduler is stepped, and values that were logged in the step are
            dropped. "rewind": go back to the newest checkpoint whose weights are finite, as if the run were resumed,
            and leave out the batches of the step this time; without a checkpoint yet, skip.
        z_score: a loss is a spike if it is this many standard deviations above the mean of the last losses. Deviations
            below 5 % of the mean count as 5 %. None: no loss is a spike.
        window: the number of good steps whose losses a loss is compared with; comparison starts with 10.
        max_bad_steps: end the run with an error after more bad steps than this without a good step beyond the furthest
            bad one.
    """

    agree_on: ClassVar[tuple[str, ...] | None] = ("action", "z_score", "window", "max_bad_steps")

    def __init__(
        self,
        action: Literal["raise", "skip", "rewind"] = "raise",
        z_score: PositiveFloat | None = 6.0,
        window: PositiveInt = 100,
        max_bad_steps: PositiveInt = 10,
    ) -> None:
        self.action = action
        self.z_score = z_score
        self.window = window
        self.max_bad_steps = max_bad_steps
        self._start_afresh()

    def _start_afresh(self) -> None:
        self.losses = LossWindow(self.window, self.z_score)
        self.left_out: set[tuple[int, int]] = set()
        self.bad_steps: list[BadStep] = []
        """The steps refused by this process, since the run was started or resumed."""
        self._furthest, self._in_a_row = -1, 0
        self._trainer: Trainer | None = None

    def problems(self, config: ResolvedConfig, module: TrainModule, stage: str) -> list[str]:
        if stage != "fit":
            return []
        problems = problem_of_several(self, config, StepGuard, "BadStepGuards")
        if not module.automatic_optimization:
            problems.append(
                "BadStepGuard judges the steps of automatic optimization: with automatic_optimization = False look at "
                "self.clip_gradients(...), which returns the norm, in training_step."
            )
        if config.device_type in ("xla", "tpu"):
            problems.append("BadStepGuard reads a number in each step, which XLA would wait for: leave it out there.")
        return problems

    def setup(self, trainer: Trainer, pl_module: TrainModule, stage: str) -> None:
        if stage == "fit":
            self._start_afresh()
            self._trainer = trainer

    def refused(self, bad: BadStep) -> str | None:
        """Return the checkpoint to go back to; None: skip the step. Collective.

        Raises:
            BadStepError: the run ends here.
        """
        trainer = self._trainer
        assert trainer is not None
        if bad.step > self._furthest:
            self._furthest, self._in_a_row = bad.step, 0
        self._in_a_row += 1
        self.bad_steps.append(bad)
        newest = _newest(trainer.checkpoint_callbacks) if self.action == "rewind" and trainer.is_global_zero else None
        path = trainer.strategy.processes.broadcast_object(newest)
        if trainer.is_global_zero and not trainer.settings.fast_dev_run:
            _record(trainer.run_dir / "bad_steps.jsonl", {**bad._asdict(), "action": self.action})
        if self.action == "raise":
            raise BadStepError(f"{explain(bad)}. BadStepGuard(action='skip') or 'rewind' would continue without it.")
        if self._in_a_row > self.max_bad_steps:
            raise BadStepError(f"{explain(bad)}: it is number {self._in_a_row} without progress (max_bad_steps).")
        if path is not None:
            self.left_out.add((bad.epoch, bad.batch))
        if trainer.is_global_zero:
            what = "skipped" if path is None else f"left out after going back to {path}"
            log.warning("%s: it is %s", explain(bad), what)
        return path

    # -- state ---------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the losses of all readers, and the steps left out. Collective in a run."""
        own = list(self.losses.losses)
        return {
            "losses": [own] if self._trainer is None else self._trainer.strategy.processes.gather_reports(own),
            "left_out": [list(one) for one in sorted(self.left_out)],
            "furthest": self._furthest,
            "in_a_row": self._in_a_row,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state. In a run that went back, the steps left out since and the count of bad steps stay."""
        kinds = {"losses": [[NUMBER]], "left_out": [[Integer()]], "furthest": Integer(-1), "in_a_row": Integer()}
        require(state_dict, kinds, "BadStepGuard")
        windows, reader = state_dict["losses"], 0 if self._trainer is None else self._trainer.reader
        self.losses.losses.clear()
        self.losses.losses.extend(windows[reader % len(windows)] if windows else [])
        self.left_out |= {(epoch, batch) for epoch, batch in state_dict["left_out"]}
        if state_dict["furthest"] > self._furthest:
            self._furthest, self._in_a_row = state_dict["furthest"], state_dict["in_a_row"]


def _newest(callbacks: Iterable[Checkpoint]) -> str | None:
    """Return the checkpoint with the most steps among the callbacks' newest finite ones; None without one.

    Checkpoints that hold weights only do not count, because training cannot continue from them.
    """
    found = {}
    for callback in callbacks:
        try:
            if (path := callback.newest_on_disk()) and not (info := read_manifest(path).info).get("weights_only"):
                found[path] = info["step"]
        except CheckpointError as error:
            log.warning("cannot go back to the newest checkpoint: %s", error)
    return max(found, key=lambda path: found[path], default=None)


def _record(path: Path, row: dict[str, Any]) -> None:
    """Append a row to a file of JSON lines, unless the file has one for this batch from before a resume.

    Logs a warning if the file cannot be written.
    """
    lines = []
    try:
        with open_regular(path) as file:
            lines = file.read().splitlines()
    except FileNotFoundError:
        pass
    except OSError as error:
        log.warning("%s cannot be read (%s), and the bad steps in it are not kept.", path, reason(error))
    batch = json.dumps({"epoch": row["epoch"], "batch": row["batch"]})[1:-1].encode()
    if any(batch + b"," in line for line in lines):
        return
    with suppress(OSError):  # `replace_notes` warns
        path.parent.mkdir(parents=True, exist_ok=True)
    replace_notes(path, b"\n".join([*lines, json.dumps(row, default=str).encode(), b""]))
