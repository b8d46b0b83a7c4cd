"""Leaving: end a validation inside `fit` where a signal stops the run, and leave nothing behind."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from trainer.data.loader import Batch, BatchLoader
from trainer.fault_tolerance.stop import exit_code
from trainer.precision import is_quantized
from trainer.state.averaged_weights import own_part
from trainer.state.no_trace import Restore, Uncopied, is_dense, keep_buffers, keep_states

if TYPE_CHECKING:
    from trainer.loop.run import Run

_FEW = 8
"""Values of a weight that are looked at, at least, if it has as many."""
_MOST = 2**28
"""Bytes of all buffers together, up to which there are copies."""


class Staying:
    """An evaluation that continues to its end."""

    left = False
    """True after the evaluation has been left."""

    def begin(self) -> None:
        """Begin with the batches, after the first hooks."""

    def until_stopped(self, batches: Iterator[Batch], loader: BatchLoader, max_batches: int | None) -> Iterator[Batch]:
        """Return the batches of a loader to evaluate."""
        return batches


class Leaving(Staying):
    """Ends a validation after the batch when a signal or a deadline stops the run.

    The step before it is complete: its checkpoint is written at once, and the resumed run validates again, from the
    first batch. Everything that a checkpoint has is then as before the validation: the states of `keep_states`, logged
    values, buffers and random numbers. Its last hooks are not called: they would judge a part of the samples.

    A validation is not left while weights, frozen ones too, differ from before, as by the user's own averages or merged
    adapters: its last hooks have to put them back. Callbacks with `swaps_weights` save the trained weights in any case.
    A validation that changes a large tensor in place, without a copy, is not left either.
    """

    def __init__(self, run: Run) -> None:
        self.run = run
        self._rng = run.generators.state()
        self.logged = {id(logger): logger.state_dict() for logger in run.loggers}
        """The states of the loggers before the validation, by their ids."""
        self._restore: list[Restore] = [*keep_states(run, looks_inside=True)]
        buffers = [buffer for buffer in run.module.buffers() if is_dense(buffer)]
        many = sum(buffer.nbytes for buffer in buffers) > _MOST
        for part in run.module.modules():
            self._restore += keep_buffers(part, 0 if many else _MOST)
        self._uncopied = [one for one in self._restore if isinstance(one, Uncopied)]
        self._weights = self._few_weights()

    def begin(self) -> None:
        """Compare later with the weights that callbacks swap in, after the first hooks."""
        if any(callback.swaps_weights for callback in self.run.callbacks):
            self._weights = self._few_weights()

    def _cannot_leave(self, even: bool) -> bool:
        """Whether the validation has changed what is not restored; on any process, if all of them ask."""
        processes = self.run.strategy.processes
        if even:
            self.run.strategy.release_gathered()
        now = self._few_weights()
        changed = len(self._weights) != len(now) or not all(map(torch.equal, self._weights, now))
        changed |= any(one.tensor._version != one.version for one in self._uncopied)
        return any(processes.all_gather_object(changed)) if even else changed

    def until_stopped(self, batches: Iterator[Batch], loader: BatchLoader, max_batches: int | None) -> Iterator[Batch]:
        """Yield the batches of a loader, on all processes equally many if possible, until the run is stopped.

        Where processes have different numbers, each one stops separately, and they meet at the end. Collective.
        """
        processes, number = self.run.strategy.processes, 0
        even = self.run.strategy.collective_forward or loader.samples_per_epoch is not None
        for batch in batches:
            number += 1
            yield batch
            del batch  # it may not stay in memory during the next forward
            if self._stops(even):
                break
        longest = min(loader.max_length or 0, max_batches or loader.max_length or 0) if even else 0
        while number < longest and not self.left:
            number += 1
            self._stops(even)
        if not even:
            self.left = any(processes.all_gather_object(self.left))

    def _stops(self, even: bool) -> bool:
        run = self.run
        if even:
            run.clock.stops()
        reason = run.clock.stop_reason if even else run.clock.coordinator.announced
        self.left = exit_code(reason) != 0 and not self._cannot_leave(even)
        return self.left

    def restore(self) -> None:
        """Undo the changes of a validation that was left."""
        for restore in self._restore:
            restore()
        self.run.generators.set_state(self._rng)

    def _few_weights(self) -> list[torch.Tensor]:
        """Return copies of a few values of each weight, or of this process's part of it, without a synchronization."""
        local = [own_part(parameter).detach() for parameter in self.run.module.parameters()]
        return [p.flatten()[:: max(1, p.numel() // _FEW)].clone() for p in local if is_dense(p) and not is_quantized(p)]
