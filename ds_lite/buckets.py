"""Gradients of one kind of parameter, side by side in one buffer (§9.1 §9.3).

While autograd works through a backward, a hook (`arrive`) moves each gradient into its place in the buffer.
In full precision `.grad` is then a view of it, and later micro-batches add there. So what comes after the
backward (reduce, unscale, clip) is one operation a bucket, however many parameters there are. A buffer serves
one step after another; with ZeRO-2 it is dropped as soon as it is reduced. A parameter that got no gradient
has `.grad` None and a flag that says so.

The order of a step: `arrive` for each gradient, `sum_tied`, `start_reduce` and `finish_reduce`, `counted`,
`scale_`, the optimizer on the targets of `pieces`, `publish`, `clear`. With ZeRO a bucket may be reduced
earlier, while gradients still arrive (`zero.py`).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ds_lite import comm
from ds_lite.comm import ProcessGroup, Work
from ds_lite.tags import tags_of


@dataclass(frozen=True)
class Route:
    """The groups of one kind of parameter: where its gradients are summed, and whether this rank counts it.

    `partial` and `tie` are None where nothing is summed over the model axis or over stages. `is_counted` is
    False on every replica but one, so that the norm sees each element once.
    """

    data: ProcessGroup
    divisor: int
    partial: ProcessGroup | None = None
    tie: ProcessGroup | None = None
    is_counted: bool = True


@dataclass
class Piece:
    """What the optimizer steps: `target` stands for elements start..stop-1 of one flattened parameter."""

    index: int
    start: int
    stop: int
    target: nn.Parameter


class Bucket:
    """Replicated parameters: gradients are all-reduced, and the optimizer steps the parameters themselves.

    `dtype` is that of the buffer; where it is not the parameters' own, `.grad` is emptied into the buffer at
    every backward (see `precision.py`).
    """

    padding = 0  # elements between the gradients and the flags

    def __init__(
        self, parameters: Sequence[nn.Parameter], route: Route, dtype: torch.dtype | None = None
    ) -> None:
        self.parameters, self.route = list(parameters), route
        self.dtype = dtype or self.parameters[0].dtype
        self.keeps_views = self.dtype == self.parameters[0].dtype  # of the buffer in `.grad`
        self.sizes = [parameter.numel() for parameter in self.parameters]
        self.count = sum(self.sizes)
        self.pieces = [Piece(i, 0, self.sizes[i], p) for i, p in enumerate(self.parameters)]
        self.seen = [False] * len(self.sizes)  # who has a gradient: this rank, once reduced any rank
        self.buffer: Tensor | None = None  # gradients, padding, one flag per parameter
        self._kept: Tensor | None = None  # a buffer that nothing uses
        self._views: list[Tensor] = []
        self._filled: list[bool] = []  # the other places hold garbage, or an earlier step's gradients
        self._has_reduced = False
        self._sum: Any = None  # the handle of a reduction over the data axis
        for index, parameter in enumerate(self.parameters):
            parameter.grad = None
            _listen(parameter, _hook(weakref.ref(self), index))

    # ------------------------------------------------------------------------------- during backward

    def arrive(self, index: int) -> None:
        """What the hook calls: autograd has made this parameter's gradient."""
        self.take(index)

    def take(self, index: int) -> None:
        """Move one parameter's gradient into the buffer."""
        parameter = self.parameters[index]
        gradient = parameter.grad
        assert gradient is not None
        self._make_buffer()
        view = self._views[index]
        if gradient is not view:
            gradient = gradient.detach().to_dense() if gradient.is_sparse else gradient.detach()
            if self.keeps_views or not self._filled[index]:
                view.copy_(gradient)  # the first, or somebody made `.grad` anew: it holds the whole sum
            else:
                view.add_(gradient)
            parameter.grad = view if self.keeps_views else None
        self.seen[index] = self._filled[index] = True

    def _make_buffer(self) -> Tensor:
        if self.buffer is None:
            like = self.parameters[0].detach()
            room = self.count + self.padding + len(self.sizes)
            kept, self._kept = self._kept, None
            self.buffer = like.new_empty(room, dtype=self.dtype) if kept is None else kept
            self.buffer[self.count :].zero_()
            self._filled = [False] * len(self.sizes)
            parts = self.buffer.split([*self.sizes, self.padding + len(self.sizes)])
            self._views = [part.view(p.shape) for part, p in zip(parts, self.parameters, strict=False)]
        return self.buffer

    def _look_again(self) -> Tensor:
        """The buffer, zero where there is no gradient, after what was done to `.grad` by hand."""
        buffer = self._make_buffer()
        for index, (parameter, view) in enumerate(zip(self.parameters, self._views, strict=True)):
            if parameter.grad is not None:
                if parameter.grad is not view or not self.seen[index]:
                    self.take(index)
            # With views a `.grad` of None takes a gradient away; without them it is always None here.
            elif not self._filled[index] or (self.keeps_views and self.seen[index]):
                view.zero_()
                self._filled[index] = True
                self.seen[index] = self.seen[index] and not self.keeps_views
        return buffer

    # ----------------------------------------------------------------------------------- reductions

    def sum_tied(self) -> None:
        """Sum over the stages of a tie.

        Communication: one all-reduce of the bucket plus one element per parameter.
        """
        if self.route.tie is not None:
            self._sum_over(self.route.tie, self._look_again())
            self._show()

    def start_reduce(self) -> None:
        """Sum what the model axis holds in parts, and start to average over the data axis.

        Communication: one all-reduce of the bucket plus one element per parameter; two for partial ones.
        """
        self.follow()
        buffer = self._look_again()
        if self._has_reduced and comm.get_world_size(self.route.data) != self.route.divisor:
            raise RuntimeError(
                "a second backward() after the gradients were reduced, with experts on several ranks, whose "
                "first gradient would be divided again; call step() first, or add the losses (§9.4)"
            )
        if self.route.partial is not None:
            self._sum_partial(buffer)
        self._write_flags(buffer)
        self._sum = comm.all_reduce(buffer, group=self.route.data, async_op=True)

    def finish_reduce(self) -> None:
        """Wait for what `start_reduce` started; every bucket has been started by then."""
        self._sum.wait()
        self._sum = None  # it holds the buffer
        assert self.buffer is not None
        self._read_flags(self.buffer)
        if self.route.divisor != 1:
            self.buffer.div_(self.route.divisor)
        self._has_reduced = True
        self._hand_out()

    def _sum_partial(self, buffer: Tensor) -> None:
        assert self.route.partial is not None
        if self._has_reduced and comm.get_world_size(self.route.partial) > 1:
            raise RuntimeError(
                "a second backward() after the gradients were reduced, with parameters whose gradient is a "
                "part on each tensor-parallel rank; call step() first, or add the losses (§9.3)"
            )
        self._sum_over(self.route.partial, buffer)

    def _sum_over(self, group: ProcessGroup, buffer: Tensor) -> None:
        """All-reduce a buffer that ends in the flags; what is present anywhere is then present everywhere."""
        if comm.get_world_size(group) == 1:
            return
        self._write_flags(buffer)
        comm.all_reduce(buffer, group=group)
        self._read_flags(buffer)

    def _write_flags(self, buffer: Tensor) -> None:
        buffer[-len(self.seen) :].copy_(torch.tensor(self.seen, dtype=torch.float32))

    def _read_flags(self, buffer: Tensor) -> None:
        self.seen = [count > 0 for count in buffer[-len(self.seen) :].tolist()]

    def _show(self) -> None:
        """Let `.grad` say what the buffer holds."""
        if self.keeps_views:
            for parameter, view, is_there in zip(self.parameters, self._views, self.seen, strict=True):
                parameter.grad = view if is_there else None

    def _hand_out(self) -> None:
        """Give the optimizer the gradients that exist."""
        for piece, view in zip(self.pieces, self._views, strict=True):
            piece.target.grad = view if self.seen[piece.index] else None

    # -------------------------------------------------------------------------------- after reducing

    def counted(self) -> Tensor | None:
        """The gradients that this rank counts in the norm; None if a replica counts them."""
        if self.buffer is not None:
            self._look_again()
        if self.buffer is None or not self.route.is_counted or comm.get_rank(self.route.data) != 0:
            return None
        return self.buffer[: self.count]

    def scale_(self, factor: Tensor) -> None:
        """Multiply every gradient held here."""
        if self.buffer is not None:
            self._look_again().mul_(factor.to(self.dtype))

    def follow(self) -> None:
        """Called before reducing and before saving, for what somebody wrote into the parameters.

        Nothing to do where the optimizer steps the parameters themselves.
        """

    def publish(self) -> Work | None:
        """Called after the optimizer step; nothing to do where it stepped the parameters themselves."""
        return None

    def full(self, parameter: nn.Parameter) -> Tensor | None:
        """The gradient of one parameter of this rank, whole over the data axis; None if there is none."""
        index = self._index_of(parameter)
        return self._views[index].clone() if self.seen[index] else None

    def _index_of(self, parameter: nn.Parameter) -> int:
        return next(i for i, other in enumerate(self.parameters) if other is parameter)

    def clear(self) -> None:
        """Drop the gradients; their buffer waits for the next step's."""
        self._keep(self.buffer)
        self.buffer, self._views, self._has_reduced = None, [], False
        self.seen = [False] * len(self.sizes)
        for parameter in self.parameters:
            parameter.grad = None
        for piece in self.pieces:
            piece.target.grad = None

    def _keep(self, buffer: Tensor | None) -> None:
        """The next step gets the same memory: pages that the system has to give anew cost time on a CPU."""
        if buffer is not None:
            self._kept = buffer


