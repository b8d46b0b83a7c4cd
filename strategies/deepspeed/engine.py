"""Start DeepSpeed's engine with its optimizer and loss scale, and undo after its end what it left behind."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

RENAMED_BY_TORCH = r"`torch\.distributed\.(all_gather_into_tensor|reduce_scatter_tensor)` is deprecated"
"""Collectives that DeepSpeed calls by the names they had before torch 2.13."""

LEFT_IN_MODULES = (
    "_external_params",
    "_original_parameters",
    "applied_pre_backward_ref_cnt",
    "ds_external_parameters",
    "ds_grads_remaining",
    "ds_id",
    "ds_inflight_param_registry",
    "ds_recompute_parameters",
    "post_bwd_fn",
    "pre_bwd_fn",
)
"""Attributes that an engine of stage 3 leaves behind; with them the next one would call the one that is gone."""


def import_deepspeed(device_type: str) -> Any:
    """Import the package for this kind of device, without its own messages and warnings."""
    if device_type == "cpu" or not torch.accelerator.is_available():  # a dry run for GPUs on a machine without
        os.environ["DS_ACCELERATOR"] = "cpu"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import deepspeed
        from deepspeed.ops import __compatible_ops__ as operators
    if device_type == "cpu":
        # DeepSpeed would compile this operator for minutes; it only sends tensors through shared memory, as gloo does.
        operators["deepspeed_shm_comm"] = False
    warnings.filterwarnings("ignore", RENAMED_BY_TORCH, FutureWarning)
    return deepspeed


@contextmanager
def local_rank_env(local_rank: int) -> Iterator[None]:
    """Set LOCAL_RANK, which DeepSpeed reads, and a process that was started alone does not have."""
    given = os.environ.get("LOCAL_RANK")
    os.environ["LOCAL_RANK"] = str(local_rank)
    try:
        yield
    finally:
        if given is None:
            del os.environ["LOCAL_RANK"]


def in_full_precision(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration without the sections that have weights or computations in fewer bits."""
    return {key: value for key, value in config.items() if key not in ("bf16", "fp16", "torch_autocast", "data_types")}


def low_precision(config: Mapping[str, Any]) -> torch.dtype | None:
    """Return the low-precision dtype that the engine computes with; None: float32."""
    for section, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
        if config.get(section, {}).get("enabled"):
            return dtype
    return None


def cpu_adam_of(deepspeed: Any, optimizer: Optimizer) -> Optimizer:
    """Return DeepSpeed's CPUAdam for torch's Adam or AdamW; both have the same groups, so schedules reach it."""
    made: Optimizer = deepspeed.ops.adam.DeepSpeedCPUAdam(
        optimizer.param_groups, adamw_mode=bool(optimizer.defaults.get("decoupled_weight_decay", True))
    )
    # torch makes a new list of the same dicts.
    made.param_groups = optimizer.param_groups
    # Schedulers know the optimizer that they were made with, and warn if it has never been stepped.
    made.register_step_post_hook(lambda *_: setattr(optimizer, "_opt_called", True))
    return made


