"""OptionalMethods: the methods that the trainer calls; a module or data module defines the ones that it needs."""

from __future__ import annotations

import inspect
from collections.abc import Collection
from functools import partial, wraps
from typing import Any, ClassVar

from trainer.errors import ConfigError

METHODS = (
    "training_step",
    "validation_step",
    "test_step",
    "predict_step",
    "configure_optimizers",
    "configure_model",
    "configure_callbacks",
    "configure_gradient_clipping",
    "lr_scheduler_step",
    "optimizer_step",
    "optimizer_zero_grad",
    "backward",
    "num_items",
    "prepare_data",
    "transfer_batch_to_device",
    "train_dataloader",
    "val_dataloader",
    "test_dataloader",
    "predict_dataloader",
)
"""The methods that the trainer calls, apart from the hooks."""


STATE_AND_STAGES = ("setup", "teardown", "state_dict", "load_state_dict")


class OptionalMethods:
    """Base of `TrainModule` and `DataModule`, which have a default of each method.

    A method that is set to None, in a class or on an object, is not defined, as in Lightning: the default is called.
    """

    _base: ClassVar[type]
    """`TrainModule` or `DataModule`: the class with the defaults."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if OptionalMethods in cls.__bases__:
            cls._base = cls
        for name in vars(cls._base):
            if _is_called(name) and getattr(cls, name, False) is None:
                setattr(cls, name, vars(cls._base)[name])
        for name in ("training_step", "validation_step", "test_step", "predict_step"):
            step = vars(cls).get(name)
            if inspect.isfunction(step) and _takes_batch_only(step):
                setattr(cls, name, _with_batch_idx(step))

    def __setattr__(self, name: str, value: Any) -> None:
        if value is None and _is_called(name) and name in vars(self._base):
            value = partial(vars(self._base)[name], self)
        super().__setattr__(name, value)

    def overrides(self, name: str) -> bool:
        """Return True if the subclass (or this object) defines the method `name`, and not as None."""
        mine = vars(self).get(name, getattr(type(self), name, None))
        if isinstance(mine, partial):  # the default, if __setattr__ has put it there
            mine = mine.func
        return mine is not None and mine is not getattr(self._base, name, None)

    def overrides_any(self, names: Collection[str]) -> bool:
        """Return True if the subclass (or this object) defines one of these methods."""
        return any(map(self.overrides, names))


def no_loader(owner: object, method: str) -> ConfigError:
    """Return the error of a loader's method that is called and not defined."""
    return ConfigError(
        f"{type(owner).__name__} has no {method}: define it, and return a loader. Or give the loaders to the Trainer's "
        "fit, validate, test or predict."
    )


def _takes_batch_only(step: Any) -> bool:
    """Whether a step method is `step(self, batch)`, as Lightning allows."""
    parameters = [*inspect.signature(step).parameters.values()]
    return len(parameters) == 2 and all(one.kind is one.POSITIONAL_OR_KEYWORD for one in parameters)


def _with_batch_idx(step: Any) -> Any:
    """Return a step method that may be called with `batch_idx` and `dataloader_idx`, too."""

    @wraps(step)
    def call(self: Any, batch: Any, batch_idx: int = 0, dataloader_idx: int = 0) -> Any:
        return step(self, batch)

    call.__signature__ = inspect.signature(call, follow_wrapped=False)  # type: ignore[attr-defined]
    return call


def is_overridden(method_name: str, instance: Any, parent: type | None = None) -> bool:
    """Return True if an object's class overrides a method of its base class `parent`. Lightning's function."""
    if isinstance(instance, OptionalMethods) and parent is None:
        return instance.overrides(method_name)
    own = getattr(type(instance), method_name, None)
    first = getattr(super(type(instance), instance) if parent is None else parent, method_name, None)
    return own is not None and getattr(first, "__func__", first) is not own


def _is_called(name: str) -> bool:
    return name in METHODS or name in STATE_AND_STAGES or name.startswith("on_")
