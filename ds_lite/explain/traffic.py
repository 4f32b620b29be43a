"""Messages and bytes of one optimizer step, by axis, as the ledger counts them (§9.11 §9.3 §9.14).

Rows name axis and operation as `ledger.py` does, and bytes are what it calls payload: what is handed in. All
are those of a step after the first, in which ranks also compare their data.

Exact are: pipelines that `from_model` made, with all parameters trainable, one attention of equally wide
heads in each block, and without recomputation. Rows that are not say so.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from ds_lite.dealing import deal_heads
from ds_lite.explain.places import Place
from ds_lite.explain.stored import BucketSize, buckets_of
from ds_lite.explain.sums import sums_of
from ds_lite.forming import heads_of
from ds_lite.moe.spread import stacks_of
from ds_lite.precision import compute_dtype
from ds_lite.sequence.data import part_of

_HEADER = 64 * 8  # integers of a message's description
_FLAG = 4  # a flag travels as float32, a number of an agreement as int64
_NUMBER = 8


@dataclass(frozen=True)
class Row:
    """Calls of one operation on one axis in one step. Units: payload in bytes."""

    axis: str
    operation: str
    what: str
    calls: int
    payload: int
    is_exact: bool = True


@dataclass(frozen=True)
class Batches:
    """What a micro-batch looks like: sequences of `tokens`, with an attention mask or without."""

    tokens: int
    has_mask: bool = False


def traffic_of(place: Place, batches: Batches) -> list[Row]:
    """What a rank hands to `comm` in one step; rows without calls are left out.

    Raises: ValueError for a sequence of fewer tokens than ranks.
    """
    traffic = _Traffic(place, batches)
    found = [row for rows in traffic.all() for row in rows if row.calls]
    return [row for row in found if row.axis]


class _Traffic:
    """The numbers that all rows need."""

    def __init__(self, place: Place, batches: Batches) -> None:
        job = place.job
        assert job.is_known and job.model is not None
        self.place, self.job, self.batches, self.model = place, job, batches, job.model
        self.steps, self.samples = job.batch.gradient_accumulation_steps, job.batch.micro_batch_size
        self.sp, self.sp_rank = job.size("seq"), place.coordinates["seq"]
        self.lengths = part_of(batches.tokens, self.sp_rank, self.sp).lengths
        weights = (weight.dtype for weight in self.model.parameters() if weight.is_floating_point())
        self.dtype = compute_dtype(job.config) or next(weights, torch.get_default_dtype())
        self.wide = torch.promote_types(self.dtype, torch.float32).itemsize
        self.stage, self.num_stages = place.coordinates["pipe"], job.size("pipe")
        self.recomputes = job.hull is not None and job.config.pipeline.activation_checkpoint_interval > 0

    def all(self) -> Iterator[Iterator[Row]]:
        yield self.pipe()
        yield self.model_axis()
        yield self.exchanges()
        yield self.experts()
        yield self.loss()
        for bucket in buckets_of(self.place):
            yield self.reduction(bucket)
        yield self.agreements()

    @property
    def here(self) -> int:
        """The tokens of a micro-batch on this rank."""
        return self.samples * self.lengths[self.sp_rank]

    @property
    def is_last(self) -> bool:
        return self.stage == self.num_stages - 1

    # ------------------------------------------------------------------------------------------- pipe

    def pipe(self) -> Iterator[Row]:
        """Activations down, gradients up, each after a header; then the loss up, from stage to stage."""
        m = self.steps
        sides = ((self.stage - 1, "recv", "send", "previous"), (self.stage, "send", "recv", "next"))
        for boundary, down, up, which in sides:
            if not 0 <= boundary < self.num_stages - 1:
                continue
            tensors, gradients = self._across(boundary)
            what = f"{'to' if down == 'send' else 'from'} the {which} stage"
            back = f"{'to' if up == 'send' else 'from'} the {which} stage"
            yield Row("pipe", down, f"activations {what}", m * len(tensors), m * sum(tensors))
            yield Row("pipe", up, f"gradients {back}", m * len(gradients), m * sum(gradients))
            yield Row("pipe", up, f"the loss {back}", 1, self.wide)
            yield Row("pipe", f"{down}_header", "descriptions of activations", m, m * _HEADER)
            yield Row("pipe", f"{up}_header", "descriptions of gradients and loss", m + 1, (m + 1) * _HEADER)

    def _across(self, boundary: int) -> tuple[list[int], list[int]]:
        """Bytes of what travels over the end of a stage, tensor by tensor, and of the gradients for it."""
        hull, stages = self.job.hull, self.job.stages
        assert hull is not None and stages is not None
        layer, B = stages.bounds[boundary + 1], self.samples
        is_before = hull.changes_before and layer == 1  # the sequence is cut by what stands before the blocks
        tokens = B * self.batches.tokens if is_before else self.here
        hidden = tokens * self._width(layer) * self.dtype.itemsize
        mask = [B * self.batches.tokens * 8] if self.batches.has_mask else []
        positions = [self.batches.tokens * 8] if self.sp > 1 else []
        tensors, gradients = [hidden, *positions, *mask], [hidden]
        if hull.router is not None:
            sums = 2 * hull.router.num_experts * self.wide
            tensors.append(sums)
            gradients += [sums] if self._has_gates(layer) else []
        return tensors, gradients

    def _width(self, layer: int) -> int:
        """The width of hidden states before a layer."""
        hull, stages = self.job.hull, self.job.stages
        assert hull is not None and stages is not None
        ends = {1: hull.pieces.embedding, len(stages.layers) - 1: hull.pieces.head}
        if layer in ends:
            return int(hull.module(ends[layer]).weight.shape[1])  # type: ignore[union-attr, index]
        return int(self.model.config.hidden_size)  # type: ignore[union-attr, arg-type]

    def _has_gates(self, layer: int) -> bool:
        """Whether a router of some block before this layer has added to what travels."""
        hull = self.job.hull
        assert hull is not None and hull.router is not None
        blocks = list(hull.blocks)[: max(0, layer - 1 - hull.changes_before)]
        return any(isinstance(one, hull.router.kind) for block in blocks for one in block.modules())

    # ------------------------------------------------------------------------- inside the blocks

    def model_axis(self) -> Iterator[Row]:
        """AutoTP's sums in the layers of this stage."""
        sums = sums_of(self.job)
        if sums is None:
            yield Row("model", "all_reduce", "not known: it does not run on ids without values", 1, 0, False)
            return
        parts = 2 if self.job.config.tensor_parallel.domino and self.samples > 1 else 1
        rows: dict[tuple[str, str], list[int]] = {}
        for one in sums:
            if self._stage_of(one.module) == self.stage:
                tokens = self.samples * self.batches.tokens if one.is_whole else self.here
                rows.setdefault((one.operation, one.direction), []).append(one.per_token * tokens)
        for (operation, direction), payloads in rows.items():
            what = f"{direction} of layers that are cut" + (", in two parts" if parts > 1 else "")
            calls = self.steps * len(payloads) * parts
            is_exact = parts == 1 and not (self.recomputes and direction == "forward")
            yield Row("model", operation, what, calls, self.steps * sum(payloads), is_exact)

    def _stage_of(self, name: str) -> int:
        return 0 if self.job.hull is None else self.job.stages.stage_of(self._layer_of(name))  # type: ignore[union-attr]

    def _layer_of(self, name: str) -> int:
        """The layer of the pipeline that a module of the model belongs to."""
        hull, stages = self.job.hull, self.job.stages
        assert hull is not None and stages is not None
        last = len(stages.layers) - 1
        if name == hull.pieces.head:
            return last
        found = (
            layer
            for layer in range(last + 1)
            for start in stages.modules_of(layer).values()
            if f"{name}.".startswith(f"{start}.")
        )
        return next(found, last)

    def _blocks_here(self) -> list[str]:
        """The names of this stage's blocks."""
        if self.job.hull is None:
            number = getattr(getattr(self.model, "config", None), "num_hidden_layers", 0)
            return [str(index) for index in range(number)]
        names = [f"{self.job.hull.blocks_name}.{index}" for index in range(len(self.job.hull.blocks))]
        return [name for name in names if self._stage_of(name) == self.stage]

    def exchanges(self) -> Iterator[Row]:
        """Query, key and value to the ranks of their heads, what attention makes of them back; twice."""
        heads = heads_of(self.model)
        if self.sp == 1 or heads is None:
            return
        tp = deal_heads(*heads, self.job.size("model"))
        query, kv = (ranges[self.place.coordinates["model"]] for ranges in (tp.query, tp.kv))
        dealt = deal_heads(query[1] - query[0], kv[1] - kv[0], self.sp)
        counts = [(q[1] - q[0], k[1] - k[0]) for q, k in zip(dealt.query, dealt.kv, strict=True)]
        others = [rank for rank in range(self.sp) if rank != self.sp_rank]
        mine = self.lengths[self.sp_rank]
        theirs = sum(self.lengths[rank] for rank in others)
        q, k = counts[self.sp_rank]
        forward = mine * sum(counts[r][0] + 2 * counts[r][1] for r in others) + theirs * q
        backward = mine * sum(counts[r][0] for r in others) + theirs * (q + 2 * k)
        each = self.samples * self._head_width(heads[0]) * self.dtype.itemsize
        times = self.steps * len(self._blocks_here())
        is_exact = self.job.hull is not None
        what = "of attention: q, k, v, and back"
        yield Row("seq", "all_to_all", f"forward {what}", 2 * times, times * each * forward,
                  is_exact and not self.recomputes)  # fmt: skip
        yield Row("seq", "all_to_all", f"backward {what}", 2 * times, times * each * backward, is_exact)

    def _head_width(self, heads: int) -> int:
        config = self.model.config
        return int(getattr(config, "head_dim", None) or config.hidden_size // heads)  # type: ignore[union-attr, operator, arg-type]

    def experts(self) -> Iterator[Row]:
        """Counts and rows of the experts that `expert_parallel` spreads; how many come back is a guess."""
        size = self.job.config.expert_parallel.autoep_size
        if not self.job.config.expert_parallel.enabled or size == 1:
            return
        choices = int(getattr(self.model.config, "num_experts_per_tok", 1))  # type: ignore[union-attr, arg-type]
        for name, stack in stacks_of(self.model):
            if self._stage_of(name) != self.stage:
                continue
            number, width = stack.down_proj.shape[0], stack.down_proj.shape[1]  # type: ignore[union-attr, index]
            m, rows = self.steps, self.here * choices * int(width) * self.dtype.itemsize
            is_exact = not self.recomputes
            yield Row("expert", "all_to_all", "numbers of rows", m, m * int(number) * _NUMBER, is_exact)
            yield Row(
                "expert", "all_to_all", "rows to experts, gradients alike", 2 * m, 2 * m * rows, is_exact
            )
            even = "rows from experts, gradients alike"
            yield Row("expert", "all_to_all", even, 2 * m, 2 * m * rows, False)

    # ---------------------------------------------------------------------------- loss, gradients

    def loss(self) -> Iterator[Row]:
        """The last stage's loss: over a sequence's tokens, then over the replicas."""
        if not self.is_last:
            return
        m, is_exact = self.steps, self.job.hull is not None
        if self.sp > 1:
            yield Row("seq", "all_reduce", "the loss of a sequence", m, m * self.wide, is_exact)
        if not is_exact:
            return
        router = self.job.hull.router if self.job.hull is not None else None
        if self.sp > 1 and router is not None:
            yield Row("seq", "all_reduce", "sums of routers", m, m * 2 * router.num_experts * self.wide)
        if self._exchanges_tokens():
            replicas = self.place.group("data", "seq").axis
            yield Row(replicas, "all_reduce", "agreement before a backward", m, m * 2 * _NUMBER)
        if self.job.size("data") > 1:
            yield Row("data", "all_reduce", "the mean loss", 1, 8)

    def _exchanges_tokens(self) -> bool:
        return any(size > 1 for size in self.job.ep_sizes)

    def reduction(self, bucket: BucketSize) -> Iterator[Row]:
        """One bucket, from the sums before the average to the weights that come back."""
        axis, size, m = bucket.data.axis, bucket.dtype.itemsize, self.steps
        short = bucket.shard + len(bucket.shapes) if bucket.stage == 2 else bucket.buffer
        tie = self.place.tie(bucket.tags.tied) if bucket.tags.tied is not None else None
        if tie is not None and tie.size > 1:
            yield Row("tied", "all_reduce", "gradients of tied weights", 1, short * size)
        if bucket.tags.model == "partial" and self.job.size("model") > 1:
            yield Row("model", "all_reduce", "partial gradients", 1, short * size)
        if bucket.data.size == 1:
            return
        if bucket.stage == 0:
            yield Row(axis, "all_reduce", "gradients and flags", 1, bucket.buffer * size)
            return
        times = m if bucket.stage == 2 else 1
        if bucket.filled:
            yield Row(axis, "reduce_scatter", "gradients", times, times * bucket.filled * size)
            weights = bucket.filled * bucket.held_dtype.itemsize
            yield Row(axis, "all_gather", "weights", 1, weights)
        flags = (len(bucket.shapes) + 1) * _FLAG
        yield Row(axis, "all_reduce", "flags", 1, flags)
        if bucket.stage == 2 and self.job.hull is not None:
            yield Row(axis, "all_reduce", "agreements before gradients", m, m * 2 * _NUMBER)

    def agreements(self) -> Iterator[Row]:
        """What all ranks say to each other; the norm is one number."""
        if self.job.topology.world_size() == 1:
            return
        yield Row("world", "all_reduce", "the norm", 1, 8)
        if self.job.hull is not None:
            yield Row("world", "all_reduce", "agreements on data and on losses", 2, (6 + 2) * _NUMBER)
