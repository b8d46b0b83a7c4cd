"""What checkpoints hold: states of callbacks, hyperparameters, weights by an own state_dict, names of files."""

import pytorch_lightning as pl
import torch
import torch.nn.functional as F  # noqa: N812
from pytorch_lightning.callbacks import Callback, ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from tests.lightning.scripts.shared import loader, noted, quiet, ready


class Net(pl.LightningModule):
    def __init__(self, lr=0.05):
        super().__init__()
        self.lr = lr
        self.layers = nn.Sequential(nn.Linear(8, 4), nn.Tanh(), nn.Linear(4, 2))

    def forward(self, x):
        return self.layers(x)

    def training_step(self, batch, batch_idx):
        loss = F.cross_entropy(self(batch[0]), batch[1])
        self.log("train_loss", loss)
        return noted(loss)

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", F.cross_entropy(self(batch[0]), batch[1]))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.lr)


class AverageByHand(Callback):
    """An EMA as most people write it, in the checkpoint under a key of its own, too."""

    def __init__(self, decay=0.9):
        self.decay, self.shadow, self.backup, self.loaded = decay, {}, {}, None

    def on_fit_start(self, trainer, pl_module):
        if not self.shadow:
            self.shadow = {name: p.detach().clone() for name, p in pl_module.named_parameters() if p.requires_grad}

    def on_train_batch_end(self, trainer, pl_module, *args, **kwargs):
        for name, parameter in pl_module.named_parameters():
            self.shadow[name].mul_(self.decay).add_(parameter.detach(), alpha=1 - self.decay)

    def on_validation_epoch_start(self, trainer, pl_module):
        for name, parameter in pl_module.named_parameters():
            self.backup[name] = parameter.data.clone()
            parameter.data.copy_(self.shadow[name])

    def on_validation_epoch_end(self, trainer, pl_module):
        for name, parameter in pl_module.named_parameters():
            parameter.data.copy_(self.backup.pop(name))

    def state_dict(self):
        return {"shadow": self.shadow, "decay": self.decay}

    def load_state_dict(self, state_dict):
        self.shadow = state_dict["shadow"]

    def on_save_checkpoint(self, trainer, pl_module, checkpoint):
        checkpoint["ema_state_dict"] = {name: value.clone() for name, value in self.shadow.items()}

    def on_load_checkpoint(self, trainer, pl_module, checkpoint):
        self.loaded = sorted(checkpoint["ema_state_dict"])


def averaged_by_hand(folder):
    pl.seed_everything(191)
    checkpoints = ModelCheckpoint(dirpath=folder, save_last=True)
    settings = quiet(folder, max_epochs=2, callbacks=[AverageByHand(), checkpoints], enable_checkpointing=True)
    pl.Trainer(**settings).fit(Net(), loader(), loader(16))
    model, again = Net(), AverageByHand()
    trainer = pl.Trainer(**quiet(folder, max_epochs=4, callbacks=[again]))
    trainer.fit(model, loader(), loader(16), ckpt_path=checkpoints.last_model_path)
    shadow = {name: value.tolist() for name, value in again.shadow.items()}
    return model, (shadow, again.loaded, trainer.callback_metrics["val_loss"].item())


class Counter(Callback):
    """Two of this class in one trainer: each has a state of its own."""

    def __init__(self, what="epochs"):
        self.what, self.state = what, {"epochs": 0, "batches": 0}

    @property
    def state_key(self):
        return f"Counter[what={self.what}]"

    def on_train_epoch_end(self, *args, **kwargs):
        if self.what == "epochs":
            self.state["epochs"] += 1

    def on_train_batch_end(self, *args, **kwargs):
        if self.what == "batches":
            self.state["batches"] += 1

    def load_state_dict(self, state_dict):
        self.state.update(state_dict)

    def state_dict(self):
        return self.state.copy()


def two_of_a_class(folder):
    pl.seed_everything(193)
    first = pl.Trainer(**quiet(folder, max_epochs=2, callbacks=[Counter("epochs"), Counter("batches")]))
    first.fit(Net(), ready())
    first.save_checkpoint(folder / "two.ckpt")
    model, counters = Net(), [Counter("batches"), Counter("epochs")]
    trainer = pl.Trainer(**quiet(folder, max_epochs=3, callbacks=counters))
    trainer.fit(model, ready(), ckpt_path=folder / "two.ckpt")
    return model, [counter.state for counter in counters]


class Student(Net):
    """Distilled from a teacher, whose weights no checkpoint holds."""

    def __init__(self, teacher):
        super().__init__()
        self.save_hyperparameters(ignore="teacher")
        self.teacher, self.modes = teacher, []
        self.teacher.requires_grad_(False)
        self.teacher.eval()

    def train(self, mode=True):
        super().train(mode)
        self.teacher.eval()
        return self

    def training_step(self, batch, batch_idx):
        with torch.no_grad():
            target = F.softmax(self.teacher(batch[0]), -1)
        self.modes.append(self.teacher.training)
        return noted(F.kl_div(F.log_softmax(self(batch[0]), -1), target, reduction="batchmean"))

    def configure_optimizers(self):
        return torch.optim.AdamW(filter(lambda p: p.requires_grad, self.parameters()), 1e-2)

    def state_dict(self, *args, **kwargs):
        full = super().state_dict(*args, **kwargs)
        return {name: value for name, value in full.items() if not name.startswith("teacher")}


