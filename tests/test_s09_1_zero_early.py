"""§9.1 ZeRO-1 starts a bucket's reduce-scatter while the last backward still works. Guards against: replicas
that fill their buckets in different orders, a gradient that comes after its bucket was sent, one that other
ranks have a part of, and what an earlier step left in a buffer that is used again."""

from __future__ import annotations

import copy
from typing import Any
from unittest import mock

import pytest
import torch
from oracles import MicroBatch, one_process
from small_models import INPUTS, OUTPUTS, linear, make_batch, mean_squared
from test_s09_1_zero import make_engine
from tolerance import LAW, assert_close, differs
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ds_lite import comm
from ds_lite.tags import whole
from ds_lite.tensor_parallel import LinearAllreduce, LinearLayer, ReplicatedLinear, enter

STEPS, M = 4, 2
SMALL = {"reduce_bucket_size": 40}  # a layer or two a bucket


class Crossing(nn.Module):
    """Three layers; the sign of the first input skips one of them or uses it twice, in either order."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (linear(INPUTS, INPUTS, seed) for seed in (1, 2, 3))
        self.last = linear(INPUTS, OUTPUTS, 4)

    def forward(self, x: Tensor) -> Tensor:
        if x[0, 0] > 0:
            return self.last(self.first(torch.tanh(self.third(torch.tanh(self.first(x))))))
        return self.last(self.second(torch.tanh(self.first(x))))


def switching(replicas: int) -> list[MicroBatch]:
    """The replicas take turns in going one way; in the last step all go the same."""
    batch = make_batch(M * replicas * STEPS, seed=5)
    for index, (x, _) in enumerate(batch):
        step, place = divmod(index, M * replicas)
        goes_up = step == STEPS - 1 or (place // M + step) % 2
        x[0, 0] = x[0, 0].abs() if goes_up else -x[0, 0].abs()
    return batch


def crossing(rank: int, zero: int) -> None:
    """Loss by loss, norm by norm, gradient by gradient, weight by weight against one process."""
    dp = comm.get_world_size()
    batch = switching(dp)
    truth = one_process([Crossing()], mean_squared, batch, lr=1e-3, optimizer="AdamW", steps=STEPS, clip=0.1)
    engine = make_engine(
        Crossing(), zero, m=M, optimizer="AdamW", zero_optimization=SMALL, gradient_clipping=0.1
    )
    assert len(engine.gradients.buckets) > 2
    for step in range(STEPS):
        start = (dp * step + rank) * M
        for x, y in batch[start : start + M]:
            engine.backward(mean_squared(engine(x), y))
            engine.step()
        norm = torch.tensor(engine.get_global_grad_norm(), dtype=torch.float64)
        assert_close(norm, truth.norms[step], LAW, f"norm of step {step}")
    for name, parameter in engine.module.named_parameters():
        assert_close(parameter.detach(), truth.weights[f"0.{name}"], LAW, name)
        assert differs(parameter.detach(), truth.before[f"0.{name}"])


@pytest.mark.parametrize("zero,dp", [(zero, dp) for zero in (0, 1, 2) for dp in (2, 3)])
def test_replicas_that_use_other_layers_equal_one_process(world: Any, zero: int, dp: int) -> None:
    world(crossing, dp, zero)


class Heads(nn.Module):
    """Two heads of width 3 that share a scale: each tensor-parallel rank has a part of its gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.scale, self.out = linear(INPUTS, 6, 1), linear(INPUTS, 3, 2), linear(6, OUTPUTS, 3)
        self.group: Any = None

    def forward(self, x: Tensor) -> Tensor:
        x = enter(x, self.group)
        heads = self.query(x).unflatten(-1, (-1, 3)) * self.scale(x).unsqueeze(-2)
        return self.out(heads.flatten(-2))


class CutHeads(Heads):
    """One head on each of two ranks; the two others get the same numbers from the same seeds."""

    def bind(self, grid: Any) -> None:
        self.group = grid.group("model")
        self.query = LinearLayer(self.query, self.group, input_is_entered=True)
        self.scale = ReplicatedLinear(self.scale, self.group)
        self.out = LinearAllreduce(self.out, self.group)


