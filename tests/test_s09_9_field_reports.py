"""§9.9 What goes wrong in practice: field reports B10, B11, B12, B25, B31 and A09, each with its whole kind.

Guards against: two ends of a message that decide on their own, members of a tuple lost or changed on the way,
checkpointing that cuts the graph, tied copies that drift, ranks of one group taken for ranks of another,
initial weights that depend on the split."""

from __future__ import annotations

import itertools
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from adapters.ds_lite import Pipeline, merge_equal
from meter import LiveStorages
from oracles import MicroBatch, Tied, Truth, one_process, split_micro_batches
from tolerance import EXACT, LAW, assert_close, differs
from torch import Tensor, nn

import ds_lite
from ds_lite import comm
from ds_lite.grid import PipelineParallelGrid
from ds_lite.pipe.module import LayerSpec, PipelineModule, TiedLayerSpec
from ds_lite.topology import ProcessTopology

WIDTH, BATCH, TOKENS, VOCABULARY = 5, 3, 4, 7  # all different
F64 = torch.float64


def seeded(layers: list[Any]) -> list[Any]:
    """The layers in float64, every parameter drawn anew, biases too; the same on every rank."""
    generator = torch.Generator().manual_seed(11)
    for layer in layers:
        module = layer.module if isinstance(layer, Tied) else layer
        if isinstance(module, nn.Module):
            module.double()
            for parameter in module.parameters():
                parameter.data.normal_(std=0.5, generator=generator)
    return layers


def floats(count: int) -> list[MicroBatch]:
    generator = torch.Generator().manual_seed(5)

    def draw() -> Tensor:
        return torch.randn(BATCH, WIDTH, dtype=F64, generator=generator)

    return [(draw(), draw()) for _ in range(count)]


def token_ids(count: int) -> list[MicroBatch]:
    generator = torch.Generator().manual_seed(5)
    shape = (BATCH, TOKENS)
    return [
        (
            torch.randint(VOCABULARY, shape, generator=generator),
            torch.randn(*shape, WIDTH, dtype=F64, generator=generator),
        )
        for _ in range(count)
    ]


