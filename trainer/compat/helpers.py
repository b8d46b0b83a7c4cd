"""Small functions and classes of Lightning's that packages built on it import."""

from __future__ import annotations

import gc
import inspect
import math
import os
import pickle
import warnings
from argparse import Namespace
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from types import FrameType
from typing import Any, Self

import torch
from torch import nn
from torch.utils._pytree import tree_map_only
from torch.utils.flop_counter import FlopCounterMode

from trainer.callbacks.model_summary import summarize
from trainer.compat.finder import named

# -- modules, functions and constructors -------------------------------------------------------------------------------


def module_available(name: str) -> bool:
    """Whether a module is installed."""
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:  # the package that it is in
        return False


def instantiate_class(args: Any, init: dict[str, Any]) -> Any:
    """Return an object of a configuration's `class_path` and `init_args`, with further arguments before these."""
    home, _, name = init["class_path"].rpartition(".")
    first = args if isinstance(args, tuple) else (args,)
    return named(f"{home}:{name}")(*first, **init.get("init_args", {}))


def is_param_in_hook_signature(
    hook_fx: Callable[..., Any], param: str, explicit: bool = False, min_args: int | None = None
) -> bool:
    """Whether a method takes an argument: by its name; in `*args`, unless `explicit`; or as one of `min_args`."""
    found = inspect.getfullargspec(getattr(hook_fx, "__wrapped__", hook_fx))
    names = found.args[1:]
    in_args = found.varargs is not None and not explicit
    return param in names or in_args or (min_args is not None and len(names) >= min_args)


def get_init_args(frame: FrameType) -> dict[str, Any]:
    """Return the arguments of the constructor that runs in a frame, with those of `**kwargs`, without `*args`."""
    names, _, keywords, values = inspect.getargvalues(frame)
    more: dict[str, Any] = values.get(keywords or "", {})
    if "__class__" not in values or frame.f_code.co_name != "__init__":
        return {}
    return {name: values[name] for name in names[1:]} | more


# -- files and collections ---------------------------------------------------------------------------------------------


def get_filesystem(path: Any, **options: Any) -> Any:
    """Return fsspec's file system of a path or URL."""
    from fsspec.core import url_to_fs

    return url_to_fs(str(path), **options)[0]


def is_local_file_protocol(path: Any) -> bool:
    """Whether a path or URL leads to the local file system."""
    from fsspec.utils import get_protocol

    return bool(get_protocol(str(path)) == "file")


def load(path_or_url: Any, map_location: Any = None, weights_only: bool | None = None) -> Any:
    """Return the content of a file that `torch.save` has written, given by its path or URL, or open.

    Raises:
        pickle.UnpicklingError: it is more than data and tensors, and `weights_only` is not False.
    """
    restricted = weights_only is not False
    if not isinstance(path_or_url, (str, os.PathLike)):
        return torch.load(path_or_url, map_location=map_location, weights_only=restricted)
    with get_filesystem(path_or_url).open(str(path_or_url), "rb") as file:
        return torch.load(file, map_location=map_location, weights_only=restricted)


