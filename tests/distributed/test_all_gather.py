"""The leaves of nested data are taken in the order of sorted keys, and described for a comparison of processes."""

from __future__ import annotations

from collections import OrderedDict, defaultdict, namedtuple
from typing import Any

import torch
from torch.utils import _pytree

from trainer.distributed.all_gather import describe_leaves, map_sorted

Pair = namedtuple("Pair", "x y")


class Output(OrderedDict[str, Any]):
    """A dict of a library, registered as transformers registers its outputs."""


def test_leaves_are_visited_by_sorted_keys_and_the_structure_stays() -> None:
    _pytree.register_pytree_node(
        Output, lambda one: ([*one.values()], [*one]), lambda values, keys: Output(zip(keys, values, strict=True))
    )
    data = {"b": [1, (2, None)], "a": Pair(3, "words"), 7: OrderedDict(z=4, c=5), "o": Output(q=6, p=[]), "é.": {}}
    data["d"] = defaultdict(int, {"n": 8, "m": 9})
    visited: list[Any] = []
    mapped = map_sorted(lambda path, leaf: visited.append((path, leaf)) or leaf, data)
    assert visited == [
        *(("['a'][0]", 3), ("['a'][1]", "words"), ("['b'][0]", 1), ("['b'][1][0]", 2), ("['b'][1][1]", None)),
        *(("['d']['m']", 9), ("['d']['n']", 8), ("['o']['q']", 6), ("[7]['c']", 5), ("[7]['z']", 4)),
    ]
    assert mapped == data
    assert [*mapped] == [*data]
    for key, value in data.items():
        assert type(mapped[key]) is type(value)


def test_what_is_compared_does_not_depend_on_the_order_of_keys() -> None:
    one = {"a": torch.ones(2, 3), "b": 1.0, "c": "words", "d": True}
    lines = ["['a']: [2, 3] torch.float32", "['b']: [] torch.float32", "['d']: [] torch.bool"]
    assert describe_leaves(one) == describe_leaves(dict(reversed(one.items()))) == lines
    assert describe_leaves(torch.ones(2, dtype=torch.int8)) == ["a tensor: [2] torch.int8"]
