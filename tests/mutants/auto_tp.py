"""§9.13 Faults of AutoTP: fused weights, shared rows, norms, biases, experts, ties, code that is read."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

from torch import nn

from ds_lite.tensor_parallel import auto_tp, fused_layer, placing, regions
from ds_lite.tensor_parallel.fused_layer import SharedQueryKeyValue, SharedRows
from ds_lite.tensor_parallel.fused_qkv import FusedLayout, Heads
from ds_lite.tensor_parallel.plan import Placement
from ds_lite.tensor_parallel.reading import block
from ds_lite.tensor_parallel.reading.values import Flowing, union
from mutants import Mutant, Patch, around, killed_by

MUTANTS: list[Mutant] = []

FAMILY = "tests/test_s09_13_families.py::test_a_cut_model_equals_the_whole_one"
USE = "tests/test_s09_13_auto_tp.py"


@killed_by(MUTANTS, f"{FAMILY}[gpt2-2]", "logits", section="9.13")
def fused_weights_cut_as_one_block() -> Patch:
    """Rank r takes the r-th block of the rows of a fused weight, whatever they are."""

    def rows(right: Any, self: FusedLayout, heads: Heads, ranks: int) -> Any:
        found = right(self, heads, ranks)
        if len(self.parts) == 1:
            return found
        widths = [sum(stop - start for start, stop in mine) for mine in found]
        starts = [sum(widths[:rank]) for rank in range(ranks)]
        return tuple(((start, start + width),) for start, width in zip(starts, widths, strict=True))

    return around(FusedLayout, "rows", rows)


@killed_by(MUTANTS, f"{FAMILY}[llama-4]", "gradient of .*(k|v)_proj", section="9.13")
def shared_rows_not_summed() -> Patch:
    """A key projection that ranks share keeps the gradient of its own heads."""
    return mock.patch.object(SharedRows, "_take_part", lambda self, group: self._ranges)


@killed_by(MUTANTS, f"{FAMILY}[gpt_bigcode-4]", "gradient of .*c_attn", section="9.13")
def shared_rows_of_a_fused_weight_not_summed() -> Patch:
    """The key and value rows that were split off a fused weight are taken for complete."""

    def take(right: Any, self: SharedQueryKeyValue, group: Any) -> Any:
        with mock.patch.object(fused_layer, "tag", lambda parameter, **tags: None):
            return right(self, group)

    return around(SharedQueryKeyValue, "_take_part", take)


@killed_by(MUTANTS, f"{FAMILY}[qwen3-2]", "gradient of .*(q|k)_norm", section="9.13")
def norms_of_heads_not_summed() -> Patch:
    """The norm of each head is taken for one on the stream, whose gradient is complete."""

    def place(right: Any, self: placing.Placer, placement: Placement) -> Any:
        return right(self, replace(placement, kind="whole") if placement.kind == "partial" else placement)

    return around(placing.Placer, "place", place)


@killed_by(MUTANTS, f"{FAMILY}[llama-2]", r"\(4, 10\) all-reduces", section="9.13")
def each_layer_enters_its_input_itself() -> Patch:
    """q, k and v each sum the gradient of their common input."""

    def enter(x: Any, group: Any, **_: Any) -> Any:
        return x if regions.is_alone(group) else regions._Enter.apply(x, group)

    return mock.patch("ds_lite.tensor_parallel.layers.enter", enter)


@killed_by(MUTANTS, f"{FAMILY}[gpt2-2]", "(?i)error", section="9.13")
def heads_are_not_told() -> Patch:
    """An attention goes on to split its part as if it were the whole."""
    return mock.patch.object(auto_tp, "keep_heads", lambda modules, heads, query, kv: None)


@killed_by(MUTANTS, f"{FAMILY}[bloom-2]", "(?i)error|logits", section="9.13")
def biases_of_all_heads_are_added() -> Patch:
    """ALiBi comes for all heads and is added to those of this rank."""
    return mock.patch.object(auto_tp, "cut_biases", lambda attention, num_heads, mine: None)


@killed_by(MUTANTS, f"{FAMILY}[t5-2]", "(?i)error|logits", section="9.13")
def a_bias_of_positions_stays_whole() -> Patch:
    """The table of relative positions keeps its columns of all heads."""
    return mock.patch.object(placing.Placer, "_add_biases", lambda self, region, heads, query: None)


@killed_by(MUTANTS, f"{FAMILY}[mixtral-2]", "all-reduces|gradient of .*gate", section="9.13")
def weights_of_the_routing_are_not_entered() -> Patch:
    """Each rank's experts send their part of the router's gradient back, and nobody adds them up."""
    right = auto_tp._entered

    def entered(value: Any, group: Any) -> Any:
        is_weights = isinstance(value, auto_tp.Tensor) and value.shape[-1] == 2
        return value if is_weights else right(value, group)

    return mock.patch.object(auto_tp, "_entered", entered)


@killed_by(
    MUTANTS, f"{USE}::test_b34_a_tied_output_layer_stays_tied[11-True]", "(?i)assert|differs", section="9.13"
)
def only_one_side_of_a_tie_is_cut() -> Patch:
    """The embedding keeps a weight of its own while the output layer is cut."""

    def cut(right: Any, module: nn.Module, placement: Placement, *rest: Any) -> Any:
        if placement.kind == "vocabulary":
            module.weight = nn.Parameter(module.weight.detach().clone())  # type: ignore[operator, union-attr]
            return module
        return right(module, placement, *rest)

    return around(auto_tp, "_cut", cut)


@killed_by(
    MUTANTS,
    f"{USE}::test_a04_an_optimizer_that_came_first_trains_every_live_parameter[gpt_bigcode]",
    "assert",
    section="9.13",
)
def split_parameters_are_not_trained() -> Patch:
    """What was split off a parameter is not in the optimizer that was built before."""
    return mock.patch("ds_lite.initialize.add_split_parameters", lambda model, optimizer: None)


@killed_by(
    MUTANTS,
    "tests/test_s09_13_operations.py::test_a_block_that_cannot_be_cut_is_refused_on_every_rank[the stream]",
    "0 of 2 ranks raised",
    section="9.13",
)
def meeting_the_stream_is_not_noticed() -> Patch:
    """What a layer computes may be multiplied with the stream and is cut all the same."""
    return mock.patch.object(block._Reader, "met", lambda self, values: union(values))


@killed_by(
    MUTANTS,
    "tests/test_s09_13_operations.py::test_a_block_that_cannot_be_cut_is_refused_on_every_rank[unheard_of]",
    "0 of 2 ranks raised",
    section="9.13",
)
def what_is_not_known_is_taken_for_harmless() -> Patch:
    """An operation that nobody listed leaves columns as they are."""

    def after(right: Any, name: str, args: Any, named: Any, x: Flowing, *rest: Any) -> Any:
        found = right(name, args, named, x, *rest)
        return x if isinstance(found, str) and found.startswith("nobody knows") else found

    return around(block, "after", after)


@killed_by(MUTANTS, f"{USE}::test_both_entries_lead_to_one_cut", "degree|assert|model", section="9.13")
def a_cut_model_brings_no_degree() -> Patch:
    """A model that tp_model_init has cut is trained as if every rank were a replica."""
    return mock.patch("ds_lite.initialize.with_degree_of_model", lambda model, config: config)


@killed_by(
    MUTANTS,
    "tests/test_s09_13_operations.py::test_what_a_block_gets_from_outside_has_its_whole_gradient",
    "bias",
    section="9.13",
)
def arguments_are_not_entered() -> Patch:
    """What a model learned and hands to its blocks gets each rank's part of its gradient."""
    return mock.patch.object(auto_tp, "enter_arguments", lambda block, names, group: None)
