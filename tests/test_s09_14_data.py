"""§9.14 Batches of sequences over ranks: the exact numbers of reports B07, B08, B09, B31, B37 and A10.

Guards against: labels lost where one rank ends and the next begins, means of means, ranks without a valid
token, gradients off by sp, positions counted from each rank's first token, samples that come twice or never.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
import torch
from shard_checks import groups_of, my_group, pattern
from small_models import Scale
from tolerance import EXACT, LAW, assert_close, differs
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler

import ds_lite
from ds_lite import comm
from ds_lite.sequence.data import (
    IGNORE,
    Part,
    UlyssesSPDataLoaderAdapter,
    part_of,
    sequence_loss,
    shard_batch,
    shift_labels,
    token_weighted,
)
from ds_lite.sequence.whole import gather_tokens

F64 = torch.float64

# ----------------------------------------------------------------------------------- B07: labels, B37: places


def shards(batch: dict[str, Any], sp: int, **options: Any) -> list[dict[str, Any]]:
    return [shard_batch(batch, sp_rank=rank, sp_size=sp, **options) for rank in range(sp)]


@pytest.mark.parametrize("samples", [1, 2])
def test_b07_a_label_is_the_token_after_even_on_the_next_rank(samples: int) -> None:
    ids = torch.arange(1, 9).expand(samples, -1)
    targets = [shard["shift_labels"].tolist() for shard in shards({"input_ids": ids, "labels": ids}, 2)]
    assert targets == [[[2, 3, 4, 5]] * samples, [[6, 7, 8, IGNORE]] * samples]
    lost = [shift_labels(half)[0].tolist() for half in ids.split(4, dim=1)]
    assert lost == [[2, 3, 4, IGNORE], [6, 7, 8, IGNORE]], "control: cut first, shifted afterwards"


def test_b07_four_ranks() -> None:
    ids = torch.arange(1, 9).unsqueeze(0)
    targets = [shard["shift_labels"][0].tolist() for shard in shards({"input_ids": ids, "labels": ids}, 4)]
    assert targets == [[2, 3], [4, 5], [6, 7], [8, IGNORE]]


def test_b07_a_packed_document_may_end_where_a_rank_does() -> None:
    """The last token of a document has the label that one process gives it, here none."""
    ids = torch.tensor([[11, 12, 13, 14, 21, 22, 23, 24]])
    labels = ids.masked_fill(torch.tensor([[True, *[False] * 3, True, *[False] * 3]]), IGNORE)
    places = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3]])
    first, second = shards({"input_ids": ids, "labels": labels, "position_ids": places}, 2)
    assert first["shift_labels"].tolist() == [[12, 13, 14, IGNORE]]
    assert second["shift_labels"].tolist() == [[22, 23, 24, IGNORE]]
    assert first["position_ids"].tolist() == second["position_ids"].tolist() == [[0, 1, 2, 3]]


def test_labels_of_the_tokens_themselves_are_not_shifted() -> None:
    ids = torch.arange(1, 7).unsqueeze(0)
    got = [s["shift_labels"].tolist() for s in shards({"input_ids": ids, "labels": ids}, 3, shift=False)]
    assert got == [[[1, 2]], [[3, 4]], [[5, 6]]]


def test_b37_positions_count_from_the_first_token_of_the_sequence() -> None:
    ids = torch.arange(8).expand(3, -1)
    assert shards({"input_ids": ids}, 2)[1]["position_ids"].tolist() == [[4, 5, 6, 7]]
    packed = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2]])
    given = shards({"input_ids": ids[:1], "position_ids": packed}, 2)
    assert [s["position_ids"].tolist() for s in given] == [[[0, 1, 2, 3]], [[4, 0, 1, 2]]]


def test_b37_nine_tokens_on_two_ranks() -> None:
    """Dealt 5 and 4, or refused where parts of one size are asked for; never floor-divided."""
    batch = {"input_ids": torch.arange(9).unsqueeze(0), "attention_mask": torch.ones(1, 9)}
    first, second = shards(batch, 2)
    assert first["input_ids"].tolist() == [[0, 1, 2, 3, 4]]
    assert second["input_ids"].tolist() == [[5, 6, 7, 8]]
    assert first["attention_mask"].shape == (1, 5)
    words = r"9 tokens does not fit sequence_parallel_size=2: parts of one size .* pad it to 10 tokens"
    for rank in range(2):
        with pytest.raises(ValueError, match=words):
            shard_batch(batch, sp_rank=rank, sp_size=2, may_differ=False)
    with pytest.raises(ValueError, match=r"1 tokens does not fit sequence_parallel_size=2: each rank needs"):
        shard_batch({"input_ids": torch.zeros(1, 1)}, sp_rank=0, sp_size=2)


def test_a_batch_whose_tensors_disagree_is_refused() -> None:
    ids = torch.arange(8).unsqueeze(0)
    with pytest.raises(ValueError, match=r"labels has shape \(1, 7\), but the sequence has 8 tokens"):
        shard_batch({"input_ids": ids, "labels": ids[:, 1:]}, sp_rank=0, sp_size=2)
    with pytest.raises(ValueError, match=r"a batch with \['labels'\] has no input_ids"):
        shard_batch({"labels": ids}, sp_rank=0, sp_size=2)


def test_what_has_no_tokens_stays_whole() -> None:
    mask, weights = torch.ones(2, 1, 8, 8), torch.rand(2)
    shard = shards({"input_ids": torch.zeros(2, 8), "attention_mask": mask, "weights": weights}, 2)[1]
    assert shard["attention_mask"] is mask and shard["weights"] is weights


# -------------------------------------------------------------------------------------------- B08: the loss


def logits_with_losses(losses: list[float]) -> Tensor:
    """(1, T, 2): the cross entropy of label 0 at token t is `losses[t]`."""
    return torch.tensor([[[0.0, math.log(math.expm1(loss))] for loss in losses]], dtype=F64)


def b08(rank: int, has_valid: bool) -> None:
    """Token losses 1, 2, 3 on one rank; 10, or nothing, and tokens that do not count, on the other."""
    for group in groups_of():
        first = comm.get_rank(group) == 0
        logits = logits_with_losses([1, 2, 3, 7] if first else [10, 5, 5, 5]).requires_grad_()
        labels = torch.tensor([[0, 0, 0, IGNORE] if first else [0 if has_valid else IGNORE, *[IGNORE] * 3]])
        loss = sequence_loss(logits, labels, group)
        wanted = torch.tensor(4.0 if has_valid else 2.0, dtype=F64)
        assert_close(loss.detach(), wanted, LAW, "16/4, or 6/3")
        loss.backward()
        # the engine divides by sp what this makes times sp
        num_valid = 4 if has_valid else 3
        truth = torch.softmax(logits.detach(), -1) - torch.tensor([1.0, 0.0], dtype=F64)
        truth = truth * (labels != IGNORE).unsqueeze(-1) * 2 / num_valid
        assert logits.grad is not None
        assert_close(logits.grad, truth, LAW, "gradient")
        own = F.cross_entropy(logits.detach()[0], labels[0])  # nan where no token counts
        means = torch.stack([own, own])
        comm.all_gather_into_tensor(means, own.view(1), group=group)
        assert differs(means.mean(), wanted), "control: the mean of means is 6, or nan"


@pytest.mark.parametrize("has_valid", [True, False], ids=["10", "nothing"])
def test_b08_every_token_weighs_the_same(world: Any, has_valid: bool) -> None:
    world(b08, 4, has_valid)


def test_one_rank_has_the_mean_over_its_tokens() -> None:
    logits, labels = pattern(2, 5, 3), torch.tensor([[0, 1, IGNORE, 2, 2], [IGNORE] * 5])
    with comm.record() as ledger:
        loss = sequence_loss(logits, labels, None)
    assert_close(loss, F.cross_entropy(logits.flatten(0, 1), labels.flatten()), LAW)
    assert ledger.total().calls == 0


# ------------------------------------------------------------------------------- B09, B31: gradients, groups


class Weighed(nn.Module):
    """w * x for each token; an attention whose values are zero, so that there is something to exchange."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = Scale(3.0)

    def forward(self, x: Tensor) -> Tensor:
        queries = x.unsqueeze(1).expand(-1, 4, -1, -1)
        mixed = F.scaled_dot_product_attention(queries, queries, torch.zeros_like(queries))
        return self.scale(x + mixed[:, 0])