class LossScale:
    """DeepSpeed's dynamic loss scale, saved and restored like the scale of `torch.amp.GradScaler`."""

    def __init__(self, scaler: Any) -> None:
        self.scaler = scaler

    def state_dict(self) -> dict[str, Any]:
        """Return the state in the keys of `GradScaler.state_dict`."""
        scaler = self.scaler
        if not scaler.dynamic:
            return {}
        return {
            "scale": float(scaler.cur_scale),
            "growth_factor": float(scaler.scale_factor),
            "backoff_factor": 1.0 / float(scaler.scale_factor),
            "growth_interval": int(scaler.scale_window),
            "_growth_tracker": int((scaler.cur_iter - scaler.last_overflow_iter - 1) % scaler.scale_window),
            "hysteresis": int(scaler.cur_hysteresis),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load `state_dict` of this or of a `GradScaler`; how the scale changes from here on stays as configured."""
        scaler = self.scaler
        if not scaler.dynamic or not state:
            return
        scaler.cur_scale = float(state["scale"])
        scaler.last_overflow_iter = scaler.cur_iter - 1 - int(state["_growth_tracker"])
        scaler.cur_hysteresis = int(state.get("hysteresis", scaler.cur_hysteresis))


def stop_gathering(steps: nn.Module) -> None:
    """Keep DeepSpeed from gathering parameters that are looked up after an error inside a forward of stage 3.

    The other processes may be anywhere, so the collective would hang.
    """
    for module in steps.modules():
        if hasattr(module._parameters, "_in_forward"):
            module._parameters._in_forward = False


def keep_lists() -> Callable[[], None]:
    """Have the hooks of stage 3 put their tensors into a module's own list arguments, as they do with dicts.

    They call the module with copies, so that what it writes into a list would be lost. Returns a function that undoes
    it.
    """
    from deepspeed.runtime.zero import parameter_offload, utils

    apply = utils.apply_to_tensors_only

    def apply_within(function: Any, value: Any, warning_msg_fn: Any = None) -> Any:
        applied = apply(function, value, warning_msg_fn)
        if type(value) is not list:
            return applied
        value[:] = applied
        return value

    def put(function: Callable[..., Any]) -> None:
        for place in (utils, parameter_offload):
            place.apply_to_tensors_only = function

    put(apply_within)
    return partial(put, apply)


def hooks_of(engine: Any) -> list[RemovableHandle]:
    """Return the handles of stage 3's hooks, which gather the parameters of submodules."""
    offload = getattr(engine.optimizer, "parameter_offload", engine.optimizer)  # without an optimizer it is that itself
    return [*offload.forward_hooks, *offload.backward_hooks]


@contextmanager
def _without_foreign_state(optimizer: Any) -> Iterator[None]:
    """Hide what an optimizer keeps beside the states of parameters, which DeepSpeed takes for more of them."""
    state = getattr(getattr(optimizer, "optimizer", None), "state", {})
    hidden = {key: state.pop(key) for key in [*state] if not isinstance(state[key], dict)}
    try:
        yield
    finally:
        state.update(hidden)


def end_engine(engine: Any, stage: int) -> None:
    """End an engine, and undo everything that it did outside of itself. Talks to no other process.

    Undone at every stage: its hooks in the module and its buffers (`engine.destroy`, which would run a second time,
    on what the next engine has made of the module, when Python collects the engine).

    Undone after stage 3, where `engine.destroy` (0.19.8) leaves it:

    - `module._parameters` of every submodule is a dict that gathers what is looked up; it becomes a plain one;
    - attributes of submodules and parameters, which would have the next engine call this one (`LEFT_IN_MODULES`);
    - the stack of running modules, a global of DeepSpeed, holds the module after an error in its forward;
    - `torch.nn.functional.linear` is DeepSpeed's own;
    - caches of methods hold the engine and the module for good.

    Left by intent: the parameters stay partitioned (`keep_only_shards` gives them the master weights); the imported
    package with `DS_ACCELERATOR` and its filter of warnings; the process group, which `fit` and `test` share.
    """
    module = engine.module
    stop_gathering(module)
    with _without_foreign_state(engine.optimizer):
        engine.destroy()
    engine.destroy = lambda: None
    if stage < 3:
        return
    from deepspeed.runtime.zero import parameter_offload
    from deepspeed.runtime.zero.partition_parameters import InsertPostInitMethodToModuleSubClasses as Patches
    from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator

    for part in module.modules():
        part._parameters = dict(part._parameters)
        for name in LEFT_IN_MODULES:
            vars(part).pop(name, None)
    for parameter in module.parameters():
        vars(parameter).pop("_z3_optimizer", None)
    parameter_offload.FWD_MODULE_STACK[:] = [part for part in parameter_offload.FWD_MODULE_STACK if part is not module]
    if hasattr(Patches, "linear_bk"):
        torch.nn.functional.linear = Patches.linear_bk
    cells = (
        cell
        for one in vars(PartitionedParameterCoordinator).values()
        for cell in getattr(one, "__closure__", None) or ()
    )
    for cell in cells:
        if hasattr(cell.cell_contents, "cache_clear"):  # inside of its decorator for profilers
            cell.cell_contents.cache_clear()
