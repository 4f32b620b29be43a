"""What the tests of the gates share: scores with favourites, and every gate by name (§9.12)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from ds_lite.moe.gating import route_top1, route_top2, route_topk
from ds_lite.moe.noise import Purpose, TokenNoise

F64 = torch.float64
NO_LIMIT: dict[str, Any] = {"capacity_factor": 1.0, "min_capacity": 0, "drop_tokens": False}


def tight(factor: float = 1.0, least: int = 0) -> dict[str, Any]:
    return {"capacity_factor": factor, "min_capacity": least}


def logits_of(tokens: int, experts: int, *, seed: int = 0, dtype: torch.dtype = F64) -> Tensor:
    """Random scores that like the first experts better, so that some experts overflow."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(tokens, experts, generator=generator, dtype=F64) * 1.5
    return (scores + torch.linspace(1, 0, experts, dtype=F64)).to(dtype)


def gumbel_for(logits: Tensor, *, seed: int = 3) -> Tensor:
    noise = TokenNoise(seed, 0, 0, torch.arange(len(logits)))
    return noise.gumbel(Purpose.SECOND_EXPERT, logits.shape[1], logits.dtype)


GATES: dict[str, tuple[Any, bool]] = {
    "top1": (lambda x, **options: route_top1(x, **options), False),
    "top1-random": (
        lambda x, **options: route_top1(x, selection_noise=gumbel_for(x)[:, 0], **options),
        False,
    ),
    "top1-rsample": (lambda x, **options: route_top1(x, choice_noise=gumbel_for(x), **options), False),
    "top2": (lambda x, **options: route_top2(x, **options), True),
    "top2-sampled": (lambda x, **options: route_top2(x, choice_noise=gumbel_for(x), **options), True),
    "top1-of-topk": (lambda x, **options: route_topk(x, 1, **options), True),
    "top3-probs": (lambda x, **options: route_topk(x, 3, **options), True),
    "top3-position": (lambda x, **options: route_topk(x, 3, drop_policy="position", **options), True),
    "top5-of-5": (lambda x, **options: route_topk(x, 5, **options), True),
}
gates = pytest.mark.parametrize("name", GATES)
