"""Notice parameters that a run freezes, unfreezes, replaces or adds, and have all processes train the same ones."""

from __future__ import annotations

import logging
from collections.abc import Callable
from itertools import chain

from torch.optim import Optimizer

from trainer.errors import ConfigError
from trainer.module import TrainModule
from trainer.strategy import Strategy

log = logging.getLogger("trainer")


class TrainableParameters:
    """The parameters that several processes train together, compared with the module's before each step.

    Args:
        module, strategy, optimizers: of the run.
        wait_for_all: waits until all processes call it with the same words; raises ConfigError if they do not.
    """

    def __init__(
        self,
        module: TrainModule,
        strategy: Strategy,
        optimizers: list[Optimizer],
        wait_for_all: Callable[[str], None],
    ) -> None:
        self._module, self._strategy, self._optimizers = module, strategy, optimizers
        self._wait_for_all = wait_for_all
        self.windows = 0
        """Number of windows whose forward this process has begun."""
        self._remember()

    def _remember(self) -> None:
        self._names = {name: p.requires_grad for name, p in self._module.named_parameters()}
        self._parameters = list(self._module.parameters())
        self._flags = [parameter.requires_grad for parameter in self._parameters]
        self._optimized = self._in_optimizers()
        self._groups = self._number_of_groups()

    def _in_optimizers(self) -> set[int]:
        """Return the identities of the parameters in the optimizers."""
        groups = (group["params"] for optimizer in self._optimizers for group in optimizer.param_groups)
        return set(map(id, chain.from_iterable(groups)))

    def _number_of_groups(self) -> int:
        return sum(len(optimizer.param_groups) for optimizer in self._optimizers)

    def _have_changed(self) -> bool:
        """Whether a parameter was frozen, unfrozen, or added to or removed from an optimizer.

        Compares without names, which would cost time; not the groups under DeepSpeed, which empties them in its steps.
        """
        flags = [parameter.requires_grad for parameter in self._parameters]
        optimized = self._in_optimizers()
        if flags != self._flags or self._number_of_groups() != self._groups:
            return True
        return optimized != self._optimized and bool(optimized)

    def follow(self, window: int) -> None:
        """Adapt the strategy if the parameters have changed. Called before the first forward of window number `window`.

        Raises:
            ConfigError: the processes train different parameters, or the strategy cannot follow the change.
        """
        if self._have_changed():
            self._agree()
        self.windows = window

    def require_unchanged(self) -> None:
        """Raise ConfigError if parameters have changed since the window's first forward: gradients would be wrong."""
        if self._have_changed():
            raise ConfigError(
                f"{self._changes()} within a step, whose gradients the strategy then does not synchronize: do that in "
                "on_train_epoch_start, on_train_step_end or on_train_batch_start of a step's first batch."
            )

    def _agree(self) -> None:
        changes = self._changes()
        try:
            self._wait_for_all(f"for a step in which {changes}")
        except ConfigError as error:
            raise ConfigError(f"the processes train different parameters: {error}") from None
        log.info("from this step on: %s", changes)
        self._strategy.parameters_changed(changes, self._optimizers)
        self._remember()

    def _changes(self) -> str:
        """Return the changes in words, with the names of the parameters."""
        parameters = dict(self._module.named_parameters())
        now, known = {name: p.requires_grad for name, p in parameters.items()}, set(map(id, self._parameters))
        words = {
            "added": [name for name in now if name not in self._names],
            "removed": [name for name in self._names if name not in now],
            "replaced": [name for name, p in parameters.items() if name in self._names and id(p) not in known],
            "unfrozen": [name for name, trains in now.items() if trains and self._names.get(name) is False],
            "frozen": [name for name, trains in now.items() if not trains and self._names.get(name)],
        }
        said = [
            f"{', '.join(names)} {'was' if len(names) == 1 else 'were'} {how}" for how, names in words.items() if names
        ]
        return "; ".join(said) or "an optimizer's groups of parameters were changed"