def parts_on_two_axes(rank: int, zero: int) -> None:
    """dp2 x tp2 in a plain engine: what is a part on the model axis is summed there before it is sent."""
    batch = make_batch(2 * M)
    truth = one_process([Heads()], mean_squared, batch, lr=1e-3)
    engine = make_engine(CutHeads(), zero, m=M, zero_optimization=SMALL, tensor_parallel={"tp_size": 2})
    start = M * engine.grid.get_data_parallel_rank()
    for x, y in batch[start : start + M]:
        engine.backward(mean_squared(engine(x), y))
        if engine.is_gradient_accumulation_boundary():
            for name, _ in engine.module.named_parameters():
                gradient = engine.gradients.full(name)
                assert_close(gradient, truth.grads[f"0.{name}"], LAW, f"gradient of {name}")
        engine.step()
    norm = torch.tensor(engine.get_global_grad_norm(), dtype=torch.float64)
    assert_close(norm, truth.norms[0], LAW, "norm")
    for name, parameter in engine.module.named_parameters():
        expected = truth.weights[f"0.{name}"]
        assert_close(whole(parameter, parameter.detach()), expected, LAW, name)
        assert differs(expected, truth.before[f"0.{name}"])


@pytest.mark.parametrize("zero", [0, 1, 2])
def test_tensor_parallel_parts_in_a_plain_engine_equal_one_process(world: Any, zero: int) -> None:
    world(parts_on_two_axes, 4, zero)


def late(rank: int, on_rank: int) -> None:
    """Reentrant checkpointing brings a layer's gradient in pieces; on some ranks the last comes too late."""
    model = nn.Sequential(linear(INPUTS, INPUTS, 1), nn.Tanh(), linear(INPUTS, OUTPUTS, 2))
    reference = copy.deepcopy(model)
    engine = make_engine(model, 1, zero_optimization=SMALL)
    batch = make_batch(2 * comm.get_world_size())
    for step in range(2):
        x, y = batch[2 * rank + step]
        x = x.clone().requires_grad_()
        if on_rank in (rank, -1):
            hidden = checkpoint(model[0], torch.tanh(checkpoint(model[0], x, use_reentrant=True)))
            engine.backward(mean_squared(model[2](hidden), y))
        else:
            engine.backward(mean_squared(model[2](model[0](torch.tanh(model[0](x)))), y))
        engine.step()
        reference.zero_grad()
        for replica in range(comm.get_world_size()):
            x, y = batch[2 * replica + step]
            hidden = reference[0](torch.tanh(reference[0](x)))
            (mean_squared(reference[2](hidden), y) / comm.get_world_size()).backward()
        with torch.no_grad():
            for parameter in reference.parameters():
                parameter -= 1e-3 * parameter.grad
    for ours, expected in zip(model.parameters(), reference.parameters(), strict=True):
        assert_close(ours.detach(), expected.detach(), LAW, f"late on {on_rank}")


@pytest.mark.parametrize("on_rank", [-1, 0, 1])
def test_a_gradient_that_comes_late_is_still_counted(world: Any, on_rank: int) -> None:
    world(late, 2, on_rank)


def when_it_starts(rank: int) -> list[int]:
    """Reduce-scatters so far: in an earlier backward, in the last one, when the rest is reduced, after."""
    model = nn.Sequential(*(linear(INPUTS, INPUTS, seed) for seed in range(4)), linear(INPUTS, OUTPUTS, 9))
    engine = make_engine(model, 1, m=2, zero_optimization=SMALL)
    counts, reduce = [], engine.gradients.reduce
    with comm.record() as ledger:

        def count() -> None:
            counts.append(ledger.total(axis="data", operation="reduce_scatter").calls)

        def counted() -> None:
            count()
            reduce()

        with mock.patch.object(engine.gradients, "reduce", counted):
            for x, y in make_batch(2):
                handle = model[0].weight.register_hook(lambda _: count())  # backward's last layer
                engine.backward(mean_squared(engine(x), y))
                handle.remove()
                engine.step()
        count()
    return counts


def test_full_buckets_are_sent_during_the_last_backward(world: Any) -> None:
    """Five layers, a bucket each: four are on their way when the fifth gets its gradient."""
    assert world(when_it_starts, 2) == [[0, 4, 5, 5]] * 2
