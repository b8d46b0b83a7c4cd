"""Constructors of strategies and callbacks refuse values that do not fit their annotations."""

from __future__ import annotations

import enum
import inspect
import math
import re
from collections import UserDict, UserList
from collections.abc import Callable, Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

import trainer.callbacks
from tests.helpers.toy import Toy, loader, quiet
from tests.messages import raises_recorded
from trainer import ConfigError, Trainer
from trainer.arguments import (
    PositiveFloat,
    PositiveInt,
    describe_annotation,
    fits,
    local_path,
)
from trainer.callback import Callback
from trainer.callbacks import (
    CSVLogger,
    EarlyStopping,
    GradientAccumulationScheduler,
    ModelCheckpoint,
    OnExceptionCheckpoint,
    PredictionWriter,
    SimpleProfiler,
    ThroughputMonitor,
)
from trainer.strategies import STRATEGIES, DDPStrategy, DeepSpeedStrategy, FSDPStrategy
from trainer.strategy import Strategy

CALLBACKS = {
    name: kind
    for name, kind in vars(trainer.callbacks).items()
    if isinstance(kind, type) and issubclass(kind, Callback) and kind is not Callback
}
NEEDED = {"monitor": "loss", "scheduling": {0: 2}, "dirpath": "there", "swa_lrs": 0.1}
ODD: tuple[Any, ...] = (-1, -0.5, math.nan, "x", True, None, [], {}, object(), 10**20, b"a", ("a",), 1j, math.inf)


@pytest.mark.parametrize("name", [*STRATEGIES, *CALLBACKS])
def test_every_argument_takes_what_its_annotation_says_or_refuses_it_with_a_message(name: str) -> None:
    kind: Any = {**STRATEGIES, **CALLBACKS}[name]
    parameters = {
        key: p
        for key, p in list(inspect.signature(kind.__init__).parameters.items())[1:]
        if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
    }
    needed = {key: NEEDED[key] for key, p in parameters.items() if p.default is p.empty}
    for key, parameter in parameters.items():
        for value in ODD:
            try:
                kind(**{**needed, key: value})
            except ConfigError:
                continue
            message = str(parameter.annotation)
            assert not (isinstance(value, bool) and "bool" not in message and message != "Any"), (key, value)
            assert not (isinstance(value, str) and message == "bool"), (key, value)
            assert not (isinstance(value, float) and math.isnan(value) and message != "Any"), (key, value)


@pytest.mark.parametrize(
    ("kind", "argument", "value"),
    [
        (DDPStrategy, "comm_hook", -0.5),
        (DDPStrategy, "static_graph", "no"),
        (DDPStrategy, "bucket_cap_mb", -25),
        (DDPStrategy, "timeout_seconds", 0),
        (DDPStrategy, "timeout_seconds", math.inf),
        (FSDPStrategy, "cpu_offload", 1),
        (FSDPStrategy, "device_mesh", (2, "2")),
        (FSDPStrategy, "auto_wrap_policy", -1),
        (FSDPStrategy, "auto_wrap_policy", True),
        (FSDPStrategy, "reshard_after_forward", -2),
        (DeepSpeedStrategy, "cpu_adam", "yes"),
        (CSVLogger, "flush_seconds", -1),
        (EarlyStopping, "min_delta", "0.1"),
        (PredictionWriter, "max_shard_size", 0),
        (ThroughputMonitor, "items_per_batch", -3),
        (ModelCheckpoint, "verbose", "yes"),
        (ModelCheckpoint, "filename", "x" * 240),
        (ModelCheckpoint, "filename", "{epoch:0300d}"),
        (ModelCheckpoint, "filename", "{epoch:99999999999999999999d}"),
        (ModelCheckpoint, "filename", "a\0b"),
        (ModelCheckpoint, "filename", "a\nb"),
        (ModelCheckpoint, "filename", ".hidden"),
        (ModelCheckpoint, "filename", "  "),
        (ModelCheckpoint, "dirpath", "a/" + "b" * 300),
        (ModelCheckpoint, "dirpath", "a\0"),
    ],
)
def test_the_message_says_what_to_give(kind: Any, argument: str, value: Any) -> None:
    with raises_recorded(ConfigError):
        kind(**{**({"monitor": "loss"} if kind is EarlyStopping else {}), argument: value})


