"""Methods of a step that a module may override, each kind of them."""

import pytorch_lightning as pl
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from tests.lightning.scripts.shared import loader, noted, quiet


class Base(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))
        self.calls = []

    def training_step(self, batch, batch_idx):
        loss = F.cross_entropy(self.layer(batch[0]), batch[1])
        self.log("loss", loss)
        return noted(loss)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def trained(model, folder, **settings):
    pl.Trainer(**quiet(folder, **{"max_epochs": 2, **settings})).fit(model, loader())
    return model, model.calls


class Warmup(Base):
    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
        optimizer.step(closure=optimizer_closure)
        if self.trainer.global_step < 5:
            scale = min(1.0, float(self.trainer.global_step + 1) / 5)
            for group in optimizer.param_groups:
                group["lr"] = scale * 0.1
        self.calls.append((epoch, batch_idx, optimizer.param_groups[0]["lr"]))


def warmup_in_optimizer_step(folder):
    pl.seed_everything(61)
    return trained(Warmup(), folder)


class SkippedSteps(Base):
    """The old shape of the arguments, a closure that is called alone, and `super()`."""

    def optimizer_step(self, *args, **kwargs):
        epoch, batch_idx, _, closure = args[:4] if len(args) > 3 else (*args, kwargs["optimizer_closure"])
        self.calls.append((epoch, batch_idx))
        if batch_idx % 3 == 2:
            loss = closure()
            self.calls.append(round(float(loss), 4))
        else:
            super().optimizer_step(*args, **kwargs)

    def optimizer_zero_grad(self, epoch, batch_idx, optimizer):
        optimizer.zero_grad(set_to_none=False)
        self.calls.append("zero_grad")


def skipped_steps(folder):
    pl.seed_everything(67)
    model, calls = trained(SkippedSteps(), folder)
    return model, [call for call in calls if call != "zero_grad"]


class ScaledBackward(Base):
    def backward(self, loss, *args, **kwargs):
        (2 * loss).backward(*args, **kwargs)
        self.calls.append("backward")

    def on_after_backward(self):
        for name, parameter in self.named_parameters():
            if parameter.grad is not None and name.endswith("bias"):
                parameter.grad.mul_(0.5)
        valid = all(torch.isfinite(p.grad).all() for p in self.parameters())
        if not valid:
            self.zero_grad()


def scaled_backward(folder):
    pl.seed_everything(71)
    return trained(ScaledBackward(), folder)


class NormLogged(Base):
    def on_before_optimizer_step(self, optimizer):
        norms = pl.utilities.grad_norm(self.layer, norm_type=2)
        self.log_dict(norms)
        self.calls.append(norms["grad_2.0_norm_total"].item())

    def on_before_zero_grad(self, optimizer):
        assert optimizer.param_groups


def norms_logged(folder):
    pl.seed_everything(83)
    return trained(NormLogged(), folder)


class SAM(Base):
    """Two forwards a step: to the worst place near by, and back."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers(use_pl_optimizer=True)
        loss = super().training_step(batch, batch_idx)
        self.manual_backward(loss)
        gradients = [p.grad.clone() for p in self.parameters()]
        with torch.no_grad():
            for p, g in zip(self.parameters(), gradients, strict=True):
                p.add_(0.05 * g)
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        with torch.no_grad():
            for p, g in zip(self.parameters(), gradients, strict=True):
                p.sub_(0.05 * g)
        optimizer.step()
        optimizer.zero_grad()
        return loss


def sharpness_aware(folder):
    pl.seed_everything(97)
    return trained(SAM(), folder)
