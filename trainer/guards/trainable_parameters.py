"""Notice parameters that a run freezes, unfreezes, replaces or adds, and have all processes train the same."""

from __future__ import annotations

import logging

from torch.optim import Optimizer

from trainer.errors import ConfigError
from trainer.model.parameter_tables import ParameterTables, describe_changes
from trainer.module import TrainModule
from trainer.optimizers import parameters_of
from trainer.strategy import Strategy

log = logging.getLogger("trainer")


class TrainableParameters:
    """The parameters that several processes train together, compared with the module's before each step.

    Args:
        module, strategy, optimizers: of the run.
    """

    def __init__(self, module: TrainModule, strategy: Strategy, optimizers: list[Optimizer]) -> None:
        self._module, self._strategy, self._optimizers = module, strategy, optimizers
        self.windows = 0
        """Number of windows whose forward this process has begun."""
        self._remember()

    def _remember(self) -> None:
        self._tables = ParameterTables(self._module)
        self._names = {name: p.requires_grad for name, p in self._module.named_parameters()}
        self._parameters = list(self._module.parameters())
        self._flags_and_groups, self._optimized = self._look()

    def _look(self) -> tuple[tuple[list[bool], int], set[int]]:
        """Return which parameters train, with the number of groups; and the identities of the optimized parameters."""
        flags = [parameter.requires_grad for parameter in self._parameters]
        groups = sum(len(optimizer.param_groups) for optimizer in self._optimizers)
        return (flags, groups), optimized_parameters(self._optimizers)

    def _have_changed(self) -> bool:
        """Whether a parameter was frozen, unfrozen, added, removed or replaced, in the module or an optimizer.

        Compares without names, which would cost time; not the groups under DeepSpeed, which empties them in its steps.
        """
        flags_and_groups, optimized = self._look()
        if flags_and_groups != self._flags_and_groups or self._has_other_parameters():
            return True
        return optimized != self._optimized and bool(optimized)

    def _has_other_parameters(self) -> bool:
        if self._tables.unchanged():
            return False
        # A forward in a hook may have left gathered copies in place of the parameters.
        self._strategy.release_gathered()
        if not self._tables.unchanged() and not self._tables.same_parameters():
            return True
        self._tables = ParameterTables(self._module)  # other names, as pruning gives
        return False

    def follow(self, window: int) -> None:
        """Adapt the strategy if the parameters have changed. Called before the first forward of window number `window`.

        Raises:
            ConfigError: the processes train different parameters, or the strategy cannot follow the change.
        """
        if self._have_changed():
            self._adopt_changes()
        self.windows = window

    def require_unchanged(self) -> None:
        """Raise ConfigError if parameters have changed since the window's first forward: gradients would be wrong."""
        if self._have_changed():
            raise self._changed_within()

    def explain(self, raised_in: str) -> ConfigError | None:
        """Return the error for a change since the window's first forward, if torch or DeepSpeed has failed after it."""
        try:
            of_library = raised_in.split(".")[0] in ("torch", "deepspeed")
            return self._changed_within() if of_library and self._have_changed() else None
        except ConfigError as change:  # raised by the strategy for the change
            return change

    def _changed_within(self) -> ConfigError:
        return ConfigError(
            f"{self._changes()} within a step, whose gradients the strategy then does not synchronize: do that in "
            "on_train_epoch_start, on_train_step_end or on_train_batch_start of a step's first batch."
        )

    def _adopt_changes(self) -> None:
        changes = self._changes()
        try:
            self._strategy.processes.wait_for_all(f"for a step in which {changes}")
        except ConfigError as error:
            raise ConfigError(f"the processes train different parameters: {error}") from None
        log.info("from this step on: %s", changes)
        self._strategy.parameters_changed(changes, self._optimizers)
        untrained = describe_untrained(self._tables, optimized_parameters(self._optimizers))
        if untrained:
            raise ConfigError(untrained)
        self._remember()

    def _changes(self) -> str:
        """Return the changes as a text with the names of the parameters."""
        now = {name: parameter.requires_grad for name, parameter in self._module.named_parameters()}
        changes = {
            **self._tables.changes(),
            "unfrozen": [name for name, trains in now.items() if trains and self._names.get(name) is False],
            "frozen": [name for name, trains in now.items() if not trains and self._names.get(name)],
        }
        return describe_changes(changes) or "an optimizer's groups of parameters were changed"


class NewParameters:
    """Warns of parameters that came while a single process trains, and that no optimizer has.

    Several processes refuse such parameters, since they would differ; on one process a callback may train them.
    """

    def __init__(self, module: TrainModule, optimizers: list[Optimizer]) -> None:
        self._module, self._optimizers = module, optimizers
        self._tables = ParameterTables(module)

    def report(self) -> None:
        """Log a warning if there are such parameters, once for each change."""
        if self._tables.unchanged():
            return
        untrained = describe_untrained(self._tables, optimized_parameters(self._optimizers))
        if untrained:
            log.warning("%s", untrained)
        self._tables = ParameterTables(self._module)


def optimized_parameters(optimizers: list[Optimizer]) -> set[int]:
    """Return the identities of the parameters in the optimizers."""
    return set(map(id, parameters_of(optimizers)))


def describe_untrained(tables: ParameterTables, optimized: set[int]) -> str:
    """Return a message about new parameters that are to be trained and are in no optimizer; empty if there are none."""
    alone = [name for name, p in tables.new().items() if p.requires_grad and id(p) not in optimized]
    if not alone:
        return ""
    return (
        f"{', '.join(alone)} came while training, by `module.layer = ...`, `module.weight = ...`, "
        "register_parameter, weight_norm or the like, and no optimizer trains it. To change the values of a "
        "parameter, do it in place: with torch.no_grad(): p.copy_(value). To train a new one: "
        "trainer.optimizers[0].add_param_group({'params': [p]}). To keep it as it is: p.requires_grad_(False)."
    )
