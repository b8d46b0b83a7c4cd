"""Training without labels: two networks, two views, a queue."""

import copy
import math

import pytorch_lightning as pl
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.utils.data import DataLoader

from tests.lightning.scripts.shared import dataset, loader, noted, quiet, ready


class BYOLMAWeightUpdate(pl.Callback):
    def __init__(self, initial_tau=0.9):
        super().__init__()
        self.initial_tau = self.current_tau = initial_tau

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        online, target = pl_module.online_network, pl_module.target_network
        for p, q in zip(online.parameters(), target.parameters(), strict=True):
            q.data = self.current_tau * q.data + (1 - self.current_tau) * p.data
        max_steps = len(trainer.train_dataloader) * trainer.max_epochs
        self.current_tau = 1 - (1 - self.initial_tau) * (math.cos(math.pi * pl_module.global_step / max_steps) + 1) / 2


class BYOL(pl.LightningModule):
    def __init__(self, learning_rate=0.2):
        super().__init__()
        self.save_hyperparameters()
        self.online_network = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))
        self.target_network = copy.deepcopy(self.online_network)
        for parameter in self.target_network.parameters():
            parameter.requires_grad = False
        self.predictor = nn.Linear(4, 4)
        self.weight_callback = BYOLMAWeightUpdate()

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.weight_callback.on_train_batch_end(self.trainer, self, outputs, batch, batch_idx)

    def cosine(self, first, second):
        return -2 * F.cosine_similarity(self.predictor(self.online_network(first)), second.detach()).mean()

    def _shared_step(self, batch, batch_idx, step):
        x, _ = batch
        first, second = x + 0.1 * torch.randn_like(x), x + 0.1 * torch.randn_like(x)
        with torch.no_grad():
            targets = self.target_network(second), self.target_network(first)
        loss_a, loss_b = self.cosine(first, targets[0]), self.cosine(second, targets[1])
        total = loss_a + loss_b
        self.log_dict({f"{step}_1_2_loss": loss_a, f"{step}_2_1_loss": loss_b, f"{step}_total": total})
        return total

    def training_step(self, batch, batch_idx):
        return noted(self._shared_step(batch, batch_idx, "train"))

    def validation_step(self, batch, batch_idx):
        return self._shared_step(batch, batch_idx, "val")

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=self.hparams.learning_rate, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, self.trainer.max_epochs)
        return [optimizer], [scheduler]


def byol(folder):
    pl.seed_everything(31)
    model = BYOL()
    trainer = pl.Trainer(**quiet(folder, max_epochs=2))
    trainer.fit(model, ready(), ready(16, seed=2))
    return model, (model.weight_callback.current_tau, sorted(trainer.callback_metrics))


class CLIP(pl.LightningModule):
    """Contrasts all pairs of all processes."""

    def __init__(self, embed_dim=4):
        super().__init__()
        self.image, self.text = nn.Linear(8, embed_dim), nn.Linear(8, embed_dim)
        self.logit_scale = nn.Parameter(torch.ones([]) * math.log(1 / 0.07))

    def forward(self, image, text):
        return F.normalize(self.image(image), dim=-1), F.normalize(self.text(text), dim=-1)

    def gathered(self, features):
        return self.all_gather(features, sync_grads=True).reshape(-1, features.shape[-1])

    def training_step(self, batch, batch_idx):
        image, text = self(batch[0], batch[0].flip(1))
        image, text = self.gathered(image), self.gathered(text)
        logits = self.logit_scale.exp() * image @ text.t()
        labels = torch.arange(len(logits), device=self.device)
        loss = (F.cross_entropy(logits, labels) + F.cross_entropy(logits.t(), labels)) / 2
        self.log("loss", loss, batch_size=len(labels), rank_zero_only=True)
        return noted(loss)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.logit_scale.data.clamp_(0, math.log(100))

    def validation_step(self, batch, batch_idx):
        image, text = self(batch[0], batch[0].flip(1))
        return {"image": image, "text": text}

    def on_validation_batch_end(self, outputs, batch, batch_idx, dataloader_idx=0):
        everywhere = self.all_gather(outputs)
        self.log("val_similarity", (everywhere["image"] * everywhere["text"]).sum(-1).mean())

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2, betas=(0.9, 0.98), eps=1e-6, weight_decay=0.2)


def clip(folder):
    pl.seed_everything(37)
    model = CLIP()
    trainer = pl.Trainer(**quiet(folder, max_epochs=2, num_sanity_val_steps=0))
    trainer.fit(model, loader(), loader(16, seed=2))
    return model, trainer.callback_metrics["val_similarity"].item()


class MoCo(pl.LightningModule):
    """A queue of negatives in buffers, and a momentum encoder that is updated before each forward."""

    def __init__(self, dim=4, queue=16, momentum=0.9, temperature=0.2):
        super().__init__()
        self.save_hyperparameters()
        self.encoder_q, self.encoder_k = nn.Linear(8, dim), nn.Linear(8, dim)
        self.encoder_k.load_state_dict(self.encoder_q.state_dict())
        self.encoder_k.requires_grad_(False)
        self.register_buffer("queue", F.normalize(torch.randn(dim, queue), dim=0))
        self.register_buffer("queue_ptr", torch.zeros(1, dtype=torch.long))

    @torch.no_grad()
    def _dequeue_and_enqueue(self, keys):
        ptr = int(self.queue_ptr)
        self.queue[:, ptr : ptr + len(keys)] = keys.t()
        self.queue_ptr[0] = (ptr + len(keys)) % self.queue.shape[1]

    def training_step(self, batch, batch_idx):
        (first, second), _ = batch
        with torch.no_grad():
            for q, k in zip(self.encoder_q.parameters(), self.encoder_k.parameters(), strict=True):
                k.data.mul_(self.hparams.momentum).add_(q.data, alpha=1 - self.hparams.momentum)
            keys = F.normalize(self.encoder_k(second), dim=1)
        q = F.normalize(self.encoder_q(first), dim=1)
        positive = (q * keys).sum(1, keepdim=True)
        logits = torch.cat([positive, q @ self.queue.clone().detach()], 1) / self.hparams.temperature
        loss = F.cross_entropy(logits, torch.zeros(len(logits), dtype=torch.long, device=self.device))
        self._dequeue_and_enqueue(keys)
        self.log("loss", loss)
        return noted(loss)

    def configure_optimizers(self):
        parameters = filter(lambda p: p.requires_grad, self.parameters())
        return torch.optim.SGD(parameters, self.hparams.get("lr", 0.03), momentum=0.9, weight_decay=1e-4)


def two_views(samples):
    inputs = torch.stack([x for x, _ in samples])
    return (inputs * 1.1, inputs * 0.9), torch.stack([y for _, y in samples])


def moco(folder):
    pl.seed_everything(41)
    model = MoCo()
    trainer = pl.Trainer(**quiet(folder, max_epochs=3))
    trainer.fit(model, DataLoader(dataset(), 8, collate_fn=two_views))
    return model, (trainer.callback_metrics["loss"].item(), int(model.queue_ptr))