def b09(rank: int, sp: int, zero: int, way: str) -> float:
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "sequence_parallel_size": sp,
        "zero_optimization": {"stage": zero},
        "optimizer": {"type": "SGD", "params": {"lr": 1.0}},
    }
    engine = ds_lite.initialize(model=Weighed().double(), config=config)[0]
    y = engine(torch.tensor([[[1.0], [2.0], [3.0], [4.0]]], dtype=F64))
    group, own = engine.grid.group("seq"), part_of(4, engine.grid.coordinate("seq"), sp).of(y)
    losses = {
        "whole": lambda: y.mean(),
        "own": lambda: own.mean(),
        "shared": lambda: token_weighted(own.sum(), torch.tensor(own.numel()), group),
    }
    engine.backward(losses[way]())
    gradient = engine.gradients.full("scale.weight")
    engine.step()
    assert_close(engine.module.scale.weight.detach(), torch.tensor([0.5], dtype=F64), LAW, "3 - 2.5")
    return float(gradient)


@pytest.mark.parametrize(
    "ranks, sp, way",
    [(*sizes, way) for sizes in ((2, 2), (4, 2), (4, 4)) for way in ("whole", "own", "shared")],
)
def test_b09_a_gradient_is_two_and_a_half_on_every_rank(world: Any, ranks: int, sp: int, way: str) -> None:
    """From the loss of the whole output, of each rank's own tokens, or of one that the ranks share."""
    for got in world(b09, ranks, sp, 0 if ranks == 2 else 1, way):
        assert got == pytest.approx(2.5, abs=1e-10), "5 is summed, 1.25 is divided twice"


