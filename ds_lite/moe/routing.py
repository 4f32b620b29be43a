"""A routing: which expert each token chose, and which place it got in that expert's queue (§9.12.1).

A routing is linear in T*K. The (T, E, C) tensors of the papers are views for the reader, built on request.

Letters: T tokens, K choices per token, E experts, C capacity.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

Dense = tuple[Tensor, Tensor, Tensor, Tensor]
Sparse = tuple[Tensor, int, int, Tensor, Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class Routing:
    """Where the choices of T tokens go. The gradient passes through `weight` and `l_aux` alone.

    A choice that is not kept was either dropped, because its expert was full, or belongs to a token that was
    not to be used.
    """

    expert: Tensor  # (T, K) int64: the chosen expert, the likeliest choice first
    slot: Tensor  # (T, K) int64: the place in that expert's buffer, 0..capacity-1; -1 if not kept
    weight: Tensor  # (T, K) float: the share of that expert's output; 0 if not kept
    dropped: Tensor  # (T, K) bool: the expert was full
    l_aux: Tensor  # () float: the load-balancing loss
    exp_counts: Tensor  # (E,) int64: choices of each expert, before dropping
    capacity: int  # width of each expert's buffer; more than a rank's own limit where a peer needs more

    @property
    def num_experts(self) -> int:
        return len(self.exp_counts)

    @property
    def kept(self) -> Tensor:
        """(T, K) bool: the choices that have a slot."""
        return self.slot >= 0

    def tokens(self, start: int, stop: int) -> Routing:
        """The same routing for the tokens `start` to `stop`: what a rank that holds only these needs."""
        rows = {name: getattr(self, name)[start:stop] for name in ("expert", "slot", "weight", "dropped")}
        return replace(self, **rows)

    def rows(self, places: Tensor) -> Routing:
        """The same routing for the tokens at these places (n,)."""
        kept = {name: getattr(self, name)[places] for name in ("expert", "slot", "weight", "dropped")}
        return replace(self, **kept)

    def combine_weights(self) -> Tensor:
        """(T, E, C): the share of each slot in each token's output. For the reader: T*E*C numbers."""
        token, choice = self.kept.nonzero(as_tuple=True)
        place = (token, self.expert[token, choice], self.slot[token, choice])
        empty = self.weight.new_zeros(len(self.expert), self.num_experts, self.capacity)
        return empty.index_put(place, self.weight[token, choice])

    def dispatch_mask(self) -> Tensor:
        """(T, E, C) bool: which slot each token fills.

        Differs: DeepSpeed marks the non-zero weights, and so forgets a kept choice of weight zero.
        """
        token, choice = self.kept.nonzero(as_tuple=True)
        place = (token, self.expert[token, choice], self.slot[token, choice])
        empty = torch.zeros(
            len(self.expert), self.num_experts, self.capacity, dtype=torch.bool, device=self.slot.device
        )
        return empty.index_put(place, torch.ones_like(token, dtype=torch.bool))

    def dense(self) -> Dense:
        """What DeepSpeed's gates return: l_aux, combine weights, dispatch mask, counts."""
        return self.l_aux, self.combine_weights(), self.dispatch_mask(), self.exp_counts

    def sparse(self) -> Sparse:
        """What DeepSpeed's gates return with `sparse_routes`: l_aux, capacity, number of experts, then
        (K, T) experts (-1 if not kept), slots (0 if not kept) and weights, then the counts."""
        expert = self.expert.masked_fill(~self.kept, -1).T.int().contiguous()
        slot = self.slot.clamp(min=0).T.int().contiguous()
        weight = self.weight.T.contiguous()
        return self.l_aux, self.capacity, self.num_experts, expert, slot, weight, self.exp_counts
