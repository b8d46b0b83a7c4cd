from __future__ import annotations

import dataclasses
import datetime
import enum
import json
import os
import pathlib
import random
import subprocess
import sys
from collections import Counter, OrderedDict, defaultdict, namedtuple
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from tests.messages import raises_recorded
from trainer.checkpoint.deserialization import ITEM_BYTES, MAX_DEPTH, deserialize, from_json, to_json
from trainer.checkpoint.serialization import DTYPES, serialize
from trainer.errors import CheckpointError
from trainer.hyperparameters import NUMPY_NUMBERS

Same = Callable[[Any, Any], None]


class Color(enum.IntEnum):
    RED = 1


@dataclasses.dataclass
class Point:
    x: int = 0


def round_trip(value: Any) -> Any:
    data, tensors, *_ = serialize(value, "value")
    return deserialize(from_json(to_json(data), "value"), lambda info: tensors[info.name], "value")


def test_scalars_and_containers_come_back_exactly(assert_same: Same) -> None:
    nested = {
        "betas": (0.9, 0.999),
        "lists": [[], [[]], ((),), {}],
        "numbers": [2**64, -(2**200), True, 1, 1.0, float("nan"), float("-inf"), -0.0],
        "int keys": {0: "a", 7: {"b": None}},
        "odd keys": {(1, "x"): 1, None: 2, True: 3, 2.5: 4},
        "counts": Counter({30: 1, 80: 2}),
        "defaults": defaultdict(list, {3: [1.5]}),
        "sets": [{1, "1", (2, None)}, set(), frozenset({-0.5, torch.int8}), {pathlib.Path("1"), "1", 1.0}],
        "of torch": [torch.float32, torch.bfloat16, torch.device("cuda:1"), torch.Size([2, 3]), torch.Size([])],
        "others": (datetime.timedelta(-3, 4, 5), datetime.timedelta.max, pathlib.Path("a/b"), range(9, 0, -2)),
    }
    assert_same(nested, round_trip(nested))


@pytest.mark.parametrize("seed", ["0", "1", "2"])
def test_a_set_is_written_in_the_same_order_by_each_process(seed: str) -> None:
    code = (
        "import json, pathlib, torch; from trainer.checkpoint.serialization import serialize; "
        "print(json.dumps(serialize({'a', 'b', 'c', pathlib.Path('a'), torch.float16, 1, 1.5, ('a', 1)}, 'x').data))"
    )
    found = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True, check=True
    )
    values = {"a", "b", "c", pathlib.Path("a"), torch.float16, 1, 1.5, ("a", 1)}
    assert json.loads(found.stdout) == serialize(values, "x").data


def test_a_class_of_dicts_that_comes_back_as_a_dict_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    made: defaultdict[str, Any] = defaultdict(lambda: 0, a=defaultdict(int, b=1))
    for _ in range(2):
        assert round_trip({"counts": [made, made], "plain": OrderedDict(a=1)}) == {
            "counts": [{"a": {"b": 1}}] * 2,
            "plain": {"a": 1},
        }
    [warning] = [record.getMessage() for record in caplog.records]
    assert "['counts'][0]: it is a collections.defaultdict, and comes back from a checkpoint as a dict" in warning


NUMBERS = [
    *(kind(value) for kind in NUMPY_NUMBERS.values() for value in (0, 1)),
    *(np.float64(0.1), np.float32(0.1), np.float16(0.1), np.float32("nan"), np.float64("-inf"), np.float64(-0.0)),
    *(np.int64(-(2**63)), np.uint64(2**64 - 1), np.int8(-128), np.longlong(5)),
]


@pytest.mark.parametrize("number", NUMBERS, ids=lambda number: f"{number.dtype.name} {number}")
def test_numbers_and_arrays_of_numpy_come_back_exactly(number: Any) -> None:
    arrays = [np.array(number), np.array([number, number]), np.array([[number]]), np.array([], number.dtype)]
    state = {"number": number, "in": [(number,), {"x": number}], "arrays": arrays, "counts": Counter({number: 2})}
    back = round_trip(state)
    found = [back["number"], back["in"][0][0], back["in"][1]["x"], *back["counts"]]
    for one in found:
        assert (one.dtype, one.tobytes()) == (number.dtype, number.tobytes())
        assert isinstance(one, np.generic)
    for one, expected in zip(back["arrays"], arrays, strict=True):
        assert (type(one), one.dtype, one.shape) == (np.ndarray, expected.dtype, expected.shape)
        assert one.tobytes() == expected.tobytes()
        assert one.flags.writeable


