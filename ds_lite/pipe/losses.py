"""The means of the losses, each micro-batch and each replica weighing the same (§9.2)."""

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
    if not losses:
        raise TypeError("loss_fn returned an empty tuple; return at least the loss to train on (§9.2)")
    for value in losses:
        if not isinstance(value, Tensor) or value.numel() != 1:
            what = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
            raise TypeError(
                f"the loss must be a tensor with one element, got {what}; reduce it in loss_fn (§9.2)"
            )
    return tuple(value.reshape(()) for value in losses)


def reduced(per_micro_batch: list[Losses], group: ProcessGroup, how: str | None) -> Losses:
    """Means over the replicas, and with how="avg" over the micro-batches too; else one after another.

    Sums are in float64, results in the losses' dtype. Without losses (not the last stage) nothing happens.

    Communication: one all-reduce of one float64 per result, if there is more than one replica.
    """
    if not per_micro_batch:
        return ()
    if how == "avg":
        mine = [torch.stack(kind).double().mean() for kind in zip(*per_micro_batch, strict=True)]
        dtypes = [_dtype_of_a_mean(loss) for loss in per_micro_batch[0]]
    else:
        mine = [loss.double() for losses in per_micro_batch for loss in losses]
        dtypes = [_dtype_of_a_mean(loss) for losses in per_micro_batch for loss in losses]
    sums = torch.stack(mine)
    comm.all_reduce(sums, group=group)
    means = sums / comm.get_world_size(group)
    return tuple(mean.to(dtype) for mean, dtype in zip(means, dtypes, strict=True))


def _dtype_of_a_mean(loss: Tensor) -> torch.dtype:
    """The loss's own; a count, such as of hits, has a mean that is not a whole number."""
    return loss.dtype if loss.is_floating_point() else torch.get_default_dtype()


def arranged(losses: Losses, how: str | None, num_micro_batches: int) -> Any:
    """What the caller gets: a tensor, or a tuple of several kinds; for None a list, one a micro-batch."""
    if how == "avg":
        return losses[0] if len(losses) == 1 else (losses or None)
    kinds = len(losses) // num_micro_batches
    each = [losses[start : start + kinds] for start in range(0, len(losses), kinds or 1)]
    return [one[0] if kinds == 1 else one for one in each] or None
