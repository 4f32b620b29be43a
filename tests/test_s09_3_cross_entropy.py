"""§9.3 Cross entropy on a vocabulary that is cut over ranks equals torch's on the whole one.

Guards against: a softmax over one shard, targets at the edge of a shard, a mean over one rank's tokens where
the sequence group's is due, a rank without labels that gives nan, and bad labels noticed by one rank only."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from shard_checks import NEIGHBOURS, STRIDES, Axes, groups_of, my_group, pattern
from tolerance import EXACT, LAW, assert_close, differs
from torch import Tensor
from torch.nn import functional as F

from ds_lite import comm
from ds_lite.dealing import side_by_side
from ds_lite.tensor_parallel import VocabParallelCrossEntropy, deal, vocab_parallel_cross_entropy

F64 = torch.float64
BATCH, TOKENS, VOCABULARY, IGNORED = 2, 5, 11, -100


def _shard(ranks: int, rank: int, vocabulary: int = VOCABULARY) -> slice:
    ((start, stop),) = side_by_side(deal(vocabulary, ranks))[rank]
    return slice(start, stop)


def _truth(logits: Tensor, target: Tensor, reduction: str, ignore_index: int = IGNORED) -> Tensor:
    """torch's own, which wants the vocabulary in the second place."""
    return F.cross_entropy(
        logits.flatten(0, -2), target.flatten(), ignore_index=ignore_index, reduction=reduction
    ).view(target.shape if reduction == "none" else ())


def _by_hand(rank: int) -> None:
    """Report B34: a vocabulary of 4, logits [1, 2, 3, 4], two shards."""
    group, logits = my_group([[0, 1]]), torch.tensor([[1.0, 2.0, 3.0, 4.0]], dtype=F64)
    own = _shard(2, rank, 4)
    for target, expected in ((2, 1.4402), (0, 3.4402), (3, 0.4402)):
        loss = vocab_parallel_cross_entropy(logits[:, own], torch.tensor([target]), group)
        assert round(loss.item(), 4) == expected
        assert_close(loss, F.cross_entropy(logits, torch.tensor([target])), LAW)
    shard_only = F.cross_entropy(logits[:, 2:], torch.tensor([0]))
    assert math.isclose(shard_only.item(), 1.3133, abs_tol=1e-4), "what one shard alone would say"


def test_the_loss_worked_out_by_hand_for_a_target_in_either_shard(world):
    world(_by_hand, 2)


TARGETS = {
    "every shard": [[0, 5, 6, 10, 3], [7, 4, 1, 9, 6]],
    "some ignored": [[0, IGNORED, 6, 10, IGNORED], [7, 4, IGNORED, IGNORED, 5]],
    "one label": [[IGNORED] * 5, [IGNORED] * 4 + [8]],
    "no label": [[IGNORED] * 5, [IGNORED] * 5],
}


def _check(group: Any, ranks: int, target: Tensor, reduction: str, scale: float, msg: str) -> None:
    """Loss and gradient of this rank's logits, which lie strided, as does the gradient of the loss."""
    logits = scale * pattern(BATCH, TOKENS, VOCABULARY, seed=4)
    own = _shard(ranks, comm.get_rank(group))
    mine = logits[..., own].transpose(0, 1).contiguous().requires_grad_()
    theirs = logits.clone().requires_grad_()
    loss = vocab_parallel_cross_entropy(mine.transpose(0, 1), target, group, reduction=reduction)
    truth = _truth(theirs, target, reduction)
    weights = pattern(*truth.shape, seed=5)
    (loss * weights).T.sum().backward() if loss.dim() else loss.backward()
    (truth * weights).sum().backward() if truth.dim() else truth.backward()
    if reduction == "mean" and bool((target == IGNORED).all()):
        assert loss.isnan() and truth.isnan(), "a mean over no tokens is nan in one process too"
    else:
        assert_close(loss, truth, LAW, msg)
    assert_close(mine.grad.transpose(0, 1), theirs.grad[..., own], LAW, f"{msg}: gradient of the logits")
    assert differs(logits[..., own].logsumexp(-1), logits.logsumexp(-1)), "the sum of one shard alone"


