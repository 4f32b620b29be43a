"""§9.15 Faults of Domino: sums that are not waited for, not made, made twice, or given to another part."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from torch import Tensor
from torch.nn import functional as F

from ds_lite import comm
from ds_lite.domino import async_linear, attention, blocks, nests, transformer, trial, weights
from ds_lite.domino.async_linear import RowParallelLinearNoComm
from ds_lite.domino.attention import CoreAttention
from ds_lite.domino.weights import SharedWeights
from ds_lite.tensor_parallel import overlap, pending, sharded, turns
from ds_lite.tensor_parallel.pending import Pending
from mutants import Mutant, Patch, around, killed_by

MUTANTS: list[Mutant] = []

FILE = "tests/test_s09_15_domino.py"
LATE = f"{FILE}::test_b38_the_numbers_of_the_report[2-0]"
B38 = f"{FILE}::test_b38_the_numbers_of_the_report[2-None]"
OVERLAP = "tests/test_s09_15_overlap.py"
IN_ORDER = "test_weights_get_their_gradients_while_the_input_s_is_summed"
HARD = "test_regions_of_two_layers_frozen_weights_and_retained_graphs"
STACK = f"{FILE}::test_a_stack_in_parts_equals_one_process"


class _Never:
    """A handle that says at once that all is done."""

    def __init__(self, work: Any) -> None:
        self.work = work

    def wait(self) -> None:
        _late.append(self.work)


_late: list[Any] = []  # the real handles, so that nothing is freed under them


@killed_by(MUTANTS, LATE, r"y: differs|dL/dx: differs", section="9.15")
def sums_are_not_waited_for() -> Patch:
    """The sum is read when it is wanted, whether it is there or not."""

    def start(right: Any, self: Pending, key: Any, tensor: Tensor, group: Any) -> None:
        right(self, key, tensor, group)
        work, kept = self._under_way[key]
        self._under_way[key] = _Never(work), kept

    return around(Pending, "start", start)


@killed_by(MUTANTS, B38, r"dL/dx: differs", section="9.15")
def no_sum_in_backward() -> Patch:
    """The input's gradient stays that of one rank's columns: [3, 9] and [14, 28]."""

    def start(right: Any, self: Pending, key: Any, tensor: Tensor, group: Any) -> None:
        right(self, key, tensor, group if isinstance(key, tuple) and key[-1] == "forward" else None)

    return around(Pending, "start", start)


@killed_by(MUTANTS, B38, r"dL/dx: differs", section="9.15")
def a_sum_behind_the_sum() -> Patch:
    """The gradient of what is summed forward is summed too: [34, 74]."""

    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        total = gradients[0].clone()
        comm.all_reduce(total, group=ctx.group)
        return total, None, None, None

    right_forward = pending._Start.forward

    def forward(ctx: Any, x: Tensor, own: Pending, key: Any, group: Any) -> Tensor:
        ctx.group = group
        return right_forward(ctx, x, own, key, group)

    return mock.patch.multiple(pending._Start, forward=staticmethod(forward), backward=staticmethod(backward))


@killed_by(MUTANTS, f"{STACK}[2-normed residual-1-2-False]", r"gradient of .*differs", section="9.15")
def the_residual_takes_what_is_being_summed() -> Patch:
    """The normed residual shares the tensor whose gradient is still under way."""

    def half(self: Any, x: Tensor, norm: Any, inner: Any, row: Any, own: Pending, key: Any) -> Any:
        normed = pending.wait_in_backward(norm(x), own, key)
        yield
        y = pending.start_sum(row(inner(normed, key))[0], own, (*key, "forward"), self.group)
        yield
        y = pending.finish_sum(y, own, (*key, "forward"))
        y = y if row.bias is None else y + row.bias
        return (normed if self.residual_is_normed else x) + self.dropout(y)

    return mock.patch.object(transformer.DominoTransformerLayer, "_half", half)


@killed_by(MUTANTS, f"{STACK}[2-plain-4-2-True]", r"output: differs", section="9.15")
def the_mask_is_ignored() -> Patch:
    """Padding is attended to."""
    return mock.patch.object(CoreAttention, "_mask", lambda self, mask, q: None)


@killed_by(MUTANTS, f"{STACK}[2-groups-3-3-True]", r"differs|shape|expand|size", section="9.15")
def every_part_has_the_first_ones_mask() -> Patch:
    """Parts of the batch are masked as the first part is."""

    def first(mask: Tensor | None, sizes: list[int]) -> list[Tensor | None]:
        return [None if mask is None else mask[:size] for size in sizes]

    return mock.patch.object(transformer, "masks_of", first)


@killed_by(MUTANTS, f"{STACK}[2-gated-3-2-False]", r"differs", section="9.15")
def the_gate_is_left_out() -> Patch:
    """A gated MLP runs without its gate."""
    return mock.patch.object(
        transformer.DominoTransformerLayer, "activation", lambda self, x: F.gelu(x.chunk(2, dim=-1)[1])
    )


@killed_by(MUTANTS, f"{STACK}[2-gated-3-2-False]", r"differs", section="9.15")
def gate_and_up_in_one_piece() -> Patch:
    """The fused weight of a gated MLP is cut in the middle: rank 0 has the gate, rank 1 what it gates."""
    return mock.patch.object(transformer._Sizes, "_gate_and_up", lambda self, inner, ranks: None)


@killed_by(MUTANTS, f"{FILE}::test_b32_a_bias_before_the_sum_counts_once", r"assert|30", section="9.15")
def a_bias_on_every_rank() -> Patch:
    """The bias is added before the sum on each rank."""

    def forward(self: RowParallelLinearNoComm, x: Tensor, weights: Any = None) -> tuple[Tensor, None]:
        return F.linear(x, self.weight, self.bias), None

    return mock.patch.object(RowParallelLinearNoComm, "forward", forward)


@killed_by(MUTANTS, f"{FILE}::test_dropout_stops_in_eval", r"off in eval: differs", section="9.15")
def dropout_in_eval() -> Patch:
    """Attention drops in eval too."""

    def forward(right: Any, self: CoreAttention, *args: Any) -> Tensor:
        before, self.training = self.training, True
        try:
            y: Tensor = right(self, *args)
            return y
        finally:
            self.training = before

    return around(attention.CoreAttention, "forward", forward)


@killed_by(MUTANTS, f"{FILE}::test_a_sum_that_nobody_waits_for_is_noticed", r"DID NOT RAISE", section="9.15")
def nobody_looks_for_what_is_left() -> Patch:
    """A sum that was never waited for goes unnoticed."""
    return mock.patch.object(Pending, "watch_backward", lambda self: None)


@killed_by(MUTANTS, f"{STACK}[2-plain-4-2-True]", r"gradient of .*weight: differs", section="9.15")
def half_a_gradient_of_the_columns() -> Patch:
    """A column's weight gets half of its gradient, as if the parts were averaged."""

    def backward(right: Any, ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        of_x, of_weight, *rest = right(ctx, *gradients)
        return of_x, None if of_weight is None else of_weight * 0.5, *rest

    right = async_linear._Column.backward
    return mock.patch.object(
        async_linear._Column, "backward", staticmethod(lambda ctx, *g: backward(right, ctx, *g))
    )


@killed_by(MUTANTS, f"{FILE}::test_bytes_are_equal_and_messages_twice_as_many", r"assert", section="9.15")
def every_sum_twice() -> Patch:
    """A sum is made before the one that runs beside the computation."""

    def start(right: Any, self: Pending, key: Any, tensor: Tensor, group: Any) -> None:
        comm.all_reduce(tensor.clone(), group=group)
        right(self, key, tensor, group)

    return around(Pending, "start", start)


SWITCH = "tests/test_s09_15_switch.py"


RUN_WHOLE = f"{SWITCH}::test_blocks_whose_parts_give_something_else_run_whole"
CONTEXTS = f"{SWITCH}::test_contexts_inside_a_block_stay_with_their_part"


@killed_by(MUTANTS, f"{RUN_WHOLE}[samples]", "differs", section="9.15")
def parts_are_not_compared() -> Patch:
    """A block whose samples look at each other runs in parts, and gives something else."""
    return mock.patch.object(trial, "to_half_of_the_digits", lambda one, other: True)


@killed_by(MUTANTS, f"{RUN_WHOLE}[samples in training]", "differs", section="9.15")
def parts_are_compared_in_eval() -> Patch:
    """What a block does in training alone is not seen."""

    def in_eval(right: Any, block: Any, *args: Any) -> Any:
        block.eval()
        try:
            return right(block, *args)
        finally:
            block.train()

    return around(blocks, "try_parts", in_eval)


@killed_by(MUTANTS, f"{CONTEXTS}[no_grad]", "assert|differs|None", section="9.15")
def turns_change_inside_of_contexts() -> Patch:
    """The other part goes on with gradients switched off."""
    return _cleared(mock.patch.object(turns, "_surroundings", lambda: ()))


@killed_by(MUTANTS, f"{CONTEXTS}[a variable]", "assert|unset|Error", section="9.15")
def parts_forget_context_variables() -> Patch:
    """Inside of a part every context variable has its default."""
    return mock.patch.object(blocks, "copy_context", lambda: None)


@killed_by(
    MUTANTS,
    f"{SWITCH}::test_blocks_in_parts_equal_one_process[llama-4-2-0]",
    "differs|sums are made for each part",
    section="9.15",
)
def every_part_is_the_first_sample() -> Patch:
    """Each part starts again at the beginning of the batch."""

    def split(value: Any, samples: int, sizes: Any) -> list[Any]:
        if isinstance(value, Tensor) and value.dim() >= 2 and value.shape[0] == samples:
            return [value[:size] for size in sizes]
        return right(value, samples, sizes)

    right = nests.split
    return mock.patch.object(nests, "split", split)  # which calls itself for what is nested


@killed_by(
    MUTANTS,
    f"{SWITCH}::test_a_part_that_fails_leaves_nothing_behind",
    "assert|under way|differs|None",
    section="9.15",
)
def turns_go_on_after_a_failure() -> Patch:
    """A failed call leaves its parts as those that run."""

    @contextmanager
    def taken(self: turns.Turns) -> Iterator[None]:
        self._surroundings = turns._surroundings()
        turns._running.append(self)
        yield
        turns._running.pop()

    return _cleared(mock.patch.object(turns.Turns, "taken", taken))


@contextmanager
def _cleared(patch: Patch) -> Iterator[None]:
    try:
        with patch:
            yield
    finally:
        turns._running.clear()


@killed_by(MUTANTS, f"{FILE}::test_lanes_show_the_order_and_the_waiting", "assert", section="9.15")
def backward_waits_at_once() -> Patch:
    """A wait of backward comes right behind the start of its sum, and nothing is hidden there."""
    return mock.patch.object(Pending, "put_off", lambda self, node: None)


@killed_by(MUTANTS, f"{OVERLAP}::{IN_ORDER}[gpt2]", "assert", section="9.15")
def weights_at_once() -> Patch:
    """Both gradients come together: when the sum begins, the weights have theirs."""
    return mock.patch.object(sharded, "linear_overlapped", F.linear)


@killed_by(MUTANTS, f"{OVERLAP}::{HARD}", "differs|None", section="9.15")
def the_late_bias_is_forgotten() -> Patch:
    """Only the weight gets its gradient late; the bias gets none."""

    def backward(ctx: Any, *_: Any) -> tuple[Any, ...]:
        _, of_weight, _ = late(ctx)
        return None, of_weight, None

    late = overlap._Late.backward
    return mock.patch.object(overlap._Late, "backward", staticmethod(backward))


WEIGHTS = "tests/test_s09_15_weights.py"


@killed_by(MUTANTS, f"{WEIGHTS}::test_a_weight_that_others_use_too", r"differs", section="9.15")
@contextmanager
def sums_where_others_add_too() -> Iterator[None]:
    """Parts add to what autograd may have replaced: the weight's other uses come in between."""

    with (
        mock.patch.object(SharedWeights, "node", lambda self, weight: weight),
        mock.patch.object(weights, "_key_of", lambda node: tuple(node.shape)),
    ):
        yield


@killed_by(
    MUTANTS,
    f"{WEIGHTS}::test_a_backward_that_failed_leaves_nothing_to_the_next",
    r"NoneType|None|differs",
    section="9.15",
)
def sums_of_the_backward_before() -> Patch:
    """The last backward's sum is added to, though autograd has taken it away."""
    return mock.patch.object(async_linear.torch._C, "_current_graph_task_id", lambda: 7)


@killed_by(MUTANTS, f"{WEIGHTS}::test_parts_give_the_sum[2-1]", r"dL/d weight.*differs", section="9.15")
def the_second_part_is_lost() -> Patch:
    """Only the part that comes first counts."""

    def gradient(right: Any, self: SharedWeights, weight: Tensor, rows: Tensor, x: Tensor) -> Any:
        found = right(self, weight, rows, x)
        if found is not None:
            self._sums = {key: (number, total.clone()) for key, (number, total) in self._sums.items()}
        return found

    return around(SharedWeights, "gradient", gradient)
