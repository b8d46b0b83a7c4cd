"""Results of checks, as one line for people and as JSON for programs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Literal

Status = Literal["OK", "WARN", "FAIL"]


@dataclass(frozen=True)
class CheckResult:
    """What one check says."""

    status: Status
    subject: str
    found: str
    fix: str = ""
    """What to do about it; empty when it is OK."""

    def line(self) -> str:
        """`"WARN  disk  3 GiB are free. Make room ..."`."""
        return f"{self.status:<5} {self.subject:<13} {self.found}{f' {self.fix}' if self.fix else ''}"


def failed(verdicts: Sequence[CheckResult]) -> bool:
    """Whether any check failed."""
    return any(verdict.status == "FAIL" for verdict in verdicts)


def as_json(verdicts: Sequence[CheckResult]) -> str:
    """All of them, and whether all is well."""
    return json.dumps({"ok": not failed(verdicts), "checks": [asdict(verdict) for verdict in verdicts]}, indent=2)


def summary(verdicts: Sequence[CheckResult]) -> str:
    """The last line."""
    counts = {status: sum(verdict.status == status for verdict in verdicts) for status in ("OK", "WARN", "FAIL")}
    return ", ".join(f"{number} {status}" for status, number in counts.items())


def gib(size: float) -> str:
    """Bytes in words: `"3.2 GiB"`, `"64 MiB"`, `"12 KiB"`."""
    if size >= 2**30 / 10:
        return f"{size / 2**30:,.1f} GiB"
    return f"{size / 2**20:,.0f} MiB" if size >= 2**20 else f"{size / 2**10:,.0f} KiB"
