"""A value keeps its type from the command line, or a file, over the saved configuration, to a checkpoint and back."""

from __future__ import annotations

import dataclasses
import datetime
import enum
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from tests.helpers import annotated
from tests.helpers.alike import alike
from trainer.config.files import read_value
from trainer.config.loading import load
from trainer.config.read import read
from trainer.config.tree import Diagnostics

hypothesis = pytest.importorskip("hypothesis", reason='needs hypothesis: pip install "exact-trainer[dev]"')
st = hypothesis.strategies

MODULE = """
import typing
from datetime import timedelta
from typing import *

import torch
from torch import nn

from tests.helpers.annotated import *
from trainer import TrainModule


class Drawn(TrainModule):
    def __init__(self, {arguments}) -> None:
        super().__init__()
        self.given = {{name: value for name, value in locals().items() if name[0] == "v"}}
        self.save_hyperparameters()
        self.layer = nn.Linear(1, 1)

    def training_step(self, batch, batch_idx):
        return self.layer(batch).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)
"""
NUMBER = itertools.count()

TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=12)
TEXTS = st.one_of(
    TEXT, st.sampled_from(["0042", "1e3", "null", "true", " a ", "a: b", "run #2", "red", "s3://b/c/", "a\x85b", "-"])
)
WORDS = TEXTS.filter(lambda text: "${" not in text)
PATHS = st.lists(st.from_regex(r"[a-z0-9 #:_-]{1,8}", fullmatch=True), max_size=3).map(lambda found: Path("/", *found))
SPANS = st.timedeltas(datetime.timedelta(-50_000), datetime.timedelta(50_000))
LEAVES: dict[str, Any] = {
    "int": st.integers(-(10**30), 10**30),
    "float": st.floats(allow_nan=False),
    "bool": st.booleans(),
    "str": WORDS,
    "Path": PATHS,
    "Name": WORDS,
    "Bound": WORDS,
    "Color": st.sampled_from(annotated.Color),
    "Token": st.sampled_from(annotated.Token),
    "Literal['[CLS]', '*', '1', 'null']": st.sampled_from(["[CLS]", "*", "1", "null"]),
    "Num": st.sampled_from(annotated.Num),
    "IntE": st.sampled_from(annotated.IntE),
    "Act": st.sampled_from(annotated.Act),
    "timedelta": SPANS,
    "torch.dtype": st.sampled_from([torch.float16, torch.bfloat16, torch.int64]),
    "torch.device": st.sampled_from([torch.device("cpu"), torch.device("cuda:1"), torch.device("meta")]),
    "Literal['a', 'b', 1]": st.sampled_from(["a", "b", 1]),
    "UserId": st.integers(0, 9),
    "Annotated[int, 'x']": st.integers(0, 9),
    "Alias": st.lists(st.integers(), max_size=3),
    "NT": st.builds(annotated.NT, st.integers(), st.integers()),
    "Place": st.builds(annotated.Place, PATHS),
    "Inner": st.builds(annotated.Inner, st.integers(), WORDS),
    "KW": st.builds(annotated.KW, a=st.integers()),
    "NoInit": st.builds(annotated.NoInit, st.integers()),
    "TD": st.fixed_dictionaries({"a": st.integers()}, optional={"b": WORDS}),
    "GenDC[int]": st.builds(annotated.GenDC, st.integers()),
    "Outer": st.builds(
        annotated.Outer, WORDS, st.builds(annotated.Inner), st.lists(st.builds(annotated.Inner, st.integers())), PATHS
    ),
    "int | str": st.integers() | WORDS,
    "Union[str, Path]": WORDS,
    "Union[Color, Num]": st.sampled_from([*annotated.Color, *annotated.Num]),
    "Union[int, tuple[int, int]]": st.integers() | st.tuples(st.integers(), st.integers()),
}
"""Annotations, and values of their types that a file can hold."""
HASHABLE = ("int", "float", "str", "Path", "Color", "Num", "IntE", "timedelta", "torch.dtype")
KEYS = (
    *("str", "Name", "Token", "Literal['[CLS]', '*', '1', 'null']", "int", "Color", "Num", "Act", "Path"),
    *("timedelta", "bool"),
)


