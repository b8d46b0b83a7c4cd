"""Notice parameters that are frozen, unfrozen or added in a run, and have all processes train the same ones."""

from __future__ import annotations

import logging

from trainer.errors import ConfigError
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
        self._in_optimizers = self._count()

    def _count(self) -> int:
        """Return the number of parameters in the optimizers."""
        return sum(len(group["params"]) for optimizer in self._run.optimizers for group in optimizer.param_groups)

    def _have_changed(self) -> bool:
        """Whether a parameter was frozen or unfrozen, or added to an optimizer; takes no names, which cost time.

        DeepSpeed empties the groups in its steps.
        """
        flags = [parameter.requires_grad for parameter in self._parameters]
        return flags != self._flags or self._count() > self._in_optimizers

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
        now = {name: p.requires_grad for name, p in self._run.module.named_parameters()}
        words = {
            "added": [name for name in now if name not in self._names],
            "unfrozen": [name for name, trains in now.items() if trains and self._names.get(name) is False],
            "frozen": [name for name, trains in now.items() if not trains and self._names.get(name)],
        }
        said = [
            f"{', '.join(names)} {'was' if len(names) == 1 else 'were'} {how}" for how, names in words.items() if names
        ]
        return "; ".join(said) or "an optimizer's groups of parameters were changed"
