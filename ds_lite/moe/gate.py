"""The gate as a module, and the three gates under DeepSpeed's names and with its results (§9.4 §9.12).

Letters: T tokens, H width, E experts, K choices per token, C capacity.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ds_lite import comm, trace
from ds_lite.comm import ProcessGroup
from ds_lite.moe.gating import Agree, DropPolicy, Fault, check_choices, route_top1, route_top2, route_topk
from ds_lite.moe.noise import Purpose, TokenNoise, multiplicative_jitter
from ds_lite.moe.queues import expert_capacity
from ds_lite.moe.routing import Dense, Routing, Sparse

NOISY_GATE_POLICIES = (None, "Jitter", "RSample", "None")


class TopKGate(nn.Module):
    """A linear layer without bias that scores the experts, and the gate for `k` on its scores.

    In training, "Jitter" multiplies the input by noise, and with k = 1 "RSample" adds Gumbel noise for the
    choice and `use_rts` selects at random who stays at a full expert; with k = 2 `top2_2nd_expert_sampling`
    draws the second expert. In evaluation there is no noise and `eval_capacity_factor` counts. A full expert
    keeps the first tokens with k = 1 and no random selection, first choices before second ones with k = 2,
    and the likeliest tokens with k > 2. Scores are computed in float32 or wider, under autocast too.

    `scores` and `route` are the two halves of a gate, for a layer that gathers scores in between; `forward`
    is both, with DeepSpeed's dense results. The caller gives the noise; a gate on its own takes a seed from
    torch's generator for each draw.

    Raises: ValueError for settings, on construction.

    Source: §9.12; DeepSpeed `moe/sharded_moe.py::TopKGate` @ 0.19.8.
    Differs: in DeepSpeed random selection and the draw of the second expert go on in evaluation, and
    `used_token` is not looked at for k > 1. `use_tutel` is accepted and changes nothing.
    """

    def __init__(
        self,
        model_dim: int,
        num_experts: int,
        k: int = 1,
        capacity_factor: float = 1.0,
        eval_capacity_factor: float = 1.0,
        min_capacity: int = 8,
        noisy_gate_policy: str | None = None,
        drop_tokens: bool = True,
        use_rts: bool = True,
        ep_group: ProcessGroup | None = None,
        top2_2nd_expert_sampling: bool = True,
    ) -> None:
        super().__init__()
        _check_policy(noisy_gate_policy)
        check_choices(k, num_experts)
        for factor in (capacity_factor, eval_capacity_factor):
            expert_capacity(0, num_experts, capacity_factor=factor, min_capacity=min_capacity)
        self.wg = nn.Linear(model_dim, num_experts, bias=False)
        self.k, self.ep_group = k, ep_group
        self.capacity_factor, self.eval_capacity_factor = capacity_factor, eval_capacity_factor
        self.min_capacity, self.drop_tokens, self.use_rts = min_capacity, drop_tokens, use_rts
        self.noisy_gate_policy = noisy_gate_policy
        self.top2_2nd_expert_sampling = top2_2nd_expert_sampling

    def scores(self, input: Tensor, *, noise: TokenNoise | None = None) -> Tensor:
        """The logits of each token; in training of the jittered token, if the policy says so.

        Shapes: input (T, H) -> (T, E), float32 or wider.
        """
        if input.dim() != 2:
            raise ValueError(
                f"input of shape {tuple(input.shape)}; a gate takes (tokens, width), so flatten the other "
                f"dimensions first (§9.12)"
            )
        weight = self.wg.weight
        dtype = torch.promote_types(torch.promote_types(input.dtype, weight.dtype), torch.float32)
        input = input.to(dtype)
        if self.noisy_gate_policy == "Jitter" and self.training:
            uniform = _noise_for(input, noise).uniform(Purpose.JITTER, input.shape[1], dtype)
            input = multiplicative_jitter(input, uniform=uniform)
        with torch.autocast(input.device.type, enabled=False):
            return F.linear(input, weight.to(dtype))

    def route(
        self,
        logits: Tensor,
        used_token: Tensor | None = None,
        *,
        noise: TokenNoise | None = None,
        agree: Agree | None = None,
    ) -> Routing:
        """The routing of all tokens of a micro-batch, from their logits (T, E).

        Without `agree`, ranks agree over `ep_group`, if there is one. The noise has a number for each token.

        Communication: what `agree` does.
        Raises: ValueError for logits that are not numbers, on all ranks that agree.
        """
        shared: dict[str, Any] = dict(
            capacity_factor=self.capacity_factor if self.training else self.eval_capacity_factor,
            min_capacity=self.min_capacity,
            drop_tokens=self.drop_tokens,
            used_token=used_token,
            agree=agree or largest_over(self.ep_group),
        )
        if self.k == 1:
            draws = self.training and self.noisy_gate_policy == "RSample"
            selects = self.training and self.use_rts and self.drop_tokens
            return route_top1(
                logits,
                choice_noise=_gumbel(logits, noise, Purpose.RSAMPLE) if draws else None,
                selection_noise=_selection(logits, noise) if selects else None,
                **shared,
            )
        if self.k == 2:
            draws = self.training and self.top2_2nd_expert_sampling
            choice_noise = _gumbel(logits, noise, Purpose.SECOND_EXPERT) if draws else None
            return route_top2(logits, choice_noise=choice_noise, **shared)
        return route_topk(logits, self.k, **shared)

    def forward(
        self,
        input: Tensor,
        used_token: Tensor | None = None,
        sparse_routes: bool = False,
        use_tutel: bool = False,
        *,
        noise: TokenNoise | None = None,
    ) -> Dense | Sparse:
        """DeepSpeed's results for the tokens `input` (T, H); see `Routing.dense` and `Routing.sparse`."""
        routing = self.route(self.scores(input, noise=noise), used_token, noise=noise)
        return routing.sparse() if sparse_routes else routing.dense()


