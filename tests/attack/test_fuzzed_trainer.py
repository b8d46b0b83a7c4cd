"""What Trainer, fit, validate, test and predict take works as asked; what they refuse is refused with a message."""

from __future__ import annotations

import random
from itertools import islice
from typing import Any

from torch.utils.data import DataLoader

from tests.helpers.drawn_values import POOL, draw, parameters, shown
from tests.helpers.fuzzing import ACCEPTED, REFUSED, WrongError, try_each
from tests.helpers.toy import loader
from tests.helpers.two_steps import BATCHES, MOST_STEPS, QUIET, Net, check_types, refused, train
from tests.tiers import Inputs
from trainer import DataModule, Trainer
from trainer.errors import TrainerError
from trainer.settings import ARGUMENTS, Settings


class Drawn(DataModule):
    def __init__(self, loaders: Any) -> None:
        self.train_dataloader = self.val_dataloader = lambda: loaders


def settings(rng: random.Random) -> str:
    """Try arguments of the Trainer."""
    known = parameters(Settings)
    given = {name: draw(rng, known[name]) for name in rng.sample(ARGUMENTS, rng.choice([1, 1, 2, 3]))}
    text = f"Trainer({', '.join(f'{name}={shown(value)}' for name, value in given.items())})"
    try:
        trainer = Trainer(**{**QUIET, **given})
        train(trainer)
        check_types(given, known)
        wanted = expected_steps(trainer.settings)
        if wanted is not None and trainer.global_step != wanted:
            raise WrongError(f"{trainer.global_step} steps were made instead of {wanted}")
    except TrainerError as error:
        return refused(error, [*given, *(name.partition("_")[0] for name in given), "blocks", "batches"])
    except WrongError as error:
        raise WrongError(f"{text}: {error}") from None
    except BaseException as error:
        if "with more than one" in str(error):
            return REFUSED  # by the == of an array or a tensor, in numpy's and torch's own words
        raise RuntimeError(text) from error
    return ACCEPTED


def expected_steps(settings: Settings) -> int | None:
    """Return the steps that these settings ask for; None where it is a matter of time."""
    if settings.max_time is not None or settings.deadline is not None:
        return None
    batches: float = BATCHES
    for limit in (settings.limit_train_batches, settings.overfit_batches or 1.0):
        batches = min(batches, limit) if isinstance(limit, int) else int(batches * limit)
    if settings.fast_dev_run:
        return int(min(batches, int(settings.fast_dev_run)))  # as in Lightning, in place of max_steps
    window = settings.accumulate_grad_batches
    window = 1 if window == "auto" else window  # these batches fit
    epochs = 1000 if settings.max_epochs in (None, -1) else settings.max_epochs
    most = float("inf") if settings.max_steps in (None, -1) else settings.max_steps
    steps = min(most, -(-batches // window) * epochs)
    return int(steps) if steps < MOST_STEPS else None


def loaders(rng: random.Random) -> str:
    """Try arguments of fit, validate, test and predict, and the loaders of a data module."""
    limits = {f"limit_{name}_batches": BATCHES for name in ("val", "test", "predict")}  # some are endless
    trainer, given, method = (
        Trainer(**QUIET, **limits),
        rng.choice(POOL),
        rng.choice(["fit", "validate", "test", "predict"]),
    )
    known = parameters(getattr(Trainer, method))
    wrong = rng.choice([name for name in known if name != "self"])
    how = rng.choice(["as it is", "in a list", "in a dict", "in a DataLoader", "in a DataModule"])
    text = f"Trainer.{method}({wrong}={shown(given)} {how})"
    try:
        value = {"in a list": [given], "in a dict": {"a": given}, "in a DataModule": Drawn(given)}.get(how, given)
        if how == "in a DataLoader":
            try:
                value = DataLoader(given)
                list(islice(value, BATCHES))
            except Exception:  # torch's own, or of a dataset without samples 0, 1, ...
                return REFUSED
        arguments: dict[str, Any] = {"module": Net()}
        if wrong not in ("train_dataloaders", "dataloaders", "datamodule"):
            arguments["train_dataloaders" if method == "fit" else "dataloaders"] = loader(BATCHES)
        getattr(trainer, method)(**{**arguments, wrong: value})
    except TrainerError as error:
        return refused(error, ["loader", "module", "data", "batch", "checkpoint", "fsspec", wrong, method])
    except BaseException as error:
        raise RuntimeError(text) from error
    return ACCEPTED


def test_arguments_of_the_trainer(inputs: Inputs) -> None:
    try_each(inputs, settings)


def test_arguments_of_fit(inputs: Inputs) -> None:
    try_each(inputs, loaders)
