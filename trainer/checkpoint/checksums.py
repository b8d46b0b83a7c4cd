"""The checksums of a checkpoint's files: XXH3-128, and SHA-256 in checkpoints of format 1.

Both find damage, and neither finds tampering: whoever changes a file can change the manifest too. XXH3 runs at the
speed of the memory, SHA-256 at a tenth of it or less: https://github.com/Cyan4973/xxHash.
"""

from __future__ import annotations

import hashlib
from typing import Protocol

ALGORITHMS = {1: "sha256", 2: "xxh3_128"}
"""The checksum of each version of the format, by its name in the manifest."""
NEWEST = ALGORITHMS[max(ALGORITHMS)]


class Digest(Protocol):
    """A checksum in the making, as those of hashlib and xxhash are."""

    def update(self, data: bytes | memoryview, /) -> None:
        """Add bytes."""

    def hexdigest(self) -> str:
        """Return the checksum of all bytes so far."""


def new_digest(algorithm: str = NEWEST) -> Digest:
    """Return a digest that has seen no bytes."""
    if algorithm == "sha256":
        return hashlib.sha256()
    from xxhash import xxh3_128  # not with `import trainer`

    return xxh3_128()
