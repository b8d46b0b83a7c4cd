"""Account for each key of another program's configuration: taken over, to do by hand, or left out."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from shlex import quote
from typing import Any

from trainer.cli.config.draft import WIDTH, ConfigDraft, inline, launch_line
from trainer.config.files import other_program, read_tree
from trainer.config.tree import Diagnostics

TAKEN, BY_HAND, LEFT_OUT = "taken over", "to do by hand", "left out"
KINDS = (TAKEN, BY_HAND, LEFT_OUT)


@dataclass(frozen=True)
class TranslatedLine:
    """A key of the other program, and its translation."""

    key: str
    value: str
    kind: str
    message: str


@dataclass
class Translation:
    """The translation of a file."""

    source: Path
    format: str
    draft: ConfigDraft = field(default_factory=ConfigDraft)
    entries: list[TranslatedLine] = field(default_factory=list)
    machines: int = 1
    address: str = "HOST:29500"

    def take(self, key: str, value: Any, settings: Mapping[str, Any], words: str = "") -> None:
        """Write settings by their names; of two values of one setting the first counts."""
        for name, setting in settings.items():
            former = self.draft.settings.get(name)
            if former not in (None, setting):
                self.add(key, value, BY_HAND, f"{name} is {former} already, which counts: two are asked for")
                return
        lines = [self.draft.set(name, setting) for name, setting in settings.items()]
        self.add(key, value, TAKEN, ", ".join(lines) + words)

    def add(self, key: str, value: Any, kind: str, words: str) -> None:
        """Account for a key that writes no setting."""
        shown = textwrap.shorten(inline(value), 40, placeholder="...")
        self.entries.append(TranslatedLine(key, shown, kind, words))

    def start(self, command: str) -> str:
        """Return the command that starts the training on these machines."""
        return launch_line(command, self.machines, self.draft.settings.get("devices"), self.address)

    def text(self, file: str) -> str:
        """Return all keys, grouped by kind of translation, and the next command, which reads the new file."""
        lines = [f"{self.source} is {self.format}, translated for {file}."]
        for kind in KINDS:
            entries = [(f"{entry.key}: {entry.value}", entry.message) for entry in self.entries if entry.kind == kind]
            lines += ["", f"{kind}:"] if entries else []
            for left, message in entries:
                lines.append(f"  {left}")
                lines.append(textwrap.indent(textwrap.fill(message, WIDTH, break_long_words=False), " " * 6))
        fit = f"trainer fit --config module.yaml {quote(file)}"
        return "\n".join([*lines, "", f"start it with: {self.start(fit)}"]) + "\n"


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


def is_off(value: Any) -> bool:
    """Whether a value means "off", or that somebody else decides: Accelerate writes no, 'no', false, null and ''."""
    return value in ([], {}) or str(value).lower() in ("", "no", "none", "false", "n", "off", "0", "auto", "default")


Reader = Callable[[Any], Any]
"""Reads a value as ours; None: it is not one that is known."""


def one_of(**known: Any) -> Reader:
    """Return a reader of values that are one of a few; `_2` stands for 2."""
    return lambda value: known.get(str(value).lower(), known.get(f"_{value}"))


def number(value: Any) -> float | None:
    """Return a finite number above 0, also one in a text."""
    with suppress(TypeError, ValueError):
        if 0 < float(value) < math.inf:
            return float(value)
    return None


def whole(value: Any) -> int | None:
    """Return a whole number from 1, also one in a text."""
    found = number(value)
    return int(found) if found is not None and found.is_integer() else None


def several(value: Any) -> int | None:
    """Return a whole number from 2: with 1 it is off."""
    return whole(value) if whole(value) != 1 else None


def text(value: Any) -> str | None:
    """Return a value as text."""
    return None if is_off(value) else str(value)


def names(value: Any) -> list[str] | None:
    """Return the names of a list, or of a text with commas."""
    found = value if isinstance(value, list) else str(value).split(",")
    return None if is_off(value) else [str(name).strip() for name in found]


def account(
    done: Translation,
    key: str,
    value: Any,
    settings: Mapping[str, tuple[str, Reader]],
    words: Mapping[str, tuple[str, str]],
    shown: str = "",
) -> bool:
    """Account for a key by tables; return False if they have neither the key nor its section.

    Args:
        settings: key -> our setting, and the reader of its values.
        words: key or section -> kind of translation, and what to say.
        shown: printed before the key.
    """
    setting, read = settings.get(key, ("", text))
    found = read(value) if setting else None
    said = words.get(key) or words.get(key.partition(".")[0])
    if found is not None:
        done.take(shown + key, value, {setting: found})
    elif setting and (is_off(value) or str(value).lower() in ("1", "true")):
        done.add(shown + key, value, LEFT_OUT, "it is off, or the default")
    elif setting:
        done.add(shown + key, value, BY_HAND, "not a value that is known: nothing is written")
    elif said is not None:
        kind, about = (LEFT_OUT, "it is off") if is_off(value) else said
        done.add(shown + key, value, kind, about)
    return bool(setting or said)
