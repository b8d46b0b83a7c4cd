"""A DeepSpeed JSON as ours: what the trainer has itself becomes a setting, the rest stays what DeepSpeed reads."""

from __future__ import annotations

from typing import Any

from trainer.cli.config.translate import MigrationReport, number

AUTO = "auto"
FILLED = '"auto": filled in at the start'
ZERO = "zero_optimization"
LAYOUTS = {
    1: "DeepSpeed: the optimizer is divided among the processes",
    2: "DeepSpeed: optimizer and gradients are divided among the processes",
    3: "DeepSpeed: optimizer, gradients and weights are divided among the processes",
}
SCHEDULERS = {
    "WarmupLR": "torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=..., total_iters=WARMUP_STEPS)",
    "WarmupDecayLR": "a LambdaLR that rises, and falls to 0 at trainer.estimated_stepping_batches",
    "WarmupCosineLR": "a LambdaLR that rises, and falls along a cosine to trainer.estimated_stepping_batches",
    "OneCycle": "torch.optim.lr_scheduler.OneCycleLR",
    "LRRangeTest": "torch.optim.lr_scheduler.LinearLR",
}
MONITORS = {"tensorboard": "TensorBoardLogger", "csv_monitor": "CSVLogger"}
WITHOUT_EFFECT = {
    "checkpoint": "checkpoints are the trainer's own: whole, checked, and readable under any strategy",
    "dataloader_drop_last": "the loop takes batches from your DataLoader: give it drop_last",
    "steps_per_print": "log_every_n_steps of the trainer says how often the log is written",
    "prescale_gradients": "gradients are averaged over processes in the way that loses least",
    "disable_allgather": "DeepSpeed itself ignores it",
}
REFUSED = {
    "data_efficiency": "it needs DeepSpeed's own data loader; sample in your DataLoader",
    "curriculum_learning": "it needs DeepSpeed's own data loader; sort or cut in your DataLoader, by the epoch",
    "pipeline": "there is no pipeline parallelism; ZeRO 3 divides the weights instead",
    "tensor_parallel": "there is no tensor parallelism in this strategy; ZeRO 3 divides the weights instead",
    "autotuning": "it starts trainings by itself; use deepspeed --autotuning outside of the trainer",
    "elasticity": "use trainer launch --nnodes MIN:MAX; a checkpoint goes on under any number of processes",
}


def from_deepspeed(translation: MigrationReport, given: dict[str, Any], prefix: str = "") -> None:
    """Every key of a DeepSpeed configuration.

    Args:
        prefix: put before the keys in the account.
    """
    left: dict[str, Any] = {}
    for key, value in given.items():
        name = prefix + key
        if key == ZERO and isinstance(value, dict):
            _zero(translation, value, left, name)
        elif key in ("fp16", "bf16", "bfloat16") and isinstance(value, dict):
            _precision(translation, "bf16" if key == "bfloat16" else key, value, left, name)
        elif key in ("optimizer", "scheduler") and isinstance(value, dict):
            _of_module(translation, key, value, name)
        elif not _number(translation, key, value, left, name) and not _known(translation, key, value, name):
            left[key] = value
            words = f"{FILLED} by DeepSpeed's default" if value == AUTO else "DeepSpeed reads it (strategy.config)"
            translation.taken(name, value, words)
    zero = given.get(ZERO)
    if not (isinstance(zero, dict) and "stage" in zero) and translation.draft.value("strategy") is None:
        translation.draft.argument("stage", 0)
        translation.taken(f"{prefix}{ZERO}.stage", None, "strategy: ddp, as DeepSpeed's stage is 0 where none is given")
    finish(translation, left)


def finish(translation: MigrationReport, left: dict[str, Any]) -> None:
    """Name the strategy, with what is left for DeepSpeed to read."""
    draft = translation.draft
    stage = draft.arguments.pop("stage", None)
    if stage == 0:
        draft.line("strategy: ddp", "ZeRO 0 divides nothing: every process has the whole model")
        draft.arguments.clear()
    elif draft.value("strategy") is None or stage is not None:
        stage = stage or 2
        draft.line(f"strategy: deepspeed_stage_{stage}", LAYOUTS[stage])
    if left and stage != 0:
        draft.argument("config", {**draft.arguments.get("config", {}), **left})


