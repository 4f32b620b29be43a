"""§9.14 Faults of tiled computation: means of means, lost tiles, gradients scaled wrongly or twice."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import ExitStack, nullcontext
from typing import Any
from unittest import mock

import torch

from ds_lite.sequence import offload, tile_gradients, tiled, tiled_loss
from ds_lite.sequence.tile_gradients import TileLoss
from mutants import Mutant, Patch, around, killed_by

MUTANTS: list[Mutant] = []

TILED, GRAPH = "tests/test_s09_14_tiled.py", "tests/test_s09_14_tiled_graph.py"
EQUAL = f"{TILED}::test_a_tiled_loss_is_the_loss"
B08 = f"{TILED}::test_b08_a_mean_over_tiles_is_a_mean_over_tokens"
NOTHING = f"{TILED}::test_b08_a_group_without_a_label_has_zero_gradients"
MASKS = f"{TILED}::test_a_mask_counts_in_the_mean_also_where_it_is_empty"
UNUSED = f"{GRAPH}::test_a_parameter_that_is_not_used_gets_no_gradient_and_no_call"
SCALE = f"{GRAPH}::test_a_loss_scale_saves_small_gradients_of_a_mean"


# ------------------------------------------------------------------------------------- what a tile counts


@killed_by(MUTANTS, f"{B08}[TiledFusedLogitsLoss]", "mean over the valid tokens: differs", section="9.14")
def mean_of_tile_means() -> Patch:
    """Every tile weighs the same in the mean, however many tokens it has."""
    return mock.patch.object(tiled, "weights_of", lambda counts, sizes: [1.0] * len(sizes))


@killed_by(MUTANTS, f"{B08}[sequence_tiled_compute]", "mean over the valid tokens: differs", section="9.14")
def tokens_without_label_weigh() -> Patch:
    """A tile weighs by its tokens, with or without a label."""
    return mock.patch.object(
        tiled, "counted", lambda shape, tensors, device: torch.ones(shape, dtype=torch.float64)
    )


@killed_by(MUTANTS, f"{B08}[tiled_loss]", "mean over the valid tokens: differs", section="9.14")
def masked_positions_counted() -> Patch:
    """The sum of the losses is divided by all positions."""

    def total(right: Any, head: Any, hidden: Any, labels: Any, **options: Any) -> Any:
        return right(head, hidden, labels, **options)[0], torch.tensor(labels.numel())

    return around(tiled_loss, "tiled_loss_sum", total)


@killed_by(MUTANTS, f"{MASKS}[5]", "result: differs", section="9.14")
def weights_of_a_mask_taken_for_marks() -> Patch:
    """A position counts one or nothing, whatever the mask says."""
    return around(tiled, "weights_of", lambda right, counts, sizes: right((counts != 0).double(), sizes))


@killed_by(MUTANTS, f"{MASKS}[3]", "result: differs by inf", section="9.14")
def empty_tile_computed() -> Patch:
    """A tile in which nothing counts is computed, and 0 * 0/0 becomes its gradient."""

    def tiles(self: TileLoss, *columns: Any) -> Iterator[Any]:
        return zip(self.weights, zip(*(column.split(self.sizes) for column in (*columns, *self.others))))

    return mock.patch.object(TileLoss, "tiles", tiles)


@killed_by(MUTANTS, f"{EQUAL}[tiled_loss-all]", "result: differs", section="9.14")
def last_tile_dropped() -> Patch:
    """Of several tiles the last, the only one that may be narrower, is not computed."""

    def tiles(right: Any, self: TileLoss, *columns: Any) -> Iterator[Any]:
        every = list(right(self, *columns))
        return iter(every[:-1] or every)

    return around(TileLoss, "tiles", tiles)


@killed_by(
    MUTANTS, f"{GRAPH}::test_the_logits_of_all_positions_never_exist", "tiled_loss: 262144", section="9.14"
)
def one_tile_for_all() -> Patch:
    """The number of tiles is read and not used."""
    return mock.patch.object(tiled_loss, "sizes_of", lambda positions, tiles: [positions])


# ---------------------------------------------------------------------------------------------- gradients


@killed_by(MUTANTS, f"{EQUAL}[tiled_loss-uneven]", "gradient of the input: differs", section="9.14")
def upstream_ignored() -> Patch:
    """Backward hands out the gradients of forward, whatever comes from above."""
    return around(tile_gradients, "_scaled", lambda right, gradient, upstream, dtype: gradient.to(dtype))


@killed_by(
    MUTANTS,
    f"{GRAPH}::test_a_graph_that_is_kept_gives_the_same_twice[tiled_loss]",
    r"with 1\.0 from above: differs",
    section="9.14",
)
def scaled_in_place() -> Patch:
    """Backward multiplies the kept gradients themselves, unseen by autograd; a second starts from these."""
    return mock.patch.object(
        tile_gradients, "_scaled", lambda gradient, upstream, dtype: gradient.data.mul_(upstream).clone()
    )


@killed_by(MUTANTS, f"{EQUAL}[TiledFusedLogitsLoss-all]", "gradient of weight: differs", section="9.14")
def last_tile_trains_the_head() -> Patch:
    """A tile's gradient of the parameters replaces that of the tiles before."""
    return mock.patch.object(tile_gradients, "_added", lambda total, gradient: gradient)