def test_arrays_in_other_layouts_come_back_as_plain_ones() -> None:
    grid = np.arange(6.0).reshape(2, 3)
    fixed = grid.copy()
    fixed.flags.writeable = False
    for value in (grid.T, grid[:, ::2], grid[::-1], grid.astype(">f4"), fixed):
        back = round_trip({"x": value})["x"]
        np.testing.assert_array_equal(back, value)
        assert back.dtype == value.dtype.newbyteorder("=")


def test_random_generators_continue_from_the_restored_state() -> None:
    generator = random.Random(3)
    state = round_trip(generator.getstate())
    numpy_generator = np.random.default_rng(5)
    numpy_state = round_trip(numpy_generator.bit_generator.state)
    expected = generator.random(), numpy_generator.random()
    generator.setstate(state)
    numpy_generator.bit_generator.state = numpy_state
    assert (generator.random(), numpy_generator.random()) == expected


def test_dict_subclasses_become_dicts(assert_same: Same) -> None:
    assert_same({"a": 1}, round_trip(OrderedDict(a=1)))


@pytest.mark.parametrize("key", ["$tensor", "$tuple", "$items", "$counter", "$kind", "$float", "$int", "$", "$new"])
def test_reserved_names_in_user_data_are_not_misread(key: str, assert_same: Same) -> None:
    for value in (
        {key: [1]},
        {key: "nan"},
        {key: {key: ()}},
        {key: 1, "a": 2},
        {key: "w", "dtype": "float32", "shape": []},
    ):
        assert_same(value, round_trip(value))


def test_tensor_names_are_the_keys_and_paths() -> None:
    one = torch.ones
    _, tensors, *_ = serialize(
        {"a.b": one(1), "a": {"b": one(2)}, "c": [one(3), {4: one(4)}], "__metadata__": one(5)}, "model"
    )
    assert {name: len(tensor) for name, tensor in tensors.items()} == {
        "a.b": 1,
        "a.b#2": 2,
        "c.0": 3,
        "c.1.4": 4,
        "__metadata__#2": 5,
    }
    assert list(serialize(one(1), "rng")[1]) == ["rng"]


def test_tied_tensors_are_stored_once_and_come_back_for_each_name() -> None:
    weight = torch.nn.Parameter(torch.rand(3, 4))
    back = round_trip(
        {"encoder": weight, "decoder": weight.data, "view": weight.detach()[:, :], "twice": [weight, weight]}
    )
    assert list(serialize({"encoder": weight, "decoder": weight.data}, "model")[1]) == ["encoder"]
    assert back["encoder"] is back["decoder"] is back["view"] is back["twice"][1]


def test_views_that_only_overlap_are_stored_apart(assert_same: Same) -> None:
    base = torch.arange(12.0).reshape(3, 4)
    state = {"base": base, "row": base[1], "transposed": base.t(), "as ints": base.view(torch.int32)}
    state["square"] = base.reshape(-1)[:9].reshape(3, 3)
    state["its transpose"] = state["square"].t()
    state["conjugate"], state["plain"] = torch.ones(2, dtype=torch.complex64).conj(), torch.zeros(0)
    assert len(serialize(state, "model")[1]) == len(state)
    assert_same(state, round_trip(state))