def set_precision(translation: MigrationReport, name: str, key: str, value: Any, remark: str = "") -> None:
    """One of ours, for fp16 or bf16."""
    full, words = {
        "fp16": ("16-mixed", "float16 with a scaled loss, master weights in float32"),
        "bf16": ("bf16-mixed", "bfloat16, master weights in float32"),
    }[name]
    former = translation.draft.value("precision")
    if former not in (None, full, "32-true"):
        words_of_both = f"precision is {former} already: two are asked for; this one is left out"
        translation.impossible(key, value, words_of_both)
        return
    translation.taken(key, value, translation.draft.set("precision", full, words) + remark)


def _zero(translation: MigrationReport, given: dict[str, Any], left: dict[str, Any], name: str) -> None:
    """The stage and the devices of offloading are the strategy's; the rest is DeepSpeed's."""
    draft = translation.draft
    rest: dict[str, Any] = {}
    for key, value in given.items():
        where = f"{name}.{key}"
        if key == "stage" and value in (0, 1, 2, 3):
            draft.argument("stage", value)
            translation.taken(where, value, "strategy: ddp" if value == 0 else f"strategy: deepspeed_stage_{value}")
        elif key in ("offload_optimizer", "offload_param"):
            own = _offload(translation, key, value, where)
            if own:
                rest[key] = own
        elif key in ("stage3_gather_16bit_weights_on_model_save", "stage3_gather_fp16_weights_on_model_save"):
            translation.not_needed(where, value, "checkpoints hold the whole weights: trainer checkpoint export")
        else:
            rest[key] = value
            words = "DeepSpeed reads it (strategy.config)"
            translation.taken(where, value, FILLED if value == AUTO else words)
    if rest:
        left[ZERO] = rest


def _offload(translation: MigrationReport, key: str, value: Any, where: str) -> Any:
    """What of it is left for DeepSpeed."""
    argument = {"offload_optimizer": "offload_optimizer", "offload_param": "offload_parameters"}[key]
    section = dict(value) if isinstance(value, dict) else {}
    device = section.pop("device", "none")
    path = section.pop("nvme_path", None)
    if device not in ("cpu", "nvme"):
        for inner, one in (("device", device), *(() if path is None else (("nvme_path", path),))):
            words = "nothing is offloaded, which is the default"
            translation.not_needed(f"{where}.{inner}", one, words)
    else:
        translation.taken(f"{where}.device", device, translation.draft.argument(argument, device))
        if path is not None:
            translation.taken(f"{where}.nvme_path", path, translation.draft.argument("nvme_path", path))
    for inner, one in section.items():
        translation.taken(f"{where}.{inner}", one, "DeepSpeed reads it (strategy.config)")
    return section


def _precision(translation: MigrationReport, name: str, given: dict[str, Any], left: dict[str, Any], key: str) -> None:
    rest = dict(given)
    enabled = rest.pop("enabled", None)
    if enabled is True:
        set_precision(translation, name, f"{key}.enabled", True)
    elif enabled == AUTO:
        translation.taken(f"{key}.enabled", AUTO, "as precision of the trainer says")
    elif "enabled" in given:
        translation.not_needed(f"{key}.enabled", enabled, "precision of the trainer says which numbers are used")
    if not rest:
        return
    if enabled is False:
        for inner, value in rest.items():
            translation.not_needed(f"{key}.{inner}", value, f"{name} is off")
        return
    left[name] = rest
    for inner, value in rest.items():
        translation.taken(f"{key}.{inner}", value, "DeepSpeed reads it (strategy.config)")


