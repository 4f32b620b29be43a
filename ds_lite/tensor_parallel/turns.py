"""Which part of a batch is computed now, while several take turns (§9.15).

A block whose batch runs in parts enters and leaves its tensor-parallel regions as always (`regions.py`).
There the part that runs now starts its sum and lets the others go on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ds_lite.comm import ProcessGroup
from ds_lite.tensor_parallel.pending import (
    Pending,
    finish_sum,
    start_sum,
    sum_in_backward,
    wait_in_backward,
)

_running: list[Turns] = []


class Turns:
    """The parts of one call: whose turn it is, and the sums that are under way.

    `pause` gives the turn away; whoever runs the parts sets it, and `part`.
    """

    def __init__(self) -> None:
        self.pending = Pending()
        self.part = 0
        self.pause: Callable[[], None] = lambda: None
        self._count: dict[int, int] = {}
        self._surroundings: tuple[Any, ...] = ()

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Regions that are entered and left until the block ends belong to these parts."""
        self._surroundings = _surroundings()
        _running.append(self)
        try:
            yield
        except BaseException:
            self.pending.drain()
            raise
        finally:
            _running.pop()

    def are_given_away(self) -> bool:
        """Not inside of a context that a part has opened, e.g. a checkpoint: others would run in it."""
        return _surroundings() == self._surroundings

    def enter(self, x: Tensor, group: ProcessGroup) -> Tensor:
        """As `regions.enter`; backward begins the sum here and waits for it one step earlier."""
        key = self._next_key("in")
        waited = wait_in_backward(x, self.pending, key)
        return sum_in_backward(waited, self.pending, key, group)

    def leave(self, x: Tensor, group: ProcessGroup) -> Tensor:
        """As `regions.leave`; the others go on while the sum runs."""
        key = self._next_key("out")
        started = start_sum(x.clone(), self.pending, key, group)  # others may hold x
        self.pause()
        return finish_sum(started, self.pending, key)

    def _next_key(self, way: str) -> tuple[int, int, str]:
        number = self._count[self.part] = self._count.get(self.part, 0) + 1
        return self.part, number, way


def running() -> Turns | None:
    """The parts that are computed now, if a batch runs in parts and turns may change here."""
    return _running[-1] if _running and _running[-1].are_given_away() else None


def _surroundings() -> tuple[Any, ...]:
    """What contexts of torch change for whatever runs inside of them, and would be left in another order."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        *(torch.is_autocast_enabled(device) for device in ("cpu", "cuda")),
        None if hooks is None else tuple(map(id, hooks)),
        torch._C._len_torch_function_stack(),
        torch._C._len_torch_dispatch_stack(),
    )
