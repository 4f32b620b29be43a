"""The loss of a causal language model on the last stage: the next token, and the router's (§9.9)."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ds_lite.pipe.causal_lm.hull import Hull
from ds_lite.pipe.causal_lm.routers import balancing_loss
from ds_lite.sequence.data import sequence_loss, shift_labels


class CausalLoss:
    """Mean cross entropy of each token's logits and the token after it, in the dtype of the logits.

    Labels are those of transformers: of the same places as the ids, -100 where there is none. A model whose
    config asks for its router's loss adds that, times its coefficient.

    Shapes: outputs logits (B, T, V), or (logits, router's sums, mask); labels (B, T) -> 0-dim.
    """

    def __init__(self, hull: Hull) -> None:
        self.hull = hull

    def __call__(self, outputs: Any, labels: Tensor) -> Tensor:
        logits, *rest = outputs if isinstance(outputs, tuple) else (outputs,)
        loss = sequence_loss(logits, shift_labels(labels), None)
        router = self.hull.router
        if router is None:
            return loss
        sums, *mask = rest
        tokens = mask[0].sum() if mask else logits.shape[0] * logits.shape[1]
        balance = balancing_loss(sums, tokens, self.hull.num_gates)
        return loss + router.coefficient * balance.to(loss.dtype)