def _of_module(translation: MigrationReport, key: str, given: dict[str, Any], name: str) -> None:
    """Optimizer and schedule are made in configure_optimizers."""
    kind, parameters = str(given.get("type", "")), given.get("params", {})
    parameters = parameters if isinstance(parameters, dict) else {}
    if key == "optimizer":
        known = {k: v for k, v in parameters.items() if v != AUTO and k not in ("torch_adam", "adam_w_mode")}
        arguments = "".join(f", {k}={v!r}" for k, v in known.items())
        words = f"configure_optimizers: torch.optim.{kind or 'AdamW'}(self.parameters(){arguments})"
    else:
        made = SCHEDULERS.get(kind, "a scheduler of torch's")
        words = f'configure_optimizers: {{"scheduler": {made}, "interval": "step"}}'
    translation.of_module(name, kind, words)
    for inner, value in parameters.items():
        other = {"torch_adam", "adam_w_mode"} & {inner}
        here = "the class says it: torch's Adam or AdamW" if other else f"an argument of it: {inner}"
        translation.of_module(f"{name}.params.{inner}", value, "write the value there" if value == AUTO else here)
    for inner in set(given) - {"type", "params"}:
        translation.of_module(f"{name}.{inner}", given[inner], "see above")


def _number(translation: MigrationReport, key: str, value: Any, left: dict[str, Any], name: str) -> bool:
    """The numbers that the trainer has, too. Returns whether it was one of them."""
    if key == "gradient_accumulation_steps":
        if value == AUTO:
            translation.not_needed(name, value, "accumulate_grad_batches of the trainer says it (default: 1)")
        else:
            set_window(translation, name, value)
    elif key == "gradient_clipping":
        if value == AUTO:
            translation.not_needed(name, value, "gradient_clip_val of the trainer says it (default: no clipping)")
        elif not value:
            translation.not_needed(name, value, "gradients are not clipped, which is the default")
        else:
            set_clipping(translation, name, value)
    elif key in ("train_batch_size", "train_micro_batch_size_per_gpu"):
        if value == AUTO:
            product = "batch_size of your data x accumulate_grad_batches x processes"
            words = product if key == "train_batch_size" else "batch_size of your data"
            translation.not_needed(name, value, f"it is {words}")
        else:
            left[key] = value
            per = "" if key == "train_batch_size" else f"batch_size of your data, {value}, is per process, too; "
            translation.of_module(name, value, f"{per}it is kept, and compared with your data at the start")
    else:
        return False
    return True


def set_window(translation: MigrationReport, key: str, value: Any) -> None:
    """Gradient accumulation."""
    window = int(number(value) or 0)
    if window < 1:
        translation.impossible(key, value, "it has to be a whole number from 1; nothing is written")
    elif window == 1:
        translation.not_needed(key, value, "one batch makes a step, which is the default")
    else:
        why = f"one step for every {window} batches of each process"
        translation.taken(key, value, translation.draft.set("accumulate_grad_batches", window, why))


def set_clipping(translation: MigrationReport, key: str, value: Any) -> None:
    """The norm by which gradients are clipped."""
    norm = number(value)
    if not norm or norm < 0:
        translation.impossible(key, value, "it has to be a number above 0; nothing is written")
    else:
        line = translation.draft.set("gradient_clip_val", norm, "clip the norm of all gradients")
        translation.taken(key, value, line)


def _known(translation: MigrationReport, key: str, value: Any, name: str) -> bool:
    """Keys that DeepSpeed does not get. Returns whether it was one of them."""
    off = isinstance(value, dict) and value.get("enabled") is False
    if key in WITHOUT_EFFECT:
        translation.not_needed(name, value, WITHOUT_EFFECT[key])
    elif key in REFUSED:
        (translation.not_needed if off else translation.impossible)(name, value, "it is off" if off else REFUSED[key])
    elif key in MONITORS:
        logger = f"trainer.logger: {MONITORS[key]} (both are on by default)"
        translation.not_needed(name, value, "it is off" if off else logger)
    elif key == "wandb":
        words = "write a Logger of your own for it: a class with log_metrics"
        (translation.not_needed if off else translation.impossible)(name, value, "it is off" if off else words)
    elif key == "wall_clock_breakdown":
        if value is True:
            where = "where the time of each part of a step goes"
            translation.taken(name, value, translation.draft.set("profiler", "simple", where))
        else:
            translation.not_needed(name, value, "it is off; profiler: simple shows where the time goes")
    else:
        return False
    return True
