"""§9.12 Gates in the field: reports of users, limits, noise, memory, groups, refusals, DeepSpeed's names.

Guards against: survivors by accident of a sort, noise in evaluation, a gate that writes to its input, counts
after dropping, tensors of tokens x experts x capacity, and ranks that disagree on a width.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gate_cases import F64, GATES, NO_LIMIT, gates, logits_of, tight
from meter import LiveStorages
from tolerance import EXACT, FP32, LAW, assert_close, differs
from torch import Tensor

from ds_lite import comm
from ds_lite.moe.gate import TopKGate, largest_over, top1gating, top2gating, topkgating
from ds_lite.moe.gating import load_balancing_loss, route_top1, route_top2, route_topk
from ds_lite.moe.noise import Purpose, TokenNoise
from ds_lite.moe.queues import expert_capacity


def test_b26_top1_without_random_selection_drops_by_position():
    routing = route_top1(torch.tensor([[1.0, 0, 0, 0]] * 5), **tight())
    assert routing.capacity == 2
    assert routing.slot.flatten().tolist() == [0, 1, -1, -1, -1]
    assert routing.dropped.flatten().tolist() == [False, False, True, True, True]
    assert_close(routing.weight.flatten(), torch.tensor([0.47537, 0.47537, 0, 0, 0]), FP32)
    assert_close(routing.l_aux, torch.tensor(1.90147), FP32)
    assert routing.exp_counts.tolist() == [5, 0, 0, 0]
    assert not routing.combine_weights()[2:].any()


def test_b26_random_selection_keeps_the_capacity_and_favours_no_position():
    logits = torch.tensor([[1.0, 0, 0, 0]] * 1000)
    chances = torch.zeros(1000)
    sets = []
    for seed in range(40):
        again = []
        for _ in range(2):
            torch.manual_seed(seed)
            expert = top1gating(logits, 1.0, 0, use_rts=True, sparse_routes=True)[3]
            again.append(expert[0] >= 0)
        kept = again[0]
        assert torch.equal(*again) and int(kept.sum()) == 250
        chances += kept / 40
        sets.append(kept)
    assert len({tuple(kept.tolist()) for kept in sets}) == 40
    fifths = chances.view(5, 200).mean(1)
    assert (fifths - 0.25).abs().max() < 0.02, fifths  # 8000 draws each: a deviation of 0.005
    by_position = route_top1(logits, **tight()).kept.view(5, 200).float().mean(1)
    assert (by_position - 0.25).abs().max() > 0.5


def test_random_selection_leaves_the_kept_tokens_in_their_order():
    routing = route_top1(torch.zeros(9, 2), selection_noise=torch.rand(9), **tight(0.9, 0))
    slots = routing.slot.flatten()
    assert slots[slots >= 0].tolist() == list(range(routing.capacity)) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    "tokens,experts,k,factor,least,width",
    [
        *[
            (8, 2, 1, 4, 0, 16),
            (8, 2, 2, 2, 0, 16),
            (4, 2, 1, 1, 8, 8),
            (3, 4, 1, 8, 0, 6),
            (8, 4, 1, 1, 0, 2),
        ],
        *[(1, 4, 1, 1.0, 0, 1), (0, 4, 1, 1.0, 3, 3), (0, 4, 1, 1.0, 0, 0), (10, 4, 1, 1.25, 0, 4)],
        *[(10, 4, 2, 1.25, 0, 7), (10, 1, 1, 1.1, 0, 11), (1000, 3, 1, 1.2, 0, 400), (1, 1, 1, 1e-9, 0, 1)],
    ],
)
def test_b27_capacity_is_exact_and_may_exceed_the_tokens(tokens, experts, k, factor, least, width):
    options = tight(factor, least)
    assert expert_capacity(tokens, experts, choices=k, **options) == width
    logits = logits_of(tokens, experts)
    routings = [route_topk(logits, k, drop_policy=policy, **options) for policy in ("probs", "position")]
    routings.append(route_top1(logits, **options) if k == 1 else route_top2(logits, **options))
    for routing in routings:
        assert routing.combine_weights().shape == (tokens, experts, width)
        if width >= tokens:
            assert int(routing.kept.sum()) == k * tokens


def test_b28_evaluation_is_repeatable_and_equal_to_no_sampling():
    tokens = torch.randn(13, 6)
    before = tokens.clone()
    gate, twin = (TopKGate(6, 4, k=2, eval_capacity_factor=2.0, min_capacity=0) for _ in range(2))
    twin.load_state_dict(gate.state_dict())
    twin.top2_2nd_expert_sampling = False
    calls = [gate.eval()(tokens) for _ in range(4)]
    plainly = twin.eval()(tokens)
    for call in calls:
        assert all(torch.equal(a, b) for a, b in zip(call, plainly))
    assert calls[0][1].shape[2] == 13  # 2 * 13 / 4 * 2: the factor for evaluation
    gate.train()
    by_seed = []
    for seed in (0, 1, 0):
        torch.manual_seed(seed)
        by_seed.append(gate(tokens))
    assert by_seed[0][1].shape[2] == 7
    assert torch.equal(by_seed[0][1], by_seed[2][1]) and differs(by_seed[0][1], by_seed[1][1])
    assert torch.equal(tokens, before)


@pytest.mark.parametrize("policy", ["RSample", "Jitter"])
def test_b28_noisy_policies_are_for_training(policy):
    tokens, noises = torch.randn(13, 6), [TokenNoise(s, 0, 0, torch.arange(13)) for s in (0, 1)]
    before = tokens.clone()
    gate = TopKGate(6, 4, noisy_gate_policy=policy, min_capacity=0)
    silent = TopKGate(6, 4, min_capacity=0, use_rts=False)
    silent.load_state_dict(gate.state_dict())
    state = torch.get_rng_state()
    trained = [gate(tokens, noise=noise)[1] for noise in (*noises, noises[0])]
    assert torch.equal(trained[0], trained[2])
    assert differs(trained[0], trained[1])
    quiet = [gate.eval()(tokens, noise=noise)[1] for noise in noises]
    assert torch.equal(quiet[0], quiet[1]) and torch.equal(quiet[0], silent(tokens)[1])
    assert torch.equal(torch.get_rng_state(), state), "given noise, torch's generator is not asked"
    assert torch.equal(tokens, before)


@gates
def test_a_gate_writes_to_none_of_its_arguments(name):
    logits = logits_of(9, 5)
    before, version = logits.clone(), logits._version
    GATES[name][0](logits, **tight(0.5))
    assert torch.equal(logits, before) and logits._version == version


B29 = torch.tensor([[0.1, 0.9, 0.2], [0.8, 0.1, 0.3], [0.4, 0.6, 0.5], [0.7, 0.2, 0.1]])


def test_b29_l_aux_counts_first_choices_and_exp_counts_all_of_them():
    one, two = route_top1(B29, **tight()), route_top2(B29, **tight())
    for routing in (one, two):
        assert abs(routing.l_aux.item() - 1.0761) < 5e-5
    assert two.exp_counts.tolist() == [2, 3, 3]
    assert one.exp_counts.tolist() == [2, 2, 0]
    shares, first = B29.softmax(1).mean(0), one.exp_counts / 4
    assert abs((shares * first).mean().item() - 0.1196) < 5e-5  # the wrong ones are far away
    assert abs(3 * (shares * two.exp_counts / 4).sum().item() - 1.9742) < 5e-5


@pytest.mark.parametrize(
    "factor,capacity,first", [(1.0, 3, [0.6682, 0.6225, 0.5250, 0.6225]), (0.5, 2, [0.6682, 0.6225, 1, 1])]
)
def test_b29_weights_are_renormalised_after_dropping(factor, capacity, first):
    routing = route_top2(B29, **tight(factor))
    assert routing.capacity == capacity
    assert (routing.weight[:, 0] - torch.tensor(first)).abs().max() < 5e-5
    assert routing.exp_counts.tolist() == [2, 3, 3]


def test_l_aux_of_the_examples():
    gates = torch.tensor([[0.51, 0.49], [0.51, 0.49], [0.0, 1.0]])
    routing = route_top1(gates.log(), **tight(2.0))  # the logit of a gate of zero is -inf
    assert abs(routing.l_aux.item() - 0.893) < 5e-4
    assert_close(routing.weight.flatten(), torch.tensor([0.51, 0.51, 1.0]), FP32)
    balanced = torch.eye(4) * 1e-3
    assert abs(route_top1(balanced, **tight()).l_aux.item() - 1) < 1e-6
    collapsed = torch.tensor([[200.0, 0, 0, 0]] * 6)
    assert_close(route_top1(collapsed, **tight()).l_aux, torch.tensor(4.0), EXACT)
    quarter = torch.tensor([[0.5, 0.5]] * 3 + [[0.0, 1.0]], dtype=F64)
    assert_close(load_balancing_loss(quarter, torch.tensor([3, 1])), torch.tensor(0.875, dtype=F64), LAW)


# --------------------------------------------------------------------------------------- numbers and limits


@gates
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, F64])
def test_gating_is_done_in_float32_or_wider(name, dtype):
    logits = logits_of(9, 5, dtype=dtype).requires_grad_()
    routing = GATES[name][0](logits, **tight())
    wide = F64 if dtype == F64 else torch.float32
    assert routing.weight.dtype == routing.l_aux.dtype == wide
    assert routing.exp_counts.dtype == routing.slot.dtype == routing.expert.dtype == torch.int64
    (routing.weight.sum() + routing.l_aux).backward()
    assert logits.grad.dtype == dtype


def test_the_module_scores_in_float32_under_autocast_and_with_half_weights():
    gate, tokens = TopKGate(6, 4).eval(), torch.randn(5, 6)
    truth = tokens @ gate.wg.weight.T
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert differs(gate.wg(tokens), truth)
        assert_close(gate.scores(tokens), truth, FP32)
    half = TopKGate(6, 4).to(torch.bfloat16)
    assert half.scores(tokens.to(torch.bfloat16)).dtype == torch.float32
    assert TopKGate(6, 4).double().scores(tokens.double()).dtype == F64


@gates
@pytest.mark.parametrize("tokens", [0, 1])
def test_no_token_and_one_token(name, tokens):
    logits = logits_of(tokens, 5).requires_grad_()
    for options in (tight(), NO_LIMIT, tight(0.0)):
        routing = GATES[name][0](logits, **options)
        (gradient,) = torch.autograd.grad(routing.l_aux + routing.weight.sum(), logits)
        assert gradient.shape == logits.shape and gradient.isfinite().all()
        assert routing.expert.shape == routing.slot.shape == routing.weight.shape
        if not tokens:
            assert routing.l_aux.item() == 0 and not routing.exp_counts.any()
        assert routing.combine_weights().shape == (tokens, 5, routing.capacity)


def test_a_survivor_has_all_the_weight_even_if_it_was_unlikely():
    logits = torch.tensor([[200.0, 100.0, 0.0], [200.0, 0.0, 100.0]])  # e^-100 and less is no float32
    routing = route_top2(logits, **tight(0.75))
    assert routing.capacity == 1
    assert routing.slot.tolist() == [[0, 0], [-1, 0]]  # token 1 has its second choice alone
    assert_close(routing.weight, torch.tensor([[1.0, 0.0], [0.0, 1.0]]), FP32)


def test_an_expert_with_logit_minus_infinity_gets_weight_zero():
    logits = torch.tensor(
        [[0.0, float("-inf"), float("-inf")], [1.0, 0.0, float("-inf")]], requires_grad=True
    )
    for routing in (route_top2(logits, **NO_LIMIT), route_topk(logits, 3, **NO_LIMIT)):
        assert all(len(set(row)) == len(row) for row in routing.expert.tolist())
        assert routing.weight[0].tolist()[:2] == [1.0, 0.0]
        (gradient,) = torch.autograd.grad(routing.weight[:, 0].sum() + routing.l_aux, logits)
        assert gradient.isfinite().all()


def test_equal_scores_choose_the_lower_expert_and_equal_probabilities_keep_the_earlier_token():
    logits = torch.zeros(100, 70)  # so many that an unstable sort or a vectorised maximum shows
    for routing in (route_top2(logits, **tight(0.0, 2)), route_topk(logits, 2, **tight(0.0, 2))):
        assert routing.expert.tolist() == [[0, 1]] * 100
        assert routing.slot.tolist() == [[0, 0], [1, 1]] + [[-1, -1]] * 98


def test_used_token_keeps_tokens_out_of_the_queue_and_of_the_counts():
    logits = torch.tensor([[1.0, 0]] * 6)
    used = torch.tensor([0, 1, 1, 0, 1, 1])
    routing = route_top1(logits, used_token=used, **tight(1.0))
    assert routing.slot.flatten().tolist() == [-1, 0, 1, -1, 2, -1]
    assert routing.dropped.flatten().tolist() == [False] * 5 + [True]
    assert routing.exp_counts.tolist() == [4, 0]
    share = logits.softmax(1)[0, 0].item()
    assert abs(routing.l_aux.item() - 2 * share * 4 / 6) < 1e-6
    for same in (used.bool(), used.float()):
        assert torch.equal(route_top1(logits, used_token=same, **tight(1.0)).slot, routing.slot)
    assert route_top2(logits, used_token=used, **NO_LIMIT).exp_counts.tolist() == [4, 4]


def test_a_slice_of_a_routing_is_the_routing_of_these_tokens():
    logits = logits_of(12, 5)
    whole = route_top2(logits, **tight(0.7))
    part = whole.tokens(4, 9)
    assert_close(part.combine_weights(), whole.combine_weights()[4:9], EXACT)
    assert (part.capacity, part.l_aux) == (whole.capacity, whole.l_aux)
    assert differs(route_top2(logits[4:9], **tight(0.7)).combine_weights(), part.combine_weights())


# ------------------------------------------------------------------------------------------------- noise


def test_rsample_draws_the_expert_from_the_softmax_and_keeps_the_plain_weight():
    row = torch.tensor([0.5, 0.3, 0.2])
    logits = row.log().expand(6000, 3)
    noise = TokenNoise(0, 0, 0, torch.arange(6000)).gumbel(Purpose.RSAMPLE, 3)
    routing = route_top1(logits, choice_noise=noise, **NO_LIMIT)
    assert (routing.exp_counts / 6000 - row).abs().max() < 0.03  # deviation 0.0065
    assert_close(routing.weight.flatten(), row[routing.expert.flatten()], FP32)


def test_the_second_expert_is_drawn_from_the_softmax_without_the_first():
    row = torch.tensor([0.5, 0.3, 0.2])
    logits = row.log().expand(6000, 3)
    noise = TokenNoise(0, 0, 0, torch.arange(6000)).gumbel(Purpose.SECOND_EXPERT, 3)
    routing = route_top2(logits, choice_noise=noise, **NO_LIMIT)
    assert (routing.expert[:, 0] == 0).all()
    assert abs((routing.expert[:, 1] == 1).float().mean().item() - 0.6) < 0.03
    chosen = row[routing.expert]
    assert_close(routing.weight, chosen / chosen.sum(1, keepdim=True), FP32)
    quiet = route_top2(logits, **NO_LIMIT)
    assert (quiet.expert[:, 1] == 1).all() and torch.equal(quiet.l_aux, routing.l_aux)


def test_noise_by_global_token_does_not_depend_on_the_layout():
    logits, tokens = logits_of(12, 5), torch.arange(100, 112)
    noise = TokenNoise(1, 2, 3, tokens).gumbel(Purpose.SECOND_EXPERT, 5, F64)
    whole = route_top2(logits, choice_noise=noise, **NO_LIMIT)
    for rows in (slice(0, 5), slice(5, 12)):
        part = TokenNoise(1, 2, 3, tokens[rows]).gumbel(Purpose.SECOND_EXPERT, 5, F64)
        assert torch.equal(route_top2(logits[rows], choice_noise=part, **NO_LIMIT).expert, whole.expert[rows])
        other = TokenNoise(1, 3, 3, tokens[rows]).gumbel(Purpose.SECOND_EXPERT, 5, F64)
        assert differs(part, other)


# ------------------------------------------------------------------------------------------------ memory


@pytest.mark.parametrize("name", ["top1-random", "top2-sampled", "top3-probs", "top3-position"])
@pytest.mark.parametrize("experts", [8, 64])
def test_memory_is_linear_in_the_tokens(name, experts):
    """At most a few tensors of the logits' size and two dozen of eight bytes per choice are ever alive."""
    peaks = []
    for tokens in (128, 256):
        logits = logits_of(tokens, experts, dtype=torch.float32).requires_grad_()
        with LiveStorages() as meter:
            routing = GATES[name][0](logits, **tight(2.0))
            (routing.weight.sum() + routing.l_aux).backward()
            choices = routing.expert.numel()
        assert meter.peak < 10 * 4 * tokens * experts + 24 * 8 * choices + 64 * experts, meter.peak
        peaks.append(meter.peak)
    assert peaks[1] < 2.1 * peaks[0]
    with LiveStorages() as meter:
        dense = routing.combine_weights()
    assert meter.peak >= dense.numel() * 4 > 2 * peaks[1] * (experts == 8)  # control: the meter sees it


