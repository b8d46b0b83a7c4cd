"""Tuner: find a learning rate and a batch size before training."""

from trainer.tuner.tuner import Tuner as Tuner
