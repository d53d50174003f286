"""A small GPT on bytes, in nanoGPT's shape: pre-norm blocks of causal attention and a GELU network, no biases."""

from __future__ import annotations

import math

from torch import Tensor, nn
from torch.nn.functional import gelu, scaled_dot_product_attention

CONTEXT = 256
"""The longest window that positions are learned for."""
HEAD = 64
"""The width of an attention head; narrower networks have four heads, or two."""


class Block(nn.Module):
    """Attention, then a network of four times the width, each added to what it reads."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = width // HEAD if width > 4 * HEAD else 4 if width % 4 == 0 else 2
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:  # (batch, time, width)
        batch, time, width = x.shape
        split = self.qkv(self.norm1(x)).view(batch, time, 3, self.heads, width // self.heads)
        q, k, v = split.permute(2, 0, 3, 1, 4)  # each (batch, heads, time, width of a head)
        attended = scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(x.shape)
        x = x + self.out(attended)
        result: Tensor = x + self.down(gelu(self.up(self.norm2(x)), approximate="tanh"))
        return result


class GPT(nn.Module):
    """Predicts the next token at every place of a window: (batch, time) to (batch, vocabulary, time)."""

    def __init__(self, width: int, depth: int, vocabulary: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(CONTEXT, width)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        for name, weight in self.named_parameters():
            if weight.dim() > 1:
                nn.init.normal_(weight, std=_spread(name, weight, depth))

    def forward(self, tokens: Tensor) -> Tensor:
        time = tokens.shape[1]
        if time > CONTEXT:
            raise ValueError(f"a window of {time} tokens is longer than the {CONTEXT} that positions are learned for")
        x = self.tokens(tokens) + self.positions.weight[:time]
        logits: Tensor = self.head(self.norm(self.blocks(x)))
        return logits.transpose(1, 2)


def _spread(name: str, weight: Tensor, depth: int) -> float:
    """Return the standard deviation of a first weight: what every block adds has the size of the stream in all."""
    if not name.startswith("blocks"):
        return 0.02
    added = name.endswith(("out.weight", "down.weight"))
    return 1 / math.sqrt(weight.shape[1]) / (math.sqrt(2 * depth) if added else 1.0)


def gpt(width: int, depth: int, vocabulary: int) -> nn.Module:
    """Return a GPT: gpt64x2 has .15 million parameters, gpt384x6 11 million.

    >>> import torch
    >>> gpt(64, 2, 256)(torch.zeros(3, 10, dtype=torch.int64)).shape
    torch.Size([3, 256, 10])
    """
    if width < 1 or width % 2 or (width > 4 * HEAD and width % HEAD):
        raise ValueError(f"width={width} does not divide into heads; take an even number, above 256 one of {HEAD}")
    return GPT(width, depth, vocabulary)
