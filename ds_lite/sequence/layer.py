"""DistributedAttention: any attention function on a sequence that is spread over ranks (§9.14).

    q, k, v   (B, T/sp, N, D)   some tokens, all heads
    exchange  (B, T, N/sp, D)   all tokens, some heads: the attention needs nothing else
    exchange  (B, T/sp, N, D)   back

Heads are dealt in whole kv groups, uneven if need be. Key and value heads fewer than ranks go to several
ranks, and their gradients are summed.

Legend: B micro-batch, T tokens, N heads, G key and value heads, D head width; sp ranks in the group.

Source: §9.14; DeepSpeed `sequence/layer.py::DistributedAttention` @ 0.19.8.
Differs: q, k and v travel in one exchange, so a forward has two where DeepSpeed has four; what a rank keeps
does not enter it; head counts belong to the call, not to the process.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from ds_lite import comm
from ds_lite.agreement import raise_together
from ds_lite.comm import ProcessGroup
from ds_lite.dealing import HeadDeal, Range, deal, deal_heads, side_by_side
from ds_lite.grid import PipelineParallelGrid
from ds_lite.sequence.context import current, runs_as_one_process
from ds_lite.sequence.exchange import Layout, to_heads, to_sequence


class DistributedAttention(nn.Module):
    """Ulysses around `local_attention(q, k, v, *args, **kwargs)`, which sees the whole sequence.

    `batch_dim_idx` 0 means (B, T, N, D), 1 means (T, B, N, D); 3-D tensors have N*D columns in place of the
    last two. `scatter_idx` and `gather_idx` are DeepSpeed's: the heads are dimension 2, the tokens the
    other one beside the batch. `num_kv_heads` is needed for 3-D tensors whose columns do not divide by sp.
    The group may also come from `bind(grid)`. `sp_stream` is accepted and not used: there is one exchange
    to wait for.

    Shapes: query (B, T/sp, N, D), key and value (B, T/sp, G, D) -> (B, T/sp, N, D).
    Communication: two all_to_all_single; 2·B·T/sp·(N+G)·D elements leave or stay, (sp-1)/sp of them leave.
    The first forward, and one with other shapes, begins with one all-reduce that compares the shapes.
    Gradient: the same two exchanges backwards.
    Raises: ValueError, on every rank of the group, for heads that cannot be dealt, and for ranks that bring
    different shapes.
    """

    def __init__(
        self,
        local_attention: Callable[..., Tensor],
        sequence_process_group: ProcessGroup | None,
        scatter_idx: int = 2,
        gather_idx: int = 0,
        sp_stream: Any = None,
        num_kv_heads: int | None = None,
    ) -> None:
        super().__init__()
        if scatter_idx != 2 or gather_idx not in (0, 1):
            raise ValueError(
                f"scatter_idx={scatter_idx}, gather_idx={gather_idx}: heads are dimension 2, tokens "
                "dimension 0 or 1; write scatter_idx=2 (§9.14)"
            )
        self.local_attn = local_attention
        self.spg = sequence_process_group
        self.num_kv_heads = num_kv_heads
        self._agreed: tuple[Any, ...] = ()  # the shapes that all ranks had last

    def bind(self, grid: PipelineParallelGrid) -> None:
        """Take the group of the seq axis where the constructor got none."""
        self.spg = grid.group("seq") if self.spg is None else self.spg

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        batch_dim_idx: int,
        rotary_pos_emb: tuple[Tensor, Tensor] | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> Tensor:
        context = current()
        if runs_as_one_process():
            return self._attend(query, key, value, batch_dim_idx, rotary_pos_emb, args, kwargs)
        if context is not None and context.part is not None and self._is_its_group(context.group):
            tokens = list(context.part.lengths)  # the engine has compared the ranks' batches
            _check(query, key, value, batch_dim_idx)
        else:
            self._agree(query, key, value, batch_dim_idx)
            tokens = [query.shape[1 - batch_dim_idx]] * ranks_of(self.spg)
        dealt = deal_of(query, key, ranks_of(self.spg), self.num_kv_heads)

        def local(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            with context.inside() if context is not None else nullcontext():
                return self._attend(q, k, v, batch_dim_idx, rotary_pos_emb, args, kwargs)

        return exchanged(
            local,
            query,
            key,
            value,
            self.spg,
            seq_dim=1 - batch_dim_idx,
            head_dim=2,
            lengths=tokens,
            dealt=dealt,
        )

    def _is_its_group(self, group: ProcessGroup) -> bool:
        """Whether an engine spreads its sequences over the ranks of this layer."""
        return self.spg is not None and comm.ranks_of(group) == comm.ranks_of(self.spg)

    def _attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        batch_dim_idx: int,
        rotary: tuple[Tensor, Tensor] | None,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Tensor:
        """The local attention, on all tokens."""
        if rotary is not None:
            q, k = (_rotated(x, rotary, batch_dim_idx) for x in (q, k))
        mixed: Tensor = self.local_attn(q, k, v, *args, **kwargs)
        return mixed

    def _agree(self, query: Tensor, key: Tensor, value: Tensor, batch_dim_idx: int) -> None:
        """Before anything is exchanged: do all ranks bring the same shapes, and can the heads be dealt?"""
        shapes = (query.shape, key.shape, value.shape, batch_dim_idx, query.dtype)
        if shapes == self._agreed:
            return
        error: Exception | None = None
        try:
            _check(query, key, value, batch_dim_idx)
            deal_of(query, key, ranks_of(self.spg), self.num_kv_heads)
        except ValueError as refusal:
            error = refusal
        sizes = [*query.shape, 0, 0, 0, 0]
        dims = dict(zip(("local tokens", "batch"), (sizes[1 - batch_dim_idx], sizes[batch_dim_idx])))
        widths = {"columns or heads": sizes[2], "key columns or heads": [*key.shape, 0, 0, 0][2]}
        if ranks_of(self.spg) > 1:
            raise_together(error, self.spg, **dims, **widths)
        elif error is not None:
            raise error
        self._agreed = shapes


def exchanged(
    local_attention: Callable[[Tensor, Tensor, Tensor], Tensor],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    group: ProcessGroup | None,
    *,
    seq_dim: int,
    head_dim: int,
    lengths: Sequence[int],
    dealt: HeadDeal,
    out_dims: tuple[int, int] | None = None,
) -> Tensor:
    """Attention of this rank's heads over all tokens, between the two exchanges.

    `lengths` says how many tokens each rank has. `dealt` is what `deal_of` gives. The output of
    `local_attention` has tokens and heads where the query has them, or at `out_dims`; heads may have become
    columns.

    Shapes: query (B, T/sp, N, D), or its dimensions in another order -> the same, with the value's width.
    Communication: two all_to_all_single.
    """
    if ranks_of(group) == 1:
        return local_attention(query, key, value)
    q_layout = Layout(seq_dim, head_dim, tuple(lengths), dealt.query)
    kv_layout = Layout(seq_dim, head_dim, tuple(lengths), dealt.kv)
    q, k, v = to_heads([query, key, value], [q_layout, kv_layout, kv_layout], group)
    mixed = local_attention(q, k, v)
    out_seq, out_head = out_dims or (seq_dim, head_dim)
    width = mixed.shape[out_head] // q.shape[head_dim]  # 1, unless heads have become columns
    heads = tuple((start * width, stop * width) for start, stop in dealt.query)
    return to_sequence([mixed], [Layout(out_seq, out_head, tuple(lengths), heads)], group)[0]


def deal_of(
    query: Tensor, key: Tensor, ranks: int, num_kv_heads: int | None = None, *, head_dim: int = 2
) -> HeadDeal:
    """Which heads each rank computes; for 3-D tensors in columns.

    Raises: ValueError for more ranks than query heads, and for kv heads that cannot be shared evenly.
    """
    counts = query.shape[head_dim], key.shape[head_dim]
    width = 1
    if query.dim() == 3 and num_kv_heads is not None:
        width = max(1, counts[1] // num_kv_heads)
    elif query.dim() == 3:
        return _columns(counts, ranks)
    dealt = deal_heads(
        counts[0] // width, counts[1] // width, ranks, what="sequence_parallel_size", section="§9.14"
    )

    def wide(ranges: Sequence[Range]) -> tuple[Range, ...]:
        return tuple((start * width, stop * width) for start, stop in ranges)

    return HeadDeal(wide(dealt.query), wide(dealt.kv), dealt.kv_is_replicated)


def _columns(counts: tuple[int, int], ranks: int) -> HeadDeal:
    if any(count % ranks for count in counts):
        raise ValueError(
            f"3-D tensors of {counts[0]} and {counts[1]} columns do not divide by "
            f"sequence_parallel_size={ranks}, and do not say where their heads are; pass num_kv_heads, or "
            "4-D tensors (§9.14)"
        )
    query, kv = (tuple(ranges[0] for ranges in side_by_side(deal(count, ranks))) for count in counts)
    return HeadDeal(query, kv, False)


def ranks_of(group: ProcessGroup | None) -> int:
    """How many ranks share a sequence; None is no group, never the world."""
    return 1 if group is None else comm.get_world_size(group)


def _check(query: Tensor, key: Tensor, value: Tensor, batch_dim_idx: int) -> None:
    shapes = [tuple(x.shape) for x in (query, key, value)]
    if batch_dim_idx not in (0, 1):
        raise ValueError(
            f"batch_dim_idx={batch_dim_idx} must be 0, batch first, or 1, sequence first (§9.14)"
        )
    if query.dim() not in (3, 4) or key.dim() != query.dim() or value.dim() != query.dim():
        raise ValueError(
            f"query, key and value of shapes {shapes}; give all three as (B, T/sp, N, D) or (T/sp, B, N, "
            "D), or 3-D with N*D columns (§9.14)"
        )
    if len({shape[:2] for shape in shapes}) > 1 or shapes[1][2:3] != shapes[2][2:3]:
        raise ValueError(
            f"query, key and value of shapes {shapes} do not fit: batch and tokens must be equal, and key "
            "and value have the same heads (§9.14)"
        )


def _rotated(x: Tensor, rotary: tuple[Tensor, Tensor], batch_dim_idx: int) -> Tensor:
    """Rotary position embedding of the whole sequence: cos and sin (T, 1, 1, R) turn the first R columns."""
    cos, sin = (part.transpose(0, 1) if batch_dim_idx == 0 else part for part in rotary)
    turned, kept = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
    first, second = turned.chunk(2, dim=-1)
    return torch.cat((turned * cos + torch.cat((-second, first), dim=-1) * sin, kept), dim=-1)


# -------------------------------------------------------------------------- DeepSpeed's single exchanges


def single_all_to_all(
    input: Tensor,
    scatter_idx: int,
    gather_idx: int,
    batch_dim_idx: int,
    group: ProcessGroup | None,
    async_op: bool = False,
    handle: Any = None,
    type: str | None = None,
    num_kv_heads: int | None = None,
) -> Tensor:
    """One exchange of one tensor: heads are scattered and tokens gathered if scatter_idx is 2, else the
    reverse.

    Heads that do not divide are dealt in kv groups, of which there are `num_kv_heads` (default: one a head).

    Shapes: scatter_idx=2: (B, T/sp, N, D) -> (B, T, N/sp, D); else back. Sequence first with batch_dim_idx=1.
    Communication: one all_to_all_single; before it one all-gather of a number, since ranks may differ in it.
    Gradient: the inverse exchange.
    Raises: ValueError, on every rank, for what cannot be dealt; for async_op=True, which is not built.

    Source: §9.14; DeepSpeed `sequence/layer.py::single_all_to_all` @ 0.19.8.
    """
    if async_op:
        raise ValueError(
            "async_op=True is not built: the exchange is waited for; write async_op=False (§9.14)"
        )
    ranks, seq_dim = ranks_of(group), 1 - batch_dim_idx
    if ranks == 1:
        return input
    if scatter_idx >= 2:
        lengths = _gathered(input.shape[seq_dim], group)
        heads = _dealt_heads(input.shape[2], num_kv_heads, ranks)
        return to_heads([input], [Layout(seq_dim, 2, lengths, heads)], group)[0]
    counts = _gathered(input.shape[2], group)
    tokens = tuple(deal(input.shape[seq_dim], ranks, what="tokens"))
    heads = tuple(ranges[0] for ranges in side_by_side(list(counts)))
    return to_sequence([input], [Layout(seq_dim, 2, tokens, heads)], group)[0]


def _dealt_heads(num_heads: int, num_kv_heads: int | None, ranks: int) -> tuple[Range, ...]:
    dealt = deal_heads(
        num_heads, num_kv_heads or num_heads, ranks, what="sequence_parallel_size", section="§9.14"
    )
    return dealt.query


def _gathered(number: int, group: ProcessGroup | None) -> tuple[int, ...]:
    """This number of every rank of the group."""
    mine = torch.tensor([number], device=comm.control_device())
    everyone = mine.new_empty(ranks_of(group))
    comm.all_gather_into_tensor(everyone, mine, group=group)
    return tuple(everyone.tolist())


def uneven_heads_all2all(
    input: Tensor,
    scatter_idx: int,
    gather_idx: int,
    batch_dim_idx: int,
    group: ProcessGroup | None,
    num_kv_heads: int | None = None,
) -> Tensor:
    """`single_all_to_all` under the name that DeepSpeed gives its form for heads that do not divide."""
    return single_all_to_all(input, scatter_idx, gather_idx, batch_dim_idx, group, num_kv_heads=num_kv_heads)


class _SeqAllToAll:
    """`single_all_to_all` with the arguments in the order of DeepSpeed's autograd function."""

    @staticmethod
    def apply(
        group: ProcessGroup | None,
        input: Tensor,
        scatter_idx: int,
        gather_idx: int,
        batch_dim_idx: int,
        *overlap: Any,
    ) -> Tensor:
        return single_all_to_all(input, scatter_idx, gather_idx, batch_dim_idx, group)
