"""WeightAveraging and EMAWeightAveraging: validate, test and predict with an average of the weights."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import torch
from torch.optim import Optimizer

from trainer.arguments import Limit, NonNegativeInt, PositiveInt
from trainer.callback import Callback, problem_of_several
from trainer.checkpoint.hook_checkpoint import entries_of
from trainer.checkpoint.schema import Integer, require
from trainer.checkpoint.shards import Loadable
from trainer.errors import ConfigError, shown
from trainer.state.averaged_weights import (
    AveragedWeights,
    Update,
    equal_weights,
    exponential,
    from_avg_fn,
    from_multi_avg_fn,
)

if TYPE_CHECKING:
    from trainer.module import TrainModule
    from trainer.runs.resolved_config import ResolvedConfig
    from trainer.trainer import Trainer

log = logging.getLogger("trainer")


class AveragingCallback(Callback):
    """Base of callbacks that average the weights. Checkpoints hold the average; `fit` ends with it in the module."""

    swaps_weights: ClassVar[bool] = True
    device: torch.device | None = None
    """The device of the averages; None: the device of the weights."""
    use_buffers = False
    """True: average floating buffers, too."""

    def __init__(self) -> None:
        self._weights: AveragedWeights | None = None
        self._stored: Mapping[str, Loadable] | None = None
        """The averages of a checkpoint, until the run begins."""
        self._count = 0

    def problems(self, config: ResolvedConfig, module: TrainModule, stage: str) -> list[str]:
        problems = problem_of_several(self, config, AveragingCallback, "callbacks average the weights")
        if config.device_type in ("xla", "tpu"):
            problems.append(
                f"{type(self).__name__} does not run on XLA devices: average the checkpoints after the training."
            )
        return problems

    def setup(self, trainer: Trainer, pl_module: TrainModule, stage: str) -> None:
        self._weights, self._stored, self._count = None, None, 0

    def on_fit_start(self, trainer: Trainer, pl_module: TrainModule) -> None:
        if (optimizer := trainer.run.optimizer_averages.name) is not None:
            raise ConfigError(
                f"{optimizer} and {type(self).__name__} both average the weights: leave one of the two out."
            )
        self._weights = AveragedWeights(trainer.strategy, self.use_buffers, self.device)
        trainer.run.guards.nonfinite.look_at_averages(self._weights.entries)
        if self._stored is not None:
            self._load_stored()

    def on_fit_end(self, trainer: Trainer, pl_module: TrainModule) -> None:
        if not self._averaged.count and trainer.is_global_zero and not trainer.settings.fast_dev_run:
            log.warning("%s: no weights were averaged: the run ended before its average began", type(self).__name__)
        self._averaged.swap_in()

    @property
    def _averaged(self) -> AveragedWeights:
        assert self._weights is not None
        return self._weights

    def _load_stored(self) -> None:
        self._averaged.load(self._stored or {}, self._count)
        self._stored = None

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        return {"updates": self._count if self._weights is None else self._weights.count}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        require(state_dict, {"updates": Integer()}, type(self).__name__)
        self._count = state_dict["updates"]
        if self._weights is not None:  # the run goes back to a checkpoint
            self._load_stored()

    def on_save_checkpoint(self, trainer: Trainer, pl_module: TrainModule, checkpoint: dict[str, Any]) -> None:
        if self._weights is not None:
            self._weights.save(entries_of(checkpoint))

    def on_load_checkpoint(self, trainer: Trainer, pl_module: TrainModule, checkpoint: dict[str, Any]) -> None:
        entries = entries_of(checkpoint)
        average = entries.get("average")
        if trainer.stage == "fit":
            self._stored = average
        elif average is not None:
            entries["model"] = {**entries["model"], **average}


class WeightAveraging(AveragingCallback):
    """Average the weights, by default with equal weights after every step, and use the average in evaluation.

    The average takes the place of the weights during each validation, and for good at the end of `fit`. Checkpoints
    hold both: `test`, `validate` and `predict` with this callback and a `ckpt_path` use the average, as does `trainer
    checkpoint export --ema`; a resumed `fit` restores both. Sharded weights are averaged shard by shard. Only
    parameters that train are averaged. Before the first update, evaluations use the training's weights.

    Override `should_update` to choose the steps or epochs after which the average is updated.

    Args:
        device: where the average is kept. None: where the weights are. "cpu" saves an accelerator's memory, and copies
            the weights in each update.
        use_buffers: average floating buffers too, and copy integer buffers. False: use the training's buffers.
        avg_fn, multi_avg_fn: another average, as in `torch.optim.swa_utils.AveragedModel`; of both, `multi_avg_fn` is
            used. It may get shards, so it has to treat each element alike.
    """

    agree_on: ClassVar[tuple[str, ...] | None] = ("use_buffers", "avg_fn", "multi_avg_fn")

    def __init__(
        self,
        device: torch.device | str | int | None = None,
        use_buffers: bool = True,
        *,
        avg_fn: Callable[..., Any] | None = None,
        multi_avg_fn: Callable[..., Any] | None = None,
    ) -> None:
        super().__init__()
        self.device = as_device(device)
        self.use_buffers = use_buffers
        self.latest_update_step = 0
        """The last step after which the average was updated."""
        self.latest_update_epoch = -1
        self.avg_fn, self.multi_avg_fn = avg_fn, multi_avg_fn
        self._change: Update = equal_weights if avg_fn is None else from_avg_fn(avg_fn)
        if multi_avg_fn is not None:
            self._change = from_multi_avg_fn(multi_avg_fn)

    def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
        """Return True to update the average after this step or epoch; both are counted from 0.

        Called after each step with `step_idx`, and after the last step of each epoch with `epoch_idx`, before the
        validation at the epoch's end. With data of unknown length it is called after that validation, whose values
        then choose no checkpoint.
        """
        return step_idx is not None

    # -- training ------------------------------------------------------------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: TrainModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        self.latest_update_step, self.latest_update_epoch = 0, -1

    def on_train_epoch_start(self, trainer: Trainer, pl_module: TrainModule) -> None:
        self._averaged.forget_places()

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: TrainModule, optimizer: Optimizer) -> None:
        self._averaged.begin_unfrozen()

    def on_train_step_end(self, trainer: Trainer, pl_module: TrainModule) -> None:
        if trainer.global_step > self.latest_update_step and self.should_update(step_idx=trainer.global_step - 1):
            self._averaged.update(self._change)
            self.latest_update_step = trainer.global_step
        if trainer.progress.batch == trainer.num_training_batches:
            self._update_after(trainer.current_epoch)  # what is validated now is what the checkpoint of the epoch holds

    def on_train_epoch_end(self, trainer: Trainer, pl_module: TrainModule) -> None:
        if self._update_after(trainer.current_epoch):  # data without a length, or a stop inside the epoch
            trainer.run.session.latest.forget_validation(trainer.global_step)

    def _update_after(self, epoch: int) -> bool:
        due = epoch > self.latest_update_epoch and self.should_update(epoch_idx=epoch)
        if due:
            self._averaged.update(self._change)
            self.latest_update_epoch = epoch
        return due

    # -- evaluation ----------------------------------------------------------------------------------------------------

    def on_validation_start(self, trainer: Trainer, pl_module: TrainModule) -> None:
        if self._weights is not None:
            self._weights.swap_in()

    def on_validation_end(self, trainer: Trainer, pl_module: TrainModule) -> None:
        if self._weights is not None:
            self._weights.swap_out()

    def on_exception(self, trainer: Trainer, pl_module: TrainModule, exception: BaseException) -> None:
        # Sharded weights need the other processes, which may be anywhere.
        if self._weights is not None and not trainer.strategy.shards_state:
            self._weights.swap_out()
            if trainer.stage == "fit":  # the error may have come from another hook of a step that is done
                self.on_train_step_end(trainer, pl_module)

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        latest = {"latest_update_step": self.latest_update_step, "latest_update_epoch": self.latest_update_epoch}
        return {**super().state_dict(), **latest}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        kinds = {"latest_update_step": Integer(), "latest_update_epoch": Integer(-1)}
        require(state_dict, kinds, type(self).__name__)
        self.latest_update_step = state_dict["latest_update_step"]
        self.latest_update_epoch = state_dict["latest_update_epoch"]
        super().load_state_dict(state_dict)

    def on_load_checkpoint(self, trainer: Trainer, pl_module: TrainModule, checkpoint: dict[str, Any]) -> None:
        super().on_load_checkpoint(trainer, pl_module, checkpoint)
        entries = entries_of(checkpoint)
        continues = trainer.stage == "fit" and self.state_key in entries["callbacks"]
        if entries.get("average") is None and not continues and trainer.is_global_zero:
            log.warning("%s: the checkpoint holds no average, so its weights are used unchanged", type(self).__name__)


class EMAWeightAveraging(WeightAveraging):
    """Average the weights exponentially: after each update `average = decay * average + (1 - decay) * weights`.

    Args:
        device, use_buffers: see `WeightAveraging`.
        decay: the fraction of the average that an update keeps, from 0 to 1.
        update_every_n_steps: steps from one update to the next.
        update_starting_at_step: the first step, counted from 0, after which the average is updated. Default: 0.
        update_starting_at_epoch: also update the average at the end of each epoch from this one, counted from 0.
            Default: never.
    """

    agree_on = ("use_buffers", "decay", "update_every_n_steps", "update_starting_at_step", "update_starting_at_epoch")

    def __init__(
        self,
        device: torch.device | str | int | None = None,
        use_buffers: bool = True,
        decay: Annotated[float, Limit("from", 0), Limit("up to", 1)] = 0.999,
        update_every_n_steps: PositiveInt = 1,
        update_starting_at_step: NonNegativeInt | None = None,
        update_starting_at_epoch: NonNegativeInt | None = None,
    ) -> None:
        super().__init__(device, use_buffers)
        self.decay = decay
        self.update_every_n_steps = update_every_n_steps
        self.update_starting_at_step = update_starting_at_step
        self.update_starting_at_epoch = update_starting_at_epoch
        self._change = exponential(decay)

    def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
        if step_idx is not None:
            return step_idx >= (self.update_starting_at_step or 0) and step_idx % self.update_every_n_steps == 0
        begins = self.update_starting_at_epoch
        return epoch_idx is not None and begins is not None and epoch_idx >= begins


def as_device(device: torch.device | str | int | None) -> torch.device | None:
    """Return the device of an argument, and None for None.

    Raises:
        ConfigError: torch knows no such device.
    """
    try:
        return None if device is None else torch.device(device)
    except (RuntimeError, TypeError, ValueError, OverflowError) as error:
        words = str(error).splitlines()[0]
        raise ConfigError(f"device={shown(device)}: give 'cpu', 'cuda' or 'cuda:1' ({words}).") from None
