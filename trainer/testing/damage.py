"""Damage files and limit disks: flip bytes, truncate files, fill disks."""

from __future__ import annotations

import os
import resource
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def flip_byte(path: str | Path, position: int, mask: int = 0xFF) -> None:
    """Invert the bits of `mask` in the byte at `position` (negative: from the end), in place."""
    data = bytearray(Path(path).read_bytes())
    data[position] ^= mask
    Path(path).write_bytes(data)


def truncate(path: str | Path, size: int) -> None:
    """Truncate a file to `size` bytes (negative: cut off this many from its end)."""
    length = Path(path).stat().st_size
    os.truncate(path, size if size >= 0 else max(0, length + size))


def each_damage(folder: str | Path) -> Iterator[str]:
    """Damage every file of a directory in every way, one at a time, and restore it after each.

    The ways: a byte flipped in each part of the file (of safetensors: the length of the header, the header, the first
    and the last byte of the tensors), one bit flipped in its middle, truncated to nothing, to half, and by one byte,
    extended by one byte, and removed.

    Yields:
        A description of the current damage that begins with the file's name.
    """
    for path in sorted(path for path in Path(folder).iterdir() if path.is_file()):
        original = path.read_bytes()
        for what, damaged in _ways(path.name, original):
            try:
                if damaged is None:
                    path.unlink()
                else:
                    path.write_bytes(damaged)
                yield f"{path.name}: {what}"
            finally:
                path.write_bytes(original)


def _ways(name: str, original: bytes) -> Iterator[tuple[str, bytes | None]]:
    positions = {"first byte": 0, "middle": len(original) // 2, "last byte": len(original) - 1}
    if name.endswith(".safetensors"):
        header = 8 + int.from_bytes(original[:8], "little")
        positions |= {"length of the header": 7, "header": 8, "end of the header": header - 1, "first tensor": header}
    for what, position in positions.items():
        if 0 <= position < len(original):
            yield f"{what} flipped", _flipped(original, position, 0xFF)
    yield "one bit flipped", _flipped(original, len(original) * 2 // 3, 0x01)
    yield "cut off to nothing", b""
    yield "cut off to half", original[: len(original) // 2]
    yield "last byte cut off", original[:-1]
    yield "one byte too many", original + b"\0"
    yield "removed", None


def _flipped(original: bytes, position: int, mask: int) -> bytes:
    return original[:position] + bytes([original[position] ^ mask]) + original[position + 1 :]


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """Make writes beyond `size` bytes of a file fail, in this process and those that it starts in the block."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@contextmanager
def small_disk(folder: str | Path, size: int) -> Iterator[Path]:
    """Mount a disk of `size` bytes in memory at `folder`, which is created, and unmount it afterwards (Linux).

    Raises:
        PermissionError: this user may not mount (root may, outside of most containers).
    """
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(target)]
    mounted = subprocess.run(command, capture_output=True, text=True, check=False)
    if mounted.returncode != 0:
        raise PermissionError(f"a small disk cannot be mounted at {target}: {mounted.stderr.strip()}")
    try:
        yield target
    finally:
        subprocess.run(["umount", "--lazy", str(target)], check=False)
