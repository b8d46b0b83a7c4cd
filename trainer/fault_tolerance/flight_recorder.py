"""Read torch's flight recorder: which collective this process waits in."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from typing import Any

_READ_S = 2.0


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
            (folder / f"flight-recorder-rank{rank}.json").write_bytes(text)

    # In a thread, because a device or a disk that hangs would hold it up.
    thread = threading.Thread(target=read, name="flight-recorder", daemon=True)
    thread.start()
    thread.join(_READ_S)
    return found[0] if found else ""


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
