"""THE reduction rules: who is summed over whom, divided by what, counted how often (§9.1 §9.3).

Each parameter carries three independent tags (`tags.py`), and nothing else decides:

    owner   dense      gradients are summed over the data axis (x seq) and divided by its size
            expert     summed over the ranks that hold the same expert (expert-data), and divided by the size
                       of data x seq all the same: the exchange's backward has summed over the expert group
    model   sharded    this rank holds a piece; nothing more to sum
            full       replicated, and the gradient is already complete on each rank
            partial    replicated, and each rank holds a part of the gradient: summed over the model axis
    tied    key        also summed over the stages that use it, before the data reduction

A gradient that is missing on one rank counts as zero. It stays None only if it is None on every rank;
the flags that decide this travel at the end of the buffer they belong to (`buckets.py`, `zero.py`).

The norm counts each element once: a shard where it lies, a replica on the lowest rank of its group, a tie on
its lowest stage.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from ds_lite import comm
from ds_lite.agreement import raise_together
from ds_lite.buckets import Bucket, Route
from ds_lite.comm import ProcessGroup
from ds_lite.expert_groups import ExpertGroups
from ds_lite.tags import Tags, tags_of, whole
from ds_lite.zero import ShardedBucket


class Grid(Protocol):
    """What the rules ask a grid, ours or a foreign one."""

    global_rank: int

    def size(self, *axes: str) -> int: ...
    def coordinate(self, axis: str) -> int: ...
    def group(self, *axes: str) -> ProcessGroup: ...
    def expert(self, ep_size: int) -> ExpertGroups: ...


@dataclass(frozen=True)
class Tie:
    """One tied key on this rank: the ranks that share it at equal other coordinates, lowest stage first."""

    key: str
    ranks: tuple[int, ...]
    group: ProcessGroup


class Routes:
    """From a parameter's tags to its groups, for one grid and the ties of one module."""

    def __init__(self, grid: Grid, ties: Sequence[Tie]) -> None:
        self._grid, self._ties = grid, {tie.key: tie for tie in ties}

    def of(self, tags: Tags) -> Route:
        """The row of the module's table that these tags select.

        Raises: ValueError for an expert of which nobody says in which groups it lives.
        """
        if tags.owner == "expert" and not tags.ep_size:
            raise ValueError(
                "parameters owned by an expert of another library are not reduced here, since nothing says "
                "which ranks hold the same expert; use ds_lite.moe.layer.MoE (§9.4)"
            )
        grid, tie = self._grid, self._ties.get(tags.tied) if tags.tied is not None else None
        is_expert = tags.owner == "expert"
        is_owner = tags.model == "sharded" or grid.coordinate("model") == 0
        return Route(
            data=grid.expert(tags.ep_size).data_group if is_expert else grid.group("data", "seq"),
            divisor=grid.size("data", "seq"),
            partial=grid.group("model") if tags.model == "partial" else None,
            tie=tie.group if tie is not None else None,
            is_counted=is_owner and (tie is None or tie.ranks[0] == grid.global_rank),
        )


