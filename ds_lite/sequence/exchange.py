"""The Ulysses exchange: from some tokens with all heads to all tokens with some heads, and back (§9.14).

    to_heads       (B, T/sp, N, D) -> (B, T, N/sp, D)   rank r gets its heads of everybody's tokens
    to_sequence    (B, T, N/sp, D) -> (B, T/sp, N, D)   rank r gets its tokens with everybody's heads

Each is the gradient of the other. Which dimension holds tokens and which heads is an argument, so
batch-first, sequence-first and (B, N, T, D) are one code; a 3-D tensor has its columns in the place of
heads. What a rank keeps never enters the message: it is copied from tensor to tensor.

Legend: B micro-batch, T tokens, N heads, D head width; sp ranks in the group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from ds_lite import comm
from ds_lite.comm import ProcessGroup
from ds_lite.dealing import Range


@dataclass(frozen=True)
class Layout:
    """Where tokens and heads lie in a tensor, and whose they are.

    `seq_dim` and `head_dim` are counted from the front. Rank r has `lengths[r]` tokens, after those of the
    ranks before it, and computes the heads `heads[r]` = (start, stop). Ranks may share heads: then
    `to_sequence` sums their parts.
    """

    seq_dim: int
    head_dim: int
    lengths: tuple[int, ...]
    heads: tuple[Range, ...]

    def __post_init__(self) -> None:
        assert len(self.lengths) == len(self.heads), (self.lengths, self.heads)

    @property
    def is_shared(self) -> bool:
        """Whether some head is computed by two ranks."""
        return sum(stop - start for start, stop in self.heads) > max(stop for _, stop in self.heads)

    def tokens(self, rank: int) -> Range:
        """The place of a rank's tokens in the whole sequence."""
        stops = list(accumulate(self.lengths))
        return stops[rank] - self.lengths[rank], stops[rank]


def to_heads(
    tensors: Sequence[Tensor], layouts: Sequence[Layout], group: ProcessGroup | None
) -> list[Tensor]:
    """Bring all tokens to the ranks of their heads, for several tensors in one exchange.

    Shapes: each (B, T/sp, N, D) -> (B, T, N/sp, D), in the order of its layout; contiguous.
    Communication: one all_to_all_single; of each tensor the heads of other ranks leave.
    Gradient: `to_sequence`; where ranks share a head its gradient is the sum over them.
    """
    return _applied(_ToHeads, tensors, layouts, group)


def to_sequence(
    tensors: Sequence[Tensor], layouts: Sequence[Layout], group: ProcessGroup | None
) -> list[Tensor]:
    """Bring all heads to the ranks of their tokens: the inverse of `to_heads`.

    Shapes: each (B, T, N/sp, D) -> (B, T/sp, N, D), in the order of its layout; contiguous.
    Communication: one all_to_all_single; of each tensor the tokens of other ranks leave.
    Gradient: `to_heads`.
    """
    return _applied(_ToSequence, tensors, layouts, group)


def _applied(
    function: Any, tensors: Sequence[Tensor], layouts: Sequence[Layout], group: ProcessGroup | None
) -> list[Tensor]:
    if group is None or comm.get_world_size(group) == 1:
        return list(tensors)
    if len({x.dtype for x in tensors}) > 1:  # one message has one dtype
        return [function.apply(group, (how,), x)[0] for x, how in zip(tensors, layouts, strict=True)]
    return list(function.apply(group, tuple(layouts), *tensors))


class _ToHeads(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, group: ProcessGroup, layouts: tuple[Layout, ...], *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.group, ctx.layouts = group, layouts
        me = comm.get_rank(group)
        outputs = [
            _empty(x, how, sum(how.lengths), _count(how.heads[me])) for x, how in zip(tensors, layouts)
        ]
        _swap(
            [[_heads(x, how, how.heads[r]) for x, how in zip(tensors, layouts)] for r in _ranks(layouts)],
            [[_tokens(y, how, how.tokens(r)) for y, how in zip(outputs, layouts)] for r in _ranks(layouts)],
            [False] * len(layouts),
            group,
        )
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *_ToSequence.apply(ctx.group, ctx.layouts, *gradients)


class _ToSequence(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, group: ProcessGroup, layouts: tuple[Layout, ...], *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.group, ctx.layouts = group, layouts
        me = comm.get_rank(group)
        outputs = [
            _empty(x, how, how.lengths[me], max(stop for _, stop in how.heads))
            for x, how in zip(tensors, layouts)
        ]
        for y, how in zip(outputs, layouts):
            if how.is_shared:
                y.zero_()
        _swap(
            [[_tokens(x, how, how.tokens(r)) for x, how in zip(tensors, layouts)] for r in _ranks(layouts)],
            [[_heads(y, how, how.heads[r]) for y, how in zip(outputs, layouts)] for r in _ranks(layouts)],
            [how.is_shared for how in layouts],
            group,
        )
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *_ToHeads.apply(ctx.group, ctx.layouts, *gradients)


def _swap(
    leaving: Sequence[Sequence[Tensor]],
    places: Sequence[Sequence[Tensor]],
    adds: Sequence[bool],
    group: ProcessGroup,
) -> None:
    """Send `leaving[r]` to each rank r and put what comes from it into the views `places[r]`."""
    me = comm.get_rank(group)
    others = [rank for rank in range(len(leaving)) if rank != me]
    sent = [0 if rank == me else sum(x.numel() for x in leaving[rank]) for rank in range(len(leaving))]
    coming = [0 if rank == me else sum(y.numel() for y in places[rank]) for rank in range(len(places))]
    message, arrived = (leaving[me][0].new_empty(sum(sizes)) for sizes in (sent, coming))
    for x, part in _parts([x for rank in others for x in leaving[rank]], message):
        part.copy_(x)
    work = comm.all_to_all_single(arrived, message, coming, sent, group=group, async_op=True)
    for x, y, is_added in zip(leaving[me], places[me], adds):
        y.add_(x) if is_added else y.copy_(x)
    work.wait()
    for (y, part), is_added in zip(
        _parts([y for rank in others for y in places[rank]], arrived), list(adds) * len(others)
    ):
        y.add_(part) if is_added else y.copy_(part)


def _parts(tensors: Sequence[Tensor], flat: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Each tensor with its stretch of a flat buffer, in its shape."""
    pieces = flat.split([x.numel() for x in tensors])
    return [(x, piece.view(x.shape)) for x, piece in zip(tensors, pieces, strict=True)]


def _heads(x: Tensor, how: Layout, heads: Range) -> Tensor:
    return x.narrow(how.head_dim, heads[0], _count(heads))


def _tokens(x: Tensor, how: Layout, tokens: Range) -> Tensor:
    return x.narrow(how.seq_dim, tokens[0], _count(tokens))


def _empty(x: Tensor, how: Layout, num_tokens: int, num_heads: int) -> Tensor:
    shape = list(x.shape)
    shape[how.seq_dim], shape[how.head_dim] = num_tokens, num_heads
    return x.new_empty(shape)


def _count(range_: Range) -> int:
    return range_[1] - range_[0]


def _ranks(layouts: Sequence[Layout]) -> range:
    return range(len(layouts[0].lengths))
