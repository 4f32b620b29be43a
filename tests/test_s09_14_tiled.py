"""§9.14 A sequence in tiles computes what it computes whole.

Guards against: a mean of tile means, a tile that is lost, nan from a tile without labels, a gradient from
above that is ignored, a changed input, masks that do not count."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from shard_checks import my_group, pattern
from tiled_cases import (
    BATCH,
    F64,
    IGNORED,
    LABELS,
    TILES,
    TOKENS,
    VOCABULARY,
    WAYS,
    WIDTH,
    Gated,
    gradients,
    make_head,
    make_hidden,
    plain_loss,
)
from tolerance import EXACT, LAW, assert_close, differs
from torch import Tensor, nn
from torch.nn import functional as F
from world import World

from ds_lite import comm
from ds_lite.sequence.tiled import (
    TiledFusedLogitsLoss,
    TiledMLP,
    sequence_tiled_compute,
    tiled,
    tiled_loss,
    tiled_loss_sum,
)
from ds_lite.tensor_parallel import vocab_parallel_cross_entropy


def _compare(run: Callable[[nn.Module, Tensor], Tensor], truth: Any, module: Any, upstream: Tensor) -> None:
    """Result, gradient of the input and of each parameter; the input stays as it is."""
    results = []
    for compute in (run, truth):
        x, owner = make_hidden(), module()
        before, version = x.detach().clone(), x._version
        y = compute(owner, x)
        assert differs(x.new_zeros(x.shape), torch.autograd.grad(y.sum(), x, retain_graph=True)[0])
        y.backward(upstream.expand(y.shape))
        assert_close(x.detach(), before, EXACT, "the input is not modified")
        assert x._version == version
        results.append((y, x.grad, gradients(owner)))
    (y, of_x, of_owner), (true_y, true_of_x, true_of_owner) = results
    assert_close(y, true_y, LAW, "result")
    assert_close(of_x, true_of_x, LAW, "gradient of the input")
    for name, gradient in of_owner.items():
        assert_close(gradient, true_of_owner[name], LAW, f"gradient of {name}")
        assert differs(gradient * 2, true_of_owner[name]), f"the gradient of {name} is zero"


# ----------------------------------------------------------------------------------------------- the MLP


@pytest.mark.parametrize("tiles", TILES)
def test_a_tiled_mlp_is_the_mlp(tiles: int) -> None:
    upstream = pattern(BATCH, TOKENS, WIDTH, seed=6)
    _compare(lambda mlp, x: tiled(mlp, x, tiles), lambda mlp, x: mlp(x), Gated, upstream)
    _compare(
        lambda mlp, x: TiledMLP.apply(Gated.forward, mlp, x, tiles), lambda mlp, x: mlp(x), Gated, upstream
    )


def test_an_expert_with_any_number_of_rows_may_be_tiled() -> None:
    """(T, H) as experts have it; an expert without rows still gives its parameters zeros."""
    for rows in (0, 1, 3):
        mlp, x = Gated(), pattern(rows, WIDTH).requires_grad_()
        y = TiledMLP.apply(Gated.forward, mlp, x, 2, list(mlp.parameters()))
        y.sum().backward()
        assert_close(y, mlp(x), LAW)
        assert all(gradient is not None for gradient in gradients(mlp).values())


def test_an_mlp_tile_by_tile_has_the_gradient_of_its_definition() -> None:
    mlp = Gated()
    weights = tuple(mlp.parameters())

    def run(x: Tensor, *weights: Tensor) -> Tensor:
        names = [name for name, _ in mlp.named_parameters()]
        return tiled(lambda t: torch.func.functional_call(mlp, dict(zip(names, weights)), t), x, 3)

    assert torch.autograd.gradcheck(run, (pattern(4, WIDTH).requires_grad_(), *weights))


# ---------------------------------------------------------------------------------------------- the loss


def _loss_is_plain(rank: int, way: str, name: str) -> None:
    labels, upstream = torch.tensor(LABELS[name]), torch.tensor(2.5, dtype=F64)
    for reduction in ("mean", "sum"):
        for tiles in TILES:
            run = WAYS[way](reduction, tiles, labels)
            _compare(run, lambda head, x, r=reduction: plain_loss(head, x, labels, r), make_head, upstream)


@pytest.mark.parametrize("way, name", [(way, name) for way in WAYS for name in LABELS if name != "none"])
def test_a_tiled_loss_is_the_loss(world: World, way: str, name: str) -> None:
    world(_loss_is_plain, 1, way, name)


@pytest.mark.parametrize("way", WAYS)
def test_without_any_label_the_mean_is_nan_and_the_gradients_are_zeros(way: str) -> None:
    labels = torch.tensor(LABELS["none"])
    for reduction in ("mean", "sum"):
        head, x = make_head(), make_hidden()
        loss = WAYS[way](reduction, 3, labels)(head, x)
        loss.backward()
        assert loss.isnan() if reduction == "mean" else loss.item() == 0.0
        for gradient in (x.grad, *gradients(head).values()):
            assert_close(gradient, torch.zeros_like(gradient), EXACT)


@pytest.mark.parametrize("way", WAYS)
def test_a_loss_tile_by_tile_has_the_gradient_of_its_definition(way: str) -> None:
    """The parameters enter through a hook of gradcheck's own: the weight is perturbed in place."""
    labels, head = torch.tensor(LABELS["uneven"]), make_head()
    run = WAYS[way]("mean", 4, labels)
    assert torch.autograd.gradcheck(lambda x, *_: run(head, x), (make_hidden(), head.weight, head.bias))


