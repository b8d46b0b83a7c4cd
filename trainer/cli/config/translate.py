"""Another program's configuration as ours, with an account of what became of every key."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainer.cli.config.answers import launch_line
from trainer.cli.config.writer import ConfigDraft
from trainer.config.files import foreign_kind, read_tree
from trainer.config.tree import Diagnostics
from trainer.errors import ConfigError

TAKEN, LAUNCH, MODULE = "taken over", "belongs to the command that starts it", "belongs to your module or data"
NOT_NEEDED, IMPOSSIBLE = "not needed", "cannot be done here"
KINDS = (TAKEN, LAUNCH, MODULE, NOT_NEEDED, IMPOSSIBLE)
WIDTH = 110


@dataclass(frozen=True)
class Row:
    """What became of one key."""

    kind: str
    """One of KINDS."""
    key: str
    value: str
    words: str


@dataclass
class MigrationReport:
    """What is known so far of a configuration that is being read."""

    source: Path
    kind: str = ""
    """What the file is, in words."""
    draft: ConfigDraft = field(default_factory=ConfigDraft)
    rows: list[Row] = field(default_factory=list)
    machines: int = 1
    devices: int | None = None
    """Processes on each machine."""
    host: str | None = None
    port: int = 29500
    rank: int | None = None

    # -- what became of a key ------------------------------------------------------------------------------------------

    def taken(self, key: str, value: Any, words: str) -> None:
        """It is this setting, in words or as a line of YAML."""
        self._add(TAKEN, key, value, words)

    def launched(self, key: str, value: Any, words: str) -> None:
        """It is an option of the command that starts the training."""
        self._add(LAUNCH, key, value, words)

    def of_module(self, key: str, value: Any, words: str) -> None:
        """It is written in the user's code."""
        self._add(MODULE, key, value, words)

    def not_needed(self, key: str, value: Any, words: str) -> None:
        """It has no counterpart, because ..."""
        self._add(NOT_NEEDED, key, value, words)

    def impossible(self, key: str, value: Any, words: str) -> None:
        """It has no counterpart. What to do instead."""
        self._add(IMPOSSIBLE, key, value, words)

    def _add(self, kind: str, key: str, value: Any, words: str) -> None:
        self.rows.append(Row(kind, key, _shown(value), words))

    # -- the account ---------------------------------------------------------------------------------------------------

    def start(self, command: str) -> str:
        """The command, with what starts it on these machines."""
        meeting = f"{self.host or 'HOST'}:{self.port}"
        return launch_line(command, self.machines, self.devices, meeting, self.rank)

    def report(self, written: str | None) -> str:
        """Every key, sorted by what became of it, and how to go on.

        Args:
            written: the new file; None: it was printed.
        """
        lines = [f"{self.source} is {self.kind}." + ("" if written is None else f" Written: {written}")]
        for kind in KINDS:
            rows = [row for row in self.rows if row.kind == kind]
            if rows:
                lines += ["", f"{kind}:"]
                width = min(46, max(len(_left(row)) for row in rows))
                for row in rows:
                    lines += _row(_left(row), row.words, width)
        file = written or "run.yaml"
        lines += ["", f"start it with: {self.start(f'trainer fit --config {file} module.yaml')}"]
        return "\n".join(lines) + "\n"


def translate(name: str) -> MigrationReport:
    """Read a file of another program.

    Raises:
        ConfigError: it cannot be read, or is none that is known.
    """
    findings = Diagnostics()
    path = Path(name).expanduser()
    tree = read_tree(str(path), findings)
    findings.report()
    assert tree is not None
    kind = foreign_kind(tree)
    if kind is None:
        raise ConfigError(
            f"{name} is neither an Accelerate configuration (with distributed_type) nor a DeepSpeed one (with "
            "zero_optimization). A configuration of ours goes to trainer fit --config as it is."
        )
    translation = MigrationReport(path, kind)
    if "DeepSpeed" in kind:
        from trainer.cli.config.from_deepspeed import from_deepspeed

        from_deepspeed(translation, tree.plain())
    else:
        from trainer.cli.config.from_accelerate import from_accelerate

        from_accelerate(translation, tree.plain())
    return translation


def flag(value: Any) -> bool:
    """Accelerate writes yes, 'yes', true and 1."""
    return str(value).lower() in ("yes", "true", "y", "on", "1")


def number(value: Any) -> float | None:
    """A number that may have been written as text; None: it is none."""
    try:
        return float(value)
    except (TypeError, ValueError):
        return None


def _shown(value: Any) -> str:
    text = str(value).lower() if isinstance(value, bool) else str(value)
    return text if len(text) <= 40 else text[:37] + "..."


def _left(row: Row) -> str:
    return f"{row.key}: {row.value}"


def _row(left: str, words: str, width: int) -> list[str]:
    """Two columns; the right one is wrapped."""
    indent = " " * (width + 4)
    right = textwrap.wrap(words, WIDTH - width - 4, break_long_words=False, break_on_hyphens=False)
    if len(left) > width:
        return [f"  {left}", *(indent + line for line in right)]
    return [f"  {left:<{width}}  {right[0]}", *(indent + line for line in right[1:])]
