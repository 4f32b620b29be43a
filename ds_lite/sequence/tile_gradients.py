"""The loss of many tiles, and its gradients while each tile's logits are there (§9.14.2).

A loss is linear in the gradient that comes from above. Forward can therefore differentiate each tile at
once, forget its logits and keep sums of the size of the input and of the parameters; backward multiplies
those by what comes. What got a gradient enters one autograd function, so the rest of the graph sees each
parameter used once: its hooks run once, with the whole gradient, and those of an unused one never.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.autograd.graph import saved_tensors_hooks
from torch.func import functional_call

IGNORED = -100  # the label of a position without one, in torch and in transformers


def sizes_of(positions: int, tiles: int) -> list[int]:
    """How many positions each tile has: as equal as can be, wider ones first, none empty.

    >>> sizes_of(7, 3), sizes_of(2, 5), sizes_of(0, 5)
    ([3, 2, 2], [1, 1], [0])
    """
    if not isinstance(tiles, int) or isinstance(tiles, bool):
        raise TypeError(f"the number of tiles is {tiles!r}; it must be an integer (§9.14)")
    if tiles < 1:
        raise ValueError(f"{tiles} tiles; choose 1 or more, at most one per position is used (§9.14)")
    tiles = max(1, min(tiles, positions))
    width, wider = divmod(positions, tiles)
    return [width + 1] * wider + [width] * (tiles - wider)


def counted(shape: torch.Size, tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """One for each position that has a label in every integer tensor of this shape, else zero."""
    counts = torch.ones(shape, dtype=torch.float64, device=device)
    for tensor in tensors:
        if tensor.shape == shape and not tensor.is_floating_point():
            counts = counts * (tensor != IGNORED)
    return counts


def weights_of(counts: Tensor, sizes: list[int]) -> list[float]:
    """What each tile counts in a mean over all that is counted; where nothing is, its positions.

    >>> weights_of(torch.tensor([1, 1, 1, 1, 0, 0]), [3, 3]), weights_of(torch.zeros(3), [2, 1])
    ([3, 1], [2, 1])
    """
    weights: list[float] = torch.stack([piece.sum() for piece in counts.split(sizes)]).tolist()
    if sum(weights):
        return weights
    return [*sizes] if sum(sizes) else [1]


@dataclass(frozen=True)
class TileLoss:
    """`loss(sources, x, *others)` is the loss of a tile; the whole is sum(weight * loss) / divisor.

    Division comes last, as a loss scale does in backward: the gradient of a mean over all positions is too
    small for float16 where it meets the logits, that of a weighted tile is as large as that of a sum.
    """

    loss: Callable[..., Tensor]
    others: tuple[Tensor, ...]
    sizes: list[int]
    weights: list[float]
    divisor: float = 1.0

    def tiles(self, *columns: Tensor) -> Iterator[tuple[float, tuple[Tensor, ...]]]:
        """Weight and pieces of `columns` and of the others, for each tile that has a weight."""
        pieces = zip(*(column.split(self.sizes) for column in (*columns, *self.others)))
        return ((weight, tile) for weight, tile in zip(self.weights, pieces) if weight)

    def part(self, weight: float, sources: Sequence[Tensor], *tile: Tensor) -> Tensor:
        """What a tile adds to the sum, in float32 or wider."""
        loss = one_number(self.loss(sources, *tile))
        return weight * loss.to(torch.promote_types(loss.dtype, torch.float32))


def one_number(loss: Tensor) -> Tensor:
    """The loss of a tile as a 0-dim tensor; ValueError if it is none."""
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        got = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else repr(loss)
        raise ValueError(f"the loss of a tile is {got}; fn must return one number, as a tensor (§9.14)")
    return loss.reshape(())


def by_parameters(
    fn: Callable[..., Tensor], owner: nn.Module
) -> tuple[Callable[..., Tensor], list[nn.Parameter]]:
    """`call(tensors, *args)`: fn(owner, *args) with these in the place of owner's trainable parameters."""
    bound = _Bound(fn, owner)
    names = [name for name, parameter in bound.named_parameters() if parameter.requires_grad]

    def call(tensors: Sequence[Tensor], *args: Tensor) -> Tensor:
        result: Tensor = functional_call(bound, dict(zip(names, tensors)), args)
        return result

    return call, [bound.get_parameter(name) for name in names]


class _Bound(nn.Module):
    """A function of a module as a module, for `functional_call`."""

    def __init__(self, fn: Callable[..., Tensor], owner: nn.Module) -> None:
        super().__init__()
        self.owner = owner
        self.call = partial(fn, owner)  # were fn a module, as an attribute it would bring its parameters

    def forward(self, *args: Tensor) -> Tensor:
        return self.call(*args)


