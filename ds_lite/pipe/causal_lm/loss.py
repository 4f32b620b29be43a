"""The loss of a causal language model on the last stage: the next token, and the router's (§9.9)."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ds_lite.pipe.causal_lm.hull import Hull
from ds_lite.pipe.causal_lm.routers import balancing_loss
from ds_lite.sequence.data import IGNORE, sequence_loss, shift_labels, sum_over_ranks


class CausalLoss:
    """Mean cross entropy of each token's logits and the token after it, in the dtype of the logits.

    Labels are those of transformers: of the same places as the ids, -100 where there is none. A model whose
    config asks for its router's loss adds that, times its coefficient.

    Where sequences are spread over ranks, each has its tokens of the logits and all labels; the loss is that
    of all tokens.

    Shapes: outputs logits (B, T/sp, V), or (logits, router's sums, context); labels (B, T) -> 0-dim.
    Communication: with sp ranks one all-reduce of the loss, one of the router's sums.
    """

    def __init__(self, hull: Hull) -> None:
        self.hull = hull

    def __call__(self, outputs: Any, labels: Tensor) -> Tensor:
        logits, *rest = outputs if isinstance(outputs, tuple) else (outputs,)
        group = None if self.hull.tokens is None else self.hull.tokens.group
        part, shifted = self.hull.part(labels.shape[1]), shift_labels(labels)
        own = shifted if part is None else part.of(shifted)
        loss = sequence_loss(logits, own, group, num_valid=(shifted != IGNORE).sum())
        router = self.hull.router
        if router is None:
            return loss
        mask = dict(zip(self.hull.context, rest[1:], strict=False)).get("attention_mask")
        tokens = labels.numel() if mask is None else mask.sum()
        balance = balancing_loss(sum_over_ranks(rest[0], group), tokens, self.hull.num_gates)
        return loss + router.coefficient * balance.to(loss.dtype)
