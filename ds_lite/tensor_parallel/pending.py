"""Sums over the tensor-parallel ranks that are under way, and the points where they are waited for (§9.15).

    start_sum          forward: starts the all-reduce             backward: nothing
    finish_sum         forward: waits for it                      backward: nothing
    sum_in_backward    forward: nothing                           backward: starts the all-reduce
    wait_in_backward   forward: nothing                           backward: waits for it

Between start and finish nobody reads the tensor, so other work can be done: that is all of Domino.

A `Pending` belongs to one forward call and its backward. It keeps each tensor alive until its sum is waited
for, and knows which part of the batch, under which key, waits for what.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd import Variable
from torch.autograd.function import once_differentiable

from ds_lite import comm
from ds_lite.comm import ProcessGroup


class Watcher(Protocol):
    """Whoever wants to know when sums start and end; `domino/lanes.py` draws them."""

    def started(self, key: Hashable, work: Any) -> None: ...

    def waits(self, key: Hashable) -> None: ...

    def waited(self, key: Hashable) -> None: ...


_watchers: list[Watcher] = []


@contextmanager
def watched_by(watcher: Watcher) -> Iterator[None]:
    """Tell `watcher` of every sum of this process until the block ends."""
    _watchers.append(watcher)
    try:
        yield
    finally:
        _watchers.remove(watcher)


class Pending:
    """The sums of one forward call, and of its backward, that have been started and not been waited for.

    Raises: RuntimeError for a key that is started while it is under way, or waited for when it is not.
    """

    def __init__(self) -> None:
        self._under_way: dict[Hashable, tuple[Any, Tensor]] = {}
        self._backward = -1  # number of the backward that runs
        self._last_wait: int | None = None

    def __len__(self) -> int:
        return len(self._under_way)

    def start(self, key: Hashable, tensor: Tensor, group: ProcessGroup | None) -> None:
        """Sum `tensor` over the group, in place, while the caller goes on.

        Communication: one all-reduce.
        """
        if key in self._under_way:
            raise RuntimeError(f"the sum {key!r} is under way already; wait for it first (§9.15)")
        work = None if group is None else comm.all_reduce(tensor, group=group, async_op=True)
        self._under_way[key] = work, tensor
        for watcher in _watchers:
            watcher.started(key, work)

    def wait(self, key: Hashable) -> None:
        """Return when the sum is there."""
        if key not in self._under_way:
            raise RuntimeError(
                f"nothing is under way for {key!r}: it was waited for before, or never started (§9.15)"
            )
        work, _ = self._under_way.pop(key)
        for watcher in _watchers:
            watcher.waits(key)
        if work is not None:
            work.wait()
        for watcher in _watchers:
            watcher.waited(key)

    def put_off(self, node: Any) -> None:
        """Let a wait of backward come after all that was computed, in forward, since the wait before it.

        autograd runs what is ready in reverse order of creation. So a wait stands right behind the layer that
        started its sum; with the number of the wait before it, the other part's layer comes in between.
        """
        own = node._sequence_nr()
        if self._last_wait is not None:
            node._set_sequence_nr(self._last_wait)
        self._last_wait = own

    def drain(self) -> None:
        """Wait for everything: the computation has failed, and memory goes back to its owners."""
        for key in list(self._under_way):
            self.wait(key)

    def watch_backward(self) -> None:
        """At the end of the backward that runs now nothing may be under way; what one left that failed ends
        here."""
        number = torch._C._current_graph_task_id()
        if self._backward != number:
            self.drain()
            self._backward = number
            Variable._execution_engine.queue_callback(self._assert_none)

    def _assert_none(self) -> None:
        self._backward = -1
        assert not self._under_way, f"backward is over, but {list(self._under_way)} were not waited for"


def start_sum(x: Tensor, pending: Pending, key: Hashable, group: ProcessGroup | None) -> Tensor:
    """Begin to sum the parts of the ranks; the result may be read after `finish_sum`.

    x is summed in its own memory, so nothing else may use it: no layer that saves its output for backward,
    such as exp, may have made it; a linear layer may.

    Shapes: x -> the same, contiguous; x itself where it is.
    Communication: forward one all-reduce of x's size; backward none.
    Gradient: passed on; it is whole on every rank.
    """
    started: Tensor = _Start.apply(x, pending, key, group)
    return started


def finish_sum(x: Tensor, pending: Pending, key: Hashable) -> Tensor:
    """Wait for the sum that `start_sum` began."""
    finished: Tensor = _Finish.apply(x, pending, key)
    return finished


def sum_in_backward(x: Tensor, pending: Pending, key: Hashable, group: ProcessGroup | None) -> Tensor:
    """Use x in a region where each rank computes a part; its gradients come together here and their sum over
    the ranks begins. `wait_in_backward` before it, under the same key, waits.

    Shapes: x -> the same.
    Communication: backward one all-reduce of x's size.
    """
    entered: Tensor = _SumInBackward.apply(x, pending, key, group)
    return entered


def wait_in_backward(x: Tensor, pending: Pending, key: Hashable) -> Tensor:
    """Mark the place up to which the gradient of x may still be summed: the one column layer that takes x
    starts that sum under the same key.

    Shapes: x -> the same.
    Gradient: passed on when its sum is there.
    """
    waited: Tensor = _Wait.apply(x, pending, key)
    if waited.grad_fn is not None:
        pending.put_off(waited.grad_fn)
    return waited


def will_be_waited_for(ctx: Any) -> bool:
    """Whether this backward goes on to the wait before x; one that asks for some weights alone does not."""
    return bool(torch._C._will_engine_execute_node(ctx.next_functions[0][0]))


class _Start(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, pending: Pending, key: Hashable, group: ProcessGroup | None) -> Tensor:
        total = x.detach().contiguous()  # x's own memory where it can be: nobody else reads it
        pending.start(key, total, group)
        return total

    @staticmethod
    @once_differentiable  # type: ignore[misc]
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        return gradients[0], None, None, None


class _Finish(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, pending: Pending, key: Hashable) -> Tensor:
        pending.wait(key)
        return x.view_as(x)

    @staticmethod
    @once_differentiable  # type: ignore[misc]
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return gradients[0], None, None


class _SumInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, pending: Pending, key: Hashable, group: ProcessGroup | None) -> Tensor:
        ctx.pending, ctx.key, ctx.group = pending, key, group
        return x.view_as(x)

    @staticmethod
    @once_differentiable  # type: ignore[misc]
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        total = gradients[0].clone(memory_format=torch.contiguous_format)  # others may hold this one
        if will_be_waited_for(ctx):
            ctx.pending.watch_backward()
            ctx.pending.start(ctx.key, total, ctx.group)
        return total, None, None, None


class _Wait(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, pending: Pending, key: Hashable) -> Tensor:
        ctx.pending, ctx.key = pending, key
        return x.view_as(x)

    @staticmethod
    @once_differentiable  # type: ignore[misc]
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        ctx.pending.wait(ctx.key)
        return gradients[0], None, None
