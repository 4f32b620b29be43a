"""The mean of the losses, each micro-batch and each replica weighing the same (§9.2)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ds_lite import comm
from ds_lite.comm import ProcessGroup

Losses = tuple[Tensor, ...]  # what one loss_fn call gave, 0-dim each


def split_losses(loss: Any) -> Losses:
    """What a loss_fn returned, as a tuple of 0-dim tensors.

    Raises: TypeError if one of them is not a tensor with a single element.
    """
    losses = tuple(loss) if isinstance(loss, (tuple, list)) else (loss,)
    for value in losses:
        if not isinstance(value, Tensor) or value.numel() != 1:
            what = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
            raise TypeError(
                f"the loss must be a tensor with one element, got {what}; reduce it in loss_fn (§9.2)"
            )
    return tuple(value.reshape(()) for value in losses)


def mean_over_micro_batches(per_micro_batch: list[Losses]) -> Losses:
    """One mean per kind of loss, in the dtype of the losses; summed in float64."""
    kinds = zip(*per_micro_batch, strict=True)
    return tuple(torch.stack(kind).double().mean().to(kind[0].dtype) for kind in kinds)


def mean_over_replicas(losses: Losses, group: ProcessGroup) -> Losses:
    """The mean of each loss over the data axis.

    Communication: one all-reduce of one float64 per loss, if there is more than one replica.
    """
    replicas = comm.get_world_size(group)
    if not losses or replicas == 1:
        return losses
    sums = torch.stack([loss.double() for loss in losses])
    comm.all_reduce(sums, group=group)
    return tuple(value.to(loss.dtype) for value, loss in zip(sums / replicas, losses, strict=True))


def unwrapped(losses: Losses) -> Any:
    """One loss as a tensor, several as a tuple; None where there is none."""
    return losses[0] if len(losses) == 1 else (losses or None)