# ------------------------------------------------------------------------------------------------ groups


def test_the_agreed_capacity_widens_the_buffers_and_drops_nobody_else():
    logits = logits_of(8, 4)
    seen = []

    def agree(report: Tensor) -> Tensor:
        seen.append(report.tolist())
        return torch.maximum(report, torch.tensor([9, 0]))

    for options in (tight(0.5), NO_LIMIT):
        alone, together = route_top1(logits, **options), route_top1(logits, agree=agree, **options)
        assert together.capacity == 9 > alone.capacity
        assert torch.equal(together.slot, alone.slot)
        assert_close(together.combine_weights()[..., : alone.capacity], alone.combine_weights(), EXACT)
    assert seen == [[1, 0], [int(alone.exp_counts.max()), 0]]
    with pytest.raises(ValueError, match=r"tokens of another rank"):
        route_top1(logits, agree=lambda report: torch.tensor([9, 1]), **tight())


def _agree_over_ranks(rank: int) -> None:
    group = comm.new_group([0, 1], "expert")
    tokens = (5, 12)[rank]
    logits = logits_of(tokens, 4, seed=rank)
    alone = route_top2(logits, **tight())
    _, combine, _, counts = top2gating(logits, 1.0, 0, True, group, top2_2nd_expert_sampling=False)
    assert combine.shape == (tokens, 4, 6)  # 2 * 12 / 4 on both
    assert_close(combine[..., : alone.capacity], alone.combine_weights(), EXACT)
    assert torch.equal(counts, alone.exp_counts)
    width = topkgating(logits, 3, 1.0, 0, drop_tokens=False, ep_group=group)[1].shape[2]
    largest = torch.tensor([int(route_topk(logits, 3, **NO_LIMIT).exp_counts.max())])
    comm.all_reduce(largest, op=comm.ReduceOp.MAX, group=group)
    assert width == largest.item()
    gate = TopKGate(6, 4, k=2, min_capacity=0, ep_group=group).eval()
    assert gate(torch.randn(tokens, 6))[1].shape == (tokens, 4, 6)
    if rank == 1:
        logits[3, 2] = float("nan")
    where = "tokens of another rank" if rank == 0 else "1 of 12 tokens, the first is token 3"
    with pytest.raises(ValueError, match=where):
        top1gating(logits, 1.0, 0, ep_group=group)
    assert largest_over(comm.new_group_of_one()) is None and largest_over(None) is None


