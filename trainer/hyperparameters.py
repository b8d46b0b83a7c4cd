"""Record the constructor arguments of a module as data, to store them and to build the module again."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping
from types import FrameType
from typing import Any

import numpy as np

from trainer.errors import CheckpointError, ConfigError, did_you_mean

SCALARS = frozenset({type(None), bool, int, float, str})
NUMPY_NUMBERS: dict[str, type[np.generic]] = {
    np.dtype(kind).name: kind
    for kind in (
        *(np.bool_, np.float64, np.float32, np.float16, np.int64, np.int32, np.int16, np.int8),
        *(np.uint64, np.uint32, np.uint16, np.uint8),
    )
}
"""numpy's numbers that are data, as Python's are, by the names of their dtypes."""


def is_scalar(value: Any) -> bool:
    """Whether a checkpoint and the hyperparameters can hold a value that is no container, with its exact type."""
    return type(value) in SCALARS or is_numpy_number(value)


def is_numpy_number(value: Any) -> bool:
    """Whether a value is one of `NUMPY_NUMBERS`."""
    return isinstance(value, np.generic) and value.dtype.name in NUMPY_NUMBERS


class Hyperparameters(dict[str, Any]):
    """A dict whose entries are also attributes: `hparams.lr` and `hparams["lr"]`."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"no hyperparameter {name!r}; there are: {', '.join(self) or 'none'}") from None

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = value


def collect_hyperparameters(
    frame: FrameType | None, owner: type, names: Collection[str], ignore: Collection[str], values: dict[str, Any]
) -> dict[str, Any]:
    """Return the hyperparameters for `save_hyperparameters(*names, ignore=..., **values)`, called in `frame`.

    Raises:
        ConfigError: `frame` does not run `__init__`, or a value is not data.
    """
    if frame is None or frame.f_code.co_name != "__init__":
        raise ConfigError("save_hyperparameters() must be called inside __init__: that is where the arguments are.")
    arguments = arguments_of(frame, owner)
    ignore = [ignore] if isinstance(ignore, str) else ignore
    for name in (*names, *ignore):
        if not isinstance(name, str):
            raise ConfigError(
                f"save_hyperparameters got a {type(name).__name__} where the name of an argument is expected. To keep "
                "other values, give them names: save_hyperparameters(lr=0.1), or save_hyperparameters(**values)."
            )
        if name not in arguments:
            raise ConfigError(f"{owner.__name__}.__init__ has no argument {name!r}.{did_you_mean(name, arguments)}")
    kept = {name: value for name, value in arguments.items() if name not in ignore and (not names or name in names)}
    kept.update(values)
    for name, value in kept.items():
        check_data(value, name)
    return kept


def arguments_of(frame: FrameType, owner: type) -> dict[str, Any]:
    """Return the arguments of the call of `owner.__init__` that runs in `frame`, with `**kwargs` merged in.

    Raises:
        ConfigError: the call has further positional arguments (*args), which have no names.
    """
    values = inspect.getargvalues(frame)
    arguments = {name: values.locals[name] for name in values.args[1:]}
    if values.varargs and values.locals[values.varargs]:
        raise ConfigError(
            f"{owner.__name__}.__init__ takes *{values.varargs}; hyperparameters need names. "
            "Give them as keywords, or pass them to save_hyperparameters(name=value)."
        )
    if values.keywords:
        arguments.update(values.locals[values.keywords])
    return arguments


def check_arguments(owner: type, stored: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    """Check that `owner` can be built with a checkpoint's hyperparameters and those of the caller.

    Raises:
        CheckpointError: an argument is missing or unknown.
    """
    try:
        inspect.signature(owner).bind(**{**stored, **given})
    except TypeError as error:
        raise CheckpointError(
            f"{owner.__name__} cannot be built with the checkpoint's hyperparameters ({', '.join(stored) or 'none'}): "
            f"{error}. Give missing ones by keyword, load_from_checkpoint(path, name=value); to have them stored, call "
            "self.save_hyperparameters() in __init__. Or the checkpoint is another module's."
        ) from None


def check_data(value: Any, where: str) -> None:
    """Check that a value is data: None, bool, int, float, str, a number of numpy, or a list, tuple or dict of data.

    The keys of a dict are strings.

    Raises:
        ConfigError: the value is not data; the message names its path inside the hyperparameters.
    """
    if is_scalar(value):
        return
    if isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            check_data(item, f"{where}[{index}]")
        return
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        for key, item in value.items():
            check_data(item, f"{where}[{key!r}]")
        return
    argument = where.split("[")[0]
    raise ConfigError(
        f"hyperparameter {where} is a {type(value).__name__}; a checkpoint stores data only "
        "(None, bool, int, float, str, lists and dicts of them). "
        f"Leave it out with save_hyperparameters(ignore=[{argument!r}]), or pass a name or number instead."
    )


def with_plain_numbers(value: Any) -> Any:
    """Return data with numpy's numbers replaced by Python's, for programs that know only those."""
    if is_numpy_number(value):
        return value.item()
    if isinstance(value, dict):
        return {key: with_plain_numbers(item) for key, item in value.items()}
    return [with_plain_numbers(item) for item in value] if isinstance(value, (list, tuple)) else value