class Gradients:
    """Reduce, norm, clip and clear the gradients of one engine.

    `buckets` together hold every trainable parameter once. `loss_scale` is what the loss was multiplied by;
    norms and whole gradients are reported without it. `waits_in_backward` says that some layer's backward
    talks to other data ranks.
    """

    def __init__(
        self,
        named: Iterable[tuple[str, nn.Parameter]],
        buckets: Sequence[Bucket],
        *,
        waits_in_backward: bool = False,
    ) -> None:
        self._all = dict(named)
        self._parameters = {name: p for name, p in self._all.items() if p.requires_grad}
        self._bucket_of = {id(p): bucket for bucket in buckets for p in bucket.parameters}
        self.buckets = list(buckets)
        self.loss_scale = 1.0
        missing = [name for name, p in self._parameters.items() if id(p) not in self._bucket_of]
        assert not missing, f"parameters in no bucket: {missing}"
        # Stages may meet the keys of ties in different orders, so all of them go by the sorted keys.
        tied = [bucket for bucket in self.buckets if bucket.route.tie is not None]
        self._tied = sorted(tied, key=lambda bucket: str(tags_of(bucket.parameters[0]).tied))
        self._eager = _Eager(self._as_they_fill(), waits_in_backward)

    def _as_they_fill(self) -> list[ShardedBucket]:
        """Sharded buckets in the order in which backward, from the last layer to the first, fills them."""
        place = {id(parameter): index for index, parameter in enumerate(self._all.values())}
        sharded = [bucket for bucket in self.buckets if isinstance(bucket, ShardedBucket)]
        return sorted(sharded, key=lambda b: min(place.get(id(p), -1) for p in b.parameters), reverse=True)

    def has_any(self) -> bool:
        """After `reduce`: whether any parameter has a gradient."""
        return any(any(bucket.seen) for bucket in self.buckets)

    def names(self) -> list[str]:
        """The trainable parameters of this rank, by their names in the module."""
        return list(self._parameters)

    def expect(self, num_micro_batches: int) -> None:
        """A batch begins whose backwards are agreed with the data peers, one by one (ZeRO-2)."""
        self._eager.expect(num_micro_batches)

    def start_early(self) -> None:
        """The backward that comes now is the last of a batch: reduce while it works, where possible (ZeRO-1).

        After it the caller calls `collect` and `reduce`, also if this rank had nothing to differentiate.
        """
        self._eager.open()

    def collect(self) -> None:
        """Take in what one backward left; every engine calls it after each backward (ZeRO-1, ZeRO-2).

        Communication: a reduce-scatter for each bucket that was not full during the backward.
        """
        self._eager.flush()

    def leave(self, error: Exception) -> None:
        """Tell the data peers, if they will wait for this rank in a reduction, that it gives up the batch."""
        self._eager.leave(error)

    def sum_tied(self) -> None:
        """Sum each tied module's gradients over the stages that use it."""
        for bucket in self._tied:
            bucket.sum_tied()

    def reduce(self) -> None:
        """Make every gradient whole over the model axis and average it over the data axis.

        Communication: see `start_reduce` of the buckets.
        Raises: ValueError for a parameter that became trainable after the engine was made.
        """
        late = [name for name, p in self._all.items() if p.requires_grad and id(p) not in self._bucket_of]
        if late:
            raise ValueError(
                f"{', '.join(late)} became trainable after initialize; set requires_grad before it, or make "
                f"a new engine (§9.1)"
            )
        for bucket in self.buckets:
            bucket.start_reduce()
        for bucket in self.buckets:
            bucket.finish_reduce()

    def norm(self) -> Tensor:
        """The 2-norm over all parameters of all ranks, each element counted once; float64, 0-dim.

        Communication: one all-reduce of one number over the world.
        """
        square = torch.zeros((), dtype=torch.float64, device=comm.device_of_this_rank())
        for bucket in self.buckets:
            if (counted := bucket.counted()) is not None:
                square += _sum_of_squares(counted)
        comm.all_reduce(square)
        return square.sqrt() / self.loss_scale

    def unscale_and_clip(self, max_norm: float, norm: Tensor) -> None:
        """Take the loss scale out, and shrink all gradients to a norm of at most `max_norm` (0: any)."""
        factor = torch.ones_like(norm)
        if max_norm > 0:
            factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        factor = factor / self.loss_scale
        if factor != 1:
            for bucket in self.buckets:
                bucket.scale_(factor)

    def publish(self) -> None:
        """Bring what the optimizer stepped into the parameters of every rank."""
        works = [bucket.publish() for bucket in self.buckets]
        for work in works:
            if work is not None:
                work.wait()

    def full(self, name: str) -> Tensor | None:
        """The whole gradient of one parameter of this rank's stage; None if no rank had one.

        Communication: all-gathers over the data axis under ZeRO and over the model axis for a parameter that
        was cut, so all these ranks ask together.
        """
        parameter = self._parameters[name]
        gradient = self._bucket_of[id(parameter)].full(parameter)
        return None if gradient is None else whole(parameter, gradient) / self.loss_scale

    def clear(self) -> None:
        """Forget all gradients, before the next step."""
        for bucket in self.buckets:
            bucket.clear()
        self._eager.expect(0)


