"""FPDT beside attention: the feed-forward and the loss, some tokens at a time (§9.14.2).

Both treat each token by itself, so a chunk is any run of this rank's tokens, whichever they are. Hidden
states have the sequence first and the batch second.

Legend: B micro-batch, T tokens, H hidden width, F width of the feed-forward, V vocabulary; sp ranks in the
group.
"""

from __future__ import annotations

import math

from torch import Tensor
from torch.nn import functional as F

from ds_lite.comm import ProcessGroup
from ds_lite.sequence.data import Part
from ds_lite.sequence.fpdt_checks import raise_on_all, wrong_loss
from ds_lite.sequence.pair import wide
from ds_lite.sequence.tiled import sequence_tiled_compute, tiled
from ds_lite.sequence.whole import gather_tokens


class FPDT_FFN:
    """Linear, GeLU (tanh form), linear, some tokens at a time; called as `FPDT_FFN.apply`."""

    @staticmethod
    def apply(
        x: Tensor,
        w1: Tensor,
        b1: Tensor | None,
        w2: Tensor,
        b2: Tensor | None,
        add_bias: bool,
        chunk_size: int,
    ) -> tuple[Tensor, Tensor | None]:
        """The output, and b2 to add later, or None where it is added already.

        `chunk_size` counts this rank's tokens and need not divide them. Backward runs each chunk again.

        Shapes: x (T/sp, B, H), w1 (F, H), b1 (F), w2 (H, F), b2 (H) -> (T/sp, B, H).
        Gradient: autograd's own, of every tensor given.
        Raises: ValueError for chunk_size < 1.

        Source: §9.14; DeepSpeed `sequence/fpdt_layer.py::FPDT_FFN` @ 0.19.8.
        Differs: DeepSpeed overwrites x in backward and gives a bias that is added later no gradient.
        """
        if chunk_size < 1:
            raise ValueError(f"chunk_size={chunk_size} must be at least 1 token (§9.14)")

        def feed_forward(rows: Tensor) -> Tensor:
            inner = F.gelu(F.linear(rows, w1, b1), approximate="tanh")
            return F.linear(inner, w2, b2 if add_bias else None)

        tiles = max(1, math.ceil(x.shape[0] / chunk_size))
        out = tiled(feed_forward, x.flatten(0, -2), tiles)
        return out.view(*x.shape[:-1], -1), None if add_bias else b2


class FPDT_LogitsLoss:
    """The loss of every token of the sequence, logits some tokens at a time; `FPDT_LogitsLoss.apply`."""

    @staticmethod
    def apply(
        lm_output: Tensor,
        labels: Tensor,
        logit_weights: Tensor,
        rank: int,
        spg_size: int,
        spg: ProcessGroup | None,
        num_chunk: int,
    ) -> Tensor:
        """Each token's cross entropy, of all ranks, in the order of the ranks; 0 where the label is -100.

        Divide their sum by the number of labels that are not -100, or use the loss mask of
        FPDT_InputConstruct, which has this order.

        Shapes: lm_output (T/sp, B, H), labels (B, T/sp), logit_weights (V, H) -> (T, B), in float32 or
        wider.
        Communication: one all-reduce of a few integers, one all-gather of T/sp * B numbers; backward one
        all-reduce of T * B.
        Gradient: of this rank's tokens, summed over what all ranks make of them: if each backpropagates the
        whole loss, the mean of the ranks' gradients is that of one process.
        Raises: ValueError, on every rank, for shapes that do not fit, labels outside the vocabulary, and a
        rank or size that the group does not have.

        Source: §9.14; DeepSpeed `sequence/fpdt_layer.py::FPDT_LogitsLoss` @ 0.19.8.
        Differs: DeepSpeed's backward takes -100 for the token before the last hundred, and does not sum.
        """
        error = wrong_loss(lm_output, labels, logit_weights, rank, spg_size, spg, num_chunk)
        raise_on_all(error, lm_output, spg)

        def losses(hidden: Tensor, labels: Tensor, weight: Tensor) -> Tensor:
            logits = F.linear(hidden, weight)
            flat = F.cross_entropy(
                logits.flatten(0, 1).to(wide(logits.dtype)), labels.flatten(), reduction="none"
            )
            return flat.view(labels.shape)

        by_sample = {"hidden": lm_output.transpose(0, 1), "labels": labels}
        mine = sequence_tiled_compute(
            losses, lm_output.shape[0], num_chunk, by_sample, {"weight": logit_weights}, "hidden",
            output_reduction=None,
        ).t()  # fmt: skip
        return gather_tokens(mine, Part((len(lm_output),) * spg_size, rank), spg, dim=0)