def squares(output: Any, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def mine_of(pipeline: Any, batch: list[MicroBatch], steps: int = 1) -> Iterator[MicroBatch]:
    part = {"replica": pipeline.replica, "num_replicas": pipeline.num_replicas, "steps": steps}
    return iter(split_micro_batches(batch, **part))


def assert_gradients(pipeline: Any, truth: Truth, what: str) -> None:
    gradients = pipeline.gradients()
    assert sorted(gradients) == sorted(truth.grads), f"{what}: other parameters than one process has"
    for name, gradient in truth.grads.items():
        if gradient is None:
            assert gradients[name] is None, f"{what}: {name} has a gradient, in one process it has none"
        else:
            assert_close(gradients[name], gradient, LAW, f"{what}: gradient of {name}")


def check_equal(
    impl: Any,
    layers: list[Any],
    batch: list[MicroBatch],
    what: str,
    *,
    num_stages: int,
    steps: int = 1,
    lr: float = 0.1,
    optimizer: Any = "SGD",
    loss_fn: Callable[..., Tensor] | None = squares,
    config: dict[str, Any] | None = None,
    module: dict[str, Any] | None = None,
    clip: float | None = None,
) -> Any:
    """Gradients of the first batch, then losses, norms and weights of all steps, against one process."""
    replicas = torch.distributed.get_world_size() // num_stages
    per_step = len(batch) // steps
    first = one_process(layers, loss_fn, batch[:per_step], lr=lr, optimizer=optimizer)
    last = one_process(layers, loss_fn, batch, lr=lr, optimizer=optimizer, clip=clip, steps=steps)
    pipeline = impl.make_pipeline(
        layers,
        num_stages=num_stages,
        loss_fn=loss_fn,
        num_micro_batches=per_step // replicas,
        lr=lr,
        config={**(config or {}), **({"gradient_clipping": clip} if clip else {})},
        module={"partition_method": "uniform", **(module or {})},
    )
    loss = pipeline.compute_gradients(mine_of(pipeline, batch[:per_step]))
    assert_close(loss, first.loss, LAW, f"{what}: loss")
    assert_gradients(pipeline, first, what)
    pipeline.clear_gradients()
    data = mine_of(pipeline, batch, steps)
    for step in range(steps):
        assert_close(pipeline.train_batch(data), last.losses[step], LAW, f"{what}: loss of step {step}")
        assert_close(pipeline.norm(), last.norms[step], LAW, f"{what}: norm of step {step}")
    after = pipeline.weights()
    for name, weight in last.weights.items():
        assert_close(after[name], weight, LAW, f"{what}: {name} after the steps")
        if last.grads.get(name) is not None:
            assert differs(after[name], last.before[name]), f"{what}: {name} did not move"
    return pipeline


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
        return self.linear(x[0]) * x[1][0]


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


# ------------------------------------------------------------------------------------------------- B12

CALLS: Counter[str] = Counter()  # forwards of counted layers in this process


class Counted(nn.Linear):
    """A Linear whose forwards are counted; only its name tells it from another."""

    def __init__(self, name: str) -> None:
        super().__init__(WIDTH, WIDTH)
        self.name = name

    def forward(self, x: Tensor) -> Tensor:
        CALLS[self.name] += 1
        return super().forward(x)


def segment(first: str, dropout: float = 0.0) -> list[Any]:
    start: nn.Module = nn.Embedding(VOCABULARY, WIDTH) if first == "ids" else Counted("zero")
    noise = [nn.Dropout(dropout)] if dropout else []
    return seeded([start, Counted("one"), nn.ReLU(), *noise, Counted("two"), nn.LayerNorm(WIDTH)])


INTERVALS = (0, 1, 2, 3, 100)


def _gradients_of(
    impl: Any, layers: list[Any], batch: list[MicroBatch], num_stages: int, interval: int, seed: int = 9
) -> tuple[dict[str, Any], dict[str, int]]:
    pipeline = impl.make_pipeline(
        layers,
        num_stages=num_stages,
        loss_fn=squares,
        num_micro_batches=len(batch),
        module={"activation_checkpoint_interval": interval, "partition_method": "uniform"},
    )
    CALLS.clear()
    torch.manual_seed(seed)
    pipeline.compute_gradients(mine_of(pipeline, batch))
    calls = dict(CALLS)
    CALLS.clear()
    pipeline.eval_batch(iter(batch))
    assert all(count == len(batch) for count in CALLS.values()), f"recomputed in evaluation: {CALLS}"
    return pipeline.gradients(), calls


def _checkpointing(rank: int, impl: Any, num_stages: int) -> None:
    for first, dropout in itertools.product(("ids", "floats"), (0.0, 0.4)):
        layers = segment(first, dropout)
        batch = token_ids(3) if first == "ids" else floats(3)
        plain, calls = _gradients_of(impl, layers, batch, num_stages, 0)
        assert set(calls.values()) == {3}, calls
        if not dropout:
            truth = one_process(layers, squares, batch, lr=0.1)
            for name, gradient in truth.grads.items():
                assert_close(plain[name], gradient, LAW, f"{first}: {name}")
        else:
            other, _ = _gradients_of(impl, layers, batch, num_stages, 0, seed=10)
            assert differs(other["1.weight"], plain["1.weight"]), "the masks do not depend on the seed"
        start = "0.weight"
        assert differs(plain[start], torch.zeros_like(plain[start])), f"{first}: no gradient at the start"
        for interval in INTERVALS[1:]:
            gradients, calls = _gradients_of(impl, layers, batch, num_stages, interval)
            assert set(calls.values()) == {6}, f"{first}, interval {interval}: {calls}"
            for name, gradient in plain.items():
                what = f"{first}, dropout {dropout}, interval {interval}: {name}"
                assert_close(gradients[name], gradient, EXACT, what)


@pytest.mark.parametrize("num_stages", [1, 2])
def test_b12_checkpointing_changes_the_number_of_forwards_and_nothing_else(
    world: Any, impl: Any, num_stages: int
) -> None:
    world(_checkpointing, num_stages, impl, num_stages)


def _setter(rank: int, impl: Any, num_stages: int) -> None:
    layers, batch = segment("ids"), token_ids(8)
    truth = one_process(layers, squares, batch, lr=0.1, steps=4)
    pipeline = impl.make_pipeline(layers, num_stages=num_stages, loss_fn=squares, num_micro_batches=2)
    data = iter(batch)
    for step, interval in enumerate((0, 2, 0, 1)):
        pipeline.engine.module.set_checkpoint_interval(interval)
        CALLS.clear()
        loss = pipeline.train_batch(data)
        assert set(CALLS.values()) == {4 if interval else 2}, f"step {step}, interval {interval}: {CALLS}"
        assert_close(loss, truth.losses[step], LAW, f"loss of step {step}")
    for name, weight in pipeline.weights().items():
        assert_close(weight, truth.weights[name], LAW, name)


@pytest.mark.parametrize("num_stages", [1, 2])
def test_b12_the_setter_counts_from_the_next_step(world: Any, impl: Any, num_stages: int) -> None:
    world(_setter, num_stages, impl, num_stages)


# ------------------------------------------------------------------------------------------------- B25


class Scale(nn.Module):
    """y = w x with a scalar w."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(2.0, dtype=F64))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x


def _scalar_tie(rank: int, impl: Any, num_stages: int) -> None:
    scale = Scale()
    pipeline = impl.make_pipeline(
        [Tied("w", scale), Tied("w", scale)], num_stages=num_stages, loss_fn=None, num_micro_batches=1
    )
    one = torch.tensor([1.0], dtype=F64)
    with comm.record() as ledger:
        loss = pipeline.compute_gradients(iter([(one, one)]))
    assert float(loss) == 4.0
    # w used twice: 2 w x. Not their mean, 2, and not the sum taken twice, 8.
    assert float(pipeline.gradients()["tied_modules.w.weight"]) == 4.0
    assert ledger.total(axis="tied").calls == (1 if num_stages > 1 else 0)


@pytest.mark.parametrize("num_stages", [1, 2])
def test_b25a_and_d_the_gradient_of_a_tie_is_the_sum_of_both_uses(
    world: Any, impl: Any, num_stages: int
) -> None:
    world(_scalar_tie, num_stages, impl, num_stages)


class Inner(nn.Module):
    """A tied layer whose parameters have dotted names."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH).double()

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x))


