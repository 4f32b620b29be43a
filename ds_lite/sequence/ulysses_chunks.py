"""Ulysses chunk by chunk: project, exchange and attend one chunk of the sequence after the other (§9.14.2).

    hidden (c, B, H) --project--> q, k, v (B, heads, c, D) --exchange--> (B, heads/sp, sp*c, D)
    --attend to the chunks so far--> (B, N/sp, sp*c, D) --exchange back--> (c, B, N*D)

Chunk i of all ranks, in the order of ranks, is chunk i of the whole sequence: so a causal query needs only
the chunks that were exchanged before, and each rank has an equal share of every chunk, early or late.

The backward goes from the last chunk to the first: the gradients of q, k and v of a chunk are complete
together and go home in one exchange, as they came.

Legend: B micro-batch, H hidden width, N query heads, G key and value heads, D head width, c tokens of a
rank in one chunk, T tokens of all chunks; sp ranks in the group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from ds_lite.comm import ProcessGroup
from ds_lite.dealing import HeadDeal
from ds_lite.sequence.chunked import Place, Rule, attend_chunk, attend_chunk_backward
from ds_lite.sequence.exchange import Layout, to_heads, to_sequence
from ds_lite.sequence.host_store import HostStore, Shelf
from ds_lite.sequence.pair import wide

Rotary = tuple[Tensor, Tensor]  # cos and sin, (T, 1, 1, R) each


def places_of(local_tokens: int, chunk_size: int, ranks: int) -> tuple[list[Place], list[Place]]:
    """Where the chunks lie: in a rank's own tokens, and in the whole sequence. The last may be shorter.

    >>> places_of(5, chunk_size=4, ranks=2)
    ([(0, 2), (2, 4), (4, 5)], [(0, 4), (4, 8), (8, 10)])
    """
    step = min(local_tokens, chunk_size // ranks)
    local = [(start, min(start + step, local_tokens)) for start in range(0, local_tokens, step)]
    return local, [(start * ranks, stop * ranks) for start, stop in local]


@dataclass(frozen=True)
class Setup:
    """What one call is made of beside its tensors. `dealt` says which heads each rank computes."""

    group: ProcessGroup | None
    dealt: HeadDeal
    num_heads: int
    num_kv_heads: int
    head_width: int
    local: list[Place]
    places: list[Place]
    rotary: Rotary | None
    store: HostStore | None
    is_recorded: bool  # whether backward will come; forward runs without autograd, and cannot ask

    def split(self, columns: Tensor) -> list[Tensor]:
        """(c, B, (N+2G)*D) -> q (B, N, c, D), k and v (B, G, c, D)."""
        counts = self.num_heads, self.num_kv_heads, self.num_kv_heads
        widths = [count * self.head_width for count in counts]
        return [self.by_head(part) for part in columns.split(widths, dim=-1)]

    def by_head(self, columns: Tensor) -> Tensor:
        """(c, B, N*D) -> (B, N, c, D)."""
        return columns.unflatten(-1, (-1, self.head_width)).permute(1, 2, 0, 3)

    def layouts(self, chunk: int) -> tuple[Layout, Layout]:
        """Of the queries' heads and of the keys' heads, for one chunk of (B, heads, tokens, D)."""
        start, stop = self.local[chunk]
        lengths = (stop - start,) * len(self.dealt.query)
        return Layout(2, 1, lengths, self.dealt.query), Layout(2, 1, lengths, self.dealt.kv)

    def turned(self, x: Tensor, chunk: int, *, back: bool = False) -> Tensor:
        """Rotary positions of one chunk applied to (B, heads, sp*c, D); `back` gives a gradient's way."""
        if self.rotary is None:
            return x
        cos, sin = (part.permute(1, 2, 0, 3)[:, :, slice(*self.places[chunk])] for part in self.rotary)
        part, kept = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
        first, second = (part * sin if back else part).chunk(2, dim=-1)
        # The quarter turn (-second, first) is a matrix whose transpose is its negative.
        across = torch.cat((second, -first), dim=-1) if back else torch.cat((-second, first), dim=-1) * sin
        return torch.cat((part * cos + across, kept), dim=-1).to(x.dtype)  # the tables may be wider


