"""Find what DeepSpeed's engine cannot do: on this machine, with this module, or with these optimizers."""

from __future__ import annotations

import shutil

import torch
from torch.optim import Adam, AdamW, Optimizer

from trainer.checkpoint.optimizer_state import extra_of
from trainer.errors import first_of, problems_found
from trainer.model.unsupported import unsupported
from trainer.module import TrainModule
from trainer.optimizers import NoOptimizer, optimizers_inside, with_modes
from trainer.precision import Precision, has_statistics, multiplies_buffers
from trainer.strategies.optimizer_trials import is_elementwise
from trainer.strategy import StepOptions

PRECISIONS = ("32-true", "bf16-mixed", "bf16-true", "16-mixed")
NOT_TO_BE_TRIED = ("LBFGS", "SparseAdam")
"""Optimizers of torch that need full parameters, and more than a gradient, so that `is_elementwise` cannot try them."""


def engine_problems(name: str, stage: object, precision: Precision, device_type: str) -> list[str]:
    """Return why the engine cannot run at this stage, in this precision, on this kind of device; one sentence each."""
    return problems_found(
        (
            stage not in (1, 2, 3),
            f"strategy {name!r}: stage={stage!r}; allowed are 1, 2 and 3. Instead of stage 0 use 'ddp'.",
        ),
        (
            device_type not in ("cpu", "cuda"),
            f"strategy {name!r} runs on 'cuda' and 'cpu', not on {device_type!r}.",
        ),
        (
            precision.name not in PRECISIONS,
            f"precision {precision.name!r} is not one of DeepSpeed's: use {', '.join(PRECISIONS)}.",
        ),
        (
            precision.name == "16-mixed" and device_type == "cpu",
            "precision '16-mixed' with DeepSpeed does not run on CPUs. Use 'bf16-mixed'.",
        ),
    )


def cpu_adam_problems(offload_optimizer: object) -> list[str]:
    """Return why DeepSpeed's CPUAdam cannot be used; one sentence each."""
    missing = [program for program in ("g++", "ninja") if shutil.which(program) is None]
    return problems_found(
        (
            offload_optimizer not in ("cpu", "nvme"),
            "cpu_adam=True has no effect without offload_optimizer: give offload_optimizer='cpu', too.",
        ),
        (
            missing,
            f"cpu_adam=True: DeepSpeed compiles its CPUAdam, and {' and '.join(missing)} cannot be found. Install them "
            "(apt install g++, pip install ninja), or drop cpu_adam=True.",
        ),
    )


def module_problems(name: str, module: TrainModule, precision: Precision, device_type: str) -> list[str]:
    """Return why the engine cannot train the module, one sentence each."""
    layers = dict(module.named_modules())
    norms = [path for path, layer in layers.items() if has_statistics(layer)]
    spectral = [path for path, layer in layers.items() if multiplies_buffers(layer)]
    in_bf16 = torch.bfloat16 in (precision.autocast, precision.weights)
    instead = "Use precision '32-true', or strategy 'fsdp' or 'ddp'."
    return problems_found(
        (
            not module.automatic_optimization,
            f"strategy {name!r} cannot do manual optimization: DeepSpeed's engine makes the steps. Use automatic "
            "optimization, or strategy 'ddp' or 'fsdp'.",
        ),
        (
            module.overrides("configure_gradient_clipping"),
            f"{type(module).__name__}.configure_gradient_clipping cannot be used: DeepSpeed's engine clips, by the "
            "norm gradient_clip_val of the start. Remove the method.",
        ),
        (
            norms and in_bf16 and device_type == "cpu",
            f"strategy {name!r} computes with weights in bfloat16, and BatchNorms, whose statistics are float32, "
            f"cannot on CPUs: {first_of(norms)}. {instead}",
        ),
        (
            spectral and precision.autocast,
            f"strategy {name!r} computes with weights in 16 bits, and spectral norms, whose vectors are float32, "
            f"cannot: {first_of(spectral)}. {instead}",
        ),
    )


