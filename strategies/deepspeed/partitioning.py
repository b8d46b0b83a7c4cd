"""Modules in DeepSpeed's hands: its import, what its engine calls, and parameters that are divided among processes."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from trainer.checkpoint.shards import EMPTY_SLICE, FlatSlice, Loadable, Shard, read_slice
from trainer.errors import MissingPackageError
from trainer.model.init_device import InitDevice, initial_values, named_tensors

RENAMED_BY_TORCH = r"`torch\.distributed\.(all_gather_into_tensor|reduce_scatter_tensor)` is deprecated"
"""Collectives that DeepSpeed calls by the names they had before torch 2.13."""

LEFT_IN_MODULES = (
    *("_external_params", "_original_parameters", "applied_pre_backward_ref_cnt", "ds_external_parameters"),
    *("ds_grads_remaining", "ds_id", "ds_inflight_param_registry", "ds_recompute_parameters", "post_bwd_fn"),
    *("pre_bwd_fn",),
)
"""Attributes that an engine of stage 3 leaves behind; with them the next one would call the one that is gone."""


def import_deepspeed(device_type: str) -> Any:
    """The package, for this kind of device, without what it says and warns of by itself.

    Raises:
        MissingPackageError: it is not installed.
    """
    if find_spec("deepspeed") is None:
        raise MissingPackageError("deepspeed", "deepspeed", "strategy 'deepspeed'")
    if device_type == "cpu" or not torch.accelerator.is_available():  # a dry run for GPUs on a machine without
        os.environ["DS_ACCELERATOR"] = "cpu"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import deepspeed
        from deepspeed.ops import __compatible_ops__ as operators
    if device_type == "cpu":
        # It would be compiled, for minutes, to send through shared memory what gloo sends too.
        operators["deepspeed_shm_comm"] = False
    warnings.filterwarnings("ignore", RENAMED_BY_TORCH, FutureWarning)
    return deepspeed


# -- stage 3 -----------------------------------------------------------------------------------------------------------


def is_zero3_partitioned(parameter: torch.Tensor) -> bool:
    """Whether the parameter holds nothing itself, and this process a part of it, in `ds_tensor`."""
    return hasattr(parameter, "ds_tensor")


def divided(module: nn.Module) -> list[Any]:
    """The divided parameters of a module."""
    return [parameter for parameter in module.parameters() if is_zero3_partitioned(parameter)]


def divided_extent(parameter: Any) -> FlatSlice:
    """The elements of a divided parameter in its `ds_tensor`, which may have more at its end, without meaning."""
    ours = parameter.ds_tensor.ds_numel
    start = ours * dist.get_rank(parameter.ds_process_group)
    length = max(0, min(ours, parameter.ds_numel - start))
    return FlatSlice(start, length) if length else EMPTY_SLICE


def divided_shard(parameter: Any) -> Shard:
    """This process's part of a divided parameter, in float32."""
    extent = divided_extent(parameter)
    return Shard(parameter.ds_tensor.detach()[: extent.length].float(), tuple(parameter.ds_shape), extent)


def load_divided(parameter: Any, value: Loadable) -> None:
    """Set this process's part of a divided parameter from a whole tensor, of which only that part is read."""
    extent = divided_extent(parameter)
    with torch.no_grad():
        parameter.ds_tensor[: extent.length].copy_(read_slice(value, extent))


def cast_parameters(module: nn.Module, dtype: torch.dtype) -> None:
    """Give floating parameters another dtype, divided ones too; but not those of double precision."""
    tensors = [*module.parameters(), *(parameter.ds_tensor for parameter in divided(module))]
    for tensor in tensors:
        if tensor.is_floating_point() and tensor.dtype is not torch.float64:
            tensor.data = tensor.data.to(dtype)


def expose_shapes(module: nn.Module) -> None:
    """Let divided parameters have their shape, without memory: `configure_optimizers` may look at `p.ndim`."""
    for parameter in divided(module):
        parameter.data = parameter.data.new_empty(1).expand(parameter.ds_shape)


def restore_empty(module: nn.Module) -> None:
    """Undo `expose_shapes`: DeepSpeed expects divided parameters to be empty."""
    for parameter in divided(module):
        parameter.data = parameter.data.new_empty(0)


def partition_module(deepspeed: Any, config: Mapping[str, Any], module: nn.Module, init_device: InitDevice) -> None:
    """Partition the parameters, one after the other, with rank 0's values. Collective.

    DeepSpeed's own context around the construction partitions a layer as soon as it is built, and an outer layer that
    initializes it again then changes nothing.
    """
    values = initial_values(module, init_device)
    partition = deepspeed.zero.Init(config_dict_or_path=dict(config))
    tensors, owners = named_tensors(module), list(module.modules())
    for name, value in values:
        tensor = tensors[name]
        if not tensor.is_meta:
            tensor.data.copy_(value)
        else:
            tensors[name] = nn.Parameter(value, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else value
            for owner in owners:
                for key, held in [*owner._parameters.items(), *owner._buffers.items()]:
                    if held is tensor:
                        setattr(owner, key, tensors[name])
        if isinstance(tensor, nn.Parameter):
            partition._convert_to_zero_parameters([tensors[name]])
    partition._convert_to_zero_parameters(module.parameters())


def in_full_precision(config: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration without the sections that have weights or computations in fewer bits."""
    return {key: value for key, value in config.items() if key not in ("bf16", "fp16", "torch_autocast", "data_types")}


def low_precision(config: Mapping[str, Any]) -> torch.dtype | None:
    """In what the engine computes, if not in float32."""
    for section, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
        if config.get(section, {}).get("enabled"):
            return dtype
    return None


def shape_of(tensor: Any) -> tuple[int, ...]:
    """The shape of a tensor, or of the whole of a divided parameter."""
    return tuple(tensor.ds_shape if is_zero3_partitioned(tensor) else tensor.shape)


def stop_gathering(steps: nn.Module) -> None:
    """After an error inside a forward of stage 3: looking at parameters shall not make DeepSpeed gather them any more.

    The other processes may be anywhere, so nobody would answer.
    """
    for module in steps.modules():
        if hasattr(module._parameters, "_in_forward"):
            module._parameters._in_forward = False


def destroy(engine: Any) -> None:
    """End an engine, without talking to the other processes."""
    stop_gathering(engine.module)
    engine.destroy()
    # Its destructor would do it again, whenever Python collects it, to what the next engine has made of the module.
    engine.destroy = lambda: None


def remove_engine_hooks(steps: nn.Module) -> None:
    """Take away what an engine of stage 3 has put into modules and into torch, after its `destroy`."""
    from deepspeed.runtime.zero import parameter_offload
    from deepspeed.runtime.zero.partition_parameters import InsertPostInitMethodToModuleSubClasses as Patches

    for module in steps.modules():
        module._parameters = dict(module._parameters)
        for name in LEFT_IN_MODULES:
            module.__dict__.pop(name, None)
    for parameter in divided(steps):
        vars(parameter).pop("_z3_optimizer", None)
    parameter_offload.FWD_MODULE_STACK[:] = [m for m in parameter_offload.FWD_MODULE_STACK if m is not steps]
    if hasattr(Patches, "linear_bk"):
        torch.nn.functional.linear = Patches.linear_bk


@contextmanager
def local_rank_env(local_rank: int) -> Iterator[None]:
    """DeepSpeed reads the local rank from the environment, where a process that was started alone has none."""
    given = os.environ.get("LOCAL_RANK")
    os.environ["LOCAL_RANK"] = str(local_rank)
    try:
        yield
    finally:
        if given is None:
            del os.environ["LOCAL_RANK"]
