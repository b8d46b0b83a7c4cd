"""What DeepSpeed's engine can work with, and its optimizer and loss scale in the place of torch's."""

from __future__ import annotations

import shutil
from typing import Any

from torch.optim import Adam, AdamW, Optimizer

from trainer.module import TrainModule
from trainer.precision import Precision

NON_ELEMENTWISE_OPTIMIZERS = ("Adafactor", "LBFGS", "Muon", "SparseAdam")
"""Optimizers of torch whose update of an element depends on the shape of its tensor, or on the others in it."""


def engine_problems(name: str, stage: int, precision: Precision, device_type: str) -> list[str]:
    """Why the engine cannot run at this stage, in this precision, on this kind of device; one sentence each."""
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
    if precision.loss_scaling and device_type == "cpu":
        problems.append(
            f"precision {precision.name!r} with DeepSpeed on the CPU: Type fp16 is not supported on your device. Use "
            "'bf16-mixed'."
        )
    return problems


def cpu_adam_problems(offload_optimizer: object) -> list[str]:
    """Why DeepSpeed's CPUAdam cannot be used; one sentence each."""
    problems = []
    if not offload_optimizer:
        problems.append("cpu_adam=True has no effect without offload_optimizer: give offload_optimizer='cpu', too.")
    missing = [program for program in ("g++", "ninja") if shutil.which(program) is None]
    if missing:
        problems.append(
            f"cpu_adam=True: DeepSpeed compiles its CPUAdam, and {' and '.join(missing)} cannot be found. Install them "
            "(apt install g++, pip install ninja), or leave cpu_adam away."
        )
    return problems


def module_problems(name: str, module: TrainModule, clip_by: str | None) -> list[str]:
    """Why the engine cannot train the module, one sentence each. `clip_by`: how gradients are clipped, if they are."""
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
    scalars = [parameter for parameter, value in module.named_parameters() if value.dim() == 0]
    if scalars:
        problems.append(
            f"strategy {name!r} cannot divide parameters without a dimension: {', '.join(scalars)}. Give them the "
            "shape [1]: nn.Parameter(torch.ones(1))."
        )
    if clip_by == "value":
        problems.append(
            f"gradient_clip_algorithm='value': strategy {name!r} cannot, since DeepSpeed clips by the norm. Use "
            "'norm', or strategy 'fsdp'."
        )
    return problems


def optimizer_problems(optimizers: list[Optimizer], cpu_adam: bool) -> list[str]:
    """Why DeepSpeed's engine cannot train the module with these optimizers, one sentence each."""
    if len(optimizers) != 1:
        return [
            f"configure_optimizers gave {len(optimizers)} optimizers, and DeepSpeed's engine takes one: give several "
            "groups of parameters to one optimizer."
        ]
    optimizer = optimizers[0]
    kind = type(optimizer).__name__
    problems = []
    if kind in NON_ELEMENTWISE_OPTIMIZERS:
        problems.append(
            f"{kind} needs whole parameters, and DeepSpeed strings them together and divides them: use an optimizer "
            "that treats all elements alike, such as torch.optim.AdamW."
        )
    if kind == "Adagrad":
        problems.append(
            "DeepSpeed makes an Adagrad of its own in the place of yours, which schedules do not reach: use "
            "torch.optim.AdamW or RMSprop."
        )
    for number, group in enumerate(optimizer.param_groups):
        if not any(parameter.requires_grad for parameter in group["params"]):
            problems.append(f"group {number} of the {kind} has no parameter that requires a gradient: leave it away.")
    if cpu_adam and type(optimizer) not in (Adam, AdamW):
        problems.append(f"cpu_adam=True computes Adam and AdamW, and configure_optimizers gave {kind}.")
    elif cpu_adam and any(group["amsgrad"] or group["maximize"] for group in optimizer.param_groups):
        problems.append("cpu_adam=True has no amsgrad and no maximize: leave cpu_adam away.")
    return problems


def cpu_adam_of(deepspeed: Any, optimizer: Optimizer) -> Optimizer:
    """DeepSpeed's CPUAdam in the place of torch's Adam or AdamW; both have the same groups, so schedules reach it."""
    made: Optimizer = deepspeed.ops.adam.DeepSpeedCPUAdam(
        optimizer.param_groups, adamw_mode=bool(optimizer.defaults.get("decoupled_weight_decay", True))
    )
    # torch keeps a list of its own, of the same dicts.
    made.param_groups = optimizer.param_groups
    return made


class LossScale:
    """DeepSpeed's dynamic loss scale, to be saved and restored as that of `torch.amp.GradScaler`."""

    def __init__(self, scaler: Any) -> None:
        self.scaler = scaler

    def state_dict(self) -> dict[str, Any]:
        """In the keys of `GradScaler.state_dict`."""
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
        """From `state_dict` of this or of a `GradScaler`; how it goes on stays as configured."""
        scaler = self.scaler
        if not scaler.dynamic or not state:
            return
        scaler.cur_scale = float(state["scale"])
        scaler.last_overflow_iter = scaler.cur_iter - 1 - int(state["_growth_tracker"])
        scaler.cur_hysteresis = int(state.get("hysteresis", scaler.cur_hysteresis))
