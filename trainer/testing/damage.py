"""Files and disks that fail: bytes that change, files that end too early, disks without room."""

from __future__ import annotations

import os
import resource
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def flip_byte(path: str | Path, position: int, mask: int = 0xFF) -> None:
    """Change the byte at `position` (negative: from the end) in place: its bits of `mask` are inverted."""
    data = bytearray(Path(path).read_bytes())
    data[position] ^= mask
    Path(path).write_bytes(data)


def truncate(path: str | Path, size: int) -> None:
    """Cut a file off after `size` bytes (negative: so many from its end)."""
    length = Path(path).stat().st_size
    os.truncate(path, size if size >= 0 else max(0, length + size))


def each_damage(folder: str | Path) -> Iterator[str]:
    """Damage every file of a folder in every way, one way at a time; each time the folder is whole again afterwards.

    The ways: a byte flipped in each part of the file (of safetensors: the length of the header, the header, the first
    and the last of the tensors' bytes), one bit in its middle, cut off to nothing, to half, by one byte, one byte too
    many, and removed.

    Yields:
        What is wrong at the moment, beginning with the file's name.
    """
    for path in sorted(path for path in Path(folder).iterdir() if path.is_file()):
        whole = path.read_bytes()
        for what, damaged in _ways(path.name, whole):
            try:
                if damaged is None:
                    path.unlink()
                else:
                    path.write_bytes(damaged)
                yield f"{path.name}: {what}"
            finally:
                path.write_bytes(whole)


def _ways(name: str, whole: bytes) -> Iterator[tuple[str, bytes | None]]:
    places = {"first byte": 0, "middle": len(whole) // 2, "last byte": len(whole) - 1}
    if name.endswith(".safetensors"):
        header = 8 + int.from_bytes(whole[:8], "little")
        places |= {"length of the header": 7, "header": 8, "end of the header": header - 1, "first tensor": header}
    for what, position in places.items():
        if 0 <= position < len(whole):
            yield f"{what} flipped", _flipped(whole, position, 0xFF)
    yield "one bit flipped", _flipped(whole, len(whole) * 2 // 3, 0x01)
    yield "cut off to nothing", b""
    yield "cut off to half", whole[: len(whole) // 2]
    yield "last byte cut off", whole[:-1]
    yield "one byte too many", whole + b"\0"
    yield "removed", None


def _flipped(whole: bytes, position: int, mask: int) -> bytes:
    return whole[:position] + bytes([whole[position] ^ mask]) + whole[position + 1 :]


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """In this process, and those that it starts meanwhile, no file grows beyond `size` bytes: writing fails instead."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@contextmanager
def small_disk(folder: str | Path, size: int) -> Iterator[Path]:
    """A disk of `size` bytes at `folder`, which is made; it is in memory, and gone afterwards (Linux).

    Raises:
        PermissionError: this user may not mount anything (root may, outside of most containers).
    """
    place = Path(folder)
    place.mkdir(parents=True, exist_ok=True)
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(place)]
    mounted = subprocess.run(command, capture_output=True, text=True, check=False)
    if mounted.returncode != 0:
        raise PermissionError(f"a small disk cannot be mounted at {place}: {mounted.stderr.strip()}")
    try:
        yield place
    finally:
        subprocess.run(["umount", "--lazy", str(place)], check=False)
