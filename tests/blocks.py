"""Transformer blocks by nobody in particular: names that say nothing, code in several styles."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

HEADS, WIDTH, INNER = 4, 12, 10


class Scaled(nn.Module):
    """A norm that is called neither LayerNorm nor RMSNorm."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.linspace(0.5, 1.5, width))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * self.gain


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class Mixer(nn.Module):
    """Attention; `around` names the layers in an order that misleads, the closing one first."""

    def __init__(self, kv_heads: int = HEADS) -> None:
        super().__init__()
        self.num_heads, self.num_key_value_heads, self.width = HEADS, kv_heads, WIDTH // HEADS
        self.alpha = nn.Linear(WIDTH, WIDTH)
        self.beta = nn.Linear(WIDTH, WIDTH)
        self.gamma = nn.Linear(WIDTH, kv_heads * self.width)
        self.delta = nn.Linear(WIDTH, kv_heads * self.width)

    def heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.width)).transpose(1, 2)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (self.heads(layer(x)) for layer in (self.beta, self.gamma, self.delta))
        groups = q.shape[1] // k.shape[1]
        out = attend(q, k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1))
        return self.alpha(out.transpose(1, 2).flatten(2))


class Gated(nn.Module):
    """A gated MLP whose closing layer stands first."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(INNER, WIDTH), nn.Linear(WIDTH, INNER), nn.Linear(WIDTH, INNER)

    def forward(self, x: Tensor) -> Tensor:
        return self.a(F.silu(self.b(x)) * self.c(x))


class Sequence(nn.Module):
    """Residuals one after the other."""

    def __init__(self, kv_heads: int = HEADS) -> None:
        super().__init__()
        self.one, self.two = Scaled(), Scaled()
        self.mixer, self.mlp = Mixer(kv_heads), Gated()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mixer(self.one(x))
        out = self.mlp(self.two(x))
        out += x
        return out


class Parallel(nn.Module):
    """One residual for both, and no norm behind the attention."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mixer = Scaled(), Mixer()
        self.mlp = nn.Sequential(nn.Linear(WIDTH, INNER), nn.GELU(), nn.Linear(INNER, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        return x + self.mixer(h) + self.mlp(h)


class Flat(nn.Module):
    """Everything in one class; a switch that the code asks."""

    def __init__(self, gates: bool = False) -> None:
        super().__init__()
        self.num_heads, self.gates = HEADS, gates
        for name in ("w1", "w2", "w3", "w4"):
            setattr(self, name, nn.Linear(WIDTH, WIDTH))
        self.w5, self.w6 = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)
        self.gate = nn.Linear(WIDTH, WIDTH)
        self.place = nn.Parameter(torch.linspace(-1, 1, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        h = F.layer_norm(x + self.place, x.shape[-1:])
        q, k, v = [
            w(h).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for w in (self.w1, self.w2, self.w3)
        ]
        scores = (q @ k.transpose(-1, -2)).softmax(-1)
        mixed = (scores @ v).transpose(1, 2).flatten(2)
        if self.gates:
            x = x + torch.sigmoid(self.gate(h)) * self.w4(mixed)
        else:
            x = x + self.w4(mixed)
        return x + self.w6(torch.relu(self.w5(F.layer_norm(x, x.shape[-1:]))))


class Routed(nn.Module):
    """Attention, and a mixture whose router is a plain linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.mixer, self.router = Mixer(), nn.Linear(WIDTH, 3)
        self.experts = nn.ModuleList(Gated() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mixer(x)
        weights, chosen = self.router(x).softmax(-1).topk(2, dim=-1)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            weight = (weights * (chosen == number)).sum(-1, keepdim=True)
            out = out + weight * expert(x)
        return x + out


class LowRank(nn.Module):
    """Queries through a bottleneck with a norm over all of it."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.norm, self.mixer, self.mlp = nn.Linear(WIDTH, 8), Scaled(8), Mixer(), Gated()
        self.mixer.beta = nn.Linear(8, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        m = self.mixer
        q = m.heads(m.beta(self.norm(self.down(x))))
        k, v = m.heads(m.gamma(x)), m.heads(m.delta(x))
        x = x + m.alpha(attend(q, k, v).transpose(1, 2).flatten(2))
        return x + self.mlp(x)


class Stack(nn.Module):
    """Two blocks between an embedding and an output layer."""

    def __init__(self, make: Any, vocabulary: int = 17) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, WIDTH)
        self.blocks = nn.ModuleList(make() for _ in range(2))
        self.head = nn.Linear(WIDTH, vocabulary, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)
