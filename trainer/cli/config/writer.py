"""Write settings of the trainer, each with its reason, as commented YAML."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass, field
from typing import Any

ORDER = (
    "accelerator",
    "devices",
    "num_nodes",
    "strategy",
    "precision",
    "accumulate_grad_batches",
    "gradient_clip_val",
    "activation_checkpointing",
    "compile",
    "seed_per_sample",
    "profiler",
    "callbacks",
    "enable_checkpointing",
)
"""Order in which settings are written."""

OFTEN_SET = {
    "max_epochs: 10": "when to stop; also max_steps, max_time",
    "gradient_clip_val: 1.0": "clip the norm of all gradients",
    "activation_checkpointing: auto": "compute activations again: less memory, a third more work",
    "seed: 42": "the same weights and the same order of the data in every run",
    "default_root_dir: runs": "run directories are made here",
}
"""Settings that are written as comments."""

WIDTH = 110


@dataclass
class ConfigDraft:
    """The settings of the trainer that are known so far."""

    settings: dict[str, tuple[Any, str]] = field(default_factory=dict)
    """Value and reason by name."""
    arguments: dict[str, Any] = field(default_factory=dict)
    """Arguments of the strategy."""

    def set(self, name: str, value: Any, why: str = "") -> str:
        """Add a setting, or an argument of the strategy (`strategy.NAME`). Returns a line of YAML.

        Args:
            why: comment above the setting.
        """
        owner, _, argument = name.partition(".")
        if argument:
            self.arguments[argument] = value
        else:
            self.settings[owner] = (value, why)
        return f"{name}: {_inline(value)}"

    def value(self, name: str) -> Any:
        """Return a setting's value; None: not set."""
        return self.settings[name][0] if name in self.settings else None

    def text(self, head: list[str]) -> str:
        """Return the file's text.

        Args:
            head: the first lines, written as comments.
        """
        from trainer.config.files import to_yaml

        lines = [f"# {line}".rstrip() for line in head]
        lines += ["", "trainer:"]
        for name in sorted(self.settings, key=lambda name: ORDER.index(name) if name in ORDER else len(ORDER)):
            value, why = self.settings[name]
            if name == "strategy" and self.arguments:
                value = {"class_path": value, "init_args": self.arguments}
            lines += [f"  # {line}" for line in textwrap.wrap(why, WIDTH - 4)]
            lines += [f"  {line}" for line in to_yaml({name: value}).splitlines()]
        hints = {line: why for line, why in OFTEN_SET.items() if line.partition(":")[0] not in self.settings}
        if hints:
            lines += ["", "  # Often set, too; trainer fit --help lists everything:"]
            lines += [f"  # {line:<32}# {why}" for line, why in hints.items()]
        return "\n".join(lines) + "\n"


def _inline(value: Any) -> str:
    import yaml

    return yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=10**9).removesuffix("...\n").strip()