def unsupported_problems(name: str, stage: int, module: TrainModule) -> list[str]:
    """Return which layers and parameters the engine cannot train, one sentence for each kind."""
    sharding = ("empty", "script", "compiled") if stage == 3 else ()
    return unsupported(module, name, "scalar", "complex", "sparse", "quantized", *sharding)


def optimizer_problems(optimizers: list[Optimizer], cpu_adam: bool) -> list[str]:
    """Return why the engine cannot train the module with these optimizers, one sentence each."""
    if len(optimizers) != 1:
        return [
            f"configure_optimizers gave {len(optimizers)} optimizers, and DeepSpeed's engine takes one: give several "
            "groups of parameters to one optimizer."
        ]
    if isinstance(optimizers[0], NoOptimizer):
        return ["configure_optimizers returned None, and DeepSpeed's engine needs an optimizer: use strategy 'ddp'."]
    optimizer = optimizers[0]
    kind, groups = type(optimizer).__name__, optimizer.param_groups
    frozen = [number for number, group in enumerate(groups) if not any(p.requires_grad for p in group["params"])]
    other_adam = any(group.get("amsgrad") or group.get("maximize") for group in groups)
    return problems_found(
        (
            kind in NOT_TO_BE_TRIED or not is_elementwise(optimizer),
            f"{kind} needs full parameters, and DeepSpeed flattens the parameters and shards the flat buffer: use an "
            "optimizer that treats all elements alike, such as torch.optim.AdamW.",
        ),
        (
            optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks,
            f"register_step_pre_hook or register_step_post_hook of the {kind}: it would be given flat parts of the "
            "parameters. Use on_before_optimizer_step or on_train_batch_end, or strategy 'fsdp' or 'ddp'.",
        ),
        (
            kind == "Adagrad",
            "DeepSpeed replaces your Adagrad by a new one, which schedules do not reach: use torch.optim.AdamW or "
            "RMSprop.",
        ),
        (
            with_modes(optimizers),
            f"{kind}.eval() exchanges the weights for averaged ones, and would reach DeepSpeed's master weights only, "
            "not the module's: use strategy 'fsdp' or 'ddp'.",
        ),
        (
            len(optimizers_inside(optimizer)) > 1 or extra_of(optimizer.state_dict()),
            f"{kind} keeps more than the states of its parameters (another optimizer, or further entries in "
            "state_dict), and DeepSpeed puts flat parts in place of the parameters: use strategy 'fsdp' or 'ddp'.",
        ),
        (
            frozen,
            f"group {first_of(frozen)} of the {kind} has no parameter that requires a gradient: drop it.",
        ),
        (
            cpu_adam and (type(optimizer) not in (Adam, AdamW) or other_adam),
            f"cpu_adam=True computes Adam and AdamW without amsgrad and maximize, and configure_optimizers gave {kind} "
            "or one of these options.",
        ),
    )


def step_problems(name: str, config: StepOptions) -> list[str]:
    """Return why the engine cannot make the steps: it clips by the norm, and flattens what trains at the start."""
    return problems_found(
        (
            config.clip_value is not None and config.clip_algorithm == "value",
            f"gradient_clip_algorithm='value': strategy {name!r} cannot, since DeepSpeed clips by the norm. Use "
            "'norm', or strategy 'fsdp'.",
        ),
        (
            config.unfreezing,
            f"{config.unfreezing} unfreezes parameters while training, and strategy {name!r} flattens those that train "
            "at the start: use 'ddp' or 'fsdp'. Or train all from the start, in a group whose lr is 0 until then.",
        ),
        (
            config.models > 1,
            f"strategy {name!r} trains one model with one optimizer, and setup got {config.models} modules: use 'ddp' "
            "or 'fsdp', or leave a module that is not trained out of setup and move it by module.to(engine.device).",
        ),
    )
