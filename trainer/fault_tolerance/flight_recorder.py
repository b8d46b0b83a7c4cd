"""Read torch's flight recorder: which collective this process waits in."""

from __future__ import annotations

import json
import os
import tempfile
import threading
from pathlib import Path
from typing import Any

_READ_S = 2.0
_ALL = "default_pg"
"""torch's name for the group of all processes."""


def switch_on() -> None:
    """Have torch record the newest collectives; before the process group is made."""
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "500")


def waiting_in(folder: Path | None, rank: int) -> str:
    """Return the collective that this process waits in, in words; empty if nothing is recorded.

    All that is recorded goes to `flight-recorder-rank<r>.json` in `folder`.
    """
    found: list[str] = []

    def read() -> None:
        from torch._C import _distributed_c10d

        text = bytes(_distributed_c10d._dump_fr_trace_json())  # type: ignore[attr-defined]
        found.append(_in_words(json.loads(text).get("entries", [])))
        if folder is not None and found[0]:
            # Under a new name first: there may be a link to another file.
            descriptor, temporary = tempfile.mkstemp(dir=folder, prefix=".tmp-flight-recorder-")
            with open(descriptor, "wb") as file:
                file.write(text)
            os.replace(temporary, folder / f"flight-recorder-rank{rank}.json")

    # In a thread, because a device or a disk that hangs would hold it up.
    thread = threading.Thread(target=read, name="flight-recorder", daemon=True)
    thread.start()
    thread.join(_READ_S)
    return found[0] if found else ""


def newest_and_pending() -> tuple[int, int, str]:
    """Return the numbers of two collectives of all processes, 0 for none: the newest that this process has begun, and
    the oldest that it has not ended; and the latter in words."""
    found: list[tuple[int, int, str]] = []

    def read() -> None:
        from torch._C import _distributed_c10d

        text = bytes(_distributed_c10d._dump_fr_trace_json())  # type: ignore[attr-defined]
        entries = json.loads(text).get("entries", [])
        entries = [one for one in entries if one["process_group"][1] == _ALL and not one.get("is_p2p")]
        newest = max((int(one["collective_seq_id"]) for one in entries), default=0)
        pending = next((one for one in entries if not one["retired"]), None)
        found.append(
            (newest, 0, "") if pending is None else (newest, int(pending["collective_seq_id"]), _name(pending))
        )

    thread = threading.Thread(target=read, name="flight-recorder", daemon=True)
    thread.start()
    thread.join(_READ_S)
    return found[0] if found else (0, 0, "")


def _in_words(entries: list[dict[str, Any]]) -> str:
    if not entries:
        return ""
    waiting = next((entry for entry in entries if not entry["retired"]), None)
    if waiting is None:
        return f"in no collective, after {_name(entries[-1])}"
    return f"waits in {_name(waiting)}"


def _name(entry: dict[str, Any]) -> str:
    kind = entry["profiling_name"].rpartition(":")[2]
    return f"{kind} of {entry['input_sizes']}, number {entry['collective_seq_id']} of {entry['process_group'][1]}"
