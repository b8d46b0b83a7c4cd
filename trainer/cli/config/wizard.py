"""Define the presets of `trainer config`, and the questions, whose answers are settings."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from trainer.cli.config.draft import LAYOUTS, MACHINES, PRECISIONS, ConfigDraft, strategy_name
from trainer.errors import ConfigError, did_you_mean
from trainer.metrics.monitor import implied_mode

GPUS = "accelerator: auto, devices: auto, precision: bf16-mixed"
OFFLOAD_ALL = "strategy.offload_optimizer: cpu, strategy.offload_parameters: cpu"
PRESETS = {
    "cpu": ("one process on the CPU", "accelerator: cpu, devices: 1, strategy: single_device, precision: 32-true"),
    "single-gpu": ("one GPU", "accelerator: auto, devices: 1, strategy: single_device, precision: bf16-mixed"),
    "multi-gpu": ("all GPUs of the machine, each with the full model", f"{GPUS}, strategy: ddp"),
    strategy_name("shards"): ("all GPUs, the model sharded over them", f"{GPUS}, strategy: fsdp"),
    "fsdp-offload": ("the same, kept in the memory of the CPU", f"{GPUS}, strategy: fsdp, strategy.cpu_offload: true"),
    "zero2": ("all GPUs, DeepSpeed shards optimizer and gradients", f"{GPUS}, strategy: deepspeed_stage_2"),
    "zero3": ("all GPUs, DeepSpeed shards the weights, too", f"{GPUS}, strategy: deepspeed_stage_3"),
    "zero3-offload": ("the same, kept in the memory of the CPU", f"{GPUS}, strategy: deepspeed_stage_3, {OFFLOAD_ALL}"),
    "tpu": ("the TPUs of the machine", "accelerator: tpu, devices: auto, strategy: xla, precision: bf16-mixed"),
    "bf16": ("only the precision, to lay over another file", "precision: bf16-mixed"),
    "fp16": ("only the precision, to lay over another file", "precision: 16-mixed"),
}
"""The description and the settings of each preset."""

# -- the questions -----------------------------------------------------------------------------------------------------

OFFLOADS = {
    "no": "nothing: it is the fastest",
    "optimizer": "the optimizer's state and the master weights",
    "all": "the weights, too: the slowest, and needs the least memory of the GPU",
}
OFFLOADED = {
    "shards": {"all": "strategy.cpu_offload: true"},
    "zero1": {"optimizer": "strategy.offload_optimizer: cpu"},
    "zero2": {"optimizer": "strategy.offload_optimizer: cpu"},
    "zero3": {"optimizer": "strategy.offload_optimizer: cpu", "all": OFFLOAD_ALL},
}
"""Settings by layout and by the key of OFFLOADS."""
SEVERAL = {name: words for name, (_, words) in LAYOUTS.items() if name not in ("one", "tpu")}
NUMBER = (r"0*[1-9]\d*", "type an integer from 1.")
NUMBER_OR_ALL = (r"0*[1-9]\d*|all|auto", "type an integer from 1, or 'all'.")
INTERVAL = (
    r"never|no|(?:every\s+)?(0*[1-9]\d*)?\s*(step|epoch|minute)s?",
    "type '1 epoch', '500 steps', '30 minutes' or 'never'.",
)
UNITS = {"step": ("every_n_train_steps", 1), "epoch": ("every_n_epochs", 1), "minute": ("train_time_interval", 60)}
"""Arguments of ModelCheckpoint by unit, with the factor of the unit."""
LOGGED = (r"[\w./-]+", "type a name under which the module logs, such as val_loss, or 'none'.")
"""Forms of an answer, with the words for any other."""


def ask_all() -> ConfigDraft:
    """Ask all questions but those with only one possible answer, and return the settings that the answers mean.

    Raises:
        ConfigError: the input has ended.
        KeyboardInterrupt: Ctrl-C.
    """
    print("Enter takes the answer in brackets. Ctrl-C ends this, and writes nothing.")
    draft = ConfigDraft()
    machine = choose("Where will it run?", MACHINES, "auto", {"gpu": "cuda"})
    draft.set("accelerator", machine)
    machines = int(ask("How many machines?", "1", NUMBER)[0])
    if machines > 1:
        draft.set("num_nodes", machines)
    devices: int | str = "auto"
    if machine != "tpu":
        question = "How many processes on each machine? One for each GPU is usual; 'all': as many."
        typed = ask(question, "1" if machine in ("cpu", "mps") else "all", NUMBER_OR_ALL)[0]
        devices = int(typed) if typed.isdecimal() else "auto"
    draft.set("devices", devices)
    layout = "tpu" if machine == "tpu" else "one"
    if machine != "tpu" and (machines > 1 or devices != 1):
        by_strategy = {strategy_name(name): name for name in SEVERAL}
        layout = choose("What does each process hold?", SEVERAL, "copies", by_strategy)
    draft.add(LAYOUTS[layout][0])
    if layout in OFFLOADED:
        keepable = {name: words for name, words in OFFLOADS.items() if name in ("no", *OFFLOADED[layout])}
        offload = choose("What is kept in the memory of the CPU, if the GPUs' is too small?", keepable, "no", {})
        draft.add(OFFLOADED[layout].get(offload, ""))
    usual = "32-true" if machine == "cpu" else "bf16-mixed"
    draft.set("precision", choose("Which numbers to compute with?", PRECISIONS, usual, {}))
    window = int(ask("How many batches make one step (gradient accumulation)?", "1", NUMBER)[0])
    if window > 1:
        draft.set("accumulate_grad_batches", window)
    _ask_for_checkpoints(draft)
    return draft


def _ask_for_checkpoints(draft: ConfigDraft) -> None:
    example = "'1 epoch', '500 steps', '30 minutes' or 'never'"
    answer = ask(f"How often to write a checkpoint? {example}.", "1 epoch", INTERVAL)
    if answer[2] is None:
        draft.set("enable_checkpointing", False)
        return
    name, factor = UNITS[answer[2].lower()]
    arguments: dict[str, Any] = {name: int(answer[1] or 1) * factor}
    question = "Keep the best one, too, by which logged value? Such as val_loss, or 'none'."
    monitor = ask(question, "none", LOGGED)[0]
    if monitor.lower() not in ("none", "no"):
        arguments["monitor"] = monitor
        if implied_mode(monitor) == "max":
            arguments["mode"] = "max"
    if arguments != {"every_n_epochs": 1}:  # the default; a list here replaces another file's
        draft.set("callbacks", [{"class_path": "ModelCheckpoint", "init_args": arguments}])


def ask(question: str, default: str, form: tuple[str, str]) -> re.Match[str]:
    """Return an answer of this form, as a match; for any other answer print the form's words, and ask again."""
    pattern, words = form
    while True:
        typed = _typed(question, default)
        match = re.fullmatch(pattern, typed, re.IGNORECASE | re.ASCII)
        if match is not None:
            return match
        print(f"  {typed!r}: {words}")


def choose(question: str, options: Mapping[str, str], default: str, also: Mapping[str, str]) -> str:
    """Return one of the options (meanings by name), by its number, its name, or another name in `also`."""
    numbers = {str(number): name for number, name in enumerate(options, start=1)}
    width = max(map(len, options))
    print(f"\n{question}")
    for number, name in numbers.items():
        print(f"  {number}  {name:<{width}}  {options[name]}")
    known = {**also, **numbers, **dict(zip(options, options, strict=True))}
    while (typed := _typed("Which?", default).lower()) not in known:
        print(f"  {typed!r} is not an option.{did_you_mean(typed, known)} Type a number or a name.")
    return known[typed]


def _typed(question: str, default: str) -> str:
    try:
        return input(f"{question} [{default}] ").strip() or default
    except EOFError:
        print()
        words = "the input ended before the last question, and nothing was written. Use trainer config --preset NAME."
        raise ConfigError(words) from None
