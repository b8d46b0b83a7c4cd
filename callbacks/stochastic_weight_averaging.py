"""StochasticWeightAveraging: average the weights of the last epochs, which have a separate learning rate."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, Literal

import torch

from trainer.arguments import Limit, NonNegativeInt, PositiveFloat, PositiveInt
from trainer.callbacks.weight_averaging import AveragingCallback, as_device
from trainer.checkpoint.hook_checkpoint import entries_of
from trainer.checkpoint.schema import NUMBER, Integer, require
from trainer.errors import ConfigError
from trainer.fault_tolerance.stop import exit_code
from trainer.state.averaged_weights import equal_weights, from_avg_fn
from trainer.state.batch_statistics import keeps_statistics, redo_batch_statistics

if TYPE_CHECKING:
    from trainer.loop.run import Run
    from trainer.module import TrainModule
    from trainer.runs.resolved_config import ResolvedConfig
    from trainer.trainer import Trainer

log = logging.getLogger("trainer")


class StochasticWeightAveraging(AveragingCallback):
    """Average the weights at the start of the last epochs (Izmailov et al., 2018, https://arxiv.org/abs/1803.05407).

    From the first of these epochs, the learning rate is annealed to `swa_lrs` and stays there; the module's schedulers
    are not stepped any more. At the end of training, a pass over the training data recomputes the statistics of
    BatchNorms for the average. After `fit` the module has the average. Checkpoints hold the weights and the average:
    `validate`, `test` and `predict` with this callback and a `ckpt_path`, and `trainer checkpoint export --ema`, use
    the average.

    Args:
        swa_lrs: the learning rate, or a list with one for each parameter group.
        swa_epoch_start: the first of these epochs, an integer counted from 1 or a fraction of `max_epochs`.
        annealing_epochs: the number of epochs over which the learning rate is annealed.
        annealing_strategy: "cos" or "linear".
        avg_fn: another average, as in `torch.optim.swa_utils.AveragedModel`, called for each tensor or shard.
        device: where the average is kept. None: where the weights are.
    """

    agree_on = ("swa_lrs", "swa_epoch_start", "annealing_epochs", "annealing_strategy", "avg_fn")

    def __init__(
        self,
        swa_lrs: PositiveFloat | list[PositiveFloat],
        swa_epoch_start: PositiveInt | Annotated[float, Limit("from", 0), Limit("up to", 1)] = 0.8,
        annealing_epochs: NonNegativeInt = 10,
        annealing_strategy: Literal["cos", "linear"] = "cos",
        avg_fn: Callable[..., torch.Tensor] | None = None,
        device: torch.device | str | None = "cpu",
    ) -> None:
        super().__init__()
        if isinstance(swa_epoch_start, int) and swa_epoch_start < 1:  # of floats, 0 is the first epoch
            raise ConfigError("StochasticWeightAveraging(swa_epoch_start=0): epochs count from 1; give 1 or 0.0.")
        self.swa_lrs = swa_lrs
        self.swa_epoch_start = swa_epoch_start
        self.annealing_epochs = annealing_epochs
        self.annealing_strategy = annealing_strategy
        self.device = as_device(device)
        self.latest_update_epoch = -1
        self.avg_fn = avg_fn
        self._change = equal_weights if avg_fn is None else from_avg_fn(avg_fn)
        self._first: int | None = None  # of these epochs, where it depends on `max_epochs`
        self._rates: list[float] = []
        """The learning rates before the first of these epochs, by group."""

    def should_update(self, epoch_idx: int, max_epochs: int | None) -> bool:
        """Return True to average the weights at the start of this epoch, counted from 0."""
        return self.first_epoch(max_epochs) <= epoch_idx < (math.inf if max_epochs is None else max_epochs)

    def first_epoch(self, max_epochs: int | None) -> int:
        """Return the first epoch, counted from 0, whose weights are averaged."""
        start = self.swa_epoch_start
        if isinstance(start, float):
            assert max_epochs is not None
            start = int(max_epochs * start)
        return max(start - 1, 0)

    def problems(self, config: ResolvedConfig, module: TrainModule, stage: str) -> list[str]:
        if stage != "fit":
            return []
        problems = super().problems(config, module, stage)
        if isinstance(self.swa_epoch_start, float) and config.max_epochs is None:
            problems.append(
                f"StochasticWeightAveraging(swa_epoch_start={self.swa_epoch_start}) is a part of max_epochs, which is "
                "not given: give an integer, or Trainer(max_epochs=...)."
            )
        if not module.automatic_optimization:
            problems.append("StochasticWeightAveraging sets learning rates: use automatic optimization with it.")
        return problems

    # -- training ------------------------------------------------------------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: TrainModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        self.latest_update_epoch, self._rates = -1, []
        depends = stage == "fit" and isinstance(self.swa_epoch_start, float)
        self._first = self.first_epoch(trainer.config.max_epochs) if depends else None

    def on_fit_start(self, trainer: Trainer, pl_module: TrainModule) -> None:
        if len(trainer.optimizers) != 1:
            raise ConfigError(
                f"StochasticWeightAveraging needs one optimizer, and there are {len(trainer.optimizers)}: use "
                "WeightAveraging, which leaves learning rates alone."
            )
        groups = trainer.optimizers[0].param_groups
        if isinstance(self.swa_lrs, list) and len(self.swa_lrs) != len(groups):
            raise ConfigError(
                f"StochasticWeightAveraging: swa_lrs has {len(self.swa_lrs)} rates for {len(groups)} parameter groups."
            )
        super().on_fit_start(trainer, pl_module)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: TrainModule) -> None:
        epoch = trainer.current_epoch
        self._averaged.forget_buffers()  # a checkpoint of an earlier end has some: this end's may differ
        if not self.should_update(epoch, trainer.config.max_epochs):
            return
        for config in trainer.scheduler_configs:
            config.rest()
        if epoch <= self.latest_update_epoch:
            return  # a resumed run continues inside the epoch
        groups = trainer.optimizers[0].param_groups
        self._rates += [float(group["lr"]) for group in groups[len(self._rates) :]]
        rates = self.swa_lrs if isinstance(self.swa_lrs, list) else [self.swa_lrs] * len(groups)
        part = self._annealed(epoch - self.first_epoch(trainer.config.max_epochs))
        # Groups that a callback has added since the start keep their rates, where there is a rate for each group.
        for group, before, after in zip(groups, self._rates, rates, strict=False):
            group["lr"] = after * part + before * (1 - part)
        self._averaged.update(self._change)
        self.latest_update_epoch = epoch

    def _annealed(self, epochs: int) -> float:
        """Return how far the learning rate has gone after so many epochs, from 0 to 1."""
        part = min(1.0, epochs / self.annealing_epochs) if self.annealing_epochs else 1.0
        return (1 - math.cos(math.pi * part)) / 2 if self.annealing_strategy == "cos" else part

    def on_train_end(self, trainer: Trainer, pl_module: TrainModule) -> None:
        if not exit_code(trainer.stop_reason):  # else the run is to be started again
            self._redo_statistics(trainer.run)

    def _redo_statistics(self, run: Run) -> None:
        """Compute the statistics of BatchNorms with the average, unless it has them. Collective."""
        if self._averaged.count and not self._averaged.has_buffers and any(map(keeps_statistics, run.module.modules())):
            self._averaged.swap_in()
            statistics = redo_batch_statistics(run)
            self._averaged.swap_out()
            self._averaged.keep_buffers(statistics)

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        begun = {"latest_update_epoch": self.latest_update_epoch, "rates": list(self._rates), "first": self._first}
        return {**super().state_dict(), **begun}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        kinds = {"latest_update_epoch": Integer(-1), "rates": [NUMBER], "first?": (Integer(), None)}
        require(state_dict, kinds, "StochasticWeightAveraging")
        first = state_dict.get("first")
        if None not in (first, self._first) and first != self._first:
            words = "StochasticWeightAveraging(swa_epoch_start=%s) was to begin in epoch %d, and begins in epoch %d now"
            log.warning(words, self.swa_epoch_start, first, self._first)
        self.latest_update_epoch, self._rates = state_dict["latest_update_epoch"], list(state_dict["rates"])
        super().load_state_dict(state_dict)

    def on_save_checkpoint(self, trainer: Trainer, pl_module: TrainModule, checkpoint: dict[str, Any]) -> None:
        # Here, because a callback that stops the training may come after this one in `on_train_epoch_end`.
        if trainer.run.clock.ends:
            self._redo_statistics(trainer.run)
        super().on_save_checkpoint(trainer, pl_module, checkpoint)

    def on_load_checkpoint(self, trainer: Trainer, pl_module: TrainModule, checkpoint: dict[str, Any]) -> None:
        average = entries_of(checkpoint).get("average")
        norms = [name for name, one in pl_module.named_modules() if keeps_statistics(one)]
        lacks = average is not None and norms and f"{norms[0]}.running_mean".removeprefix(".") not in average
        if lacks and trainer.stage != "fit" and trainer.is_global_zero:
            log.warning(
                "the checkpoint was written before the training's end: its average is used with BatchNorm statistics "
                "that belong to the training's weights"
            )
        super().on_load_checkpoint(trainer, pl_module, checkpoint)
