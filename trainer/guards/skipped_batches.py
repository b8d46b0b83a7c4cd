"""Skip a batch whose `training_step` returned None, or the rest of an epoch, on all processes together."""

from __future__ import annotations

import dis
import inspect
import logging
from collections.abc import Iterator
from copy import deepcopy
from typing import TYPE_CHECKING, Any

import torch

from trainer.data.loader import Batch, Divisor, Loaders
from trainer.errors import ConfigError
from trainer.module import TrainModule
from trainer.seed import isolated_rng
from trainer.strategy import SkippedBatch, Strategy

if TYPE_CHECKING:
    from trainer.loop.callback_list import CallbackList
    from trainer.loop.progress import Progress

log = logging.getLogger("trainer")


class SkippedBatches:
    """The batches and the rests of epochs that a training skips."""

    def __init__(self, module: TrainModule, strategy: Strategy, progress: Progress) -> None:
        self._module, self._strategy, self._progress = module, strategy, progress
        self.may_skip = self.may_end_epochs = False
        """True if `training_step` may return None; and if the module's `on_train_batch_start` may return -1."""
        self.whole_step = False
        """True if all processes have skipped all batches of the step, so that nothing is updated."""
        self.epoch_ended = False
        """True after the module's `on_train_batch_start` has returned -1, until the next epoch."""
        self.loader_state: dict[str, Any] | None = None
        """The state of the training loader at the last step, if it has been asked for a batch beyond."""
        self._share = 0.0
        """The part of the items of this step, times the number of processes, that this process has skipped so far."""
        self._reported = False

    def begin_training(self, hooks: CallbackList, loaders: Loaders, closure_needed: bool, trains: bool) -> None:
        """Read the code of the module's methods, which tells all processes whether they have to agree.

        Args:
            hooks, loaders: of the training.
            closure_needed: the optimizer evaluates the loss several times per step.
            trains: the optimizers have parameters, so that each batch needs a loss.
        """
        self._hooks, self._loaders, self._closure_needed = hooks, loaders, closure_needed
        module, step = self._module, self._method("training_step")
        self._has_losses = can_return(step, none=False) or not trains
        if module.automatic_optimization and not self._strategy.shards_state:
            self.may_skip = can_return(step, none=True) and self._has_losses
        of_module = module.overrides("on_train_batch_start")
        self.may_end_epochs = of_module and can_return(self._method("on_train_batch_start"), none=False)

    def begin_epoch(self) -> None:
        """Forget that the module has ended the epoch before."""
        self.epoch_ended = False

    def ends_epoch(self, position: int) -> bool:
        """Whether the module's `on_train_batch_start` returned -1 on any process, before a window's batch. Collective.

        Raises:
            ConfigError: the strategy cannot drop the gradients of the batches before, or of a closure.
        """
        strategy, answer = self._strategy, self._hooks.module_answer
        ends = isinstance(answer, int) and answer == -1
        if strategy.processes.world_size > 1:
            ends = bool(strategy.processes.sum(torch.tensor(int(ends))))
        if ends and (self._closure_needed or (position > 0 and strategy.shards_state)):
            raise ConfigError(
                "on_train_batch_start returned -1 in the middle of a step, whose gradients "
                f"strategy {strategy.name!r} cannot drop: return -1 at the first batch of an accumulation window, "
                "and with an optimizer that needs no closure."
            )
        self.epoch_ended = ends
        return ends

    def skip(self, outputs: SkippedBatch | None, divisor: Divisor, window: int) -> None:
        """Skip a micro-batch whose `training_step` returned None: its items do not count.

        Args:
            window: the micro-batches of the step.

        Raises:
            ConfigError: the batch cannot be skipped.
        """
        name, strategy = f"{type(self._module).__name__}.training_step", self._strategy
        several = strategy.processes.world_size > 1
        if not self._has_losses:
            raise ConfigError(
                f"{name} returned None; what is needed is the loss, a tensor with one element and a gradient. Did you "
                "forget 'return loss'? To optimize by hand, set automatic_optimization = False."
            )
        sharded = strategy.shards_state and (several or window > 1)
        if self._closure_needed or sharded or (several and not self.may_skip):
            raise ConfigError(
                f"{name} returned None, and a batch cannot be skipped with an optimizer that needs a closure, with "
                f"strategy {strategy.name!r} on several processes or with accumulation, nor where training_step itself "
                "has no 'return None', by which the processes know that they have to agree. Leave the batch out of "
                "the data, return a loss of zero (the model's loss * 0), or use strategy='ddp'."
            )
        if not self._reported:
            log.warning("%s returned None at step %d: the batch is skipped", name, self._progress.step + 1)
        self._reported = self.may_skip = True
        self._share += 1.0 if divisor is None else float(1 / divisor)
        if outputs is not None:
            strategy.backward(outputs.loss)

    def end_window(self) -> None:
        """Scale the gradients to the mean over all items that were not skipped. Collective."""
        processes, share = self._strategy.processes, self._share
        self._share = 0.0
        if processes.world_size > 1:
            share = float(processes.sum_over_readers(torch.tensor(share, dtype=torch.float64))) / processes.readers
        self.whole_step = share > 1 - 1e-9
        if share == 0:
            return
        for parameter in self._module.parameters():
            if self.whole_step:
                parameter.grad = None
            elif parameter.grad is not None:
                parameter.grad /= 1 - share

    def is_exhausted(self, windows: Iterator[list[Batch]], validates: bool) -> bool:
        """Whether the epoch has no further window; a loader without a length is asked for one. Collective.

        An iterator is asked only if the end of the epoch `validates`, because the batch is lost for its next reader. A
        checkpoint has the loader's state and the random numbers from before the question.
        """
        loader = self._loaders.train
        assert loader is not None
        if loader.samples_per_epoch is not None or loader.length not in (None, loader.limit):
            return self._progress.batch == loader.length
        if loader.one_shot and not validates and self._strategy.processes.world_size == 1:
            return self._progress.batch == loader.limit
        with isolated_rng(self._strategy.device):
            self.loader_state = deepcopy(loader.state_dict())
            if next(windows, None) is not None:
                return False
        self.loader_state = None
        return True

    def _method(self, name: str) -> Any:
        module = self._module
        return vars(module).get(name) or getattr(type(module), name)


def can_return(function: Any, none: bool) -> bool:
    """Whether a `return` of the function gives the constant None (`none`), or anything else; True for unknown code."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    if code is None:
        return True
    instructions = list(dis.get_instructions(code))
    for position, instruction in enumerate(instructions):
        if instruction.opname in ("RETURN_VALUE", "RETURN_CONST"):
            if instruction.is_jump_target:  # of a conditional expression, such as `-1 if done else None`
                return True
            given = instruction if instruction.opname == "RETURN_CONST" else instructions[position - 1]
            gives_none = given.opname in ("LOAD_CONST", "RETURN_CONST") and given.argval is None
            if gives_none == none:
                return True
    return False
