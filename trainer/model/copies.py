"""Copies of modules for trials: `copy.deepcopy`, and the attributes of parameters, which it drops."""

from __future__ import annotations

import copy
from typing import Any, TypeVar

from torch import nn

Copied = TypeVar("Copied")


def deepcopy_with_attributes(value: Copied, memo: dict[int, Any]) -> Copied:
    """Return a deep copy of a module or another object; parameters keep attributes that optimizers are made by.

    Functions are shared with the original, and hooks of parameters are left out, as by `copy.deepcopy`.

    Args:
        memo: of `copy.deepcopy`. Parameters that stand for themselves there are left unchanged.
    """
    copied = copy.deepcopy(value, memo)
    for parameter in value.parameters() if isinstance(value, nn.Module) else ():
        vars(memo[id(parameter)]).update(copy.deepcopy(vars(parameter), memo))
    return copied
