"""One gradient of a weight that several parts of a batch use (§9.15).

autograd would compute a gradient for each part, keep the first, and add them up: for a large weight a pass
over three times its memory. Here the second product is added where it is computed.

    weight ---- _Shared ----+---- linear of part 0      its gradient comes second: added to the first; None
                            '---- linear of part 1      its gradient comes first: given to autograd

autograd calls `_Shared.backward` when all parts have answered, and nobody else feeds that node; so what
the first part gave is still there, alone, when the others add to it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


class SharedWeights:
    """The weights of one forward call, and the gradients that its backward is adding up."""

    def __init__(self) -> None:
        self._nodes: dict[int, Tensor] = {}
        self._sums: dict[int, tuple[int, Tensor]] = {}  # of a weight: the backward that runs, its sum so far

    def node(self, weight: Tensor) -> Tensor:
        """`weight` for one more part."""
        key = id(weight)
        if key not in self._nodes:
            self._nodes[key] = _Shared.apply(weight, self._sums, key)
        return self._nodes[key]

    def end_forward(self) -> None:
        """No part follows. The graph keeps what it needs; what is recomputed later gets nodes of its own."""
        self._nodes.clear()

    def gradient(self, weight: Tensor, rows: Tensor, x: Tensor) -> Tensor | None:
        """rows^T x, or None if it has been added to what another part has given to autograd.

        Shapes: weight a `node` (out, in), rows (tokens, out), x (tokens, in) -> (out, in).
        """
        key, running = _key_of(weight), torch._C._current_graph_task_id()
        number, total = self._sums.get(key, (None, None))
        if total is not None and number == running:
            total.addmm_(rows.mT, x)
            return None
        total = rows.mT @ x
        if total.dtype == weight.dtype:  # another one is cast on its way: autograd would not have this tensor
            self._sums[key] = running, total
        return total


def _key_of(node: Tensor) -> int:
    return int(node.grad_fn.key)  # type: ignore[union-attr]


class _Shared(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, sums: dict[int, tuple[int, Tensor]], key: int) -> Tensor:
        ctx.sums, ctx.key = sums, key
        return weight.view_as(weight)

    @staticmethod
    @once_differentiable  # type: ignore[misc]
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        ctx.sums.pop(ctx.key, None)  # autograd takes a gradient as it is only if nobody else holds it
        return gradients[0], None, None
