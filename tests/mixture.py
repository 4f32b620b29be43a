"""The truth of a mixture of experts: one process, token by token, nothing of the library under test (§9.12).

`Mixture` has the parameter names of an MoE layer, `gate.wg.weight` and `experts.{number}.…`, and returns
(output, l_aux). An adapter puts its own layer in its place.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Choice:
    """One choice of a token, with the place it stands for in the queue of its expert."""

    token: int
    rank: int  # 0 is the likeliest
    expert: int


class Mixture(nn.Module):
    """No noise. A full expert keeps by position (k <= 2) or the likeliest tokens (k > 2)."""

    def __init__(
        self,
        hidden_size: int,
        expert: nn.Module,
        num_experts: int,
        *,
        k: int,
        capacity_factor: float = 1.0,
        min_capacity: int = 0,
        drop_tokens: bool = True,
        use_residual: bool = False,
    ) -> None:
        super().__init__()
        self.options = dict(
            k=k,
            capacity_factor=capacity_factor,
            min_capacity=min_capacity,
            drop_tokens=drop_tokens,
            use_residual=use_residual,
        )
        self.hidden_size, self.num_experts, self.k = hidden_size, num_experts, k
        self.capacity_factor, self.min_capacity, self.drop_tokens = capacity_factor, min_capacity, drop_tokens
        self.gate = nn.ModuleDict({"wg": nn.Linear(hidden_size, num_experts, bias=False)})
        copies = {str(number): copy.deepcopy(expert) for number in range(num_experts)}
        self.experts = nn.ModuleDict(copies)
        self.use_residual = use_residual
        if use_residual:
            self.mlp, self.coefficient = expert, nn.Linear(hidden_size, 2)

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        x = hidden_states.reshape(-1, self.hidden_size)
        logits = self.gate["wg"](x)
        gates = logits.softmax(dim=1)
        kept, l_aux = self.kept(gates)
        rows = list(torch.zeros_like(x).unbind()) if len(x) else []
        for choice in kept:
            expert = self.experts[str(choice.expert)]
            share = self.share(gates, kept, choice)
            rows[choice.token] = rows[choice.token] + share * expert(x[choice.token : choice.token + 1])[0]
        y = torch.stack(rows) if rows else x * 0
        idle = sum(expert(x[:0]).sum() for expert in self.experts.values())  # zeros, and so are its gradients
        y = (y + idle).view_as(hidden_states)
        if self.use_residual:
            mix = self.coefficient(hidden_states).softmax(dim=-1)
            y = y * mix[..., :1] + self.mlp(hidden_states) * mix[..., 1:]
        return y, l_aux

    def kept(self, gates: Tensor) -> tuple[list[Choice], Tensor]:
        """The choices that have a place, and the load-balancing loss."""
        tokens, experts = gates.shape
        order = gates.argsort(dim=1, descending=True, stable=True)[:, : self.k].tolist()
        choices = [
            Choice(token, rank, expert) for token, row in enumerate(order) for rank, expert in enumerate(row)
        ]
        counted = 1 if self.k <= 2 else self.k
        chosen = torch.zeros_like(gates)
        for choice in choices:
            if choice.rank < counted:
                chosen[choice.token, choice.expert] = 1
        l_aux = experts * (gates.sum(0) / max(tokens, 1) * chosen.sum(0) / max(tokens, 1)).sum() / counted
        if not self.drop_tokens:
            return choices, l_aux
        width = max(math.ceil(self.k * tokens / experts * self.capacity_factor), self.min_capacity)
        queues: dict[int, list[Choice]] = {}
        for choice in choices:
            queues.setdefault(choice.expert, []).append(choice)
        for expert, queue in queues.items():
            if self.k > 2:
                queue.sort(key=lambda c: -float(gates[c.token, expert].detach()))
            else:
                queue.sort(key=lambda c: c.rank)
        return [choice for queue in queues.values() for choice in queue[:width]], l_aux

    def share(self, gates: Tensor, kept: list[Choice], choice: Choice) -> Tensor:
        """Top-1 weights by the probability itself, the others by that among the token's kept choices."""
        own = gates[choice.token, choice.expert]
        if self.k == 1:
            return own
        return own / sum(gates[other.token, other.expert] for other in kept if other.token == choice.token)


class MixtureBlock(nn.Module):
    """A mixture on the residual stream; l_aux is added up beside it.

    Takes x, or (x, the l_aux so far), and returns (x, l_aux).
    """

    def __init__(self, mixture: Mixture) -> None:
        super().__init__()
        self.norm, self.mixture = nn.LayerNorm(mixture.hidden_size), mixture

    def forward(self, inputs: Tensor | tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        x, before = inputs if isinstance(inputs, tuple) else (inputs, inputs.new_zeros(()))
        y, l_aux, *_ = self.mixture(self.norm(x))
        return x + y, before + l_aux


class OnStream(nn.Module):
    """Another layer on the first of (x, l_aux)."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, inputs: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return self.inner(inputs[0]), inputs[1]
