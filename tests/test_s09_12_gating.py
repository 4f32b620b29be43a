"""§9.12 Gates: who chooses which expert, who gets a place, with which weight, and what l_aux is.

Guards against: a capacity that is off by one, survivors by accident of a sort, the wrong queue order,
weights that are not renormalised, counts after dropping, an l_aux with another factor, noise in evaluation, a
gate that writes to its input, tensors of tokens x experts x capacity, and ranks that disagree on a width."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from gate_cases import F64, GATES, NO_LIMIT, gates, logits_of, tight
from hypothesis import given, settings
from hypothesis import strategies as st
from tolerance import FP32, LAW, assert_close, differs
from torch import Tensor
from torch.nn import functional as F

from ds_lite.moe.gating import route_top1, route_top2, route_topk
from ds_lite.moe.routing import Routing

FOLDER = Path(__file__).parent / "golden"
GOLDEN = json.loads((FOLDER / "gating.json").read_text())["cases"]
RECORDED = json.loads((FOLDER / "gates.json").read_text())["cases"]

# --------------------------------------------------------------------------- what DeepSpeed 0.19.8 returns


def route_case(case: dict[str, Any], logits: Tensor) -> Routing:
    options = {key: case[key] for key in ("capacity_factor", "min_capacity")}
    options["drop_tokens"] = case.get("drop_tokens", True)
    if case["gate"] == "top1":
        used = torch.tensor(case["used_token"]) if "used_token" in case else None
        return route_top1(logits, used_token=used, **options)
    if case["gate"] == "top2":
        return route_top2(logits, **options)
    return route_topk(logits, case["k"], drop_policy=case.get("drop_policy", "probs"), **options)


def recorded_weights(case: dict[str, Any], experts: int) -> Tensor:
    dense = torch.zeros(len(case["logits"]), experts, case["capacity"])
    for token, expert, slot, weight in case["combine"]:
        dense[token, expert, slot] = weight
    return dense


def label(case: dict[str, Any]) -> str:
    extra = f"k{case['k']}-{case.get('drop_policy')}-" if "k" in case else ""
    kind = "used-" if "used_token" in case else ""
    return (
        f"{case['gate']}-{extra}{kind}{len(case['logits'])}x{len(case['exp_counts'])}-{case['capacity_factor']}-"
        f"{case['min_capacity']}-{'drop' if case.get('drop_tokens', True) else 'all'}"
    )


for _case in GOLDEN:  # row-major there, rows here
    _width = _case["experts"]
    _flat = _case["logits"]
    _case["logits"] = [_flat[i : i + _width] for i in range(0, len(_flat), _width)]


@pytest.mark.parametrize("case", GOLDEN, ids=label)
def test_routings_equal_the_recorded_ones(case):
    routing = route_case(case, torch.tensor(case["logits"]))
    recorded = recorded_weights(case, case["experts"])
    assert_close(routing.l_aux, torch.tensor(case["l_aux"]), FP32)
    assert routing.capacity == case["capacity"]
    assert routing.exp_counts.tolist() == case["exp_counts"]
    weights, mask = routing.combine_weights(), routing.dispatch_mask()
    assert torch.equal(mask, weights > 0)
    if case["gate"] == "top1" and case["drop_tokens"]:  # there the survivors are an accident
        assert mask.sum((0, 2)).tolist() == (recorded > 0).sum((0, 2)).tolist()
        return
    assert differs(weights.roll(1, dims=1), recorded)
    assert_close(weights, recorded, FP32)


@pytest.mark.parametrize("case", RECORDED, ids=label)
def test_gradients_and_sparse_routes_equal_the_recorded_ones(case):
    logits = torch.tensor(case["logits"]).requires_grad_()
    routing = route_case(case, logits)
    weights = routing.combine_weights()
    places = torch.sin(torch.arange(weights.numel(), dtype=torch.float32)).view_as(weights)
    assert_close(weights, recorded_weights(case, logits.shape[1]), FP32)
    assert routing.exp_counts.tolist() == case["exp_counts"]
    assert_close(routing.l_aux, torch.tensor(case["l_aux"]), FP32)
    (through_weights,) = torch.autograd.grad((weights * places).sum(), logits, retain_graph=True)
    (through_l_aux,) = torch.autograd.grad(routing.l_aux, logits)
    assert differs(through_l_aux, torch.tensor(case["gradient"]))
    assert_close(through_weights + through_l_aux, torch.tensor(case["gradient"]), FP32)
    if "sparse" in case:
        experts, slots, shares = case["sparse"]
        _, capacity, num_experts, expert, slot, weight, counts = routing.sparse()
        assert (capacity, num_experts) == (case["capacity"], logits.shape[1])
        assert expert.tolist() == experts and slot.tolist() == slots and counts.tolist() == case["exp_counts"]
        assert expert.dtype == slot.dtype == torch.int32
        assert_close(weight, torch.tensor(shares), FP32)


# ------------------------------------------------------------------- an oracle in plain Python and in einsum


def plain(
    logits: Tensor, k: int, limit: int, *, order: str, used: list[int] | None = None
) -> dict[tuple[int, int], int]:
    """{(token, expert): slot}, by walking through the tokens. `order` is choice, position or probs."""
    rows = logits.tolist()
    used = [1] * len(rows) if used is None else used
    gates = logits.softmax(1).tolist()
    queues: dict[int, list[int]] = {e: [] for e in range(logits.shape[1])}
    picks = [sorted(range(len(row)), key=lambda e: (-row[e], e))[:k] for row in rows]
    turns = [[c] for c in range(k)] if order == "choice" else [range(k)]
    for choices in turns:
        for token, picked in enumerate(picks):
            for choice in choices:
                if used[token]:
                    queues[picked[choice]].append(token)
    slots = {}
    for expert, queue in queues.items():
        kept = queue[:limit]
        if order == "probs":
            best = sorted(queue, key=lambda token: (-gates[token][expert], token))[:limit]
            kept = [token for token in queue if token in best]
        slots.update({(token, expert): slot for slot, token in enumerate(kept)})
    return slots


def slots_of(routing: Routing) -> dict[tuple[int, int], int]:
    token, expert, slot = routing.dispatch_mask().nonzero(as_tuple=True)
    return dict(zip(zip(token.tolist(), expert.tolist()), slot.tolist()))


def dense_weights(logits: Tensor, routing: Routing, renormalise: bool) -> Tensor:
    """The papers' formula: gates times one-hot masks, an einsum, and autograd through all of it."""
    experts = F.one_hot(routing.expert, logits.shape[1]).to(logits)  # (T, K, E)
    slots = F.one_hot(routing.slot.clamp(min=0), routing.capacity).to(logits)  # (T, K, C)
    mask = torch.einsum("tke,tkc,tk->tec", experts, slots, routing.kept.to(logits))
    shares = logits.softmax(1) * mask.sum(2)
    if renormalise:
        shares = shares / shares.sum(1, keepdim=True).clamp(min=torch.finfo(logits.dtype).eps)
    return torch.einsum("te,tec->tec", shares, mask)