# ---------------------------------------------------------------------------- DeepSpeed's three functions


def top1gating(
    logits: Tensor,
    capacity_factor: float,
    min_capacity: int,
    used_token: Tensor | None = None,
    noisy_gate_policy: str | None = None,
    drop_tokens: bool = True,
    use_rts: bool = True,
    ep_group: ProcessGroup | None = None,
    sparse_routes: bool = False,
    use_tutel: bool = False,
    *,
    noise: TokenNoise | None = None,
) -> Dense | Sparse:
    """`route_top1` with DeepSpeed's arguments: (l_aux, combine weights, dispatch mask, counts).

    Without `noise`, each draw takes a seed from torch's generator.
    """
    _check_policy(noisy_gate_policy)
    routing = route_top1(
        logits,
        capacity_factor=capacity_factor,
        min_capacity=min_capacity,
        drop_tokens=drop_tokens,
        used_token=used_token,
        choice_noise=_gumbel(logits, noise, Purpose.RSAMPLE) if noisy_gate_policy == "RSample" else None,
        selection_noise=_selection(logits, noise) if use_rts and drop_tokens else None,
        agree=largest_over(ep_group),
    )
    return routing.sparse() if sparse_routes else routing.dense()


def top2gating(
    logits: Tensor,
    capacity_factor: float,
    min_capacity: int,
    drop_tokens: bool = True,
    ep_group: ProcessGroup | None = None,
    top2_2nd_expert_sampling: bool = True,
    sparse_routes: bool = False,
    *,
    noise: TokenNoise | None = None,
) -> Dense | Sparse:
    """`route_top2` with DeepSpeed's arguments: (l_aux, combine weights, dispatch mask, counts)."""
    routing = route_top2(
        logits,
        capacity_factor=capacity_factor,
        min_capacity=min_capacity,
        drop_tokens=drop_tokens,
        choice_noise=_gumbel(logits, noise, Purpose.SECOND_EXPERT) if top2_2nd_expert_sampling else None,
        agree=largest_over(ep_group),
    )
    return routing.sparse() if sparse_routes else routing.dense()


def topkgating(
    logits: Tensor,
    k: int,
    capacity_factor: float,
    min_capacity: int,
    drop_tokens: bool = True,
    ep_group: ProcessGroup | None = None,
    drop_policy: DropPolicy = "probs",
    sparse_routes: bool = False,
) -> Dense | Sparse:
    """`route_topk` with DeepSpeed's arguments: (l_aux, combine weights, dispatch mask, counts)."""
    routing = route_topk(
        logits,
        k,
        capacity_factor=capacity_factor,
        min_capacity=min_capacity,
        drop_tokens=drop_tokens,
        drop_policy=drop_policy,
        agree=largest_over(ep_group),
    )
    return routing.sparse() if sparse_routes else routing.dense()


class LargestOver:
    """How the ranks of `group` agree on a capacity: each brings its report and gets the largest numbers.

    A rank that fails before it can report says so within `told`, so that the others do not wait for it.

    Communication: one all-reduce of two numbers.
    """

    def __init__(self, group: ProcessGroup) -> None:
        self.group = group
        self._has_reported = False

    def __call__(self, report: Tensor) -> Tensor:
        self._has_reported = True
        with trace.current().span_if_idle("AgreeOnCapacity"):
            comm.all_reduce(report, op=comm.ReduceOp.MAX, group=self.group)
        return report

    @contextmanager
    def told(self) -> Iterator[None]:
        """If the block fails before its report, the other ranks raise too."""
        try:
            yield
        except Exception:
            if not self._has_reported:
                self(torch.tensor([0, Fault.ELSEWHERE], device=comm.control_device()))
            raise


def largest_over(group: ProcessGroup | None) -> LargestOver | None:
    """The agreement for one routing; None if there is nobody to agree with."""
    return None if group is None or comm.get_world_size(group) == 1 else LargestOver(group)


def _capacity(gates: Tensor, capacity_factor: float | Tensor, min_capacity: int | Tensor) -> int:
    """`expert_capacity` for gates (T, E), with DeepSpeed's arguments."""
    return expert_capacity(
        *gates.shape, capacity_factor=float(capacity_factor), min_capacity=int(min_capacity)
    )


def _gumbel(logits: Tensor, noise: TokenNoise | None, purpose: Purpose) -> Tensor:
    dtype = torch.promote_types(logits.dtype, torch.float32)
    return _noise_for(logits, noise).gumbel(purpose, logits.shape[-1], dtype)


def _selection(logits: Tensor, noise: TokenNoise | None) -> Tensor:
    """One number per token; float64, so that equal ones are rare."""
    return _noise_for(logits, noise).uniform(Purpose.TOKEN_SELECTION, 1, torch.float64).squeeze(1)


def _noise_for(rows: Tensor, noise: TokenNoise | None) -> TokenNoise:
    """The caller's noise if it fits, else noise from torch's generator."""
    if noise is None:
        return TokenNoise.drawn(len(rows), rows.device)
    if noise.tokens.shape != rows.shape[:1]:
        raise ValueError(
            f"noise for tokens of shape {tuple(noise.tokens.shape)} at a gate with {len(rows)} tokens; give "
            f"one global number for each token that is routed here, shape ({len(rows)},) (§9.12.2)"
        )
    return noise


def _check_policy(policy: str | None) -> None:
    if policy not in NOISY_GATE_POLICIES:
        raise ValueError(
            f"noisy_gate_policy={policy!r} is unknown; choose 'Jitter', 'RSample' or None (§9.12.2)"
        )
