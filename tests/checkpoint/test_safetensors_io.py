from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from tests.messages import raises_recorded
from trainer.checkpoint.deserialization import TensorInfo
from trainer.checkpoint.safetensors_io import file_chunks, read_tensors
from trainer.checkpoint.serialization import DTYPES
from trainer.checkpoint.storage import HashedReader
from trainer.errors import CheckpointError

NATIVE = [dtype for dtype in DTYPES.values() if not dtype.is_complex and "fnuz" not in str(dtype)]
LIBRARY = [dtype for dtype in NATIVE if dtype not in (torch.float8_e8m0fnu, torch.float4_e2m1fn_x2)]


def some_tensors() -> dict[str, torch.Tensor]:
    tensors = {str(dtype): torch.arange(6).to(torch.uint8).repeat(8) % 2 for dtype in LIBRARY}
    tensors = {name: values.view(dtype) for (name, values), dtype in zip(tensors.items(), LIBRARY, strict=True)}
    return {
        **tensors,
        "scalar": torch.tensor(2.5),
        "empty": torch.zeros(0, 3),
        "a/ü": torch.arange(6.0).reshape(2, 3).t(),
    }


def read(data: bytes, expected: dict[str, TensorInfo]) -> dict[str, torch.Tensor]:
    return dict(read_tensors(HashedReader(io.BytesIO(data), False, "x"), len(data), expected, "x"))


def described(tensors: dict[str, torch.Tensor]) -> dict[str, TensorInfo]:
    return {
        name: TensorInfo(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
        for name, tensor in tensors.items()
    }


def test_the_safetensors_library_reads_what_we_write(tmp_path: Path, assert_same: Callable[[Any, Any], None]) -> None:
    tensors = some_tensors()
    (tmp_path / "x.safetensors").write_bytes(b"".join(file_chunks(tensors)))
    loaded = safetensors.torch.load_file(tmp_path / "x.safetensors")
    assert_same({name: loaded[name] for name in tensors}, tensors)


def test_we_read_what_the_safetensors_library_writes(assert_same: Callable[[Any, Any], None]) -> None:
    tensors = {name: tensor.contiguous() for name, tensor in some_tensors().items()}
    loaded = read(safetensors.torch.save(tensors), described(tensors))
    assert_same({name: loaded[name] for name in tensors}, tensors)


def test_each_tensor_that_is_read_has_memory_of_its_own() -> None:
    tensors = some_tensors()
    loaded = read(b"".join(file_chunks(tensors)), described(tensors))
    assert all(tensor.untyped_storage().nbytes() == tensor.nbytes for tensor in loaded.values())


def forged(header: Any, body: bytes = b"\0" * 8) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + body


ENTRY = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\0" * 7,
        b"\xff" * 64,
        (10**15).to_bytes(8, "little") + b"{}",
        b"\x80\x04\x95\x10\0\0\0\0\0\0\0\x8c\x05posix\x94.",
        forged(b"["),
        forged(b"[" * 50_000),
        forged([]),
        forged({}),
        forged({"w": 1}),
        forged({"w": ENTRY, "v": ENTRY}),
        forged({"w": {**ENTRY, "dtype": "F64"}}),
        forged({"w": {**ENTRY, "shape": [4]}}),
        forged({"w": {**ENTRY, "shape": [2**40, 2**40]}}),
        forged({"w": {**ENTRY, "data_offsets": [0, 4]}}),
        forged({"w": {**ENTRY, "data_offsets": [4, 12]}}),
        forged({"w": {**ENTRY, "data_offsets": [-8, 0]}}),
        forged({"w": {**ENTRY, "data_offsets": [0.0, 8.0]}}),
        forged({"w": {**ENTRY, "data_offsets": {}}}),
        forged({"w": {"dtype": "F32", "shape": [2]}}),
        forged({"w": ENTRY}, b"\0" * 7),
        forged({"w": ENTRY}, b"\0" * 9),
    ],
    ids=range(22),
)
def test_files_that_do_not_hold_the_expected_tensors_are_refused(data: bytes) -> None:
    expected = {"w": TensorInfo("w", "float32", (2,))}
    assert read(forged({"w": ENTRY}), expected)["w"].tolist() == [0, 0]
    with raises_recorded(CheckpointError):
        read(data, expected)


def test_overlapping_tensors_are_refused() -> None:
    expected = {name: TensorInfo(name, "float32", (2,)) for name in "vw"}
    with raises_recorded(CheckpointError):
        read(forged({"v": ENTRY, "w": ENTRY}), expected)


def test_impossible_values_and_shapes_are_refused() -> None:
    entry: dict[str, Any] = {"dtype": "BOOL", "shape": [1], "data_offsets": [0, 1]}
    with raises_recorded(CheckpointError):
        read(forged({"w": entry}, b"\x02"), {"w": TensorInfo("w", "bool", (1,))})
    shape = (2**62, 2**62, 0)
    entry = {"dtype": "F32", "shape": list(shape), "data_offsets": [0, 0]}
    with raises_recorded(CheckpointError):
        read(forged({"w": entry}, b""), {"w": TensorInfo("w", "float32", shape)})
