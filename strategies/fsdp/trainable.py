"""Share one `requires_grad` between a shard, its gathered parameter, and the parameter before the sharding."""

from __future__ import annotations

import copy
import weakref
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from trainer.errors import ConfigError
from trainer.model.unsupported import CHANGE_GRADIENTS

Places = dict[tuple[int, str], "weakref.ref[nn.Parameter]"]
"""Parameters by the `id` of their module and their name in it; they are not kept in memory."""


_FLAG: Any = torch.Tensor.requires_grad
_GRADIENT: Any = torch.Tensor.grad
_DATA: Any = torch.Tensor.data
FULL_GRADIENT = (
    "a sharded parameter was given a gradient by hand, of the full parameter and of this process alone. Leave it to "
    "loss.backward() or self.manual_backward, which reduce it, or use strategy 'ddp'."
)


class _OneFlag:
    """A tensor with one `requires_grad` for all tensors of its record; a copy, without a record, has its own flag."""

    __slots__ = ()

    @property
    def requires_grad(self) -> bool:
        record = vars(self).get("record")
        trains: bool = _FLAG.__get__(self if record is None else record.sharded_param)
        return trains

    @requires_grad.setter
    def requires_grad(self, trains: bool) -> None:
        _FLAG.__set__(self, trains)
        record = vars(self).get("record")
        if record is not None:
            _FLAG.__set__(record.sharded_param, trains)
            if was_gathered(record):
                _FLAG.__set__(record._unsharded_param, trains)

    def requires_grad_(self, requires_grad: bool = True) -> Any:
        self.requires_grad = requires_grad
        return self

    def detach(self) -> Any:
        # Of the same class, as `nn.Parameter(tensor)` demands, and with it `module.to(...)`.
        detached = super().detach()  # type: ignore[misc]
        detached.__class__ = type(self)
        return detached

    def _ordinary(self) -> Any:
        """Return the parameter as torch makes it, with the same memory, for copies and files."""
        return nn.Parameter(super().detach(), requires_grad=self.requires_grad)  # type: ignore[misc]

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return memo.setdefault(id(self), copy.deepcopy(self._ordinary(), memo))

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._ordinary().__reduce_ex__(protocol)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _with_gathered_inputs(func, types, args, kwargs)


class WatchedShard(_OneFlag, DTensor):
    """A sharded parameter that shares its `requires_grad` with the parameter gathered from it.

    FSDP2 copies the flag when it gathers, and what is in no block stays gathered for a full step. An optimizer, and
    lists made before that step, have the shards.
    """

    __slots__ = ()

    @staticmethod
    def __tensor_unflatten__(*args: Any) -> Any:
        # A compiled optimizer expects the class that it was traced with; torch's function makes a DTensor.
        made = DTensor.__tensor_unflatten__(*args)
        made.__class__ = WatchedShard
        return made

    def _stable_hash_for_caching(self) -> str:
        return f"watched {super()._stable_hash_for_caching()}"


