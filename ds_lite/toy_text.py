"""The text that toy models read, and their batches (§9.2 §9.9).

The text is the standard library's own source, which every machine with Python has. A batch is a function of
(seed, step, number of the micro-batch), so every layout of processes sees the same bytes.

Legend: B sequences in a micro-batch, T context.
"""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

__all__ = ["MicroBatch", "Text", "batches", "load_text", "micro_batch"]

MicroBatch = tuple[Tensor, Tensor]

# Tables, tests and other people's packages; what remains is code that reads like code.
_SKIPPED = {"__pycache__", "dist-packages", "encodings", "idlelib", "lib2to3", "pydoc_data", "site-packages"}


@dataclass(frozen=True)
class Text:
    """Bytes as two 1-D uint8 tensors; no file is in both."""

    train: Tensor
    validation: Tensor


def load_text(limit: int = 4_000_000, folder: str | os.PathLike[str] | None = None) -> Text:
    """The Python source below `folder` (default: the standard library), every tenth file for validation.

    Files come in alphabetical order of their paths until `limit` bytes are read. The text differs a little
    between Python versions.

    Raises: ValueError if there is no source to read.
    """
    root = Path(folder if folder is not None else sysconfig.get_path("stdlib"))
    parts: tuple[list[bytes], list[bytes]] = ([], [])
    size = 0
    for number, path in enumerate(_source_files(root)):
        data = path.read_bytes()[: limit - size]
        parts[number % 10 == 9].append(data)
        size += len(data)
        if size >= limit:
            break
    if not all(parts):
        raise ValueError(
            f"found {sum(map(len, parts))} Python files in {root}, and the text needs ten; pass another "
            f"folder with .py files to load_text (§9.2)"
        )
    train, validation = (torch.frombuffer(bytearray(b"".join(part)), dtype=torch.uint8) for part in parts)
    return Text(train, validation)


def _source_files(root: Path) -> Iterator[Path]:
    for folder, inner, files in os.walk(root):
        inner[:] = sorted(name for name in inner if name not in _SKIPPED and "test" not in name)
        yield from (Path(folder) / name for name in sorted(files) if name.endswith(".py"))


# ----------------------------------------------------------------------------------------- the batches


def micro_batch(data: Tensor, *, seed: int, step: int, index: int, size: int, context: int) -> MicroBatch:
    """Micro-batch number `index` of the global batch of `step`: inputs, and the same bytes one place on.

    Shapes: data 1-D uint8 -> inputs (B, T), labels (B, T), both int64.
    Raises: ValueError if the data is not longer than one context.

    >>> inputs, labels = micro_batch(torch.arange(9).byte(), seed=0, step=0, index=0, size=1, context=8)
    >>> labels.tolist()
    [[1, 2, 3, 4, 5, 6, 7, 8]]
    """
    if len(data) <= context:
        raise ValueError(
            f"the text has {len(data)} bytes and context={context} needs {context + 1}; give more (§9.2)"
        )
    starts = np.random.default_rng((seed, step, index)).integers(0, len(data) - context, size)
    rows = torch.stack([data[start : start + context + 1] for start in starts.tolist()]).long()
    return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


def batches(
    data: Tensor,
    *,
    num_micro_batches: int,
    size: int,
    context: int,
    replica: int = 0,
    seed: int = 0,
    first_step: int = 0,
) -> Iterator[MicroBatch]:
    """The micro-batches of one replica, step after step without end: numbers r*m to r*m+m-1 of each step."""
    for step in count(first_step):
        for i in range(num_micro_batches):
            index = replica * num_micro_batches + i
            yield micro_batch(data, seed=seed, step=step, index=index, size=size, context=context)
