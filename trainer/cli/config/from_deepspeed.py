"""Translate a DeepSpeed JSON: keys with an equivalent become settings, and DeepSpeed still reads all others."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

from trainer.arguments import flat_names
from trainer.cli.config.draft import strategy_name
from trainer.cli.config.translation import (
    BY_HAND,
    LEFT_OUT,
    TAKEN,
    Reader,
    Translation,
    account,
    number,
    one_of,
    text,
    whole,
)

COPIES = strategy_name("copies")
STAGE = one_of(_0=COPIES, **{f"_{number}": strategy_name(f"zero{number}") for number in (1, 2, 3)})
OFFLOAD = one_of(cpu="cpu", nvme="nvme")
SETTINGS: dict[str, tuple[str, Reader]] = {
    "fp16.enabled": ("precision", one_of(true="16-mixed")),
    "bf16.enabled": ("precision", one_of(true="bf16-mixed")),
    "bfloat16.enabled": ("precision", one_of(true="bf16-mixed")),
    "wall_clock_breakdown": ("profiler", one_of(true="simple")),
    "gradient_accumulation_steps": ("accumulate_grad_batches", whole),
    "gradient_clipping": ("gradient_clip_val", number),
    "zero_optimization.stage": ("strategy", STAGE),
    "zero_optimization.offload_optimizer.device": ("strategy.offload_optimizer", OFFLOAD),
    "zero_optimization.offload_param.device": ("strategy.offload_parameters", OFFLOAD),
    "zero_optimization.offload_optimizer.nvme_path": ("strategy.nvme_path", text),
    "zero_optimization.offload_param.nvme_path": ("strategy.nvme_path", text),
}
"""A key -> our setting, and the reader of its values."""
_GATHER = LEFT_OUT, "checkpoints hold the full weights: trainer checkpoint export"
_OWN_LOADER = BY_HAND, "it needs DeepSpeed's own data loader: sample, sort or cut in your DataLoader"
WORDS: dict[str, tuple[str, str]] = {
    "checkpoint": (LEFT_OUT, "checkpoints are the trainer's own, and readable under any strategy"),
    "dataloader_drop_last": (LEFT_OUT, "the loop takes batches from your DataLoader: give it drop_last"),
    "steps_per_print": (LEFT_OUT, "log_every_n_steps of the trainer says how often the log is written"),
    "prescale_gradients": (LEFT_OUT, "gradients are averaged over processes in the way that loses least"),
    "tensorboard": (LEFT_OUT, "trainer.logger: TensorBoardLogger"),
    "csv_monitor": (LEFT_OUT, "trainer.logger: CSVLogger"),
    "wandb": (LEFT_OUT, "trainer.logger: WandbLogger"),
    "comet": (BY_HAND, "write a Logger of your own for it: a class with log_metrics"),
    **dict.fromkeys(("data_efficiency", "curriculum_learning"), _OWN_LOADER),
    "pipeline": (BY_HAND, "strategy: fsdp has pipeline_parallel; with DeepSpeed, ZeRO 3 shards the weights instead"),
    "tensor_parallel": (BY_HAND, "strategy: fsdp has tensor_parallel; with DeepSpeed, ZeRO 3 shards the weights"),
    "autotuning": (BY_HAND, "use deepspeed --autotuning outside of the trainer"),
    "elasticity": (BY_HAND, "use trainer launch --nnodes MIN:MAX"),
    "zero_optimization.stage3_gather_16bit_weights_on_model_save": _GATHER,
    "zero_optimization.stage3_gather_fp16_weights_on_model_save": _GATHER,
    "scheduler.type": (BY_HAND, 'configure_optimizers: {"scheduler": a scheduler of torch, "interval": "step"}'),
    **dict.fromkeys(("optimizer", "scheduler"), (BY_HAND, "an argument of it")),
}
"""A key or section that is not given to DeepSpeed -> its kind of translation, and what to say."""


def from_deepspeed(done: Translation, given: Mapping[str, Any], shown: str = "") -> None:
    """Account for every key of a DeepSpeed configuration. `shown`: printed before the keys."""
    read: dict[str, Any] = {}
    off = [name for name in ("fp16", "bf16", "bfloat16") if given.get(name, {}).get("enabled") is not True]
    for key, value in flat_names(given, ".").items():
        if key == "optimizer.type":
            parameters = {name: one for name, one in given["optimizer"].get("params", {}).items() if one != "auto"}
            arguments = "".join(f", {name}={one!r}" for name, one in parameters.items())
            words = f"configure_optimizers: torch.optim.{value}(self.parameters(){arguments})"
            done.add(shown + key, value, BY_HAND, words)
        elif value == "auto" and "." not in key:
            done.add(shown + key, value, LEFT_OUT, "the trainer and your data say it")
        elif account(done, key, value, SETTINGS, WORDS, shown):
            continue
        elif key.partition(".")[0] in off:
            done.add(shown + key, value, LEFT_OUT, "it is off: the trainer's precision decides")
        elif problems := _problems(key, value):
            done.add(shown + key, value, BY_HAND, problems[0])
        else:
            part = read
            *sections, last = key.split(".")
            for section in sections:
                part = part.setdefault(section, {})
            part[last] = value
            done.add(shown + key, value, TAKEN, "DeepSpeed reads it (strategy.config)")
    if done.draft.settings.get("strategy") is None:
        words = ", as DeepSpeed's stage is 0 where none is given"
        done.take(f"{shown}zero_optimization.stage", None, {"strategy": COPIES}, words)
    if done.draft.settings.get("strategy") == COPIES:
        for name in [name for name in done.draft.settings if name.startswith("strategy.")]:
            del done.draft.settings[name]
    elif read:
        done.draft.set("strategy.config", read)


def _problems(key: str, value: Any) -> list[str]:
    """Return the problems that the installed DeepSpeed has with a key, which `fit` would refuse."""
    if find_spec("deepspeed") is None:
        return []
    from trainer.strategies.deepspeed.config_checks import key_problems

    for part in reversed(key.split(".")):
        value = {part: value}
    return key_problems(value)
