"""The layers of the toy GPT, whole, as one process runs them (§9.2 §9.3).

Legend: B sequences in a micro-batch, T context, H width, N heads, G key and value heads, D head width, V
vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ds_lite.sequence.context import first_token

_STD = 0.02  # of initial weights, as in GPT-2


@dataclass(frozen=True)
class Shape:
    """The sizes of a toy model; the defaults make 1.05 million parameters, as heavy in front as behind.

    `num_kv_heads` is the number of key and value heads (default: one for each query head). `qk_norm` puts a
    norm with one weight vector for all heads on queries and keys.

    Raises: ValueError if the heads do not divide the width, or the kv heads not the heads.
    """

    width: int = 144
    num_heads: int = 4
    num_blocks: int = 4
    context: int = 64
    vocabulary: int = 256  # a token is a byte
    num_kv_heads: int | None = None
    qk_norm: bool = False

    def __post_init__(self) -> None:
        if self.width % self.num_heads:
            fitting = [heads for heads in range(1, self.width + 1) if self.width % heads == 0]
            raise ValueError(
                f"width={self.width} is not divisible by num_heads={self.num_heads}; "
                f"choose from {fitting} (§9.2)"
            )
        if self.kv_heads < 1 or self.num_heads % self.kv_heads:
            fitting = [heads for heads in range(1, self.num_heads + 1) if self.num_heads % heads == 0]
            raise ValueError(
                f"num_heads={self.num_heads} is not divisible by num_kv_heads={self.kv_heads}; "
                f"choose from {fitting} (§9.3)"
            )

    @property
    def kv_heads(self) -> int:
        return self.num_heads if self.num_kv_heads is None else self.num_kv_heads

    @property
    def head_width(self) -> int:
        return self.width // self.num_heads


# -------------------------------------------------------------------------------------------- the layers


def linear(inputs: int, outputs: int, *, std: float = _STD) -> nn.Linear:
    """A linear layer with small normal weights, and biases that are not zero: a forgotten one must show."""
    layer = nn.Linear(inputs, outputs)
    nn.init.normal_(layer.weight, std=std)
    nn.init.normal_(layer.bias, std=_STD)
    return layer


def into_stream(inputs: int, shape: Shape) -> nn.Linear:
    """A linear layer that adds to the residual stream: smaller, as 2 * num_blocks of them add up."""
    return linear(inputs, shape.width, std=_STD / (2 * shape.num_blocks) ** 0.5)


class Embedding(nn.Module):
    """Bytes to vectors; `head` reads the same table the other way round."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(shape.vocabulary, shape.width).normal_(std=_STD))  # (V, H)

    def forward(self, tokens: Tensor) -> Tensor:  # (B, T) -> (B, T, H)
        return F.embedding(tokens, self.weight)


def head(embedding: nn.Module, x: Tensor) -> Tensor:
    """Vectors to logits by the embedding's own table: (B, T, H) -> (B, T, V)."""
    assert isinstance(embedding, Embedding)
    return F.linear(x, embedding.weight)


class Positions(nn.Module):
    """Adds a learned vector for each place in the context."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(shape.context, shape.width).normal_(std=_STD))  # (T, H)

    def forward(self, x: Tensor) -> Tensor:
        start = first_token()  # 0, unless the sequence is spread over ranks
        return x + self.weight[start : start + x.shape[1]]


class Attention(nn.Module):
    """Causal self-attention. Queries, keys and values stay three weights: each can be cut by heads."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.head_width = shape.head_width
        self.query: nn.Module = linear(shape.width, shape.width)
        self.key: nn.Module = linear(shape.width, shape.kv_heads * shape.head_width)
        self.value: nn.Module = linear(shape.width, shape.kv_heads * shape.head_width)
        self.out: nn.Module = into_stream(shape.width, shape)
        self.query_norm, self.key_norm = (
            nn.RMSNorm(shape.head_width) if shape.qk_norm else nn.Identity() for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            project(x).unflatten(-1, (-1, self.head_width)).transpose(1, 2)  # (B, T, N*D) -> (B, N, T, D)
            for project in (self.query, self.key, self.value)  # k and v have G heads for N
        )
        q, k = self.query_norm(q), self.key_norm(k)
        is_grouped = q.shape[1] != k.shape[1]
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=is_grouped)
        y: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return y


class MLP(nn.Module):
    """Two linear layers, four times as wide between them."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.up: nn.Module = linear(shape.width, 4 * shape.width)
        self.down: nn.Module = into_stream(4 * shape.width, shape)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(F.gelu(self.up(x)))
        return y


class Block(nn.Module):
    """Attention and a feed-forward part on the residual stream; other forms of the two can be passed in."""

    def __init__(
        self,
        shape: Shape,
        attention: Callable[[Shape], nn.Module] = Attention,
        feed_forward: Callable[[Shape], nn.Module] = MLP,
    ) -> None:
        super().__init__()
        self.shape = shape
        self.norm1, self.attention = nn.LayerNorm(shape.width), attention(shape)
        self.norm2, self.feed_forward = nn.LayerNorm(shape.width), feed_forward(shape)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.feed_forward(self.norm2(x))


def loss_fn(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean cross entropy in nats per byte, computed in the dtype of the logits.

    Shapes: logits (B, T, V), labels (B, T) -> 0-dim.
    """
    return F.cross_entropy(logits.flatten(0, -2), labels.flatten())
