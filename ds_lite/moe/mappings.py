"""Tokens that every tensor-parallel rank has, worked on by one of them (§9.4).

    drop_tokens     forward: own slice     backward: all-gather   (each rank has the gradient of its slice)
    gather_tokens   forward: all-gather    backward: own slice    (the gradient is whole on every rank)

Experts that are whole on each tensor-parallel rank would all see the same tokens; between the two calls each
rank has its share of them, and what an expert's gradient then misses lies on the other ranks ("partial").

Source: §9.4; DeepSpeed `moe/mappings.py` @ 0.19.8.
Differs: the group is an argument, and the tokens need not be divisible by its size.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.autograd import Function

from ds_lite import comm
from ds_lite.comm import ProcessGroup
from ds_lite.dealing import side_by_side
from ds_lite.tags import Cut
from ds_lite.tensor_parallel.regions import is_alone


def drop_tokens(input_: Tensor, dim: int = 0, *, group: ProcessGroup | None) -> Tensor:
    """This rank's share of tokens that all ranks of the group hold.

    Not the option of that name: nothing is lost here.

    Shapes: (T, ...) -> (T/tp, ...); shares differ by one token at most, 10 over 4 ranks are 2, 3, 2, 3.
    Communication: backward one all-gather.
    Gradient: whole on every rank.
    """
    if is_alone(group):
        return input_
    result: Tensor = _Drop.apply(input_, token_cut(input_.shape[dim], dim, group))
    return result


def gather_tokens(
    input_: Tensor, dim: int = 0, *, group: ProcessGroup | None, total: int | None = None
) -> Tensor:
    """The tokens of all ranks, `total` of them; by default all ranks have as many as this one.

    Shapes: (T/tp, ...) -> (T, ...).
    Communication: forward one all-gather.
    Gradient: of this rank's own tokens.
    """
    if is_alone(group):
        return input_
    total = input_.shape[dim] * comm.get_world_size(group) if total is None else total
    result: Tensor = _Gather.apply(input_, token_cut(total, dim, group))
    return result


def token_cut(total: int, dim: int, group: ProcessGroup | None) -> Cut:
    """Consecutive, nearly equal shares of `total` tokens, some of them empty if there are few."""
    assert group is not None
    ranks = comm.get_world_size(group)
    bounds = [total * rank // ranks for rank in range(ranks + 1)]
    widths = [stop - start for start, stop in zip(bounds, bounds[1:], strict=False)]
    return Cut(dim, side_by_side(widths), group)


class _Drop(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cut: Cut) -> Tensor:
        ctx.cut = cut
        return cut.take(x, comm.get_rank(cut.group))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _Gather.apply(gradients[0], ctx.cut), None


class _Gather(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cut: Cut) -> Tensor:
        ctx.cut = cut
        return cut.gather(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _Drop.apply(gradients[0], ctx.cut), None
