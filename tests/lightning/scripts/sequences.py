"""Sequences, graphs and agents: batches of other shapes and sources."""

from collections import deque, namedtuple

import numpy as np
import pytorch_lightning as pl
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from tests.lightning.scripts.shared import noted, quiet


class LSTM(pl.LightningModule):
    """Truncated backpropagation by hand: the state goes on, its graph does not."""

    def __init__(self, truncated_steps=3):
        super().__init__()
        self.automatic_optimization = False
        self.truncated_steps = truncated_steps
        self.lstm, self.head = nn.LSTM(1, 8, batch_first=True), nn.Linear(8, 1)

    def training_step(self, batch, batch_idx):
        optimizer, hidden = self.optimizers(), None
        for part, target in zip(
            batch[:, :-1].split(self.truncated_steps, 1), batch[:, 1:].split(self.truncated_steps, 1), strict=True
        ):
            output, hidden = self.lstm(part, hidden)
            loss = noted(F.mse_loss(self.head(output), target))
            optimizer.zero_grad()
            self.manual_backward(loss)
            self.clip_gradients(optimizer, gradient_clip_val=0.5)
            optimizer.step()
            hidden = tuple(state.detach() for state in hidden)
        self.log("loss", loss, on_step=True)

    def on_train_epoch_end(self):
        self.lr_schedulers().step()

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=1e-2)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]


def truncated_backpropagation(folder):
    pl.seed_everything(43)
    model = LSTM()
    waves = torch.sin(torch.arange(13.0) / 3 + torch.arange(24.0).unsqueeze(1)).unsqueeze(-1)
    trainer = pl.Trainer(**quiet(folder, max_epochs=2))
    trainer.fit(model, DataLoader(waves, 8))
    return model, (trainer.global_step > 0, trainer.callback_metrics["loss"].item())


class Batch:
    """As PyG's: graphs side by side, which move themselves."""

    def __init__(self, **fields):
        self.__dict__.update(fields)

    def to(self, device, *args, **kwargs):
        return Batch(**{name: value.to(device) for name, value in vars(self).items()})

    @property
    def num_graphs(self):
        return int(self.batch.max()) + 1


class Graphs(Dataset):
    def __len__(self):
        return 16

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        nodes = 3 + index % 3
        ring = torch.arange(nodes)
        x = torch.randn(nodes, 4, generator=generator)
        return x, torch.stack([ring, ring.roll(1)]), (x.sum() > 0).float()


def collate(graphs):
    offsets = torch.tensor([0] + [len(x) for x, _, _ in graphs]).cumsum(0)
    return Batch(
        x=torch.cat([x for x, _, _ in graphs]),
        edge_index=torch.cat([edges + start for (_, edges, _), start in zip(graphs, offsets, strict=False)], 1),
        y=torch.stack([y for _, _, y in graphs]),
        batch=torch.cat([torch.full((len(x),), number) for number, (x, _, _) in enumerate(graphs)]),
    )


class GraphLevelGNN(pl.LightningModule):
    def __init__(self, c_hidden=8):
        super().__init__()
        self.save_hyperparameters()
        self.first, self.second, self.head = (
            nn.Linear(4, c_hidden),
            nn.Linear(c_hidden, c_hidden),
            nn.Linear(c_hidden, 1),
        )

    def forward(self, data, mode="train"):
        source, target = data.edge_index
        x = self.first(data.x).relu()
        x = torch.zeros_like(x).index_add_(0, target, self.second(x)[source]) + x
        pooled = torch.zeros(data.num_graphs, x.shape[1]).type_as(x).index_add_(0, data.batch, x)
        scores = self.head(pooled).squeeze(-1)
        return F.binary_cross_entropy_with_logits(scores, data.y), ((scores > 0) == data.y).float().mean()

    def training_step(self, batch, batch_idx):
        loss, acc = self.forward(batch, mode="train")
        self.log("train_loss", loss, batch_size=batch.num_graphs)
        self.log("train_acc", acc, batch_size=batch.num_graphs)
        return noted(loss)

    def validation_step(self, batch, batch_idx):
        _, acc = self.forward(batch, mode="val")
        self.log("val_acc", acc, batch_size=batch.num_graphs)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2, weight_decay=0.0)


def graphs(folder):
    pl.seed_everything(47)
    model = GraphLevelGNN()
    loaders = DataLoader(Graphs(), 4, collate_fn=collate), DataLoader(Graphs(), 8, collate_fn=collate)
    trainer = pl.Trainer(**quiet(folder, max_epochs=2))
    trainer.fit(model, *loaders)
    (result,) = trainer.validate(model, loaders[1], verbose=False)
    return model, result


Experience = namedtuple("Experience", ["state", "action", "reward", "done", "new_state"])


class ReplayBuffer:
    def __init__(self, capacity):
        self.buffer = deque(maxlen=capacity)

    def append(self, experience):
        self.buffer.append(experience)

    def sample(self, size, generator):
        indices = torch.randperm(len(self.buffer), generator=generator)[:size].tolist()
        return zip(*(self.buffer[index] for index in indices), strict=True)


