"""Tuner: find a learning rate and a batch size before training."""

from trainer.names.paths import answer_further_names as _answer_further_names
from trainer.tuner.tuner import Tuner as Tuner

_answer_further_names(__name__)