def group_by_kind(parameters: Iterable[nn.Parameter], max_elements: int) -> list[list[nn.Parameter]]:
    """Cut parameters into runs that may share one buffer: same dtype, device and tags, bounded size."""
    runs: list[list[nn.Parameter]] = []
    open_runs: dict[tuple[object, ...], tuple[list[nn.Parameter], int]] = {}
    for parameter in parameters:
        kind = (parameter.dtype, parameter.device, tags_of(parameter))
        run, filled = open_runs.get(kind, ([], 0))
        if not run or filled + parameter.numel() > max_elements:
            run, filled = [], 0
            runs.append(run)
        run.append(parameter)
        open_runs[kind] = (run, filled + parameter.numel())
    return runs


def versions(parameters: Sequence[nn.Parameter]) -> list[int]:
    """How often each parameter was written into, as autograd counts it."""
    return [parameter._version for parameter in parameters]


def _hook(bucket: weakref.ref[Bucket], index: int) -> Callable[[Tensor], None]:
    """What autograd calls when a gradient is there; it does not keep the bucket alive."""

    def arrive(parameter: Tensor) -> None:
        owner = bucket()
        if owner is not None:
            owner.arrive(index)

    return arrive


def _listen(parameter: nn.Parameter, hook: Callable[[Tensor], None]) -> None:
    """Be the only one that takes this parameter's gradients: an engine made later replaces an earlier one."""
    earlier = getattr(parameter, "_ds_lite_hook", None)
    if earlier is not None:
        earlier.remove()
    parameter._ds_lite_hook = parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[attr-defined]
