"""Translate a DeepSpeed JSON: keys with an equivalent become settings, and DeepSpeed still reads all others."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

from trainer.cli.config.draft import strategy_name
from trainer.cli.config.report import IMPOSSIBLE, MigrationReport, flatten, read_rows

ROWS = read_rows("""
fp16.enabled=TRUE                   = <precision: 16-mixed>
bf16.enabled=TRUE                   = <precision: bf16-mixed>
fp16.enabled,bf16.enabled=AUTO      = as precision of the trainer says
fp16.enabled,bf16.enabled           - precision of the trainer says which numbers are used
fp16.*=?fp16_off                    - fp16 is off
bf16.*=?bf16_off                    - bf16 is off

train_batch_size=AUTO               - it is batch_size of your data x accumulate_grad_batches x processes
train_micro_batch_size_per_gpu=AUTO - it is batch_size of your data
gradient_accumulation_steps=AUTO    - accumulate_grad_batches of the trainer says it (default: 1)
gradient_clipping=AUTO              - gradient_clip_val of the trainer says it (default: no clipping)
zero_optimization.*=AUTO            + "auto": filled in at the start
optimizer.params.*,scheduler.params.*=AUTO * write the value there
*=AUTO                              + "auto": filled in at the start by DeepSpeed's default
*=DISABLED                          - it is off

train_batch_size                    @ it is kept, and compared with your data at the start
train_micro_batch_size_per_gpu      @ batch_size of your data, {value}, is per process, too; it is kept, and compared
                                      with your data at the start
gradient_accumulation_steps=1,1.0   - one batch makes a step, which is the default
gradient_accumulation_steps=FROM_1  = <accumulate_grad_batches: {integer}>
gradient_accumulation_steps         ! it has to be an integer from 1; nothing is written
gradient_clipping=0,0.0,FALSE,NONE  - gradients are not clipped, which is the default
gradient_clipping=POSITIVE          = <gradient_clip_val: {number}>
gradient_clipping                   ! it has to be a number above 0; nothing is written
wall_clock_breakdown                = <profiler: simple> | it is off; profiler: simple shows where the time goes
checkpoint            - checkpoints are the trainer's own: complete, verified, and readable under any strategy
dataloader_drop_last  - the loop takes batches from your DataLoader: give it drop_last
steps_per_print       - log_every_n_steps of the trainer says how often the log is written
prescale_gradients    - gradients are averaged over processes in the way that loses least
disable_allgather     - DeepSpeed itself ignores it
tensorboard           - trainer.logger: TensorBoardLogger (both are on by default)
csv_monitor           - trainer.logger: CSVLogger (both are on by default)
wandb                 - trainer.logger: WandbLogger
comet                 ! write a Logger of your own for it: a class with log_metrics
data_efficiency       ! it needs DeepSpeed's own data loader; sample in your DataLoader
curriculum_learning   ! it needs DeepSpeed's own data loader; sort or cut in your DataLoader, by the epoch
pipeline              ! strategy: fsdp has pipeline_parallel; with DeepSpeed, ZeRO 3 shards the weights instead
tensor_parallel       ! strategy: fsdp has tensor_parallel; with DeepSpeed, ZeRO 3 shards the weights instead
autotuning            ! it starts trainings by itself; use deepspeed --autotuning outside of the trainer
elasticity            ! use trainer launch --nnodes MIN:MAX; a checkpoint goes on under any number of processes

[zero_optimization]
stage=0               = <strategy: ddp>
stage=1,2,3           = <strategy: deepspeed_stage_{value}>
stage                 ! <strategy: deepspeed_stage_2> none of 0, 1, 2, 3; {line} is written
stage3_gather_16bit_weights_on_model_save,stage3_gather_fp16_weights_on_model_save - checkpoints hold the full weights:
                                                                                     trainer checkpoint export
