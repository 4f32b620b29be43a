"""§9.3 Faults of three dimensions: the model axis in the reduction table, ZeRO-2, layers that are cut."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

from torch import nn

from ds_lite import engine, gradients
from ds_lite.buckets import Bucket
from ds_lite.gradients import Gradients, Routes
from ds_lite.pipe import engine as pipe_engine
from ds_lite.tensor_parallel import layers, regions
from ds_lite.tensor_parallel.layers import LinearAllreduce
from ds_lite.zero import ShardedBucket
from mutants import Mutant, Patch, around, killed_by

MUTANTS: list[Mutant] = []

SMALL = "tests/test_s09_3_three_axes.py::test_two_ranks_on_an_axis_equal_one_process"
TP2, DP2, PP2_DP2 = (f"{SMALL}[{name}]" for name in ("tp2", "dp2", "pp2-dp2"))
REPORTS = "tests/test_s09_3_field_reports.py"


@killed_by(MUTANTS, TP2, r"attention.query_norm.weight on rank 1 differs from a lower rank's", section="9.3")
def parts_not_summed() -> Patch:
    """A gradient that is a part on each tensor-parallel rank stays a part."""
    return around(Routes, "of", lambda right, self, tags: replace(right(self, tags), partial=None))


@killed_by(MUTANTS, TP2, "gradient of .*: differs", section="9.3")
def whole_gradients_summed() -> Patch:
    """A gradient that is whole on each tensor-parallel rank is summed over them too."""

    def of(right: Any, self: Routes, tags: Any) -> Any:
        route = right(self, tags)
        return replace(route, partial=self._grid.group("model")) if tags.model == "full" else route

    return around(Routes, "of", of)


@killed_by(
    MUTANTS,
    f"{REPORTS}::test_a07_a_replicated_gradient_counts_once_in_the_norm[2]",
    r"13\.34\d*, expected 13\.0",
    section="9.3",
)
def replica_of_the_model_axis_counted() -> Patch:
    """Every tensor-parallel rank adds its copy of a replicated gradient to the norm."""
    return around(Routes, "of", lambda right, self, tags: replace(right(self, tags), is_counted=True))


@killed_by(MUTANTS, DP2, "gradient of .*: differs", section="9.1", zero=2)
def shard_overwritten() -> Patch:
    """With ZeRO-2 the last micro-batch's gradients replace what the shard had."""

    def scatter(right: Any, bucket: ShardedBucket) -> None:
        bucket.incoming = None
        right(bucket)

    return around(ShardedBucket, "scatter", scatter)


@killed_by(
    MUTANTS,
    PP2_DP2,
    "gradient of tied_modules.word.weight|tied_modules.word.weight on rank",
    section="9.1",
    zero=2,
    tied=True,
)
def tie_forgotten_on_the_shard() -> Patch:
    """With ZeRO-2 the gradients of a tie are gone into shards when it is to be summed, and are not."""
    return mock.patch.object(ShardedBucket, "sum_tied", lambda bucket: None)


class _Both:
    """Two patches as one."""

    def __init__(self, *patches: Patch) -> None:
        self._patches = patches

    def __enter__(self) -> None:
        for patch in self._patches:
            patch.__enter__()

    def __exit__(self, *error: Any) -> None:
        for patch in reversed(self._patches):
            patch.__exit__(*error)


@killed_by(
    MUTANTS,
    f"{REPORTS}::test_b13_a_failure_in_one_replica_is_raised_on_all[1]",
    "of 4 ranks raised ValueError",
    section="9.1",
    deadline=10.0,
)
def peers_are_not_told() -> Patch:
    """A replica that fails between two reduce-scatters leaves its peers waiting in the next one."""
    return mock.patch.object(Gradients, "leave", lambda self, error: None)


@killed_by(MUTANTS, TP2, "(loss|gradient) .*: differs", section="9.3")
def bias_added_by_every_rank() -> Patch:
    """A row-parallel layer adds its bias before the sum."""

    def forward(self: LinearAllreduce, x: Any) -> Any:
        return layers.leave(nn.functional.linear(x, self.weight, self.bias), self.group)

    return mock.patch.object(LinearAllreduce, "forward", forward)


@killed_by(MUTANTS, TP2, "1.weight on rank 1 differs from a lower rank's", section="9.3")
def input_gradient_not_summed() -> Patch:
    """Backward through a column-parallel layer gives each rank the gradient of its own columns only."""
    return mock.patch.object(regions._Enter, "backward", staticmethod(lambda ctx, *g: (g[0], None)))


@killed_by(
    MUTANTS,
    f"{REPORTS}::test_a07_different_data_is_refused_on_the_first_batch[engine-1-2]",
    "0 of 2 ranks raised ValueError",
    section="9.3",
)
def data_not_compared() -> Patch:
    """Tensor-parallel ranks train on whatever each was given."""
    return _Both(
        mock.patch.object(engine, "different_data", lambda *args: None),
        mock.patch.object(pipe_engine, "different_data", lambda *args: None),
    )


@killed_by(
    MUTANTS,
    f"{REPORTS}::test_a04_an_optimizer_of_replaced_parameters_is_refused[layer]",
    "0 of 2 ranks raised ValueError",
    section="9.3",
)
def stale_optimizer_accepted() -> Patch:
    """An optimizer that holds replaced parameters steps what nobody uses."""
    import importlib

    start = importlib.import_module("ds_lite.initialize")
    return mock.patch.object(start, "stale_parameters", lambda model, optimizer: None)


@killed_by(MUTANTS, TP2, "norm of step 0: differs", section="9.3", clip=0.5)
def norm_without_the_other_shards() -> Patch:
    """Each tensor-parallel rank counts what it holds, and the first of them speaks for all."""

    def counted(right: Any, bucket: Bucket) -> Any:
        return right(bucket) if bucket.route.is_counted and _is_first(bucket) else None

    def _is_first(bucket: Bucket) -> bool:
        return bool(gradients.comm.get_rank() == 0)

    return _Both(around(Bucket, "counted", counted), around(ShardedBucket, "counted", counted))