def _against_torch(rank: int, ranks: int) -> None:
    groups = groups_of() if ranks == 2 else [my_group([list(range(ranks))])]
    for group in groups:
        for name, rows in TARGETS.items():
            for reduction in ("mean", "sum", "none"):
                for scale in (1.0, 1e4):  # exp(1e4) would overflow
                    msg = f"{name}, {reduction}, logits around {scale:g}"
                    _check(group, ranks, torch.tensor(rows), reduction, scale, msg)


@pytest.mark.parametrize("ranks, processes", [(2, 4), (3, 3), (4, 4)])
def test_it_is_torchs_cross_entropy_for_uneven_shards_and_ignored_labels(world, ranks, processes):
    world(_against_torch, processes, ranks)


def _alone_equals_torch(**options: Any) -> None:
    logits, target = pattern(BATCH, TOKENS, VOCABULARY), torch.tensor(TARGETS["every shard"])
    mine, theirs = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    loss = vocab_parallel_cross_entropy(mine, target, **options)
    truth = _truth(theirs, target, "mean", options.get("ignore_index", IGNORED))
    loss.backward()
    truth.backward()
    assert_close(loss, truth, LAW)
    assert_close(mine.grad, theirs.grad, LAW)


def test_without_a_group_the_vocabulary_is_whole_and_any_index_can_be_ignored():
    _alone_equals_torch()
    _alone_equals_torch(ignore_index=6)
    _alone_equals_torch(vocab_start_index=0, vocab_end_index=VOCABULARY, global_vocab_size=VOCABULARY)
    assert differs(
        vocab_parallel_cross_entropy(pattern(3, 4), torch.tensor([1, 2, 3]), ignore_index=3),
        vocab_parallel_cross_entropy(pattern(3, 4), torch.tensor([1, 2, 3])),
    )


# ----------------------------------------------------------------------------------- the sequence group


def _over_the_sequence(rank: int, name: str) -> float:
    """2x2: the vocabulary over neighbours, the tokens over strides, 3 and 2 of them."""
    tp_group, sp_group = my_group(NEIGHBOURS), my_group(STRIDES, "seq")
    target, logits = torch.tensor(TARGETS[name]), pattern(BATCH, TOKENS, VOCABULARY, seed=6)
    tokens = (slice(0, 3), slice(3, 5))[comm.get_rank(sp_group)]
    own = _shard(2, comm.get_rank(tp_group))
    results = {}
    for reduction in ("mean", "sum"):
        mine, theirs = logits[:, tokens, own].clone().requires_grad_(), logits.clone().requires_grad_()
        loss = vocab_parallel_cross_entropy(mine, target[:, tokens], tp_group, sp_group, reduction=reduction)
        loss.backward()
        truth = _truth(theirs, target, reduction)
        truth.backward()
        everyone = torch.empty(2, dtype=F64)
        comm.all_gather_into_tensor(everyone, loss.detach().view(1), group=sp_group)
        results[reduction] = loss.item()
        assert not mine.grad.isnan().any()
        assert_close(mine.grad / 2, theirs.grad[:, tokens, own], LAW, f"{name}: averaged over the ranks")
        if name == "no label" and reduction == "mean":
            assert everyone.isnan().all() and truth.isnan()
            continue
        assert_close(everyone.mean(), truth, LAW, f"{name}, {reduction}")
        if name == "some ignored":  # 3 of 6 and 3 of 4 tokens count, so means of means are wrong
            halves = [(logits[:, t], target[:, t]) for t in (slice(0, 3), slice(3, 5))]
            means = torch.stack([_truth(*half, reduction) for half in halves])
            assert differs(means.mean(), truth)
    return results["mean"]


@pytest.mark.parametrize("name", TARGETS)
def test_ranks_with_other_tokens_average_to_the_mean_over_all_valid_tokens(world, name):
    losses = world(_over_the_sequence, 4, name)
    if name == "one label":
        assert losses[:2] == [0.0, 0.0], "a rank without a valid token contributes an exact zero"
        assert losses[2] == losses[3] > 0.0


# ------------------------------------------------------------------------------------------ the module


