"""EventFile: scalars in the file format of TensorBoard, written without its packages, in microseconds."""

from __future__ import annotations

import io
import logging
import math
import os
import socket
import struct
import time
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path

log = logging.getLogger("trainer")


class EventFile:
    """One `events.out.tfevents...` file, which only this object writes.

    A file is a sequence of TFRecords (length, its masked CRC-32C, data, its masked CRC-32C), each an `Event` message:
    github.com/tensorflow/tensorboard, tensorboard/compat/proto/event.proto and summary.proto. torch's `SummaryWriter`
    writes the same, and takes 440 microseconds for a scalar where this takes 10. What was added is kept in memory until
    `write`; when that fails (disk full), a warning says so once, and the next one tries again.

    Args:
        folder: where it is created.
        purge_step: TensorBoard forgets points of earlier files from this step on.
    """

    def __init__(self, folder: Path, purge_step: int | None = None) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        name = f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}"
        # Two runs of one process may begin within a second.
        self.path = folder / f"{name}.{len(list(folder.glob(f'{name}.*')))}"
        self._file: io.FileIO | None = None
        self._end = 0
        self._points: list[tuple[float, Mapping[str, float], int]] = []
        self._waiting = bytearray()
        self._failed = False
        version = _bytes_field(3, b"brain.Event:2")
        self._add(0, version)
        if purge_step is not None:
            self._add(purge_step, version)
            self._add(purge_step, _bytes_field(7, b"\x08\x01"))  # SessionLog(status=START)
        self.write()

    def add_scalars(self, values: Mapping[str, float], step: int) -> None:
        """A point of each curve, at `step`. Encoded by `write`: many at once are quicker."""
        self._points.append((time.time(), values, step))

    def add_summary(self, summary: bytes, step: int) -> None:
        """A serialized `Summary` message."""
        self._encode_points()
        self._add(step, _bytes_field(5, summary))

    def write(self) -> None:
        """Bring what was added into the file."""
        self._encode_points()
        if not self._waiting:
            return
        try:
            if self._file is None:
                self._file = io.FileIO(self.path, "w")
            self._file.seek(self._end)
            view = memoryview(bytes(self._waiting))
            while view:
                view = view[self._file.write(view) :]
        except OSError as error:
            if not self._failed:
                log.warning("cannot write %s (%s); its points are kept in memory until it can be.", self.path, error)
            self._failed = True
        else:
            self._end += len(self._waiting)
            self._waiting = bytearray()
            self._failed = False

    def close(self) -> None:
        """Write what waits, and let go of the file."""
        self.write()
        if self._file is not None:
            self._file.close()
            self._file = None

    def _encode_points(self) -> None:
        for when, values, step in self._points:
            points = [_bytes_field(1, _bytes_field(1, n.encode()) + b"\x15" + _float(x)) for n, x in values.items()]
            self._add(step, _bytes_field(5, b"".join(points)), when)
        self._points.clear()

    def _add(self, step: int, content: bytes, when: float | None = None) -> None:
        seconds = struct.pack("<d", time.time() if when is None else when)
        data = b"\x09" + seconds + b"\x10" + _varint(step) + content
        length = struct.pack("<Q", len(data))
        self._waiting += length + _masked_crc(length) + data + _masked_crc(data)


def _bytes_field(number: int, value: bytes) -> bytes:
    """A field of a protobuf message that holds bytes, a string or a message."""
    return bytes([number << 3 | 2]) + _varint(len(value)) + value


def _varint(value: int) -> bytes:
    encoded = bytearray()
    while value > 127:
        encoded.append(value & 127 | 128)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


def _float(value: float) -> bytes:
    try:
        return struct.pack("<f", value)
    except OverflowError:
        return struct.pack("<f", math.copysign(math.inf, value))


def _masked_crc(data: Iterable[int]) -> bytes:
    table, crc = _crc_table(), 0xFFFFFFFF
    for byte in data:
        crc = table[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    crc ^= 0xFFFFFFFF
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


@cache
def _crc_table() -> tuple[int, ...]:
    """Of CRC-32C (Castagnoli), reflected polynomial 0x82F63B78."""
    table = []
    for value in range(256):
        for _ in range(8):
            value = value >> 1 ^ (0x82F63B78 if value & 1 else 0)
        table.append(value)
    return tuple(table)