def test_a_weight_is_a_head_too_and_need_not_be_a_leaf() -> None:
    labels = torch.tensor(LABELS["uneven"])
    results = []
    for tiles in (None, 3):
        leaf, x = pattern(WIDTH, VOCABULARY, seed=8).requires_grad_(), make_hidden()
        weight = (leaf * 2).T  # not a leaf, and strided
        if tiles is None:
            loss = F.cross_entropy((x @ weight.T).flatten(0, 1), labels.flatten())
        else:
            loss = tiled_loss(weight, x, labels, tiles=tiles)
        loss.backward()
        results.append((loss.detach(), x.grad, leaf.grad))
    for actual, expected in zip(*results):
        assert_close(actual, expected, LAW)
    assert torch.autograd.gradcheck(
        lambda x, w: tiled_loss(w, x, labels, tiles=3),
        (make_hidden(), pattern(VOCABULARY, WIDTH).requires_grad_()),
    )


def test_another_index_can_be_ignored() -> None:
    labels, head = torch.tensor(LABELS["all"]), make_head()
    loss = tiled_loss(head, make_hidden(), labels, tiles=3, ignore_index=6)
    truth = F.cross_entropy(head(make_hidden()).flatten(0, 1), labels.flatten(), ignore_index=6)
    assert_close(loss, truth, LAW)
    assert differs(loss, tiled_loss(head, make_hidden(), labels, tiles=3))


