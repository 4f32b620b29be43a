"""§9.14 Tiled computation in the rest of the graph: hooks, accumulation, checkpoints, formats, memory.

Guards against: gradients and hooks that come once a tile, or for a parameter that is not used, a graph that
can be asked only once, gradients that float16 loses, logits that exist whole."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from meter import LiveStorages
from shard_checks import pattern
from small_models import linear
from tiled_cases import (
    F64,
    LABELS,
    NAMES,
    VOCABULARY,
    WIDTH,
    Gated,
    gradients,
    make_head,
    make_hidden,
    plain_loss,
    way_of,
)
from tolerance import BF16, LAW, assert_close
from torch import Tensor, nn
from torch.nn import functional as F
from world import World

from ds_lite.checkpointing import checkpoint
from ds_lite.sequence.tiled import TiledFusedLogitsLoss, tiled, tiled_loss, tiled_loss_sum


def _hooks(rank: int, name: str) -> None:
    run, plain = way_of(name)
    head, truth, calls = make_head(), make_head(), []
    head.weight.register_post_accumulate_grad_hook(lambda parameter: calls.append(parameter.grad.clone()))
    head.weight.register_hook(lambda gradient: 3 * gradient)
    for backwards in (1, 2):
        run(head, make_hidden()).backward()
        plain(truth, make_hidden()).backward()
        assert len(calls) == backwards, f"{len(calls)} calls in {backwards} backwards"
        assert_close(calls[-1], 3 * truth.weight.grad, LAW, "weight.grad as the hook sees it")


@pytest.mark.parametrize("name", NAMES)
def test_hooks_of_a_parameter_run_once_a_backward_with_the_whole_gradient(world: World, name: str) -> None:
    """Also where gradients of several backwards accumulate."""
    world(_hooks, 1, name)


def _spare(rank: int, name: str) -> None:
    calls: list[Any] = []
    for compute in way_of(name):
        head = make_head()
        head.spare = nn.Parameter(pattern(3))
        head.spare.register_hook(calls.append)
        head.spare.register_post_accumulate_grad_hook(calls.append)
        compute(head, make_hidden()).backward()
        assert head.spare.grad is None and head.weight.grad is not None
    assert not calls, f"hooks of an unused parameter got {calls}"


@pytest.mark.parametrize("name", NAMES)
def test_a_parameter_that_is_not_used_gets_no_gradient_and_no_call(world: World, name: str) -> None:
    """`self` may be the whole model."""
    world(_spare, 1, name)


@pytest.mark.parametrize("name", NAMES)
def test_a_result_may_be_used_twice_beside_other_uses_of_the_parameters(name: str) -> None:
    results = []
    for compute in way_of(name):
        head, x = make_head(), make_hidden()
        y = compute(head, x)
        (y * 2 + y.square() + (x @ head.weight.T).sin().sum() + head.bias.prod()).backward()
        results.append((x.grad, *gradients(head).values()))
    for actual, expected in zip(*results):
        assert_close(actual, expected, LAW)


def _asked_twice(rank: int, name: str) -> None:
    run, plain = way_of(name)
    head, x = make_head(), make_hidden()
    loss, truth = run(head, x), plain(head, x)
    expected = torch.autograd.grad(truth, [x, *head.parameters()])
    for factor in (-2.0, 1.0):
        upstream = torch.tensor(factor, dtype=F64)
        found = torch.autograd.grad(loss, [x, *head.parameters()], upstream, retain_graph=True)
        for actual, one in zip(found, expected):
            assert_close(actual, factor * one, LAW, f"with {factor} from above")
        assert upstream.item() == factor, "nor is the upstream gradient modified"
    assert head.weight.grad is None, "nothing is accumulated but by backward"


@pytest.mark.parametrize("name", NAMES)
def test_a_graph_that_is_kept_gives_the_same_twice(world: World, name: str) -> None:
    world(_asked_twice, 1, name)


@pytest.mark.parametrize("name", NAMES)
def test_parameters_learn_when_the_input_needs_no_gradient_and_the_reverse(name: str) -> None:
    run, plain = way_of(name)
    for needs_x in (False, True):
        results = []
        for compute in (run, plain):
            head = make_head().requires_grad_(not needs_x)
            x = make_hidden().detach().requires_grad_(needs_x)
            head.bias.requires_grad_(False)
            compute(head, x).backward()
            results.append(x.grad if needs_x else head.weight.grad)
            assert head.bias.grad is None and (x.grad is None) != needs_x
        assert_close(*results, LAW)


@pytest.mark.parametrize("name", NAMES)
def test_without_gradients_there_is_no_graph_and_no_gradient_work(name: str) -> None:
    run, plain = way_of(name)
    head, frozen, x = make_head(), make_head().requires_grad_(False), make_hidden()
    calls: list[bool] = []
    for module in (head, frozen):
        module.register_forward_hook(lambda module, args, y: calls.append(y.requires_grad))
    with torch.no_grad():
        quiet = run(head, x)
    frozen_result = run(frozen, x.detach())
    assert not quiet.requires_grad and not frozen_result.requires_grad
    assert len(calls) == 6 and not any(calls), "three tiles, once, without a graph"
    assert_close(quiet, plain(make_head(), x), LAW)
    assert_close(frozen_result, quiet, LAW)


@pytest.mark.parametrize("name", NAMES)
def test_inside_a_checkpoint_the_head_runs_twice_and_not_once_more_a_tile(name: str) -> None:
    run, plain = way_of(name)
    head, truth, x, theirs, calls = make_head(), make_head(), make_hidden(), make_hidden(), []
    head.register_forward_hook(lambda *_: calls.append(1))
    checkpoint(lambda x: run(head, x.sin()), x).backward()
    plain(truth, theirs.sin()).backward()
    for actual, expected in zip(
        (x.grad, *gradients(head).values()), (theirs.grad, *gradients(truth).values())
    ):
        assert_close(actual, expected, LAW)
    recomputes_itself = name in ("TiledMLP", "sequence_tiled_compute")
    assert len(calls) <= 3 * (3 if recomputes_itself else 2), "of three tiles"


@pytest.mark.parametrize("name", NAMES)
def test_under_autocast_it_rounds_as_the_plain_computation_does(name: str) -> None:
    results = []
    for compute in way_of(name):
        head, x = make_head(torch.float32), make_hidden().detach().float().requires_grad_()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = compute(head, x)
        y.backward()
        results.append((y.detach().float(), x.grad, *gradients(head).values()))
    for actual, expected in zip(*results):
        assert_close(actual, expected, BF16)
        assert actual.dtype is torch.float32


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["float16", "bfloat16"])
def test_losses_in_half_precision_are_added_up_in_float32(dtype: torch.dtype) -> None:
    """A sum of 4096 losses of about 20 does not fit float16, and 1/4096 of a gradient is not lost in it."""
    x, labels = (20 * pattern(4096, WIDTH)).to(dtype).requires_grad_(), torch.arange(4096) % VOCABULARY
    head, truth = make_head(dtype), make_head(dtype).float()
    theirs = x.detach().float().requires_grad_()
    total, valid = tiled_loss_sum(head, x, labels, tiles=5)
    true_total = plain_loss(truth, theirs, labels, "sum")
    assert total.dtype is torch.float32 and true_total > 65504
    assert_close(total / valid, true_total / 4096, BF16)
    (1024 * total / valid).backward()
    (1024 * true_total / 4096).backward()
    assert head.weight.grad.dtype is x.grad.dtype is dtype
    assert_close(head.weight.grad.float(), truth.weight.grad, BF16)
    assert_close(x.grad.float(), theirs.grad, BF16)


def _mean_of_many(rank: int, dtype: torch.dtype) -> None:
    """Each logit's gradient is 0.01/65536, next to nothing in float16; with the loss scale it is 0.01."""
    positions, scale = 65536, 65536

    def fn(head: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(head(x).float(), y)

    head = nn.Linear(2, 2, bias=False, dtype=dtype)
    with torch.no_grad():
        head.weight.copy_(torch.eye(2))
    x = torch.tensor([[4.6, 0.0]]).to(dtype).repeat(positions, 1).requires_grad_()
    theirs, labels = x.detach().float().requires_grad_(), torch.zeros(positions, dtype=torch.long)
    loss = TiledFusedLogitsLoss.apply(fn, head, x[None], labels[None], None, 2)
    truth = F.cross_entropy(theirs, labels)
    assert loss.dtype is torch.float32
    assert_close(loss, truth, BF16)
    (scale * loss).backward()
    (scale * truth).backward()
    ratio = x.grad.float() / theirs.grad
    assert_close(ratio, torch.ones_like(ratio), BF16, "found against expected gradient")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["float16", "bfloat16"])