def teacher():
    return nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 2))


def distilled(folder):
    pl.seed_everything(197)
    model, checkpoints = Student(teacher()), ModelCheckpoint(dirpath=folder, save_last=True)
    trainer = pl.Trainer(**quiet(folder, max_epochs=2, callbacks=[checkpoints], enable_checkpointing=True))
    trainer.fit(model, ready(), ready(8))
    again = Student.load_from_checkpoint(checkpoints.best_model_path, teacher=model.teacher, strict=False)
    return again, (model.modes, again.lr)


class Nested(Net):
    def __init__(self, cfg: dict, encoder=(1, 2), *, options=None, **kwargs):
        super().__init__()
        self.save_hyperparameters()
        self.save_hyperparameters({"late": 1})
        self.hparams.update({"later": 2})
        self.hparams["latest"] = [1, {"a": None}]


def nested_hyperparameters(folder):
    pl.seed_everything(199)
    model = Nested({"a": {"b": [1, 2.5, None, "x"]}, "c": True}, encoder=(3, 4), options={"lr": 1e-3}, other="bar")
    trainer = pl.Trainer(**quiet(folder, max_epochs=1))
    trainer.fit(model, ready())
    trainer.save_checkpoint(folder / "one.ckpt")
    again = Nested.load_from_checkpoint(folder / "one.ckpt", map_location="cpu")
    hparams = again.hparams
    return again, (dict(hparams), dict(again.hparams_initial), hparams.cfg["a"]["b"][1], hparams.get("none", 7))


def names_of_checkpoints(folder):
    pl.seed_everything(211)
    by_value = ModelCheckpoint(
        dirpath=folder / "a", filename="{epoch:02d}-{step}-{val_loss:.2f}", monitor="val_loss", save_top_k=-1
    )
    by_step = ModelCheckpoint(dirpath=folder / "b", every_n_train_steps=4, save_top_k=-1, filename="s{step}")
    by_epoch = ModelCheckpoint(dirpath=folder / "c", every_n_epochs=2, save_top_k=-1, save_last=True)
    two_best = ModelCheckpoint(
        dirpath=folder / "d", monitor="val_loss", mode="max", save_top_k=2, filename="x", auto_insert_metric_name=False
    )
    callbacks = [by_value, by_step, by_epoch, two_best]
    model = Net()
    trainer = pl.Trainer(**quiet(folder, max_epochs=4, callbacks=callbacks, enable_checkpointing=True))
    trainer.fit(model, ready(), ready(16))
    names = {  # of the two best a third is kept here, with which a resumed run begins; and `last` is a pointer
        part: sorted(one.name.removesuffix(".ckpt") for one in (folder / part).iterdir() if one.name[0] in "es")
        for part in "abc"
    }
    return model, (names, *map(float, (two_best.best_model_score, two_best.kth_value, by_value.current_score)))


class Experience(IterableDataset):
    def __init__(self, generate):
        self.generate = generate

    def __iter__(self):
        return self.generate()

    def __len__(self):
        return 32  # else Lightning reads one batch ahead, which is made with other weights


class PPO(pl.LightningModule):
    """Plays with the policy of now, in the dataset; two optimizers, by hand."""

    def __init__(self, steps=16, batch_size=8):
        super().__init__()
        self.automatic_optimization = False
        self.save_hyperparameters()
        self.actor, self.critic = nn.Linear(4, 2), nn.Linear(4, 1)
        self.draws = torch.Generator().manual_seed(2)

    def play(self):
        for _ in range(2):
            states = torch.randn(self.hparams.steps, 4, generator=self.draws)
            with torch.no_grad():
                logits, values = self.actor(states), self.critic(states).squeeze(-1)
            actions = (logits[:, 0] > torch.rand(self.hparams.steps, generator=self.draws)).long()
            log_probabilities = logits.log_softmax(-1).gather(1, actions[:, None])[:, 0]
            rewards = (states.sum(1) > 0).float() * actions
            yield from zip(states, actions, log_probabilities, rewards, rewards - values, strict=True)

    def training_step(self, batch, batch_idx):
        states, actions, before, rewards, advantages = batch
        advantages = (advantages - advantages.mean()) / advantages.std()
        self.log("reward", rewards.mean(), prog_bar=True, on_step=False, on_epoch=True)
        of_actor, of_critic = self.optimizers()
        now = self.actor(states).log_softmax(-1).gather(1, actions[:, None])[:, 0]
        ratio = torch.exp(now - before)
        loss = -torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).mean()
        of_actor.zero_grad()
        self.manual_backward(loss)
        of_actor.step()
        value_loss = (rewards - self.critic(states).squeeze(-1)).pow(2).mean()
        of_critic.zero_grad()
        self.manual_backward(value_loss)
        of_critic.step()
        noted(loss + value_loss)

    def configure_optimizers(self):
        return torch.optim.Adam(self.actor.parameters(), 1e-2), torch.optim.Adam(self.critic.parameters(), 1e-2)

    def train_dataloader(self):
        return DataLoader(dataset=Experience(self.play), batch_size=self.hparams.batch_size)


def ppo(folder):
    pl.seed_everything(223)
    model = PPO()
    trainer = pl.Trainer(**quiet(folder, max_epochs=3, num_sanity_val_steps=0))
    trainer.fit(model)
    return model, (trainer.callback_metrics["reward"].item(), trainer.current_epoch)
