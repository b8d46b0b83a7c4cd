"""Small functions of Lightning's that packages built on it import."""

from __future__ import annotations

import gc
import inspect
import os
import pickle
from collections.abc import Callable
from types import FrameType
from typing import Any, Self

import torch
from torch.utils._pytree import tree_map_only


def get_init_args(frame: FrameType) -> dict[str, Any]:
    """Return the arguments of the constructor that runs in a frame, `**kwargs` merged in; without `*args`."""
    names, _, keywords, values = inspect.getargvalues(frame)
    more: dict[str, Any] = values.get(keywords or "", {})
    if "__class__" not in values or frame.f_code.co_name != "__init__":
        return {}
    return {name: values[name] for name in names[1:]} | more


class ModelSummary(str):
    """The table of a module's layers as text, and the numbers of its parameters."""

    def __new__(cls, model: torch.nn.Module, max_depth: int = 1) -> Self:
        """Return the table down to a depth; -1: all of it."""
        from trainer.callbacks.model_summary import summarize

        return super().__new__(cls, summarize(model, max_depth))

    def __init__(self, model: torch.nn.Module, max_depth: int = 1) -> None:
        self.total_parameters = sum(one.numel() for one in model.parameters())
        self.trainable_parameters = sum(one.numel() for one in model.parameters() if one.requires_grad)


def get_filesystem(path: Any, **options: Any) -> Any:
    """Return fsspec's file system of a path or URL."""
    from fsspec.core import url_to_fs

    return url_to_fs(str(path), **options)[0]


def load(path_or_url: Any, map_location: Any = None, weights_only: bool | None = None) -> Any:
    """Read a file that `torch.save` has written, from a path, a URL or an open file; by default only data and tensors.

    Raises:
        pickle.UnpicklingError: the file has something else, and `weights_only` is not False.
    """
    restricted = weights_only is not False
    if not isinstance(path_or_url, (str, os.PathLike)):
        return torch.load(path_or_url, map_location=map_location, weights_only=restricted)
    with get_filesystem(path_or_url).open(str(path_or_url), "rb") as file:
        return torch.load(file, map_location=map_location, weights_only=restricted)


def apply_to_collection(data: Any, dtype: Any, function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Return data with `function` applied to what is of the class `dtype`, at any depth."""
    return tree_map_only(dtype, lambda one: function(one, *args, **options), data)


def is_picklable(obj: object) -> bool:
    """Whether an object can be pickled."""
    try:
        pickle.dumps(obj)
    except (pickle.PickleError, AttributeError, RuntimeError, TypeError):
        return False
    return True


def is_oom_error(exception: BaseException) -> bool:
    """Whether an error says that memory was not enough, on a device or the CPU."""
    words = ("out of memory", "cuDNN error: CUDNN_STATUS_NOT_SUPPORTED.", "can't allocate memory")
    return isinstance(exception, RuntimeError) and any(one in str(exception) for one in words)


def garbage_collection_cuda() -> None:
    """Free memory of Python's and CUDA's caches."""
    gc.collect()
    torch.cuda.empty_cache()


def suggested_max_num_workers(local_world_size: int) -> int:
    """Return a number of workers for the DataLoader of each process of a machine: the cores but one, divided."""
    return max(1, len(os.sched_getaffinity(0)) // local_world_size - 1)