def test_ranks_agree_on_the_capacity_and_fail_together(world):
    world(_agree_over_ranks, 2)


# ------------------------------------------------------------------------------------------------ errors

ANY = torch.zeros(4, 3)


@pytest.mark.parametrize(
    "call,message",
    [
        (lambda: route_top1(ANY, **tight(-1.0)), r"capacity_factor=-1.0 .*drop_tokens=False.*§9.12.1"),
        (lambda: route_top2(ANY, **tight(float("nan"))), r"capacity_factor=nan"),
        (lambda: route_top2(ANY, **{**NO_LIMIT, "capacity_factor": float("inf")}), r"capacity_factor=inf"),
        (lambda: route_top1(ANY, **tight(1.0, -2)), r"min_capacity=-2 is no whole number of 0 or more"),
        (lambda: route_topk(ANY, 4, **tight()), r"k=4 choices of 3 experts; .* from 1 to 3"),
        (lambda: route_topk(ANY, 0, **tight()), r"k=0 choices of 3 experts"),
        (lambda: route_top2(ANY[:, :1], **tight()), r"k=2 choices of 1 experts"),
        (lambda: route_topk(ANY, 2, drop_policy="score", **tight()), r"'score' is unknown; choose 'probs'"),
        (lambda: route_top1(ANY[None], **tight()), r"logits of shape \(1, 4, 3\).*flatten"),
        (lambda: route_top1(ANY, used_token=torch.ones(3), **tight()), r"used_token of shape \(3,\) for 4"),
        (lambda: route_top1(ANY, selection_noise=ANY, **tight()), r"selection_noise of shape \(4, 3\)"),
        (lambda: route_top2(ANY, choice_noise=ANY[:, :2], **tight()), r"choice_noise of shape \(4, 2\)"),
        (lambda: expert_capacity(4, 0, **tight()), r"num_experts=0: .* at least 1"),
        (lambda: TopKGate(5, 3, k=4), r"k=4 choices of 3 experts"),
        (lambda: TopKGate(5, 3, noisy_gate_policy="jitter"), r"'jitter' is unknown; choose 'Jitter'"),
        (lambda: TopKGate(5, 3, eval_capacity_factor=-1), r"capacity_factor=-1"),
        (lambda: TopKGate(5, 3)(torch.zeros(2, 2, 5)), r"input of shape \(2, 2, 5\)"),
        (lambda: TopKGate(5, 3)(torch.zeros(2, 5), noise=TokenNoise(0, 0, 0, torch.arange(3))), r"2 tokens"),
        (lambda: top1gating(ANY, 1.0, 0, noisy_gate_policy="rsample"), r"'rsample' is unknown"),
    ],
)
def test_refusals_say_what_rule_and_remedy(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@gates
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_logits_that_are_not_numbers_are_named(name, bad):
    logits = logits_of(9, 5)
    logits[4, 1] = bad
    logits[7] = float("-inf")
    for options in (tight(), NO_LIMIT):
        with pytest.raises(ValueError, match=rf"2 of 9 tokens, the first is token 4 .*{bad}.*§9.12"):
            GATES[name][0](logits, **options)


# ---------------------------------------------------------------------------------------- DeepSpeed's names


@pytest.mark.parametrize("k", [1, 2, 3])
def test_the_module_is_its_scores_and_its_gate(k):
    tokens = torch.randn(9, 6, dtype=F64)
    gate = TopKGate(6, 4, k=k, capacity_factor=0.5, eval_capacity_factor=1.5, min_capacity=1).double()
    used = torch.tensor([1, 1, 1, 0, 1, 1, 1, 1, 1])
    for factor, trains in ((0.5, True), (1.5, False)):
        gate.train(trains)
        noise = TokenNoise(0, 1, 2, torch.arange(9))
        options: dict[str, Any] = {**tight(factor, 1), "used_token": used}
        logits = tokens @ gate.wg.weight.T
        if k == 1:
            selection = noise.uniform(Purpose.TOKEN_SELECTION, 1, F64).squeeze(1)
            expected = route_top1(logits, selection_noise=selection if trains else None, **options)
        elif k == 2:
            draw = noise.gumbel(Purpose.SECOND_EXPERT, 4, F64)
            expected = route_top2(logits, choice_noise=draw if trains else None, **options)
        else:
            expected = route_topk(logits, 3, **options)
        l_aux, combine, mask, counts = gate(tokens, used, noise=noise)
        assert_close(combine, expected.combine_weights(), LAW)
        assert_close(l_aux, expected.l_aux, LAW)
        assert torch.equal(mask, expected.dispatch_mask()) and torch.equal(counts, expected.exp_counts)
        l_aux, capacity, _, expert, *_ = gate(tokens, used, sparse_routes=True, noise=noise)
        assert capacity == expected.capacity and torch.equal(expert.T >= 0, expected.kept)
        (combine.sum() + l_aux).backward()
        assert gate.wg.weight.grad.abs().max() > 0


def test_the_functions_take_deepspeeds_arguments_in_its_order():
    logits, used = logits_of(9, 4, dtype=torch.float32), torch.ones(9)
    top1 = top1gating(logits, 1.0, 0, used, None, True, False, None, False, False)
    top2 = top2gating(logits, 1.0, 0, True, None, False, False)
    topk = topkgating(logits, 3, 1.0, 0, True, None, "position", False)
    expected = (
        route_top1(logits, **tight()),
        route_top2(logits, **tight()),
        route_topk(logits, 3, drop_policy="position", **tight()),
    )
    for returned, routing in zip((top1, top2, topk), expected):
        for a, b in zip(returned, routing.dense()):
            assert torch.equal(a, b)
    assert len(top1gating(logits, 1.0, 0, use_rts=False, sparse_routes=True)) == 7
