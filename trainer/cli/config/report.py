"""Account for each key of another program's configuration, by a table of rows; the first that fits a key counts.

A row is `KEY[=CASE] MARK <SETTINGS> WORDS | OFF`: one of MARKS; the settings to write, as YAML (`strategy.NAME` is an
argument of the strategy); the explanation, by default the settings; and that of an empty or false value, for which
nothing is written. `[SECTION]` stands above the rows of a section, and `*` for all its keys (without a section: for all
keys). Several keys or cases are joined by commas. A case is one of `cases_of` a value, or `?FLAG`, a flag of the file.
{NAME} stands for a fact of the file, {line} for the settings.
"""

from __future__ import annotations

import json
import math
import re
import textwrap
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from shlex import quote
from typing import Any

from trainer.cli.config.draft import WIDTH, ConfigDraft, launch_line, parse_settings
from trainer.config.files import other_program, read_tree
from trainer.config.tree import Diagnostics
from trainer.errors import did_you_mean

TAKEN, LAUNCH, MODULE = "taken over", "belongs to the command that starts it", "belongs to your module or data"
NOT_NEEDED, IMPOSSIBLE = "not needed", "cannot be done here"
KINDS = (TAKEN, LAUNCH, MODULE, NOT_NEEDED, IMPOSSIBLE)
MARKS = {"=": TAKEN, "+": TAKEN, ">": LAUNCH, "*": MODULE, "@": MODULE, "-": NOT_NEEDED, "!": IMPOSSIBLE}
KEPT = "+@"
"""Marks of keys that DeepSpeed itself reads, from the strategy's `config`."""


Rows = list[tuple[str, str, str]]
"""`KEY` with its section, `CASE` (empty: any) and the rest of each row."""


def read_rows(table: str) -> Rows:
    """Return the rows of a table."""
    rows, section = [], ""
    for line in re.sub(r"\n +", " ", table).strip().splitlines():
        if line.startswith("["):
            section = f"{line[1:-1]}." if len(line) > 2 else ""
        elif line:
            names, row = line.split(maxsplit=1)
            keys, _, cases = names.partition("=")
            rows += [(section + key, case, row) for key in keys.split(",") for case in cases.split(",")]
    return rows


@dataclass(frozen=True)
class TranslatedLine:
    """A key of the other program, and its translation."""

    key: str
    value: str
    kind: str
    message: str


