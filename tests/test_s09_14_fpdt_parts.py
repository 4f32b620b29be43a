"""§9.14 Beside FPDT's attention: who gets which tokens, the feed-forward and the loss in chunks.

Guards against: chunks that some rank has no share of, losses in another order than their mask, a bias
without a gradient, gradients of one rank's tokens taken for all.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from shard_checks import STRIDES, my_group, pattern
from tolerance import EXACT, LAW, assert_close, differs
from torch.nn import functional as F
from world import World

from ds_lite import comm
from ds_lite.sequence.fpdt_layer import FPDT_FFN, FPDT_InputConstruct, FPDT_LogitsLoss

pytestmark = pytest.mark.xdist_group("fpdt")

BATCH = 3


def test_every_chunk_is_shared_by_all_ranks() -> None:
    """Worked out by hand: 8 tokens in chunks of 4 over 2 ranks; DeepSpeed 0.19.8 says the same."""
    sizes = SimpleNamespace(ds_sequence_parallel_fpdt_chunk_size=4)
    tokens, mask = torch.arange(8).expand(2, -1), torch.ones(8, 8)
    parts = [
        FPDT_InputConstruct(tokens, tokens + 100, tokens, mask, tokens + 200, sizes, 2, rank).generate()
        for rank in range(2)
    ]
    for (x, labels, loss_mask, attention_mask, positions), own in zip(parts, ([0, 1, 4, 5], [2, 3, 6, 7])):
        assert x.tolist() == [own] * 2
        assert torch.equal(labels, x + 100) and torch.equal(positions, x + 200)
        assert loss_mask.tolist() == [[0, 1, 4, 5, 2, 3, 6, 7]] * 2, "all ranks', one after the other"
        assert attention_mask is mask
    assert FPDT_InputConstruct(tokens, None, None, None, None, sizes, 2, 1).generate()[1:] == (None,) * 4


@pytest.mark.parametrize(
    "tokens, chunk_size, ranks, match",
    [
        (9, 4, 2, "9 tokens in chunks of 4 over sequence_parallel_size=2"),
        (8, 3, 2, "chunk_size=3, .* choose 4"),
        (8, 0, 2, "choose a chunk of at least 2"),
    ],
)
def test_sequences_that_cannot_be_shared_are_refused(
    tokens: int, chunk_size: int, ranks: int, match: str
) -> None:
    sizes = SimpleNamespace(ds_sequence_parallel_fpdt_chunk_size=chunk_size)
    with pytest.raises(ValueError, match=match):
        FPDT_InputConstruct(torch.zeros(1, tokens), None, None, None, None, sizes, ranks, 0)


@pytest.mark.parametrize("chunk_size", [1, 3, 4, 7, 50])
@pytest.mark.parametrize("add_bias", [True, False])
def test_the_feed_forward_in_chunks_is_the_whole(chunk_size: int, add_bias: bool) -> None:
    shapes = [(7, 2, 3), (5, 3), (5,), (3, 5), (3,)]
    mine, theirs = ([pattern(*s, seed=i).requires_grad_() for i, s in enumerate(shapes)] for _ in range(2))
    upstream = pattern(7, 2, 3, seed=6)
    out, bias = FPDT_FFN.apply(*mine, add_bias, chunk_size)
    assert bias is (None if add_bias else mine[-1])
    (out if bias is None else out + bias).backward(upstream)
    x, w1, b1, w2, b2 = theirs
    truth = F.linear(F.gelu(F.linear(x, w1, b1), approximate="tanh"), w2, b2)
    truth.backward(upstream)
    assert_close(out if bias is None else out + bias, truth, LAW)
    for name, one, other in zip(("x", "w1", "b1", "w2", "b2"), mine, theirs):
        assert_close(one.grad, other.grad, LAW, f"gradient of {name}")
    assert_close(mine[0].detach(), pattern(7, 2, 3), EXACT, "x is not overwritten")
    assert differs(truth, F.linear(F.gelu(F.linear(x, w1, b1)), w2, b2)), "the tanh form of GeLU"
    with pytest.raises(ValueError, match="chunk_size=0"):
        FPDT_FFN.apply(*mine, add_bias, 0)


def _loss(rank: int, chunks: int) -> None:
    group, tokens, vocabulary = my_group(STRIDES, "seq"), 12, 11
    sp_rank, sizes = comm.get_rank(group), SimpleNamespace(ds_sequence_parallel_fpdt_chunk_size=8)
    labels = torch.arange(BATCH * tokens).view(BATCH, tokens) * 7 % vocabulary
    labels[0, 2:9] = -100
    hidden = pattern(tokens, BATCH, 5).requires_grad_()
    weight = pattern(vocabulary, 5, seed=1).requires_grad_()
    truth = F.cross_entropy(F.linear(hidden, weight).flatten(0, 1), labels.t().flatten(), reduction="none")
    truth = truth.view(tokens, BATCH)
    ids = torch.arange(tokens).expand(BATCH, -1)
    given = (labels, (labels != -100).double(), None, None)
    own, mine, mask, _, _ = FPDT_InputConstruct(ids, *given, sizes, 2, sp_rank).generate()
    part, head = hidden.detach()[own[0]].requires_grad_(), weight.detach().clone().requires_grad_()
    losses = FPDT_LogitsLoss.apply(part, mine, head, sp_rank, 2, group, chunks)
    order = [
        0,
        1,
        2,
        3,
        8,
        9,
        4,
        5,
        6,
        7,
        10,
        11,
    ]  # of the ranks one after the other, from chunks of 8 and 4
    assert_close(losses, truth[order], LAW, "each token's loss, rank after rank")
    mean = (losses * mask.t()).sum() / mask.sum()
    expected = F.cross_entropy(F.linear(hidden, weight).flatten(0, 1), labels.t().flatten())
    assert_close(mean, expected, LAW, "the mean over labels that count")
    mean.backward()
    expected.backward()
    assert_close(part.grad / 2, hidden.grad[own[0]], LAW, "gradient of the hidden states")
    assert differs(head.grad / 2, weight.grad), "one rank has some tokens only"
    comm.all_reduce(head.grad, group=group)
    assert_close(head.grad / 2, weight.grad, LAW, "gradient of the head, averaged over the ranks")


@pytest.mark.parametrize("chunks", [1, 4])
def test_the_loss_in_chunks_is_that_of_all_tokens(world: World, chunks: int) -> None:
    world(_loss, 4, chunks)


def _loss_refused(rank: int, name: str) -> None:
    group = my_group([[0, 1]], "seq")
    hidden, labels, weight = pattern(4, 2, 5), torch.zeros(2, 4, dtype=torch.int64), pattern(7, 5)
    sizes = (comm.get_rank(group), 2)
    if name == "label":
        labels[1, 2] = 7 * rank
    elif name == "shape":
        labels = labels.t()
    elif name == "size":
        sizes = (sizes[0], 3)
    FPDT_LogitsLoss.apply(hidden, labels, weight, *sizes, group, 0 if name == "chunks" else 2)


@pytest.mark.parametrize(
    "name, match",
    [
        ("label", r"labels from 0 to 7 lie outside the vocabulary 0\.\.6"),
        ("shape", r"give \(T/sp, B, H\) and \(B, T/sp\)"),
        ("size", r"spg_size=3, but spg says \(0, 2\)|spg_size=3, but spg says"),
        ("chunks", "num_chunk=0"),
    ],
)
def test_a_loss_that_cannot_be_right_is_refused_on_every_rank(world: World, name: str, match: str) -> None:
    world.raises(ValueError, match, _loss_refused, 2, name)