def attention_of_chunks(hidden: Tensor, weight: Tensor, bias: Tensor | None, setup: Setup) -> Tensor:
    """Causal attention of a projected sequence, before the output projection.

    Shapes: hidden (T/sp, B, H), weight ((N+2G)*D, H) with the rows of q, k and v, bias ((N+2G)*D) ->
    (T/sp, B, N*D).
    Communication: forward two all_to_all_single a chunk, backward two a chunk.
    Gradient: to hidden, weight and bias, of this rank's tokens, once.
    """
    mixed: Tensor = _AttentionOfChunks.apply(hidden, weight, bias, setup)
    return mixed


class _AttentionOfChunks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, setup: Setup) -> Tensor:
        keys, queries = Shelf(setup.store, hidden.device), Shelf(setup.store, hidden.device)
        rule, mixed = _rule(setup), []
        for i, own in enumerate(setup.local):
            of_query, of_key = setup.layouts(i)
            parts = setup.split(F.linear(hidden[slice(*own)], weight, bias))
            q, k, v = to_heads(parts, [of_query, of_key, of_key], setup.group)
            q, k = setup.turned(q, i), setup.turned(k, i)
            keys.put(k, v)
            out, lse = attend_chunk(q, setup.places[i], keys, setup.places, rule)
            if setup.is_recorded and any(ctx.needs_input_grad):
                queries.put(q, out, lse)
            mixed.append(_columns(to_sequence([out], [of_query], setup.group)))
        ctx.setup, ctx.rule, ctx.has_bias = setup, rule, bias is not None
        ctx.save_for_backward(hidden, weight, *keys.tensors(), *queries.tensors())
        return torch.cat(mixed)

    @staticmethod
    @once_differentiable  # type: ignore[misc]
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        setup, device = ctx.setup, gradients[0].device
        hidden, weight, *saved = ctx.saved_tensors
        chunks = len(setup.local)
        keys = Shelf.holding(saved[: 2 * chunks], 2, setup.store, device)
        queries = Shelf.holding(saved[2 * chunks :], 3, setup.store, device)
        dtype = saved[0].dtype
        totals = _Totals(hidden, weight)
        zeros = [torch.zeros(x.shape, dtype=wide(dtype), device=device) for x in saved[: 2 * chunks]]
        key_grads = list(zip(zeros[::2], zeros[1::2]))
        for i, held in queries.walk(range(chunks)[::-1]):
            of_query, of_key = setup.layouts(i)
            own = slice(*setup.local[i])
            (grad,) = to_heads([setup.by_head(gradients[0][own].to(dtype))], [of_query], setup.group)
            dq = attend_chunk_backward(grad, held, setup.places[i], keys, setup.places, ctx.rule, key_grads)
            dk, dv = key_grads.pop()  # no earlier query sees them
            dq, dk = setup.turned(dq, i, back=True), setup.turned(dk, i, back=True)
            parts = [x.to(dtype) for x in (dq, dk, dv)]
            totals.add(own, _columns(to_sequence(parts, [of_query, of_key, of_key], setup.group)))
        return totals.hidden, totals.weight.to(weight.dtype), totals.bias(ctx.has_bias), None


class _Totals:
    """The gradients of the projection, chunk by chunk; what is summed is summed in float32 or wider."""

    def __init__(self, hidden: Tensor, weight: Tensor) -> None:
        self._hidden, self._weight = hidden, weight
        self.hidden = torch.empty_like(hidden, memory_format=torch.contiguous_format)
        self.weight = torch.zeros_like(weight, dtype=wide(weight.dtype))
        self._bias = self.weight.new_zeros(weight.shape[0])

    def add(self, own: slice, columns: Tensor) -> None:
        """The gradient of one chunk's q, k and v, (c, B, (N+2G)*D)."""
        columns = columns.to(self._weight.dtype)  # another one where autocast chose the projection's
        self.hidden[own] = columns @ self._weight
        rows, inputs = columns.flatten(0, 1), self._hidden[own].flatten(0, 1)
        self.weight.add_(rows.mT @ inputs.to(rows.dtype))
        self._bias.add_(rows.sum(dim=0, dtype=self._bias.dtype))

    def bias(self, is_wanted: bool) -> Tensor | None:
        return self._bias.to(self._weight.dtype) if is_wanted else None


def _rule(setup: Setup) -> Rule:
    return Rule(scale=setup.head_width**-0.5, is_causal=True)


def _columns(tensors: Sequence[Tensor]) -> Tensor:
    """(B, heads, c, D), several -> (c, B, all their heads * D)."""
    return torch.cat([x.permute(2, 0, 1, 3).flatten(2) for x in tensors], dim=-1)
