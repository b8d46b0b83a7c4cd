"""LearningRateMonitor: log the learning rate of every parameter group."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, Literal

from trainer.callback import Callback
from trainer.errors import ConfigError

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from trainer.module import TrainModule
    from trainer.optimizers import SchedulerConfig
    from trainer.trainer import Trainer

log = logging.getLogger("trainer")


class LearningRateMonitor(Callback):
    """Log the learning rates with which a step or an epoch is made.

    A rate is named after its scheduler's `name`, else `lr-<optimizer class>`; several optimizers of one class are
    numbered, those with a scheduler first (`lr-Adam`, `lr-Adam-1`). A parameter group adds its `"name"`
    (`lr-Adam/body`), or its number if there are several (`lr-Adam/pg1`).

    Without a logger, the rates are in `trainer.callback_metrics` only; a warning says so.

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

    def on_train_start(self, trainer: Trainer, pl_module: TrainModule) -> None:
        if not trainer.loggers and not trainer.settings.fast_dev_run and trainer.is_global_zero:
            log.warning("LearningRateMonitor has no logger: the rates are in trainer.callback_metrics only")
        for name, optimizer, _ in named_optimizers(trainer.optimizers, trainer.scheduler_configs):
            twice = [one for one, times in Counter(group_names(optimizer)).items() if times > 1]
            if twice:
                raise ConfigError(
                    f"LearningRateMonitor: several parameter groups of {name.removeprefix('lr-')} have the name "
                    f"{twice[0]!r}: give each group its own."
                )

    def on_train_batch_start(self, trainer: Trainer, pl_module: TrainModule, batch: Any, batch_idx: int) -> None:
        # Before the step, because after it a scheduler has already set the rate of the next one.
        if batch_idx == 0:
            self._log(trainer, "epoch")
        if trainer.settings.logs_at(trainer.global_step + 1):
            self._log(trainer, "step")

    def _log(self, trainer: Trainer, interval: str) -> None:
        if self.logging_interval not in (None, interval):
            return
        for name, optimizer, scheduled in named_optimizers(trainer.optimizers, trainer.scheduler_configs):
            if self.logging_interval is None and scheduled != interval:
                continue
            for key, value in self._values(name, optimizer):
                # The largest of equal values is that value to the last bit; a mean need not be.
                options = {"on_step": interval == "step", "on_epoch": interval == "epoch", "reduce_fx": "max"}
                trainer.log(key, value, weight=1, **options)

    def _values(self, name: str, optimizer: Optimizer) -> Iterator[tuple[str, Any]]:
        for group, suffix in zip(optimizer.param_groups, group_names(optimizer), strict=True):
            full_name = f"{name}/{suffix}" if suffix else name
            yield full_name, group["lr"]
            if self.log_momentum:
                yield f"{full_name}-momentum", group["betas"][0] if "betas" in group else group.get("momentum", 0)
            if self.log_weight_decay and "weight_decay" in group:
                yield f"{full_name}-weight_decay", group["weight_decay"]


def group_names(optimizer: Optimizer) -> list[str]:
    """Return the names of the parameter groups; empty for a single one without a name."""
    groups = optimizer.param_groups
    return [group.get("name") or (f"pg{n}" if len(groups) > 1 else "") for n, group in enumerate(groups, start=1)]


def named_optimizers(
    optimizers: Iterable[Optimizer], scheduler_configs: Iterable[SchedulerConfig]
) -> list[tuple[str, Optimizer, str]]:
    """Return (name, optimizer, interval at which its rate changes); "step" for an optimizer without a scheduler."""
    found = []
    used: Counter[str] = Counter()
    scheduled = [getattr(config.scheduler, "optimizer", None) for config in scheduler_configs]
    positions = {id(optimizer): position for position, optimizer in reversed([*enumerate(scheduled)])}
    for optimizer in sorted(optimizers, key=lambda one: positions.get(id(one), len(scheduled))):
        mine = [c for c in scheduler_configs if getattr(c.scheduler, "optimizer", None) is optimizer]
        given = next((config.name for config in mine if config.name), None)
        base = given or f"lr-{type(optimizer).__name__}"
        name = f"{base}-{used[base]}" if used[base] else base
        used[base] += 1
        by_epoch = bool(mine) and all(config.interval == "epoch" for config in mine)
        found.append((name, optimizer, "epoch" if by_epoch else "step"))
    return found