@pytest.mark.parametrize(
    ("annotation", "good", "bad", "message"),
    [
        (int | None, [3, None], [3.0, True, "3"], "an integer or None"),
        (float, [3, 0.5, math.inf], [math.nan, True, "3", None, 1j], "a number"),
        (Literal["a", 1], ["a", 1], ["b", True, 1.0], "'a' or 1"),
        (list[int], [[1, 2], (), []], [[1.5], "ab", 3], "a list (an integer)"),
        (tuple[int, int], [(1, 2), [1, 2]], [(1,), (1, 2, 3), "ab"], "a list (an integer, an integer)"),
        (tuple[int, ...], [(1, 2, 3), ()], [("a",)], "a list (an integer)"),
        (Mapping[str, int], [{"a": 1}, {}], [{"a": "b"}, {1: 1}, []], "a dict (text, an integer)"),
        (str | Path, ["a", Path("a")], [b"a", 3], "text or a path"),
        (Callable[..., Any] | None, [len, None], ["len"], "a function or None"),
        (type[Strategy], [DDPStrategy], ["ddp"], "a class (Strategy)"),
        (PositiveFloat, [0.1, 3], [0, -1, 1.1e9, math.nan, "1"], "a number above 0 up to 1,000,000,000"),
        (PositiveInt, [1, 2], [0, 1.0, True, 2**31], "an integer from 1 up to 2,147,483,647"),
        (Any, [None, object()], [], "anything"),
    ],
)
def test_annotations(annotation: Any, good: list[Any], bad: list[Any], message: str) -> None:
    assert all(fits(value, annotation) for value in good)
    assert [value for value in bad if fits(value, annotation)] == []
    assert describe_annotation(annotation) == message


def test_subclasses_of_users_take_what_they_like() -> None:
    class Mine(DDPStrategy):
        def __init__(self, extra: int) -> None:
            super().__init__(timeout_seconds=5)
            self.extra = extra

    mine: Any = Mine("text")  # type: ignore[arg-type]
    assert mine.extra == "text"
    assert mine._arguments == {"extra": "text"}  # by which processes compare their strategies
    assert DDPStrategy(timeout_seconds=5)._arguments == {"timeout_seconds": 5}
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'monitor'"):
        EarlyStopping()  # type: ignore[call-arg]


def test_messages_stay_short() -> None:
    for given in ({"precision": "x" * 100_000}, {"max_steps": list(range(100_000))}, {"x" * 100_000: 1}):
        with pytest.raises(ConfigError) as raised:
            Trainer(**given)  # type: ignore[arg-type]
        assert 20 < len(str(raised.value)) < 3000
    with raises_recorded(ConfigError) as raised:
        Trainer(**{f"argument_{number}": 1 for number in range(100)})  # type: ignore[arg-type]
    assert len(raised.value.problems) == 100


@pytest.mark.parametrize(
    "given",
    [{"deterministic": 1}, {"default_root_dir": "s3:/"}],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_values_that_no_run_can_have_are_refused(given: dict[str, Any]) -> None:
    with raises_recorded(ConfigError):
        Trainer(**{"accelerator": "cpu", **given})


FOLDERS = [
    (kind, name)
    for kind in {**CALLBACKS, **STRATEGIES}.values()
    for name in inspect.signature(kind).parameters
    if name.endswith(("dir", "path"))
]


@pytest.mark.parametrize(("kind", "name"), FOLDERS)
def test_a_wrong_path_is_refused_by_the_name_of_its_argument(kind: type, name: str) -> None:
    with raises_recorded(ConfigError):
        kind(**{name: "~nobody-here/x"})
    if kind not in (ModelCheckpoint, OnExceptionCheckpoint):  # it would be a local folder "s3:", of which nobody hears
        with raises_recorded(ConfigError):
            kind(**{name: "s3://bucket/x"})


@pytest.mark.parametrize("path", ["a\0b", "y" * 300, "S3://bucket/x", Path("memory://x"), "http://host/x"], ids=str)
def test_paths_that_no_folder_can_have_are_refused(path: str | Path) -> None:
    with raises_recorded(ConfigError):
        CSVLogger(save_dir=path)


def test_a_file_url_is_its_path(tmp_path: Path) -> None:
    logger = CSVLogger(save_dir=f"file://{tmp_path}/logs")
    assert logger.save_dir == str(tmp_path / "logs")
    assert Trainer(accelerator="cpu", default_root_dir=Path(f"file://{tmp_path}/x")).settings.root == tmp_path / "x"
    assert local_path("./s3:/x") == local_path(local_path("./s3:/x")) == Path.cwd() / "s3:" / "x"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: EarlyStopping("val_loss", patiense=3), "'patiense'. Did you mean 'patience'?"),  # type: ignore[call-arg]
        (lambda: EarlyStopping(patiense=3), "unexpected keyword argument 'patiense'. Did you mean"),  # type: ignore[call-arg]
        (lambda: CSVLogger(save_dri="logs"), "'save_dri'. Did you mean 'save_dir'?"),  # type: ignore[call-arg]
    ],
    ids=["misspelt", "and-one-missing", "logger"],
)
def test_an_unknown_argument_is_named_with_the_fix(make: Callable[[], object], message: str) -> None:
    with pytest.raises(TypeError, match=re.escape(message)):
        make()


