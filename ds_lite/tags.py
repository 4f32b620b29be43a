"""What a layer says of its parameters: how the gradient is reduced, how the weight was cut (§9.1 §9.3).

The tags are read by `gradients.py`, which holds the table of their meaning. A `Cut` says which part of the
whole weight each rank of the tensor-parallel group keeps, so gradients and checkpoints can make it whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor, nn

from ds_lite import comm
from ds_lite.comm import ProcessGroup

Range = tuple[int, int]  # start and stop


@dataclass(frozen=True)
class Tags:
    """How one parameter's gradient is reduced; `gradients.py` has the table.

    An expert's `ep_size` says which expert groups count; 0 is unknown. `keeps_whole` takes a parameter out of
    ZeRO's sharding.
    """

    owner: Literal["dense", "expert"] = "dense"
    model: Literal["sharded", "full", "partial"] = "full"
    tied: str | None = None
    ep_size: int = 0
    keeps_whole: bool = False


def tags_of(parameter: nn.Parameter) -> Tags:
    """The tags of a parameter; dense, full and not tied unless a layer said otherwise."""
    tags: Tags = getattr(parameter, "_ds_lite_tags", Tags())
    return tags


def tag(parameter: nn.Parameter, **changes: str | int) -> None:
    """Change some of a parameter's tags, e.g. `tag(weight, tied="embedding")`."""
    parameter._ds_lite_tags = replace(tags_of(parameter), **changes)  # type: ignore[attr-defined, arg-type]


def leave_to_others(parameter: nn.Parameter) -> None:
    """Other ranks hold what this parameter stands for; an optimizer made earlier may still list it here."""
    parameter._ds_lite_is_elsewhere = True  # type: ignore[attr-defined]


def is_elsewhere(parameter: nn.Parameter) -> bool:
    """Whether a layer has left the parameter to other ranks."""
    return getattr(parameter, "_ds_lite_is_elsewhere", False)


@dataclass(frozen=True)
class Cut:
    """Along `dim`, rank r of `group` keeps the ranges `ranges[r]` of the whole weight, side by side.

    Every index of the whole dimension lies in exactly one range. A fused weight has several ranges a rank.
    """

    dim: int
    ranges: tuple[tuple[Range, ...], ...]
    group: ProcessGroup

    def width(self, rank: int) -> int:
        """How many indices of the dimension rank `rank` keeps."""
        return sum(stop - start for start, stop in self.ranges[rank])

    def whole_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape before the cut of a tensor that has `shape` after it."""
        sizes = list(shape)
        sizes[self.dim] = sum(self.width(rank) for rank in range(len(self.ranges)))
        return tuple(sizes)

    def take(self, whole: Tensor, rank: int) -> Tensor:
        """The part of a whole tensor that rank `rank` keeps; contiguous, with storage of its own."""
        parts = [whole.narrow(self.dim, start, stop - start) for start, stop in self.ranges[rank]]
        return torch.cat(parts, dim=self.dim)

    def gather(self, part: Tensor) -> Tensor:
        """The whole tensor on every rank of the group.

        Communication: one all-gather of the widest rank's part from each rank.
        """
        ranks = len(self.ranges)
        widest = max(map(self.width, range(ranks)))
        mine = part.movedim(self.dim, 0)  # the dimension that was cut comes first, so pieces are rows
        padded = mine.new_zeros((widest, *mine.shape[1:]))
        padded[: mine.shape[0]] = mine
        everyone = mine.new_empty((ranks * widest, *mine.shape[1:]))
        comm.all_gather_into_tensor(everyone, padded, group=self.group)
        whole = mine.new_empty((self.whole_shape(part.shape)[self.dim], *mine.shape[1:]))
        for rank, rows in enumerate(everyone.split(widest)):
            offset = 0
            for start, stop in self.ranges[rank]:
                whole[start:stop] = rows[offset : offset + stop - start]
                offset += stop - start
        return whole.movedim(0, self.dim).contiguous()


def cut_of(parameter: nn.Parameter) -> Cut | None:
    """How the parameter was cut; None if it is whole on this rank."""
    cut: Cut | None = getattr(parameter, "_ds_lite_cut", None)
    return cut


@torch.no_grad()
def cut(parameter: nn.Parameter, how: Cut) -> None:
    """Keep this rank's part of a whole parameter and tag it as sharded.

    The Parameter object stays the same, so an optimizer or a tie that holds it goes on with the part.
    """
    parameter.data = how.take(parameter.detach(), comm.get_rank(how.group))
    mark_cut(parameter, how)


def mark_cut(parameter: nn.Parameter, how: Cut) -> None:
    """Say how a parameter was cut that holds this rank's part already."""
    parameter._ds_lite_cut = how  # type: ignore[attr-defined]
    tag(parameter, model="sharded")


def whole(parameter: nn.Parameter, values: Tensor | None = None) -> Tensor:
    """The parameter (or `values`, of its shape) as it was before the cut, on every rank of the group.

    Communication: what `Cut.gather` does; nothing for a parameter that was not cut.
    """
    part = parameter.detach() if values is None else values
    how = cut_of(parameter)
    return part.clone() if how is None else how.gather(part)
