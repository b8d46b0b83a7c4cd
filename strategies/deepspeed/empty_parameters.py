"""Refuse to compute with parameters of stage 3 where they are empty, because DeepSpeed has sharded them."""

from __future__ import annotations

from typing import Any

import torch

from trainer.errors import ConfigError
from trainer.model.parameter_access import ParameterAccess, copy_advice, from_user_code, within_deepcopy
from trainer.model.reachable import tensors_in

_ATTRIBUTES = ("shape", "device", "dtype", "grad", "grad_fn", "requires_grad", "is_leaf", "ndim", "layout", "is_cuda")
_ALLOWED = {getattr(torch.Tensor, name).__get__ for name in _ATTRIBUTES}
_ALLOWED |= {getattr(torch.Tensor, name).__set__ for name in ("requires_grad", "grad")}
_ALLOWED |= {getattr(torch.Tensor, name) for name in ("size", "dim", "numel", "nelement", "requires_grad_")}
_ALLOWED |= {getattr(torch.Tensor, name) for name in ("is_floating_point", "is_complex", "register_hook", "__hash__")}
_ALLOWED |= {torch.Tensor.__repr__, torch.Tensor.__format__, torch.Tensor.element_size, torch.Tensor.type}
"""Functions that may be called with an empty parameter: none of them reads values."""


_VIEWS = {torch.Tensor.detach, torch.Tensor.data.__get__}  # type: ignore[attr-defined]
"""Functions that return another tensor of the same memory. `state_dict` detaches, and its names may be wanted alone."""


class RefusingEmptyParameters(ParameterAccess):
    """While entered, an operation of user code with an empty parameter raises a ConfigError that names it.

    Without it a norm would be zero and a copy empty. Operations of DeepSpeed and of this package are let through.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        checked = [self._check(func, tensor) for tensor in tensors_in((args, kwargs))]
        result = func(*args, **(kwargs or {}))
        for parameter in checked:
            if parameter is not None:
                result.empty_parameter = parameter
        return result

    def _check(self, func: Any, tensor: Any) -> Any:
        """Refuse to compute with an empty parameter; return it if the function makes only another view."""
        parameter = tensor.__dict__.get("empty_parameter", tensor)
        status = parameter.__dict__.get("ds_status")
        if status is None or status is not type(status).NOT_AVAILABLE or func in _ALLOWED or not from_user_code():
            return None
        if func in _VIEWS:
            return parameter
        if within_deepcopy():
            raise ConfigError(copy_advice(self._strategy))
        name = next((name for name, one in self._module.named_parameters() if one is parameter), "a parameter")
        raise ConfigError(
            f"{name} is read or changed here, where it is empty: strategy {self._strategy!r} has sharded its "
            f"{list(parameter.ds_shape)} values. In a hook, on all processes: with trainer.full_parameters(module): "
            "... to read it, and full_parameters(module, write=True) to change it."
        )
