"""A small GPT and an MLP for the suites over strategies, with everything that makes parity hard."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn.functional import cross_entropy, gelu, linear, mse_loss, scaled_dot_product_attention
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import TensorDataset

from trainer import TrainModule

VOCABULARY, LENGTH, WIDTH, HEADS = 19, 8, 16, 2
FEATURES = 6
IGNORED = -100
WARM_UP, STEPS = 5, 20


def warm_up_and_cosine(step: int) -> float:
    if step < WARM_UP:
        return (step + 1) / WARM_UP
    return 0.1 + 0.45 * (1 + math.cos(math.pi * (step - WARM_UP) / (STEPS - WARM_UP)))


class Trained(TrainModule):
    """Train with AdamW that decays matrices only, and a schedule by the step; the same for every strategy."""

    def loss(self, batch: Any) -> torch.Tensor:
        """Return the mean loss over the batch's items."""
        raise NotImplementedError

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = self.loss(batch)
        self.log("loss", loss, on_step=True, on_epoch=False, weight=self.num_items(batch))
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        loss = self.loss(batch)
        self.log("val_loss", loss, weight=self.num_items(batch))
        self.log("val_largest", batch[0].float().max(), reduce_fx="max")

    def optimizer(self) -> Optimizer:
        parameters = [p for p in self.parameters() if p.requires_grad]
        groups = [
            {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": 0.1},
            {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
        ]
        return AdamW(groups, lr=1e-2, betas=(0.9, 0.95))

    def configure_optimizers(self) -> Any:
        optimizer = self.optimizer()
        return [optimizer], [{"scheduler": LambdaLR(optimizer, warm_up_and_cosine), "interval": "step"}]


class MLP(Trained):
    """A regression whose loss is a mean over samples."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(FEATURES, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)[:, 0]

    def loss(self, batch: Any) -> torch.Tensor:
        return mse_loss(self(batch[0]), batch[1])

    def predict_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self(batch[0])

    @staticmethod
    def data(samples: int) -> TensorDataset:
        x = torch.randn(samples, FEATURES, generator=torch.Generator().manual_seed(1))
        return TensorDataset(x, x.sum(1) + x[:, 0] * x[:, 1])


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm_attention, self.norm_feed_forward = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.project = nn.Linear(WIDTH, WIDTH)
        self.feed_forward = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        # By heads, of which a process may have a part.
        qkv = self.qkv(self.norm_attention(x)).view(batch, length, -1, 3, WIDTH // HEADS)
        attended = scaled_dot_product_attention(*qkv.permute(3, 0, 2, 1, 4), is_causal=True)
        x = x + self.project(attended.transpose(1, 2).flatten(2))
        return x + self.feed_forward(self.norm_feed_forward(x))


class Experts(nn.Module):
    """Feed-forward layers of which each token uses some."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(count, 2 * WIDTH, WIDTH) / WIDTH**0.5)
        self.down = nn.Parameter(torch.randn(count, WIDTH, 2 * WIDTH) / WIDTH**0.5)
        self.bias = nn.Parameter(torch.zeros(count, WIDTH))

    def forward(self, hidden: torch.Tensor, indices: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        output = torch.zeros_like(hidden)
        for expert, (up, down, bias) in enumerate(zip(self.up, self.down, self.bias, strict=True)):
            token, choice = torch.where(indices == expert)
            computed = linear(gelu(linear(hidden[token], up)), down, bias) * weights[token, choice, None]
            output = output.index_add(0, token, computed.to(output.dtype))
        return output


class Mixture(nn.Module):
    def __init__(self, experts: int) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, experts)
        self.experts = Experts(experts)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = x.flatten(0, 1)
        weights, indices = self.router(hidden).softmax(-1).topk(2)
        return self.experts(hidden, indices, weights).view_as(x)


class Transformer(nn.Module):
    def __init__(self, tied: bool, frozen: bool, experts: int = 0, trains_end: bool = False) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        if experts:
            self.blocks[1].feed_forward = Mixture(experts)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.register_buffer("temperature", torch.tensor(0.5))
        if tied:
            nn.init.normal_(self.tokens.weight, std=0.1)
            self.head.weight = self.tokens.weight
        if frozen:
            self.positions.requires_grad_(False)
            self.blocks[0].qkv.requires_grad_(False)
            self.blocks[1].norm_attention.requires_grad_(False)
        if trains_end:
            self.requires_grad_(False)
            for trained in (self.blocks[1].feed_forward, self.norm, self.head):
                trained.requires_grad_(True)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.positions.weight
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)) / self.temperature


class GPT(Trained):
    """Next-token prediction.

    Args:
        ragged: sequences of different lengths, and a loss that is a mean over tokens instead of samples.
        tied: the embedding and the head share one matrix.
        frozen: some weights do not train: a layer, and parts of both blocks.
        deferred: the layers are built in `configure_model`.
        experts: the last block is a mixture of this many.
        trains_end: only the end of the last block and the head train.
    """

    plan: ClassVar = {
        "net.tokens": "rowwise",
        "net.blocks.*.qkv": "colwise",
        "net.blocks.*.project": "rowwise",
        "net.blocks.*.feed_forward.0": "colwise",
        "net.blocks.*.feed_forward.2": "rowwise",
        "net.head": "colwise_gather_output",
    }

    def __init__(
        self,
        ragged: bool = False,
        tied: bool = False,
        frozen: bool = False,
        deferred: bool = False,
        experts: int = 0,
        trains_end: bool = False,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.ragged = ragged
        self.tensor_parallel_plan = {**self.plan, "net.blocks.*.experts": "experts"} if experts else self.plan
        self.net: Transformer | None = None if deferred else Transformer(tied, frozen, experts, trains_end)

    def configure_model(self) -> None:
        if self.net is None:
            self.net = Transformer(
                self.hparams.tied, self.hparams.frozen, self.hparams.experts, self.hparams.trains_end
            )

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        assert self.net is not None
        return self.net(tokens)

    def loss(self, batch: Any) -> torch.Tensor:
        inputs, targets = batch
        return cross_entropy(self(inputs).flatten(0, 1), targets.flatten(), ignore_index=IGNORED)

    def num_items(self, batch: Any) -> int | None:
        return int((batch[1] != IGNORED).sum()) if self.ragged else None

    def predict_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self(batch[0])[:, -1]

    def data(self, samples: int) -> TensorDataset:
        generator = torch.Generator().manual_seed(1)
        start = torch.randint(VOCABULARY, (samples, 1), generator=generator)
        stride = torch.randint(1, 4, (samples, 1), generator=generator)
        tokens = (start + stride * torch.arange(LENGTH + 1)) % VOCABULARY
        inputs, targets = tokens[:, :-1], tokens[:, 1:].clone()
        if self.ragged:
            lengths = torch.randint(1, LENGTH + 1, (samples, 1), generator=generator)
            targets[torch.arange(LENGTH) >= lengths] = IGNORED
        return TensorDataset(inputs, targets)
