"""§9.1 ZeRO 0, 1, 2: what is held, what moves, odd parameters. Guards against: full gradients that live on
beside their shards, a reduction for each parameter, more bytes than the chapter's, a shard that is empty."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from meter import LiveStorages
from oracles import one_process
from small_models import mean_squared
from tolerance import LAW, assert_close, differs
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from ds_lite import comm


def make_engine(model: nn.Module, zero: int, *, m: int = 1, optimizer: str = "SGD", **config: Any) -> Any:
    import ds_lite

    settings = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": m,
        "zero_optimization": {"stage": zero, **config.pop("zero_optimization", {})},
        "optimizer": {"type": optimizer, "params": {"lr": 1e-3}},
        **config,
    }
    return ds_lite.initialize(model=model, config=settings)[0]


# ------------------------------------------------------------------------------------------ what is held

WIDTH, DEPTH = 96, 8


def wide_model(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(DEPTH))).to(dtype)


def bytes_by_stage(rank: int, zero: int) -> tuple[float, float]:
    """Bytes a parameter after a step, and the peak while gradients exist.

    Activations are tiny (one sample of 96 numbers a layer), buckets hold one layer.
    """
    one_layer = WIDTH * WIDTH
    count = one_layer * DEPTH
    with LiveStorages(min_bytes=4 * one_layer // 4) as meter:
        model = wide_model()
        meter.watch(list(model.parameters()))
        engine = make_engine(
            model, zero, m=2, optimizer="Adam", zero_optimization={"reduce_bucket_size": one_layer}
        )
        x = torch.ones(1, WIDTH)
        for _ in range(3):
            for _ in range(2):
                engine.backward(engine(x).square().mean())
                engine.step()
        held = meter.current
        meter.reset_peak()
        for _ in range(2):
            engine.backward(engine(x).square().mean())
        return held / count, meter.peak / count


@pytest.mark.parametrize("zero,dp", [(0, 2), (1, 2), (1, 4), (2, 2), (2, 4)])
def test_bytes_follow_the_formulas(world: Any, zero: int, dp: int) -> None:
    """float32: 4P parameters, 4P gradients, 8P states; stage 1 divides the states, 2 the gradients too.

    After a step stages 0 and 1 keep the gradients' buffers, for the next one.
    """
    states = 8 / dp if zero else 8
    gradients = 4 / dp if zero == 2 else 4
    one_bucket = 4 / DEPTH
    for held, peak in world(bytes_by_stage, dp, zero):
        kept = 0 if zero == 2 else 4
        assert held == pytest.approx(4 + states + kept, rel=0.03)
        most = 4 + states + gradients
        if zero:
            # the bucket under way, its shard, the one before, and one that the last collective still holds
            most += one_bucket * (1 + 3 / dp)
        most += one_bucket  # autograd makes each layer's gradient before it is moved
        assert 4 + states + gradients * 0.97 <= peak <= most * 1.03


# -------------------------------------------------------------------------------------------- what moves


def sent_bytes(rank: int, zero: int, m: int) -> dict[str, tuple[int, int]]:
    """(calls, bytes sent) by operation on the data axis over one optimizer step."""
    engine = make_engine(wide_model(), zero, m=m, optimizer="Adam")
    x = torch.ones(1, WIDTH)
    with comm.record() as ledger:
        for _ in range(m):
            engine.backward(engine(x).square().mean())
            engine.step()
    totals = {}
    for operation in ("all_reduce", "reduce_scatter", "all_gather"):
        total = ledger.total(axis="data", operation=operation)
        totals[operation] = (total.calls, total.sent)
    return totals


@pytest.mark.parametrize("m", [1, 3])
def test_the_ledger_shows_the_volumes_of_the_chapter(world: Any, m: int) -> None:
    """dp=2: an all-reduce sends P elements a rank, a reduce-scatter and an all-gather P/2 each."""
    size = 4 * WIDTH * WIDTH * DEPTH
    flags = 4 * DEPTH  # one for each parameter, all-reduced; with ZeRO-1 one more: came too late
    plain, sharded, accumulating = (world(sent_bytes, 2, zero, m)[0] for zero in (0, 1, 2))
    assert plain == {"all_reduce": (1, size + flags), "reduce_scatter": (0, 0), "all_gather": (0, 0)}
    assert sharded == {
        "all_reduce": (1, flags + 4),
        "reduce_scatter": (1, size // 2),
        "all_gather": (1, size // 2),
    }
    assert accumulating["reduce_scatter"] == (m, m * size // 2), "ZeRO-2 reduces every micro-batch"
    assert accumulating["all_gather"] == sharded["all_gather"]


class Operations(TorchDispatchMode):
    """How many tensor operations ran inside."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def operations_between(rank: int, depth: int, zero: int) -> int:
    """Tensor operations from the end of backward to the optimizer, and from there to the next forward."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(depth))).double()
    engine = make_engine(model, zero, gradient_clipping=0.1)
    engine.optimizer.step = lambda: None
    reduce, counter = engine.gradients.reduce, Operations()

    def counted() -> None:
        with counter:
            reduce()

    engine.gradients.reduce = counted
    engine.backward(engine(torch.ones(2, 4).double()).square().mean())
    with counter:
        engine.step()
    return counter.count


@pytest.mark.parametrize("zero", [0, 1, 2])
def test_operations_around_the_step_grow_with_buckets_not_with_parameters(world: Any, zero: int) -> None:
    few, many = (world(operations_between, 2, depth, zero) for depth in (2, 40))
    assert few == many and 0 < few[0] < 40


# -------------------------------------------------------------------------------------- odd parameters


class Odd(nn.Module):
    """Zero-sized, single, frozen, scalar and unused parameters around a matrix."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.single = nn.Parameter(torch.randn(1))
        self.frozen = nn.Parameter(torch.randn(5), requires_grad=False)
        self.scalar = nn.Parameter(torch.randn(()))
        self.matrix = nn.Parameter(torch.randn(3, 5))
        self.unused = nn.Parameter(torch.randn(2))
        self.transposed = nn.Parameter(torch.randn(4, 3).t())

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.frozen
        y = x @ self.matrix.t() * self.scalar + self.single + self.empty.sum()
        return y @ self.transposed