def test_a_loss_scale_saves_small_gradients_of_a_mean(world: World, dtype: torch.dtype) -> None:
    world(_mean_of_many, 1, dtype)


def test_dropout_draws_the_same_numbers_in_forward_and_backward() -> None:
    mlp, x = nn.Sequential(Gated(), nn.Dropout(0.5)), make_hidden()
    torch.manual_seed(3)
    y = tiled(mlp, x, 3)
    (found,) = torch.autograd.grad(y.sum(), x)
    torch.manual_seed(3)
    expected = torch.cat([mlp(tile) for tile in x.split([3, 2, 2], dim=1)], dim=1)
    assert_close(y, expected, LAW)
    assert_close(found, torch.autograd.grad(expected.sum(), x)[0], LAW)


def test_a_second_derivative_of_the_loss_is_refused_by_torch() -> None:
    x = make_hidden()
    loss = tiled_loss(make_head(), x, torch.tensor(LABELS["all"]), tiles=2)
    (found,) = torch.autograd.grad(loss * x.sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        found.sum().backward()


# ------------------------------------------------------------------------------------------------ memory


def _logits(rank: int) -> None:
    positions, width, vocabulary = 64, 4, 512
    logits = positions * vocabulary * 8
    labels = torch.arange(positions)
    peaks: dict[str, int] = {}
    for name in ("plain", "TiledFusedLogitsLoss", "tiled_loss", "no_grad"):
        head, x = linear(width, vocabulary, 1), pattern(positions, width).requires_grad_()
        with LiveStorages() as meter, torch.set_grad_enabled(name != "no_grad"):
            if name == "plain":
                loss = plain_loss(head, x, labels)
            elif name == "TiledFusedLogitsLoss":
                loss = TiledFusedLogitsLoss.apply(plain_loss, head, x[None], labels[None], None, 8)
            else:
                loss = tiled_loss(head, x, labels, tiles=8)
            if loss.requires_grad:
                loss.backward()
        peaks[name] = meter.peak
        assert (meter.largest >= logits) == (name == "plain"), f"{name}: {meter.largest}"
    assert peaks["plain"] > 2 * logits
    for name in ("TiledFusedLogitsLoss", "tiled_loss", "no_grad"):
        assert peaks[name] < 0.35 * peaks["plain"], f"{name}: {peaks}"


def test_the_logits_of_all_positions_never_exist(world: World) -> None:
    """Bytes of live tensors, weights, gradients and all: with 8 tiles under 0.35 of the plain peak."""
    world(_logits, 1)


def _inner_values(rank: int) -> None:
    positions, inner = 64, 256
    mlp = nn.Sequential(linear(4, inner, 1), nn.SiLU(), linear(inner, 4, 2))
    peaks = {}
    for tiles in (1, 8):
        x = pattern(positions, 4).requires_grad_()
        with LiveStorages(min_bytes=positions * 4 * 8 + 1) as meter:  # inner values and weights' gradients
            meter.watch(list(mlp.parameters()))  # their views are seen sooner or later
            weights = meter.current
            y = tiled(mlp, x, tiles) if tiles > 1 else mlp(x)
            meter.reset_peak()
            kept = meter.current - weights
            y.sum().backward()
        peaks[tiles] = (kept, meter.peak - weights)
        mlp.zero_grad()
    assert peaks[1][0] >= 2 * positions * inner * 8 and peaks[8][0] == 0, "kept from forward to backward"
    assert peaks[8][1] < peaks[1][1] / 3


def test_the_inner_values_of_a_tiled_mlp_exist_for_one_tile(world: World) -> None:
    world(_inner_values, 1)