def not_a_clock() -> Any:
    return "now"


@pytest.mark.parametrize(
    "make",
    [
        lambda: SimpleProfiler(clock=not_a_clock),
    ],
    ids=["profiler"],
)
def test_functions_that_cannot_be_what_they_are_given_for(make: Callable[[], object]) -> None:
    with raises_recorded(ConfigError):
        make()


@pytest.mark.parametrize(
    "callback",
    [
        lambda: ThroughputMonitor(items_per_batch=len, flops_per_sample=int),  # type: ignore[arg-type]
        lambda: ThroughputMonitor(items_per_batch=int),  # type: ignore[arg-type]
        lambda: CSVLogger(save_dir="/dev/null/x"),
    ],
    ids=["flops", "items", "folder"],
)
def test_what_is_seen_in_the_run_is_reported_with_a_message(callback: Callable[[], Callback]) -> None:
    given = callback()
    more: Any = {"logger": given} if isinstance(given, CSVLogger) else {"callbacks": given}
    with raises_recorded(ConfigError):
        quiet(max_steps=2, log_every_n_steps=1, **more).fit(Toy(), loader(2))


class Level(enum.IntEnum):
    TWO = 2


NUMBERS: tuple[tuple[Any, Any], ...] = (
    (2, np.int64(2)),
    (16, np.uint8(16)),
    (0, np.int32(0)),
    (-1, np.int8(-1)),
    (2, Level.TWO),
    (0.5, np.float64(0.5)),
    (0.5, np.float32(0.5)),
    (0.5, Fraction(1, 2)),
    (1.0, np.float64(1)),
    (math.nan, np.float64("nan")),
    (math.inf, np.float32("inf")),
    (True, np.True_),
    (False, np.False_),
    ([0], [np.int64(0)]),
    (("x", 2), ("x", np.int64(2))),
    ({0: 2}, {np.int64(0): np.int64(2)}),
    ({"hours": 0.5}, {"hours": np.float64(0.5)}),
    ({"options": {"max": 2}}, {"options": {"max": np.int64(2)}}),
)
"""A value with Python's numbers, and the same with numbers of other classes."""


def types_in(value: Any) -> Any:
    """Return the type of a value, with those of the items of a list, tuple or dict."""
    if type(value) in (list, tuple):
        return type(value), [types_in(item) for item in value]
    return (dict, types_in([*value.items()])) if type(value) is dict else type(value)


def stored(make: Callable[[], object]) -> Any:
    """Return the attributes of the object with their types; None: the arguments were refused."""
    try:
        made = make()
    except ConfigError:
        return None
    plain = (bool, int, float, list, tuple, dict, np.generic, Fraction)
    clock = "_last_time"  # of a ModelCheckpoint
    attributes = vars(made.settings if isinstance(made, Trainer) else made)
    return {
        name: (repr(value), types_in(value))
        for name, value in attributes.items()
        if isinstance(value, plain) and name != clock
    }


@pytest.mark.parametrize("name", ["Trainer", *STRATEGIES, *CALLBACKS])
def test_numbers_of_other_classes_are_taken_as_python_s_are(name: str) -> None:
    kind: Any = {"Trainer": Trainer, **STRATEGIES, **CALLBACKS}[name]
    parameters = {
        key: p
        for key, p in list(inspect.signature(kind.__init__).parameters.items())[1:]
        if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
    }
    needed = {key: NEEDED[key] for key, p in parameters.items() if p.default is p.empty}
    for key in parameters:
        for value, same in NUMBERS:
            expected = stored(lambda key=key, value=value: kind(**{**needed, key: value}))  # type: ignore[misc]
            assert stored(lambda key=key, same=same: kind(**{**needed, key: same})) == expected, (key, same)  # type: ignore[misc]


def test_the_window_takes_a_number_of_numpy_while_training_too() -> None:
    trainer = quiet()
    trainer.accumulate_grad_batches = np.int64(3)  # type: ignore[assignment]
    assert type(trainer.accumulate_grad_batches) is int
    with raises_recorded(ConfigError):
        trainer.accumulate_grad_batches = np.float64(2.0)  # type: ignore[assignment]


def test_sequences_of_other_classes_are_taken_as_lists() -> None:
    # As Hydra and OmegaConf give them.
    callbacks, loggers = [EarlyStopping("val_loss", mode="min")], [CSVLogger()]
    trainer = Trainer(callbacks=UserList(callbacks), logger=UserList(loggers))  # type: ignore[arg-type]
    assert trainer.settings.callbacks == callbacks
    assert trainer.settings.logger == loggers
    assert GradientAccumulationScheduler(UserDict({1: 2})).scheduling == {1: 2}  # type: ignore[arg-type]