class _Eager:
    """Reduce buckets during backward, in one order on all data ranks, whichever is full first.

    ZeRO-2 does so in every backward. Where an engine says how many of them a batch has, every scatter is
    agreed first: a replica that failed raises on its peers what it would otherwise hang them with. ZeRO-1
    does so in the backward after `open`, for the buckets that need no sum over other axes before.

    A scatter of ZeRO waits for all data ranks. Where a layer's backward waits for some of them too, a rank
    that lacks a gradient would be in the one while its peers are in the other: scatters come after backward.
    """

    def __init__(self, buckets: Sequence[ShardedBucket], waits_in_backward: bool) -> None:
        self._buckets = [bucket for bucket in buckets if bucket.is_eager]
        self._is_open = self._is_always_open = any(bucket.stage == 2 for bucket in buckets)
        self._next = self._awaited = 0
        if waits_in_backward:
            return
        itself = weakref.ref(self)
        for bucket in self._buckets:
            bucket.when_full = lambda: _advance(itself)

    def expect(self, num_backwards: int) -> None:
        self._next, self._is_open = 0, self._is_always_open
        self._awaited = num_backwards * len(self._buckets) if self._is_open else 0

    def open(self) -> None:
        if not self._is_always_open:
            self._next, self._is_open = 0, True
            for bucket in self._buckets:
                bucket.forget_arrivals()

    def advance(self) -> None:
        """Reduce the next buckets as far as they are full."""
        while self._is_open and self._next < len(self._buckets) and self._buckets[self._next].is_full():
            self._reduce_next()

    def flush(self) -> None:
        """After a backward: reduce what is left, full or not.

        Raises: RuntimeError with ZeRO-2 if a gradient arrived after its bucket was scattered.
        """
        while self._is_open and self._next < len(self._buckets):
            self._reduce_next()
        self._next, self._is_open = 0, self._is_always_open
        if self._is_open and any(bucket.has_arrivals() for bucket in self._buckets):
            raise RuntimeError(
                "a parameter got a gradient twice in one backward, as reentrant checkpointing does; with "
                "zero_optimization.stage=2 use non-reentrant checkpointing, ds_lite.checkpointing (§9.1)"
            )

    def _reduce_next(self) -> None:
        bucket = self._buckets[self._next]
        self._next += 1
        if self._awaited:
            self._awaited -= 1
            self._agree(None, bucket)
        bucket.reduce_early()

    def _agree(self, error: Exception | None, bucket: ShardedBucket) -> None:
        try:
            raise_together(error, group=bucket.route.data)
        except Exception:
            self._awaited = 0  # nobody of this group waits any more
            raise

    def leave(self, error: Exception) -> None:
        if self._awaited:
            bucket = self._buckets[self._next % len(self._buckets)]
            with suppress(Exception):  # the caller goes on to raise its own
                self._agree(error, bucket)


def _sum_of_squares(values: Tensor) -> Tensor:
    """In float64, or on a CPU float32 in parts that its cache holds, whose sums are added in float64.

    Sums that could have left float32's range, below or above, are taken again in float64.
    """
    if values.device.type == "cpu" and values.dtype == torch.float32:
        parts = values.split(2**16)
        total = torch.stack([torch.dot(part, part) for part in parts]).double().sum()
        if 1e-24 < total < 1e30:
            return total
    return torch.linalg.vector_norm(values, dtype=torch.float64).square()


def _advance(eager: weakref.ref[_Eager]) -> None:
    owner = eager()
    if owner is not None:
        owner.advance()
