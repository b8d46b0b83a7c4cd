"""LearningRateMonitor: log the learning rate of every parameter group."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from copy import deepcopy
from typing import TYPE_CHECKING, Any, Literal

from trainer.callback import Callback
from trainer.errors import ConfigError

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from trainer.module import TrainModule
    from trainer.optimizers import TimedScheduler
    from trainer.trainer import Trainer


class ValueMonitor(Callback):
    """Base of callbacks that log values which are equal on all processes."""

    def log_own(self, trainer: Trainer, name: str, value: Any, by_step: bool = True) -> None:
        """Log a value, by step or by epoch.

        Raises:
            ConfigError: the module or another callback has logged the name, so that the values would be mixed.
        """
        entry = trainer.run.metrics.train.entries.get(name)
        if entry is not None and (entry.options.reduction != "max" or entry.options.on_epoch == entry.options.on_step):
            raise ConfigError(
                f"{type(self).__name__} logs {name!r}, and so does the module or another callback: the values would be "
                "mixed. Give the other one another name."
            )
        # The largest of equal values is that value to the last bit; a mean need not be.
        trainer.log(name, value, weight=1, on_step=by_step, on_epoch=not by_step, reduce_fx="max")


class LearningRateMonitor(ValueMonitor):
    """Log the learning rates that a step or an epoch is made with.

    A rate is named after its scheduler's `name`, else `lr-<optimizer class>`; several optimizers of one class are
    numbered, those with a scheduler first (`lr-Adam`, `lr-Adam-1`). A parameter group adds its `"name"`
    (`lr-Adam/body`), or its number if there are several (`lr-Adam/pg1`).

    Without a logger, the rates are in `trainer.callback_metrics` only.

    Args:
        logging_interval: "step": every `log_every_n_steps`; "epoch": every epoch, the rate at its start; None: as often
            as its scheduler steps.
        log_momentum: log the momentum (beta 1 of Adam; 0 without one) too, as `<name>-momentum`.
        log_weight_decay: log the weight decay too, as `<name>-weight_decay`.

    Raises:
        ConfigError: `logging_interval` is something else; or, at the start of training, two parameter groups of an
            optimizer have one name.
    """

    def __init__(
        self,
        logging_interval: Literal["step", "epoch"] | None = None,
        log_momentum: bool = False,
        log_weight_decay: bool = False,
    ) -> None:
        self.logging_interval = logging_interval
        self.log_momentum = log_momentum
        self.log_weight_decay = log_weight_decay
        self.lrs: dict[str, list[Any]] = {}
        """The rates of this training that were logged, by name."""
        self.last_momentum_values: dict[str, Any] = {}
        """The newest momentum that was logged of each name."""
        self.last_weight_decay_values: dict[str, Any] = {}
        """The newest weight decay that was logged of each name."""
        self._noted: dict[str, dict[str, Any]] = {}
        """The rates of the step in progress, by interval and name."""

    def on_train_start(self, trainer: Trainer, pl_module: TrainModule) -> None:
        self._noted.clear()
        self.lrs, self.last_momentum_values, self.last_weight_decay_values = {}, {}, {}
        for optimizer in trainer.optimizers:
            names = [group["name"] for group in optimizer.param_groups if "name" in group]
            if len(names) > len(set(names)):
                raise ConfigError(f"LearningRateMonitor: give each parameter group a name of its own, not {names}.")

    def on_train_batch_start(self, trainer: Trainer, pl_module: TrainModule, batch: Any, batch_idx: int) -> None:
        # Before the step, because after it a scheduler has already set the rate of the next one.
        if batch_idx == 0:
            self._note(trainer, "epoch")
        if trainer.settings.logs_at(trainer.global_step + 1):
            self._note(trainer, "step")

    def on_train_step_end(self, trainer: Trainer, pl_module: TrainModule) -> None:
        for interval, values in self._noted.items():
            for name, value in values.items():
                self.log_own(trainer, name, value, by_step=interval == "step")
        self._noted.clear()

    def _note(self, trainer: Trainer, interval: str) -> None:
        """Keep the rates of now until a step is made with them."""
        if self.logging_interval in (None, interval):
            for name, optimizer, scheduled in named_optimizers(trainer.optimizers, trainer.scheduler_configs):
                if self.logging_interval is not None or scheduled == interval:
                    self._noted.setdefault(interval, {}).update(self._values(name, optimizer))

    def _values(self, name: str, optimizer: Optimizer) -> Iterator[tuple[str, Any]]:
        for group, suffix in zip(optimizer.param_groups, group_names(optimizer), strict=True):
            full_name = f"{name}/{suffix}" if suffix else name
            if full_name not in self.lrs:  # a group was added: the first one had no number before
                self.lrs[full_name] = self.lrs.pop(full_name.removesuffix("/pg1"), [])
            self.lrs[full_name].append(deepcopy(group["lr"]))
            yield full_name, group["lr"]
            if self.log_momentum:
                momentum = group["betas"][0] if "betas" in group else group.get("momentum", 0)
                self.last_momentum_values[f"{full_name}-momentum"] = momentum
                yield f"{full_name}-momentum", momentum
            if self.log_weight_decay and "weight_decay" in group:
                self.last_weight_decay_values[f"{full_name}-weight_decay"] = group["weight_decay"]
                yield f"{full_name}-weight_decay", group["weight_decay"]


def group_names(optimizer: Optimizer) -> list[str]:
    """Return the names of the parameter groups; empty for a single one without a name."""
    groups = optimizer.param_groups
    names = [group.get("name") or (f"pg{n}" if len(groups) > 1 else "") for n, group in enumerate(groups, start=1)]
    return [name if names.count(name) == 1 else f"{name}-pg{n}" for n, name in enumerate(names, start=1)]


def named_optimizers(
    optimizers: Collection[Optimizer], scheduler_configs: Iterable[TimedScheduler]
) -> list[tuple[str, Optimizer, str]]:
    """Return (name, optimizer, interval at which its rate changes); "step" for an optimizer without a scheduler."""
    found = []
    used: Counter[str] = Counter()
    configs: dict[int, list[TimedScheduler]] = {}
    for config in scheduler_configs:
        configs.setdefault(id(getattr(config.scheduler, "optimizer", None)), []).append(config)
    order = [*configs, *map(id, optimizers)]
    for optimizer in sorted(optimizers, key=lambda one: order.index(id(one))):
        mine = configs.get(id(optimizer), [])
        base = next((config.name for config in mine if config.name), f"lr-{type(optimizer).__name__}")
        name = f"{base}-{used[base]}" if used[base] else base
        used[base] += 1
        found.append((name, optimizer, "epoch" if {config.interval for config in mine} == {"epoch"} else "step"))
    return found