def odd_batches(count: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(9)
    rows = torch.randn(count, 2, 9, generator=generator, dtype=torch.float64)
    return [(row[:, :5], row[:, 5:]) for row in rows]


def odd_parameters(rank: int) -> None:
    dp = comm.get_world_size()
    batches = odd_batches(2 * dp * 3)
    for zero in (0, 1, 2):
        for optimizer in ("SGD", "AdamW"):
            model = Odd().double()
            truth = one_process(
                [copy.deepcopy(model)], mean_squared, batches, lr=1e-3, optimizer=optimizer, steps=3, clip=0.5
            )
            engine = make_engine(model, zero, m=2, optimizer=optimizer, gradient_clipping=0.5)
            for step in range(3):
                start = 2 * dp * step + 2 * rank
                for x, y in batches[start : start + 2]:
                    engine.backward(mean_squared(engine(x), y))
                    engine.step()
                norm = torch.tensor(engine.get_global_grad_norm(), dtype=torch.float64)
                assert_close(norm, truth.norms[step], LAW, f"zero={zero} {optimizer}: norm {step}")
            for name, parameter in model.named_parameters():
                expected = truth.weights[f"0.{name}"]
                assert_close(parameter.detach(), expected, LAW, f"zero={zero} {optimizer}: {name}")
            assert differs(model.matrix.detach(), truth.before["0.matrix"])


@pytest.mark.parametrize("dp", [1, 2, 4])
def test_odd_parameters_equal_one_process(world: Any, dp: int) -> None:
    world(odd_parameters, dp)


def fewer_elements_than_ranks(rank: int) -> None:
    """One number on four ranks: three shards are padding."""
    for zero in (1, 2):
        model = nn.Linear(1, 1, bias=False).double()
        nn.init.ones_(model.weight)
        engine = make_engine(model, zero, optimizer="SGD")
        engine.backward(engine(torch.full((2, 1), rank + 1.0).double()).mean())
        engine.step()
        assert_close(
            model.weight.detach(), torch.tensor([[1 - 1e-3 * 2.5]], dtype=torch.float64), LAW, f"zero={zero}"
        )


def test_fewer_elements_than_ranks(world: Any) -> None:
    world(fewer_elements_than_ranks, 4)


# --------------------------------------------------------------- a second backward, a cleared gradient


def by_hand(rank: int) -> None:
    """What a script may do with `.grad` between backward and step is respected."""
    x = torch.full((2, 3), 1.0 + rank).double()
    for zero in (0, 1, 2):
        torch.manual_seed(1)
        model = nn.Linear(3, 2).double()
        engine = make_engine(model, zero, m=2)
        engine.backward(engine(x).sum() * 100)
        engine.zero_grad()  # forget it; this is still the first of two
        assert model.weight.grad is None
        engine.backward(engine(x).sum())
        engine.step()
        engine.backward(engine(x).sum())
        gradient = engine.gradients.full("weight")
        assert gradient is not None
        assert_close(gradient, torch.full((2, 3), 3.0).double(), LAW, f"zero={zero}")  # 2 * mean(1, 2)
        engine.step()
        assert model.weight.grad is None
        if zero < 2:
            assert engine.gradients.full("weight") is None
        else:  # before the last backward nobody has a whole one
            with pytest.raises(RuntimeError, match="before the last micro-batch's backward"):
                engine.gradients.full("weight")


def test_zero_grad_in_the_middle_forgets(world: Any) -> None:
    world(by_hand, 2)


def twice_before_the_step(rank: int) -> None:
    """Two backwards at the boundary add up, as in one process."""
    x = torch.full((2, 3), 1.0 + rank).double()
    for zero in (0, 1, 2):
        torch.manual_seed(1)
        model = nn.Linear(3, 2).double()
        engine = make_engine(model, zero)
        engine.backward(engine(x).sum())
        engine.backward(engine(x).sum() * 10)
        gradient = engine.gradients.full("weight")
        assert gradient is not None
        assert_close(gradient, torch.full((2, 3), 33.0).double(), LAW, f"zero={zero}")


def test_two_backwards_before_the_step_add_up(world: Any) -> None:
    world(twice_before_the_step, 2)


def no_sync_with_zero_2(rank: int) -> None:
    with make_engine(nn.Linear(2, 2), 2).no_sync():
        raise AssertionError("not reached")


def test_no_sync_is_refused_with_zero_2(world: Any) -> None:
    world.raises(ValueError, r"no_sync\(\) with zero_optimization.stage=2", no_sync_with_zero_2, 2)