@st.composite
def annotations(draw: Any, depth: int = 2) -> tuple[str, Any]:
    """Draw an annotation, and the strategy of its values."""
    kind = draw(st.sampled_from(["leaf", "list", "Sequence", "dict", "tuple", "pair", "set", "frozenset", "Optional"]))
    if depth == 0 or kind == "leaf":
        return draw(st.sampled_from([*LEAVES.items()]))
    if kind in ("set", "frozenset"):
        name = draw(st.sampled_from(HASHABLE))
        made = {"set": st.sets, "frozenset": st.frozensets}[kind]
        return f"{kind}[{name}]", made(LEAVES[name], max_size=3)
    name, values = draw(annotations(depth - 1))
    if kind == "Optional":
        return f"Optional[{name}]", st.none() | values
    if kind == "dict":
        key = draw(st.sampled_from(KEYS))
        return f"dict[{key}, {name}]", st.dictionaries(LEAVES[key], values, max_size=3)
    if kind == "pair":
        other, others = draw(annotations(depth - 1))
        return f"tuple[{name}, {other}]", st.tuples(values, others)
    several = st.lists(values, max_size=3)
    return (f"tuple[{name}, ...]", several.map(tuple)) if kind == "tuple" else (f"{kind}[{name}]", several)


@st.composite
def arguments(draw: Any) -> list[tuple[str, Any, bool]]:
    """Draw the arguments of a module: annotation, value, and whether it is typed or stands in a file."""
    found = []
    for _ in range(6):
        annotation, values = draw(annotations())
        found.append((annotation, draw(values), draw(st.booleans())))
    return found


def written(value: Any) -> str:
    """Return a value as YAML, as a person writes it: paths and dtypes as texts, members of enumerations by name."""
    if isinstance(value, annotated.Place):
        value = value._asdict()
    if dataclasses.is_dataclass(value):
        value = {one.name: getattr(value, one.name) for one in dataclasses.fields(value) if one.init}
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, datetime.timedelta):
        sign, value = ("-", -value) if value < datetime.timedelta(0) else ("", value)
        return f"{sign}P{value.days}DT{value.seconds}.{value.microseconds:06}S"
    if isinstance(value, (Path, torch.dtype, torch.device)):
        return json.dumps(str(value).removeprefix("torch."))
    if isinstance(value, float):
        return repr(value).replace("inf", ".inf")
    if isinstance(value, dict):
        return "{" + ", ".join(f"{written(key)}: {written(item)}" for key, item in value.items()) + "}"
    if isinstance(value, (list, tuple, set, frozenset)):
        return "[" + ", ".join(map(written, value)) + "]"
    return json.dumps(value, ensure_ascii=True)


def typed(value: Any) -> str:
    """Return a value as it is typed: a text without quotes."""
    return str(value) if isinstance(value, (str, Path)) and not isinstance(value, enum.Enum) else written(value)


def check(drawn: list[tuple[str, Any, bool]]) -> None:
    """Take the values from where they are given to a checkpoint, and compare them at each stop."""
    values = {f"v{number}": value for number, (_, value, _) in enumerate(drawn)}
    file = Path(f"drawn{next(NUMBER)}.py")
    names = ", ".join(f"v{number}: {json.dumps(annotation)}" for number, (annotation, _, _) in enumerate(drawn))
    file.write_text(MODULE.format(arguments=names))
    given, options = [f"module:\n  class_path: {file}:Drawn\n"], []
    for (annotation, value, is_typed), name in zip(drawn, values, strict=True):
        # Beside other types a text is read as one of them where it looks so; quotes belong to it on a command line.
        if is_typed and "|" not in annotation and "Union" not in annotation and "Optional" not in annotation:
            options.append((f"module.{name}", read_value(typed(value), f"--module.{name}")))
        else:
            given.append(f"  {name}: {written(value)}\n")
    quiet = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    Path("run.yaml").write_text(f"{''.join(given)}trainer: {json.dumps({**quiet, 'max_steps': 1})}\n")

    def loaded(config: str, overrides: Any = ()) -> tuple[Any, Any]:
        found = Diagnostics()
        trainer, module, _ = load(read([config], overrides, found), found).build()
        for name, value in values.items():
            assert alike(module.given[name], value), (config, name, value, module.given[name])
        return trainer, module

    trainer, module = loaded("run.yaml", options)
    trainer.fit(module, DataLoader(torch.ones(2, 1)))
    loaded(str(trainer.run_dir / "config.yaml"))
    found = type(module).load_from_checkpoint(trainer.run_dir / "checkpoints" / "last")
    for name, value in values.items():
        assert alike(found.given[name], value), ("checkpoint", name, value, found.given[name])


def test_nothing_changes_on_the_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: Any) -> None:
    monkeypatch.chdir(tmp_path)
    drawn = hypothesis.given(arguments())(check)
    quick = {
        "deadline": None,
        "suppress_health_check": [*hypothesis.HealthCheck],
        "phases": [hypothesis.Phase.generate],
    }
    settings = hypothesis.settings(max_examples=12, database=None, **quick)
    hypothesis.seed(request.config.getoption("seed"))(settings(drawn))()
