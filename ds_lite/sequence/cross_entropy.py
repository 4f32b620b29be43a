"""Cross entropy of tokens that are spread over the seq group, each rank's vocabulary whole or cut (§9.14).

Legend: B micro-batch, T tokens, V vocabulary; sp ranks hold different tokens, tp ranks other ids.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ds_lite import comm
from ds_lite.comm import ProcessGroup
from ds_lite.sequence.data import Part
from ds_lite.sequence.whole import gather_tokens
from ds_lite.tensor_parallel.cross_entropy import Reduction, vocab_parallel_cross_entropy

__all__ = ["vocab_parallel_cross_entropy", "vocab_sequence_parallel_cross_entropy"]


def vocab_sequence_parallel_cross_entropy(
    vocab_parallel_logits: Tensor,
    target: Tensor,
    sp_group: ProcessGroup | None,
    tp_group: ProcessGroup | None = None,
    vocab_start_index: int | None = None,
    vocab_end_index: int | None = None,
    ignore_index: int = -100,
    reduction: Reduction = "none",
    gather_sequence_loss: bool = True,
) -> Tensor:
    """The loss of every token of the whole sequence, on each rank; tokens come first.

    With `gather_sequence_loss=False` it is `vocab_parallel_cross_entropy`. Ranks may have other numbers of
    tokens.

    Shapes: logits (T/sp, B, V/tp), targets (T/sp, B) -> (T, B).
    Communication: as `vocab_parallel_cross_entropy`, and two all-gathers over `sp_group`: lengths, losses;
    backward one all-reduce of the losses' gradients.
    Gradient: of this rank's logits, from the sum of all ranks' gradients: the engine takes their mean.
    Raises: ValueError for another reduction than "none" of losses to gather, and as there.

    Source: §9.14; DeepSpeed `sequence/cross_entropy.py::vocab_sequence_parallel_cross_entropy` @ 0.19.8.
    Differs: DeepSpeed's backward takes this rank's own gradient alone, so what the engine averages is sp
    times too small; it computes in float32.
    """
    if gather_sequence_loss and reduction != "none":
        raise ValueError(
            f"reduction={reduction!r} leaves no token losses to gather; use reduction='none', or "
            "gather_sequence_loss=False (§9.14)"
        )
    losses = vocab_parallel_cross_entropy(
        vocab_parallel_logits,
        target,
        tp_group,
        sp_group,
        vocab_start_index,
        vocab_end_index,
        ignore_index=ignore_index,
        reduction=reduction,
    )
    if not gather_sequence_loss or sp_group is None:
        return losses
    return gather_tokens(losses, _part(losses, sp_group), sp_group, dim=0)


def _part(x: Tensor, group: ProcessGroup) -> Part:
    here = torch.tensor([x.shape[0]], device=comm.control_device())
    lengths = here.new_empty(comm.get_world_size(group))
    comm.all_gather_into_tensor(lengths, here, group=group)
    return Part(tuple(lengths.tolist()), comm.get_rank(group))