def loss_of_tiles(work: TileLoss, x: Tensor, sources: Sequence[Tensor]) -> Tensor:
    """The loss of the whole, differentiable by `x` and by those `sources` that its loss uses.

    Shapes: x (N, ...), cut like each of work.others -> 0-dim, in float32 or wider.
    Raises: ValueError for a loss that is not one number, or that depends on other trainable tensors.
    """
    if torch.is_grad_enabled():
        for other in work.others:
            _refuse_trainable(other)
    inputs = [x, *sources]
    needs = [torch.is_grad_enabled() and tensor.requires_grad for tensor in inputs]
    total, gradients = _summed(work, inputs, needs)
    used = [(tensor, found) for tensor, found in zip(inputs, gradients) if found is not None]
    if used:
        total = _WithGradients.apply(total, [found for _, found in used], *(tensor for tensor, _ in used))
    return total / work.divisor


class _WithGradients(torch.autograd.Function):
    """A number whose gradient by each of some tensors is known already."""

    @staticmethod
    def forward(ctx: Any, total: Tensor, gradients: list[Tensor], *tensors: Tensor) -> Tensor:
        ctx.dtypes = [tensor.dtype for tensor in tensors]
        ctx.save_for_backward(*gradients)
        return total.clone()

    @staticmethod
    @once_differentiable  # type: ignore[misc]
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *map(_scaled, ctx.saved_tensors, [upstream] * len(ctx.dtypes), ctx.dtypes)


def _scaled(gradient: Tensor, upstream: Tensor, dtype: torch.dtype) -> Tensor:
    """Not in place: the graph may be kept and asked again."""
    wide = torch.promote_types(gradient.dtype, upstream.dtype)  # a loss scale does not fit float16
    return (gradient.to(wide) * upstream).to(dtype)


def _summed(
    work: TileLoss, inputs: Sequence[Tensor], needs: Sequence[bool]
) -> tuple[Tensor, list[Tensor | None]]:
    """The sum of all parts, and its gradient by each input, None where it has none."""
    # Stand-ins are differentiated, so that hooks of the real tensors wait for the real backward.
    stand_ins = [tensor.detach().requires_grad_(need) for tensor, need in zip(inputs[1:], needs[1:])]
    x = inputs[0].detach()
    of_sources: list[Tensor | None] = [None] * len(stand_ins)
    of_x = torch.zeros_like(x) if needs[0] else None
    parts, uses_x = [], False
    for weight, (x_tile, place, *others) in work.tiles(x, x if of_x is None else of_x):
        tile_inputs = [x_tile.detach().requires_grad_(needs[0]), *stand_ins]
        part, (of_tile, *found) = _differentiated(work, weight, tile_inputs, others)
        parts.append(part)
        if of_tile is not None:
            uses_x = True
            place.copy_(of_tile)
        of_sources = [_added(total, gradient) for total, gradient in zip(of_sources, found)]
    return torch.stack(parts).sum(), [of_x if uses_x else None, *of_sources]


def _differentiated(
    work: TileLoss, weight: float, inputs: list[Tensor], others: list[Tensor]
) -> tuple[Tensor, list[Tensor | None]]:
    """A tile's part of the sum, and its gradient by each input, None where it has none."""
    x, *stand_ins = inputs
    # A checkpoint or an offload around the whole thing must not lay hands on what lives in one tile only.
    with saved_tensors_hooks(_as_it_is, _as_it_is):
        part = work.part(weight, stand_ins, x, *others)
    _refuse_others(part, inputs)
    wanted = [tensor for tensor in inputs if tensor.requires_grad]
    gradients = torch.autograd.grad(part, wanted, allow_unused=True) if part.requires_grad else []
    found = dict(zip(map(id, wanted), gradients))
    return part.detach(), [found.get(id(tensor)) for tensor in inputs]


def _as_it_is(tensor: Tensor) -> Tensor:
    return tensor


def _added(total: Tensor | None, gradient: Tensor | None) -> Tensor | None:
    if gradient is None:
        return total
    if total is None:
        total = torch.zeros_like(gradient, dtype=torch.promote_types(gradient.dtype, torch.float32))
    return total.add_(gradient)


def _refuse_trainable(other: Tensor) -> None:
    if other.requires_grad:
        raise ValueError(
            f"a label or mask of shape {tuple(other.shape)} needs a gradient, and only x and the "
            f"parameters get one; detach it (§9.14)"
        )


def _refuse_others(loss: Tensor, known: list[Tensor]) -> None:
    """ValueError if the graph of `loss` ends at a tensor that would get no gradient from us."""
    ids, seen = {id(tensor) for tensor in known}, set()
    waiting = [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        waiting.extend(before for before, _ in node.next_functions)
        leaf = getattr(node, "variable", None) if type(node).__name__ == "AccumulateGrad" else None
        if leaf is not None and id(leaf) not in ids:
            raise ValueError(
                f"the loss of a tile uses a trainable tensor of shape {tuple(leaf.shape)} past x and past "
                f"the module that fn gets, and it would get no gradient; reach it through that module, or "
                f"detach it (§9.14)"
            )
