"""Find what DeepSpeed's engine cannot do: on this machine, with this module, or with these optimizers."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from typing import Any

import torch
from torch.optim import Adam, AdamW, Optimizer

from trainer.checkpoint.optimizer_state import extra_of
from trainer.errors import first_of
from trainer.model.unsupported import unsupported
from trainer.module import TrainModule
from trainer.optimizers import optimizers_inside, with_modes
from trainer.precision import Precision, has_statistics, multiplies_buffers
from trainer.strategies.optimizer_trials import is_elementwise

NOT_TO_BE_TRIED = ("LBFGS", "SparseAdam")
"""Optimizers of torch that need full parameters, and more than a gradient, so that `is_elementwise` cannot try them."""


def engine_problems(name: str, stage: int, precision: Precision, device_type: str) -> list[str]:
    """Return why the engine cannot run at this stage, in this precision, on this kind of device; one sentence each."""
    problems = []
    if stage not in (1, 2, 3):
        problems.append(f"strategy {name!r}: stage={stage!r}; allowed are 1, 2 and 3. Instead of stage 0 use 'ddp'.")
    if device_type not in ("cpu", "cuda"):
        problems.append(f"strategy {name!r} runs on 'cuda' and 'cpu', not on {device_type!r}.")
    if precision.name in ("64-true", "16-true"):
        problems.append(
            f"precision {precision.name!r} is not one of DeepSpeed's: use '32-true', 'bf16-mixed', 'bf16-true' or "
            "'16-mixed'."
        )
    if precision.float8 is not None:
        problems.append(f"precision {precision.name!r} with DeepSpeed: use 'bf16-mixed', or strategy 'fsdp'.")
    if precision.loss_scaling and device_type == "cpu":
        problems.append(
            f"precision {precision.name!r} with DeepSpeed on the CPU: Type fp16 is not supported on your device. Use "
            "'bf16-mixed'."
        )
    return problems


def cpu_adam_problems(offload_optimizer: object) -> list[str]:
    """Return why DeepSpeed's CPUAdam cannot be used; one sentence each."""
    problems = []
    if not offload_optimizer:
        problems.append("cpu_adam=True has no effect without offload_optimizer: give offload_optimizer='cpu', too.")
    missing = [program for program in ("g++", "ninja") if shutil.which(program) is None]
    if missing:
        problems.append(
            f"cpu_adam=True: DeepSpeed compiles its CPUAdam, and {' and '.join(missing)} cannot be found. Install them "
            "(apt install g++, pip install ninja), or drop cpu_adam=True."
        )
    return problems


def module_problems(name: str, module: TrainModule, clip_by: str | None) -> list[str]:
    """Return why the engine cannot train the module, one sentence each.

    Args:
        clip_by: how gradients are clipped; None: they are not.
    """
    problems = []
    if not module.automatic_optimization:
        problems.append(
            f"strategy {name!r} cannot do manual optimization: DeepSpeed's engine steps by itself. Use automatic "
            "optimization, or strategy 'ddp' or 'fsdp'."
        )
    if module.overrides("configure_gradient_clipping"):
        problems.append(
            f"{type(module).__name__}.configure_gradient_clipping cannot be used: DeepSpeed's engine clips, by the "
            "norm gradient_clip_val of the start. Remove the method."
        )
    if clip_by == "value":
        problems.append(
            f"gradient_clip_algorithm='value': strategy {name!r} cannot, since DeepSpeed clips by the norm. Use "
            "'norm', or strategy 'fsdp'."
        )
    return problems


def unsupported_problems(name: str, stage: int, module: TrainModule) -> list[str]:
    """Return which layers and parameters the engine cannot train, one sentence for each kind."""
    sharding = ("empty", "script", "compiled") if stage == 3 else ()
    return unsupported(module, name, "scalar", "complex", "sparse", "quantized", *sharding)


def norm_problems(name: str, module: TrainModule, precision: Precision, device_type: str) -> list[str]:
    """Return why BatchNorms cannot compute: on CPUs torch needs their weights in the dtype of their statistics."""
    norms = [
        child_name for child_name, child in module.named_modules() if has_statistics(child) and child.weight is not None
    ]
    if not norms or device_type != "cpu" or torch.bfloat16 not in (precision.autocast, precision.weights):
        return []
    return [
        f"strategy {name!r} computes with weights in bfloat16, and on CPUs {', '.join(norms[:3])} cannot, as BatchNorm "
        "keeps its statistics in float32: use precision '32-true', strategy 'fsdp' or 'ddp', or GroupNorm."
    ]


def buffer_problems(name: str, module: TrainModule, precision: Precision) -> list[str]:
    """Return why layers that multiply weights with buffers cannot compute with weights in 16 bits."""
    layers = [child_name for child_name, child in module.named_modules() if multiplies_buffers(child)]
    if not layers or precision.autocast is None:
        return []
    low = str(precision.autocast).removeprefix("torch.")
    return [
        f"strategy {name!r} computes with weights in {low} with precision {precision.name!r}, and spectral norm "
        f"({first_of(layers)}) multiplies them with float32 vectors: use precision '32-true' or 'bf16-true', or "
        "strategy 'fsdp' or 'ddp'."
    ]


