"""Ask the questions of `trainer config`: each shows its default, and is repeated after an invalid answer."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from trainer.cli.config.answers import (
    LAYOUTS,
    MACHINES,
    OFFLOADS,
    PRECISIONS,
    WizardAnswers,
    offloads_of,
    strategy_name,
)
from trainer.errors import ConfigError, did_you_mean

T = TypeVar("T")

UNITS = {"step": ("every_n_train_steps", 1), "epoch": ("every_n_epochs", 1), "minute": ("train_time_interval", 60)}
"""Arguments of ModelCheckpoint by unit, with the factor of the unit."""


def ask_all() -> WizardAnswers:
    """Ask all questions but those with only one possible answer.

    Raises:
        ConfigError: the input has ended.
        KeyboardInterrupt: Ctrl-C.
    """
    print("Enter takes the answer in brackets. Ctrl-C ends this, and writes nothing.")
    machine = choose("Where will it run?", MACHINES, "auto")
    machines = ask("How many machines?", "1", whole_number)
    devices, layout = _processes(machine, machines)
    keepable = offloads_of(layout)
    offload = "no"
    if len(keepable) > 1:
        shown = {name: OFFLOADS[name] for name in keepable}
        offload = choose("What is kept in the memory of the CPU, if the GPUs' is too small?", shown, "no")
    precision = choose("Which numbers to compute with?", PRECISIONS, "32-true" if machine == "cpu" else "bf16-mixed")
    window = ask("How many batches make one step (gradient accumulation)?", "1", whole_number)
    return WizardAnswers(machine, machines, devices, layout, offload, precision, window, _checkpoints())


def _processes(machine: str, machines: int) -> tuple[int | str, str]:
    """Ask for the number of processes on each machine, and for how the model is sharded over them."""
    if machine == "tpu":
        return "auto", "tpu"
    if machine == "mps" and machines == 1:
        return 1, "one"
    where = " on each machine" if machines > 1 else ""
    default = "1" if machine == "cpu" else "all"
    devices = ask(f"How many processes{where}? One for each GPU is usual; 'all': as many.", default, number_or_all)
    if machines == 1 and devices == 1:
        return 1, "one"
    several = {name: words for name, (_, words) in LAYOUTS.items() if name not in ("one", "tpu")}
    also = {strategy_name(name): name for name in several}
    return devices, choose("What does each process hold?", several, "copies", also)


def _checkpoints() -> dict[str, Any]:
    example = "'1 epoch', '500 steps', '30 minutes' or 'never'"
    how_often = ask(f"How often to write a checkpoint? {example}.", "1 epoch", interval)
    if how_often is None:
        return {}
    name, amount = how_often
    arguments: dict[str, Any] = {name: amount}
    monitor = ask("Keep the best one, too, by which logged value? Such as val_loss, or 'none'.", "none", logged_name)
    if monitor is not None:
        arguments["monitor"] = monitor
    return arguments


# -- one question ------------------------------------------------------------------------------------------------------


def ask(question: str, default: str, read: Callable[[str], T]) -> T:
    """Return `read(answer)`; print the message of a ValueError and ask again."""
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


def choose(question: str, options: Mapping[str, str], default: str, also: Mapping[str, str] | None = None) -> str:
    """Return one of the options, by its number or its name.

    Args:
        options: meanings by name.
        also: options by other names.
    """
    names = list(options)
    width = max(map(len, names))
    print(f"\n{question}")
    for number, (name, words) in enumerate(options.items(), start=1):
        print(f"  {number}  {name:<{width}}  {words}")

    def read(text: str) -> str:
        name = (also or {}).get(text.lower(), text.lower())
        if name in options:
            return name
        if text.isdecimal() and 1 <= int(text) <= len(names):
            return names[int(text) - 1]
        close = did_you_mean(text, [*names, *(also or {})])
        raise ValueError(f"{text!r} is none of them.{close} Type a number from 1 to {len(names)}, or a name.")

    return ask("Which?", default, read)


def whole_number(text: str) -> int:
    """Return a number from 1."""
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(f"{text!r}: type a whole number from 1.")
    return int(text)


def number_or_all(text: str) -> int | str:
    """Return a number from 1, or "auto"."""
    if text.lower() in ("all", "auto"):
        return "auto"
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(f"{text!r}: type a whole number from 1, or 'all'.")
    return int(text)


def interval(text: str) -> tuple[str, int] | None:
    """Return an argument of ModelCheckpoint and its value; None: no checkpoints."""
    if text.lower() in ("never", "no"):
        return None
    match = re.fullmatch(r"(?:every\s+)?(\d+)?\s*(step|epoch|minute)s?", text.lower())
    if match is None or match[1] == "0":
        raise ValueError(f"{text!r}: type '1 epoch', '500 steps', '30 minutes' or 'never'.")
    name, unit = UNITS[match[2]]
    return name, int(match[1] or 1) * unit


def logged_name(text: str) -> str | None:
    """Return the name of a logged value; None: no name was given."""
    if text.lower() in ("none", "no"):
        return None
    if not re.fullmatch(r"[\w./-]+", text):
        raise ValueError(f"{text!r}: type a name under which the module logs, such as val_loss, or 'none'.")
    return text
