"""BaseFinetuning and BackboneFinetuning: freeze a part of the module, and train it from an epoch on."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, ClassVar

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer

from trainer.arguments import NonNegativeInt, PositiveFloat
from trainer.callback import AddsGroups
from trainer.checkpoint.schema import NUMBER, Integer, require
from trainer.errors import ConfigError
from trainer.optimizers import parameters_of

if TYPE_CHECKING:
    from trainer.module import TrainModule
    from trainer.trainer import Trainer

log = logging.getLogger("trainer")

Modules = nn.Module | Iterable[Any]
"""A module, or modules, nested in any way."""


def multiplicative(epoch: int) -> float:
    """Return the growth factor of a backbone's learning rate for an epoch."""
    return 2.0


class BaseFinetuning(AddsGroups):
    """Base of callbacks that freeze parameters before training and unfreeze them at the start of an epoch.

    Override `freeze_before_training` and `finetune_function`. Give the optimizer the parameters that train at the
    start, `[p for p in self.parameters() if p.requires_grad]`; `unfreeze_and_add_param_group` adds the others later. A
    resumed run has the same groups and the same frozen parameters. Schedulers with a rate for each group, such as
    LambdaLR, leave the rates of added groups unchanged.

    Not supported with DeepSpeed, which flattens the parameters that train at the start.
    """

    agree_on: ClassVar[tuple[str, ...] | None] = ()

    def __init__(self) -> None:
        self._last_epoch = -1
        """The last epoch for which `finetune_function` was called."""
        self._module: TrainModule | None = None

    def freeze_before_training(self, pl_module: Any) -> None:
        """Freeze parameters; called before `configure_optimizers`."""
        raise ConfigError(f"{type(self).__name__}: define freeze_before_training(self, module).")

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Optimizer) -> None:
        """Unfreeze parameters, and add them to the optimizer; called at the start of each epoch for each optimizer."""
        raise ConfigError(f"{type(self).__name__}: define finetune_function(self, module, epoch, optimizer).")

    # -- for `freeze_before_training` and `finetune_function` ----------------------------------------------------------

    @staticmethod
    def flatten_modules(modules: Modules) -> list[nn.Module]:
        """Return the submodules without children, and those that hold parameters themselves."""
        if isinstance(modules, nn.ModuleDict):
            modules = modules.values()
        if isinstance(modules, Iterable):
            every: Iterable[nn.Module] = [one for inner in modules for one in BaseFinetuning.flatten_modules(inner)]
        else:
            every = modules.modules()
        return [one for one in every if not list(one.children()) or one._parameters]

    @staticmethod
    def filter_params(modules: Modules, train_bn: bool = True, requires_grad: bool = True) -> Iterator[nn.Parameter]:
        """Yield the parameters that require a gradient (or do not); leave out BatchNorms unless `train_bn`."""
        for one in BaseFinetuning.flatten_modules(modules):
            if train_bn or not isinstance(one, _BatchNorm):
                yield from (p for p in one.parameters(recurse=False) if p.requires_grad == requires_grad)

    @staticmethod
    def make_trainable(modules: Modules) -> None:
        """Unfreeze all parameters, and have BatchNorms update their statistics."""
        for one in BaseFinetuning.flatten_modules(modules):
            if isinstance(one, _BatchNorm):
                one.track_running_stats = True
            for parameter in one.parameters(recurse=False):
                parameter.requires_grad = True

    @staticmethod
    def freeze_module(module: nn.Module) -> None:
        """Freeze the parameters of a module itself, and its statistics if it is a BatchNorm."""
        if isinstance(module, _BatchNorm):
            module.track_running_stats = False
        for parameter in module.parameters(recurse=False):
            parameter.requires_grad = False

    @staticmethod
    def freeze(modules: Modules, train_bn: bool = True) -> None:
        """Freeze all parameters; with `train_bn` BatchNorms continue to train."""
        for one in BaseFinetuning.flatten_modules(modules):
            if train_bn and isinstance(one, _BatchNorm):
                BaseFinetuning.make_trainable(one)
            else:
                BaseFinetuning.freeze_module(one)

    @staticmethod
    def filter_on_optimizer(optimizer: Optimizer, params: Iterable[nn.Parameter]) -> list[nn.Parameter]:
        """Return the parameters that the optimizer does not have yet; a warning says if it has some."""
        known = set(map(id, parameters_of([optimizer])))
        every = list(params)
        new = [parameter for parameter in every if id(parameter) not in known]
        if len(new) < len(every):
            log.warning(
                "%d of %d parameters to unfreeze are in the optimizer already, and stay in their group: in "
                "configure_optimizers give it [p for p in self.parameters() if p.requires_grad]",
                len(every) - len(new),
                len(every),
            )
        return new

    @staticmethod
    def unfreeze_and_add_param_group(
        modules: Modules,
        optimizer: Optimizer,
        lr: float | None = None,
        initial_denom_lr: float = 10.0,
        train_bn: bool = True,
    ) -> None:
        """Unfreeze modules, and add their parameters to the optimizer as a group.

        Args:
            lr: the learning rate of the group. Default: the first group's rate divided by `initial_denom_lr`.
            train_bn: add the parameters of BatchNorms, too.
        """
        trained = set(map(id, BaseFinetuning.filter_params(modules, requires_grad=True)))
        trained &= set(map(id, parameters_of([optimizer])))
        BaseFinetuning.make_trainable(modules)
        rate = optimizer.param_groups[0]["lr"] / initial_denom_lr if lr is None else float(lr)
        parameters = BaseFinetuning.filter_params(modules, train_bn=train_bn, requires_grad=True)
        # BatchNorms may have trained all along, in another group, where they stay.
        new = BaseFinetuning.filter_on_optimizer(optimizer, [one for one in parameters if id(one) not in trained])
        if new:
            optimizer.add_param_group({"params": new, "lr": rate})

    # -- the run -------------------------------------------------------------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: TrainModule, stage: str) -> None:
        if stage == "fit":
            self._last_epoch, self._module = -1, pl_module
            self.freeze_before_training(pl_module)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: TrainModule) -> None:
        if trainer.current_epoch > self._last_epoch:  # else a resumed run continues inside the epoch
            self._last_epoch = trainer.current_epoch
            for optimizer in trainer.optimizers:
                self.finetune_function(pl_module, trainer.current_epoch, optimizer)
        for config in trainer.scheduler_configs:
            config.leave_new_groups()

    def state_dict(self) -> dict[str, Any]:
        return {} if self._module is None else {"epoch": self._last_epoch}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        require({"epoch": state_dict.get("epoch")}, {"epoch": Integer(-1)}, type(self).__name__)
        self._last_epoch = state_dict["epoch"]


