"""A decoder of any sizes, which is what the cost model describes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn.functional import cross_entropy, linear, scaled_dot_product_attention, silu

from trainer import TrainModule


@dataclass(frozen=True)
class Architecture:
    """Sizes of a decoder: an embedding, equal blocks of attention and an MLP with norms, a norm, and a head."""

    layers: int
    hidden: int
    heads: int
    vocabulary: int
    kv_heads: int
    head_dim: int
    intermediate: int
    gated: bool = True
    """True: the MLP has three layers (gate, up, down), else two."""
    tied: bool = False
    """True if the head has the weights of the embedding."""
    experts: int = 1
    experts_per_token: int = 1
    shared: int = 0
    """Width of the experts of a mixture that compute every token, all together."""


def _norm(of: Architecture) -> nn.Module:
    # RMSNorm is one kernel on GPUs only; on the CPU it keeps tensors between its operations.
    return nn.LayerNorm(of.hidden, bias=False)


class Experts(nn.Module):
    """Gated layers, of which a token uses some."""

    def __init__(self, of: Architecture) -> None:
        super().__init__()
        wide, narrow = (of.experts, of.intermediate, of.hidden), (of.experts, of.hidden, of.intermediate)
        self.gate, self.up, self.down = (nn.Parameter(torch.randn(size) / 16) for size in (wide, wide, narrow))

    def forward(self, hidden: torch.Tensor, indices: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        output = torch.zeros_like(hidden)
        for expert in range(len(self.up)):
            token, choice = torch.where(indices == expert)
            read = hidden[token]
            wide = silu(linear(read, self.gate[expert])) * linear(read, self.up[expert])
            computed = linear(wide, self.down[expert]) * weights[token, choice, None]
            output = output.index_add(0, token, computed.to(output.dtype))
        return output


class Mixture(nn.Module):
    """Experts, each with as many tokens: that of the first choice is the next one with each token."""

    def __init__(self, of: Architecture) -> None:
        super().__init__()
        self.each, self.router = of.experts_per_token, nn.Linear(of.hidden, of.experts, bias=False)
        self.experts = Experts(of)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = x.flatten(0, 1)
        scores = self.router(hidden).softmax(-1)
        choices = torch.arange(len(hidden), device=x.device)[:, None] + torch.arange(self.each, device=x.device)
        indices = choices % scores.shape[1]
        return self.experts(hidden, indices, scores.gather(1, indices)).view_as(x)


class DecoderBlock(nn.Module):
    def __init__(self, of: Architecture) -> None:
        super().__init__()
        self.head_dim, self.gated = of.head_dim, of.gated
        queries, keys = of.heads * of.head_dim, of.kv_heads * of.head_dim
        self.norm_attention, self.norm_mlp = _norm(of), _norm(of)
        self.q, self.out = nn.Linear(of.hidden, queries, bias=False), nn.Linear(queries, of.hidden, bias=False)
        self.k, self.v = (nn.Linear(of.hidden, keys, bias=False) for _ in range(2))
        self.mixture = Mixture(of) if of.experts > 1 else None
        width = of.intermediate if of.experts == 1 else of.shared
        if width:
            self.up, self.down = (
                nn.Linear(of.hidden, width, bias=False),
                nn.Linear(width, of.hidden, bias=False),
            )
        self.gate = nn.Linear(of.hidden, width, bias=False) if of.gated and width else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm_attention(x)
        q, k, v = (layer(h).view(*x.shape[:2], -1, self.head_dim).transpose(1, 2) for layer in (self.q, self.k, self.v))
        attended = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        h = self.norm_mlp(x)
        if self.mixture is not None:
            x = x + self.mixture(h)
        if not hasattr(self, "down"):
            return x
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
        plan: dict[str, str] = dict(self.tensor_parallel_plan)
        if of.gated:
            plan["blocks.*.gate"] = "colwise"
        if of.experts > 1:
            plan["blocks.*.experts"] = "experts"
        if of.experts > 1 and not of.shared:
            plan = {name: style for name, style in plan.items() if name.split(".")[-1] not in ("up", "down", "gate")}
        self.tensor_parallel_plan = plan  # type: ignore[misc]
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