offload_optimizer.device=CPU,NVME   = <strategy.offload_optimizer: {lower}>
offload_param.device=CPU,NVME       = <strategy.offload_parameters: {lower}>
offload_optimizer.device,offload_param.device       - nothing is offloaded, which is the default
offload_optimizer.nvme_path,offload_param.nvme_path = <strategy.nvme_path: {json}>

[]
optimizer.type        * configure_optimizers: torch.optim.{value}(self.parameters(){arguments})
scheduler.type        * configure_optimizers: {{"scheduler": {scheduler}, "interval": "step"}}
optimizer.*,scheduler.* * see above
optimizer.params.torch_adam,optimizer.params.adam_w_mode * the class decides: torch's Adam or AdamW
optimizer.params.*,scheduler.params.* * an argument of it
*                     + DeepSpeed reads it (strategy.config)
""")
SECTIONS = dict.fromkeys(("bfloat16", *(key.rpartition(".")[0] for key, _, _ in ROWS if "." in key)), "")
SCHEDULERS = {
    "WarmupLR": "torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=..., total_iters=WARMUP_STEPS)",
    "WarmupDecayLR": "a LambdaLR that rises, and falls to 0 at trainer.estimated_stepping_batches",
    "WarmupCosineLR": "a LambdaLR that rises, and falls along a cosine to trainer.estimated_stepping_batches",
    "OneCycle": "torch.optim.lr_scheduler.OneCycleLR",
    "LRRangeTest": "torch.optim.lr_scheduler.LinearLR",
}


def from_deepspeed(report: MigrationReport, given: Mapping[str, Any], shown: str = "") -> None:
    """Account for every key of a DeepSpeed configuration. `shown`: printed before the keys."""
    flat = {re.sub(r"^bfloat16\b", "bf16", key): entry for key, entry in flatten(given, SECTIONS).items()}
    values = {key: value for key, (_, value) in flat.items()}
    parameters = {key.removeprefix("optimizer.params."): value for key, value in values.items() if ".params." in key}
    said = {
        k: v for k, v in parameters.items() if v != "auto" and "." not in k and k not in ("torch_adam", "adam_w_mode")
    }
    report.facts["arguments"] = "".join(f", {name}={value!r}" for name, value in said.items())
    report.facts["scheduler"] = SCHEDULERS.get(str(values.get("scheduler.type")), "a scheduler of torch")
    flags = [f"{name}_off" for name in ("fp16", "bf16") if values.get(f"{name}.enabled") is False]
    report.translate(flat, ROWS, flags, shown)


def set_strategy(report: MigrationReport, shown: str = "") -> None:
    """Choose a strategy where no stage was given, and pass it the keys that DeepSpeed itself reads."""
    draft, copies = report.draft, strategy_name("copies")
    if "strategy" not in draft.settings:
        words = "{line}, as DeepSpeed's stage is 0 where none is given"
        report.add(f"{shown}zero_optimization.stage", None, f"= <strategy: {copies}> {words}")
    if draft.settings["strategy"] == copies:
        draft.arguments.clear()
    elif report.deepspeed:
        _leave_out_unknown(report, shown)
        report.draft.set("strategy.config", report.deepspeed)


def _leave_out_unknown(report: MigrationReport, shown: str) -> None:
    """Leave out what the installed DeepSpeed does not take, which `fit` would refuse."""
    if find_spec("deepspeed") is None:
        return
    from trainer.strategies.deepspeed.config_checks import key_problems

    for key, value in [*report.deepspeed.items()]:
        for inner in [*value] if isinstance(value, dict) else [None]:
            problems = key_problems({key: value if inner is None else {inner: value[inner]}})
            if not problems:
                continue
            (report.deepspeed if inner is None else value).pop(key if inner is None else inner)
            names = (shown + key, f"{shown}{key}.{inner}")
            report.entries = [
                replace(entry, kind=IMPOSSIBLE, message=problems[0]) if entry.key in names else entry
                for entry in report.entries
            ]
    report.deepspeed = {key: value for key, value in report.deepspeed.items() if value != {}}
