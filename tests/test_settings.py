"""The settings: the Trainer takes them under the same names, with the same defaults and types."""

from __future__ import annotations

import inspect
from dataclasses import fields

from trainer import Trainer
from trainer.settings import Settings


def test_the_constructor_of_the_trainer_has_the_fields_of_the_settings() -> None:
    parameters = inspect.signature(Trainer).parameters.values()
    taken = [(p.name, p.annotation, p.default) for p in parameters if p.kind is p.KEYWORD_ONLY]
    assert taken == [(field.name, field.type, field.default) for field in fields(Settings)]
