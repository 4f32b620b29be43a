"""The one instrument for memory. `tracemalloc` does not see torch, so tensors are watched by their storages.

`LiveStorages` counts bytes of tensors in one process, `vm_hwm_bytes` the whole process as the kernel saw
it, `live_micro_batches` how many forwards wait for their backward.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveStorages(TorchDispatchMode):
    """Bytes of the storages that operations made inside the block and that are still alive.

    A storage is counted once, however many views share it, from the operation that returns it until its
    last tensor is gone. Not seen: scratch memory inside one operation, and tensors older than the block
    (`watch` adds those). Storages smaller than `min_bytes` are left out, to count activations and not
    scalars.

    >>> with LiveStorages(min_bytes=1024) as meter:
    ...     a = torch.zeros(1024)
    ...     b = a + 1
    ...     del a
    >>> meter.current, meter.peak
    (4096, 8192)
    """

    def __init__(self, min_bytes: int = 1) -> None:
        super().__init__()
        self.min_bytes = min_bytes
        self.current = 0
        self.peak = 0
        self.largest = 0  # single storage
        self._alive: dict[int, tuple[weakref.ref[torch.UntypedStorage], int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.watch(result)
        return result

    def watch(self, tensors: Any) -> None:
        """Count the storages of these tensors (any nest of tuples, lists, dicts) from now on."""
        for tensor in tree_leaves(tensors):
            if not isinstance(tensor, torch.Tensor) or tensor.layout is not torch.strided:
                continue
            storage = tensor.untyped_storage()
            size, key = storage.nbytes(), id(storage)
            known = self._alive.get(key)
            if size < self.min_bytes or (known is not None and known[0]() is storage):
                continue
            # The Python object of a storage lives as long as its memory does, so its death is the memory's.
            self._alive[key] = (weakref.ref(storage, lambda _, key=key: self._forget(key)), size)
            self.current += size
            self.peak, self.largest = max(self.peak, self.current), max(self.largest, size)

    def reset_peak(self) -> None:
        """Let the peak start again from what is alive now."""
        self.peak = self.current

    def _forget(self, key: int) -> None:
        self.current -= self._alive.pop(key)[1]


def vm_hwm_bytes(pid: int | str = "self") -> int:
    """The largest resident memory a process ever had, as Linux counts it (`VmHWM`); it never falls.

    Raises: OSError where there is no /proc.
    """
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/{pid}/status has no VmHWM line: the process is gone or a kernel thread")


def live_micro_batches(events: Iterable[tuple[str, int]]) -> int:
    """The most micro-batches at one time whose forward is done and whose backward is not.

    `events` are ("F", micro_batch_id) and ("B", micro_batch_id) in the order they finished on one stage.

    >>> live_micro_batches([("F", 0), ("F", 1), ("B", 0), ("F", 2), ("B", 1), ("B", 2)])
    2
    """
    live: set[int] = set()
    peak = 0
    for kind, micro_batch_id in events:
        if kind == "F":
            assert micro_batch_id not in live, f"micro-batch {micro_batch_id} ran forward twice"
            live.add(micro_batch_id)
            peak = max(peak, len(live))
        else:
            assert kind == "B", f"event {kind!r}: only F and B are known"
            assert micro_batch_id in live, f"backward of micro-batch {micro_batch_id} without its forward"
            live.remove(micro_batch_id)
    return peak