@dataclass
class MigrationReport:
    """The translation of a configuration: its values, the settings so far, the launch command, all keys' entries."""

    source: Path
    format: str
    """Name of the other program's format."""
    given: dict[str, Any] = field(default_factory=dict)
    """Values by key, without the prefixes of sections: `fsdp_config.version`."""
    facts: dict[str, Any] = field(default_factory=lambda: {"machines": 1, "devices": None, "address": "HOST:29500"})
    """The values for {NAME} in rows. "devices": processes per machine; None: not known."""
    draft: ConfigDraft = field(default_factory=ConfigDraft)
    entries: list[TranslatedLine] = field(default_factory=list)
    deepspeed: dict[str, Any] = field(default_factory=dict)
    """Settings that DeepSpeed itself reads."""
    decided: dict[str, Any] = field(default_factory=dict)
    """Settings of the DeepSpeed JSON that the file names."""

    def number(self, key: str, default: float) -> int:
        """Return a key's value as an integer; the default if it is missing, 0 or not a number."""
        return int(number(self.given.get(key)) or default)

    def translate(
        self, flat: Mapping[str, tuple[str, Any]], rows: Rows, flags: Collection[str], shown: str = ""
    ) -> None:
        """Account for every key of a file.

        Args:
            flat: the result of `flatten`.
            flags: the flags of the file that are up.
            shown: printed before the keys.
        """
        self.given.update({key: value for key, (_, value) in flat.items()})
        for key, (name, value) in flat.items():
            section, _, inner = key.rpartition(".")
            within = f"{section}." if section else ""
            cases = {"", *cases_of(value), *(f"?{flag}" for flag in flags)}
            row = next((row for one, case, row in rows if one in (key, f"{within}*", "*") and case in cases), None)
            if row is None:
                known = {one.rpartition(".")[2] for one, _, _ in rows if one.startswith(within)}
                close = did_you_mean(name, [name.removesuffix(inner) + one for one in known])
                row = f"! no key of accelerate 1.15.{close} Nothing was done with it"
            self.add(shown + name, value, row)
            if row[0] in KEPT and value not in ({}, None):
                part = self.deepspeed
                for outer in filter(None, section.split(".")):
                    part = part.setdefault(outer, {})
                part[inner] = value

    def add(self, key: str, value: Any, row: str) -> None:
        """Apply a row to a key."""
        kind = MARKS[row[0]]
        text, _, off = row[1:].strip().partition(" | ")
        if off and is_off(value):
            kind, text = NOT_NEEDED, off
        facts = {**self.facts, "value": value, "lower": str(value).lower(), "json": json.dumps(value, default=str)}
        facts["number"] = number(value)
        facts["integer"] = int(facts["number"] or 0)
        inner, message = re.fullmatch(r"(?:<(.*?)>\s*)?(.*)", text, re.DOTALL).groups()  # type: ignore[union-attr]
        settings = parse_settings((inner or "").format_map(facts))
        problem = self._contradiction(settings)
        if problem:
            kind, message, settings = IMPOSSIBLE, "", {}
        facts["line"] = problem or ", ".join(self.draft.set(name, setting) for name, setting in settings.items())
        shown = str(value).lower() if isinstance(value, bool) else str(value)
        shown = shown if len(shown) <= 40 else shown[:37] + "..."
        self.entries.append(TranslatedLine(key, shown, kind, (message or "{line}").format_map(facts)))

    def _contradiction(self, settings: Mapping[str, Any]) -> str:
        """Return why settings are left out, or ""; the first precision counts, and all of a DeepSpeed JSON."""
        for name, value in settings.items():
            if self.decided.get(name, value) != value:
                return f"deepspeed_config_file says {name}: {self.decided[name]}, which counts; Accelerate refuses both"
        former = self.draft.settings.get("precision")
        if former not in (None, "32-true", settings.get("precision", former)):
            return f"precision is {former} already: two are asked for; this one is left out"
        return ""

    def start(self, command: str) -> str:
        """Return the command that starts the training on these machines."""
        return launch_line(command, self.facts["machines"], self.facts["devices"], self.facts["address"])

    def text(self, written: str | None) -> str:
        """Return all keys, grouped by kind of translation, and the next command. `written`: the new file, if any."""
        lines = [f"{self.source} is {self.format}." + ("" if written is None else f" Written: {written}")]
        for kind in KINDS:
            entries = [(f"{entry.key}: {entry.value}", entry.message) for entry in self.entries if entry.kind == kind]
            width = min(46, max((len(left) for left, _ in entries), default=0))
            lines += ["", f"{kind}:"] if entries else []
            for left, message in entries:
                right = textwrap.wrap(message, WIDTH - width - 4, break_long_words=False, break_on_hyphens=False)
                right = right if len(left) <= width else ["", *right]
                lines += [f"  {left:<{width}}  {right[0]}".rstrip(), *(" " * (width + 4) + more for more in right[1:])]
        fit = f"trainer fit --config module.yaml {quote(written or 'run.yaml')}"
        lines += ["", f"start it with: {self.start(fit)}"]
        return "\n".join(lines) + "\n"


def cases_of(value: Any) -> list[str]:
    """Return the cases of a value: itself in upper case, OFF, DISABLED (a section), and those of numbers."""
    size = number(value) or 0
    others = {
        "OFF": is_off(value),
        "DISABLED": isinstance(value, dict) and value.get("enabled") is False,
        "POSITIVE": size > 0,
        "FROM_1": size >= 1,
        "FROM_2": size >= 2,
    }
    return [str(value).upper(), *(case for case, holds in others.items() if holds)]


def read_plain(path: Path) -> tuple[dict[str, Any], str | None]:
    """Return a file's values, and the program whose format it has, if there is one.

    Raises:
        ConfigError: the file cannot be read.
    """
    findings = Diagnostics()
    tree = read_tree(str(path), findings)
    findings.report()
    assert tree is not None
    return tree.plain(), other_program(tree)


def flatten(
    given: Mapping[str, Any], sections: Mapping[str, str], path: str = "", shown: str = ""
) -> dict[str, tuple[str, Any]]:
    """Return (key as the file has it, value) by key, going into `sections`, which map to the prefix of their keys."""
    flat: dict[str, tuple[str, Any]] = {}
    for key, value in given.items():
        name = path + str(key).removeprefix(sections.get(path[:-1], ""))
        if name in sections and isinstance(value, dict) and value:
            flat.update(flatten(value, sections, f"{name}.", f"{shown}{key}."))
        else:
            flat[name] = (f"{shown}{key}", value)
    return flat


def is_off(value: Any) -> bool:
    """Whether a value means "off": Accelerate writes no, 'no', false, null and ''."""
    return value in ([], {}) or str(value).lower() in ("", "no", "none", "false", "n", "off", "0")


def number(value: Any) -> float | None:
    """Return a value, or the number in a text, as a finite number; None if it is not a finite number."""
    try:
        found = float(value)
    except (TypeError, ValueError):
        return None
    return found if math.isfinite(found) else None