def apply_to_collection(data: Any, dtype: Any, function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Return data in which all objects of the class `dtype`, at any depth, are replaced by what `function` returns."""
    return tree_map_only(dtype, lambda one: function(one, *args, **options), data)


def is_picklable(obj: object) -> bool:
    """Whether an object can be pickled."""
    try:
        pickle.dumps(obj)
    except (pickle.PickleError, AttributeError, RuntimeError, TypeError):
        return False
    return True


# -- memory and workers ------------------------------------------------------------------------------------------------


def is_oom_error(exception: BaseException) -> bool:
    """Whether an error says that a device or the CPU ran out of memory."""
    words = ("out of memory", "cuDNN error: CUDNN_STATUS_NOT_SUPPORTED.", "can't allocate memory")
    return isinstance(exception, RuntimeError) and any(one in str(exception) for one in words)


def garbage_collection_cuda() -> None:
    """Free the memory of unused objects and of CUDA's cache."""
    gc.collect()
    torch.cuda.empty_cache()


def suggested_max_num_workers(local_world_size: int) -> int:
    """Return how many workers the DataLoader of each process may have: with the process itself, its share of cores."""
    return max(1, len(os.sched_getaffinity(0)) // local_world_size - 1)


# -- loggers -----------------------------------------------------------------------------------------------------------


def add_prefix(metrics: Mapping[str, Any], prefix: str, separator: str) -> Mapping[str, Any]:
    """Return values with a prefix before their names."""
    return {f"{prefix}{separator}{name}": value for name, value in metrics.items()} if prefix else metrics


def convert_params(params: dict[str, Any] | Namespace | None) -> dict[str, Any]:
    """Return hyperparameters as a dict."""
    return vars(params) if isinstance(params, Namespace) else params or {}


def sanitize_callable_params(params: dict[str, Any]) -> dict[str, Any]:
    """Return hyperparameters with functions replaced by what they return, or else their names, as classes are."""
    return {name: _called(value) if callable(value) else value for name, value in params.items()}


def _called(value: Any) -> Any:
    if inspect.isclass(value):
        return value.__name__
    try:
        found = value()
    except Exception:
        return getattr(value, "__name__", None)
    return getattr(value, "__name__", None) if callable(found) else found


def scan_checkpoints(callback: Any, logged_model_time: dict[str, float]) -> list[tuple[float, str, Any, str]]:
    """Return time, path, score and tag of a ModelCheckpoint's files that are newer than when they were logged."""
    found = {callback.last_model_path: (callback.current_score, "latest")}
    found[callback.best_model_path] = (callback.best_model_score, "best")
    found |= {path: (score, "best_k") for path, score in callback.best_k_models.items()}
    files = [(Path(path).stat().st_mtime, path, *row) for path, row in found.items() if Path(path).is_file()]
    return [row for row in sorted(files) if logged_model_time.get(row[1], -math.inf) < row[0]]


# -- what is measured of a module --------------------------------------------------------------------------------------


def measure_flops(
    model: nn.Module, forward_fn: Callable[[], Any], loss_fn: Callable[[Any], torch.Tensor] | None = None
) -> int:
    """Return the floating point operations of a forward pass; with a loss, also of its backward pass."""
    with FlopCounterMode(display=False) as counter:
        output = forward_fn()
        if loss_fn is not None:
            loss_fn(output).backward()
    return int(counter.get_total_flops())


class ModelSummary(str):
    """The table of a module's layers as text, with these layers and the numbers of its parameters."""

    def __new__(cls, model: nn.Module, max_depth: int = 1) -> Self:
        """Return the table down to a depth; -1: all of it."""
        return super().__new__(cls, summarize(model, max_depth))

    def __init__(self, model: nn.Module, max_depth: int = 1) -> None:
        every, outermost = [*model.named_modules()][1:], [*model.named_children()]
        self.named_modules = {0: [], 1: outermost}.get(max_depth, every)
        self.total_parameters = sum(one.numel() for one in model.parameters())
        self.trainable_parameters = sum(one.numel() for one in model.parameters() if one.requires_grad)


# -- warnings and registries -------------------------------------------------------------------------------------------


class PossibleUserWarning(UserWarning):
    """A warning that may be a false alarm: packages silence it. There is none here."""


def disable_possible_user_warnings(module: str = "") -> None:
    """Silence such warnings of modules whose names match a pattern."""
    warnings.filterwarnings("ignore", module=module, category=PossibleUserWarning)


class Registry(dict[str, Any]):
    """Takes what packages register for Lightning to find. Nothing here looks for it."""

    def register(self, name: str, target: Any = None, *args: Any, **options: Any) -> Any:
        """Register a class; without one, return the decorator that does."""
        if target is None:
            return lambda decorated: self.setdefault(name, decorated)
        return self.setdefault(name, target)

    def available_strategies(self) -> list[str]:
        """Return the names that are registered."""
        return sorted(self)


ACCELERATORS = Registry()
STRATEGIES = Registry()
