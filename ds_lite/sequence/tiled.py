"""Long sequences a tile at a time: the MLP, the loss over the vocabulary, anything position-wise (§9.14.2).

A token's MLP and a token's loss need no other token. Cut into tiles, their large intermediate values, of
which the logits are the largest, exist for one tile at a time. Two ways to the gradients:

    recompute    `tiled`, `TiledMLP`, `sequence_tiled_compute`: backward runs each tile once more
    scale        `tiled_loss`, `TiledFusedLogitsLoss`: a loss is linear in the gradient that comes from
                 above, so forward takes each tile's gradients while its logits are there, and backward
                 multiplies them: the logits are made once

The number of tiles changes memory, never a number: it need not divide the length, and more tiles than
positions are as many tiles as positions.

Letters: B samples, T tokens, N = B*T positions, H width.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ds_lite.checkpointing import checkpoint
from ds_lite.sequence.tile_gradients import (
    TileLoss,
    by_parameters,
    counted,
    loss_of_tiles,
    one_number,
    sizes_of,
    weights_of,
)
from ds_lite.sequence.tiled_loss import Reduction, check_reduction, tiled_loss, tiled_loss_sum

__all__ = [
    "TiledFusedLogitsLoss",
    "TiledMLP",
    "sequence_tiled_compute",
    "tiled",
    "tiled_loss",
    "tiled_loss_sum",
]


def tiled(fn: Callable[[Tensor], Tensor], x: Tensor, tiles: int) -> Tensor:
    """`fn(x)`, tile by tile, for an `fn` that treats each position by itself; backward runs tiles again.

    Shapes: x (..., T, H) -> (..., T, any width). `fn` gets (..., about T/tiles, H).
    Gradient: autograd's own, of x and of whatever `fn` uses; hooks of parameters see the sum over tiles.
    Raises: ValueError for tiles < 1, an x without a dimension of positions, and an `fn` that changes their
    number; TypeError for tiles that are no integer.

    >>> tiled(torch.tanh, torch.zeros(2, 7, 3), tiles=4).shape
    torch.Size([2, 7, 3])

    Source: §9.14; DeepSpeed `runtime/sequence_parallel/ulysses_sp.py::TiledMLP` @ 0.19.8.
    """
    if x.dim() < 2:
        raise ValueError(f"x of shape {tuple(x.shape)} has no positions to cut; give (..., T, H) (§9.14)")
    outputs = []
    for tile in x.split(sizes_of(x.shape[-2], tiles), dim=-2):
        y = checkpoint(fn, tile)
        if not isinstance(y, Tensor) or y.dim() < 2 or y.shape[-2] != tile.shape[-2]:
            got = tuple(y.shape) if isinstance(y, Tensor) else type(y).__name__
            raise ValueError(
                f"fn made {got} of a tile of shape {tuple(tile.shape)}; only what keeps each "
                f"position by itself can be tiled, such as an MLP (§9.14)"
            )
        outputs.append(y)
    return torch.cat(outputs, dim=-2)


class TiledMLP:
    """`fn(self, x)` in `shards` tiles: `tiled` in the form in which DeepSpeed's users call it."""

    @staticmethod
    def apply(
        fn: Callable[[Any, Tensor], Tensor],
        self: Any,
        x: Tensor,
        shards: int,
        compute_params: Sequence[Tensor] | None = None,
    ) -> Tensor:
        """The output of the MLP whose forward is `fn` and whose module is `self`.

        `compute_params` is accepted and not needed: autograd sees which parameters each tile uses.

        Shapes: x (B, T, H) or (T, H) -> the same with the width that `fn` gives.
        Gradient: as `tiled`.
        Raises: as `tiled`.

        Source: §9.14; DeepSpeed `runtime/sequence_parallel/ulysses_sp.py::TiledMLP` @ 0.19.8.
        Differs: there compute_params=None is a TypeError, and each tile adds to `.grad` past the graph.
        """
        return tiled(lambda tile: fn(self, tile), x, shards)


