"""§9.15 Parts of a batch that share a weight give it one gradient, the sum of theirs.

Guards against: a part's gradient that is lost or counted twice, sums left over from another backward, a sum
that autograd has copied or cast on its way, tensors kept alive after the backward.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from domino_models import config_of
from shard_checks import pattern
from tolerance import BF16, EXACT, LAW, assert_close, differs
from torch import Tensor, nn
from torch.nn import functional as F

from ds_lite.domino import DominoAsyncColumnParallelLinear, RowParallelLinearNoComm
from ds_lite.domino.weights import SharedWeights
from ds_lite.tensor_parallel.pending import Pending, wait_in_backward

F64 = torch.float64
IN, OUT = 3, 5


class Both:
    """A row layer and a column layer whose parts share their weights; their parameters, and a plain twin."""

    def __init__(self, dtype: torch.dtype = F64) -> None:
        config = config_of(params_dtype=dtype)
        self.row = RowParallelLinearNoComm(IN, OUT, config, config.init_method, bias=False)
        self.column = DominoAsyncColumnParallelLinear(OUT, IN, None, config, config.init_method)
        self.row.weight.data.copy_(pattern(OUT, IN, seed=1))
        self.column.weight.data.copy_(pattern(IN, OUT, seed=2))
        self.parameters = [self.row.weight, self.column.weight]

    def parts(self, *xs: Tensor, times: int = 1) -> list[Tensor]:
        """Each part through both layers, `times` times over."""
        weights, pending, results = SharedWeights(), Pending(), []
        for part, x in enumerate(xs):
            for turn in range(times):
                y, _ = self.row(x, weights)
                x, _ = self.column(wait_in_backward(y, pending, (part, turn)), pending, (part, turn), weights)
            results.append(x)
        weights.end_forward()
        return results

    def plain(self, *xs: Tensor, times: int = 1) -> list[Tensor]:
        def once(x: Tensor) -> Tensor:
            return F.linear(F.linear(x, self.row.weight), self.column.weight, self.column.bias)

        results = list(xs)
        for _ in range(times):
            results = [once(x) for x in results]
        return results

    def gradients(self, loss: Callable[[], Tensor]) -> list[Tensor]:
        for parameter in self.parameters:
            parameter.grad = None
        loss().backward()
        return [parameter.grad for parameter in self.parameters if parameter.grad is not None]


def inputs(parts: int, dtype: torch.dtype = F64) -> list[Tensor]:
    return [pattern(2, part + 1, IN, seed=9 + part).to(dtype).requires_grad_() for part in range(parts)]


def parts_give_the_sum(rank: int, parts: int, times: int) -> None:
    both, xs = Both(), inputs(parts)

    def loss(through: Callable[..., list[Tensor]]) -> Tensor:
        return torch.cat([y.square().flatten() for y in through(*xs, times=times)]).mean()

    found, wanted = both.gradients(lambda: loss(both.parts)), both.gradients(lambda: loss(both.plain))
    first = both.gradients(lambda: both.plain(*xs, times=times)[0].square().sum() / 9)
    for name, own, right, of_one in zip(("row", "column"), found, wanted, first, strict=True):
        assert_close(own, right, LAW, f"dL/d weight of the {name}")
        assert differs(of_one, right), "control: the gradient of one part alone"


@pytest.mark.parametrize("parts, times", [(1, 1), (2, 1), (3, 1), (2, 3)])
def test_parts_give_the_sum(world: Any, parts: int, times: int) -> None:
    """Also of a weight that each part uses several times."""
    world(parts_give_the_sum, 1, parts, times)


def used_elsewhere(both: Both, xs: list[Tensor]) -> Tensor:
    """The weights also count for something in between, outside the layers."""
    first, second = both.parts(*xs)
    return first.square().sum() + sum(w.pow(3).sum() for w in both.parameters) + second.square().sum()


def in_between(rank: int) -> None:
    both, xs = Both(), inputs(2)
    found = both.gradients(lambda: used_elsewhere(both, xs))
    wanted = both.gradients(
        lambda: sum(y.square().sum() for y in both.plain(*xs)) + sum(w.pow(3).sum() for w in both.parameters)
    )
    for own, right in zip(found, wanted, strict=True):
        assert_close(own, right, LAW, "dL/d weight")


def test_a_weight_that_others_use_too(world: Any) -> None:
    world(in_between, 1)


def backwards_of_one_graph(rank: int) -> None:
    """What one backward has added up is nothing to the next."""
    both, xs = Both(), inputs(2)
    ys = both.parts(*xs)
    for chosen in ([0, 1], [0, 1], [1], [0], [0, 1]):
        found = torch.autograd.grad(
            sum(ys[part].square().sum() for part in chosen), both.parameters, retain_graph=True
        )
        plain = both.plain(*xs)
        wanted = torch.autograd.grad(sum(plain[part].square().sum() for part in chosen), both.parameters)
        for own, right in zip(found, wanted, strict=True):
            assert_close(own, right, LAW, f"backward of the parts {chosen}")


def test_the_same_backward_twice_and_parts_of_it(world: Any) -> None:
    world(backwards_of_one_graph, 1)


def after_others(rank: int) -> None:
    both, xs = Both(), inputs(2)
    ys = both.parts(*xs)
    wanted = torch.autograd.grad(sum(y.square().sum() for y in ys), both.parameters, retain_graph=True)

    def fail(_: Tensor) -> None:
        raise KeyError("in backward")

    hooked = xs[0].register_hook(fail)
    with pytest.raises(KeyError):
        sum(y.square().sum() for y in ys).backward(retain_graph=True)
    hooked.remove()
    torch.autograd.grad(sum(y.square().sum() for y in ys), xs, retain_graph=True)
    found = torch.autograd.grad(sum(y.square().sum() for y in ys), both.parameters)
    for own, right in zip(found, wanted, strict=True):
        assert_close(own, right, EXACT, "after a failed backward, and one of the inputs alone")


def test_a_backward_that_failed_leaves_nothing_to_the_next(world: Any) -> None:
    world(after_others, 1)


def test_bf16_and_a_backward_in_another_dtype() -> None:
    """Under autocast products are bfloat16 and the weight is not: each part's gradient goes its own way."""
    both, xs = Both(torch.float32), inputs(2, torch.float32)

    def loss() -> Tensor:
        return sum(y.square().sum() for y in both.parts(*xs))

    wanted = both.gradients(loss)
    with torch.autocast("cpu", torch.bfloat16):
        found = both.gradients(loss)
    low = Both(torch.bfloat16)
    rounded = low.gradients(lambda: sum(y.square().sum() for y in low.parts(*inputs(2, torch.bfloat16))))
    for own, right, in_bf16 in zip(found, wanted, rounded, strict=True):
        assert own.dtype == torch.float32
        assert_close(own, right, BF16, "under autocast")
        assert_close(in_bf16.float(), right, BF16, "in bfloat16")