@gates
@pytest.mark.parametrize("options", [tight(0.6), tight(1.5), NO_LIMIT], ids=["tight", "wide", "all"])
def test_weights_l_aux_and_their_gradients_equal_the_dense_formula(name, options):
    gate, renormalises = GATES[name]
    logits, truth = (logits_of(11, 5).requires_grad_() for _ in range(2))
    routing = gate(logits, **options)
    expected = dense_weights(truth, routing, renormalises)
    places = torch.sin(torch.arange(expected.numel(), dtype=F64)).view_as(expected)
    counted = 1 if name.startswith(("top1", "top2")) else routing.expert.shape[1]
    chosen = F.one_hot(routing.expert[:, :counted], 5).to(F64).sum(1)  # of l_aux, before dropping
    balance = 25 * (truth.softmax(1).mean(0) * chosen.mean(0)).mean() / counted
    weights = routing.combine_weights()
    assert_close(weights, expected, LAW)
    assert_close(routing.l_aux, balance, LAW)
    assert torch.equal(routing.dispatch_mask(), expected > 0)
    ((weights * places).sum() + 0.01 * routing.l_aux).backward()
    ((expected * places).sum() + 0.01 * balance).backward()
    assert_close(logits.grad, truth.grad, LAW)
    assert differs(logits.grad, truth.grad.roll(1, dims=0))


