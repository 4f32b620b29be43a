"""Chunks that are not in work wait in host memory (§9.14.2).

    put    device -> host, on a stream of its own, while the computation goes on
    walk   host -> device, one chunk ahead: two slots, one in work, the next being filled

On a GPU the host memory is pinned and events keep the order: a slot is filled when the work on its last
chunk is done, and read when it is full. On the CPU every call copies as well. It saves nothing there, but
the order of slots is then the same everywhere, and a wrong one shows in the numbers.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

SLOTS = 2  # one in work, one on its way

Chunk = tuple[Tensor, ...]


class HostStore:
    """Host memory for idle chunks, and a count of what went in and out.

    `bytes_now` and `bytes_peak` are bytes that lie in the store, `puts` and `gets` tensors that were moved.
    What nobody holds any more has left the store.

    >>> store = HostStore()
    >>> parked = store.put(torch.zeros(4, 8))
    >>> store.bytes_now, store.puts
    (128, 1)
    >>> del parked
    >>> store.bytes_now, store.bytes_peak
    (0, 128)

    Source: §9.14; DeepSpeed `sequence/fpdt_layer.py::SequenceChunk` @ 0.19.8.
    Differs: DeepSpeed waits for the device after each pair of chunks; a CPU tensor is not copied there.
    """

    def __init__(self) -> None:
        self.bytes_now = 0
        self.bytes_peak = 0
        self.puts = 0
        self.gets = 0
        self._streams: dict[torch.device, Any] = {}

    def put(self, x: Tensor) -> Tensor:
        """A copy of `x` in host memory; on a GPU it is complete for `walk`, not yet for the host."""
        host = torch.empty(x.shape, dtype=x.dtype, pin_memory=x.is_cuda)
        stream = self._stream(x.device)
        if stream is not None:
            stream.wait_stream(torch.cuda.current_stream(x.device))
            x.record_stream(stream)  # its memory is not given away before the copy is done
        with _on(stream):
            host.copy_(x, non_blocking=True)
        self.puts += 1
        self.bytes_now += host.nbytes
        self.bytes_peak = max(self.bytes_peak, self.bytes_now)
        weakref.finalize(host.untyped_storage(), self._forget, host.nbytes).atexit = False
        return host

    def walk(
        self, chunks: Sequence[Chunk], order: Sequence[int], device: torch.device
    ) -> Iterator[tuple[int, Chunk]]:
        """Chunks of `put` tensors on `device`, in this order; each is good until the next is asked for."""
        slots = [_Slot(chunks, device) for _ in range(min(SLOTS, len(order)))]
        try:
            for turn, index in enumerate(order):
                if turn == 0:
                    self._fetch(chunks[index], slots[0])
                if turn + 1 < len(order):
                    self._fetch(chunks[order[turn + 1]], slots[(turn + 1) % SLOTS])
                slot = slots[turn % SLOTS]
                slot.full.wait()
                yield index, slot.views(chunks[index])
                slot.free.record()
        finally:  # left early: a chunk may still be on its way into memory that is now given back
            for slot in slots:
                slot.full.wait()

    def _fetch(self, chunk: Chunk, slot: _Slot) -> None:
        with _on(self._stream(slot.device)):
            slot.free.wait()
            for host, place in zip(chunk, slot.views(chunk)):
                place.copy_(host, non_blocking=True)
            slot.full.record()
        self.gets += len(chunk)

    def _stream(self, device: torch.device) -> Any:
        if device.type == "cuda" and device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        return self._streams.get(device)

    def _forget(self, size: int) -> None:
        self.bytes_now -= size


class _Slot:
    """Device memory for one chunk at a time, as large as the largest."""

    def __init__(self, chunks: Sequence[Chunk], device: torch.device) -> None:
        self.device = device
        self._buffers = [
            torch.empty(max(x.numel() for x in column), dtype=column[0].dtype, device=device)
            for column in zip(*chunks)
        ]
        self.full, self.free = (
            torch.cuda.Event() if device.type == "cuda" else _Done() for _ in ("full", "free")
        )
        self.free.record()  # the memory may still be in use by what was computed before

    def views(self, chunk: Chunk) -> Chunk:
        return tuple(place[: x.numel()].view(x.shape) for x, place in zip(chunk, self._buffers))


class _Done:
    """The CPU's event: what was called has happened."""

    def record(self) -> None: ...

    def wait(self) -> None: ...


def _on(stream: Any) -> AbstractContextManager[Any]:
    return nullcontext() if stream is None else torch.cuda.stream(stream)


class Shelf:
    """Chunks in their order, each some tensors; they wait where they are, or in a store if there is one."""

    def __init__(self, store: HostStore | None, device: torch.device) -> None:
        self.store, self.device = store, device
        self._chunks: list[Chunk] = []

    def put(self, *tensors: Tensor) -> None:
        """Append one chunk."""
        self._chunks.append(tensors if self.store is None else tuple(map(self.store.put, tensors)))

    def walk(self, order: Sequence[int]) -> Iterator[tuple[int, Chunk]]:
        """Index and tensors of these chunks; with a store they are good until the next is asked for."""
        if self.store is not None:
            return self.store.walk(self._chunks, order, self.device)
        return ((index, self._chunks[index]) for index in order)

    def tensors(self) -> list[Tensor]:
        """All tensors in a row, for `save_for_backward`; `holding` makes a shelf of them again."""
        return [x for chunk in self._chunks for x in chunk]

    @classmethod
    def holding(
        cls, tensors: Sequence[Tensor], width: int, store: HostStore | None, device: torch.device
    ) -> Shelf:
        """The shelf whose `tensors()` these are, `width` to a chunk."""
        shelf = cls(store, device)
        shelf._chunks = [tuple(tensors[i : i + width]) for i in range(0, len(tensors), width)]
        return shelf
