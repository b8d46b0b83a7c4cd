"""Translate a DeepSpeed JSON: keys with an equivalent become settings, and DeepSpeed still reads all others."""

from __future__ import annotations

from typing import Any

from trainer.cli.config.report import (
    IMPOSSIBLE,
    MODULE,
    NOT_NEEDED,
    TAKEN,
    MigrationReport,
    Rule,
    clipping_rule,
    precision_rule,
    strategy_setting,
    window_rule,
)

AUTO = "auto"
ZERO = "zero_optimization"
FILLED = '"auto": filled in at the start'
READ = Rule(TAKEN, "DeepSpeed reads it (strategy.config)")
BATCH_SIZES = {
    "train_batch_size": "batch_size of your data x accumulate_grad_batches x processes",
    "train_micro_batch_size_per_gpu": "batch_size of your data",
}
SCHEDULERS = {
    "WarmupLR": "torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=..., total_iters=WARMUP_STEPS)",
    "WarmupDecayLR": "a LambdaLR that rises, and falls to 0 at trainer.estimated_stepping_batches",
    "WarmupCosineLR": "a LambdaLR that rises, and falls along a cosine to trainer.estimated_stepping_batches",
    "OneCycle": "torch.optim.lr_scheduler.OneCycleLR",
    "LRRangeTest": "torch.optim.lr_scheduler.LinearLR",
}
WITHOUT_EFFECT = {
    "checkpoint": "checkpoints are the trainer's own: complete, verified, and readable under any strategy",
    "dataloader_drop_last": "the loop takes batches from your DataLoader: give it drop_last",
    "steps_per_print": "log_every_n_steps of the trainer says how often the log is written",
    "prescale_gradients": "gradients are averaged over processes in the way that loses least",
    "disable_allgather": "DeepSpeed itself ignores it",
}
REFUSED = {
    "data_efficiency": "it needs DeepSpeed's own data loader; sample in your DataLoader",
    "curriculum_learning": "it needs DeepSpeed's own data loader; sort or cut in your DataLoader, by the epoch",
    "pipeline": "there is no pipeline parallelism; ZeRO 3 shards the weights instead",
    "tensor_parallel": "there is no tensor parallelism in this strategy; ZeRO 3 shards the weights instead",
    "autotuning": "it starts trainings by itself; use deepspeed --autotuning outside of the trainer",
    "elasticity": "use trainer launch --nnodes MIN:MAX; a checkpoint goes on under any number of processes",
    "wandb": "write a Logger of your own for it: a class with log_metrics",
}
MONITORS = {"tensorboard": "TensorBoardLogger", "csv_monitor": "CSVLogger"}


def from_deepspeed(report: MigrationReport, given: dict[str, Any]) -> None:
    """Translate a DeepSpeed configuration."""
    read_deepspeed(report, given)
    choose_stage(report)


def read_deepspeed(report: MigrationReport, given: dict[str, Any], prefix: str = "") -> None:
    """Account for every key of a DeepSpeed configuration.

    Args:
        prefix: printed before the keys in the report.
    """
    left = report.deepspeed
    for key, value in given.items():
        name = prefix + key
        if key == ZERO and isinstance(value, dict):
            left[ZERO] = _zero(report, value, name)
        elif key in ("fp16", "bf16", "bfloat16") and isinstance(value, dict):
            key = "bf16" if key == "bfloat16" else key
            left[key] = _precision(report, key, value, name)
        elif key in ("optimizer", "scheduler") and isinstance(value, dict):
            _of_module(report, key, value, name)
        else:
            rule = _rule(key, value)
            if rule is None or rule.kind == MODULE:
                left[key] = value
            auto = Rule(TAKEN, f"{FILLED} by DeepSpeed's default") if value == AUTO else READ
            report.add(name, value, rule or auto)
    for key in [key for key, value in left.items() if value in ({}, None)]:
        del left[key]
    zero = given.get(ZERO)
    if report.stage is None and not (isinstance(zero, dict) and "stage" in zero):
        report.stage = 0
        words = "strategy: ddp, as DeepSpeed's stage is 0 where none is given"
        report.add(f"{prefix}{ZERO}.stage", None, Rule(TAKEN, words))


def choose_stage(report: MigrationReport) -> None:
    """Choose the strategy, and pass it the keys that DeepSpeed itself reads."""
    draft = report.draft
    if report.stage == 0:
        draft.set(*strategy_setting("copies"))
        draft.arguments.clear()
        return
    draft.set(*strategy_setting(f"zero{report.stage or 2}"))
    if report.deepspeed:
        draft.set("strategy.config", report.deepspeed)


def stage_rule(report: MigrationReport, value: Any) -> Rule:
    """Record the ZeRO stage, and return its rule."""
    report.stage = int(value)
    return Rule(TAKEN, f"strategy: deepspeed_stage_{report.stage}" if report.stage else "strategy: ddp")