class BackboneFinetuning(BaseFinetuning):
    """Freeze `module.backbone` until an epoch, then train it with a separate learning rate that grows to the others'.

    Args:
        unfreeze_backbone_at_epoch: the first epoch, counted from 0, that trains the backbone.
        lambda_func: function of an epoch's number plus one; returns the factor that multiplies the backbone's learning
            rate in each later epoch.
        backbone_initial_ratio_lr: the backbone's first learning rate, as a fraction of the first group's rate.
        backbone_initial_lr: the backbone's first learning rate. Default: given by the ratio.
        should_align: limit the backbone's learning rate to the first group's rate.
        initial_denom_lr: no effect.
        train_bn: add the parameters of BatchNorms to the optimizer, too.
        verbose: log the rates in each epoch.
        rounding: digits in those messages.
    """

    agree_on = (
        "unfreeze_backbone_at_epoch",
        "lambda_func",
        "backbone_initial_ratio_lr",
        "backbone_initial_lr",
        "should_align",
        "train_bn",
    )

    def __init__(
        self,
        unfreeze_backbone_at_epoch: NonNegativeInt = 10,
        lambda_func: Callable[[int], float] = multiplicative,
        backbone_initial_ratio_lr: PositiveFloat = 0.1,
        backbone_initial_lr: PositiveFloat | None = None,
        should_align: bool = True,
        initial_denom_lr: PositiveFloat = 10.0,
        train_bn: bool = True,
        verbose: bool = False,
        rounding: NonNegativeInt = 12,
    ) -> None:
        super().__init__()
        self.unfreeze_backbone_at_epoch = unfreeze_backbone_at_epoch
        self.lambda_func = lambda_func
        self.backbone_initial_ratio_lr = backbone_initial_ratio_lr
        self.backbone_initial_lr = backbone_initial_lr
        self.should_align = should_align
        self.initial_denom_lr = initial_denom_lr
        self.train_bn = train_bn
        self.verbose = verbose
        self.rounding = rounding
        self._rates: list[float] = []
        """The backbone's rate in each optimizer."""

    def setup(self, trainer: Trainer, pl_module: TrainModule, stage: str) -> None:
        if stage == "fit":
            self._rates = []
        super().setup(trainer, pl_module, stage)

    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.backbone)

    @property
    def previous_backbone_lr(self) -> float | None:
        """The backbone's rate, in the first optimizer; None before it trains."""
        return self._rates[0] if self._rates else None

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Optimizer) -> None:
        if epoch < self.unfreeze_backbone_at_epoch:
            return
        number = next(n for n, one in enumerate(pl_module.trainer.optimizers) if one is optimizer)
        current = optimizer.param_groups[0]["lr"]
        if number == len(self._rates):
            given = self.backbone_initial_lr
            self._rates.append(current * self.backbone_initial_ratio_lr if given is None else given)
            self.unfreeze_and_add_param_group(
                pl_module.backbone, optimizer, self._rates[number], train_bn=self.train_bn
            )
        else:
            rate = self.lambda_func(epoch + 1) * self._rates[number]
            self._rates[number] = min(rate, current) if self.should_align else rate
            backbone = set(map(id, pl_module.backbone.parameters()))
            for group in optimizer.param_groups:
                if backbone.issuperset(map(id, group["params"])):
                    group["lr"] = self._rates[number]
        if self.verbose:
            digits = self.rounding
            log.info("lr: %s, of the backbone: %s", round(current, digits), round(self._rates[number], digits))

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        return {**state, "backbone_lr": [*self._rates]} if state else state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        require(state_dict, {"epoch": Integer(-1), "backbone_lr": [NUMBER]}, "BackboneFinetuning")
        self._rates = [*state_dict["backbone_lr"]]
        super().load_state_dict(state_dict)
