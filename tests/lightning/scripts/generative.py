"""Adversaries, autoencoders and denoisers."""

import pytorch_lightning as pl
import torch
import torch.nn.functional as F  # noqa: N812
from pytorch_lightning import LightningModule, Trainer, seed_everything
from torch import nn

from tests.lightning.scripts.shared import noted, quiet, ready


class GAN(LightningModule):
    def __init__(self, latent_dim: int = 4, lr: float = 0.01, b1: float = 0.5, b2: float = 0.999):
        super().__init__()
        self.save_hyperparameters()
        self.automatic_optimization = False
        self.generator = nn.Linear(latent_dim, 8)
        self.discriminator = nn.Linear(8, 1)
        self.validation_z = torch.randn(8, self.hparams.latent_dim)
        self.example_input_array = torch.zeros(2, self.hparams.latent_dim)
        self.images = []

    def forward(self, z):
        return self.generator(z)

    def adversarial_loss(self, y_hat, y):
        return F.binary_cross_entropy_with_logits(y_hat, y)

    def training_step(self, batch):
        imgs, _ = batch
        optimizer_g, optimizer_d = self.optimizers()
        z = torch.randn(imgs.shape[0], self.hparams.latent_dim).type_as(imgs)

        self.toggle_optimizer(optimizer_g)
        valid = torch.ones(imgs.size(0), 1).type_as(imgs)
        g_loss = noted(self.adversarial_loss(self.discriminator(self(z)), valid))
        self.log("g_loss", g_loss, prog_bar=True)
        self.manual_backward(g_loss)
        optimizer_g.step()
        optimizer_g.zero_grad()
        self.untoggle_optimizer(optimizer_g)

        self.toggle_optimizer(optimizer_d)
        real_loss = self.adversarial_loss(self.discriminator(imgs), valid)
        fake_loss = self.adversarial_loss(self.discriminator(self(z).detach()), torch.zeros(imgs.size(0), 1))
        d_loss = noted((real_loss + fake_loss) / 2)
        self.log("d_loss", d_loss, prog_bar=True)
        self.manual_backward(d_loss)
        optimizer_d.step()
        optimizer_d.zero_grad()
        self.untoggle_optimizer(optimizer_d)

    def validation_step(self, batch, batch_idx):
        pass

    def on_validation_epoch_end(self):
        z = self.validation_z.type_as(self.generator.weight)
        self.images.append(self(z).mean().item())

    def configure_optimizers(self):
        lr, betas = self.hparams.lr, (self.hparams.b1, self.hparams.b2)
        opt_g = torch.optim.Adam(self.generator.parameters(), lr=lr, betas=betas)
        opt_d = torch.optim.Adam(self.discriminator.parameters(), lr=lr, betas=betas)
        return [opt_g, opt_d], []


def gan(folder):
    seed_everything(1)
    model = GAN()
    trainer = Trainer(**quiet(folder, max_epochs=2, num_sanity_val_steps=0))
    trainer.fit(model, ready(), ready(8))
    return model, (model.images, sorted(trainer.callback_metrics))


class WGAN(pl.LightningModule):
    """Several steps of the critic for each of the generator, with a gradient penalty and schedulers."""

    def __init__(self, n_critic=3):
        super().__init__()
        self.automatic_optimization = False
        self.n_critic = n_critic
        self.generator, self.critic = nn.Linear(4, 8), nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))

    def penalty(self, real, fake):
        alpha = torch.rand(real.size(0), 1, device=self.device)
        mixed = (alpha * real + (1 - alpha) * fake).requires_grad_(True)
        (gradient,) = torch.autograd.grad(self.critic(mixed).sum(), mixed, create_graph=True)
        return ((gradient.norm(2, dim=1) - 1) ** 2).mean()

    def training_step(self, batch, batch_idx):
        opt_g, opt_c = self.optimizers()
        sch_g, sch_c = self.lr_schedulers()
        real = batch[0]
        with opt_c.toggle_model():
            fake = self.generator(torch.randn(real.size(0), 4, device=self.device)).detach()
            loss = self.critic(fake).mean() - self.critic(real).mean() + 10 * self.penalty(real, fake)
            opt_c.zero_grad()
            self.manual_backward(noted(loss))
            self.clip_gradients(opt_c, gradient_clip_val=1.0, gradient_clip_algorithm="norm")
            opt_c.step()
        if (batch_idx + 1) % self.n_critic == 0:
            with opt_g.toggle_model():
                loss = -self.critic(self.generator(torch.randn(real.size(0), 4, device=self.device))).mean()
                opt_g.zero_grad()
                self.manual_backward(noted(loss))
                opt_g.step()
        self.log_dict({"loss": loss, "step_of_critic": float(batch_idx)})
        if self.trainer.is_last_batch:
            sch_g.step()
            sch_c.step()

    def configure_optimizers(self):
        opt_g = torch.optim.RMSprop(self.generator.parameters(), lr=5e-3)
        opt_c = torch.optim.RMSprop(self.critic.parameters(), lr=5e-3)
        exponential = torch.optim.lr_scheduler.ExponentialLR
        return (
            {"optimizer": opt_g, "lr_scheduler": exponential(opt_g, 0.9)},
            {"optimizer": opt_c, "lr_scheduler": {"scheduler": exponential(opt_c, 0.8)}},
        )


