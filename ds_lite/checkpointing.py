"""Activation checkpointing: keep a segment's inputs, recompute the rest in backward (§9.2 §9.9).

Non-reentrant only: the reentrant form cuts the graph when no input needs a gradient, which is the
normal case on the first stage, where the inputs are token ids.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils.checkpoint import checkpoint as _torch_checkpoint


def checkpoint(function: Callable[..., Any], *args: Any) -> Any:
    """Call `function(*args)` now and once more in backward; dropout draws the same numbers both times.

    Source: §9.2; DeepSpeed `runtime/activation_checkpointing/checkpointing.py::checkpoint` @ 0.19.8.
    Differs: DeepSpeed's `checkpoint` is reentrant, its `non_reentrant_checkpoint` is what this one is.
    """
    return _torch_checkpoint(function, *args, use_reentrant=False, preserve_rng_state=True)


non_reentrant_checkpoint = checkpoint
