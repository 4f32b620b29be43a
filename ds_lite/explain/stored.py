"""The bytes that one rank would hold, by kind, as buckets, shards and masters lay them out (§9.1 §9.3).

    ZeRO   parameters   gradients                                  optimizer state, masters
    0      all          a buffer as long as they                   for all
    1      all          the same buffer                            for this rank's shard
    2      all          the shard; in a backward a bucket more     for this rank's shard

With bf16 or fp16 gradients are summed in float32, and so are the masters. A buffer ends in one flag for each
parameter, and with ZeRO it is filled up to a multiple of the ranks. Activations are not told here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from ds_lite.buckets import group_by_kind
from ds_lite.config_keys import DSConfig
from ds_lite.explain.pieces import pieces_of
from ds_lite.explain.places import Group, Place
from ds_lite.optimizers import make_optimizer
from ds_lite.precision import master_dtype
from ds_lite.tags import Tags, tags_of


@dataclass(frozen=True)
class BucketSize:
    """One bucket as the engine would make it, seen from one rank of its `data` group.

    Units: elements. `dtype` is that of gradients and of what the optimizer steps.
    """

    tags: Tags
    data: Group
    shapes: tuple[tuple[int, ...], ...]
    stage: int
    held_dtype: torch.dtype
    dtype: torch.dtype

    @property
    def sizes(self) -> list[int]:
        return [torch.Size(shape).numel() for shape in self.shapes]

    @property
    def count(self) -> int:
        return sum(self.sizes)

    @property
    def shard(self) -> int:
        """The elements of one rank's shard, filled up."""
        return -(-self.count // self.data.size)

    @property
    def filled(self) -> int:
        """All elements, filled up to a multiple of the ranks with ZeRO."""
        return self.shard * self.data.size if self.stage else self.count

    @property
    def buffer(self) -> int:
        """A buffer of gradients, with its flags."""
        return self.filled + len(self.shapes)

    @property
    def stepped(self) -> int:
        """What the optimizer of this rank steps."""
        return self.shard if self.stage else self.count

    @property
    def has_masters(self) -> bool:
        return self.dtype != self.held_dtype

    def targets(self) -> list[nn.Parameter]:
        """What the optimizer would step, without values: whole parameters, or what lies in the shard."""
        shapes: list[tuple[int, ...]] = list(self.shapes)
        if self.stage:
            start, shapes, offset = self.data.place * self.shard, [], 0
            for size in self.sizes:
                low, high = max(start, offset), min(start + self.shard, offset + size)
                shapes += [(high - low,)] if low < high else []
                offset += size
        return [nn.Parameter(torch.empty(shape, dtype=self.dtype, device="meta")) for shape in shapes]


@dataclass(frozen=True)
class Stored:
    """Units: bytes. `passing` is the largest bucket of gradients that a backward of ZeRO-2 holds for a
    moment; `state` is None where nobody says which optimizer it is."""

    parameters: int
    gradients: int
    passing: int
    masters: int
    state: int | None

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.passing + self.masters + (self.state or 0)


def buckets_of(place: Place, pieces: Sequence[nn.Parameter] | None = None) -> list[BucketSize]:
    """The buckets of a rank, for an optimizer over all trainable parameters in one group."""
    config = place.job.config
    stage, limit = config.zero_optimization.stage, int(config.zero_optimization.reduce_bucket_size)
    trainable = [one for one in (pieces or pieces_of(place)) if one.requires_grad]
    found = []
    for run in group_by_kind(trainable, limit):
        tags = tags_of(run[0])
        shapes = tuple(tuple(one.shape) for one in run)
        dtype = master_dtype(run[0], config) or run[0].dtype
        found.append(BucketSize(tags, place.data(tags), shapes, stage, run[0].dtype, dtype))
    return found


def stored_on(place: Place) -> Stored:
    """What a rank holds between two steps, and its gradients at the end of a batch.

    Raises: ValueError for an optimizer that does not take these parameters, as `initialize`.
    """
    pieces = pieces_of(place)
    make_optimizer(nn.Module(), None, pieces, place.job.config)
    buckets = buckets_of(place, pieces)
    frozen = [one for one in pieces if not one.requires_grad]
    is_last = place.job.config.zero_optimization.stage == 2
    return Stored(
        sum(one.filled * one.held_dtype.itemsize for one in buckets)
        + sum(one.numel() * one.element_size() for one in frozen),
        sum((one.shard + len(one.shapes) if is_last else one.buffer) * one.dtype.itemsize for one in buckets),
        max((one.buffer * one.dtype.itemsize for one in buckets if is_last), default=0),
        sum(
            (one.shard if one.stage else one.count) * one.dtype.itemsize for one in buckets if one.has_masters
        ),
        state_bytes([target for one in buckets for target in one.targets()], place.job.config),
    )


def state_bytes(targets: list[nn.Parameter], config: DSConfig) -> int | None:
    """What the config's optimizer keeps beside its parameters: one step without values shows it.

    None for an optimizer that the config does not name, or that cannot step without values.
    """
    for target in targets:
        target.grad = torch.empty_like(target)
    try:
        optimizer = make_optimizer(nn.Module(), None, targets, config)
        if optimizer is None:
            return None
        optimizer.step()
    except (RuntimeError, NotImplementedError, ValueError):  # it looks at values
        return None
    kept = [value for state in optimizer.state.values() for value in state.values()]
    return sum(value.numel() * value.element_size() for value in kept if isinstance(value, torch.Tensor))