class TiledFusedLogitsLoss:
    """`fn(self, x, y)` in `shards` tiles, where `fn` makes logits and their loss."""

    @staticmethod
    def apply(
        fn: Callable[..., Tensor],
        self: nn.Module,
        x: Tensor,
        y: Tensor,
        mask: Tensor | None,
        shards: int,
        compute_params: Sequence[Tensor] | None = None,
        output_reduction: Reduction = "mean",
    ) -> Tensor:
        """The loss of the whole from `fn(self, x, y)`, or with a mask `fn(self, x, y, mask)`, of each tile.

        With "sum" `fn` returns the sum over its positions. With "mean" it returns the mean over those that
        count: the label, if y holds integers, is not -100, and the mask, if there is one, is not 0 (it may
        be a weight). Each tile's mean then enters with its share of them, and `fn` is not called where none
        counts; if none counts anywhere, the answer is what `fn` makes of that.

        Shapes: x (B, T, ...), y (B, T, ...), mask (B, T) -> 0-dim, in float32 or wider. `fn` gets them as
        (about N/shards, ...).
        Gradient: of x and of the trainable parameters of `self` that `fn` uses, listed in `compute_params`
        or not; found in forward, scaled in backward. It cannot be differentiated twice.
        Raises: ValueError for shards < 1, another reduction, shapes that do not fit, an `fn` that returns
        more than one number, and trainable tensors that `fn` reaches past x and `self`; TypeError if `self`
        is no module.

        Source: §9.14; DeepSpeed `runtime/sequence_parallel/ulysses_sp.py::TiledFusedLogitsLoss` @ 0.19.8.
        Differs: DeepSpeed's mean is a mean of tile means; compute_params=None is a TypeError; each tile
        adds to `.grad` in forward, whatever is done with the loss, and not at all if x needs no gradient.
        """
        check_reduction(output_reduction, ("mean", "sum"))
        _check_owner(self, compute_params)
        _check_rows(x, y, mask)
        x, *others = (t.flatten(0, 1) for t in (x, y, mask) if t is not None)
        sizes = sizes_of(len(x), shards)
        loss, parameters = by_parameters(fn, self)
        work = TileLoss(loss, tuple(others), sizes, [1.0] * len(sizes))
        if output_reduction == "mean":
            counts = counted(x.shape[:1], others[:1], x.device)
            weights = weights_of(counts if mask is None else counts * others[1], sizes)
            work = replace(work, weights=weights, divisor=sum(weights))
        return loss_of_tiles(work, x, parameters)


