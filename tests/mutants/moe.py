"""§9.4 §9.12 Faults of expert parallelism: groups, exchange, divisor, norm, gates, noise, checkpoints."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any
from unittest import mock

import torch

from ds_lite import comm, forming, grid
from ds_lite.buckets import Bucket
from ds_lite.engine import Engine
from ds_lite.gradients import Routes, _Eager
from ds_lite.moe import dispatch, gating, layer
from ds_lite.moe.clock import Clock
from ds_lite.moe.dispatch import Exchange
from ds_lite.moe.experts import Experts
from ds_lite.moe.gate import LargestOver
from ds_lite.moe.layer import MoE
from ds_lite.moe.mappings import _Drop
from ds_lite.saving import parts
from mutants import Mutant, Patch, around, killed_by

MUTANTS: list[Mutant] = []

EQUAL = "tests/test_s09_4_equality.py::test_experts_on_several_ranks_equal_one_process"
DP2, DP4, TP, PP = (f"{EQUAL}[{name}]" for name in ("dp2", "dp4", "dp2-tp2", "pp2-dp2"))
REPORTS = "tests/test_s09_4_field_reports.py"
SCRIPTS = "tests/test_s09_4_in_scripts.py"
B03 = f"{REPORTS}::test_b03_gradients_of_experts_do_not_depend_on_ep_size"
UNEVEN = f"{REPORTS}::test_ranks_may_have_other_numbers_of_tokens"

# ---------------------------------------------------------------------------------- whose gradients are whose


def _of(change: Any) -> Patch:
    """Routes.of with another route for experts."""

    def of(right: Any, self: Routes, tags: Any) -> Any:
        route = right(self, tags)
        return change(self, tags, route) if tags.owner == "expert" else route

    return around(Routes, "of", of)


@killed_by(MUTANTS, f"{B03}[2-0]", r"2\.0|3\.0", section="9.4")
def divided_by_the_copies() -> Patch:
    """Gradients of experts are averaged over the ranks that hold them, not over all that sent tokens."""
    return _of(lambda self, tags, r: replace(r, divisor=comm.get_world_size(r.data)))


@killed_by(MUTANTS, DP2, "gradient of .*experts|on rank 1 differs|experts", section="9.4", ep=2)
def experts_reduced_like_dense() -> Patch:
    """Gradients of different experts are added up, as if every rank held the same."""
    return _of(lambda self, tags, r: replace(r, data=self._grid.group("data", "seq")))


@killed_by(MUTANTS, DP4, r"on rank \d differs|gradient of .*experts", section="9.4", zero=2)
def copies_not_summed() -> Patch:
    """The copies of an expert in other expert groups keep their gradients to themselves."""
    return _of(lambda self, tags, r: replace(r, data=comm.new_group_of_one()))


@killed_by(MUTANTS, DP2, "norm of step 0: differs", section="9.4", ep=2, zero=0)
def norm_without_other_experts() -> Patch:
    """Rank 0 counts its experts in the norm, and nobody those of the other ranks."""

    def counted(right: Any, bucket: Bucket) -> Any:
        return right(bucket) if comm.get_rank() == 0 else None

    return around(Bucket, "counted", counted)


@killed_by(MUTANTS, TP, "on rank 1 differs|gradient of .*experts", section="9.4", ep=2, zero=1)
def shares_of_tokens_not_summed() -> Patch:
    """Whole experts under tensor parallelism keep the gradient of their rank's share of the tokens."""
    return _of(lambda self, tags, r: replace(r, partial=None))


@killed_by(MUTANTS, DP2, "gradient of 3.mixture.experts.1|None", section="9.4")
def idle_experts_are_skipped() -> Patch:
    """An expert without tokens is not called, so its gradient is missing and not zero."""

    def forward(self: Experts, rows: Any, counts: list[int]) -> Any:
        pieces = zip(self.values(), rows.split(counts), strict=True)
        outputs = [expert(piece) for expert, piece in pieces if len(piece)]
        return torch.cat(outputs) if outputs else rows

    return mock.patch.object(Experts, "forward", forward)


# -------------------------------------------------------------------------------------- groups and exchange


@killed_by(MUTANTS, f"{REPORTS}::test_b30_groups_stay_inside_a_stage[b]", "assert", section="9.4")
def groups_of_neighbours() -> Patch:
    """Expert groups are consecutive global ranks, whatever stage these are on."""

    def lists(right: Any, replicas: Any, *args: Any, **kwargs: Any) -> Any:
        ranks = sorted(rank for one in replicas for rank in one)
        width = len(replicas[0])
        return right([ranks[i : i + width] for i in range(0, len(ranks), width)], *args, **kwargs)

    return around(grid, "expert_rank_lists", lists)


