"""§9.1 §9.9.2 Faults of the reductions: ties, replicas, the norm, shards, missing gradients."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

from torch import Tensor

from ds_lite import comm
from ds_lite.buckets import Bucket
from ds_lite.engine import Engine
from ds_lite.gradients import Gradients, Routes, _Eager
from ds_lite.pipe.engine import PipelineEngine
from ds_lite.pipe.instructions import ReduceGrads, ReduceTiedGrads
from ds_lite.zero import ShardedBucket
from mutants import Mutant, Patch, around, killed_by
from mutants.pipeline import DP2, PP2

MUTANTS: list[Mutant] = []

MISSING = "tests/test_s09_1_missing_gradients.py::test_a_missing_gradient_counts_as_zero_unless_all_miss_it"


# -------------------------------------------------------------------------------------------------- ties

TIE = "tied_modules.word.weight"


@killed_by(MUTANTS, PP2, f"{TIE} on rank 1 differs", section="9.9.2", tied=True)
def tie_not_summed() -> Patch:
    """Each stage keeps its own gradient of a tied weight, and the copies drift apart."""
    return mock.patch.object(Gradients, "sum_tied", lambda self: None)


@killed_by(MUTANTS, PP2, f"gradient of {TIE}: differs", section="9.9.2", tied=True)
def tie_averaged() -> Patch:
    """The gradients of a tied weight are averaged over its stages, as if these were replicas."""

    def sum_tied(right: Any, bucket: Bucket) -> None:
        right(bucket)
        if bucket.route.tie is not None and bucket.buffer is not None:
            bucket.buffer.div_(comm.get_world_size(bucket.route.tie))

    return around(Bucket, "sum_tied", sum_tied)


@killed_by(MUTANTS, PP2, "norm of step 0: differs", section="9.9.2", tied=True)
def tie_counted_on_each_stage() -> Patch:
    """Every copy of a tied weight enters the norm."""
    return around(Routes, "of", lambda right, self, tags: replace(right(self, tags), is_counted=True))


@killed_by(MUTANTS, PP2, f"gradient of {TIE}", section="9.1", tied=True, zero=1)
def tie_summed_after_the_scatter() -> Patch:
    """ReduceGrads comes first: ZeRO has cut and dropped the gradients when the tie is to be summed."""

    def reduce(engine: PipelineEngine) -> None:
        engine.gradients.reduce()
        engine.gradients.sum_tied()

    wrong = {ReduceTiedGrads: lambda engine: None, ReduceGrads: reduce}
    return mock.patch.dict(PipelineEngine._INSTRUCTION_MAP, wrong)


# ------------------------------------------------------------------------------------- replicas and norm


@killed_by(MUTANTS, DP2, "gradient of 0.weight: differs", section="9.1")
def replicas_summed() -> Patch:
    """The gradients of the replicas are summed and not divided by their number."""

    return around(Routes, "of", lambda right, self, tags: replace(right(self, tags), divisor=1))


@killed_by(MUTANTS, DP2, "norm of step 0: differs", section="9.1", zero=0)
def replica_counted_in_the_norm() -> Patch:
    """Every replica adds its copy of the gradients to the norm."""

    def counted(right: Any, bucket: Bucket) -> Any:
        with mock.patch.object(comm, "get_rank", lambda group: 0):
            return right(bucket)

    return around(Bucket, "counted", counted)


@killed_by(MUTANTS, PP2, "norm of step 0: differs", section="9.1")
def norm_of_one_stage() -> Patch:
    """The norm covers the parameters of this rank only, so stages clip by different factors."""

    def norm(right: Any, gradients: Gradients) -> Any:
        with mock.patch.object(comm, "all_reduce", lambda *args, **kwargs: None):
            return right(gradients)

    return around(Gradients, "norm", norm)


@killed_by(MUTANTS, PP2, "norm of step 0: differs", section="9.1", clip=0.05)
def norm_after_clipping() -> Patch:
    """The reported norm is that of the clipped gradients, never above the limit."""

    def step(right: Any, engine: Engine, *args: Any) -> None:
        right(engine, *args)
        engine._norm = min(float(engine._norm or 0.0), engine.config.gradient_clipping)

    return around(Engine, "_take_optimizer_step", step)


@killed_by(
    MUTANTS, PP2, "after 2 steps: differs|of step 1: differs", section="9.1", clip=0.05, optimizer="SGD"
)
def clipping_forgotten() -> Patch:
    """gradient_clipping is read and nothing is clipped."""
    return mock.patch.object(Gradients, "unscale_and_clip", lambda self, max_norm, norm: None)


@killed_by(MUTANTS, DP2, "step 1: differs", section="9.1", zero=1)
def shard_not_gathered() -> Patch:
    """After a ZeRO step each rank has new values in its own shard only."""
    return mock.patch.object(ShardedBucket, "publish", lambda self: None)


@killed_by(MUTANTS, f"{MISSING}[pp1-dp2]", "differs from a lower rank's", section="9.1")
def missing_gradient_stays_missing() -> Patch:
    """A replica that did not use a parameter has no gradient for it after the reduction, the others have."""

    def reduce(right: Any, bucket: Bucket) -> None:
        missing = [parameter for parameter in bucket.parameters if parameter.grad is None]
        right(bucket)
        for parameter in missing:
            parameter.grad = None

    return around(Bucket, "finish_reduce", reduce)


@killed_by(MUTANTS, f"{MISSING}[pp1-dp2]", "gradient of 0.never", section="9.1")
def nothing_is_ever_missing() -> Patch:
    """A parameter that no rank used gets a gradient of zeros, and the optimizer decays it."""

    def write(bucket: Bucket, buffer: Tensor) -> None:
        buffer[-len(bucket.seen) :].fill_(1.0)

    return mock.patch.object(Bucket, "_write_flags", write)


# --------------------------------------------------------------------------- what scripts do between steps

USE = "tests/test_s09_1_engine_use.py"


@killed_by(MUTANTS, f"{USE}::test_a_backward_that_failed_leaves_no_trace", "a gradient twice", section="9.1")
def cursor_not_reset() -> Patch:
    """After a backward that broke off, ZeRO-2 goes on with the bucket at which it was."""

    def clear(right: Any, gradients: Gradients) -> None:
        with mock.patch.object(gradients._eager, "expect", lambda count: None):
            right(gradients)

    return around(Gradients, "clear", clear)


@killed_by(MUTANTS, f"{USE}::test_parameters_may_be_given_another_storage", "zero=1: differs", section="9.1")
def storage_not_followed() -> Patch:
    """A parameter that left the ZeRO buffer is stepped there, where nobody reads it."""
    return mock.patch.object(ShardedBucket, "follow", lambda self: None)


@killed_by(MUTANTS, f"{USE}::test_a_step_reduces_what_was_not_reduced", "zero=0 .*: differs", section="9.1")
def step_on_local_gradients() -> Patch:
    """step() trusts that somebody has averaged the gradients."""
    always = property(lambda engine: True, lambda engine, value: None)
    return mock.patch.object(Engine, "_has_reduced", always, create=True)


# -------------------------------------------------------------------------- what starts during a backward

EARLY = "tests/test_s09_1_zero_early.py"
CROSSING = f"{EARLY}::test_replicas_that_use_other_layers_equal_one_process[1-2]"


@killed_by(
    MUTANTS, f"{EARLY}::test_a_gradient_that_comes_late_is_still_counted[-1]", "late on", section="9.1"
)
def late_gradient_dropped() -> Patch:
    """What arrives after its bucket was sent is forgotten."""

    def read(right: Any, bucket: ShardedBucket) -> bool:
        right(bucket)
        return False

    return around(ShardedBucket, "_read_late_flags", read)


@killed_by(MUTANTS, CROSSING, "norm of step", section="9.1")
def buckets_sent_as_they_fill() -> Patch:
    """Whichever bucket is full is sent next, and another replica fills another one first."""

    def advance(right: Any, eager: _Eager) -> None:
        buckets = eager._buckets
        for index in range(len(buckets)):
            if eager._is_open and index >= eager._next and buckets[index].is_full():
                buckets[eager._next], buckets[index] = buckets[index], buckets[eager._next]
                right(eager)

    return around(_Eager, "advance", advance)


@killed_by(MUTANTS, CROSSING, "norm of step", section="9.1")
def old_gradients_left_in_the_buffer() -> Patch:
    """A buffer that is used again still holds the last step's gradient where this step has none."""

    def make(right: Any, bucket: Bucket) -> Any:
        buffer = right(bucket)
        bucket._filled = [True] * len(bucket._filled)
        return buffer

    return around(Bucket, "_make_buffer", make)


@killed_by(
    MUTANTS,
    f"{EARLY}::test_tensor_parallel_parts_in_a_plain_engine_equal_one_process[1]",
    "gradient of scale",
    section="9.3",
)
def parts_sent_before_their_sum() -> Patch:
    """A bucket whose gradients are parts on the model axis goes out as soon as it is full."""

    def make(right: Any, bucket: ShardedBucket, *args: Any, **options: Any) -> None:
        right(bucket, *args, **options)
        bucket.is_eager = True

    return around(ShardedBucket, "__init__", make)