def wgan(folder):
    pl.seed_everything(11)
    model = WGAN()
    pl.Trainer(**quiet(folder, max_epochs=2)).fit(model, ready())
    return model, [group["lr"] for optimizer in model.optimizers() for group in optimizer.param_groups]


class VAE(LightningModule):
    def __init__(self, **kwargs):
        super().__init__()
        self.save_hyperparameters()
        self.encoder, self.decoder = nn.Linear(8, 4), nn.Linear(2, 8)

    def training_step(self, batch, batch_idx):
        x, _ = batch
        mu, log_var = self.encoder(x).chunk(2, 1)
        q = torch.distributions.Normal(mu, torch.exp(0.5 * log_var))
        recon = F.mse_loss(self.decoder(q.rsample()), x, reduction="mean")
        kl = -0.5 * (1 + log_var - mu**2 - log_var.exp()).mean()
        logs = {"recon_loss": recon, "kl": kl}
        self.log_dict({f"train_{k}": v for k, v in logs.items()}, on_step=True, on_epoch=False)
        return noted(recon + self.hparams.kl_coeff * kl)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.hparams["lr"])


def vae(folder):
    seed_everything(3)
    model = VAE(lr=1e-2, kl_coeff=0.1)
    trainer = Trainer(**quiet(folder, max_steps=8, gradient_clip_val=0.5, log_every_n_steps=1))
    trainer.fit(model, train_dataloaders=ready())
    return model, trainer.global_step


class EMA(pl.Callback):
    """Keeps an average of the weights, and evaluates with it."""

    def __init__(self, decay=0.9):
        self.decay, self.shadow, self.backup = decay, None, None

    def on_fit_start(self, trainer, pl_module):
        if self.shadow is None:
            self.shadow = {k: v.detach().clone() for k, v in pl_module.state_dict().items()}

    @torch.no_grad()
    def on_train_batch_end(self, trainer, pl_module, *args, **kwargs):
        for name, value in pl_module.state_dict().items():
            self.shadow[name].mul_(self.decay).add_(value, alpha=1 - self.decay)

    def on_validation_start(self, trainer, pl_module):
        self.backup = {k: v.detach().clone() for k, v in pl_module.state_dict().items()}
        pl_module.load_state_dict(self.shadow)

    def on_validation_end(self, trainer, pl_module):
        pl_module.load_state_dict(self.backup)

    def state_dict(self):
        return {"shadow": self.shadow}

    def load_state_dict(self, state_dict):
        self.shadow = state_dict["shadow"]


class Denoiser(pl.LightningModule):
    def __init__(self, timesteps=10):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(9, 16), nn.SiLU(), nn.Linear(16, 8))
        self.register_buffer("alphas", torch.linspace(0.99, 0.1, timesteps).cumprod(0))

    def p_losses(self, x):
        t = torch.randint(0, len(self.alphas), (x.shape[0],), device=self.device).long()
        a, noise = self.alphas[t].unsqueeze(1), torch.randn_like(x)
        noisy = a.sqrt() * x + (1 - a).sqrt() * noise
        return F.mse_loss(self.net(torch.cat([noisy, t.unsqueeze(1) / len(self.alphas)], 1)), noise)

    def training_step(self, batch, batch_idx):
        loss = self.p_losses(batch[0])
        self.log("train/loss_simple", loss, prog_bar=True, logger=True, on_step=True, on_epoch=True)
        self.log("global_step_", float(self.global_step), prog_bar=True, logger=True, on_step=True, on_epoch=False)
        return noted(loss)

    def validation_step(self, batch, batch_idx):
        x = batch[0]
        self.log("val/recon", self.net(torch.cat([x, torch.zeros(len(x), 1)], 1)).pow(2).mean())

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def diffusion_with_ema(folder):
    pl.seed_everything(23)
    model = Denoiser()
    trainer = pl.Trainer(**quiet(folder, max_epochs=2, callbacks=[EMA()], num_sanity_val_steps=0))
    trainer.fit(model, ready(), ready(16, seed=2))
    return model, {k: v.item() for k, v in trainer.callback_metrics.items()}
