"""Define the questions of `trainer config`, the answers and the settings they mean, and the presets."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from trainer.cli.config.draft import LAYOUTS, MACHINES, PRECISIONS, ConfigDraft, strategy_name
from trainer.errors import ConfigError, did_you_mean
from trainer.metrics.monitor import implied_mode

T = TypeVar("T")

OFFLOADS = {
    "no": "nothing: it is the fastest",
    "optimizer": "the optimizer's state and the master weights",
    "all": "the weights, too: the slowest, and needs the least memory of the GPU",
}
OFFLOADED: dict[str, dict[str, dict[str, Any]]] = {
    "shards": {"all": {"cpu_offload": True}},
    "zero1": {"optimizer": {"offload_optimizer": "cpu"}},
    "zero2": {"optimizer": {"offload_optimizer": "cpu"}},
    "zero3": {
        "optimizer": {"offload_optimizer": "cpu"},
        "all": {"offload_optimizer": "cpu", "offload_parameters": "cpu"},
    },
}
"""Arguments of the strategy by layout and by the key of OFFLOADS."""


@dataclass(frozen=True)
class WizardAnswers:
    """The answers on where and how to train; None: no setting is written."""

    machine: str | None = None
    machines: int = 1
    devices: int | str | None = None
    """Processes on each machine; "auto": one for each device."""
    layout: str | None = None
    offload: str = "no"
    precision: str | None = None
    window: int = 1
    checkpoints: dict[str, Any] | None = None
    """Arguments of ModelCheckpoint; empty: no checkpoints."""

    def draft(self) -> ConfigDraft:
        """Return the settings that the answers mean."""
        layout = None if self.layout is None else strategy_name(self.layout)
        offloaded = OFFLOADED.get(self.layout or "", {}).get(self.offload, {})
        callbacks = [{"class_path": "ModelCheckpoint", "init_args": self.checkpoints}]
        settings = {
            "accelerator": self.machine,
            "devices": self.devices,
            "num_nodes": self.machines if self.machines > 1 else None,
            "strategy": layout,
            **{f"strategy.{name}": value for name, value in offloaded.items()},
            "precision": self.precision,
            "accumulate_grad_batches": self.window if self.window > 1 else None,
            "callbacks": callbacks if self.checkpoints else None,
            "enable_checkpointing": False if self.checkpoints == {} else None,
        }
        draft = ConfigDraft()
        for name, value in settings.items():
            if value is not None:
                draft.set(name, value)
        return draft


GPUS = WizardAnswers("auto", 1, "auto", precision="bf16-mixed")
PRESETS: dict[str, tuple[str, WizardAnswers]] = {
    "cpu": ("one process on the CPU", WizardAnswers("cpu", 1, 1, "one", precision="32-true")),
    "single-gpu": ("one GPU", replace(GPUS, devices=1, layout="one")),
    "multi-gpu": ("all GPUs of the machine, each with the full model", replace(GPUS, layout="copies")),
    strategy_name("shards"): ("all GPUs, the model sharded over them", replace(GPUS, layout="shards")),
    "fsdp-offload": ("the same, kept in the memory of the CPU", replace(GPUS, layout="shards", offload="all")),
    "zero2": ("all GPUs, DeepSpeed shards optimizer and gradients", replace(GPUS, layout="zero2")),
    "zero3": ("all GPUs, DeepSpeed shards the weights, too", replace(GPUS, layout="zero3")),
    "zero3-offload": ("the same, kept in the memory of the CPU", replace(GPUS, layout="zero3", offload="all")),
    "tpu": ("the TPUs of the machine", replace(GPUS, machine="tpu", layout="tpu")),
    "bf16": ("only the precision, to lay over another file", WizardAnswers(precision="bf16-mixed")),
    "fp16": ("only the precision, to lay over another file", WizardAnswers(precision="16-mixed")),
}

# -- the questions -----------------------------------------------------------------------------------------------------

SEVERAL = {name: words for name, (_, words) in LAYOUTS.items() if name not in ("one", "tpu")}
NUMBER = (r"0*[1-9]\d*", "type a whole number from 1.")
NUMBER_OR_ALL = (r"0*[1-9]\d*|all|auto", "type a whole number from 1, or 'all'.")
INTERVAL = (
    r"never|no|(?:every\s+)?(0*[1-9]\d*)?\s*(step|epoch|minute)s?",
    "type '1 epoch', '500 steps', '30 minutes' or 'never'.",
)
UNITS = {"step": ("every_n_train_steps", 1), "epoch": ("every_n_epochs", 1), "minute": ("train_time_interval", 60)}
"""Arguments of ModelCheckpoint by unit, with the factor of the unit."""
LOGGED = (r"[\w./-]+", "type a name under which the module logs, such as val_loss, or 'none'.")
"""Forms of an answer, with the words for any other."""


def ask_all() -> WizardAnswers:
    """Ask all questions but those with only one possible answer.

    Raises:
        ConfigError: the input has ended.
        KeyboardInterrupt: Ctrl-C.
    """
    print("Enter takes the answer in brackets. Ctrl-C ends this, and writes nothing.")
    machine = choose("Where will it run?", MACHINES, "auto")
    machines = int(ask("How many machines?", "1", NUMBER)[0])
    devices: int | str = "auto"
    if machine == "mps" and machines == 1:
        devices = 1
    elif machine != "tpu":
        where = " on each machine" if machines > 1 else ""
        question = f"How many processes{where}? One for each GPU is usual; 'all': as many."
        typed = ask(question, "1" if machine == "cpu" else "all", NUMBER_OR_ALL)[0]
        devices = int(typed) if typed.isdecimal() else "auto"
    layout = "tpu" if machine == "tpu" else "one"
    if machine != "tpu" and (machines > 1 or devices != 1):
        by_strategy = {strategy_name(name): name for name in SEVERAL}
        layout = choose("What does each process hold?", SEVERAL, "copies", by_strategy)
    offload = "no"
    if layout in OFFLOADED:
        keepable = {name: words for name, words in OFFLOADS.items() if name in ("no", *OFFLOADED[layout])}
        offload = choose("What is kept in the memory of the CPU, if the GPUs' is too small?", keepable, "no")
    precision = choose("Which numbers to compute with?", PRECISIONS, "32-true" if machine == "cpu" else "bf16-mixed")
    window = int(ask("How many batches make one step (gradient accumulation)?", "1", NUMBER)[0])
    return WizardAnswers(machine, machines, devices, layout, offload, precision, window, _checkpoints())


def _checkpoints() -> dict[str, Any]:
    example = "'1 epoch', '500 steps', '30 minutes' or 'never'"
    answer = ask(f"How often to write a checkpoint? {example}.", "1 epoch", INTERVAL)
    if answer[2] is None:
        return {}
    name, factor = UNITS[answer[2]]
    question = "Keep the best one, too, by which logged value? Such as val_loss, or 'none'."
    monitor = ask(question, "none", LOGGED, keep_case=True)[0]
    best = {} if monitor.lower() in ("none", "no") else {"monitor": monitor}
    if best and implied_mode(monitor) == "max":
        best["mode"] = "max"
    return {name: int(answer[1] or 1) * factor, **best}


def ask(question: str, default: str, form: tuple[str, str], keep_case: bool = False) -> re.Match[str]:
    """Return an answer that has one of the forms, as a match; others are answered with their words, and asked again."""
    pattern, words = form

    def read(text: str) -> re.Match[str]:
        match = re.fullmatch(pattern, text if keep_case else text.lower())
        if match is None:
            raise ValueError(f"{text!r}: {words}")
        return match

    return _ask(question, default, read)


def choose(question: str, options: Mapping[str, str], default: str, also: Mapping[str, str] | None = None) -> str:
    """Return one of the options (meanings by name), by its number, its name, or another name in `also`."""
    names, also = list(options), also or {}
    width = max(map(len, names))
    print(f"\n{question}")
    for number, (name, words) in enumerate(options.items(), start=1):
        print(f"  {number}  {name:<{width}}  {words}")

    def read(text: str) -> str:
        name = also.get(text.lower(), text.lower())
        if name in options:
            return name
        if text.isdecimal() and 1 <= int(text) <= len(names):
            return names[int(text) - 1]
        close = did_you_mean(text, [*names, *also])
        raise ValueError(f"{text!r} is none of them.{close} Type a number from 1 to {len(names)}, or a name.")

    return _ask("Which?", default, read)


def _ask(question: str, default: str, read: Callable[[str], T]) -> T:
    while True:
        try:
            typed = input(f"{question} [{default}] ").strip()
        except EOFError:
            print()
            raise ConfigError(
                "the input ended before the last question; nothing was written. Without a terminal to ask on: "
                "trainer config --preset NAME."
            ) from None
        try:
            return read(typed or default)
        except ValueError as reason:
            print(f"  {reason}")
