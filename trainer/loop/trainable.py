"""Notice parameters that a run freezes, unfreezes, replaces or adds, and have all processes train the same ones."""

from __future__ import annotations

import logging
from itertools import chain
from typing import TYPE_CHECKING

from trainer.errors import ConfigError

if TYPE_CHECKING:
    from trainer.loop.run import Run

log = logging.getLogger("trainer")


class TrainableParameters:
    """The parameters that several processes train together, compared with the module's before each step."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self.windows = 0
        """Number of windows whose forward this process has begun."""
        self._remember()

    def _remember(self) -> None:
        self._names = {name: p.requires_grad for name, p in self._run.module.named_parameters()}
        self._parameters = list(self._run.module.parameters())
        self._flags = [parameter.requires_grad for parameter in self._parameters]
        self._optimized = self._in_optimizers()
        self._groups = self._number_of_groups()

    def _in_optimizers(self) -> set[int]:
        """Return the identities of the parameters in the optimizers."""
        groups = (group["params"] for optimizer in self._run.optimizers for group in optimizer.param_groups)
        return set(map(id, chain.from_iterable(groups)))

    def _number_of_groups(self) -> int:
        return sum(len(optimizer.param_groups) for optimizer in self._run.optimizers)

    def _have_changed(self) -> bool:
        """Whether a parameter was frozen, unfrozen, or added to or removed from an optimizer.

        Compares without names, which would cost time; not the groups under DeepSpeed, which empties them in its steps.
        """
        flags = [parameter.requires_grad for parameter in self._parameters]
        optimized = self._in_optimizers()
        if flags != self._flags or self._number_of_groups() != self._groups:
            return True
        return optimized != self._optimized and bool(optimized)

    def follow(self) -> None:
        """Adapt the strategy if the parameters have changed. Called before the first forward of a window.

        Raises:
            ConfigError: the processes train different parameters, or the strategy cannot follow the change.
        """
        if self._have_changed():
            self._agree()
        self.windows = self._run.metrics.window

    def require_unchanged(self) -> None:
        """Raise ConfigError if parameters have changed since the window's first forward: gradients would be wrong."""
        if self._have_changed():
            raise ConfigError(
                f"{self._changes()} within a step, whose gradients the strategy then does not synchronize: do that in "
                "on_train_epoch_start, on_train_step_end or on_train_batch_start of a step's first batch."
            )

    def _agree(self) -> None:
        run, changes = self._run, self._changes()
        if run.collective_check is not None:
            try:
                run.collective_check.wait_for_all(f"for a step in which {changes}")
            except ConfigError as error:
                raise ConfigError(f"the processes train different parameters: {error}") from None
        log.info("from this step on: %s", changes)
        run.strategy.parameters_changed(changes, run.optimizers)
        self._remember()

    def _changes(self) -> str:
        """Return the changes in words, with the names of the parameters."""
        parameters = dict(self._run.module.named_parameters())
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
