"""`tp_overlap_comm`: weight gradients are computed while the input's gradient is being summed (§9.15).

autograd asks a linear layer for both gradients at once. Here the layer gives the input's gradient, and a node
in front of the weight computes the weight's later: behind the start of the sum, before the wait for it. The
order is that of sequence numbers: autograd runs what is ready from the highest number down.

    wait (n - 1)  <-  start of the sum (n + 1)  <-  layers that take x        each computes dx
                      weights of these layers (n)                             each computes dW, db

Source: §9.15; DeepSpeed `module_inject/layers.py::ColumnLinear` (tp_overlap_comm) @ 0.19.8.
Differs: several layers that take one x share its sum; DeepSpeed makes one for each.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, autograd
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from ds_lite.comm import ProcessGroup
from ds_lite.tensor_parallel.pending import Pending, sum_in_backward, wait_in_backward


def enter_overlapped(x: Tensor, group: ProcessGroup) -> Tensor:
    """As `regions.enter`; backward begins the sum here and waits for it below the weights' gradients.

    Shapes: x -> the same.
    Communication: backward one all-reduce of x's size.
    """
    pending = Pending()  # of this entry alone
    waited = wait_in_backward(x, pending, "input gradient")
    entered = sum_in_backward(waited, pending, "input gradient", group)
    node: Any = waited.grad_fn
    node._set_sequence_nr(node._sequence_nr() - 1)  # its own number is the weights'
    return entered


def linear_overlapped(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """F.linear of an entered x, whose weight and bias get their gradients after the sum of x's has begun.

    Plain F.linear where nothing is summed or learnt, and under autocast, which casts inside.

    Shapes: x (..., in), weight (out, in), bias (out) -> (..., out).
    """
    is_learnt = weight.requires_grad or (bias is not None and bias.requires_grad)
    has_backward = torch.is_grad_enabled() and x.grad_fn is not None
    if not has_backward or not is_learnt or torch.is_autocast_enabled(x.device.type):
        return F.linear(x, weight, bias)
    late: list[tuple[Tensor, Tensor]] = []  # what backward has for the weights: x and the output's gradient
    gates = _Late.apply(late, weight, bias)
    start: Any = x.grad_fn
    gates[0].grad_fn._set_sequence_nr(start._sequence_nr() - 1)
    y: Tensor = _InputFirst.apply(x, *gates, late)
    return y


class _InputFirst(autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, late: list[Any]) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.late = late
        return F.linear(x, weight, bias)

    @staticmethod
    @once_differentiable  # type: ignore[misc]
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        x, weight = ctx.saved_tensors
        ctx.late[:] = [(x, gradients[0])]
        return gradients[0] @ weight, None, None, None


class _Late(autograd.Function):
    """The weight and the bias themselves; backward is not handed their gradients, it computes them."""

    @staticmethod
    def forward(ctx: Any, late: list[Any], weight: Tensor, bias: Tensor | None) -> tuple[Tensor | None, ...]:
        ctx.late = late
        ctx.set_materialize_grads(False)
        return weight.detach(), None if bias is None else bias.detach()

    @staticmethod
    @once_differentiable  # type: ignore[misc]
    def backward(ctx: Any, *_: Any) -> tuple[None, Tensor | None, Tensor | None]:
        ((x, gradient),) = ctx.late
        ctx.late.clear()
        rows = gradient.reshape(-1, gradient.shape[-1])
        of_weight = rows.mT @ x.reshape(-1, x.shape[-1]) if ctx.needs_input_grad[1] else None
        return None, of_weight, rows.sum(0) if ctx.needs_input_grad[2] else None