def _dispatch_as_torchs(cls: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    """Compute with shards as with torch's own tensors: before 2.13 views had to be of the class of their source."""
    own = (WatchedShard, GatheredPart)
    watched: list[Any] = [(leaf, type(leaf)) for leaf in tree_leaves((args, kwargs)) if type(leaf) in own]
    for shard, _ in watched:
        shard.__class__ = DTensor
    try:
        kinds = tuple(DTensor if kind in own else kind for kind in types)
        return DTensor.__torch_dispatch__(func, kinds, args, kwargs or {})
    finally:
        for shard, kind in watched:
            shard.__class__ = kind


class FormerParameter(_OneFlag, nn.Parameter):
    """A parameter that user code has kept from before the sharding; it shares its `requires_grad` with the shard."""


class _OneGradient:
    """A parameter that a step uses again after a backward, as what is in no block of a manual optimization.

    Outside of a backward of the step its `grad` is the shard's, which the optimizer has, or the full gradient that
    waits for its reduction.
    """

    __slots__ = ()

    @property
    def grad(self) -> torch.Tensor | None:
        record = vars(self)["record"]
        own: torch.Tensor | None = own_gradient(record)
        return own if own is not None or record.in_backward() else record.sharded_param.grad

    @grad.setter
    def grad(self, gradient: torch.Tensor | None) -> None:
        record = vars(self)["record"]
        if record.in_backward():
            _GRADIENT.__set__(self, gradient)
            return
        waiting = own_gradient(record) is not None
        if gradient is None or (waiting and not isinstance(gradient, DTensor)):
            _GRADIENT.__set__(self, gradient)
        if gradient is None:
            record.unsharded_accumulated_grad = None
        if not waiting or gradient is None:
            record.sharded_param.grad = gradient

    @property
    def data(self) -> torch.Tensor:
        # A change of `data` counts as one, and is refused when the step ends, which would lose it.
        values: torch.Tensor = self.detach()  # type: ignore[attr-defined]
        return values

    @data.setter
    def data(self, values: torch.Tensor) -> None:
        _DATA.__set__(self, values)


class GatheredParameter(_OneGradient, nn.Parameter):
    """A full parameter."""


class GatheredPart(_OneGradient, DTensor):
    """This process's part of a parameter that is split by tensor parallelism."""

    __slots__ = ()


if torch.torch_version.TorchVersion(torch.__version__) < "2.13":
    for one in (WatchedShard, GatheredPart):
        one.__torch_dispatch__ = classmethod(_dispatch_as_torchs)  # type: ignore[assignment]


def was_gathered(record: Any) -> bool:
    """Whether one of FSDP2's records has a full parameter, which is made in the first forward."""
    return "_unsharded_param" in vars(record)


def own_gradient(record: Any) -> torch.Tensor | None:
    """Return the gradient that waits at a gathered parameter."""
    full: torch.Tensor | None = _GRADIENT.__get__(record._unsharded_param)
    return full


def share_gradients(records: list[Any]) -> None:
    """Have parameters that stay gathered in a step show the gradients of their shards outside of a backward."""
    for record in records:
        record.init_unsharded_param = partial(_init_gathered, record)
        if was_gathered(record):
            _init_gathered(record)


def _init_gathered(record: Any) -> None:
    type(record).init_unsharded_param(record)
    full = record._unsharded_param
    if type(full) in _GATHERED:
        full.__class__ = _GATHERED[type(full)]
        full.record = record


_GATHERED: dict[Any, Any] = {nn.Parameter: GatheredParameter, DTensor: GatheredPart}


def _with_gathered_inputs(func: Any, types: Any, args: Any, kwargs: Any) -> Any:
    """Call a function of torch; `grad` and `backward` of `torch.autograd` take gathered parameters for their shards.

    A unit's parameters are shards again when its forward has ended, and no graph has these.

    Raises:
        ConfigError: a hook is set on a shard, whose gradient does not come from autograd; or a full gradient.
    """
    if func is torch.Tensor.register_hook:
        raise ConfigError(f"register_hook on a parameter that is sharded has no effect. {CHANGE_GRADIENTS}")
    if func == _GRADIENT.__set__ and not isinstance(args[1], (DTensor, type(None))):
        raise ConfigError(FULL_GRADIENT)
    if func is torch.autograd.grad:
        args = args[0], [*map(_gathered, args[1])]
    if func is torch.autograd.backward:
        kwargs = {**kwargs, "inputs": [*map(_gathered, kwargs["inputs"])]}
    return torch._C._disabled_torch_function_impl(func, types, args, kwargs or {})


def _gathered(tensor: torch.Tensor) -> torch.Tensor:
    """Return the full parameter in place of a shard that has been gathered, and any other tensor unchanged."""
    record = vars(tensor).get("record")
    if record is None or not was_gathered(record):
        return tensor
    full: torch.Tensor = record._unsharded_param
    return full


def places_of(record: Any) -> list[tuple[nn.Module, str]]:
    """Return the modules that hold the parameter of one of FSDP2's records, each with its name there."""
    place = record._module_info
    shared = zip(place.shared_modules, place.shared_param_names, strict=True)
    return [(place.module, place.param_name), *shared]


def former_parameters(module: nn.Module) -> Places:
    """Return the parameters of a module that is about to be sharded."""
    return {
        (id(owner), name): weakref.ref(parameter)
        for owner in module.modules()
        for name, parameter in owner.named_parameters(recurse=False)
    }


def share_flags(records: list[Any], formers: Places) -> None:
    """Tie the flags of what FSDP2's records have, and of the parameters before the sharding that are still alive."""
    for record in records:
        place = record._module_info
        _watch(record.sharded_param, record)
        record.to_sharded_post_forward = partial(_shard_after_forward, record)
        former = formers.get((id(place.module), place.param_name), lambda: None)()
        if type(former) is nn.Parameter:
            former.__class__ = FormerParameter
            former.record = record  # type: ignore[attr-defined]


def _watch(shard: Any, record: Any) -> None:
    if type(shard) is DTensor:
        shard.__class__ = WatchedShard
    if type(shard) is WatchedShard:
        shard.record = record  # type: ignore[attr-defined]


def _shard_after_forward(record: Any) -> None:
    """Shard over fewer processes, as `reshard_after_forward=N` asks."""
    type(record).to_sharded_post_forward(record)
    _watch(record._sharded_post_forward_param, record)


def adopt_flags(records: list[Any]) -> None:
    """Give shards the flags that `module.requires_grad_()` has set in the parameters gathered from them."""
    for record in records:
        full, place = vars(record).get("_unsharded_param"), record._module_info
        if full is None or place.module._parameters.get(place.param_name) is not full:
            continue
        if full.requires_grad != record.sharded_param.requires_grad:
            record.sharded_param.requires_grad_(full.requires_grad)
