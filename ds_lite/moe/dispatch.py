"""Tokens to the experts and back: by index within a rank, by all-to-all between ranks (§9.4 §9.12.4).

    x (T, H) --group by expert--> rows (N, H) --exchange--> rows (R, H) of my experts --group by expert-->
    experts --back the same way--> (N, H) --weighted sum over a token's choices--> (T, H)

Only kept choices become rows, so N <= T*K and nothing of size T x E x C exists. Between ranks exactly these
rows travel: the ranks first tell each other how many (E numbers), then send uneven pieces. Buffers padded to
a capacity would save that small message, but move and multiply empty rows, and for drop_tokens=False the
busiest expert's width would count for all.

Letters: T tokens, H width, K choices per token, E experts, N rows this rank sends, R rows it receives.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ds_lite import comm, trace
from ds_lite.agreement import raise_together
from ds_lite.comm import ProcessGroup
from ds_lite.moe.routing import Routing

Experts = Callable[[Tensor, list[int]], Tensor]  # (rows grouped by expert, rows of each) -> rows


def through_experts(x: Tensor, routing: Routing, experts: Experts, group: ProcessGroup | None) -> Tensor:
    """Each token through the experts it chose: their outputs, added up with the routing's weights.

    `experts` are all experts, or, with a `group`, the equal share of them that this rank holds. A token that
    no expert kept gives zeros.

    Shapes: x (T, H) -> (T, H).
    Communication: with a group, forward one all-to-all of E integers and two of N rows; backward the two of
    rows again. On a GPU the host waits for the counts.
    Gradient: to x and to the routing's weights.
    """
    order, token, counts = group_by_expert(routing)
    rows = x.index_select(0, token)
    if group is None:
        out = experts(rows, counts.tolist())
    else:
        exchange = Exchange.announce(counts, group)
        out = exchange.back(experts(exchange.there(rows), exchange.rows_per_expert))
    return combine(out, order, routing).to(x.dtype)


def combine(out: Tensor, order: Tensor, routing: Routing) -> Tensor:
    """Each token's rows, times their weights, added up in the order of its choices.

    Shapes: out (N, H), order (N,) the rows' places in (T*K) -> (T, H).
    """
    rows_of_token = routing.kept.sum(dim=1)
    weights = routing.weight[routing.kept].to(out.dtype)
    start = rows_of_token.cumsum(0) - rows_of_token
    return F.embedding_bag(order.argsort(), out, start, mode="sum", per_sample_weights=weights)


def group_by_expert(routing: Routing) -> tuple[Tensor, Tensor, Tensor]:
    """The kept choices, those of expert 0 first: their places in (T*K), their tokens, and how many each has.

    Shapes: (N,), (N,), (E,), all int64.
    """
    choices = routing.expert.masked_fill(~routing.kept, routing.num_experts).reshape(-1)
    counts = torch.bincount(choices, minlength=routing.num_experts + 1)[:-1]
    order = choices.argsort(stable=True)[: int(counts.sum())]
    return order, order // max(routing.expert.shape[1], 1), counts


@dataclass(frozen=True)
class Exchange:
    """One routing's traffic between the ranks of an expert group, seen from this rank.

    `sent` and `received` are rows by peer; `by_expert` lists the received rows so that those of one expert,
    which came from all peers, lie side by side.
    """

    group: ProcessGroup
    sent: list[int]
    received: list[int]
    by_expert: Tensor  # (R,)
    rows_per_expert: list[int]

    @classmethod
    def announce(cls, counts: Tensor, group: ProcessGroup) -> Exchange:
        """Tell each peer how many rows come for each of its experts.

        Shapes: counts (E,), of what this rank will send, by global expert.
        Communication: one all-to-all of E integers.
        """
        to_peers = counts.view(comm.get_world_size(group), -1)  # (ep, E/ep)
        from_peers = torch.empty_like(to_peers)
        with trace.current().span_if_idle("AnnounceTokens"):
            comm.all_to_all_single(from_peers, to_peers, group=group)
        experts = torch.arange(from_peers.shape[1], device=counts.device).repeat(from_peers.shape[0])
        expert_of_row = experts.repeat_interleave(from_peers.reshape(-1))
        return cls(
            group,
            to_peers.sum(dim=1).tolist(),
            from_peers.sum(dim=1).tolist(),
            expert_of_row.argsort(stable=True),
            from_peers.sum(dim=0).tolist(),
        )

    def there(self, rows: Tensor) -> Tensor:
        """(N, H) grouped by global expert -> (R, H) grouped by local expert.

        Communication: one all-to-all of rows; backward one.
        """
        arrived: Tensor = _AllToAll.apply(self.group, rows, self.sent, self.received, _anchor(rows))
        return arrived.index_select(0, self.by_expert)

    def back(self, rows: Tensor) -> Tensor:
        """(R, H) grouped by local expert -> (N, H) grouped by global expert.

        Communication: one all-to-all of rows; backward one.
        """
        by_peer = rows.index_select(0, self.by_expert.argsort())
        returned: Tensor = _AllToAll.apply(self.group, by_peer, self.received, self.sent, _anchor(rows))
        return returned


def _anchor(like: Tensor) -> Tensor | None:
    """Puts an exchange into the graph of every rank: where one rank's experts are frozen, or its input needs
    no gradient, the others still wait for it on the way back."""
    return like.new_zeros((), requires_grad=True) if torch.is_grad_enabled() else None


def check_graph(loss: Tensor, replicas: ProcessGroup) -> None:
    """Every replica takes part in the exchanges of a backward, so each needs a loss to differentiate.

    Communication: one all-reduce of two numbers over the replicas.
    Raises: ValueError, on all of them, if one has a loss without graph.
    """
    error = ValueError(
        f"the loss of data rank {comm.get_rank(replicas)} has no graph, but in backward other ranks wait for "
        f"its part of the experts' exchange; for a micro-batch that shall not count use 0 * outputs.sum() "
        f"(§9.4)"
    )
    raise_together(None if loss.requires_grad else error, replicas)


class _AllToAll(torch.autograd.Function):
    """The i-th piece of rank j's input becomes the j-th piece of rank i's output, cut along dim 0.

    `sent` and `received` are the rows of the pieces; without them all pieces are equal. An `anchor` that
    needs a gradient makes the result need one; it gets none itself.

    Gradient: the inverse exchange. What an expert's parameters get is thereby summed over all ranks of the
    group that sent it tokens.

    Source: §9.12.4; DeepSpeed `moe/sharded_moe.py::_AllToAll` @ 0.19.8.
    """

    @staticmethod
    def forward(
        ctx: Any,
        group: ProcessGroup,
        input: Tensor,
        sent: list[int] | None = None,
        received: list[int] | None = None,
        anchor: Tensor | None = None,
    ) -> Tensor:
        ctx.group, ctx.sent, ctx.received = group, sent, received
        return _exchanged(group, input, sent, received)

    @staticmethod
    def backward(ctx: Any, *grad_output: Tensor) -> tuple[None, Tensor, None, None, None]:
        return None, _AllToAll.apply(ctx.group, grad_output[0], ctx.received, ctx.sent), None, None, None


def _exchanged(
    group: ProcessGroup, rows: Tensor, sent: list[int] | None, received: list[int] | None
) -> Tensor:
    rows = rows.contiguous()
    out = rows.new_empty((len(rows) if received is None else sum(received), *rows.shape[1:]))
    with trace.current().span_if_idle("ExchangeTokens"):
        comm.all_to_all_single(out, rows, received, sent, group=group)
    return out