def _as_a_loss_fn(rank: int) -> None:
    tp_group, sp_group = my_group(NEIGHBOURS), my_group(STRIDES, "seq")
    loss_fn = VocabParallelCrossEntropy(VOCABULARY)
    loss_fn.bind(Axes(model=tp_group, seq=sp_group))
    standalone = VocabParallelCrossEntropy(VOCABULARY, tp_group, sp_group, ignore_index=5, reduction="sum")
    logits, target = pattern(BATCH, TOKENS, VOCABULARY, seed=6), torch.tensor(TARGETS["every shard"])
    part = logits[..., _shard(2, comm.get_rank(tp_group))]
    assert_close(loss_fn(part, target), _truth(logits, target, "mean"), LAW)
    assert_close(standalone(part, target) / 2, _truth(logits, target, "sum", ignore_index=5), LAW)
    with comm.record() as ledger:
        loss_fn(part, target)
    assert {(axis, operation) for axis, operation, _ in ledger.rows} == {
        ("model", "all_reduce"),
        ("seq", "all_reduce"),
    }
    assert ledger.total("model").payload == 3 * target.numel() * 8, "three numbers a token"


def test_the_module_takes_its_groups_from_a_grid_or_as_arguments(world):
    world(_as_a_loss_fn, 4)
    logits, target = pattern(3, 4), torch.tensor([0, 3, 1])
    assert_close(VocabParallelCrossEntropy(4)(logits, target), F.cross_entropy(logits, target), LAW)
    assert not list(VocabParallelCrossEntropy(4).parameters())


# -------------------------------------------------------------------------------------------- refusals


def _refused(rank: int, case: str) -> None:
    tp_group, sp_group = my_group(NEIGHBOURS), my_group(STRIDES, "seq")
    logits = pattern(3, 5)
    target = torch.tensor([0, 9, 4])
    if case == "target of one rank":
        target[1] = 10 if comm.get_rank(sp_group) == 1 else 9
        vocab_parallel_cross_entropy(logits, target, tp_group, sp_group)
    elif case == "negative":
        vocab_parallel_cross_entropy(logits, target - 1, tp_group)
    elif case == "start":
        vocab_parallel_cross_entropy(logits, target, tp_group, vocab_start_index=rank % 2)
    elif case == "stop":
        vocab_parallel_cross_entropy(logits, target, tp_group, vocab_end_index=5)
    elif case == "shapes":
        vocab_parallel_cross_entropy(logits, target[:2], tp_group)
    elif case == "reduction":
        vocab_parallel_cross_entropy(logits, target, tp_group, reduction="max")
    else:
        VocabParallelCrossEntropy(10, tp_group)(pattern(3, 10), target)


@pytest.mark.parametrize(
    "case, match",
    [
        ("target of one rank", r"1 targets lie outside the vocabulary 0\.\.9"),
        ("negative", r"1 targets lie outside the vocabulary 0\.\.9, here \[-1\]"),
        ("start", r"vocab_start_index \[0, 1\] .* which lie at \[\(0, 5\), \(5, 10\)\]"),
        ("stop", r"vocab_end_index \[5, 5\] "),
        ("shapes", r"logits of shape \(3, 5\) need targets of shape \(3,\), got \(2,\)"),
        ("reduction", r"reduction='max'"),
        ("gathered", r"logits of 10 ids on rank \d of 2, whose share of the 10 ids is 5"),
    ],
)
def test_what_cannot_be_right_is_refused_on_every_rank_alike(world, case, match):
    world.raises(ValueError, match, _refused, 4, case)


def test_a_label_outside_the_vocabulary_is_an_error_in_torch_too():
    logits, target = pattern(3, 5), torch.tensor([0, 5, 4])
    with pytest.raises(IndexError):
        F.cross_entropy(logits, target)
    with pytest.raises(ValueError, match=r"outside the vocabulary 0\.\.4, here \[5\]"):
        vocab_parallel_cross_entropy(logits, target)
    target[1] = IGNORED
    assert_close(
        vocab_parallel_cross_entropy(logits, target, reduction="none")[1], torch.zeros((), dtype=F64), EXACT
    )
