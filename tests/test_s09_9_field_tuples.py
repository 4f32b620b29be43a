"""§9.9 §9.10 Field reports B10 and B11: what travels between stages, each with its whole kind.

Guards against: two ends of a message that decide on their own, members of a tuple lost or changed on the
way, a buffer that changes before its message has left."""

from __future__ import annotations

import itertools
import time
from typing import Any

import numpy as np
import pytest
import torch
from field_pipelines import (
    BATCH,
    F64,
    VOCABULARY,
    WIDTH,
    assert_gradients,
    check_equal,
    floats,
    mine_of,
    seeded,
    squares,
    token_ids,
)
from oracles import one_process
from tolerance import differs
from torch import Tensor, nn

# ------------------------------------------------------------------------------------------------- B10


class WithTables(nn.Module):
    """ids -> hidden with its gradient, an int64 mask, and a float table that needs none, in some order."""

    def __init__(self, order: tuple[int, int, int]) -> None:
        super().__init__()
        self.embedding, self.order = nn.Embedding(VOCABULARY, WIDTH), order

    def forward(self, ids: Tensor) -> tuple[Tensor, ...]:
        rotary = torch.linspace(0.5, 1.5, WIDTH, dtype=F64)
        return tuple((self.embedding(ids), (ids > 2).long(), rotary)[place] for place in self.order)


class UsesAll(nn.Module):
    """Uses all three members, and says which of them asked for a gradient when they arrived."""

    def __init__(self, order: tuple[int, int, int], *, last: bool, use_rotary: bool = True) -> None:
        super().__init__()
        self.linear, self.order, self.last = nn.Linear(WIDTH, WIDTH), order, last
        self.use_rotary = use_rotary

    def forward(self, x: tuple[Tensor, ...]) -> Any:
        hidden, mask, rotary = (x[self.order.index(member)] for member in range(3))
        assert (hidden.requires_grad, mask.requires_grad, rotary.requires_grad) == (True, False, False)
        table = rotary if self.use_rotary else torch.ones_like(rotary)
        hidden = torch.tanh(self.linear(hidden * table)) + 0.3 * mask.unsqueeze(-1)
        return hidden if self.last else tuple((hidden, mask, rotary)[place] for place in self.order)


def _floats_without_gradient(rank: int, impl: Any, num_stages: int) -> None:
    for order in ((0, 1, 2), (2, 1, 0), (1, 2, 0)):
        layers = [WithTables(order), *(UsesAll(order, last=i == 2) for i in range(3))]
        batch = token_ids(3)
        without = [layers[0], *(UsesAll(order, last=i == 2, use_rotary=False) for i in range(3))]
        truth, control = (one_process(seeded(these), squares, batch, lr=0.1) for these in (layers, without))
        assert differs(truth.grads["0.embedding.weight"], control.grads["0.embedding.weight"])
        check_equal(impl, layers, batch, f"order {order}", num_stages=num_stages)


@pytest.mark.parametrize("num_stages", [2, 4])
def test_b10_a_float_that_needs_no_gradient_travels_beside_one_that_does(
    world: Any, impl: Any, num_stages: int
) -> None:
    world(_floats_without_gradient, num_stages, impl, num_stages)


# ------------------------------------------------------------------------------------------------- B11

DTYPES = [F64, torch.float32, torch.bfloat16, torch.int64, torch.int32, torch.bool, torch.uint8]
SHAPES = [(BATCH,), (), (0,), (2, 0, 3), (2, 3, 4)]
SEEN: list[Any] = []  # what the recording layer of this process received


def of(dtype: torch.dtype, shape: tuple[int, ...], index: int) -> Tensor:
    """Distinct values, with NaN, both zeros, infinity and a subnormal where the dtype has them."""
    size = int(np.prod(shape, dtype=int))
    if dtype == torch.bool:
        return (torch.arange(size) % 3 == index % 3).reshape(shape)
    values = torch.arange(size, dtype=F64) + index
    if dtype.is_floating_point and size > 5:
        values[:5] = torch.tensor([float("nan"), -0.0, 0.0, -float("inf"), 1e-310], dtype=F64)
    return values.to(dtype).reshape(shape)


def members(kind: str) -> list[Tensor]:
    """The members beside the hidden tensor, the same on every rank."""
    if kind == "every dtype and shape":
        return [of(dtype, shape, i) for i, (dtype, shape) in enumerate(itertools.product(DTYPES, SHAPES))]
    if kind == "strides":
        table = of(F64, (3, 4), 2)
        return [table.t(), table[:, 1], table[0, 0].expand(2, 5), table.flip(0)[::2], table[:0].t()]
    count = int(kind.removeprefix("length "))
    return [of(DTYPES[i % 7], SHAPES[i % 5], i) for i in range(count - 1)]


