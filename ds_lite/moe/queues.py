"""Choices, capacities and queues: who gets a place at an expert (§9.12.1 §9.12.2).

Memory is linear in T*K beyond the scores; there is no cumulative sum over one-hot rows.

Letters: T tokens, K choices per token, E experts, C capacity.
"""

from __future__ import annotations

import math
from fractions import Fraction
from numbers import Integral, Real

import torch
from torch import Tensor


def expert_capacity(
    num_tokens: int, num_experts: int, *, capacity_factor: float, min_capacity: int, choices: int = 1
) -> int:
    """Slots each expert offers to one micro-batch.

    Units: tokens. ceil(choices * T/E * capacity_factor), never below `min_capacity`. The factor is taken as
    it is written, 1.1 for eleven tenths, and the ceiling is exact.
    Raises: ValueError for no experts, and for a factor or min_capacity that is negative or no number.

    >>> expert_capacity(10, 4, capacity_factor=1.0, min_capacity=0)
    3
    >>> expert_capacity(10, 4, capacity_factor=1.25, min_capacity=0)  # 3.125
    4
    >>> expert_capacity(100, 1, capacity_factor=1.1, min_capacity=0)  # though 100 * 1.1 > 110 in binary
    110

    Source: §9.12.1; DeepSpeed `moe/sharded_moe.py::_capacity` @ 0.19.8.
    Differs: DeepSpeed multiplies in float32, which is one off now and then.
    """
    if num_experts < 1:
        raise ValueError(f"num_experts={num_experts}: a gate needs at least 1 expert (§9.12)")
    if not (isinstance(capacity_factor, Real) and math.isfinite(capacity_factor) and capacity_factor >= 0):
        raise ValueError(
            f"capacity_factor={capacity_factor!r} is no number of 0 or more; use 1.0 to 2.0, or "
            f"drop_tokens=False for experts that take every token (§9.12.1)"
        )
    if not isinstance(min_capacity, Integral) or min_capacity < 0:
        raise ValueError(
            f"min_capacity={min_capacity!r} is no whole number of 0 or more; use 0 for no lower bound on the "
            f"slots of an expert (§9.12.1)"
        )
    exact = Fraction(num_tokens * choices, num_experts) * Fraction(str(float(capacity_factor)))
    return max(math.ceil(exact), min_capacity)


def choose(scores: Tensor, choices: int) -> Tensor:
    """Each token's best experts, best first; of equal scores the expert with the lower number.

    Shapes: scores (T, E) -> (T, choices) int64, all different within a row. No gradient.
    """
    left = scores.detach().clamp(min=torch.finfo(scores.dtype).min)  # a copy where -inf can mark the taken
    best = []
    for _ in range(choices):
        best.append(left.argmax(dim=1, keepdim=True))  # the first of equal ones; topk promises no order
        left.scatter_(1, best[-1], float("-inf"))
    return torch.cat(best, dim=1)


def assign_slots(
    expert: Tensor,
    num_experts: int,
    limit: int | None,
    *,
    used: Tensor | None = None,
    priority: Tensor | None = None,
    by_choice: bool = False,
) -> Tensor:
    """The place of each choice in its expert's queue, -1 for choices that are not kept.

    Tokens queue in their order, or, with `by_choice`, all first choices before all second ones. The first
    `limit` of a queue are kept; with `priority` (T, K) instead the `limit` of highest priority, and the queue
    is closed up behind those that leave. Of equal priorities the earlier in the queue is kept. None is no
    limit. Tokens that are not `used` (T,) do not queue.

    Shapes: expert (T, K) -> (T, K), int64.
    """
    if used is not None:
        expert = expert.masked_fill(~used.unsqueeze(1), num_experts)
    choosers = _flat(expert, by_choice)
    if limit is not None and priority is not None:
        order = _flat(priority, by_choice).argsort(descending=True, stable=True)
        is_late = _places(choosers[order], num_experts) >= limit
        choosers = choosers.masked_fill(torch.empty_like(is_late).scatter_(0, order, is_late), num_experts)
    place = _places(choosers, num_experts)
    is_kept = choosers < num_experts
    if limit is not None:
        is_kept &= place < limit
    slot = place.masked_fill(~is_kept, -1)
    return slot.view(expert.T.shape).T if by_choice else slot.view(expert.shape)


def _flat(x: Tensor, by_choice: bool) -> Tensor:
    """(T, K) -> (T*K,) in the order of the queue."""
    return (x.T if by_choice else x).reshape(-1)


def _places(expert: Tensor, num_experts: int) -> Tensor:
    """How many earlier entries name the same expert: what a cumulative sum over one-hot rows would say.

    Shapes: expert (N,) int64, `num_experts` for "none" -> (N,). No (N, E) tensor is made.
    """
    by_expert, order = expert.sort(stable=True)
    starts = torch.searchsorted(by_expert, torch.arange(num_experts + 1, device=expert.device))
    in_run = torch.arange(len(expert), device=expert.device) - starts[by_expert]
    return torch.empty_like(order).scatter_(0, order, in_run)
