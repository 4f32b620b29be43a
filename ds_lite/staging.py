"""Messages of GPU tensors that travel as host tensors, for more ranks than GPUs (§9.11).

    start    this rank's tensors are copied to the host, and the message starts there
    wait     the message is over, and what it wrote is copied back

So several ranks share a card: kernels, streams and dtypes are those of the GPU, and gloo carries the bytes.
`comm.py` asks for it where it was started with the backend "staged"; nobody else knows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor


class Staged:
    """The handle of a staged message: what it wrote is there once it has been waited for."""

    def __init__(self, work: Any, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        self._work, self._pairs = work, list(pairs)

    def wait(self, timeout: Any = None) -> bool:
        done = bool(self._work.wait())
        while self._pairs:
            tensor, on_host = self._pairs.pop()
            tensor.copy_(on_host)
        return done

    def is_completed(self) -> bool:
        """Whether the host has it; the tensor gets it when it is waited for."""
        return bool(self._work.is_completed())


def staged(
    message: Callable[..., Any], tensors: Sequence[Tensor], writes: Sequence[int], *, async_op: bool
) -> Any:
    """`message(*tensors, async_op=True)` with copies on the host in their places.

    `writes` says which of the tensors it changes.
    """
    on_host = [x.detach().to("cpu", copy=True).contiguous() for x in tensors]  # waits for the GPU
    handle = Staged(message(*on_host, async_op=True), [(tensors[index], on_host[index]) for index in writes])
    if async_op:
        return handle
    handle.wait()
    return None