@killed_by(MUTANTS, DP2, "loss of the first batch: differs", section="9.4", ep=2)
def rows_not_grouped_by_expert() -> Patch:
    """Rows that arrive are given to the local experts in the order of the peers."""

    def announce(right: Any, counts: Any, group: Any) -> Exchange:
        made = right(counts, group)
        return replace(made, by_expert=torch.arange(len(made.by_expert)))

    return mock.patch.object(
        Exchange, "announce", lambda c, g, right=Exchange.announce: announce(right, c, g)
    )


@killed_by(MUTANTS, f"{UNEVEN}[1-True]", "differs", section="9.12.4")
def gradient_not_exchanged_back() -> Patch:
    """Backward leaves the gradients of the rows where the experts are."""

    def backward(ctx: Any, *gradients: Any) -> Any:
        rows = gradients[0].new_zeros(sum(ctx.sent), gradients[0].shape[1])
        return None, rows, None, None, None

    return mock.patch.object(dispatch._AllToAll, "backward", staticmethod(backward))


@killed_by(MUTANTS, TP, "differs from a lower rank's", section="9.4", ep=2, zero=1)
def gradient_of_the_share_only() -> Patch:
    """What the gate and the layers below get is the gradient of this rank's share of the tokens."""

    def backward(ctx: Any, gradient: Any) -> Any:
        whole = gradient.new_zeros(ctx.cut.whole_shape(gradient.shape))
        ((start, stop),) = ctx.cut.ranges[comm.get_rank(ctx.cut.group)]
        whole[start:stop] = gradient
        return whole, None

    return mock.patch.object(_Drop, "backward", staticmethod(backward))


@killed_by(MUTANTS, TP, "gradient of .*experts", section="9.4", ep=2, zero=1)
def duplicates_are_exchanged() -> Patch:
    """Every tensor-parallel rank sends all tokens, and an expert learns from each of them twice."""

    def through(self: MoE, x: Any, routing: Any) -> Any:
        return dispatch.through_experts(x, routing, self.experts, self._exchange_group())

    return mock.patch.object(MoE, "_through_experts", through)


@killed_by(
    MUTANTS,
    f"{REPORTS}::test_a05_one_rank_an_expert_group_talks_to_nobody[True]",
    "AgreeOnCapacity",
    section="9.4",
    deadline=8.0,
)
def ranks_alone_agree_on_capacity() -> Patch:
    """With ep_size=1 the ranks of the world still agree on a capacity in each forward."""
    return around(layer, "largest_over", lambda right, group: right(torch.distributed.group.WORLD))


@killed_by(
    MUTANTS,
    f"{REPORTS}::test_a_nan_on_one_rank_is_named_on_all",
    "1 of 2 ranks raised",
    section="9.12",
    deadline=8.0,
)
def nan_is_not_told() -> Patch:
    """A rank whose logits are not numbers raises alone, and the others wait for its tokens."""
    return mock.patch.object(layer, "largest_over", lambda group: None)


@killed_by(
    MUTANTS,
    f"{REPORTS}::test_a_rank_that_cannot_route_does_not_keep_the_others_waiting[used_token]",
    "1 of 2 ranks raised",
    section="9.4",
    deadline=8.0,
)
def failure_before_the_gate_is_not_told() -> Patch:
    """A rank that cannot route raises alone, and the others wait for its tokens."""
    return mock.patch.object(LargestOver, "told", nullcontext)


@killed_by(
    MUTANTS,
    f"{REPORTS}::test_a_replica_that_fails_beside_an_exchange_says_why_and_leaves",
    "did not finish",
    section="9.4",
    deadline=8.0,
)
def replicas_agree_beside_an_exchange() -> Patch:
    """A replica that failed waits for the others at an agreement, and they for its tokens."""
    return mock.patch.object(grid.PipelineParallelGrid, "exchanges_tokens", False)


# ------------------------------------------------------------------------------------------------ the gates


@killed_by(MUTANTS, DP2, "differs", section="9.12.1")
def nothing_is_dropped() -> Patch:
    """Experts keep every token, whatever their capacity."""
    return mock.patch.object(gating, "_limit", lambda *args: None)


@killed_by(MUTANTS, DP2, "differs", section="9.12.1")
def capacity_rounded_down() -> Patch:
    """The capacity is the floor of tokens / experts * factor."""
    return around(gating, "expert_capacity", lambda right, *a, **k: max(0, right(*a, **k) - 1))


@killed_by(MUTANTS, DP2, "differs", section="9.12.3")
def l_aux_without_experts() -> Patch:
    """l_aux is a mean over the experts of products, without the factor E."""

    def loss(right: Any, gates: Any, *args: Any) -> Any:
        return right(gates, *args) / gates.shape[1]

    return around(gating, "load_balancing_loss", loss)


@killed_by(MUTANTS, DP2, "differs", section="9.12")
def weights_not_renormalised() -> Patch:
    """The weights of top-2 stay the bare probabilities."""
    return mock.patch.object(
        gating,
        "_renormalised",
        lambda logits, expert, kept: logits.softmax(1).gather(1, expert).masked_fill(~kept, 0),
    )