def optimizer_problems(optimizers: list[Optimizer], cpu_adam: bool) -> list[str]:
    """Return why the engine cannot train the module with these optimizers, one sentence each."""
    if len(optimizers) != 1:
        return [
            f"configure_optimizers gave {len(optimizers)} optimizers, and DeepSpeed's engine takes one: give several "
            "groups of parameters to one optimizer."
        ]
    optimizer = optimizers[0]
    kind = type(optimizer).__name__
    problems = []
    if kind in NOT_TO_BE_TRIED or not is_elementwise(optimizer):
        problems.append(
            f"{kind} needs full parameters, and DeepSpeed flattens the parameters and shards the flat buffer: use an "
            "optimizer that treats all elements alike, such as torch.optim.AdamW."
        )
    if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
        problems.append(
            f"register_step_pre_hook or register_step_post_hook of the {kind}: it would be given flat parts of the "
            "parameters. Use on_before_optimizer_step or on_train_batch_end, or strategy 'fsdp' or 'ddp'."
        )
    if kind == "Adagrad":
        problems.append(
            "DeepSpeed makes an Adagrad of its own instead of yours, which schedules do not reach: use "
            "torch.optim.AdamW or RMSprop."
        )
    if with_modes(optimizers):
        problems.append(
            f"{kind}.eval() exchanges the weights for averaged ones, and would reach DeepSpeed's master weights only, "
            "not the module's: use strategy 'fsdp' or 'ddp'."
        )
    if len(optimizers_inside(optimizer)) > 1 or extra_of(optimizer.state_dict()):
        problems.append(
            f"{kind} keeps more than the states of its parameters (another optimizer, or entries of its own in "
            "state_dict), and DeepSpeed puts flat parts in place of the parameters: use strategy 'fsdp' or 'ddp'."
        )
    for number, group in enumerate(optimizer.param_groups):
        if not any(parameter.requires_grad for parameter in group["params"]):
            problems.append(f"group {number} of the {kind} has no parameter that requires a gradient: drop it.")
    if cpu_adam and type(optimizer) not in (Adam, AdamW):
        problems.append(f"cpu_adam=True computes Adam and AdamW, and configure_optimizers gave {kind}.")
    elif cpu_adam and any(group["amsgrad"] or group["maximize"] for group in optimizer.param_groups):
        problems.append("cpu_adam=True has no amsgrad and no maximize: drop cpu_adam=True.")
    return problems


def flattening_problems(name: str, unfreezing: str | None, models: int) -> list[str]:
    """Return why the engine, which flattens the parameters that train at the start, cannot train others later.

    Args:
        unfreezing: the callback that unfreezes parameters during the run; None: there is none.
        models: the models that a loop of the user's own trains.
    """
    problems = []
    if unfreezing is not None:
        problems.append(
            f"{unfreezing} unfreezes parameters while training, and strategy {name!r} flattens those that train at "
            "the start: use 'ddp' or 'fsdp'. Or train all from the start, in a group whose lr is 0 until then."
        )
    if models > 1:
        problems.append(
            f"strategy {name!r} trains one model with one optimizer, and this is module number {models} that is set "
            "up: use 'ddp' or 'fsdp', or leave a module that is not trained out of setup and move it by "
            "module.to(engine.device)."
        )
    return problems


def check_build_tools(config: Mapping[str, Any], device_type: str) -> list[str]:
    """Return the compilers and libraries that offloading needs and this machine lacks, one sentence each."""
    zero = config.get("zero_optimization")
    sections = zero if isinstance(zero, Mapping) else {}
    devices = {name: part.get("device") for name, part in sections.items() if isinstance(part, Mapping)}
    problems = []
    nvme = [name for name in ("offload_optimizer", "offload_param") if devices.get(name) == "nvme"]
    if nvme:
        problems += _operator_problems("AsyncIOBuilder", f"{' and '.join(nvme)} to nvme", device_type)
    if config.get("zero_force_ds_cpu_optimizer") is True and devices.get("offload_optimizer") in ("cpu", "nvme"):
        problems += _operator_problems("CPUAdamBuilder", "zero_force_ds_cpu_optimizer", device_type)
    return problems


def _operator_problems(builder: str, setting: str, device_type: str) -> list[str]:
    """Return why DeepSpeed cannot compile one of its operators, where it is not compiled already."""
    from deepspeed.git_version_info import installed_ops
    from deepspeed.ops import op_builder

    operator = getattr(op_builder, builder)()
    if installed_ops.get(operator.name):
        return []
    compiler, missing = os.environ.get("CXX", "g++"), []
    if not shutil.which(compiler) and not shutil.which("c++"):
        missing.append(f"{compiler} (apt install g++, or set CXX)")
    if not shutil.which("ninja"):
        missing.append("ninja (pip install ninja, and have the environment's bin folder on the PATH)")
    if device_type == "cuda" and not shutil.which("nvcc") and "CUDA_HOME" not in os.environ:
        missing.append("nvcc (install the CUDA toolkit, or set CUDA_HOME)")
    if missing:
        return [f"{setting} has DeepSpeed compile its {operator.name}, which needs on the PATH: {', '.join(missing)}."]
    if operator.is_compatible(verbose=False):
        return []
    library = ": install libaio (Debian and Ubuntu: apt install libaio-dev)" if operator.name == "async_io" else ""
    return [
        f"{setting} needs DeepSpeed's {operator.name}, which cannot be compiled here{library}. Run ds_report to see."
    ]
