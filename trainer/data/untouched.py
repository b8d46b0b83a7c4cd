"""untouched: read a loader without changing it."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import nn

from trainer.data.loader import has_state
from trainer.data.sampler_state import own_generators
from trainer.data.sharded_loader import is_plain
from trainer.errors import ConfigError
from trainer.model.copies import deepcopy_with_functions
from trainer.model.reachable import walk
from trainer.seed import isolated_rng

_LARGE = 2**26
"""Bytes of a tensor or array; copies of a loader share larger ones with the original."""
_DEEPEST = 4
"""Levels of objects in a loader that are searched for such tensors."""
_NOT_SEARCHED = (nn.Module, type, ModuleType)


@contextmanager
def untouched(loader: Any, memo: dict[int, Any], is_new: bool = False) -> Iterator[Any]:
    """Yield a loader with the batches of another one, which stays unchanged or is restored at the end.

    The yielded loader is a copy that shares large tensors and arrays. If the loader cannot be copied, for example
    because of open files, it is a DataLoader over the same map-style dataset, or the loader itself, if its `state_dict`
    can restore it.

    Args:
        loader: training data as `fit` takes them.
        memo: of `copy.deepcopy`: copies of the objects that the loader shares with others.
        is_new: the loader was made for this purpose, so that it may be used up.

    Raises:
        ConfigError: the loader can neither be copied nor put back.
    """
    try:
        arrays = walk({"": loader}, _DEEPEST, {}, _NOT_SEARCHED, (torch.Tensor, np.ndarray))
        shared = {id(one): one for _, one in arrays if one.nbytes >= _LARGE}
        copied = deepcopy_with_functions(loader, shared | memo)
    except Exception as error:
        with ExitStack() as cleanup:
            yield _without_a_copy(loader, is_new, error, cleanup)
        return
    with isolated_rng(generators=own_generators(loader, of_data=True)):  # functions share theirs with the copy
        yield copied


def _without_a_copy(loader: Any, is_new: bool, error: Exception, cleanup: ExitStack) -> Any:
    if is_plain(loader):
        generators = own_generators(loader, loader.sampler, loader.batch_sampler)
        cleanup.enter_context(isolated_rng(generators=generators))
        other = copy.copy(loader)
        other._iterator = None  # of workers that stay with the original
        return other
    if has_state(loader):
        cleanup.callback(loader.load_state_dict, copy.deepcopy(loader.state_dict()))
        return loader
    if is_new:
        return loader
    raise ConfigError(
        f"a search would use up the data, a {type(loader).__name__} that cannot be copied ({error}): give the search "
        "separate data, or a loader with state_dict and load_state_dict."
    ) from error
