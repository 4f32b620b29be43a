"""ZeRO: optimizer states divided over the data axis (§9.1 §9.3).

Stage 1. The parameters of one kind live in one flat buffer, cut into dp equal shards. Gradients are
reduce-scattered, so that each rank receives the sum of its own shard only; the optimizer sees that shard
and keeps states for nothing else; an all-gather brings the new values to everyone. The same bytes move as
in an all-reduce of the gradients.

The optimizer's parameters become views of the shard, one per parameter that crosses it: a parameter without
a gradient is skipped there exactly as in one process, and an optimizer step stays a foreach over views.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ds_lite import comm
from ds_lite.comm import ProcessGroup
from ds_lite.gradients import Bucket, group_by_kind

_STATE_FROM_THE_START = ("Adagrad",)
# These look at whole matrices or at all parameters at once; on a shard they compute something else.
_NOT_ELEMENTWISE = ("LBFGS", "Adafactor", "Muon", "SparseAdam")


@dataclass
class Piece:
    """The part of one parameter that lies in this rank's shard; `shard` is a view that is optimized."""

    index: int
    start: int
    stop: int
    shard: nn.Parameter


class ShardedBucket(Bucket):
    """A bucket whose values are one flat buffer and whose reduced gradients exist as this rank's shard."""

    def __init__(self, parameters: Sequence[nn.Parameter], group: ProcessGroup, divisor: int) -> None:
        super().__init__(parameters, group, divisor)
        ranks, rank = comm.get_world_size(group), comm.get_rank(group)
        self.shard_size = -(-sum(self.sizes) // ranks)
        self.padding = self.shard_size * ranks - sum(self.sizes)
        self.start = rank * self.shard_size
        self.flat = self._move_into_one_buffer()
        self.pieces = list(self._cut(self.start, self.start + self.shard_size))
        self.gradient: Tensor | None = None
        self.seen = [0.0] * len(self.sizes)  # replicas that had a gradient, by parameter

    def _move_into_one_buffer(self) -> Tensor:
        first = self.parameters[0]
        flat = torch.zeros(sum(self.sizes) + self.padding, dtype=first.dtype, device=first.device)
        for parameter, place in zip(self.parameters, flat.split([*self.sizes, self.padding]), strict=False):
            place.copy_(parameter.detach().reshape(-1))
            parameter.data = place.view_as(parameter)
        return flat

    def _cut(self, start: int, stop: int) -> list[Piece]:
        pieces, offset = [], 0
        for index, size in enumerate(self.sizes):
            low, high = max(start, offset), min(stop, offset + size)
            if low < high:
                pieces.append(Piece(index, low, high, nn.Parameter(self.flat[low:high])))
            offset += size
        return pieces

    def reduce(self) -> None:
        """Each rank keeps the average of its shard; the full gradients are dropped.

        Communication: one reduce-scatter of the bucket and one all-reduce of a flag per parameter.
        """
        present = self.presence()
        comm.all_reduce(present, group=self.group)
        filler = self.flat.new_zeros(self.padding)
        full = torch.cat([*self.flat_gradients(), filler])
        for parameter in self.parameters:
            parameter.grad = None
        reduced = torch.empty(self.shard_size, dtype=full.dtype, device=full.device)
        comm.reduce_scatter_tensor(reduced, full, group=self.group)
        reduced.div_(self.divisor)
        seen = present.tolist()
        if self.gradient is not None:  # a second backward before the step adds to the first
            reduced += self.gradient
            seen = [max(new, old) for new, old in zip(seen, self.seen, strict=True)]
        self.gradient = reduced
        for piece in self.pieces:
            mine = self.gradient[piece.start - self.start : piece.stop - self.start]
            piece.shard.grad = mine if seen[piece.index] > 0 else None
        self.seen = seen

    def gather(self) -> None:
        """Bring every rank's updated shard into the flat buffer, which the parameters are views of."""
        mine = self.flat[self.start : self.start + self.shard_size].clone()
        comm.all_gather_into_tensor(self.flat, mine, group=self.group)

    def owned(self, is_owner: Callable[[nn.Parameter], bool]) -> list[Tensor]:
        """Every rank owns its shard, except of a tie that a lower stage owns."""
        return [
            piece.shard.grad
            for piece in self.pieces
            if piece.shard.grad is not None and is_owner(self.parameters[piece.index])
        ]

    def scale_(self, factor: Tensor) -> None:
        if self.gradient is not None:
            self.gradient.mul_(factor.to(self.gradient.dtype))

    def full(self, parameter: nn.Parameter) -> Tensor | None:
        if self.gradient is None:
            return super().full(parameter)
        whole = torch.empty_like(self.flat)
        comm.all_gather_into_tensor(whole, self.gradient, group=self.group)
        index = next(i for i, other in enumerate(self.parameters) if other is parameter)
        if not self.seen[index] > 0:
            return None
        return whole.split([*self.sizes, self.padding])[index].view_as(parameter).clone()

    def clear(self) -> None:
        super().clear()
        self.gradient = None
        for piece in self.pieces:
            piece.shard.grad = None


def shard_optimizer(
    optimizer: torch.optim.Optimizer, group: ProcessGroup, divisor: int
) -> list[ShardedBucket]:
    """Make `optimizer` own this rank's shards instead of whole parameters; its groups and options stay.

    Raises: ValueError for an optimizer that is not elementwise or that already has state.
    """
    name = type(optimizer).__name__
    if name in _STATE_FROM_THE_START:
        raise ValueError(
            f"optimizer {name} makes its state when it is built, before ZeRO can shard it; use "
            f"zero_optimization.stage 0 with it, or an optimizer such as AdamW (§9.1)"
        )
    if name in _NOT_ELEMENTWISE:
        raise ValueError(
            f"optimizer {name} does not act on each element alone, so it cannot work on ZeRO shards; "
            f"use zero_optimization.stage 0 with it, or an optimizer such as AdamW (§9.1)"
        )
    if optimizer.state:
        raise ValueError(
            f"optimizer {name} already holds state for {len(optimizer.state)} parameters; give initialize an "
            f"optimizer that has not stepped yet, or a function that builds one (§9.1)"
        )
    buckets: list[ShardedBucket] = []
    for param_group in optimizer.param_groups:
        trainable = [parameter for parameter in param_group["params"] if parameter.requires_grad]
        mine = [ShardedBucket(run, group, divisor) for run in group_by_kind(trainable)]
        param_group["params"] = [piece.shard for bucket in mine for piece in bucket.pieces]
        buckets += mine
    return buckets