def test_only_weights_and_l_aux_carry_a_gradient():
    routing = route_top2(logits_of(7, 3).requires_grad_(), **tight(0.5))
    assert routing.weight.requires_grad and routing.l_aux.requires_grad
    for fixed in (routing.expert, routing.slot, routing.dropped, routing.exp_counts):
        assert not fixed.requires_grad


def test_a_token_that_is_dropped_everywhere_still_learns_from_l_aux():
    logits = torch.zeros(4, 2, dtype=F64)
    logits[:, 0] = 1
    logits.requires_grad_()
    routing = route_top1(logits, **tight(0.5))  # one slot: tokens 1 to 3 are dropped
    (of_weights,) = torch.autograd.grad(routing.weight.sum(), logits, retain_graph=True)
    (of_l_aux,) = torch.autograd.grad(routing.l_aux, logits)
    assert of_weights[0].abs().min() > 0 and not of_weights[1:].any()
    assert of_l_aux.abs().min() > 0


ties = st.integers(-2, 2).map(float)  # so that many scores are equal


@st.composite
def small_logits(draw: st.DrawFn) -> Tensor:
    experts, tokens = draw(st.integers(1, 5)), draw(st.integers(0, 9))
    values, size = draw(st.sampled_from([ties, st.floats(-60, 60)])), tokens * experts
    scores = draw(st.lists(values, min_size=size, max_size=size))
    return torch.tensor(scores, dtype=draw(st.sampled_from([F64, torch.float32]))).reshape(tokens, experts)


@settings(max_examples=200, deadline=None)
@given(st.data(), small_logits(), st.sampled_from([0, 30, 100, 125]), st.integers(0, 3))
def test_routings_equal_a_walk_through_the_tokens(data, logits, percent, least):
    tokens, experts = logits.shape
    used = data.draw(st.lists(st.integers(0, 1), min_size=tokens, max_size=tokens))
    k = data.draw(st.integers(1, experts))
    order = data.draw(st.sampled_from(["position", "probs"] + ["choice"] * (k == 2)))
    drop = data.draw(st.booleans())
    options = {**tight(percent / 100, least), "drop_tokens": drop, "used_token": torch.tensor(used)}
    if order == "choice":
        routing = route_top2(logits, **options)
    elif k == 1 and order == "position":
        routing = route_top1(logits, **options)
    else:
        routing = route_topk(logits, k, drop_policy=order, **options)

    everyone = plain(logits, k, tokens, order=order, used=used)
    counts = [sum(expert == e for _, expert in everyone) for e in range(experts)]
    limit = max(-(-k * tokens * percent // (100 * experts)), least) if drop else max(counts)
    kept = plain(logits, k, limit, order=order, used=used)
    assert slots_of(routing) == kept
    assert (routing.capacity, routing.exp_counts.tolist()) == (limit, counts)
    assert int(routing.dropped.sum()) == sum(counts) - len(kept)
    assert not (routing.dropped & routing.kept).any()
    assert int(routing.dispatch_mask().sum((0, 2)).amax()) <= limit
    assert int(routing.dispatch_mask().sum(0).amax() if limit and tokens else 0) <= 1  # one token a slot
    assert not routing.weight[~routing.kept].any()
    if order != "position" or k > 1:
        assert_close(routing.weight.sum(1), routing.kept.any(1).to(routing.weight), FP32)
    assert math.isfinite(routing.l_aux)
