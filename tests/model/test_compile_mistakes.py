"""All mistakes with compile= are reported together, before anything starts."""

from __future__ import annotations

from typing import Any

import pytest

from tests.messages import raises_recorded
from trainer import Trainer
from trainer.errors import ConfigError


@pytest.mark.parametrize(
    "setting",
    [
        "max-autotun",
        "block",
        {"mode": "reduce_overhead"},
        {"backend": "inductr"},
        {"blokcs": True},
        {"mode": "default", "options": {"max_autotune": True}},
        3,
    ],
    ids=str,
)
def test_mistakes_are_reported_at_once(setting: Any) -> None:
    with raises_recorded(ConfigError):
        Trainer(compile=setting)


def test_all_mistakes_in_one_message() -> None:
    with pytest.raises(ConfigError) as caught:
        Trainer(compile={"mod": 1}, max_epochs=-3)
    assert all(word in str(caught.value) for word in ("'mod'", "max_epochs"))
