"""The names of precisions and strategies that the command line reads without torch."""

from __future__ import annotations

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from trainer.callbacks import CALLBACKS
from trainer.cli.config.draft import LAYOUTS, PRECISIONS, WITHOUT_LAYOUT
from trainer.config.check import table_of
from trainer.config.plug_names import callbacks, optimizers, precisions, schedulers, strategies
from trainer.logger import Logger
from trainer.precision import PRECISIONS as TABLE
from trainer.strategies import STRATEGIES


def test_the_names_are_those_of_the_tables() -> None:
    assert list(precisions()) == list(TABLE)
    assert set(strategies()) == set(STRATEGIES)
    assert callbacks("Callback") == list(CALLBACKS)
    assert callbacks("Logger") == [name for name, cls in CALLBACKS.items() if issubclass(cls, Logger)]
    assert set(optimizers()) == set(table_of((Optimizer,)))
    assert set(schedulers()) == set(table_of((LRScheduler,)))


def test_the_help_texts_are_those_of_the_table_and_the_docstrings() -> None:
    for name, words in precisions().items():
        numbers = TABLE[name]
        assert words.split(",")[0] == f"weights in {str(numbers.weights).removeprefix('torch.')}"
        assert ("the forward in" in words) == (numbers.autocast is not None)
    for name, words in strategies().items():
        assert words
        assert " ".join(str(STRATEGIES[name].__doc__).split()).startswith(words)


def test_the_questions_have_an_answer_for_each_of_them() -> None:
    assert set(PRECISIONS) == set(TABLE)
    lines = [line for line, _ in LAYOUTS.values()] + list(WITHOUT_LAYOUT)
    assert sorted(lines) == sorted(f"strategy: {name}" for name in STRATEGIES)
