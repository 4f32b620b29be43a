"""§9.4 What a mixture costs on one rank. Guards against: rows of padding that are multiplied, anything of
size tokens x experts x capacity, and buffers as wide as the busiest expert for every expert."""

from __future__ import annotations

import math

import pytest
import torch
from meter import LiveStorages
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from ds_lite.moe.layer import MoE

WIDTH, HIDDEN, TOKENS = 16, 48, (1024, 4096, 16384)


def make_layer(experts: int, *, k: int = 2, drop_tokens: bool = True) -> MoE:
    torch.manual_seed(0)
    expert = nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, WIDTH))
    options = {"use_rts": False, "top2_2nd_expert_sampling": False, "drop_tokens": drop_tokens}
    return MoE(WIDTH, expert, experts, k=k, capacity_factor=0.8, **options)


def tokens(count: int) -> Tensor:
    return torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(1))


def kept_rows(layer: MoE, x: Tensor) -> int:
    with torch.no_grad():
        return int(layer.gate.route(layer.gate.scores(x)).kept.sum())


@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize("drop_tokens", [True, False])
def test_only_the_rows_that_are_kept_are_multiplied(k: int, drop_tokens: bool) -> None:
    """Forward one product a matrix, backward two; of the gate's logits too."""
    layer, x = make_layer(8, k=k, drop_tokens=drop_tokens), tokens(1000).requires_grad_()
    rows = kept_rows(layer, x)
    assert rows < k * 1000 if drop_tokens else rows == k * 1000
    with FlopCounterMode(display=False) as counter:
        y, l_aux, _ = layer(x)
        (y.sum() + l_aux).backward()
    of_experts, of_gate = rows * 2 * WIDTH * HIDDEN, 1000 * WIDTH * layer.num_experts
    assert counter.get_total_flops() == 3 * 2 * (of_experts + of_gate)


def peak(layer: MoE, x: Tensor) -> tuple[int, int]:
    """Bytes that a forward and a backward made and held together, at most; the largest single storage."""
    layer.zero_grad()
    with LiveStorages() as meter:
        y, l_aux, _ = layer(x)
        (y.sum() + l_aux).backward()
    return meter.peak - sum(p.numel() * p.element_size() for p in layer.parameters()), meter.largest


@pytest.mark.parametrize("experts", [8, 64])
@pytest.mark.parametrize("drop_tokens", [True, False])
def test_memory_is_linear_in_the_tokens_and_in_nothing_else(experts: int, drop_tokens: bool) -> None:
    layer = make_layer(experts, drop_tokens=drop_tokens)
    peaks = [peak(layer, tokens(count)) for count in TOKENS]
    octaves = math.log(TOKENS[-1] / TOKENS[0])
    slope = math.log(peaks[-1][0] / peaks[0][0]) / octaves
    assert 0.9 <= slope <= 1.1
    rows = kept_rows(layer, tokens(TOKENS[-1]))
    widest = max(4 * rows * HIDDEN, 8 * TOKENS[-1] * experts)  # what the experts work on; logits in int64
    assert peaks[-1][1] <= widest
    assert 4 * TOKENS[-1] * experts * (rows // experts) > 100 * widest, "control: a dense mask is larger"


def test_without_dropping_a_busy_expert_costs_what_its_rows_cost() -> None:
    """All tokens at one expert are as many rows as tokens spread evenly; slots would cost eight times it."""
    layer, x = make_layer(8, k=1, drop_tokens=False), tokens(4096)
    even, _ = peak(layer, x)
    with torch.no_grad():
        layer.gate.wg.weight.zero_()[0, 0] = 1.0
    x[:, 0] = 9.0
    assert layer(x)[2].tolist() == [4096, *[0] * 7]
    busy, _ = peak(layer, x)
    assert even < busy <= 1.5 * even  # its gradients of hidden rows are alive together
