"""Attention over chunks of one sequence, forward and backward written out (§9.14.2).

Chunk by chunk the queries meet the keys. Each pair is a softmax over some of the keys; two of them merge by
their log-sum-exps, out = sum of exp(lse_j - lse) * out_j with lse = log(sum of exp(lse_j)). Causal
attention leaves out every pair in which all keys lie after all queries: of n x n pairs n(n+1)/2 remain.

The backward walks the queries from last to first. No earlier query sees a later key, so when chunk i of the
queries is done, the gradients of chunk i of q, k and v are all complete.

Legend: B micro-batch, N query heads, G key and value heads, T queries, S keys, D head width.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ds_lite.sequence.fpdt_checks import check_attention
from ds_lite.sequence.host_store import HostStore, Shelf
from ds_lite.sequence.pair import Sight, attend, attend_backward, wide

Place = tuple[int, int]  # the positions of a chunk: first, and one past the last


def chunked_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    chunks: int,
    is_causal: bool,
    scale: float | None = None,
    window: int | None = None,
    key_padding_mask: Tensor | None = None,
    store: HostStore | None = None,
) -> Tensor:
    """`F.scaled_dot_product_attention` in pieces: no more scores than chunk times chunk at a time.

    `chunks` need not divide the lengths; there are never more of them than tokens. With a `window` a query
    sees itself and the window - 1 keys before it. `key_padding_mask` is True for the keys that count. A
    query that sees no key gets zeros and gives no gradient. With a `store` what backward needs waits in
    host memory.

    Shapes: q (B, N, T, D), k and v (B, G, S, D), key_padding_mask (B, S) -> (B, N, T, D), G a divisor of N.
    Gradient: to q, k and v, once.
    Raises: ValueError for shapes and dtypes that do not fit, no tokens, fewer than one chunk, and a window
    that is not causal.

    >>> q = k = v = torch.randn(1, 2, 10, 4)
    >>> chunked_attention(q, k, v, chunks=3, is_causal=True).shape
    torch.Size([1, 2, 10, 4])

    Source: §9.14; DeepSpeed `sequence/fpdt_layer.py::_FPDTGPUAttentionImpl_` @ 0.19.8.
    Differs: DeepSpeed needs flash-attn and a GPU, chunks that divide the sequence, and has no masks.
    """
    check_attention(q, k, v, chunks, is_causal, window, key_padding_mask)
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    rule = Rule(scale, is_causal, window, key_padding_mask)
    plan = _Plan(rule, cut(q.shape[2], chunks), cut(k.shape[2], chunks), store, torch.is_grad_enabled())
    out: Tensor = _ChunkedAttention.apply(q, k, v, plan)
    return out


def cut(length: int, chunks: int) -> list[Place]:
    """Chunks as even as possible, the first ones longer by one.

    >>> cut(10, 3)
    [(0, 4), (4, 7), (7, 10)]
    """
    count = max(1, min(chunks, length))
    stops = [(i + 1) * (length // count) + min(i + 1, length % count) for i in range(count)]
    return list(zip([0, *stops], stops))


@dataclass(frozen=True)
class Rule:
    """Which query sees which key: s <= t if causal, t - s < window, and padding[b, s]."""

    scale: float
    is_causal: bool = True
    window: int | None = None
    padding: Tensor | None = None

    def reaches(self, queries: Place, keys: Place) -> bool:
        """Whether some of these queries may see some of these keys."""
        is_future = self.is_causal and keys[0] >= queries[1]
        is_past = self.window is not None and queries[0] - (keys[1] - 1) >= self.window
        return not (is_future or is_past)

    def sight(self, queries: Place, keys: Place, device: torch.device) -> Sight:
        """What they see of each other."""
        cuts_future = self.is_causal and keys[1] - 1 > queries[0]
        cuts_past = self.window is not None and (queries[1] - 1) - keys[0] >= self.window
        is_aligned = queries[0] == keys[0]
        if self.padding is None and not cuts_past and (is_aligned or not cuts_future):
            return Sight(is_diagonal=cuts_future)
        distance = torch.arange(*queries, device=device)[:, None] - torch.arange(*keys, device=device)
        mask = torch.ones_like(distance, dtype=torch.bool)
        if self.is_causal:
            mask &= distance >= 0
        if self.window is not None:
            mask &= distance < self.window
        if self.padding is not None:
            mask = mask & self.padding[:, None, None, keys[0] : keys[1]]
        return Sight(mask=mask)


# --------------------------------------------------------------------------- one chunk of queries, all keys


def attend_chunk(
    q: Tensor, place: Place, keys: Shelf, places: Sequence[Place], rule: Rule
) -> tuple[Tensor, Tensor]:
    """One chunk of queries over all chunks of keys that it may see, their parts merged.

    Shapes: q (B, N, t, D) at `place`, keys (B, G, s, D) at `places` -> like q, and log-sum-exp (B, N, t).
    """
    out = torch.zeros_like(q, dtype=wide(q.dtype))
    lse = torch.full(q.shape[:-1], float("-inf"), dtype=out.dtype, device=q.device)
    for j, (k, v) in keys.walk(_seen(place, places, rule)):
        part, part_lse = attend(q, k, v, rule.scale, rule.sight(place, places[j], q.device))
        lse = merge(out, lse, part, part_lse)
    return out.to(q.dtype), lse


def attend_chunk_backward(
    grad: Tensor,
    held: tuple[Tensor, ...],
    place: Place,
    keys: Shelf,
    places: Sequence[Place],
    rule: Rule,
    key_grads: Sequence[tuple[Tensor, Tensor]],
) -> Tensor:
    """The gradient of one chunk of queries; those of the keys and values it saw are added to `key_grads`.

    `held` is q, output and log-sum-exp of the chunk.

    Shapes: grad like q -> the same, in float32 for half types.
    """
    q, out, lse = held
    grad = grad.to(q.dtype)
    dq = torch.zeros_like(q, dtype=wide(q.dtype))
    for j, (k, v) in keys.walk(_seen(place, places, rule)):
        sight = rule.sight(place, places[j], q.device)
        parts = attend_backward(grad, q, k, v, out, lse, rule.scale, sight)
        for total, part in zip((dq, *key_grads[j]), parts):
            total.add_(part)
    return dq


def merge(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> Tensor:
    """Add a softmax over further keys to `out`, in place; returns the log-sum-exp of both.

    Shapes: out and part (B, N, t, D), lse and part_lse (B, N, t).
    """
    total = torch.logaddexp(lse, part_lse)
    finite = total.clamp(min=torch.finfo(total.dtype).min)  # no key seen yet: -inf, and both weights are 0
    out.mul_((lse - finite).exp_().unsqueeze(-1))
    out.addcmul_(part.to(out.dtype), (part_lse - finite).exp_().unsqueeze(-1))
    return total


def _seen(place: Place, places: Sequence[Place], rule: Rule) -> list[int]:
    return [j for j, other in enumerate(places) if rule.reaches(place, other)]


# ------------------------------------------------------------------------------------------ all chunks


@dataclass(frozen=True)
class _Plan:
    rule: Rule
    queries: list[Place]
    keys: list[Place]
    store: HostStore | None
    is_recorded: bool  # forward itself runs without autograd, and cannot ask


class _ChunkedAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, plan: _Plan) -> Tensor:
        keys, queries = Shelf(plan.store, q.device), Shelf(plan.store, q.device)
        for start, stop in plan.keys:
            keys.put(k[:, :, start:stop], v[:, :, start:stop])
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        kept = out.detach()  # a view of `out` itself would hold its graph, and so itself
        for start, stop in plan.queries:
            own = q[:, :, start:stop]
            part, lse = attend_chunk(own, (start, stop), keys, plan.keys, plan.rule)
            out[:, :, start:stop] = part
            if plan.is_recorded and any(ctx.needs_input_grad):
                queries.put(own, kept[:, :, start:stop], lse)
        ctx.plan = plan
        ctx.save_for_backward(*keys.tensors(), *queries.tensors())
        return out

    @staticmethod
    @once_differentiable  # type: ignore[misc]
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        plan, grad, saved = ctx.plan, gradients[0], ctx.saved_tensors
        keys = Shelf.holding(saved[: 2 * len(plan.keys)], 2, plan.store, grad.device)
        queries = Shelf.holding(saved[2 * len(plan.keys) :], 3, plan.store, grad.device)
        k_shape = list(saved[0].shape)
        k_shape[2] = plan.keys[-1][1]
        dq = torch.empty_like(grad, memory_format=torch.contiguous_format)
        dk, dv = (grad.new_zeros(k_shape, dtype=wide(grad.dtype)) for _ in "kv")
        key_grads = [(dk[:, :, a:b], dv[:, :, a:b]) for a, b in plan.keys]
        for i, held in queries.walk(range(len(plan.queries))[::-1]):
            start, stop = plan.queries[i]
            dq[:, :, start:stop] = attend_chunk_backward(
                grad[:, :, start:stop], held, (start, stop), keys, plan.keys, plan.rule, key_grads
            )
        return dq, dk.to(grad.dtype), dv.to(grad.dtype), None
