"""A generative adversarial network on 8 x 8 images: manual optimization with two optimizers.

Run it with: trainer fit --config config.yaml
"""

from __future__ import annotations

import torch
from data import Batch
from torch import nn
from torch.nn.functional import softplus
from torch.nn.utils.parametrizations import spectral_norm
from torch.optim import Adam, Optimizer

from trainer import TrainModule


class GAN(TrainModule):
    """A generator that makes digits and a discriminator that tells them from real ones, trained against each other.

    Args:
        noise: number of random inputs of the generator.
        width: features of the hidden layers.
        generator_lr, discriminator_lr: learning rates; the discriminator learns faster (Heusel et al., 2017).
    """

    # training_step calls backward and the optimizers itself: one step of the trainer is one batch, however many
    # optimizers step in it.
    automatic_optimization = False

    def __init__(
        self,
        noise: int = 32,
        width: int = 256,
        generator_lr: float = 3e-4,
        discriminator_lr: float = 1e-3,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.generator = nn.Sequential(
            nn.Linear(noise, width),
            nn.ReLU(),
            nn.Linear(width, width),
            nn.ReLU(),
            nn.Linear(width, 64),
            nn.Tanh(),
            nn.Unflatten(1, (1, 8, 8)),
        )
        # Spectral normalisation keeps the discriminator from becoming overconfident (Miyato et al., 2018).
        self.discriminator = nn.Sequential(
            nn.Flatten(),
            spectral_norm(nn.Linear(64, width)),
            nn.LeakyReLU(0.2),
            spectral_norm(nn.Linear(width, width)),
            nn.LeakyReLU(0.2),
            spectral_norm(nn.Linear(width, 1)),
        )

    def forward(self, noise: torch.Tensor) -> torch.Tensor:
        """`noise`: (batch, noise). Returns images (batch, 1, 8, 8) in -1..1."""
        images: torch.Tensor = self.generator(noise)
        return images

    def sample_noise(self, count: int) -> torch.Tensor:
        return torch.randn(count, self.hparams.noise, device=self.device)

    def training_step(self, batch: Batch, batch_idx: int) -> None:
        (real,) = batch
        generator_optimizer, discriminator_optimizer = self.optimizers()

        # The discriminator: real images should get a high score, generated ones a low one.
        with self.toggled_optimizer(discriminator_optimizer):
            invented = self(self.sample_noise(len(real))).detach()
            real_score, invented_score = self.discriminator(real), self.discriminator(invented)
            discriminator_loss = (softplus(-real_score).mean() + softplus(invented_score).mean()) / 2
            discriminator_optimizer.zero_grad()
            self.manual_backward(discriminator_loss)
            discriminator_optimizer.step()

        # The generator: its images should get a high score. Toggled, the discriminator only passes gradients through.
        with self.toggled_optimizer(generator_optimizer):
            generator_loss = softplus(-self.discriminator(self(self.sample_noise(len(real))))).mean()
            generator_optimizer.zero_grad()
            self.manual_backward(generator_loss)
            generator_optimizer.step()

        losses = {"discriminator_loss": discriminator_loss, "generator_loss": generator_loss}
        self.log_dict(losses, prog_bar=True)

    def configure_optimizers(self) -> list[Optimizer]:
        """`self.optimizers()` returns them in this order."""
        hp = self.hparams
        return [
            Adam(self.generator.parameters(), lr=hp.generator_lr, betas=(0.0, 0.999)),
            Adam(self.discriminator.parameters(), lr=hp.discriminator_lr, betas=(0.0, 0.999)),
        ]