class RLDataset(IterableDataset):
    def __init__(self, buffer, sample_size=16):
        self.buffer, self.sample_size = buffer, sample_size
        self.generator = torch.Generator().manual_seed(0)

    def __iter__(self):
        states, actions, rewards, dones, new_states = self.buffer.sample(self.sample_size, self.generator)
        for index in range(len(dones)):
            yield states[index], actions[index], rewards[index], dones[index], new_states[index]


class DQN(pl.LightningModule):
    def __init__(self, batch_size=8, gamma=0.9, sync_rate=3, replay_size=64, warm_start_steps=32):
        super().__init__()
        self.save_hyperparameters()
        self.net, self.target_net = nn.Linear(3, 2), nn.Linear(3, 2)
        self.state, self.total_reward = torch.zeros(3), 0.0
        self.buffer = ReplayBuffer(self.hparams.replay_size)
        self.populate(self.hparams.warm_start_steps)

    def populate(self, steps):
        for _ in range(steps):
            self.play_step(epsilon=1.0)

    @torch.no_grad()
    def play_step(self, epsilon=0.0, device="cpu"):
        if np.random.random() < epsilon:
            action = int(np.random.randint(2))
        else:
            action = int(self.net(self.state.to(device)).argmax())
        new_state = (self.state * 0.9 + torch.tensor([1.0, -1.0, 0.5]) * (action - 0.5)).clamp(-1, 1)
        reward = float(-new_state.abs().sum())
        self.buffer.append(Experience(self.state, action, reward, False, new_state))
        self.state = new_state
        return reward

    def dqn_mse_loss(self, batch):
        states, actions, rewards, dones, next_states = batch
        values = self.net(states).gather(1, actions.long().unsqueeze(-1)).squeeze(-1)
        with torch.no_grad():
            next_values = self.target_net(next_states).max(1)[0]
            next_values[dones] = 0.0
        return F.mse_loss(values, (next_values * self.hparams.gamma + rewards.float()).detach())

    def training_step(self, batch, nb_batch):
        device = self.get_device(batch)
        reward = self.play_step(max(0.1, 1.0 - self.global_step / 8), device)
        self.total_reward += reward
        loss = self.dqn_mse_loss(batch)
        if self.global_step % self.hparams.sync_rate == 0:
            self.target_net.load_state_dict(self.net.state_dict())
        self.log_dict({"reward": reward, "train_loss": loss})
        self.log("total_reward", self.total_reward, prog_bar=True)
        self.log("steps", float(self.global_step), logger=False, prog_bar=True)
        return noted(loss)

    def configure_optimizers(self):
        return [torch.optim.Adam(self.net.parameters(), lr=1e-2)]

    def train_dataloader(self):
        return DataLoader(dataset=RLDataset(self.buffer), batch_size=self.hparams.batch_size)

    def get_device(self, batch):
        return batch[0].device.index if self.on_gpu else "cpu"

    @property
    def on_gpu(self):
        return self.device.type == "cuda"


def dqn(folder):
    pl.seed_everything(53)
    model = DQN()
    trainer = pl.Trainer(**quiet(folder, max_epochs=5, val_check_interval=50, log_every_n_steps=1))
    trainer.fit(model)
    return model, (trainer.global_step, model.total_reward, trainer.callback_metrics["total_reward"].item())


class CharacterModel(pl.LightningModule):
    """Batches are dicts, outputs are kept for the epoch's end, and the loss is a sum over tokens by hand."""

    def __init__(self, vocabulary=11, width=8):
        super().__init__()
        self.save_hyperparameters()
        self.embedding = nn.Embedding(vocabulary, width)
        self.rnn, self.head = nn.GRU(width, width, batch_first=True), nn.Linear(width, vocabulary, bias=False)
        self.training_step_outputs, self.perplexities = [], []

    def forward(self, input_ids, attention_mask=None, labels=None):
        hidden, _ = self.rnn(self.embedding(input_ids))
        logits = self.head(hidden)
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)
        return {"loss": loss, "logits": logits}

    def training_step(self, batch, batch_idx):
        outputs = self(**batch)
        self.training_step_outputs.append(outputs["loss"].detach())
        self.log("ppl", outputs["loss"].detach().exp(), on_step=False, on_epoch=True)
        noted(outputs["loss"])
        return outputs

    def on_train_epoch_end(self):
        mean = torch.stack(self.training_step_outputs).mean()
        self.perplexities.append(mean.exp().item())
        self.log("training_epoch_mean", mean)
        self.training_step_outputs.clear()

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=5e-3)
        steps = self.trainer.estimated_stepping_batches
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=5e-3, total_steps=steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def language_model(folder):
    pl.seed_everything(59)
    model = CharacterModel()
    ids = (torch.arange(16).unsqueeze(1) * 3 + torch.arange(7)) % 11
    rows = [{"input_ids": row, "attention_mask": torch.ones(7), "labels": row} for row in ids]
    trainer = pl.Trainer(**quiet(folder, max_epochs=2, gradient_clip_val=0.1, gradient_clip_algorithm="value"))
    trainer.fit(model, DataLoader(rows, 4))
    return model, (model.perplexities, trainer.callback_metrics["training_epoch_mean"].item())
