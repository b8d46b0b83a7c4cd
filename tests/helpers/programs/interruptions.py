"""Blocks of interruptions: where a run is stopped, and by what; each is followed by a resume."""

from __future__ import annotations

from tests.helpers.programs.blocks import Block, block, one_of

PASSED = {
    "start": "on_train_start",
    "start of an epoch": "on_train_epoch_start",
    "batch": "on_train_batch_start",
    "in a window": "on_before_backward",
    "first batch": "on_train_batch_end",
    "last batch": "on_train_batch_end",
    "update": "on_before_optimizer_step",
    "step": "on_train_step_end",
    "last step": "on_train_step_end",
    "validation": "on_validation_batch_end",
    "end of a validation": "on_validation_end",
    "end of an epoch": "on_train_epoch_end",
    "save": "on_save_checkpoint",
    "saved": "on_checkpoint_saved",
    "write": "",
}
"""The hook of each place."""
OF_EPOCHS = ("first batch", "last batch", "last step")


@block("stops", many=True)
class Stop(Block):
    """The end of a process, after which the run is resumed in a new one."""

    how: str = one_of("kill", "error", "signal", "stop", "end")
    """By `os._exit`; an error in a hook; SIGTERM; `trainer.stop`; or `max_steps`."""
    place: str = one_of("step", *(place for place in PASSED if place != "step"))
    number: int = one_of(1, 2, 3, 4, 5, 6)
    """The pass of that place at which the run is stopped; of the first and last batch: the epoch, from 1."""
    early: bool = one_of(False, True)
    """Whether the callback that stops comes before those that save."""

    def fits(self, program: object) -> bool:
        if self.how == "end":
            return self.place == "step" and not self.early
        return (self.place != "write" or self.how == "kill") and (self.place != "save" or self.how in ("kill", "error"))


WRITES = (
    *("in_file", "after_file", "before_manifest", "before_rename", "after_rename", "before_pointer"),
    *("after_pointer", "in_removal"),
)
"""Points in the writing of a checkpoint, of which the number of a stop chooses one."""
