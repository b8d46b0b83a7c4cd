"""A fit of two steps that takes any batch, and how refusals and accepted values of drawn arguments are checked."""

from __future__ import annotations

from typing import Any

import torch

from tests.helpers.drawn_values import conforms, is_a_number
from tests.helpers.fuzzing import REFUSED, WrongError
from tests.helpers.toy import Toy, loader
from trainer import Trainer
from trainer.errors import TrainerError

BATCHES, STEPS, MOST_STEPS = 8, 2, 40
QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "max_steps": STEPS,
    "val_check_interval": 2,
    "log_every_n_steps": 1,
}


class Net(Toy):
    """A module whose steps take any batch."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = self.layer(torch.ones(1, 4)).sum()
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.layer(torch.ones(1, 4)).sum())

    test_step = validation_step

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.trainer.global_step == MOST_STEPS:
            self.trainer.stop("enough")

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self.layer(torch.ones(1, 4)).sum()


def train(trainer: Trainer) -> None:
    trainer.fit(Net(), loader(BATCHES), loader(2))


def refused(error: TrainerError, names: list[str]) -> str:
    """Check the message of a refusal: a message of bounded length, about one of the arguments."""
    text = str(error)
    if not 10 < len(text) < 20_000 or "Traceback" in text:
        raise WrongError(f"a message of {len(text)} characters: {text[:500]}")
    if not any(name in text for name in names):
        raise WrongError(f"none of {names} is named by: {text}")
    return REFUSED


OTHERS_OPTIONS = ("console_kwargs",)
"""Arguments whose contents are another library's."""


def check_types(given: dict[str, Any], known: dict[str, Any]) -> None:
    """Raise WrongError for a value that was taken though it is of another type, or no finite number.

    None stands for the default in some places.
    """
    for name, value in given.items():
        if value is not None and not conforms(value, known[name].annotation):
            raise WrongError(f"{name} is annotated {known[name].annotation}, and was taken")
        if known[name].annotation is not Any and name not in OTHERS_OPTIONS and not is_a_number(value):
            raise WrongError(f"{name} is not a number, and was taken")