def sequence_tiled_compute(
    fn: Callable[..., Tensor],
    seqlen: int,
    shards: int,
    kwargs_to_shard: Mapping[str, Tensor],
    kwargs_to_pass: Mapping[str, Any],
    grad_requiring_tensor_key: str,
    compute_params: Sequence[Tensor] | None = None,
    output_unshard_dimension: int = 1,
    output_reduction: Literal["mean", "sum"] | None = "mean",
) -> Tensor:
    """`fn(**kwargs_to_shard, **kwargs_to_pass)`, the former cut along dimension 1; backward runs it again.

    Outputs are joined along `output_unshard_dimension`, then reduced. Dimension 0 means that `fn` returns
    one number a tile: for "sum" a sum over its tokens, for "mean" a mean over them. That mean enters with
    the tile's share of the tokens, not counting those where a sharded integer tensor (B, T), such as
    labels, holds -100; `fn` is not called for a tile in which none counts, unless none counts anywhere. If
    `fn` averages over anything else, a mask for instance, let it return sums, ask for "sum", and divide.

    Shapes: each sharded tensor (B, T, ...) with T = seqlen. None returns outputs in their joined shape.
    Gradient: of every tensor that needs one. `grad_requiring_tensor_key` names the one which has to be
    there; `compute_params` is accepted and not needed.
    Raises: ValueError for shards < 1, an unknown reduction or key, lengths other than seqlen, and a mean of
    what is not one number a tile; TypeError for a sharded value that is no tensor.

    Source: §9.14; DeepSpeed `runtime/sequence_parallel/ulysses_sp.py::sequence_tiled_compute` @ 0.19.8.
    Differs: DeepSpeed's mean of numbers is a mean of tile means; its upstream gradient is changed in place,
    and only the named tensor gets a gradient through the graph; compute_params=None is a TypeError.
    """
    check_reduction(output_reduction, (None, "mean", "sum"))
    _check_kwargs(kwargs_to_shard, seqlen, grad_requiring_tensor_key)
    sizes = sizes_of(seqlen, shards)

    def run(*tile: Tensor) -> Tensor:
        return fn(**dict(zip(kwargs_to_shard, tile)), **kwargs_to_pass)

    tiles = list(zip(*(value.split(sizes, dim=1) for value in kwargs_to_shard.values())))
    if output_unshard_dimension == 0 and output_reduction == "mean":
        key = kwargs_to_shard[grad_requiring_tensor_key]
        counts = counted(key.shape[:2], list(kwargs_to_shard.values()), key.device)
        weights = weights_of(counts.sum(0), sizes)
        shares = [weight / sum(weights) for weight in weights]
        means = [share * one_number(checkpoint(run, *tile)) for share, tile in zip(shares, tiles) if share]
        return torch.stack(means).sum()
    outputs = [checkpoint(run, *tile) for tile in tiles]
    join = partial(torch.cat, dim=output_unshard_dimension) if output_unshard_dimension else torch.stack
    whole: Tensor = join(outputs)
    if output_reduction is None:
        return whole
    return whole.mean() if output_reduction == "mean" else whole.sum()


def _check_owner(owner: nn.Module, compute_params: Sequence[Tensor] | None) -> None:
    if not isinstance(owner, nn.Module):
        raise TypeError(f"self is a {type(owner).__name__}; give the module that owns the head (§9.14)")
    own = {id(parameter) for parameter in owner.parameters()}
    for parameter in compute_params or ():
        if id(parameter) not in own:
            raise ValueError(
                f"compute_params has a tensor of shape {tuple(parameter.shape)} that is no parameter of "
                f"{type(owner).__name__}; give as self the module that owns it (§9.14)"
            )


def _check_rows(x: Tensor, y: Tensor, mask: Tensor | None) -> None:
    if x.dim() < 2 or y.dim() < 2 or x.shape[:2] != y.shape[:2]:
        raise ValueError(
            f"x of shape {tuple(x.shape)} and y of shape {tuple(y.shape)} do not fit; both must begin with "
            f"the same (B, T) (§9.14)"
        )
    if mask is not None and mask.shape != x.shape[:2]:
        raise ValueError(
            f"a mask of shape {tuple(mask.shape)} does not fit x; it needs {tuple(x.shape[:2])} (§9.14)"
        )


def _check_kwargs(kwargs: Mapping[str, Tensor], seqlen: int, key: str) -> None:
    for name, value in kwargs.items():
        if not isinstance(value, Tensor):
            raise TypeError(f"{name} is a {type(value).__name__}; pass it in kwargs_to_pass (§9.14)")
    if key not in kwargs:
        raise ValueError(f"{key!r} is none of the tensors to shard, {list(kwargs)}; name one (§9.14)")
    shapes = {name: tuple(value.shape) for name, value in kwargs.items()}
    if any(len(shape) < 2 or shape[1] != seqlen for shape in shapes.values()):
        raise ValueError(
            f"tensors to shard of shapes {shapes} do not all have seqlen={seqlen} positions along "
            f"dimension 1; pass what is not cut in kwargs_to_pass (§9.14)"
        )
