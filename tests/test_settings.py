"""The settings: the Trainer takes them under the same names, with the same defaults and types; times are read."""

from __future__ import annotations

import inspect
from dataclasses import fields
from datetime import timedelta
from typing import Any

import pytest

from tests.helpers.processes import run_python
from tests.messages import raises_recorded
from trainer import Trainer
from trainer.callbacks import ModelCheckpoint, Timer
from trainer.errors import ConfigError
from trainer.settings import NONE_IS_DEFAULT, Settings, read_duration


def test_the_constructor_of_the_trainer_has_the_fields_of_the_settings() -> None:
    parameters = inspect.signature(Trainer).parameters.values()
    taken = [(p.name, p.annotation, p.default) for p in parameters if p.kind is p.KEYWORD_ONLY]
    assert taken == [(field.name, field.type, field.default) for field in fields(Settings)]


def test_the_settings_do_not_import_torch() -> None:
    run_python("import sys\nsys.modules['torch'] = sys.modules['numpy'] = None\nimport trainer.settings").check()


@pytest.mark.parametrize(
    ("given", "seconds"),
    [
        ("00:00:01:30", 90),
        ("0:1:0:0", 3600),
        ("1:02:03:04", 93784),
        ("100:00:00:00", 8640000),
        ({"hours": 1, "minutes": 1}, 3660),
        (timedelta(days=1), 86400),
        (2.5, 2.5),
        (3600, 3600),
    ],
)
def test_the_trainer_and_the_timer_read_the_same_durations(given: Any, seconds: float) -> None:
    assert read_duration(given) == seconds
    assert Settings(max_time=given).problems() == []
    assert Settings(max_time=given).max_seconds == Timer(given).duration == seconds
    assert ModelCheckpoint(train_time_interval=given).seconds == seconds


@pytest.mark.parametrize(
    "wrong",
    [
        "01:30",
        "1h",
        {"hour": 1},
        {"hours": "1"},
        [1],
        timedelta(seconds=-1),
        -1.0,
        -1,
        True,
        float("nan"),
        {"hours": float("nan")},
    ],
)
def test_what_is_no_duration(wrong: Any) -> None:
    with raises_recorded(ConfigError):
        read_duration(wrong)
    assert len(Settings(max_time=wrong).problems()) == 1


def test_none_means_the_default_where_it_is_lightnings_default() -> None:
    assert Settings(**dict.fromkeys(NONE_IS_DEFAULT)) == Settings()
    trainer = Trainer(**{**dict.fromkeys(NONE_IS_DEFAULT), "accelerator": "cpu"})
    assert trainer.settings == Settings(accelerator="cpu")
    assert [type(logger) for logger in trainer.loggers] == [type(logger) for logger in Trainer().loggers]


@pytest.mark.parametrize("name", ["num_nodes", "accumulate_grad_batches"])
def test_none_for_a_number_that_is_needed_is_refused_at_once(name: str) -> None:
    with raises_recorded(ConfigError):
        Trainer(**{name: None})


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("precision", "no"),
        ("precision", "fp64"),
        ("precision", "float16"),
        ("precision", "transformer-engine"),
        ("strategy", "zero2"),
        ("strategy", "tpu"),
        ("strategy", "deepspeed_stage_1_offload"),
        ("accelerator", "npu"),
        ("cpu", True),
        ("deepspeed_plugin", None),
        ("fsdp_plugin", None),
        ("log_with", "wandb"),
        ("kwargs_handlers", []),
        ("split_batches", True),
        ("config", "a.yaml"),
    ],
)
def test_words_of_accelerate_are_answered_with_the_words_here(argument: str, value: Any) -> None:
    arguments: dict[str, Any] = {argument: value}
    with raises_recorded(ConfigError):
        Trainer(**arguments)