@killed_by(MUTANTS, DP2, "differs", section="9.12.2")
def second_choices_queue_with_first() -> Patch:
    """With top-2 a token's second choice queues before the next token's first."""
    return around(gating, "assign_slots", lambda right, *a, **k: right(*a, **{**k, "by_choice": False}))


# ---------------------------------------------------------------------------------- noise, settings, files


@killed_by(
    MUTANTS,
    f"{SCRIPTS}::test_noise_does_not_depend_on_the_layout[k1-RSample]",
    "dp2: differs|dp2",
    section="9.12.2",
)
def noise_by_local_micro_batch() -> Patch:
    """Every replica counts its micro-batches from zero, and meets the noise of replica 0."""

    def noise(right: Any, clock: Clock, *args: Any) -> Any:
        local = 4 // torch.distributed.get_world_size()
        return right(replace(clock, micro_batch=clock.micro_batch % local), *args)

    return around(Clock, "noise", noise)


@killed_by(
    MUTANTS,
    f"{SCRIPTS}::test_min_capacity_comes_from_the_layer_or_from_the_config",
    r"\[\[4, 2, 4\]\]",
    section="9.4",
)
def min_capacity_key_ignored() -> Patch:
    """zero_optimization.moe_min_capacity is read and changes nothing."""
    return mock.patch.object(MoE, "configure", lambda self, config: None)


@killed_by(MUTANTS, f"{SCRIPTS}::test_small_moe_layers_stay_out_of_sharding[1]", "assert", section="9.4")
def size_threshold_ignored() -> Patch:
    """moe_layer_size_threshold is read and changes nothing."""
    return mock.patch.object(MoE, "configure", lambda self, config: None)


@killed_by(
    MUTANTS,
    "tests/test_s09_4_saving.py::test_a_run_goes_on_from_its_own_checkpoint[dp4]",
    "experts",
    section="9.4",
)
def experts_of_rank_zero_saved() -> Patch:
    """Only the first rank of a stage writes, so the experts of the others are in no checkpoint."""
    return mock.patch.object(parts, "expert_names", lambda module: {})


# --------------------------------------------------------------------- replicas that do not do the same


@killed_by(
    MUTANTS,
    f"{SCRIPTS}::test_a_replica_may_lack_a_gradient_beside_an_exchange[2]",
    "(?i)ExchangeTokens|still ran|did not finish",
    section="9.4",
    deadline=10.0,
)
def scatter_beside_an_exchange() -> Patch:
    """ZeRO-2 scatters a full bucket while a replica that lacks a gradient of it waits for tokens."""

    def make(right: Any, eager: _Eager, buckets: Any, waits_in_backward: bool) -> None:
        right(eager, buckets, False)

    return around(_Eager, "__init__", make)


@killed_by(
    MUTANTS,
    f"{SCRIPTS}::test_a_loss_without_graph_is_refused_where_others_wait_for_its_exchange",
    "(?i)ExchangeTokens|still ran|did not finish",
    section="9.4",
    deadline=10.0,
)
def graphs_not_compared() -> Patch:
    """A replica whose loss has no graph leaves its peers waiting in the exchange."""
    return mock.patch.object(Engine, "_check_graph", lambda self, loss: None)


@killed_by(
    MUTANTS,
    f"{SCRIPTS}::test_the_experts_of_one_rank_may_be_frozen[0-trained]",
    "(?i)ExchangeTokens|still ran|did not finish",
    section="9.4",
    deadline=10.0,
)
def exchange_left_out_of_the_graph() -> Patch:
    """A rank that needs no gradient of an exchange does not take part in its way back."""
    return mock.patch.object(dispatch, "_anchor", lambda like: None)


@killed_by(
    MUTANTS,
    f"{SCRIPTS}::test_only_the_experts_of_one_rank_may_be_trained[0]",
    "no parameter has a gradient on any replica",
    section="9.4",
    deadline=10.0,
)
def each_rank_asks_itself_what_is_trained() -> Patch:
    """A rank whose experts are all frozen takes that for the whole model's state."""
    return mock.patch.object(grid.PipelineParallelGrid, "exchanges_tokens", False)


@killed_by(
    MUTANTS,
    f"{SCRIPTS}::test_other_ep_sizes_on_another_rank_are_refused",
    "0 of 2 ranks raised",
    section="9.4",
    deadline=10.0,
)
def ep_sizes_not_compared() -> Patch:
    """Ranks of one stage may have been built with other ep_sizes."""
    return mock.patch.object(forming, "_other_ep_sizes", lambda asked, stage: None)


@killed_by(
    MUTANTS,
    f"{SCRIPTS}::test_two_backwards_of_experts_in_one_buffer_are_refused",
    "0 of 2 ranks raised",
    section="9.4",
)
def reduced_experts_divided_again() -> Patch:
    """A second backward adds to gradients that were reduced, and all of it is divided once more."""

    def start(right: Any, bucket: Bucket) -> None:
        bucket._has_reduced = False
        right(bucket)

    return around(Bucket, "start_reduce", start)
