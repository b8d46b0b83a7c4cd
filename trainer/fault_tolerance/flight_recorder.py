"""Read torch's flight recorder: which collective this process waits in."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

_READ_S = 2.0
T = TypeVar("T")


@dataclass(frozen=True)
class Position:
    """The position of this process's main thread among the collectives of torch."""

    newest: dict[str, int]
    """Group: the number of the newest collective that this process has begun in it, 0 for none. Groups without a known
    number are left out."""
    waits_in: tuple[str, int, str] | None
    """The oldest collective that has not ended: its group, its number there, and a description."""


def switch_on() -> None:
    """Have torch record the newest collectives; before the process group is made."""
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "500")


def waiting_in(folder: Path | None, rank: int) -> str:
    """Return a description of the collective that this process waits in; empty if nothing is recorded.

    All that is recorded goes to `flight-recorder-rank<r>.json` in `folder`.
    """

    def read() -> str:
        text = _dump()
        words = _describe_collectives(json.loads(text).get("entries", []))
        if folder is not None and words:
            path = folder / f"flight-recorder-rank{rank}.json"
            path.unlink(missing_ok=True)
            with open(path, "xb") as file:  # a new file: there may be a link to another one
                file.write(text)
        return words

    return _within_limit(read, "")


def position() -> Position:
    """Return how far this process is in all its groups; takes milliseconds."""

    def read() -> Position:
        recorded = json.loads(_dump())
        # Python's other threads run at their own pace; autograd's threads, unknown to Python, do not.
        others = {str(thread.ident) for thread in threading.enumerate()} - {str(threading.main_thread().ident)}
        entries = [
            one for one in recorded.get("entries", []) if not one["is_p2p"] and one.get("thread_id") not in others
        ]
        pending = next((one for one in entries if not one["retired"]), None)
        return Position(_newest(recorded), None if pending is None else (*_number(pending), _name(pending)))

    return _within_limit(read, Position({}, None))


def _newest(recorded: dict[str, Any]) -> dict[str, int]:
    """Return the number of the newest collective of each group, 0 for none; without groups whose number is unknown.

    The entries name their group, but old ones are overwritten; the status has the numbers of all groups, by their place
    in the order of this process.
    """
    import torch.distributed as dist

    status, entries = recorded.get("pg_status", {}), recorded.get("entries", [])
    newest: dict[str, int] = {}
    for entry in entries:
        name, number = _number(entry)
        newest[name] = max(newest.get(name, 0), number)
    made = list(dist.distributed_c10d._world.pg_names.values())
    if all(made[entry["pg_id"] : entry["pg_id"] + 1] == [entry["process_group"][0]] for entry in entries):
        for place, name in enumerate(made):
            newest[name] = int(status.get(str(place), {}).get("last_enqueued_collective", 0))
    return newest


def _dump() -> bytes:
    from torch._C import _distributed_c10d

    return bytes(_distributed_c10d._dump_fr_trace_json())  # type: ignore[attr-defined]


def _within_limit(read: Callable[[], T], otherwise: T) -> T:
    """Return what `read` returns, or `otherwise` if it takes long: a device or a disk that hangs would hold it up."""
    found: list[T] = []
    thread = threading.Thread(target=lambda: found.append(read()), name="flight-recorder", daemon=True)
    thread.start()
    thread.join(_READ_S)
    return found[0] if found else otherwise


def _describe_collectives(entries: list[dict[str, Any]]) -> str:
    if not entries:
        return ""
    waiting = next((entry for entry in entries if not entry["retired"]), None)
    if waiting is None:
        return f"in no collective, after {_name(entries[-1])}"
    return f"waits in {_name(waiting)}"


def _number(entry: dict[str, Any]) -> tuple[str, int]:
    """Return the group of a collective, and its number there."""
    return entry["process_group"][0], int(entry["collective_seq_id"])


def _name(entry: dict[str, Any]) -> str:
    group, description = entry["process_group"]
    where = description if description != "undefined" else f"process group {group}"
    kind = entry["profiling_name"].rpartition(":")[2]
    return f"{kind} of {entry['input_sizes']}, number {entry['collective_seq_id']} of {where}"
