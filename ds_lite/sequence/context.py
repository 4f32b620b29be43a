"""What an engine's attention has to know while its model runs: which tokens are here, and what the masks
say (§9.14).

A context is open during the forward and the backward of one engine. It is kept for the process, not for a
thread: on CUDA, backward runs on a thread of autograd's own, and recomputes there.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from ds_lite.comm import ProcessGroup
from ds_lite.sequence.data import Part

_open: list[Context] = []
_is_whole = False  # a model runs on few tokens as one process would: nothing is exchanged


@contextmanager
def as_one_process() -> Iterator[None]:
    """Nothing is exchanged until the block ends."""
    global _is_whole
    _is_whole = True
    try:
        yield
    finally:
        _is_whole = False


def runs_as_one_process() -> bool:
    return _is_whole


class Context:
    """One engine's sequence group, and the micro-batch that its model works on.

    `part` is None until the sequence is cut. `padding` (B, T) and `positions` (B, T) are whole. `hits` counts
    the attentions that went through an exchange.
    """

    def __init__(self, group: ProcessGroup) -> None:
        self.group = group
        self.part: Part | None = None
        self.padding: Tensor | None = None
        self.positions: Tensor | None = None
        self.hits = 0
        self.is_inside = False  # a local attention runs, on the whole sequence: nothing more to exchange
        self.is_open = self.is_backward = False

    @contextmanager
    def open(self, *, is_backward: bool = False) -> Iterator[None]:
        """Work on this engine's micro-batch until the block ends."""
        _open.append(self)
        self.is_open, self.is_backward, self.hits = True, is_backward, 0
        try:
            yield
        finally:
            self.is_open = False
            assert _open.pop() is self

    @contextmanager
    def inside(self) -> Iterator[None]:
        """The local attention between two exchanges."""
        before, self.is_inside = self.is_inside, True
        self.hits += not before
        try:
            yield
        finally:
            self.is_inside = before

    def set_micro_batch(self, part: Part | None, padding: Any = None, positions: Any = None) -> None:
        self.part = part
        self.padding = padding if isinstance(padding, Tensor) else None
        self.positions = positions if isinstance(positions, Tensor) else None


def current() -> Context | None:
    """The context of the engine that runs now."""
    return _open[-1] if _open else None


def first_token() -> int:
    """Where this rank's tokens begin in the whole sequence: for layers that number tokens themselves."""
    context = current()
    return 0 if context is None or context.part is None or context.is_inside else context.part.tokens[0]
