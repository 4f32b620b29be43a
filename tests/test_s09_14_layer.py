"""§9.14 The Ulysses exchange and DistributedAttention equal attention on one process.

Guards against: data scrambled for a batch above 1 or with the sequence first (report B15), heads that change
places on the way back, a backward that is not the inverse, shared key and value heads whose gradients are not
summed, one rank's refusal that the others wait for, head counts of one model used for another.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from shard_checks import groups_of, my_group, pattern
from tolerance import EXACT, LAW, assert_close, differs
from torch import Tensor
from torch.nn import functional as F

from ds_lite import comm
from ds_lite.dealing import deal, deal_heads, side_by_side
from ds_lite.sequence.exchange import Layout, to_heads, to_sequence
from ds_lite.sequence.layer import (
    DistributedAttention,
    _SeqAllToAll,
    single_all_to_all,
    uneven_heads_all2all,
)

F64 = torch.float64


def numbered(shape: tuple[int, ...]) -> Tensor:
    return torch.arange(torch.Size(shape).numel(), dtype=F64).view(shape)


# --------------------------------------------------------------------------------------------- the exchange


def b15(rank: int) -> None:
    """value = 16 b + 4 s + h: rank 1 gets heads 2 and 3 of all tokens."""
    group = my_group([[0, 1]])
    whole = numbered((2, 4, 4, 1))
    mine = whole[:, 2 * rank : 2 * rank + 2]
    got = single_all_to_all(mine, 2, 1, 0, group)
    if rank == 1:
        assert got[0, ..., 0].tolist() == [[2, 3], [6, 7], [10, 11], [14, 15]]
        assert got[1, ..., 0].tolist() == [[18, 19], [22, 23], [26, 27], [30, 31]]
    assert_close(single_all_to_all(got, 1, 2, 0, group), mine, EXACT, "and back")
    first = mine.transpose(0, 1).contiguous()
    there = single_all_to_all(first, 2, 0, 1, group)
    assert_close(there, got.transpose(0, 1), EXACT, "sequence first")
    assert_close(single_all_to_all(there, 0, 2, 1, group), first, EXACT, "sequence first, and back")
    assert_close(_SeqAllToAll.apply(group, mine, 2, 1, 0), got, EXACT, "DeepSpeed's autograd function")
    assert differs(mine[:, :, 2 * rank : 2 * rank + 2], got[:, :2]) or rank == 0, "control: not exchanged"


def test_b15_the_numbers_of_the_report(world: Any) -> None:
    world(b15, 2)


# (B, T per rank, N, kv heads, D), tokens of one rank more than of another where the sum says so
SIZES = [(3, 8, 6, 6, 5), (2, 9, 7, 7, 3), (3, 7, 8, 4, 2)]


def exchange_in_every_order(rank: int, ranks: int, sizes: tuple[int, ...]) -> None:
    batch, tokens, heads, kv_heads, width = sizes
    for group in groups_of() if ranks == 2 else [my_group([list(range(ranks))])]:
        me = comm.get_rank(group)
        lengths = tuple(deal(tokens, ranks))
        (start, stop) = side_by_side(list(lengths))[me][0]
        dealt = deal_heads(heads, kv_heads, ranks)
        for order in ((0, 1, 2, 3), (1, 0, 2, 3), (0, 2, 1, 3)):  # (B,T,N,D), (T,B,N,D), (B,N,T,D)
            dims = order.index(1), order.index(2)
            whole = [numbered((batch, tokens, n, width)).permute(order) for n in (heads, kv_heads, kv_heads)]
            whole = [x + i for i, x in enumerate(whole)]
            layouts = [Layout(*dims, lengths, ranges) for ranges in (dealt.query, dealt.kv, dealt.kv)]
            mine = [x.narrow(dims[0], start, stop - start) for x in whole]
            before = [x.clone() for x in mine]
            got = to_heads(mine, layouts, group)
            for x, y, how in zip(whole, got, layouts, strict=True):
                first, last = how.heads[me]
                assert_close(y, x.narrow(dims[1], first, last - first), EXACT, f"{order} heads")
                assert differs(y.sum(), x.sum()), "control: other heads are elsewhere"
            back = to_sequence(got[:1], layouts[:1], group)[0]
            assert_close(back, mine[0], EXACT, f"{order} back")
            for x, y in zip(mine, before, strict=True):
                assert_close(x, y, EXACT, "inputs stay as they are")


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("ranks, processes", [(2, 4), (3, 3), (4, 4)])
def test_the_exchange_only_moves(world: Any, ranks: int, processes: int, sizes: tuple[int, ...]) -> None:
    world(exchange_in_every_order, processes, ranks, sizes)


def each_is_the_others_gradient(rank: int, ranks: int) -> None:
    group = my_group([list(range(ranks))])
    lengths, dealt = tuple(deal(7, ranks)), deal_heads(8, 2, ranks)
    q_how, kv_how = (Layout(1, 2, lengths, ranges) for ranges in (dealt.query, dealt.kv))
    q, k = (pattern(2, lengths[rank], n, 3, seed=rank).requires_grad_() for n in (8, 2))
    (start, stop), (kv_start, kv_stop) = dealt.query[rank], dealt.kv[rank]
    upstream = pattern(2, 7, 8, 3, seed=9)[:, :, start:stop], pattern(2, 7, 8, 3, seed=8)[:, :, start:stop]
    upstream_k = upstream[1][:, :, : kv_stop - kv_start]
    got = to_heads([q, k], [q_how, kv_how], group)
    torch.autograd.backward(got, [upstream[0], upstream_k])
    assert_close(q.grad, to_sequence([upstream[0]], [q_how], group)[0], EXACT, "gradient of q")
    expected = to_sequence([upstream_k], [kv_how], group)[0]
    assert_close(k.grad, expected, EXACT, "gradient of k")
    assert_close(k.grad, sum_over_sharers(dealt.kv, lengths, rank, ranks), LAW, "shared heads add up")


def sum_over_sharers(kv: Any, lengths: Any, rank: int, ranks: int) -> Tensor:
    """By hand: what every rank's upstream gradient says of this rank's tokens, added head by head."""
    (start, stop) = side_by_side(list(lengths))[rank][0]
    dealt = deal_heads(8, 2, ranks)
    total = torch.zeros(2, stop - start, 2, 3, dtype=F64)
    for other in range(ranks):
        (first, last), (kv_first, kv_last) = dealt.query[other], kv[other]
        total[:, :, kv_first:kv_last] += pattern(2, 7, 8, 3, seed=8)[:, start:stop, first:last][
            :, :, : kv_last - kv_first
        ]
    return total


@pytest.mark.parametrize("ranks", [2, 4])
def test_each_direction_is_the_gradient_of_the_other(world: Any, ranks: int) -> None:
    world(each_is_the_others_gradient, ranks, ranks)


def uneven_as_deepspeed(rank: int) -> None:
    """3 heads over 2 ranks are 2 and 1; the group is an argument and need not contain rank 0."""
    for group in groups_of():
        me = comm.get_rank(group)
        whole = numbered((2, 6, 3, 2))
        mine = whole[:, 3 * me : 3 * me + 3]
        got = uneven_heads_all2all(mine, 2, 1, 0, group, 3)
        assert_close(got, whole[:, :, [slice(0, 2), slice(2, 3)][me]], EXACT)
        assert_close(uneven_heads_all2all(got, 1, 2, 0, group, 3), mine, EXACT)


def test_uneven_heads_in_groups_with_and_without_rank_0(world: Any) -> None:
    world(uneven_as_deepspeed, 4)


# ----------------------------------------------------------------------------------------------- attention


def attend(q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool = True, first: bool = False) -> Tensor:
    """SDPA for (B, T, N, D), or (T, B, N, D) with `first`."""
    order = (1, 2, 0, 3) if first else (0, 2, 1, 3)
    back = (2, 0, 1, 3) if first else (0, 2, 1, 3)
    q, k, v = (x.permute(order) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=is_causal, enable_gqa=True).permute(back)


HEADS = [(6, 6, 2), (7, 7, 2), (6, 3, 2), (6, 2, 4), (6, 1, 3), (8, 2, 4), (8, 4, 4), (9, 3, 3), (5, 5, 4)]


def equals_attention_on_one_process(rank: int, heads: int, kv_heads: int, ranks: int) -> None:
    batch, here, width = 3, 2, 5
    tokens = here * ranks
    for group in groups_of() if ranks == 2 else [my_group([list(range(ranks))])]:
        me = comm.get_rank(group)
        for first in (False, True):
            whole = [
                pattern(batch, tokens, n, width, seed=i) for i, n in enumerate((heads, kv_heads, kv_heads))
            ]
            if first:
                whole = [x.transpose(0, 1).contiguous() for x in whole]
            whole = [x.requires_grad_() for x in whole]
            own = slice(here * me, here * me + here)
            mine = [
                (x.detach()[own] if first else x.detach()[:, own]).clone().requires_grad_() for x in whole
            ]
            attention = DistributedAttention(attend, group, gather_idx=0 if first else 1)
            out = attention(*mine, int(first), is_causal=True, first=first)
            truth = attend(*whole, first=first)
            upstream = pattern(*truth.shape, seed=7)
            truth.backward(upstream)
            out.backward(upstream[own] if first else upstream[:, own])
            assert_close(out, truth[own] if first else truth[:, own], LAW, f"output, first={first}")
            for name, x, y in zip("qkv", mine, whole, strict=True):
                expected = y.grad[own] if first else y.grad[:, own]
                assert_close(x.grad, expected, LAW, f"gradient of {name}, first={first}")
            alone = attend(*(x.detach() for x in mine), first=first)
            assert me == 0 or differs(alone, out), "control: the tokens of later ranks see only each other"


@pytest.mark.parametrize("heads, kv_heads, ranks", HEADS)
def test_attention_equals_one_process(world: Any, heads: int, kv_heads: int, ranks: int) -> None:
    world(equals_attention_on_one_process, 4 if ranks == 2 else ranks, heads, kv_heads, ranks)


def two_collectives(rank: int, ranks: int) -> None:
    """A forward is two exchanges and sends 4 B T H (sp-1)/sp^2 elements; so does a backward."""
    group = my_group([list(range(ranks))])
    batch, tokens, heads, width = 2, 12, 12, 3
    mine = [pattern(batch, tokens // ranks, heads, width, seed=i).requires_grad_() for i in range(3)]
    attention = DistributedAttention(attend, group, gather_idx=1)
    attention(*mine, 0)  # the ranks agree on the shapes
    with comm.record() as forward:
        out = attention(*mine, 0)
    with comm.record() as backward:
        out.sum().backward()
    elements = 4 * batch * tokens * heads * width * (ranks - 1) // ranks**2
    for ledger in (forward, backward):
        assert ledger.total().calls == ledger.total(operation="all_to_all").calls == 2
        assert ledger.total().sent == elements * 8


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_a_forward_is_two_collectives_of_the_chapters_bytes(world: Any, ranks: int) -> None:
    world(two_collectives, ranks, ranks)


def rotary(rank: int) -> None:
    """Rotary embeddings are of the whole sequence, so they come after the exchange."""
    group = my_group([[0, 1]])
    angles = pattern(8, 1, 1, 2, seed=4)
    cos, sin = (torch.cat((part, part), dim=-1) for part in (angles.cos(), angles.sin()))

    def turned(x: Tensor) -> Tensor:
        first, second, rest = x[..., :2], x[..., 2:4], x[..., 4:]
        c, s = cos[..., :2], sin[..., :2]
        return torch.cat((first * c - second * s, second * c + first * s, rest), dim=-1)

    whole = [pattern(8, 3, 4, 5, seed=i) for i in range(3)]
    truth = attend(turned(whole[0]), turned(whole[1]), whole[2], first=True)
    own = slice(4 * rank, 4 * rank + 4)
    attention = DistributedAttention(attend, group)
    out = attention(*(x[own] for x in whole), 1, (cos, sin), first=True)
    assert_close(out, truth[own], LAW, "sequence first")
    mine = [x[own].transpose(0, 1) for x in whole]
    batch_first = DistributedAttention(attend, group, gather_idx=1)(*mine, 0, (cos, sin))
    assert_close(batch_first, truth[own].transpose(0, 1), LAW, "batch first")
    assert differs(attention(*(x[own] for x in whole), 1, None, first=True), out), "control: not turned"


def test_rotary_embeddings_are_applied_to_the_whole_sequence(world: Any) -> None:
    world(rotary, 2)


def in_columns(rank: int) -> None:
    """3-D tensors: heads in the columns; uneven ones if it is said how many key heads there are."""
    group = my_group([[0, 1]])

    def by_columns(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        parts = (x.unflatten(-1, (-1, 3)) for x in (q, k, v))
        return attend(*parts, first=True).flatten(-2)

    for heads in (4, 3):
        whole = [pattern(6, 2, heads * 3, seed=i) for i in range(3)]
        own = slice(3 * rank, 3 * rank + 3)
        attention = DistributedAttention(by_columns, group, num_kv_heads=heads)
        assert_close(attention(*(x[own] for x in whole), 1), by_columns(*whole)[own], LAW, f"{heads} heads")
    with pytest.raises(ValueError, match=r"3-D tensors of 9 and 9 columns do not divide .*pass num_kv_heads"):
        DistributedAttention(by_columns, group)(*(x[own] for x in whole), 1)


def test_heads_may_lie_in_columns(world: Any) -> None:
    world(in_columns, 2)


def two_models(rank: int) -> None:
    """Other head counts in one process, interleaved, and shapes that change between calls."""
    group = my_group([[0, 1]])
    models = {heads: DistributedAttention(attend, group, gather_idx=1) for heads in (3, 4)}
    for tokens in (4, 6, 4):
        for heads, attention in models.items():
            whole = [pattern(2, tokens, heads, 5, seed=i) for i in range(3)]
            half = tokens // 2
            own = slice(half * rank, half * rank + half)
            out = attention(*(x[:, own] for x in whole), 0)
            assert_close(out, attend(*whole)[:, own], LAW, f"{heads} heads, {tokens} tokens")


def test_models_with_other_heads_do_not_disturb_each_other(world: Any) -> None:
    world(two_models, 2)


# ---------------------------------------------------------------------------------------------- bad input


def refused(rank: int, case: str, words: str) -> None:
    group = my_group([[0, 1, 2, 3]])
    tokens, heads, kv_heads, batch_dim = 2, 8, 8, 0
    if case == "few heads":
        heads = kv_heads = 3
    elif case == "kv":
        heads, kv_heads = 6, 3
    elif case == "lengths":
        tokens = 4 if rank < 3 else 5
    elif case == "batch dim":
        batch_dim = 2
    q, k, v = (pattern(2, tokens, n, 5) for n in (heads, kv_heads, kv_heads))
    if case == "tokens":
        k = k[:, :1]
    if case == "dims":
        k = k.flatten(2)
    attention = DistributedAttention(attend, group, gather_idx=1)
    with pytest.raises(ValueError, match=words):
        attention(q, k, v, batch_dim)


REFUSALS = {
    "few heads": r"sequence_parallel_size 4 does not fit num_heads=3.*a degree from \[1, 2, 3\] \(§9.14\)",
    "kv": r"cannot share num_kv_heads=3 evenly.*choose a degree from \[1, 2, 3, 6\] \(§9.14\)",
    "lengths": r"local tokens differs between ranks: \d here, from 4 to 5",
    "batch dim": r"batch_dim_idx=2 must be 0, batch first, or 1",
    "tokens": r"batch and tokens must be equal",
    "dims": r"give all three as",
}


@pytest.mark.parametrize("case", REFUSALS)
def test_what_does_not_fit_is_refused_on_every_rank(world: Any, case: str) -> None:
    world(refused, 4, case, REFUSALS[case])


def test_a_group_of_nobody_exchanges_nothing() -> None:
    q = pattern(2, 4, 3, 5)
    with comm.record() as ledger:
        out = DistributedAttention(attend, None, gather_idx=1)(q, q, q, 0)
    assert_close(out, attend(q, q, q), EXACT)
    assert ledger.total().calls == 0
    assert single_all_to_all(q, 2, 1, 0, None) is q
    with pytest.raises(ValueError, match=r"scatter_idx=1, gather_idx=2.*heads are dimension 2"):
        DistributedAttention(attend, None, 1, 2)
    with pytest.raises(ValueError, match="async_op=True is not built"):
        single_all_to_all(q, 2, 1, 0, None, async_op=True)
