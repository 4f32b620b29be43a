"""Into and out of a tensor-parallel region: Megatron's pair f and g, and the gather (§9.3).

    enter    f   forward: nothing           backward: all-reduce   (each rank used the whole input)
    leave    g   forward: all-reduce        backward: nothing      (each rank made a part of the sum)
    gather       forward: all-gather        backward: own columns  (each rank made some columns)

Outside a region every rank of the group holds the same activations and the same gradients of them. A group of
one, or None for a layer that has no group yet, costs nothing: the tensor itself comes back.

Source: §9.3; Megatron-LM `core/tensor_parallel/mappings.py`; DeepSpeed `module_inject/layers.py` @ 0.19.8.
Differs: DeepSpeed's all-reduce works on a contiguous copy of a strided gradient and returns the gradient that
was not reduced.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ds_lite import comm
from ds_lite.comm import ProcessGroup
from ds_lite.dealing import Ranges
from ds_lite.tags import Cut
from ds_lite.tensor_parallel.overlap import enter_overlapped
from ds_lite.tensor_parallel.turns import running


def enter(x: Tensor, group: ProcessGroup | None, *, overlaps: bool = False) -> Tensor:
    """Use a whole activation in a region where each rank computes a part.

    Layers that take the same tensor, such as q, k and v, share one entry, and so one all-reduce in backward.
    (A tensor without history, which nobody computed, is entered anew by each.) With `overlaps` the all-reduce
    runs while the layers' weight gradients are computed (`overlap.py`).

    Shapes: x -> the same.
    Communication: forward none; backward one all-reduce of x's size.
    Gradient: summed over the group; each rank brings what its part of the region needs.
    """
    if group is None or is_alone(group):
        return x
    if not (x.requires_grad and torch.is_grad_enabled()):
        return x
    turns = running()
    if x.is_leaf:  # its gradient would keep it alive, and it the entry
        entered: Tensor = _Enter.apply(x, group)
        return entered
    entries = x.__dict__.setdefault("_ds_lite_entries", {})
    version, entered = entries.get(group, (None, x))
    if version != x._version:  # a layer may have changed x in place since
        if turns is not None:
            entered = turns.enter(x, group)
        else:
            entered = enter_overlapped(x, group) if overlaps else _Enter.apply(x, group)
        entries[group] = x._version, entered
    return entered


def leave(x: Tensor, group: ProcessGroup | None) -> Tensor:
    """Sum the parts that the ranks computed.

    Shapes: x -> the same.
    Communication: forward one all-reduce of x's size; backward none.
    Gradient: passed on as it is; it is whole on every rank.
    """
    if group is None or is_alone(group):
        return x
    if (turns := running()) is not None:
        return turns.leave(x, group)
    result: Tensor = _Leave.apply(x, group)
    return result


def gather(x: Tensor, ranges: Ranges, group: ProcessGroup | None) -> Tensor:
    """Put the columns of all ranks into their places; `ranges` says how the last dimension was dealt.

    Shapes: x (..., columns of this rank) -> (..., columns of all ranks).
    Communication: forward one all-gather of the widest rank's columns from each rank; backward none.
    Gradient: this rank's columns of it; the gradient is whole on every rank, so there is nothing to sum.
    """
    if is_alone(group):
        return x
    result: Tensor = _Gather.apply(x, ranges, group)
    return result


def is_alone(group: ProcessGroup | None) -> bool:
    """Whether this rank has nobody to talk to. None is no group here, never the world."""
    return group is None or comm.get_world_size(group) == 1


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return x.detach()  # no view, which would keep x alive and be kept by it

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return leave(gradients[0], ctx.group), None


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        total = x.clone(memory_format=torch.contiguous_format)  # x may be strided, and others may hold it
        comm.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return enter(gradients[0], ctx.group), None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ranges: Ranges, group: ProcessGroup) -> Tensor:
        ctx.own = ranges[comm.get_rank(group)]
        return Cut(x.dim() - 1, ranges, group).gather(x)

    @staticmethod
    @once_differentiable  # type: ignore[misc]
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return torch.cat([gradients[0][..., start:stop] for start, stop in ctx.own], dim=-1), None, None