@killed_by(MUTANTS, NOTHING, "differs by inf", section="9.14")
def nan_of_nothing_reaches_the_parameters() -> Patch:
    """Where no token of the group has a label, 0 * 1/0 becomes the gradient."""
    return mock.patch.object(torch, "where", lambda condition, this, other: this)


@killed_by(MUTANTS, f"{SCALE}[float16]", "found against expected gradient: differs", section="9.14")
def divided_where_gradients_meet_the_logits() -> Patch:
    """A tile enters with its share of the mean, not with its number of tokens."""

    def shared(work: TileLoss, *, weights: list[float], divisor: float) -> TileLoss:
        return dataclasses.replace(work, weights=[weight / divisor for weight in weights])

    return mock.patch.object(tiled, "replace", shared)


@killed_by(
    MUTANTS, f"{UNUSED}[TiledFusedLogitsLoss]", r"hooks of an unused parameter got \[None", section="9.14"
)
def every_parameter_in_the_graph() -> Patch:
    """The loss depends on all parameters of the module, also on those that it does not use."""

    def summed(right: Any, work: TileLoss, inputs: Any, needs: Any) -> Any:
        total, gradients = right(work, inputs, needs)
        return total, [torch.zeros(0) if found is None else found for found in gradients]

    def scaled(right: Any, gradient: Any, upstream: Any, dtype: Any) -> Any:
        return right(gradient, upstream, dtype) if gradient.numel() else None

    stack = ExitStack()
    stack.enter_context(around(tile_gradients, "_summed", summed))
    stack.enter_context(around(tile_gradients, "_scaled", scaled))
    return stack


@killed_by(
    MUTANTS,
    f"{GRAPH}::test_hooks_of_a_parameter_run_once_a_backward_with_the_whole_gradient[TiledFusedLogitsLoss]",
    "0 calls in 1 backwards",
    section="9.14",
)
def gradients_added_past_the_graph() -> Patch:
    """Forward adds to `.grad` itself, tile by tile; only the input is in the graph."""

    def summed(right: Any, work: TileLoss, inputs: Any, needs: Any) -> Any:
        total, (of_x, *of_sources) = right(work, inputs, needs)
        for source, found in zip(inputs[1:], of_sources):
            source.grad = found if source.grad is None else source.grad + found
        return total, [of_x]

    return around(tile_gradients, "_summed", summed)


# --------------------------------------------------------------------------------- what waits for backward


@killed_by(
    MUTANTS,
    f"{GRAPH}::test_the_inner_values_of_a_tiled_mlp_exist_for_one_tile",
    "kept from forward to backward",
    section="9.14",
)
def tiles_kept() -> Patch:
    """The MLP runs in tiles, and autograd keeps the inner values of them all."""
    return mock.patch.object(tiled, "checkpoint", lambda fn, *args: fn(*args))


@killed_by(
    MUTANTS,
    "tests/test_s09_14_offload.py::test_gradients_are_those_of_a_checkpoint_and_every_byte_is_counted",
    "every layer's input lies on the host",
    section="9.14",
)
def inputs_stay_on_the_device() -> Patch:
    """Offload is asked for, and nothing is moved."""
    return mock.patch.object(offload, "saved_tensors_hooks", lambda pack, unpack: nullcontext())


@killed_by(
    MUTANTS,
    "tests/test_s09_14_offload.py::test_slices_of_a_pipeline_wait_on_the_host_with_whole_tuples",
    "both of each layer's inputs lie on the host",
    section="9.14",
)
def tuples_stay_on_the_device() -> Patch:
    """Only tensors that are arguments themselves are moved, and what comes in a tuple is not."""
    stack = ExitStack()
    stack.enter_context(mock.patch.object(offload, "tree_flatten", lambda args: (args, None)))
    stack.enter_context(mock.patch.object(offload, "tree_unflatten", lambda leaves, nest: leaves))
    return stack
