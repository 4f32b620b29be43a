"""From whole activations to this rank's tokens, and back (§9.14).

    split    forward: own tokens      backward: zeros for the others; the engine sums the ranks' gradients
    gather   forward: all-gather      backward: own tokens of the gradient, summed over the ranks

The engine takes the mean of the ranks' gradients. Outside, where every rank computes the same, that mean is
the gradient. Inside, each rank has its part of it, so the sum at the gather makes the mean of the parts
their sum.

Legend: B micro-batch, T tokens, H width; sp ranks in the group.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ds_lite import comm
from ds_lite.comm import ProcessGroup
from ds_lite.sequence.data import Part


def gather_tokens(x: Tensor, part: Part, group: ProcessGroup | None, *, dim: int = 1) -> Tensor:
    """All ranks' tokens on every rank.

    Shapes: x (B, T/sp, ...) -> (B, T, ...).
    Communication: one all-gather of the longest part from each rank; backward one all-reduce of x's whole
    size.
    Gradient: this rank's tokens of the sum over the ranks.
    """
    if group is None or comm.get_world_size(group) == 1:
        return x
    result: Tensor = _Gather.apply(x, part, group, dim)
    return result


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, part: Part, group: ProcessGroup, dim: int) -> Tensor:
        ctx.part, ctx.group, ctx.dim = part, group, dim
        mine, longest = x.movedim(dim, 0), max(part.lengths)
        padded = mine.new_zeros((longest, *mine.shape[1:]))
        padded[: mine.shape[0]] = mine
        everyone = mine.new_empty((longest * len(part.lengths), *mine.shape[1:]))
        comm.all_gather_into_tensor(everyone, padded, group=group)
        rows = zip(everyone.split(longest), part.lengths, strict=True)
        return torch.cat([piece[:length] for piece, length in rows]).movedim(0, dim).contiguous()

    @staticmethod
    @once_differentiable  # type: ignore[misc]
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        total = gradients[0].clone(memory_format=torch.contiguous_format)
        comm.all_reduce(total, group=ctx.group)
        return ctx.part.of(total, ctx.dim).contiguous(), None, None, None