def test_a_weight_without_a_gradient_and_no_graph() -> None:
    both, xs = Both(), inputs(2)
    both.row.weight.requires_grad_(False)
    sum(y.square().sum() for y in both.parts(*xs)).backward()
    wanted = torch.autograd.grad(sum(y.square().sum() for y in both.plain(*xs)), [both.column.weight])
    assert both.row.weight.grad is None and both.column.weight.grad is not None
    assert_close(both.column.weight.grad, wanted[0], LAW, "beside a frozen weight")
    with torch.no_grad():
        for own, right in zip(both.parts(*xs), both.plain(*xs), strict=True):
            assert_close(own, right, LAW, "without a graph")


def test_hooks_see_one_gradient_and_nothing_stays() -> None:
    """A parameter's hook runs once, with the whole; afterwards only the parameter holds it."""
    both, xs = Both(), inputs(2)
    seen: list[Any] = []
    both.row.weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
    ys = both.parts(*xs)
    gone = weakref.ref(ys[0].grad_fn)
    sum(y.square().sum() for y in ys).backward()
    assert len(seen) == 1 and both.row.weight.grad is not None
    assert_close(seen[0], both.row.weight.grad, EXACT)
    gc.disable()
    try:
        del ys
        assert gone() is None, "the graph is part of a cycle"
    finally:
        gc.enable()


def test_optimizers_see_the_parameter() -> None:
    both, xs = Both(), inputs(2)
    assert all(isinstance(parameter, nn.Parameter) for parameter in both.parameters)
    before = [parameter.detach().clone() for parameter in both.parameters]
    both.gradients(lambda: sum(y.square().sum() for y in both.parts(*xs)))
    torch.optim.SGD(both.parameters, lr=0.1).step()
    assert all(
        differs(parameter.detach(), old) for parameter, old in zip(both.parameters, before, strict=True)
    )