class Gate(nn.Module):
    """A layer of its own, so that stages hold more than the tie."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH).double()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(x)


def without_bias(module: nn.Module, x: Tensor) -> Tensor:
    return x @ module.linear.weight


def inner(key: str, forward_fn: Callable[..., Tensor] | None = None) -> TiedLayerSpec:
    attributes = ["linear.weight", "linear.bias"]
    return TiedLayerSpec(key, Inner, forward_fn=forward_fn, tied_weight_attr=attributes)


def oracle_layers(specs: list[Any], weights: dict[str, Tensor]) -> list[Any]:
    """Plain layers for these specs, one module a tied key, with the given weights."""
    shared: dict[str, nn.Module] = {}
    layers: list[Any] = []
    for index, spec in enumerate(specs):
        if isinstance(spec, TiedLayerSpec):
            module = shared.setdefault(spec.key, spec.build())
            prefix = f"tied_modules.{spec.key}"
            layers.append(Tied(spec.key, module, spec.forward_fn))
        else:
            module, prefix = spec.build(), str(index)
            layers.append(module)
        module.load_state_dict({name: weights[f"{prefix}.{name}"] for name in module.state_dict()})
    return layers


def check_ties(specs: list[Any], num_stages: int, what: str, *, seed: int, zero: int = 0) -> None:
    """Five AdamW steps with weight decay: copies equal bit by bit after every step, and to one process."""
    torch.manual_seed(seed)
    num_replicas = torch.distributed.get_world_size() // num_stages
    model = PipelineModule(specs, num_stages=num_stages, loss_fn=squares, partition_method="uniform")
    engine, *_ = ds_lite.initialize(
        model=model,
        config={
            "train_micro_batch_size_per_gpu": BATCH,
            "gradient_accumulation_steps": 2,
            "zero_optimization": {"stage": zero},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "eps": 1e-8, "weight_decay": 0.1}},
        },
    )
    pipeline = Pipeline(engine)
    batch = floats(5 * 2 * num_replicas)
    start = pipeline.weights()  # merge_equal: copies on different stages are equal bit by bit
    layers = oracle_layers(specs, start)
    first = one_process(layers, squares, batch[: 2 * num_replicas], lr=1e-3)
    adamw = partial(torch.optim.AdamW, weight_decay=0.1, eps=1e-8)
    truth = one_process(layers, squares, batch, lr=1e-3, optimizer=adamw, steps=5)
    pipeline.compute_gradients(mine_of(pipeline, batch[: 2 * num_replicas]))
    assert_gradients(pipeline, first, what)
    pipeline.clear_gradients()
    data = mine_of(pipeline, batch, steps=5)
    for step in range(5):
        assert_close(pipeline.train_batch(data), truth.losses[step], LAW, f"{what}: loss of step {step}")
        assert_close(pipeline.norm(), truth.norms[step], LAW, f"{what}: norm of step {step}")
        after = pipeline.weights()
    for name, weight in truth.weights.items():
        assert differs(weight, start[name]), f"{what}: {name} did not move"
        assert_close(after[name], weight, LAW, f"{what}: {name} after 5 steps")


def _opposite_orders(rank: int, num_stages: int) -> None:
    check_ties([inner("a"), inner("b"), inner("b"), inner("a")], num_stages, "a b | b a", seed=4)
    plain = LayerSpec(Gate)
    check_ties(
        [inner("b"), plain, inner("a"), inner("a"), inner("b"), plain], num_stages, "b a | a b", seed=4
    )


@pytest.mark.parametrize("nprocs", [2, 4])
def test_b25b_keys_in_opposite_order_on_two_stages_do_not_hang(world: Any, nprocs: int) -> None:
    world(_opposite_orders, nprocs, 2, deadline=30)


def _other_seeds(rank: int, zero: int) -> None:
    drawn = torch.manual_seed(100 + rank).initial_seed()
    seeds: list[Any] = [None] * torch.distributed.get_world_size()
    comm.all_gather_object(seeds, drawn)
    assert len(set(seeds)) == len(seeds), "control: every rank starts from another seed"
    check_ties([inner("a"), LayerSpec(Gate), inner("a")], 2, "other seeds", seed=100 + rank, zero=zero)


@pytest.mark.parametrize("nprocs,zero", [(2, 0), (4, 0), (4, 1)])
def test_b25c_stages_seeded_differently_start_equal_and_stay_equal(
    world: Any, nprocs: int, zero: int
) -> None:
    world(_other_seeds, nprocs, zero)


def _same_stage(rank: int) -> None:
    specs = [inner("a"), LayerSpec(Gate), inner("a"), LayerSpec(Gate), LayerSpec(Gate), LayerSpec(Gate)]
    with comm.record() as ledger:
        check_ties(specs, 2, "both users on stage 0", seed=4)
    assert ledger.total(axis="tied").calls == 0


def test_b25d_users_on_one_stage_need_no_communication(world: Any) -> None:
    world(_same_stage, 2)


def _three_users(rank: int) -> None:
    gate = LayerSpec(Gate)
    check_ties([inner("a"), gate, inner("a"), gate, inner("a"), gate], 3, "three users", seed=4)
    mixed = [inner("b"), inner("a"), inner("a", without_bias), gate, inner("a", without_bias), inner("b")]
    check_ties(mixed, 3, "bias used on one stage only", seed=4)
    check_ties([gate, gate, inner("a"), inner("a"), inner("a"), gate], 3, "without stage 0", seed=4)


def test_b25e_three_users_over_three_stages(world: Any) -> None:
    world(_three_users, 3)


# ------------------------------------------------------------------------------------------------- B31


def _swapped_axes(rank: int, impl: Any, axes: list[str], dims: list[int]) -> list[int]:
    topology = ProcessTopology(axes, dims)
    stages = topology.get_dim("pipe")
    embedding = nn.Embedding(VOCABULARY, WIDTH)
    layers = seeded([Tied("word", embedding), Gate(), Gate(), Tied("word", embedding, logits)])
    ids = token_ids(8)
    batch = [(ids[i][0], ids[(i + 1) % 8][0]) for i in range(8)]
    for zero in (0, 1):
        pipeline = check_equal(
            impl,
            layers,
            batch,
            f"{axes} {dims} zero={zero}",
            num_stages=stages,
            steps=2,
            loss_fn=cross_entropy,
            config={"zero_optimization": {"stage": zero}},
            module={"topology": topology},
            clip=0.05,
        )
        coord = topology.get_coord(rank)
        assert (pipeline.stage_id, pipeline.replica) == (coord.pipe, coord.data)
    grid = pipeline.engine.grid
    return [grid.stage_to_global(stage) for stage in range(stages)]


def logits(embedding: nn.Module, hidden: Tensor) -> Tensor:
    return hidden @ embedding.weight.t()


def cross_entropy(output: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output.flatten(0, 1), labels.flatten())


@pytest.mark.parametrize(
    "axes,dims,columns",
    [
        (["pipe", "data"], [2, 2], [[0, 2], [1, 3], [0, 2], [1, 3]]),
        (["data", "pipe"], [2, 2], [[0, 1], [0, 1], [2, 3], [2, 3]]),
        (["data", "pipe"], [1, 4], [[0, 1, 2, 3]] * 4),
        (["data", "pipe"], [4, 1], [[0], [1], [2], [3]]),
    ],
)
def test_b31_any_order_of_the_axes_trains_like_one_process(
    world: Any, impl: Any, axes: list[str], dims: list[int], columns: list[list[int]]
) -> None:
    assert world(_swapped_axes, 4, impl, axes, dims) == columns


def _without_rank_zero(rank: int) -> dict[str, Any]:
    """Broadcast, scatter and gather, each from the first of my group; two groups have no rank 0."""
    grid = PipelineParallelGrid(ProcessTopology(["data", "model"], [2, 2]))
    group, ranks = grid.get_slice_parallel_group(), grid.ranks("model")
    loss = torch.tensor([float(rank)], dtype=F64)
    comm.broadcast(loss, src=ranks[-1], group=group)
    piece = torch.empty(1, dtype=F64)
    mine = [torch.tensor([10.0 * rank + i], dtype=F64) for i in range(2)] if rank == ranks[0] else None
    comm.scatter(piece, mine, src=ranks[0], group=group)
    back = [torch.empty(1, dtype=F64) for _ in ranks] if rank == ranks[0] else None
    comm.gather(piece + 0.5, back, dst=ranks[0], group=group)
    return {"loss": loss.item(), "piece": piece.item(), "back": back and [t.item() for t in back]}


def test_b31_collectives_on_groups_without_rank_zero_take_global_ranks(world: Any) -> None:
    results = world(_without_rank_zero, 4)
    assert [result["loss"] for result in results] == [1.0, 1.0, 3.0, 3.0]
    assert [result["piece"] for result in results] == [0.0, 1.0, 20.0, 21.0]
    assert [result["back"] for result in results] == [[0.5, 1.5], None, [20.5, 21.5], None]


# ------------------------------------------------------------------------------------------------- A09

BUILT: list[int] = []  # numbers of the layers that this process built for good


class Drawn(nn.Module):
    """Draws from all three generators."""

    def __init__(self, number: int, width: int = WIDTH) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        noise = torch.from_numpy(np.random.standard_normal(width)) + random.random()
        self.noise = nn.Parameter(noise.to(self.linear.weight.dtype))
        if self.linear.weight.device.type != "meta":
            BUILT.append(number)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + self.noise


def recipe(width: int = WIDTH) -> list[Any]:
    """Eight layers of equal shapes; the tied one is also at both ends, and one is no module."""
    plain = [LayerSpec(Drawn, number, width) for number in range(1, 6)]
    tied = TiedLayerSpec("drawn", Drawn, 0, width, tied_weight_attr=["linear.weight", "noise"])
    return [tied, *plain[:3], torch.tanh, *plain[3:], tied]


def generators() -> tuple[Any, ...]:
    return torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()


def draws() -> tuple[float, float, float]:
    return torch.rand(1).item(), float(np.random.rand()), random.random()


def _build(num_stages: int, method: str, seed_layers: bool, base_seed: int = 1234) -> dict[str, Tensor]:
    """The full state dict, put together from all ranks; ranks that share a name must agree bit by bit."""
    model = PipelineModule(
        recipe(),
        num_stages=num_stages,
        seed_layers=seed_layers,
        base_seed=base_seed,
        partition_method=method,
    )
    return merge_equal(model.state_dict())


def _same_weights(rank: int) -> None:
    for seed_layers in (True, False):
        splits = {}
        for num_stages, method in itertools.product((1, 2, 4), ("uniform", "parameters", "type:drawn")):
            for set_seed in (torch.manual_seed, np.random.seed, random.seed):
                set_seed(21)
            before = generators()
            splits[num_stages, method] = _build(num_stages, method, seed_layers)
            if seed_layers:
                assert all(np.array_equal(a, b) for a, b in zip(before, generators()))
            rest: list[Any] = [None] * 4
            comm.all_gather_object(rest, draws())
            assert len(set(rest)) == 1, f"ranks draw differently after building: {rest}"
            assert splits.setdefault(("draws", seed_layers), rest[0]) == rest[0], "draws depend on the split"
        first = splits[1, "uniform"]
        assert len(first) == 18  # five layers and the tie, three tensors each
        for key, state in splits.items():
            if "draws" in key:
                continue
            assert sorted(state) == sorted(first), key
            for name, tensor in first.items():
                assert_close(state[name], tensor, EXACT, f"{key}: {name}")
        for kind in ("linear.weight", "linear.bias", "noise"):
            alike = [tensor for name, tensor in first.items() if name.endswith(kind)]
            assert len(alike) == 6
            assert all(differs(a, b) for a, b in itertools.combinations(alike, 2)), f"twin layers: {kind}"
    assert differs(_build(2, "uniform", True, 1235)["3.noise"], _build(2, "uniform", True)["3.noise"])


def test_a09_initial_weights_do_not_depend_on_the_split(world: Any) -> None:
    world(_same_weights, 4)


def _two_models(rank: int) -> None:
    torch.manual_seed(21)
    a, b = _build(2, "uniform", False), _build(2, "uniform", False)
    assert all(differs(a[name], b[name]) for name in a), "two models of one program are twins"


def test_a09_two_models_without_seeds_of_their_own_differ(world: Any) -> None:
    world(_two_models, 2)


def _replicas(rank: int) -> None:
    torch.manual_seed(rank)
    model = PipelineModule(recipe(), num_stages=2, loss_fn=squares)
    alone: list[Any] = [None] * 4
    comm.all_gather_object(alone, next(model.parameters()).detach())
    assert differs(alone[0], alone[1]), "control: seeded by rank, the replicas start apart"
    config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    ds_lite.initialize(model=model, config=config)
    merged = merge_equal(model.state_dict())
    assert len(merged) == 18


def test_a09_replicas_are_equal_bit_by_bit(world: Any) -> None:
    world(_replicas, 4)


def _own_layers_only(rank: int) -> tuple[list[int], list[int]]:
    BUILT.clear()
    model = PipelineModule(recipe(), num_stages=4, partition_method="uniform")
    return model.parts, list(BUILT)


def test_a09_a_stage_builds_its_own_layers_only(world: Any) -> None:
    results = world(_own_layers_only, 4)
    assert [parts for parts, _ in results] == [[0, 2, 4, 6, 8]] * 4
    assert [built for _, built in results] == [[0, 1], [2, 3], [4], [5, 0]]


def _memory(rank: int, method: str) -> None:
    width = 64
    layer = 4 * (width * width + 2 * width)  # bytes of one layer in float32
    watched = LiveStorages(min_bytes=4 * width)
    with watched:
        model = PipelineModule(recipe(width), num_stages=4, partition_method=method)
    stage = sum(p.numel() * p.element_size() for p in model.parameters())
    assert watched.current == stage
    # The stage plus one layer; below three layers is what the whole model, six, could never meet.
    small = 8 * 4 * width  # vectors that live while noise is drawn in float64 and converted
    assert stage <= watched.peak <= stage + layer + small, (watched.peak, stage, layer)
    assert watched.peak < 3.2 * layer < 6 * layer


@pytest.mark.parametrize("method", ["uniform", "parameters", "type:drawn"])
def test_a09_building_takes_the_memory_of_the_stage_and_one_layer(world: Any, method: str) -> None:
    world(_memory, 4, method)
