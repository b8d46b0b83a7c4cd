"""Two nets against each other, with two optimizers in the hands of the training step."""

from examples.gan.module import GAN

__all__ = ["GAN"]