def bits(tensor: Tensor) -> bytes:
    return bytes(tensor.detach().contiguous().view(-1).view(torch.uint8).tolist())


class Emit(nn.Module):
    """hidden -> (linear(hidden), members...) as a tuple or a list."""

    def __init__(self, kind: str, container: type = tuple) -> None:
        super().__init__()
        self.linear, self.kind, self.container = nn.Linear(WIDTH, WIDTH), kind, container

    def forward(self, x: Tensor) -> Any:
        return self.container([self.linear(x), *members(self.kind)])


class Pass(nn.Module):
    """One more stage between the ends."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Any) -> tuple[Tensor, ...]:
        return (self.linear(x[0]), *x[1:])


class Record(nn.Module):
    """Keeps what arrived, and gives the float members a part in the result."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Any) -> Tensor:
        SEEN.append(x)
        extra = sum(float(t.double().nan_to_num(0.1, 0.2, 0.3).sum()) for t in x[1:])
        return self.linear(x[0]) * (1 + 0.01 * (extra % 1))


def _tuples(rank: int, impl: Any, num_stages: int) -> None:
    kinds = [*(f"length {count}" for count in (1, 2, 3, 5, 12)), "every dtype and shape", "strides"]
    for kind, container in itertools.product(kinds, (tuple, list)):
        middle = [Pass() for _ in range(num_stages - 2)]
        layers = seeded([Emit(kind, container), *middle, Record()])
        batch = floats(2)
        pipeline = impl.make_pipeline(layers, num_stages=num_stages, loss_fn=squares, num_micro_batches=2)
        truth = one_process(layers, squares, batch, lr=0.1)
        SEEN.clear()
        pipeline.compute_gradients(mine_of(pipeline, batch))
        if pipeline.stage_id == num_stages - 1:
            assert len(SEEN) == 2
            for x in SEEN:
                assert type(x) is tuple, f"{kind} as {container.__name__} arrived as {type(x).__name__}"
                assert len(x) == 1 + len(members(kind))
                assert [t.requires_grad for t in x] == [True] + [False] * len(members(kind))
                for got, sent in zip(x[1:], members(kind)):
                    assert (got.dtype, got.shape) == (sent.dtype, sent.shape), kind
                    assert bits(got) == bits(sent), f"{kind}: {sent.dtype} {tuple(sent.shape)}"
        else:
            assert not SEEN
        assert_gradients(pipeline, truth, f"{kind} as {container.__name__}")


def test_the_comparison_of_bits_sees_a_sign_of_zero() -> None:
    assert bits(torch.tensor([0.0])) != bits(torch.tensor([-0.0]))
    assert bits(of(F64, (2, 3, 4), 1)) == bits(of(F64, (2, 3, 4), 1))


@pytest.mark.parametrize("num_stages", [2, 3])
def test_b11_tuples_arrive_bit_by_bit_with_their_dtypes_and_shapes(
    world: Any, impl: Any, num_stages: int
) -> None:
    world(_tuples, num_stages, impl, num_stages)


class Growing(nn.Module):
    """The number of members, their shapes and dtypes follow from the data, so they change all the time."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Any:
        count = int(x[0, 0] * 1000) % 4
        rows = [self.linear(x)[: 1 + (count + i) % BATCH] for i in range(count)]
        rest = [torch.full((i, 2), i, dtype=DTYPES[(count + i) % 7]) for i in range(count)]
        return (self.linear(x), *rows, *rest) if count else self.linear(x)


class Shrinking(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Any) -> Tensor:
        if not isinstance(x, tuple):
            return self.linear(x) * 1.5
        return self.linear(x[0]) + sum(t.double().sum() * 0.01 * (i + 1) for i, t in enumerate(x[1:]))


def _changing(rank: int, impl: Any) -> None:
    batch = floats(8)
    counts = [int(inputs[0, 0] * 1000) % 4 for inputs, _ in batch]
    assert len(set(counts)) >= 3 and 0 in counts, "the data does not exercise the case"
    check_equal(impl, seeded([Growing(), Shrinking()]), batch, "changing tuples", num_stages=2, steps=2)


def test_b11_lengths_shapes_and_dtypes_may_change_between_micro_batches(world: Any, impl: Any) -> None:
    world(_changing, 2, impl)


class TwoHeads(nn.Module):
    """Two members that need a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.unused(x), self.used(x)


