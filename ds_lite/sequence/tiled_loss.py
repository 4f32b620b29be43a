"""Cross entropy over a large vocabulary without the logits of the whole sequence (§9.14.2).

At T = 8192 and V = 32000 the logits have 262 million numbers, the hidden states they come from 2 million.

Letters: N positions of all samples, H width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ds_lite.sequence.tile_gradients import IGNORED, TileLoss, by_parameters, loss_of_tiles, sizes_of

Reduction = Literal["mean", "sum"]


def tiled_loss(
    head: nn.Module | Tensor,
    hidden: Tensor,
    labels: Tensor,
    *,
    tiles: int,
    ignore_index: int = IGNORED,
    reduction: Reduction = "mean",
) -> Tensor:
    """Cross entropy of `head(hidden)` and `labels`, which never holds the logits of more than one tile.

    `head` is a module, or a weight (V, H). `labels` name what each position shall predict: shift them
    before. The mean is over all valid labels, not over tiles; without any it is nan, as in one process, and
    the gradients are zeros.

    Shapes: hidden (..., H), labels (...) -> 0-dim. The head gets (about N/tiles, H).
    Gradient: of hidden and of the head's trainable parameters, found in forward; backward only scales them.
    It cannot be differentiated twice.
    Raises: as `tiled_loss_sum`; ValueError for another reduction.

    >>> weight, hidden = torch.eye(4), torch.tensor([[1.0, 2, 3, 4], [4, 3, 2, 1], [0, 0, 0, 0]])
    >>> round(tiled_loss(weight, hidden, torch.tensor([2, 0, -100]), tiles=2).item(), 4)
    0.9402

    Source: §9.14; DeepSpeed `runtime/sequence_parallel/ulysses_sp.py::TiledFusedLogitsLoss` @ 0.19.8.
    Differs: DeepSpeed averages the means of the tiles.
    """
    check_reduction(reduction, ("mean", "sum"))
    total, valid = tiled_loss_sum(head, hidden, labels, tiles=tiles, ignore_index=ignore_index)
    return total / valid if reduction == "mean" else total


def tiled_loss_sum(
    head: nn.Module | Tensor, hidden: Tensor, labels: Tensor, *, tiles: int, ignore_index: int = IGNORED
) -> tuple[Tensor, Tensor]:
    """The sum of the losses and the number of valid labels, for ranks that share one sequence.

    Each of sp ranks uses `sp * total / (valid labels of the whole group)`. A rank without a valid label has
    an exact zero, and so have its gradients, even where the group has none and the quotient is nan.
    Losses are computed in the logits' dtype and added up in float32 or wider.

    Shapes: hidden (..., H), labels (...) -> 0-dim, 0-dim int64.
    Communication: none of its own.
    Gradient: as `tiled_loss`.
    Raises: ValueError for tiles < 1, labels that do not fit hidden or the vocabulary, a weight that does
    not fit hidden, a head that does not return logits; TypeError for labels that are no integers, another
    head.

    Source: §9.14; report B08.
    """
    _check_labels(head, hidden, labels)
    sizes = sizes_of(labels.numel(), tiles)
    labels = labels.reshape(-1).long()
    is_valid = labels != ignore_index
    ids = labels.masked_fill(~is_valid, 0)
    lowest, highest = map(int, ids.aminmax()) if len(ids) else (0, -1)

    call: Callable[..., Tensor]
    sources: Sequence[Tensor]
    if isinstance(head, Tensor):
        call, sources = lambda weights, x: F.linear(x, weights[0]), [head]
    else:
        call, sources = by_parameters(lambda head, x: head(x), head)

    def loss_of_tile(sources: Sequence[Tensor], x: Tensor, labels: Tensor) -> Tensor:
        logits = call(sources, x)
        _check_logits(logits, labels, lowest, highest)
        losses = F.cross_entropy(logits, labels, ignore_index=ignore_index, reduction="none")
        return losses.sum(dtype=torch.promote_types(losses.dtype, torch.float32))

    work = TileLoss(loss_of_tile, (labels,), sizes, [1.0] * len(sizes))
    total = loss_of_tiles(work, hidden.reshape(-1, hidden.shape[-1]), sources)
    valid = is_valid.sum()
    # Without a valid label 1/0 comes back from above; it belongs to no position, and `where` stops it.
    return torch.where(valid > 0, total, torch.zeros_like(total)), valid


def check_reduction(reduction: str | None, known: tuple[str | None, ...]) -> None:
    """ValueError for a reduction that is not one of `known`."""
    if reduction not in known:
        raise ValueError(f"reduction={reduction!r} is unknown; choose one of {known} (§9.14)")


def _check_labels(head: nn.Module | Tensor, hidden: Tensor, labels: Tensor) -> None:
    if not isinstance(head, (nn.Module, Tensor)):
        raise TypeError(f"the head is a {type(head).__name__}; give a module or a weight (V, H) (§9.14)")
    if isinstance(head, Tensor) and (head.dim() != 2 or head.shape[-1] != hidden.shape[-1]):
        raise ValueError(
            f"a weight of shape {tuple(head.shape)} makes no logits of hidden {tuple(hidden.shape)}; it "
            f"needs the shape (V, {hidden.shape[-1]}) (§9.14)"
        )
    if hidden.shape[:-1] != labels.shape:
        raise ValueError(
            f"hidden of shape {tuple(hidden.shape)} needs labels of shape {tuple(hidden.shape[:-1])}, got "
            f"{tuple(labels.shape)}; one label a position (§9.14)"
        )
    if labels.is_floating_point() or labels.dtype is torch.bool:
        raise TypeError(f"labels are {labels.dtype}; they are ids of the vocabulary, integers (§9.14)")


def _check_logits(logits: Tensor, labels: Tensor, lowest: int, highest: int) -> None:
    if not isinstance(logits, Tensor) or logits.shape[:-1] != labels.shape:
        got = f"shape {tuple(logits.shape)}" if isinstance(logits, Tensor) else type(logits).__name__
        raise ValueError(
            f"the head returned {got} for {len(labels)} positions; it must return logits, "
            f"({len(labels)}, V) (§9.14)"
        )
    if lowest < 0 or highest >= logits.shape[-1]:
        raise ValueError(
            f"labels from {lowest} to {highest} lie outside the vocabulary 0..{logits.shape[-1] - 1}; mark "
            f"positions without a label with ignore_index (§9.14)"
        )