def b31(rank: int) -> None:
    """A loss of gathered tokens goes backward in groups of which one does not have rank 0."""
    for group in groups_of():
        me = comm.get_rank(group)
        whole = pattern(2, 5, 3)
        part = Part((3, 2), me)
        own = part.of(whole).clone().requires_grad_()
        got = gather_tokens(own, part, group)
        assert_close(got.detach(), whole, EXACT, "gathered")
        (got * whole).sum().backward()
        assert own.grad is not None
        assert_close(own.grad, 2 * part.of(whole), LAW, "the sum over the ranks: the engine takes their mean")
        assert differs(own.grad, part.of(whole)), "control"


def test_b31_gathering_works_in_any_group(world: Any) -> None:
    world(b31, 4)


# ------------------------------------------------------------------------------------------ A10: the loader

LENGTHS = [5, 8, 6, 9]  # tokens of the four samples


def samples() -> list[dict[str, Tensor]]:
    return [
        {"input_ids": 100 * i + torch.arange(n), "labels": 100 * i + torch.arange(n)}
        for i, n in enumerate(LENGTHS)
    ]


def loader_of(how: str, rank: int, sp: int, epoch: int) -> DataLoader[Any]:
    """The same samples on all ranks of a group, or each rank its own."""
    data: Any = samples()
    ranks = {"all": 4, "replicas": 4 // sp, "none": 1}[how]
    if ranks == 1:
        return DataLoader(data, batch_size=1)
    place = rank if how == "all" else rank // sp
    sampler: DistributedSampler[Any] = DistributedSampler(data, ranks, place, shuffle=True, seed=3)
    sampler.set_epoch(epoch)
    return DataLoader(data, batch_size=1, sampler=sampler)


def a10(rank: int, how: str, sp: int) -> list[list[tuple[int, list[int], list[int], list[int]]]]:
    group = my_group([list(range(first, first + sp)) for first in range(0, 4, sp)], "seq")
    epochs = []
    for epoch in range(2):
        adapter = UlyssesSPDataLoaderAdapter(loader_of(how, rank, sp, epoch), rank % sp, group, sp)
        batches = list(adapter)
        assert len(batches) == len(adapter)
        epochs.append(
            [
                (rank // sp, *(batch[k][0].tolist() for k in ("input_ids", "shift_labels", "position_ids")))
                for batch in batches
            ]
        )
        assert len(list(adapter)) == len(adapter), "a second walk"
    return epochs


@pytest.mark.parametrize("how, sp", [("all", 2), ("replicas", 2), ("none", 2), ("none", 4), ("all", 4)])
def test_a10_each_sample_comes_once_an_epoch(world: Any, how: str, sp: int) -> None:
    """For each group of ranks that draw for themselves; with one loader for all, for each seq group."""
    ranks = world(a10, 4, how, sp)
    for epoch in range(2):
        tokens: Counter[int] = Counter()
        for rank in ranks:
            for _, ids, labels, places in rank[epoch]:
                tokens.update(ids)
                # the whole sequence is known by its number: the label is the next token, or none at its end
                sample, n = ids[0] // 100, LENGTHS[ids[0] // 100]
                assert places == [i - 100 * sample for i in ids]
                assert labels == [i + 1 if i + 1 < 100 * sample + n else IGNORE for i in ids]
        times = 4 // sp if how == "none" else 1
        assert tokens == {100 * i + t: times for i, n in enumerate(LENGTHS) for t in range(n)}


class Raw(list):  # type: ignore[type-arg]
    """A loader that is no DataLoader."""


def strangers(rank: int) -> None:
    """Ranks that shuffle on their own, and batches that lack labels."""
    group = my_group([[0, 1], [2, 3]], "seq")
    ids = torch.arange(6).unsqueeze(0)
    batch = {"input_ids": ids + rank, "labels": ids}
    with pytest.raises(ValueError, match="ranks of a seq group draw different batches"):
        list(UlyssesSPDataLoaderAdapter(Raw([batch]), rank % 2, group, 2))
    same = {"input_ids": ids, "labels": ids}
    with pytest.raises(ValueError, match="ranks of a seq group draw different batches"):
        list(UlyssesSPDataLoaderAdapter(Raw([same] * (1 + rank % 2)), rank % 2, group, 2))
    with pytest.raises(ValueError, match=r"a batch with \['input_ids'\] has no labels"):
        list(UlyssesSPDataLoaderAdapter(Raw([{"input_ids": ids}]), rank % 2, group, 2))
    endless = UlyssesSPDataLoaderAdapter(iter([same]), rank % 2, group, 2)
    with pytest.raises(TypeError, match="has no len"):
        len(endless)
    assert len(list(endless)) == 1


def test_loaders_that_cannot_be_cut_are_refused_on_every_rank(world: Any) -> None:
    world(strangers, 4)


def test_a_group_of_one_gets_its_batches_whole() -> None:
    adapter = UlyssesSPDataLoaderAdapter(DataLoader(samples(), batch_size=1), 0, None, 1)  # type: ignore[arg-type]
    assert len(adapter) == 4 and [batch["input_ids"].shape[1] for batch in adapter] == LENGTHS
