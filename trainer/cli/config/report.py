"""Report what became of each key of another program's configuration, by a rule for each."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainer.cli.config.answers import LAYOUTS, launch_line, strategy_name
from trainer.cli.config.writer import WIDTH, ConfigDraft
from trainer.errors import did_you_mean

TAKEN, LAUNCH, MODULE = "taken over", "belongs to the command that starts it", "belongs to your module or data"
NOT_NEEDED, IMPOSSIBLE = "not needed", "cannot be done here"
KINDS = (TAKEN, LAUNCH, MODULE, NOT_NEEDED, IMPOSSIBLE)

Setting = tuple[str, Any, str]
"""A name, its value, and the reason that is written above it."""


@dataclass(frozen=True)
class Rule:
    """The translation of a key.

    Args:
        kind: one of KINDS.
        words: explanation; `{line}` stands for the settings that are written.
        settings: the settings to write; `strategy.NAME` is an argument of the strategy.
        off: explanation of an empty or false value, for which nothing is written; "": no such special case.
    """

    kind: str
    words: str = "{line}"
    settings: tuple[Setting, ...] = ()
    off: str = ""


def strategy_setting(layout: str) -> Setting:
    """Return the setting for a strategy of LAYOUTS."""
    return ("strategy", strategy_name(layout), LAYOUTS[layout][1])


@dataclass(frozen=True)
class Row:
    """A key of the other program, and its translation."""

    kind: str
    key: str
    value: str
    words: str


@dataclass
class MigrationReport:
    """The translation of a configuration: the settings so far, the launch command, and a row for each key."""

    source: Path
    kind: str = ""
    """Name of the other program's format."""
    draft: ConfigDraft = field(default_factory=ConfigDraft)
    rows: list[Row] = field(default_factory=list)
    machines: int = 1
    devices: int | None = None
    """Processes on each machine."""
    host: str | None = None
    port: int = 29500
    stage: int | None = None
    """DeepSpeed's ZeRO stage."""
    deepspeed: dict[str, Any] = field(default_factory=dict)
    """Keys that DeepSpeed itself reads."""

    def add(self, key: str, value: Any, rule: Rule) -> None:
        """Apply a rule to a key."""
        if rule.off and is_off(value):
            rule = Rule(NOT_NEEDED, rule.off)
        line = ", ".join(self.draft.set(*setting) for setting in rule.settings)
        shown = str(value).lower() if isinstance(value, bool) else str(value)
        shown = shown if len(shown) <= 40 else shown[:37] + "..."
        self.rows.append(Row(rule.kind, key, shown, rule.words.replace("{line}", line)))

    def section(
        self,
        name: str,
        given: Mapping[str, Any],
        rules: Mapping[str, Rule],
        prefix: str = "",
        other: Rule | None = None,
    ) -> None:
        """Apply the rules of a section.

        Args:
            name: the section's name with a dot; "": the top of the file.
            rules: rules by key.
            prefix: the keys' prefix, left out in `rules`.
            other: rule for all other keys; None: unknown keys are mistakes.
        """
        for key, value in given.items():
            close = did_you_mean(str(key), [prefix + known for known in rules])
            unknown = Rule(IMPOSSIBLE, f"no key of accelerate 1.15.{close} Nothing was done with it")
            self.add(f"{name}{key}", value, rules.get(str(key).removeprefix(prefix), other or unknown))

    # -- the account ---------------------------------------------------------------------------------------------------

    def start(self, command: str) -> str:
        """Return the command that starts the training on these machines."""
        return launch_line(command, self.machines, self.devices, f"{self.host or 'HOST'}:{self.port}")

    def report(self, written: str | None) -> str:
        """Return a list of all keys, grouped by kind of translation, and the next commands.

        Args:
            written: the new file; None: it was printed.
        """
        lines = [f"{self.source} is {self.kind}." + ("" if written is None else f" Written: {written}")]
        for kind in KINDS:
            rows = [(f"{row.key}: {row.value}", row.words) for row in self.rows if row.kind == kind]
            if rows:
                lines += ["", f"{kind}:"]
                width = min(46, max(len(left) for left, _ in rows))
                for left, words in rows:
                    lines += _in_columns(left, words, width)
        fit = f"trainer fit --config {written or 'run.yaml'} module.yaml"
        lines += ["", f"start it with: {self.start(fit)}"]
        return "\n".join(lines) + "\n"


def is_off(value: Any) -> bool:
    """Whether a value means "off": Accelerate writes no, 'no', false, null and ''."""
    return value in ([], {}) or str(value).lower() in ("", "no", "none", "false", "n", "off", "0")


def number(value: Any) -> float | None:
    """Return a number that may be given as text; None: the value is not a number."""
    try:
        return float(value)
    except (TypeError, ValueError):
        return None


def precision_rule(report: MigrationReport, name: str, remark: str = "") -> Rule:
    """Return the rule of fp16 or bf16; the first of the two that is enabled counts."""
    full, why = {
        "fp16": ("16-mixed", "float16 with a scaled loss, master weights in float32"),
        "bf16": ("bf16-mixed", "bfloat16, master weights in float32"),
    }[name]
    former = report.draft.value("precision")
    if former not in (None, full, "32-true"):
        return Rule(IMPOSSIBLE, f"precision is {former} already: two are asked for; this one is left out")
    return Rule(TAKEN, "{line}" + remark, (("precision", full, why),))


def window_rule(value: Any) -> Rule:
    """Return the rule of gradient accumulation."""
    window = int(number(value) or 0)
    if window < 1:
        return Rule(IMPOSSIBLE, "it has to be a whole number from 1; nothing is written")
    if window == 1:
        return Rule(NOT_NEEDED, "one batch makes a step, which is the default")
    why = f"one step for every {window} batches of each process"
    return Rule(TAKEN, settings=(("accumulate_grad_batches", window, why),))


def clipping_rule(value: Any) -> Rule:
    """Return the rule of the norm to which gradients are clipped."""
    norm = number(value)
    if not norm or norm < 0:
        return Rule(IMPOSSIBLE, "it has to be a number above 0; nothing is written")
    return Rule(TAKEN, settings=(("gradient_clip_val", norm, "clip the norm of all gradients"),))


def _in_columns(left: str, words: str, width: int) -> list[str]:
    indent = " " * (width + 4)
    right = textwrap.wrap(words, WIDTH - width - 4, break_long_words=False, break_on_hyphens=False)
    if len(left) > width:
        return [f"  {left}", *(indent + line for line in right)]
    return [f"  {left:<{width}}  {right[0]}", *(indent + line for line in right[1:])]
