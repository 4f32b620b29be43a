"""Cross entropy on logits whose vocabulary is cut over the model axis (§9.3).

No rank ever holds a whole row of logits. What the softmax needs of the other ranks is three numbers a token:
the maximum, the sum of the exponentials and the target's logit.

Legend: V vocabulary. Targets are ids of the whole vocabulary and equal on all ranks of the tensor-parallel
group.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ds_lite import comm
from ds_lite.comm import ProcessGroup
from ds_lite.dealing import deal_evenly, side_by_side
from ds_lite.grid import PipelineParallelGrid
from ds_lite.tensor_parallel.regions import is_alone

Reduction = Literal["mean", "sum", "none"]


def vocab_parallel_cross_entropy(
    vocab_parallel_logits: Tensor,
    target: Tensor,
    tp_group: ProcessGroup | None = None,
    sp_group: ProcessGroup | None = None,
    vocab_start_index: int | None = None,
    vocab_end_index: int | None = None,
    global_vocab_size: int | None = None,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
) -> Tensor:
    """`torch.nn.functional.cross_entropy` over a vocabulary cut over `tp_group`, in the logits' dtype.

    With `sp_group`, whose ranks hold different tokens, each rank's loss is scaled so that the average over
    the ranks is the loss of all tokens: the mean is sp * (sum of its losses) / (valid tokens of the group),
    the sum sp * (sum of its losses). A rank without valid tokens gets an exact zero; if no rank has one, the
    mean is nan as in one process. None is no group, for `tp_group` a whole vocabulary.

    Shapes: logits (..., V/tp), target (...) -> 0-dim, or (...) for reduction="none".
    Communication: two all-reduces over tp_group, of one and of two numbers per token; with sp_group one of
    two numbers. Without all three vocabulary numbers also one all-gather of three numbers to find and check
    them.
    Gradient: of this rank's logits; nothing is summed over a group.
    Raises: ValueError for another reduction, shapes that do not fit, shards that are not neighbours in order
    of their ranks, and targets outside the vocabulary; on every rank of both groups alike.

    Source: §9.3; DeepSpeed `sequence/cross_entropy.py::vocab_parallel_cross_entropy` @ 0.19.8.
    Differs: DeepSpeed computes in float32, gives zero for a mean over no tokens, and each rank the whole loss
    of sp_group; uneven shards need explicit bounds there.
    """
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"reduction={reduction!r} is unknown; choose mean, sum or none (§9.3)")
    if vocab_parallel_logits.shape[:-1] != target.shape:
        raise ValueError(
            f"logits of shape {tuple(vocab_parallel_logits.shape)} need targets of shape "
            f"{tuple(vocab_parallel_logits.shape[:-1])}, got {tuple(target.shape)}; the vocabulary is the "
            f"last dimension (§9.3)"
        )
    start, vocabulary = vocab_start_index, global_vocab_size
    if start is None or vocab_end_index is None or vocabulary is None:
        start, vocabulary = _agree_on_shards(vocab_parallel_logits, tp_group, start, vocab_end_index)
    is_valid = target != ignore_index
    valid_tokens = _count_valid(target, is_valid, vocabulary, sp_group)
    losses: Tensor = _TokenLosses.apply(vocab_parallel_logits, target, is_valid, tp_group, start)
    if reduction == "none":
        return losses
    total = losses.sum() if sp_group is None else losses.sum() * comm.get_world_size(sp_group)
    return total if reduction == "sum" else total / valid_tokens


def _agree_on_shards(
    logits: Tensor, group: ProcessGroup | None, start: int | None, stop: int | None
) -> tuple[int, int]:
    """This rank's first id and the size of the vocabulary, from all ranks' widths; checks given bounds."""
    ranks, rank = (1, 0) if group is None else (comm.get_world_size(group), comm.get_rank(group))
    mine = torch.tensor(
        [logits.shape[-1], -1 if start is None else start, -1 if stop is None else stop], device=logits.device
    )
    everyone = mine.new_empty(ranks * len(mine))
    if group is None:
        everyone.copy_(mine)
    else:
        comm.all_gather_into_tensor(everyone, mine, group=group)
    widths, starts, stops = everyone.view(ranks, -1).T.tolist()
    bounds = [(begin, end) for ((begin, end),) in side_by_side(widths)]
    for (begin, end), given_start, given_stop in zip(bounds, starts, stops, strict=True):
        if given_start not in (-1, begin) or given_stop not in (-1, end):
            raise ValueError(
                f"vocab_start_index {starts} and vocab_end_index {stops} by rank contradict shards of "
                f"{widths} ids, which lie at {bounds}; give each rank its own bounds or none (§9.3)"
            )
    return bounds[rank][0], sum(widths)


def _count_valid(target: Tensor, is_valid: Tensor, vocabulary: int, sp_group: ProcessGroup | None) -> Tensor:
    """The tokens that count, of all ranks of `sp_group`; ValueError there on all of them for a bad target."""
    is_outside = is_valid & ((target < 0) | (target >= vocabulary))
    counts = torch.stack((is_valid.sum(), is_outside.sum()))
    if sp_group is not None:
        comm.all_reduce(counts, group=sp_group)
    if counts[1].item():
        here = target[is_outside].unique().tolist()
        raise ValueError(
            f"{counts[1].item()} targets lie outside the vocabulary 0..{vocabulary - 1}, here {here}; "
            f"mark tokens without a label with ignore_index (§9.3)"
        )
    return counts[0]


class _TokenLosses(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, target: Tensor, is_valid: Tensor, group: ProcessGroup | None, start: int
    ) -> Tensor:
        highest = logits.amax(dim=-1)
        if not is_alone(group):
            comm.all_reduce(highest, op=comm.ReduceOp.MAX, group=group)
        shifted = logits - highest.unsqueeze(-1)
        local = target - start
        is_mine = is_valid & (local >= 0) & (local < logits.shape[-1])
        local = local.masked_fill(~is_mine, 0).unsqueeze(-1)
        chosen = shifted.gather(-1, local).squeeze(-1).masked_fill(~is_mine, 0)
        exponentials = shifted.exp_()
        sums = torch.stack((exponentials.sum(dim=-1), chosen))
        if not is_alone(group):
            comm.all_reduce(sums, group=group)
        total, chosen = sums
        ctx.save_for_backward(exponentials.div_(total.unsqueeze(-1)), local, is_mine, is_valid)
        return (total.log() - chosen).masked_fill(~is_valid, 0)

    @staticmethod
    @once_differentiable  # type: ignore[misc]
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None, None]:
        probabilities, local, is_mine, is_valid = ctx.saved_tensors
        # A mean over no valid tokens sends nan, which belongs to none of them.
        weight = gradients[0].masked_fill(~is_valid, 0).unsqueeze(-1)
        gradient = probabilities * weight
        gradient.scatter_add_(-1, local, (-weight).masked_fill(~is_mine.unsqueeze(-1), 0))
        return gradient, None, None, None, None


class VocabParallelCrossEntropy(nn.Module):
    """The loss for a head with vocabulary-parallel logits; a `loss_fn` for PipelineModule.

    The vocabulary of `num_embeddings` ids is dealt as VocabParallelEmbedding and LinearLayer deal it. The
    groups come from the constructor or from `bind(grid)`; without any, the logits are whole.

    Shapes: logits (..., V/tp), labels (...) -> 0-dim.
    Communication: as `vocab_parallel_cross_entropy`, without the all-gather.
    Raises: ValueError as there, and for logits that are not this rank's share of the vocabulary.
    """

    def __init__(
        self,
        num_embeddings: int,
        mp_group: ProcessGroup | None = None,
        sp_group: ProcessGroup | None = None,
        *,
        ignore_index: int = -100,
        reduction: Reduction = "mean",
    ) -> None:
        super().__init__()
        self.num_embeddings, self.ignore_index, self.reduction = num_embeddings, ignore_index, reduction
        self.group, self.sp_group = mp_group, sp_group

    def bind(self, grid: PipelineParallelGrid) -> None:
        """Take the groups of the model and the seq axis where the constructor got none."""
        self.group = grid.group("model") if self.group is None else self.group
        self.sp_group = grid.group("seq") if self.sp_group is None else self.sp_group

    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        ranks, rank = (
            (1, 0) if self.group is None else (comm.get_world_size(self.group), comm.get_rank(self.group))
        )
        ((start, stop),) = deal_evenly(self.num_embeddings, ranks)[rank]
        if logits.shape[-1] != stop - start:
            raise ValueError(
                f"logits of {logits.shape[-1]} ids on rank {rank} of {ranks}, whose share of the "
                f"{self.num_embeddings} ids is {stop - start}; use a head that does not gather (§9.3)"
            )
        return vocab_parallel_cross_entropy(
            logits,
            labels,
            self.group,
            self.sp_group,
            start,
            stop,
            self.num_embeddings,
            ignore_index=self.ignore_index,
            reduction=self.reduction,
        )

    def extra_repr(self) -> str:
        return f"num_embeddings={self.num_embeddings}, ignore_index={self.ignore_index}"