@pytest.mark.parametrize(
    ("value", "kind", "advice"),
    [
        (Color.RED, "Color", "data"),
        (np.datetime64("2026-01-01"), "numpy.datetime64", "data"),
        (np.array(["a"]), "numpy.ndarray", "data"),
        (np.longdouble(1), "numpy.longdouble", "data"),
        (np.str_("a"), "numpy.str", "data"),
        (len, "builtin_function_or_method", "data"),
        (Point, "type", "data"),
        (Point(), "Point", "data"),
        (torch.nn.ReLU(), "ReLU", "data"),
        ({torch.ones(1)}, "set", "a list"),
        (frozenset({Point}), "frozenset", "a list"),
        ({frozenset({1})}, "set", "a list"),
        (b"x", "bytes", "data"),
        (torch.strided, "torch.layout", "data"),
        (namedtuple("Pair", "a b")(1, 2), "Pair", "data"),
        (datetime.datetime(2026, 1, 1), "datetime.datetime", "data"),
        (1j, "complex", "data"),
        (torch.zeros(2, device="meta"), "Tensor", "meta"),
        (torch.eye(2).to_sparse(), "Tensor", "plain, dense tensor"),
        (torch.nn.UninitializedParameter(), "UninitializedParameter", "plain, dense tensor"),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, str) else "",
)
def test_what_is_not_data_is_refused_with_its_path(value: Any, kind: str, advice: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        serialize({"state": [0, {3: (value,)}]}, "optimizers")
    message = str(caught.value)
    assert message.startswith("cannot store optimizers['state'][1][3][0]: it is a ")
    assert kind in message
    assert advice in message


def test_all_refusals_are_reported_at_once() -> None:
    with raises_recorded(CheckpointError):
        serialize({"a": {len}, "b": [len]}, "x")


def test_keys_that_are_not_data_are_refused() -> None:
    with raises_recorded(CheckpointError):
        serialize({"a": {Color.RED: 1}}, "x")


def test_nesting_is_bounded_and_cycles_are_found(assert_same: Same) -> None:
    cycle: list[Any] = []
    cycle += [cycle, cycle]
    with raises_recorded(CheckpointError):
        serialize(cycle, "x")
    deep: Any = 0
    for _ in range(MAX_DEPTH):
        deep = {1: deep}
    assert_same(deep, round_trip(deep))
    with raises_recorded(CheckpointError):
        serialize([deep], "x")


@pytest.mark.parametrize(
    "text",
    [
        '{"$new": 1}',
        '{"$tuple": 1}',
        '{"$tuple": [], "a": 1}',
        '{"a": 1, "$tuple": []}',
        '{"$items": [[1]]}',
        '{"$items": [[[1], 2]]}',
        '{"$items": [[1, 2], [1.0, 3]]}',
        '{"$counter": {}}',
        '{"$default": ["open", []]}',
        '{"$default": [[], []]}',
        '{"$default": ["int", {}]}',
        '{"$kind": ["open", "x", null]}',
        '{"$kind": ["dataclass", {}, "trainer.settings:Settings"]}',
        '{"$kind": ["enum", 1, ["a:A", "B"]]}',
        '{"$kind": [["set"], [1], null]}',
        '{"$kind": ["set", [1]]}',
        '{"$kind": ["set", [1, 1], null]}',
        '{"$kind": ["set", [2, 1], null]}',
        '{"$kind": ["set", [[1]], null]}',
        '{"$kind": ["set", [{"$tensor": "w", "dtype": "float32", "shape": []}], null]}',
        '{"$kind": ["set", {"$tensor": "w", "dtype": "float32", "shape": []}, null]}',
        '{"$kind": ["set", "ab", null]}',
        '{"$kind": ["range", [0, 2, 1], null]}',
        '{"$kind": ["range", {"$tuple": [0, 2, 0]}, null]}',
        '{"$kind": ["timedelta", 1.0, [0, 2, 0]]}',
        '{"$kind": ["timedelta", 1.0, {"a": 1}]}',
        '{"$kind": ["timedelta", 1e300, [1e300, 0, 0]]}',
        '{"$kind": ["path", "a//b", null]}',
        '{"$kind": ["path", 3, null]}',
        '{"$kind": ["dtype", "Tensor", null]}',
        '{"$kind": ["dtype", "float", null]}',
        '{"$kind": ["dtype", ["float32"], null]}',
        '{"$kind": ["device", 0, null]}',
        '{"$kind": ["device", "cuda:-1", null]}',
        '{"$kind": ["device", "here", null]}',
        '{"$kind": ["Size", [1], null]}',
        '{"$kind": ["Size", {"$tuple": [1.5]}, null]}',
        '{"$kind": ["Size", {"$tuple": ["0x9"]}, null]}',
        '{"$float": "1.0"}',
        '{"$int": "12"}',
        '{"$int": 12}',
        '{"$tensor": "w"}',
        '{"$tensor": "w", "dtype": "object", "shape": []}',
        '{"$tensor": "w", "dtype": "float32", "shape": [-1]}',
        '{"$tensor": "w", "dtype": ["float32"], "shape": [true]}',
        '{"$tensor": "w", "dtype": "float32", "shape": [], "x": 1}',
        "NaN",
        '{"a": Infinity}',
        "[" * 100_000,
        "[" * 200 + "]" * 200,
        "1" * 10_000,
        "\x80",
        "",
    ],
    ids=lambda text: text[:30],
)
def test_json_that_we_do_not_write_is_refused(text: str) -> None:
    with pytest.raises(CheckpointError):
        deserialize(from_json(text.encode("latin-1"), "x"), lambda info: info, "x")


def test_sizes_of_dtypes_are_those_of_torch() -> None:
    assert {name: dtype.itemsize for name, dtype in DTYPES.items()} == ITEM_BYTES