class UsesSecond(nn.Module):
    """Never uses the first member, or only for inputs whose second member starts above a bound."""

    def __init__(self, bound: float) -> None:
        super().__init__()
        self.linear, self.bound = nn.Linear(WIDTH, WIDTH), bound

    def forward(self, x: tuple[Tensor, Tensor]) -> Tensor:
        assert x[0].requires_grad and x[1].requires_grad
        first = x[0] if float(x[1][0, 0]) > self.bound else 0.0
        return self.linear(x[1] + first)


def _unused(rank: int, impl: Any, num_stages: int) -> None:
    never = seeded([TwoHeads(), UsesSecond(float("inf"))])
    batch = floats(4)
    truth = one_process(never, squares, batch, lr=0.1)
    assert truth.grads["0.unused.weight"] is None and truth.grads["0.used.weight"] is not None
    check_equal(impl, never, batch, "never used", num_stages=num_stages)
    starts = sorted(float(never[0](inputs)[1][0, 0]) for inputs, _ in batch)
    for index, bound in enumerate([starts[-2] + 1e-9, starts[0] + 1e-9]):
        sometimes = seeded([TwoHeads(), UsesSecond(bound)])
        truth = one_process(sometimes, squares, batch, lr=0.1)
        assert differs(truth.grads["0.unused.weight"], torch.zeros(WIDTH, WIDTH, dtype=F64))
        check_equal(impl, sometimes, batch, f"sometimes used, case {index}", num_stages=num_stages)


@pytest.mark.parametrize("nprocs", [2, 4])
def test_b11_a_member_that_is_not_used_has_no_gradient(world: Any, impl: Any, nprocs: int) -> None:
    world(_unused, nprocs, impl, 2)  # on four processes a member may be used in one replica only


class Frozen(nn.Module):
    """Nothing of the stage before needs a gradient."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x.sin(), x > 0


class OnTop(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: tuple[Tensor, Tensor]) -> Tensor:
        assert not x[0].requires_grad
        return self.linear(x[0]) + x[1]


def _frozen_stage(rank: int, impl: Any) -> None:
    pipeline = check_equal(impl, seeded([Frozen(), OnTop()]), floats(3), "frozen", num_stages=2)
    assert sorted(pipeline.weights()) == ["1.linear.bias", "1.linear.weight"]


def test_b11_a_stage_without_any_gradient_trains_what_follows(world: Any, impl: Any) -> None:
    world(_frozen_stage, 2, impl)


class Counting(nn.Module):
    """Hands out its own buffer, and changes it at the next forward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("calls", torch.zeros(100_000, dtype=F64))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        self.calls += 1
        return self.linear(x), self.calls


class SlowRecord(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: tuple[Tensor, Tensor]) -> Tensor:
        time.sleep(0.1)
        SEEN.append((float(x[1].min()), float(x[1].max())))
        return self.linear(x[0]) * float(x[1][0])


def _buffer_that_changes(rank: int, impl: Any) -> None:
    layers = seeded([Counting(), SlowRecord()])
    batch = floats(4)
    truth = one_process(layers, squares, batch, lr=0.1)
    pipeline = impl.make_pipeline(layers, num_stages=2, loss_fn=squares, num_micro_batches=4)
    SEEN.clear()
    pipeline.compute_gradients(mine_of(pipeline, batch))
    if pipeline.stage_id == 1:
        assert SEEN == [(1.0, 1.0), (2.0, 2.0), (3.0, 3.0), (4.0, 4.0)], SEEN
    assert_gradients(pipeline, truth, "a buffer that changes")


def test_b11_a_buffer_arrives_as_it_was_when_it_was_sent(world: Any, impl: Any) -> None:
    world(_buffer_that_changes, 2, impl)


class Conjugate(nn.Module):
    """Complex members whose conjugate and negative bits are still to be applied."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        value = torch.complex(self.linear(x), x)
        assert value.conj().is_conj() and value.conj().imag.is_neg()
        return value.conj(), value.detach().conj().imag


class Real(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: tuple[Tensor, ...]) -> Tensor:
        return self.linear(x[0].real) + x[0].imag * 0.5 + x[1] * 0.25


def _conjugates(rank: int, impl: Any) -> None:
    check_equal(impl, seeded([Conjugate(), Real()]), floats(2), "conjugate views", num_stages=2)


def test_b11_conjugate_and_negative_views_travel_as_their_values(world: Any, impl: Any) -> None:
    world(_conjugates, 2, impl)
