"""The output of the processes that a launcher starts."""

from __future__ import annotations

from typing import NamedTuple


class Logs(NamedTuple):
    """Files and filters of the output of processes, in torchrun's words."""

    log_dir: str | None = None
    redirects: str = "0"
    tee: str = "0"
    local_ranks_filter: frozenset[int] | None = None
