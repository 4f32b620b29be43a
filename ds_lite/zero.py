"""ZeRO: optimizer states, then gradients, divided over the data axis (§9.1 §9.3).

The values of the parameters of one kind live in one flat buffer, cut into dp equal shards. The optimizer sees
this rank's shard and keeps states for nothing else; an all-gather brings the new values to everyone.

    stage 1   full gradients accumulate; a reduce-scatter a step gives each rank the average of its shard. A
              plain engine starts it in the last backward, for each bucket that is full, and for the others
              directly after it
    stage 2   every backward reduce-scatters a bucket as soon as it is full, adds the result to the shard and
              drops the bucket: one bucket is under way, or one for each parameter group where these
              interleave; with experts on several ranks all of them, until the backward is over. A step costs
              m reduce-scatters

With stage 1 the same bytes move as in an all-reduce of the gradients (gloo has only that, so there the
all-gather comes on top). A tie is summed over its stages before
the reduce-scatter in stage 1 and on the shard in stage 2; both are the same sum because the tied parameters
have a buffer of their own, with the same layout on every stage.

The optimizer's parameters are views of the shard, one per parameter that crosses it: a parameter without a
gradient is skipped there exactly as in one process, and an optimizer step stays a foreach over views.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ds_lite import comm
from ds_lite.buckets import Bucket, Piece, Route, versions
from ds_lite.comm import Work


class ShardedBucket(Bucket):
    """A bucket whose reduced gradients exist as this rank's shard only; `stage` is 1 or 2.

    `dtype` is that of the shard's values and of all accumulation, where it is not the parameters' own.

    stage 1   buffer -> begin -> _under_way -> _finish -> gradient, a part of _spent, which clear keeps
    stage 2   buffer -> scatter -> incoming, the sum over micro-batches -> finish_reduce -> gradient
    flags     seen, on this rank -> all-reduced by start_reduce -> _had, on any rank
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        route: Route,
        dtype: torch.dtype | None = None,
        *,
        stage: int,
    ) -> None:
        super().__init__(parameters, route, dtype)
        self.stage = stage
        self.keeps_views = self.keeps_views and stage == 1
        ranks, rank = comm.get_world_size(route.data), comm.get_rank(route.data)
        self.shard_size = -(-self.count // ranks)
        self.padding = self.shard_size * ranks - self.count
        self.start = rank * self.shard_size
        self.values = self._move_into_one_buffer()
        own = self._own(self.values)
        self.shard = own if own.dtype == self.dtype else own.to(self.dtype)
        self.pieces = self._cut()
        self._versions = versions(self.parameters)
        self.incoming: Tensor | None = None  # stage 2: sums of the micro-batches so far; then the flags
        self.gradient: Tensor | None = None  # of the shard, reduced
        self.when_full: Callable[[], None] | None = None  # told when a backward has brought every gradient
        self._under_way: tuple[Tensor, Any] | None = None  # stage 1: a reduce-scatter that was started
        self._spent: Tensor | None = None  # stage 1: the buffer that `gradient` is a part of
        self.is_eager = stage == 2 or (route.partial is None and route.tie is None)
        self._flags: tuple[Tensor, Any] | None = None
        self._arrived: set[int] = set()
        self._had = [False] * len(self.sizes)  # what an earlier reduction of this step has in the shard

    def _move_into_one_buffer(self) -> Tensor:
        values = self.parameters[0].detach().new_zeros(self.count + self.padding)
        for parameter, place in zip(self.parameters, values.split([*self.sizes, self.padding]), strict=False):
            _move(parameter, place)
        return values

    @torch.no_grad()
    def follow(self) -> None:
        """What somebody wrote into the parameters counts, also where he gave them another storage."""
        homes = self.values.split([*self.sizes, self.padding])
        changed = set()
        for index, (parameter, home) in enumerate(zip(self.parameters, homes, strict=False)):
            if parameter.data_ptr() != home.data_ptr() and parameter.numel():
                _move(parameter, home)
                changed.add(index)
            elif parameter._version != self._versions[index]:
                changed.add(index)
        for piece in self.pieces if self.dtype != self.values.dtype else ():
            if piece.index in changed:
                piece.target.copy_(homes[piece.index][piece.start : piece.stop])
        self._versions = versions(self.parameters)

    def _cut(self) -> list[Piece]:
        """One piece for each parameter that reaches into the shard."""
        pieces, offset = [], 0
        for index, size in enumerate(self.sizes):
            low, high = max(self.start, offset), min(self.start + self.shard_size, offset + size)
            if low < high:
                target = nn.Parameter(self.shard[low - self.start : high - self.start])
                pieces.append(Piece(index, low - offset, high - offset, target))
            offset += size
        return pieces

    # ------------------------------------------------------------------------------- during backward

    def arrive(self, index: int) -> None:
        self.take(index)
        self._arrived.add(index)
        if self.when_full is not None and self.is_full():
            self.when_full()

    def is_full(self) -> bool:
        """Every parameter's gradient has arrived since the last `forget_arrivals` or reduction."""
        return len(self._arrived) == len(self.parameters)

    def has_arrivals(self) -> bool:
        """Some gradient waits to be reduced."""
        return bool(self._arrived)

    def forget_arrivals(self) -> None:
        """Stage 1: count from here on which gradients a backward brings."""
        self._arrived.clear()

    def reduce_early(self) -> None:
        """During a backward, or directly after it."""
        if self.stage == 2:
            self.scatter()
        else:
            self.begin()

    def begin(self) -> None:
        """Stage 1: start to reduce what is here; `finish_reduce` waits for it.

        Communication: one reduce-scatter of the bucket, also when this rank has nothing for it.
        """
        self._finish()
        buffer = self._take_buffer()
        work = comm.reduce_scatter_in_place(buffer[: self.count + self.padding], self.route.data)
        self._under_way = buffer, work

    def _finish(self) -> None:
        """Wait for what was started; a second backward before the step adds to the first."""
        if self._under_way is None:
            return
        buffer, work = self._under_way
        work.wait()
        self._under_way = None
        if self.gradient is None:
            self._spent = buffer
        else:
            self._keep(buffer)
        self._add(self._own(buffer))

    def _add(self, shard: Tensor) -> None:
        shard.div_(self.route.divisor)
        self.gradient = shard if self.gradient is None else self.gradient.add_(shard)

    def scatter(self) -> None:
        """Stage 2: reduce-scatter what this backward brought, add it to the shard, drop the rest.

        Communication: one reduce-scatter of the bucket, also when this rank has nothing for it.
        """
        full = self._take_buffer()[: self.count + self.padding]
        comm.reduce_scatter_in_place(full, self.route.data).wait()
        if self.incoming is None:
            self.incoming = torch.cat([self._own(full), full.new_zeros(len(self.sizes))])
        else:
            self.incoming[: self.shard_size].add_(self._own(full))

    def _own(self, full: Tensor) -> Tensor:
        return full[self.start : self.start + self.shard_size]

    def _take_buffer(self) -> Tensor:
        """The buffer, out of the way of gradients that come later."""
        buffer = self._look_again()
        self.buffer, self._views = None, []
        self._arrived.clear()
        for parameter in self.parameters:
            parameter.grad = None
        return buffer

    # ----------------------------------------------------------------------------------- reductions

    def sum_tied(self) -> None:
        """Stage 1: on the full gradients. Stage 2: on the shard."""
        if self.stage == 1:
            super().sum_tied()
        elif self.route.tie is not None:
            self._sum_over(self.route.tie, self._shard_so_far())

    def _shard_so_far(self) -> Tensor:
        if self.incoming is None:
            room = self.shard_size + len(self.sizes)
            self.incoming = self.values.new_zeros(room, dtype=self.dtype)
        return self.incoming

    def start_reduce(self) -> None:
        """Sum what the model axis holds in parts, and start what `finish_reduce` waits for.

        Communication: stage 1 one reduce-scatter of the bucket, unless it was started before, stage 2 none;
        both one all-reduce of a flag per parameter, and one more (stage 2: of the shard) for partial ones.
        """
        self.follow()
        if self._under_way is None:
            buffer = self._look_again() if self.stage == 1 else self._shard_so_far()
            if self.route.partial is not None:
                self._sum_partial(buffer)
            if self.stage == 1:
                self.begin()
        # One more flag: something came too late for the reduce-scatter.
        seen = [*self.seen, self.stage == 1 and self.has_arrivals()]
        flags = torch.tensor(seen, dtype=torch.float32, device=self.values.device)
        self._flags = flags, comm.all_reduce(flags, group=self.route.data, async_op=True)

    def finish_reduce(self) -> None:
        """Each rank keeps the average of its shard; the full gradients are dropped.

        Communication: one more reduce-scatter if a gradient came too late for it on any rank.
        """
        if self.stage == 2:
            shard, self.incoming = self._shard_so_far()[: self.shard_size], None
            self._add(shard)
        self._finish()
        if self._read_late_flags():
            self.begin()
            self._finish()
        self.seen, self._has_reduced = list(self._had), True
        self._hand_out()

    def _read_late_flags(self) -> bool:
        """Who has a gradient anywhere; whether some rank has anything that was not reduced yet."""
        assert self._flags is not None
        flags, work = self._flags
        work.wait()
        *seen, has_more = (count > 0 for count in flags.tolist())
        self._had = [now or old for now, old in zip(seen, self._had, strict=True)]
        return has_more

    def _hand_out(self) -> None:
        assert self.gradient is not None
        sizes = [piece.stop - piece.start for piece in self.pieces]  # they lie side by side in the shard
        views = self.gradient.split([*sizes, self.shard_size - sum(sizes)])
        for piece, view in zip(self.pieces, views, strict=False):
            piece.target.grad = view if self.seen[piece.index] else None

    # -------------------------------------------------------------------------------- after reducing

    def counted(self) -> Tensor | None:
        """Every data rank owns its shard, unless another replica counts the whole bucket."""
        return self.gradient if self.route.is_counted else None

    def scale_(self, factor: Tensor) -> None:
        if self.gradient is not None:
            self.gradient.mul_(factor.to(self.dtype))

    @torch.no_grad()
    def publish(self) -> Work | None:
        """Start to bring every rank's stepped shard into the buffer that the parameters are views of.

        Communication: one all-gather of the bucket.
        """
        own = self._own(self.values)
        if self.shard.dtype != own.dtype:
            own.copy_(self.shard)
        return comm.all_gather_in_place(self.values, self.route.data)

    def full(self, parameter: nn.Parameter) -> Tensor | None:
        if self.gradient is None and self.stage == 1:
            return super().full(parameter)
        if self.gradient is None:
            raise RuntimeError(
                "with zero_optimization.stage=2 no rank has a whole gradient before the last micro-batch's "
                "backward; ask after it and before step() (§9.1)"
            )
        index = self._index_of(parameter)
        whole = self.gradient.new_empty(self.count + self.padding)
        if self.shard_size:
            comm.all_gather_into_tensor(whole, self.gradient, group=self.route.data)
        if not self.seen[index]:
            return None
        return whole.split([*self.sizes, self.padding])[index].view(parameter.shape)

    def clear(self) -> None:
        super().clear()
        self._keep(self._spent)
        if self.stage == 2:
            self._kept = None
        self.incoming = self.gradient = self._under_way = self._spent = None
        self._had = [False] * len(self.sizes)
        self._arrived.clear()


def _move(parameter: nn.Parameter, place: Tensor) -> None:
    """Let a parameter be a view of its place in the buffer, with the value it has."""
    place.copy_(parameter.detach().reshape(-1))
    parameter.data = place.view(parameter.shape)
