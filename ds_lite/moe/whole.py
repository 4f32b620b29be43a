"""One routing of a whole micro-batch, where each rank has a part of its sequences (§9.4 §9.14).

Capacity, dropping and the load-balancing loss are not sums over tokens, so they are decided on all of them:
the gate's logits, which are small, are gathered over the seq group, every rank makes the same routing, and
keeps what it says of its own tokens.

Letters: B sequences, T tokens of each, H width, E experts; sp ranks in the group.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ds_lite.comm import ProcessGroup
from ds_lite.moe.noise import TokenNoise
from ds_lite.moe.routing import Routing
from ds_lite.sequence.context import current
from ds_lite.sequence.data import Part
from ds_lite.sequence.whole import gather_tokens


@dataclass(frozen=True)
class WholeMicroBatch:
    """`num_sequences` sequences, of which this rank has `part` and the group the rest; without one all.

    `total` counts the tokens of the micro-batch.
    """

    total: int
    num_sequences: int = 0
    part: Part | None = None
    group: ProcessGroup | None = None

    @classmethod
    def around(cls, hidden_states: Tensor) -> WholeMicroBatch:
        """The micro-batch that hidden states (..., H) belong to.

        Raises: ValueError where sequences are spread, for states that are not (B, T/sp, H).
        """
        context = current()
        if context is None or context.part is None or context.is_inside:
            return cls(hidden_states.shape[:-1].numel())
        part = context.part
        here = part.lengths[part.rank]
        if hidden_states.dim() != 3 or hidden_states.shape[1] != here:
            raise ValueError(
                f"hidden_states of shape {tuple(hidden_states.shape)} at an MoE layer, where this rank has "
                f"{here} of {part.total} tokens; give (sequences, tokens, width), so that it is known which "
                "token is which (§9.14)"
            )
        return cls(hidden_states.shape[0] * part.total, hidden_states.shape[0], part, context.group)

    def gathered(self, x: Tensor) -> Tensor:
        """Rows of this rank's tokens become those of all.

        Shapes: (B*T/sp, ...) -> (B*T, ...).
        Communication: one all-gather; backward one all-reduce.
        """
        if self.part is None:
            return x
        by_sequence = x.unflatten(0, (self.num_sequences, -1))
        return gather_tokens(by_sequence, self.part, self.group).flatten(0, 1)

    def own_noise(self, noise: TokenNoise) -> TokenNoise:
        """What noise of all tokens is for this rank's."""
        return noise if self.part is None else replace(noise, tokens=noise.tokens[self._places()])

    def own(self, routing: Routing) -> Routing:
        """What a routing of all tokens says of this rank's."""
        return routing if self.part is None else routing.rows(self._places(routing.expert.device))

    def _places(self, device: torch.device | None = None) -> Tensor:
        """Where this rank's tokens are among all. (B*T/sp,)."""
        assert self.part is not None
        return self.part.of(torch.arange(self.total, device=device).view(self.num_sequences, -1)).flatten()
