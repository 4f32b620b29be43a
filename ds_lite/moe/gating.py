"""The three gates of a mixture of experts, from logits to a `Routing`: top-1, top-2 and top-k (§9.12).

They are functions of tensors and know nothing of ranks. Logits are whole: all experts, and all tokens of the
micro-batch. float16 and bfloat16 are widened to float32, float64 stays. Noise is an argument; a gate without
it is deterministic.

Letters: T tokens, K choices per token, E experts, C capacity.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from typing import Literal

import torch
from torch import Tensor

from ds_lite.agreement import RemoteError
from ds_lite.moe.queues import assign_slots, choose, expert_capacity
from ds_lite.moe.routing import Routing

# Given [capacity, Fault], the largest of each over the ranks that exchange tokens. A rank still drops by its
# own capacity, as one process would; the agreed one is the width of the dense views, and of DeepSpeed's
# buffers.
Agree = Callable[[Tensor], Tensor]
DropPolicy = Literal["probs", "position"]


class Fault(IntEnum):
    """Why a rank cannot route."""

    NONE = 0
    NOT_NUMBERS = 1
    ELSEWHERE = 2  # it failed before it had logits, with an error of its own


def route_top1(
    logits: Tensor,
    *,
    capacity_factor: float,
    min_capacity: int,
    drop_tokens: bool = True,
    used_token: Tensor | None = None,
    choice_noise: Tensor | None = None,
    selection_noise: Tensor | None = None,
    agree: Agree | None = None,
) -> Routing:
    """Each token to its likeliest expert, weighted by the probability itself.

    `choice_noise` is added to the logits for the choice alone ("RSample" with Gumbel noise). An expert keeps
    the first C tokens, or, with `selection_noise`, the C with the largest noise (random token selection).
    A token that is zero in `used_token` is routed nowhere but stays in the means of l_aux.

    Shapes: logits (T, E), used_token (T,), choice_noise (T, E), selection_noise (T,) -> K = 1.
    Communication: what `agree` does. On a GPU the host waits once, for the check for NaN and the capacity.
    Gradient: through the weights, and through mean(gate) of l_aux.
    Raises: ValueError for settings, shapes, and logits that are not numbers; the last on all ranks alike.

    Source: §9.12; DeepSpeed `moe/sharded_moe.py::top1gating` @ 0.19.8.
    Differs: without random selection DeepSpeed's survivors are an accident of how equal numbers are sorted;
    it asks for T >= min_capacity; its cap of the agreed capacity at T can differ between ranks.
    """
    logits, used = _checked(logits, 1, used_token, choice_noise)
    if selection_noise is not None and selection_noise.shape != logits.shape[:1]:
        raise ValueError(_misfit("selection_noise", selection_noise, logits.shape[:1]))
    limit = _limit(logits, 1, capacity_factor, min_capacity, drop_tokens)
    gates = logits.softmax(dim=1)
    expert = choose(logits if choice_noise is None else logits + choice_noise, 1)
    priority = None if selection_noise is None else selection_noise.unsqueeze(1)
    slot = assign_slots(expert, logits.shape[1], limit, used=used, priority=priority)
    weight = gates.gather(1, expert).masked_fill(slot < 0, 0)
    return _routing(logits, gates, expert, slot, weight, used, limit, 1, agree)


def route_top2(
    logits: Tensor,
    *,
    capacity_factor: float,
    min_capacity: int,
    drop_tokens: bool = True,
    used_token: Tensor | None = None,
    choice_noise: Tensor | None = None,
    agree: Agree | None = None,
) -> Routing:
    """Each token to its two likeliest experts, weighted by their probabilities among those that kept it.

    With `choice_noise`, Gumbel noise, the second expert is drawn from the softmax without the first.
    All first choices queue before all second ones. l_aux counts first choices alone, and so equals top-1's.

    Shapes: logits (T, E), used_token (T,), choice_noise (T, E) -> K = 2.
    Communication, Gradient, Raises: as `route_top1`.

    Source: §9.12; DeepSpeed `moe/sharded_moe.py::top2gating` @ 0.19.8.
    Differs: DeepSpeed adds the noise to the caller's logits in place, and knows no `used_token` here.
    """
    logits, used = _checked(logits, 2, used_token, choice_noise)
    limit = _limit(logits, 2, capacity_factor, min_capacity, drop_tokens)
    gates = logits.softmax(dim=1)
    scores = logits
    if choice_noise is not None:  # the first choice is out of the draw: nothing beats infinity
        scores = (logits + choice_noise).scatter(1, choose(logits, 1), float("inf"))
    expert = choose(scores, 2)
    slot = assign_slots(expert, logits.shape[1], limit, used=used, by_choice=True)
    weight = _renormalised(logits, expert, slot >= 0)
    return _routing(logits, gates, expert, slot, weight, used, limit, 1, agree)


def route_topk(
    logits: Tensor,
    k: int,
    *,
    capacity_factor: float,
    min_capacity: int,
    drop_tokens: bool = True,
    drop_policy: DropPolicy = "probs",
    used_token: Tensor | None = None,
    agree: Agree | None = None,
) -> Routing:
    """Each token to its k likeliest experts, weighted by their probabilities among those that kept it.

    A full expert keeps the tokens that like it most ("probs") or those that come first ("position"). The
    queue is in the order of the tokens, whichever of their choices it was. l_aux counts all k choices.

    Shapes: logits (T, E), used_token (T,) -> K = k.
    Communication, Gradient: as `route_top1`. With k = 1 the weights are 1, so nothing passes through them.
    Raises: as `route_top1`, and ValueError for an unknown policy.

    Source: §9.12; DeepSpeed `moe/sharded_moe.py::topkgating` @ 0.19.8.
    Differs: of equally likely tokens the first is kept; DeepSpeed knows no `used_token` here.
    """
    if drop_policy not in ("probs", "position"):
        raise ValueError(f"drop_policy={drop_policy!r} is unknown; choose 'probs' or 'position' (§9.12.2)")
    logits, used = _checked(logits, k, used_token, None)
    limit = _limit(logits, k, capacity_factor, min_capacity, drop_tokens)
    gates = logits.softmax(dim=1)
    expert = choose(logits, k)
    priority = gates.detach().gather(1, expert) if drop_policy == "probs" else None
    slot = assign_slots(expert, logits.shape[1], limit, used=used, priority=priority)
    weight = _renormalised(logits, expert, slot >= 0)
    return _routing(logits, gates, expert, slot, weight, used, limit, k, agree)


# ---------------------------------------------------------------------------------- what they have in common


def load_balancing_loss(gates: Tensor, counts: Tensor, choices: int = 1) -> Tensor:
    """E * sum over the experts of mean(gate) * mean(chosen), divided by the choices counted per token.

    1 if all gates are uniform, E if all tokens surely choose one expert; no tokens give an exact zero.

    Shapes: gates (T, E), counts (E,) -> ().

    >>> gates = torch.tensor([[0.51, 0.49], [0.51, 0.49], [0.0, 1.0]])
    >>> round(load_balancing_loss(gates, torch.tensor([2, 1])).item(), 3)  # 1 is not a lower bound
    0.893

    Source: §9.12.3.
    """
    tokens = max(len(gates), 1)
    mean_gate, mean_chosen = gates.sum(dim=0) / tokens, counts.to(gates.dtype) / tokens
    return (mean_gate * mean_chosen).sum() * (gates.shape[1] / choices)


def _checked(
    logits: Tensor, choices: int, used_token: Tensor | None, choice_noise: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """The logits in float32 or wider, and `used_token` as a mask."""
    if logits.dim() != 2:
        raise ValueError(
            f"logits of shape {tuple(logits.shape)}; a gate takes (tokens, experts), so flatten the other "
            f"dimensions first (§9.12)"
        )
    check_choices(choices, logits.shape[1])
    if used_token is not None and used_token.shape != logits.shape[:1]:
        raise ValueError(_misfit("used_token", used_token, logits.shape[:1]))
    if choice_noise is not None and choice_noise.shape != logits.shape:
        raise ValueError(_misfit("choice_noise", choice_noise, logits.shape))
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return wide, None if used_token is None else used_token.bool()


def check_choices(k: int, num_experts: int) -> None:
    """Raises: ValueError unless 1 <= k <= num_experts."""
    if not 1 <= k <= num_experts:
        raise ValueError(
            f"k={k} choices of {num_experts} experts; each choice of a token is another expert, so choose k "
            f"from 1 to {num_experts} (§9.12)"
        )


def _misfit(name: str, given: Tensor, wanted: torch.Size) -> str:
    return (
        f"{name} of shape {tuple(given.shape)} for {wanted[0]} tokens; give one row per token, "
        f"shape {tuple(wanted)} (§9.12)"
    )


def _limit(logits: Tensor, choices: int, factor: float, min_capacity: int, drop_tokens: bool) -> int | None:
    """The most choices an expert keeps; None for all of them. Checks the settings in both cases."""
    capacity = expert_capacity(
        *logits.shape, capacity_factor=factor, min_capacity=min_capacity, choices=choices
    )
    return capacity if drop_tokens else None


def _renormalised(logits: Tensor, expert: Tensor, kept: Tensor) -> Tensor:
    """The softmax over a token's kept choices, zero if it has none.

    It is the probability divided by the sum of the kept ones, without an underflow where all are tiny. A
    choice whose logit is -inf has weight zero.
    """
    chosen = logits.gather(1, expert)
    counts = kept & (chosen.detach() > float("-inf"))
    nothing = ~counts.any(dim=1, keepdim=True)
    weight = chosen.masked_fill(~counts, float("-inf")).masked_fill(nothing, 0).softmax(dim=1)
    return weight.masked_fill(~counts, 0)


def _routing(
    logits: Tensor,
    gates: Tensor,
    expert: Tensor,
    slot: Tensor,
    weight: Tensor,
    used: Tensor | None,
    limit: int | None,
    balanced: int,
    agree: Agree | None,
) -> Routing:
    """Count, agree on the capacity, put together; l_aux counts the first `balanced` choices of a token."""
    num_experts = logits.shape[1]
    counts = _count(expert, used, num_experts)
    dropped = slot < 0 if used is None else (slot < 0) & used.unsqueeze(1)
    return Routing(
        expert=expert,
        slot=slot,
        weight=weight,
        dropped=dropped,
        l_aux=load_balancing_loss(gates, _count(expert[:, :balanced], used, num_experts), balanced),
        exp_counts=counts,
        capacity=_agreed_capacity(logits, gates, counts.max() if limit is None else limit, agree),
    )


def _count(expert: Tensor, used: Tensor | None, num_experts: int) -> Tensor:
    """Choices of each expert, (E,)."""
    ones = torch.ones_like(expert) if used is None else used.unsqueeze(1).expand_as(expert).long()
    zeros = torch.zeros(num_experts, dtype=torch.int64, device=expert.device)
    return zeros.scatter_add_(0, expert.flatten(), ones.flatten())


def _agreed_capacity(logits: Tensor, gates: Tensor, own: int | Tensor, agree: Agree | None) -> int:
    """The width of the buffers on all ranks. Raises on all of them if one cannot route."""
    is_bad = gates.detach().sum().isnan()  # a row of gates is NaN as soon as one of its logits is
    report = torch.stack((torch.as_tensor(own, device=gates.device), is_bad.long()))
    if agree is not None:
        report = agree(report)
    capacity, fault = report.tolist()
    if fault == Fault.ELSEWHERE:
        raise RemoteError(
            "another rank of this expert group failed before it could route its tokens, so nobody can "
            "exchange them; its own message says why (§9.4)"
        )
    if fault == Fault.NOT_NUMBERS:
        raise ValueError(_not_numbers(logits.detach(), gates.detach()))
    return int(capacity)


def _not_numbers(logits: Tensor, gates: Tensor) -> str:
    bad = gates.isnan().any(dim=1).nonzero().flatten()
    if len(bad):
        row = ", ".join(f"{logit:.4g}" for logit in logits[bad[0]].tolist()[:8])
        problem = f"{len(bad)} of {len(logits)} tokens, the first is token {int(bad[0])} with logits [{row}]"
    else:
        problem = "tokens of another rank"
    return (
        f"the gate cannot route {problem}: NaN, +inf, or -inf for every expert has no softmax; look for the "
        f"first NaN before the gate, or lower the learning rate or the loss scale (§9.12)"
    )
