"""Where in the training the layers are, so that their noise can be a function of it (§9.12.2)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ds_lite.moe.noise import TokenNoise

_TOKENS = 2**32  # more than a micro-batch has


@dataclass
class Clock:
    """One for all layers of an engine, which sets it before each forward and backward.

    `micro_batch` is global: replica * micro-batches of a replica + its number there. So recomputed layers
    meet their noise again, and other numbers of replicas meet the same noise.
    """

    seed: int
    step: int = 0
    micro_batch: int = 0

    def noise(self, layer: int, num_tokens: int, device: torch.device) -> TokenNoise:
        """The noise of one layer for the tokens of the micro-batch now under way."""
        tokens = self.micro_batch * _TOKENS + torch.arange(num_tokens, device=device)
        return TokenNoise(self.seed, self.step, layer, tokens)
