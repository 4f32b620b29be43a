"""Activation checkpoints that wait for backward in host memory (§9.14.2).

A checkpointed segment keeps its inputs, and with long sequences these alone fill a device: one (B, T, H)
for each layer. Here they lie in a `HostStore` from the segment's forward to its backward.

    forward     copy to the host, on a stream of its own, while the segment computes
    backward    copy back when the segment is about to run again
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_flatten, tree_unflatten

from ds_lite.checkpointing import checkpoint
from ds_lite.sequence.host_store import HostStore

SMALL_BYTES = 1024  # what is smaller gains nothing and costs a copy


def checkpoint_to_host(
    function: Callable[..., Any], *args: Any, store: HostStore, min_bytes: int = SMALL_BYTES
) -> Any:
    """`checkpoint(function, *args)`, whose large inputs lie in `store` until backward.

    What moves are the floating-point tensors in `args`, also those in tuples, lists and dicts, from
    `min_bytes` on that are no parameters. The device's copy is freed when nobody else holds it, so let the
    caller's own name for it go, as in `x = layer(x)`. What many segments share, such as a mask, reaches
    `function` better as part of it: as an argument it would be copied for each of them. A CPU tensor is
    copied as well: it saves nothing there, but path and counts are those of a GPU, and a later change in
    place of the original does no harm on either.

    Units: `store.bytes_now`, `store.bytes_peak` in bytes, `store.puts` and `store.gets` in tensors.
    Gradient: as without offload; after backward, or when the graph is dropped, the store is empty.

    >>> store, x = HostStore(), torch.ones(4, 64, requires_grad=True)
    >>> y = checkpoint_to_host(torch.sin, x, store=store)
    >>> store.bytes_now, store.puts
    (1024, 1)
    >>> y.sum().backward()
    >>> store.bytes_now, store.bytes_peak, store.gets
    (0, 1024, 1)

    For PipelineModule: `activation_checkpoint_func=functools.partial(checkpoint_to_host, store=store)`.

    Source: §9.14; DeepSpeed
    `runtime/activation_checkpointing/offload_activations.py::CheckpointHiddenStatesOffload` @ 0.19.8.
    Differs: DeepSpeed's is a context around transformers' layers, whose hidden states it moves except those
    of the last one; on a CPU it moves nothing.
    """
    leaves, nest = tree_flatten(args)  # torch's checkpoint saves tensors that are arguments themselves
    parameters = {leaf.untyped_storage().data_ptr() for leaf in leaves if isinstance(leaf, nn.Parameter)}

    def pack(x: Tensor) -> Tensor | _Parked:
        is_parameter = x.untyped_storage().data_ptr() in parameters
        if is_parameter or not x.is_floating_point() or x.nbytes < min_bytes:
            return x
        return _Parked(store.put(x), x.device, store)

    def segment(*leaves: Any) -> Any:
        return function(*tree_unflatten(leaves, nest))

    # Its inputs are saved under these hooks; for what the segment saves it opens its own.
    with saved_tensors_hooks(pack, _unpacked):
        return checkpoint(segment, *leaves)


@dataclass(frozen=True)
class _Parked:
    """A tensor in host memory and where it came from."""

    host: Tensor
    device: torch.device
    store: HostStore


def _unpacked(saved: Tensor | _Parked) -> Tensor:
    if isinstance(saved, Tensor):
        return saved
    ((_, (x,)),) = saved.store.walk([(saved.host,)], [0], saved.device)
    return x
