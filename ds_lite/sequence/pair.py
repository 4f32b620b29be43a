"""One chunk of queries against one chunk of keys: the part of attention that is ever whole (§9.14.2).

`attend` gives the softmax over these keys alone and its log-sum-exp, from which parts are merged.
`attend_backward` gives the gradients of this pair out of the softmax over all keys: with their log-sum-exp
each probability is exp(score - lse), so no probability is ever stored.

torch's memory-efficient kernels do both without a matrix of scores. Where they do not reach (masks, float64
on a GPU, a scale that is not positive) stands the plain path, whose scores are one chunk times one chunk.

Legend: B micro-batch, N query heads, G key and value heads, t queries, s keys, D head width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

aten = torch.ops.aten
HAS_CPU_KERNEL = hasattr(aten, "_scaled_dot_product_flash_attention_for_cpu")
LSE_ALIGNMENT = 32  # rows to which the CUDA kernel pads the log-sum-exp


@dataclass(frozen=True)
class Sight:
    """Which keys of a chunk the queries of another one see: all, those up to their own index, or a mask's.

    `mask` is True where a query sees a key and broadcasts to (B, N, t, s).
    """

    is_diagonal: bool = False
    mask: Tensor | None = None


def attend(q: Tensor, k: Tensor, v: Tensor, scale: float, sight: Sight) -> tuple[Tensor, Tensor]:
    """The queries' attention over these keys alone. A query that sees none gets zeros and -inf.

    Shapes: q (B, N, t, D), k and v (B, G, s, D) -> output (B, N, t, D) and log-sum-exp (B, N, t). Of half
    types the log-sum-exp is float32, and on the plain path the output too.
    """
    q, k, v = _dense(q), _per_query_head(k, q), _per_query_head(v, q)
    kernel = _kernel(q, scale, sight)
    if kernel == "cpu":
        out, lse = aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, sight.is_diagonal, scale=scale
        )
        return out, lse
    if kernel == "cuda":
        out, lse, *_ = aten._scaled_dot_product_efficient_attention(
            q, k, v, None, True, 0.0, sight.is_diagonal, scale=scale
        )
        return out, lse[..., : q.shape[2]]
    with _as_given(q):
        return _plain(q, k, v, scale, sight)


def attend_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float, sight: Sight
) -> tuple[Tensor, Tensor, Tensor]:
    """What this pair adds to the gradients of q, k and v; `out` and `lse` are those of all keys.

    Shapes: grad and out (B, N, t, D), lse (B, N, t) -> the shapes of q, k and v.
    """
    groups = k.shape[1]
    grad, q, out = _dense(grad), _dense(q), _dense(out)
    k, v = _per_query_head(k, q), _per_query_head(v, q)
    kernel = _kernel(q, scale, sight)
    if kernel == "cpu":
        dq, dk, dv = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, k, v, out, lse, 0.0, sight.is_diagonal, scale=scale
        )
    elif kernel == "cuda":
        padded = F.pad(lse, (0, -q.shape[2] % LSE_ALIGNMENT), value=float("inf"))
        seed = torch.zeros((), dtype=torch.int64, device=q.device)  # of the dropout that there is none of
        dq, dk, dv, _ = aten._scaled_dot_product_efficient_attention_backward(
            grad, q, k, v, None, out, padded, seed, seed, 0.0, [True, True, True, False], sight.is_diagonal,
            scale=scale,
        )  # fmt: skip
    else:
        with _as_given(q):
            dq, dk, dv = _plain_backward(grad, q, k, v, out, lse, scale, sight)
    return dq, _per_group(dk, groups), _per_group(dv, groups)


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which parts are added up: float32 for half types."""
    return torch.promote_types(dtype, torch.float32)


def _kernel(q: Tensor, scale: float, sight: Sight) -> str | None:
    if sight.mask is not None or scale <= 0:  # they scale before they mask: -inf times 0 is no number
        return None
    if q.device.type == "cpu" and HAS_CPU_KERNEL:
        return "cpu"
    fits = q.dtype != torch.float64 and q.shape[-1] % 8 == 0
    return "cuda" if q.device.type == "cuda" and fits else None


def _dense(x: Tensor) -> Tensor:
    """The kernels read garbage where the last dimension is strided."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _per_query_head(x: Tensor, q: Tensor) -> Tensor:
    """(B, G, s, D) -> (B, N, s, D): each key head next to the query heads that share it."""
    heads = q.shape[1]
    return _dense(x) if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], dim=1)


def _per_group(x: Tensor, groups: int) -> Tensor:
    """(B, N, s, D) -> (B, G, s, D): what the query heads of a group say, added up."""
    return x if x.shape[1] == groups else x.unflatten(1, (groups, -1)).sum(dim=2)


# -------------------------------------------------------------------------------------- the plain path


def _as_given(x: Tensor) -> torch.autocast:
    """No autocast: a log-sum-exp in bfloat16 is too coarse to make probabilities of."""
    return torch.autocast(x.device.type, enabled=False)


def _plain(q: Tensor, k: Tensor, v: Tensor, scale: float, sight: Sight) -> tuple[Tensor, Tensor]:
    q, k, v = (x.to(wide(x.dtype)) for x in (q, k, v))
    scores = _scores(q, k, scale, sight)
    # Where nothing is seen the highest score is -inf; a finite one instead makes all exponentials zero.
    highest = scores.amax(dim=-1, keepdim=True).clamp_(min=torch.finfo(scores.dtype).min)
    total = scores.sub_(highest).exp_().sum(dim=-1, keepdim=True)
    out = (scores @ v).div_(total.clamp(min=torch.finfo(scores.dtype).tiny))
    return out, (highest + total.log()).squeeze(-1)


def _plain_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float, sight: Sight
) -> tuple[Tensor, Tensor, Tensor]:
    grad, q, k, v, out = (x.to(wide(x.dtype)) for x in (grad, q, k, v, out))
    finite = lse.clamp(min=torch.finfo(lse.dtype).min).unsqueeze(-1)
    probabilities = _scores(q, k, scale, sight).sub_(finite).exp_()
    dv = probabilities.mT @ grad
    # d(score) = p * (dp - sum of p * dp), and that sum is the row of grad times out.
    inner = (grad @ v.mT).sub_((grad * out).sum(dim=-1, keepdim=True)).mul_(probabilities).mul_(scale)
    return inner @ k, inner.mT @ q, dv


def _scores(q: Tensor, k: Tensor, scale: float, sight: Sight) -> Tensor:
    scores = (q @ k.mT).mul_(scale)
    if sight.is_diagonal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu_(1)
        scores.masked_fill_(later, float("-inf"))
    if sight.mask is not None:
        scores.masked_fill_(~sight.mask, float("-inf"))
    return scores