def _rule(key: str, value: Any) -> Rule | None:
    """Return the rule of a plain key; None: DeepSpeed reads the key."""
    off = "it is off" if isinstance(value, dict) and value.get("enabled") is False else ""
    if key in BATCH_SIZES:
        if value == AUTO:
            return Rule(NOT_NEEDED, f"it is {BATCH_SIZES[key]}")
        per = "" if key == "train_batch_size" else f"batch_size of your data, {value}, is per process, too; "
        return Rule(MODULE, f"{per}it is kept, and compared with your data at the start")
    if key == "gradient_accumulation_steps":
        words = "accumulate_grad_batches of the trainer says it (default: 1)"
        return Rule(NOT_NEEDED, words) if value == AUTO else window_rule(value)
    if key == "gradient_clipping" and (value == AUTO or not value):
        words = "gradient_clip_val of the trainer says it (default: no clipping)"
        return Rule(NOT_NEEDED, words if value == AUTO else "gradients are not clipped, which is the default")
    if key == "gradient_clipping":
        return clipping_rule(value)
    if key == "wall_clock_breakdown":
        why = "where the time of each part of a step goes"
        setting = (("profiler", "simple", why),)
        return Rule(TAKEN, settings=setting, off="it is off; profiler: simple shows where the time goes")
    if key in WITHOUT_EFFECT:
        return Rule(NOT_NEEDED, WITHOUT_EFFECT[key])
    if key in REFUSED:
        return Rule(NOT_NEEDED if off else IMPOSSIBLE, off or REFUSED[key])
    if key in MONITORS:
        return Rule(NOT_NEEDED, off or f"trainer.logger: {MONITORS[key]} (both are on by default)")
    return None


def _zero(report: MigrationReport, given: dict[str, Any], name: str) -> dict[str, Any]:
    """Take the stage and the devices of offloading; return the remaining keys, for DeepSpeed."""
    rest: dict[str, Any] = {}
    for key, value in given.items():
        where = f"{name}.{key}"
        if key == "stage" and value in (0, 1, 2, 3):
            report.add(where, value, stage_rule(report, value))
        elif key in ("offload_optimizer", "offload_param"):
            rest[key] = _offload(report, key, value, where)
        elif key in ("stage3_gather_16bit_weights_on_model_save", "stage3_gather_fp16_weights_on_model_save"):
            report.add(where, value, Rule(NOT_NEEDED, "checkpoints hold the full weights: trainer checkpoint export"))
        else:
            rest[key] = value
            report.add(where, value, Rule(TAKEN, FILLED) if value == AUTO else READ)
    return {key: value for key, value in rest.items() if value != {}}


def _offload(report: MigrationReport, key: str, value: Any, where: str) -> dict[str, Any]:
    section = dict(value) if isinstance(value, dict) else {}
    argument = {"offload_optimizer": "offload_optimizer", "offload_param": "offload_parameters"}[key]
    device = section.pop("device", "none")
    path = {"nvme_path": section.pop("nvme_path")} if "nvme_path" in section else {}
    settings = {"device": argument, "nvme_path": "nvme_path"}
    for inner, one in {"device": device, **path}.items():
        taken = Rule(TAKEN, settings=((f"strategy.{settings[inner]}", one, ""),))
        none = Rule(NOT_NEEDED, "nothing is offloaded, which is the default")
        report.add(f"{where}.{inner}", one, taken if device in ("cpu", "nvme") else none)
    report.section(f"{where}.", section, {}, other=READ)
    return section


def _precision(report: MigrationReport, name: str, given: dict[str, Any], key: str) -> dict[str, Any]:
    """Take `enabled`; return the remaining keys, for DeepSpeed."""
    rest = dict(given)
    enabled = rest.pop("enabled", None)
    if enabled is True:
        report.add(f"{key}.enabled", True, precision_rule(report, name))
    elif enabled == AUTO:
        report.add(f"{key}.enabled", AUTO, Rule(TAKEN, "as precision of the trainer says"))
    elif "enabled" in given:
        report.add(f"{key}.enabled", enabled, Rule(NOT_NEEDED, "precision of the trainer says which numbers are used"))
    report.section(f"{key}.", rest, {}, other=Rule(NOT_NEEDED, f"{name} is off") if enabled is False else READ)
    return {} if enabled is False else rest


def _of_module(report: MigrationReport, key: str, given: dict[str, Any], name: str) -> None:
    """Account for the optimizer and the schedule, which `configure_optimizers` creates."""
    kind, parameters = str(given.get("type", "")), given.get("params", {})
    parameters = parameters if isinstance(parameters, dict) else {}
    modes = ("torch_adam", "adam_w_mode")
    if key == "optimizer":
        arguments = "".join(f", {k}={v!r}" for k, v in parameters.items() if v != AUTO and k not in modes)
        words = f"configure_optimizers: torch.optim.{kind or 'AdamW'}(self.parameters(){arguments})"
    else:
        words = (
            f'configure_optimizers: {{"scheduler": {SCHEDULERS.get(kind, "a scheduler of torch")}, "interval": "step"}}'
        )
    report.add(name, kind, Rule(MODULE, words))
    for inner, value in parameters.items():
        here = "the class says it: torch's Adam or AdamW" if inner in modes else f"an argument of it: {inner}"
        report.add(f"{name}.params.{inner}", value, Rule(MODULE, "write the value there" if value == AUTO else here))
    for inner in given.keys() - {"type", "params"}:
        report.add(f"{name}.{inner}", given[inner], Rule(MODULE, "see above"))
