from __future__ import annotations

import pickle
import random
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from tests.messages import raises_recorded
from trainer.callbacks.straggler_monitor import StepTimes
from trainer.checkpoint.disk import FileEntry, WriteError
from trainer.checkpoint.flat_slice import FlatSlice
from trainer.distributed.encoding import from_bytes, to_bytes
from trainer.errors import CheckpointError, ConfigError, TrainerError

VALUES = {
    "plain": [None, True, 3, -2.5, float("inf"), "ä\n", b"\x00x"],
    "nested": {"a": (1, {2, 3}), 4: {"b": []}, (5, 6): None, "<kind>": 1},
    "records": [FlatSlice(1, 2, 3, 4), FileEntry(5, "ab"), StepTimes(0, "host", 1, 2.0, 3.0, 4.0)],
    "dtypes": (torch.bfloat16, torch.int64, torch.Size([2, 3])),
}


@pytest.mark.parametrize("name", VALUES)
def test_values_arrive_with_their_types(name: str) -> None:
    received = from_bytes(to_bytes(VALUES[name]))
    assert received == VALUES[name]
    assert repr(type(received)) == repr(type(VALUES[name]))


def test_tensors_and_arrays_arrive_with_their_bits() -> None:
    tensors = [torch.randn(3, 2).t(), torch.tensor(1.5, dtype=torch.bfloat16), torch.empty(0, 4), torch.tensor([True])]
    for sent, received in zip(tensors, from_bytes(to_bytes(tensors)), strict=True):
        assert sent.dtype == received.dtype
        assert torch.equal(sent, received)
    array, number = from_bytes(to_bytes([np.arange(6, dtype=np.uint8).reshape(2, 3), np.float32(0.5)]))
    assert (array == np.arange(6).reshape(2, 3)).all()
    assert array.dtype == np.uint8
    assert number == 0.5


def test_errors_arrive_as_errors_of_ours() -> None:
    for error in (WriteError("a"), CheckpointError("b"), ConfigError("c")):
        received = from_bytes(to_bytes(error))
        assert (type(received), str(received)) == (type(error), str(error))
    received = from_bytes(to_bytes(ZeroDivisionError("x")))
    assert (type(received), str(received)) == (TrainerError, "ZeroDivisionError: x")


class Unknown(NamedTuple):
    x: int


@pytest.mark.parametrize("value", [object(), torch.nn.Linear(1, 1), print], ids=["object", "module", "function"])
def test_what_is_no_data_is_refused_with_its_path(value: Any) -> None:
    with raises_recorded(ConfigError):
        to_bytes({"state": [0, value]})


class Bomb:
    def __reduce__(self) -> Any:
        return eval, ("1/0",)


def test_foreign_bytes_are_an_error_and_run_nothing() -> None:
    good = to_bytes([VALUES["nested"], torch.arange(5.0), FlatSlice(1, 2), WriteError("x")])
    draw = random.Random(1)
    foreign = [b"", b"1", pickle.dumps(Bomb()), good[:-1], good[:9], b"\xff" * 64, to_bytes("x") + pickle.dumps(Bomb())]
    for _ in range(500):
        damaged = bytearray(good)
        for _ in range(draw.randrange(1, 4)):
            damaged[draw.randrange(len(damaged))] = draw.randrange(256)
        foreign.append(bytes(damaged))
    for message in foreign:
        with suppress(TrainerError):  # any other error fails the test
            from_bytes(message)


@pytest.mark.parametrize(
    "text",
    [
        '{"<kind>": "tensor", "dtype": "torch.float32", "shape": [1099511627776], "at": 0}',
        '{"<kind>": "tensor", "dtype": "torch.float32", "shape": [-1], "at": 0}',
        '{"<kind>": "tensor", "dtype": "torch.float32", "shape": [1], "at": -8}',
        '{"<kind>": "tensor", "dtype": "torch.nothing", "shape": [0], "at": 0}',
        '{"<kind>": "Popen", "fields": ["id"]}',
        '{"<kind>": "FlatSlice", "fields": [1, 2, 3, 4, 5]}',
        '{"<kind>": []}',
        "[" * 100_000,
    ],
    ids=["huge", "negative", "before", "dtype", "class", "fields", "unhashable", "deep"],
)
def test_a_message_of_wrong_types_or_sizes_is_an_error(text: str) -> None:
    body = text.encode()
    with raises_recorded(TrainerError):
        from_bytes(len(body).to_bytes(8, "little") + body)
