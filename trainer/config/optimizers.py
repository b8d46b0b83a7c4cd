"""Give a module the optimizer and the learning-rate scheduler of a configuration."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from trainer.config.read import SCHEDULER_OPTIONS
from trainer.config.specs import ClassSpec, instantiate
from trainer.module import TrainModule


def with_optimizer(module: ClassSpec, optimizer: ClassSpec | None, scheduler: ClassSpec | None) -> ClassSpec:
    """Return the module's spec; with an optimizer, the module that it builds has a `configure_optimizers`."""
    return module if optimizer is None else replace(module, complete=partial(_complete, optimizer, scheduler))


def _complete(optimizer: ClassSpec, scheduler: ClassSpec | None, module: TrainModule, **provided: Any) -> None:
    configure = partial(configured_optimizers, module, optimizer, scheduler, **provided)
    module.configure_optimizers = configure  # type: ignore[method-assign]


def configured_optimizers(
    module: TrainModule, optimizer: ClassSpec, scheduler: ClassSpec | None, **provided: Any
) -> dict[str, Any]:
    """Return what `configure_optimizers` would: the optimizer of all parameters that are trained, and its scheduler.

    Args:
        provided: as in `ClassSpec.build`.
    """
    made = optimizer.build(params=[one for one in module.parameters() if one.requires_grad], **provided)
    if scheduler is None:
        return {"optimizer": made}
    own = {name: value for name, value in scheduler.arguments.items() if name not in SCHEDULER_OPTIONS}
    options = {name: value for name, value in scheduler.arguments.items() if name in SCHEDULER_OPTIONS}
    made_scheduler = replace(scheduler, arguments=own).build(optimizer=made, **provided)
    return {"optimizer": made, "lr_scheduler": {"scheduler": made_scheduler, **instantiate(options, **provided)}}
