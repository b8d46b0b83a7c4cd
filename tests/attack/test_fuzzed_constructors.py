"""What constructors take trains two steps; what they refuse gets a message: arguments drawn by annotations."""

from __future__ import annotations

import random

from tests.helpers.drawn_values import draw, parameters, shown
from tests.helpers.fuzzing import ACCEPTED, WrongError, try_each
from tests.helpers.two_steps import QUIET, check_types, refused, train
from tests.tiers import Inputs
from trainer import Callback, Logger, Trainer
from trainer.callbacks import CALLBACKS
from trainer.errors import TrainerError
from trainer.strategies import STRATEGIES

PARTS: dict[str, type] = {**CALLBACKS, **{kind.__name__: kind for kind in STRATEGIES.values()}}
"""Every callback, logger and strategy of the tables: a new one is tried by being listed."""


def part(rng: random.Random) -> str:
    """Try one callback, logger or strategy."""
    name = rng.choice(list(PARTS))
    kind, known = PARTS[name], parameters(PARTS[name])
    required = [one for one, parameter in known.items() if parameter.default is parameter.empty]
    optional = [one for one in known if one not in required]
    chosen = [*required, *rng.sample(optional, min(len(optional), rng.choice([0, 1, 1, 2])))]
    given = {one: draw(rng, known[one]) for one in chosen}
    text = f"{name}({', '.join(f'{one}={shown(value)}' for one, value in given.items())})"
    try:
        try:
            made = kind(**given)
        except TrainerError as error:
            return refused(error, [*given, name, "checkpoint", "path"])
        if isinstance(made, Logger):
            train(Trainer(**{**QUIET, "logger": made}))
        elif isinstance(made, Callback):
            train(Trainer(**QUIET, callbacks=made))
        else:
            train(Trainer(**QUIET, strategy=made))
        check_types(given, known)
    except TrainerError as error:
        return refused(error, [*given, name, getattr(kind, "name", name), "DeepSpeed", *map(shown, given.values())])
    except WrongError as error:
        raise WrongError(f"{text}: {error}") from None
    except BaseException as error:
        raise RuntimeError(text) from error
    return ACCEPTED


def test_callbacks_loggers_and_strategies(inputs: Inputs) -> None:
    try_each(inputs, part)
