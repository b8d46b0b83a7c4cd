"""A decoder of any sizes, which is what the cost model describes."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention, silu

from trainer import TrainModule
from trainer.model.parallel_cost import Architecture


def _norm(of: Architecture) -> nn.Module:
    # RMSNorm is one kernel on GPUs only; on the CPU it keeps tensors between its operations.
    return nn.LayerNorm(of.hidden, bias=False)


class DecoderBlock(nn.Module):
    def __init__(self, of: Architecture) -> None:
        super().__init__()
        self.head_dim, self.gated = of.head_dim, of.gated
        queries, keys = of.heads * of.head_dim, of.kv_heads * of.head_dim
        self.norm_attention, self.norm_mlp = _norm(of), _norm(of)
        self.q, self.out = nn.Linear(of.hidden, queries, bias=False), nn.Linear(queries, of.hidden, bias=False)
        self.k, self.v = (nn.Linear(of.hidden, keys, bias=False) for _ in range(2))
        self.up, self.down = (
            nn.Linear(of.hidden, of.intermediate, bias=False),
            nn.Linear(of.intermediate, of.hidden, bias=False),
        )
        self.gate = nn.Linear(of.hidden, of.intermediate, bias=False) if of.gated else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm_attention(x)
        q, k, v = (layer(h).view(*x.shape[:2], -1, self.head_dim).transpose(1, 2) for layer in (self.q, self.k, self.v))
        attended = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        h = self.norm_mlp(x)
        wide = silu(self.up(h)) if self.gate is None else silu(self.gate(h)) * self.up(h)
        return x + self.down(wide)


class Decoder(TrainModule):
    """Next-token prediction, with a plan for tensor parallelism."""

    tensor_parallel_plan: ClassVar = {
        "embed": "rowwise",
        "blocks.*.[qkv]": "colwise",
        "blocks.*.out": "rowwise",
        "blocks.*.up": "colwise",
        "blocks.*.down": "rowwise",
        "head": "colwise_gather_output",
    }

    def __init__(self, of: Architecture) -> None:
        super().__init__()
        if of.gated:
            self.tensor_parallel_plan = {**self.tensor_parallel_plan, "blocks.*.gate": "colwise"}  # type: ignore[misc]
        self.embed = nn.Embedding(of.vocabulary, of.hidden)
        self.blocks = nn.ModuleList(DecoderBlock(of) for _ in range(of.layers))
        self.norm = _norm(of)
        self.head = nn.Linear(of.hidden, of.vocabulary, bias=False)
        if of.tied:
            self.head.weight = self.embed.weight

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x = self.embed(batch[0][:, :-1])
        for block in self.blocks:
            x = block(x)
        return cross_entropy(self.head(self.norm(x)).flatten(0, 1), batch[0][:, 1:].flatten())

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters())
