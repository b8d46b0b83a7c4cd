"""List the trainer's arguments for `--help`."""

from __future__ import annotations

import json
import re
import textwrap
from dataclasses import fields
from typing import Any

from trainer.config.plug_names import precisions, strategies
from trainer.settings import Settings

NAMES = {"strategy": strategies, "precision": precisions}
"""The arguments that take a name of a table."""


TRAINING_ONLY = {
    "max_epochs",
    "max_steps",
    "min_epochs",
    "min_steps",
    "limit_train_batches",
    "val_check_interval",
    "check_val_every_n_epoch",
    "num_sanity_val_steps",
    "accumulate_grad_batches",
    "gradient_clip_val",
    "gradient_clip_algorithm",
    "enable_checkpointing",
    "activation_checkpointing",
}
"""The arguments that mean nothing to an evaluation."""


def arguments_help(command: str, width: int) -> str:
    """Return the list of the trainer's arguments for the `--help` of a command."""
    rest = "" if command == "fit" else "; trainer fit --help lists more for training"
    lines = [f"trainer arguments (under `trainer:` in a file, or as options{rest}):"]
    for field in fields(Settings):
        if command != "fit" and field.name in TRAINING_ONLY:
            continue
        lines.append(f"  --trainer.{field.name} {_readable(str(field.type))} (default: {shown(field.default)})")
        text = field.metadata["help"]
        if field.name in NAMES:
            text += f" The names are {', '.join(NAMES[field.name]())}."
        lines += textwrap.wrap(text, width, initial_indent=" " * 8, subsequent_indent=" " * 8)
    return "\n".join(lines) + "\n"


def _readable(annotation: str) -> str:
    """Return an annotation with the values of a `Literal` in its place."""
    return re.sub(r"Literal\[(.*?)\]", lambda choice: choice[1].replace(", ", " | "), annotation)


def shown(default: Any) -> str:
    """Return a default as a help shows it: null, true and false as in a file."""
    return json.dumps(default) if default is None or isinstance(default, bool) else repr(default)
