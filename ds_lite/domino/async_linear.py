"""The two linear layers of Domino: sums that the layer starts, or leaves to its caller (§9.15).

    column   backward starts the sum of the input's gradient, then computes the weight's while it runs
    row      gives this rank's part of the output; the caller sums, when it likes

Source: §9.15; DeepSpeed `runtime/domino/async_linear.py` @ 0.19.8.
Differs: the group and the handles belong to the call; DeepSpeed keeps both in modules, so that a second group
is ignored. Initial weights are drawn whole and then cut, so they do not depend on the degree.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from ds_lite import comm
from ds_lite.comm import ProcessGroup
from ds_lite.dealing import Ranges
from ds_lite.domino.weights import SharedWeights
from ds_lite.tags import Cut, mark_cut
from ds_lite.tensor_parallel.pending import Pending, will_be_waited_for

Init = Callable[[Tensor], Any]


class DominoAsyncColumnParallelLinear(nn.Module):
    """Some output columns of a whole input; the input's gradient is under way when backward leaves.

    `output_size` is this rank's. `ranges` says which rows of the whole weight the ranks hold, by default
    equal parts in order. The caller passes the input through `wait_in_backward` with the same pending sums
    and key, and gives it to this layer alone. Parts of one batch that come with the same `weights` have one
    gradient of the weight together. `config` has params_dtype and perform_initialization.

    Shapes: x (..., in) -> (..., out/tp), and the bias (out/tp) to add later or None.
    Communication: backward one all-reduce of x's size, waited for by `wait_in_backward`.
    Gradient: of x this rank's part, being summed; of weight and bias complete.
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        _tp_group: ProcessGroup | None,
        config: Any,
        init_method: Init,
        bias: bool = True,
        skip_bias_add: bool = False,
        *,
        ranges: Ranges | None = None,
    ) -> None:
        super().__init__()
        self.group, self.skip_bias_add = _tp_group, skip_bias_add
        cut = _cut(0, output_size, _tp_group, ranges)
        self.weight = _drawn((output_size, input_size), cut, config, init_method)
        self.bias = _drawn((output_size,), cut, config, nn.init.zeros_) if bias else None

    def forward(
        self, x: Tensor, handle_dic: Pending, h_id: Hashable, weights: SharedWeights | None = None
    ) -> tuple[Tensor, Tensor | None]:
        later = self.bias if self.skip_bias_add else None
        bias = None if self.skip_bias_add else self.bias
        weights = weights or SharedWeights()
        y: Tensor = _Column.apply(x, weights.node(self.weight), bias, weights, handle_dic, h_id, self.group)
        return y, later


class RowParallelLinearNoComm(nn.Module):
    """This rank's input columns; the parts of all ranks are to be summed by the caller.

    `input_size` is this rank's. With `_tp_group` the weight is a part of a whole one, drawn whole. Unless
    `skip_bias_add` is set, only rank 0 of the group adds the bias: the sum has it once. Parts of one batch
    that come with the same `weights` have one gradient of the weight together.

    Shapes: x (..., in/tp) -> (..., out), and the bias (out) to add after the sum or None.
    Communication: none.
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        config: Any,
        init_method: Init,
        bias: bool = True,
        stride: int = 1,
        skip_bias_add: bool = False,
        *,
        _tp_group: ProcessGroup | None = None,
    ) -> None:
        super().__init__()
        if stride != 1:
            raise ValueError(f"stride={stride} is not built; leave it out (§9.15)")
        self.group, self.skip_bias_add = _tp_group, skip_bias_add
        cut = _cut(1, input_size, _tp_group, None)
        self.weight = _drawn((output_size, input_size), cut, config, init_method)
        self.bias = _drawn((output_size,), None, config, nn.init.zeros_) if bias else None

    def forward(self, x: Tensor, weights: SharedWeights | None = None) -> tuple[Tensor, Tensor | None]:
        y = F.linear(x, self.weight) if weights is None else _Row.apply(x, weights.node(self.weight), weights)
        if self.bias is None or self.skip_bias_add:
            return y, self.bias
        # Every rank has the whole gradient of the sum, so every rank's bias gets it; its value counts once.
        is_first = self.group is None or comm.get_rank(self.group) == 0
        return y + (self.bias if is_first else self.bias - self.bias.detach()), None


def _cut(dim: int, width: int, group: ProcessGroup | None, ranges: Ranges | None) -> Cut | None:
    if group is None or comm.get_world_size(group) == 1:
        return None
    ranks = range(comm.get_world_size(group))
    return Cut(dim, ranges or tuple(((width * rank, width * (rank + 1)),) for rank in ranks), group)


def _drawn(shape: tuple[int, ...], cut: Cut | None, config: Any, init_method: Init) -> nn.Parameter:
    """A parameter of this shape, its values those of its place in the whole one."""
    device = comm.device_of_this_rank() if cut is not None else None
    whole = torch.empty(cut.whole_shape(shape) if cut else shape, dtype=config.params_dtype, device=device)
    if config.perform_initialization:
        init_method(whole)
    parameter = nn.Parameter(cut.take(whole, comm.get_rank(cut.group)) if cut else whole)
    if cut is not None:
        mark_cut(parameter, cut)
    return parameter


class _Column(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        weights: SharedWeights,
        pending: Pending,
        key: Hashable,
        group: ProcessGroup | None,
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.weights, ctx.pending, ctx.key, ctx.group = weights, pending, key, group
        return F.linear(x, weight, bias)

    @staticmethod
    @once_differentiable  # type: ignore[misc]
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        gradient = gradients[0]
        of_x = of_weight = of_bias = None
        if ctx.needs_input_grad[0]:
            of_x = (gradient @ weight).contiguous()
            if will_be_waited_for(ctx):
                ctx.pending.watch_backward()
                ctx.pending.start(ctx.key, of_x, ctx.group)
        rows = gradient.reshape(-1, gradient.shape[-1])
        if ctx.needs_input_grad[1]:
            of_weight = ctx.weights.gradient(weight, rows, x.reshape(-1, x.shape[-1]))
        if ctx.needs_input_grad[2]:
            of_bias = rows.sum(0)
        return of_x, of_weight, of_bias, None, None, None, None


class _Row(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, weights: SharedWeights) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.weights = weights
        return F.linear(x, weight)

    @staticmethod
    @once_differentiable  # type: ignore[misc]
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        of_x = gradients[0] @ weight if ctx.needs_input_grad[0] else None
        of_weight = None
        if ctx.needs_input_grad[1]:
            rows = gradients[0].reshape(-1, gradients[0].shape[-1])
            of_weight = ctx.weights.gradient(weight, rows, x.reshape(-1, x.shape[-1]))
        return of_x, of_weight, None
