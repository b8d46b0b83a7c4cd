"""Format results of checks as lines for people and as JSON for programs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Literal

Status = Literal["OK", "NOTE", "WARN", "FAIL"]


@dataclass(frozen=True)
class CheckResult:
    """The result of one check."""

    status: Status
    subject: str
    found: str
    fix: str = ""
    """Advice on the problem; empty when the status is OK."""

    def line(self) -> str:
        """Return a line such as `"WARN  disk  3 GiB are free. Make room ..."`."""
        return f"{self.status:<5} {self.subject:<13} {self.found} {self.fix}".rstrip()


def check_result(status: Status, problem: object, subject: str, found: str, fix: str) -> CheckResult:
    """Return a result of this status with its fix if there is a problem, else one that is OK."""
    return CheckResult(status, subject, f"{found}.", fix) if problem else CheckResult("OK", subject, found)


def failed(results: Sequence[CheckResult]) -> bool:
    """Whether any check failed."""
    return any(result.status == "FAIL" for result in results)


def as_json(results: Sequence[CheckResult]) -> str:
    """Return the results, and `ok`: no check failed, as JSON."""
    return json.dumps({"ok": not failed(results), "checks": [asdict(result) for result in results]}, indent=2)


def summary(results: Sequence[CheckResult]) -> str:
    """Return the last line: the number of results of each status."""
    counts = {status: sum(result.status == status for result in results) for status in ("OK", "NOTE", "WARN", "FAIL")}
    return ", ".join(f"{number} {status}" for status, number in counts.items() if number or status != "NOTE")


def gib(size: float) -> str:
    """Return a number of bytes as text: `"3.2 GiB"`, `"64 MiB"`, `"12 KiB"`."""
    if size >= 2**30 / 10:
        return f"{size / 2**30:,.1f} GiB"
    return f"{size / 2**20:,.0f} MiB" if size >= 2**20 else f"{size / 2**10:,.0f} KiB"