def _masked_mean(head: nn.Module, x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
    """0/0 where the mask is empty: its gradients are nan, even when nothing comes from above."""
    losses = F.cross_entropy(head(x), y, reduction="none")
    return (losses * mask).sum() / mask.sum()


def _masks(rank: int, tiles: int) -> None:
    labels = torch.tensor(LABELS["all"])
    for second in ([0, 0, 0, 0, 1, 1, 0], [0, 0, 0, 0, 0.5, 3, 0]):
        mask = torch.tensor([[0] * TOKENS, second], dtype=F64)

        def run(head: nn.Module, x: Tensor, mask: Tensor = mask) -> Tensor:
            return TiledFusedLogitsLoss.apply(_masked_mean, head, x, labels, mask, tiles)

        def truth(head: nn.Module, x: Tensor, mask: Tensor = mask) -> Tensor:
            return _masked_mean(head, x.flatten(0, 1), labels.flatten(), mask.flatten())

        _compare(run, truth, make_head, torch.tensor(-0.5, dtype=F64))


@pytest.mark.parametrize("tiles", TILES)
def test_a_mask_counts_in_the_mean_also_where_it_is_empty(world: World, tiles: int) -> None:
    """Also as weights. The mask of the whole first sample is empty."""
    world(_masks, 1, tiles)


def test_of_a_mask_that_is_empty_everywhere_fn_says_what_it_is() -> None:
    """Here zero, with gradients that are zeros."""

    def fn(head: nn.Module, x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        return (F.cross_entropy(head(x), y, reduction="none") * mask).sum() / mask.sum().clamp(min=1)

    head, x, labels = make_head(), make_hidden(), torch.tensor(LABELS["all"])
    loss = TiledFusedLogitsLoss.apply(fn, head, x, labels, torch.zeros(BATCH, TOKENS), 3)
    loss.backward()
    for zero in (loss.detach(), x.grad, *gradients(head).values()):
        assert_close(zero, torch.zeros_like(zero), EXACT)


def test_outputs_can_be_joined_instead_of_reduced() -> None:
    mlp, x = Gated(), make_hidden()
    for reduction in (None, "mean", "sum"):
        y = sequence_tiled_compute(mlp.forward, TOKENS, 3, {"x": x}, {}, "x", output_reduction=reduction)
        assert_close(y, mlp(x) if reduction is None else getattr(mlp(x), reduction)(), LAW)
    numbers = sequence_tiled_compute(lambda x: x.sum(), TOKENS, 3, {"x": x}, {}, "x", None, 0, None)
    assert_close(numbers, torch.stack([x[:, :3].sum(), x[:, 3:5].sum(), x[:, 5:].sum()]), LAW)


# --------------------------------------------------------------------------------------------- report B08


def _of_losses(*losses: float) -> Tensor:
    """Hidden states (T, 2) whose cross entropy against label 0 is this, with the identity as head."""
    return torch.tensor([[0.0, math.log(math.expm1(loss))] for loss in losses], dtype=F64)


def _identity() -> nn.Linear:
    head = nn.Linear(2, 2, bias=False, dtype=F64)
    with torch.no_grad():
        head.weight.copy_(torch.eye(2))
    return head


def _b08_tiles(rank: int, way: str) -> None:
    """Losses 1, 2, 3 in one tile, 10 in the other, which is then masked wholly."""
    hidden = _of_losses(1, 2, 3, 10, 5, 5)[None].requires_grad_()
    for last, expected in ((0, 4.0), (IGNORED, 2.0)):
        labels, head = torch.tensor([[0, 0, 0, last, IGNORED, IGNORED]]), _identity()
        loss = WAYS[way]("mean", 2, labels)(head, hidden)
        assert_close(loss, torch.tensor(expected, dtype=F64), LAW, "mean over the valid tokens")
        of_x, of_head = torch.autograd.grad(loss, [hidden, head.weight])
        true_head, true_hidden = _identity(), hidden.detach().clone().requires_grad_()
        plain_loss(true_head, true_hidden, labels).backward()
        assert_close(of_x, true_hidden.grad, LAW, "gradient of hidden")
        assert_close(of_head, true_head.weight.grad, LAW, "gradient of the head")
        means = [plain_loss(head, hidden[:, half], labels[:, half]) for half in (slice(0, 3), slice(3, 6))]
        assert differs(torch.stack(means).mean(), loss), "the mean of the means is another number"


@pytest.mark.parametrize("way", list(WAYS))
def test_b08_a_mean_over_tiles_is_a_mean_over_tokens(world: World, way: str) -> None:
    world(_b08_tiles, 1, way)


def _b08_ranks(rank: int, has_label: bool) -> list[float]:
    """Report B08 itself: two ranks share a sequence; each also works in tiles."""
    group = my_group([[0, 1]], "seq")
    losses, label = ((1, 2, 3), 0) if rank == 0 else ((10, 5, 5), 0 if has_label else IGNORED)
    labels = torch.tensor([0, 0, 0] if rank == 0 else [label, IGNORED, IGNORED])
    hidden, head = _of_losses(*losses).requires_grad_(), _identity()
    total, valid = tiled_loss_sum(head, hidden, labels, tiles=2)
    comm.all_reduce(valid, group=group)
    (2 * total / valid).backward()
    everyone = torch.empty(2, dtype=F64)
    comm.all_gather_into_tensor(everyone, (2 * total / valid).detach().view(1), group=group)
    comm.all_reduce(head.weight.grad, group=group)
    whole, truth = _of_losses(1, 2, 3, 10, 5, 5).requires_grad_(), _identity()
    true_labels = torch.tensor([0, 0, 0, 0 if has_label else IGNORED, IGNORED, IGNORED])
    plain_loss(truth, whole, true_labels).backward()
    assert_close(head.weight.grad / 2, truth.weight.grad, LAW, "gradient of the head, averaged over ranks")
    assert_close(hidden.grad / 2, whole.grad[3 * rank : 3 * rank + 3], LAW, "gradient of hidden")
    assert differs(head.weight.grad, truth.weight.grad)
    return [everyone.mean().item(), everyone[1].item()]


def test_b08_ranks_average_to_the_mean_over_all_tokens(world: World) -> None:
    for mean, of_rank_one in world(_b08_ranks, 2, True):
        assert math.isclose(mean, 4.0, abs_tol=1e-10) and of_rank_one > 0
    for mean, of_rank_one in world(_b08_ranks, 2, False):
        assert math.isclose(mean, 2.0, abs_tol=1e-10) and of_rank_one == 0.0


def _group_without_labels(rank: int) -> None:
    """The quotient is nan on each rank, and belongs to no position."""
    head, hidden = _identity(), _of_losses(1, 2, 3).requires_grad_()
    total, valid = tiled_loss_sum(head, hidden, torch.full((3,), IGNORED), tiles=2)
    assert total.item() == 0.0 and valid.item() == 0
    loss = 2 * total / valid
    loss.backward()
    assert loss.isnan()
    for gradient in (hidden.grad, head.weight.grad):
        assert_close(gradient, torch.zeros_like(gradient), EXACT)


def test_b08_a_group_without_a_label_has_zero_gradients(world: World) -> None:
    world(_group_without_labels, 2)


def _with_a_cut_vocabulary(rank: int) -> None:
    """The head's rows lie on two ranks; each tile's softmax talks, forward and backward, in one order."""
    group, labels = my_group([[0, 1]]), torch.tensor(LABELS["masked tiles"])
    own = slice(0, 7) if rank == 0 else slice(7, VOCABULARY)
    whole, part = make_head(), nn.Linear(WIDTH, 7 if rank == 0 else 6, dtype=F64)
    with torch.no_grad():
        part.weight.copy_(whole.weight[own])
        part.bias.copy_(whole.bias[own])

    def fn(head: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return vocab_parallel_cross_entropy(head(x), y, group)

    x, theirs = make_hidden(), make_hidden()
    loss = TiledFusedLogitsLoss.apply(fn, part, x, labels, None, 4)
    truth = plain_loss(whole, theirs, labels)
    loss.backward()
    truth.backward()
    comm.all_reduce(x.grad, group=group)
    assert_close(loss, truth, LAW)
    assert_close(x.grad, theirs.grad, LAW)
    assert_close(part.weight.grad, whole.weight.grad[own], LAW)
    assert_close(part.bias.grad, whole.bias.grad[own], LAW)


def test_tiles_work_with_a_vocabulary_cut_over_ranks(world: World) -> None:
    world(_with_a_cut_vocabulary, 2)
