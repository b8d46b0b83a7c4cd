"""A small decoder-only transformer in plain PyTorch."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention


class Block(nn.Module):
    """One layer: causal self-attention, then a feed-forward net; both pre-normalised and residual."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.dropout = dropout
        self.norm_attention = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.project = nn.Linear(width, width, bias=False)
        self.norm_feed_forward = nn.LayerNorm(width)
        self.feed_forward = nn.Sequential(
            nn.Linear(width, 4 * width, bias=False),
            nn.GELU(),
            nn.Linear(4 * width, width, bias=False),
            nn.Dropout(dropout),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`x` and the result: (batch, length, width)."""
        batch, length, width = x.shape
        qkv = self.qkv(self.norm_attention(x)).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        attended = scaled_dot_product_attention(
            query, key, value, dropout_p=self.dropout if self.training else 0.0, is_causal=True
        )
        x = x + self.project(attended.transpose(1, 2).reshape(batch, length, width))
        added: torch.Tensor = self.feed_forward(self.norm_feed_forward(x))
        return x + added


class Transformer(nn.Module):
    """Map bytes to the logits of each next byte."""

    def __init__(self, vocabulary: int, context: int, layers: int, heads: int, width: int, dropout: float) -> None:
        super().__init__()
        self.context = context
        self.token_embedding = nn.Embedding(vocabulary, width)
        self.position_embedding = nn.Embedding(context, width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.apply(self._initialize)
        # The projections back into the residual stream start smaller, so that it does not grow with depth (GPT-2).
        for name, parameter in self.named_parameters():
            if name.endswith(("project.weight", "feed_forward.2.weight")):
                nn.init.normal_(parameter, std=0.02 / (2 * layers) ** 0.5)
        # Weight tying: one matrix reads bytes and writes them (Press and Wolf, 2017).
        self.head.weight = self.token_embedding.weight

    @staticmethod
    def _initialize(layer: nn.Module) -> None:
        if isinstance(layer, (nn.Linear, nn.Embedding)):
            nn.init.normal_(layer.weight, std=0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """`tokens`: (batch, length) with length <= context. Returns logits (batch, length, vocabulary)."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.dropout(self.token_embedding(tokens) + self.position_embedding(positions))
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.head(self.norm(x))
        return logits

    @torch.no_grad()
    def generate(self, tokens: torch.Tensor, length: int, temperature: float = 0.8) -> torch.Tensor:
        """Return `tokens` (batch, any length >= 1) continued by `length` sampled tokens."""
        for _ in range(length):
            logits = self(tokens[:, -self.context :])[:, -1].float()
            probabilities = torch.softmax(logits / temperature, dim=-1)
            tokens = torch.cat([tokens, torch.multinomial(probabilities, 1)], dim=1)
        return tokens
