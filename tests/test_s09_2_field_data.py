"""§9.2 Public reports B18 and B22: micro-batches that change, iterators that end, repeat or break.
Guards against: a receive cut to an older shape, inputs with foreign labels, ranks that run out of data at
different times and wait for ever."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from oracles import MicroBatch, one_process
from small_models import (
    HIDDEN,
    INPUTS,
    OUTPUTS,
    Scale,
    check_weights,
    linear,
    make_batch,
    make_pipeline,
    mean_squared,
    share,
)
from tolerance import LAW, assert_close
from torch import Tensor, nn

# ---------------------------------------------------------------------- B18: every message describes itself

SHAPES = [(2, 5), (2, 7), (1, 7), (3, 2, 4), (6,), (), (2, 5), (1, 1, 1, 2), (0, 5), (4, 3), (5, 2), (7, 1)]
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float64, torch.float16, torch.float32]


def any_shape() -> list[MicroBatch]:
    """Micro-batches that differ in size, ndim and dtype; the loss is a sum, so that none may be empty."""
    generator = torch.Generator().manual_seed(5)
    batch = []
    for index, shape in enumerate(SHAPES):
        x, y = (torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(2))
        batch.append((x.to(DTYPES[index % len(DTYPES)]), y))
    return batch


def summed_squares(outputs: Tensor, labels: Tensor) -> Tensor:
    return (outputs.double() - labels).square().sum()


def to_rows(x: Tensor) -> tuple[Tensor, ...]:
    """A tuple whose length is that of the first dim; one element where there is none."""
    return x.unbind(0) if x.dim() and len(x) else (x,)


def from_rows(rows: tuple[Tensor, ...]) -> Tensor:
    return torch.stack(rows) if len(rows) > 1 else rows[0]


def changing_shapes(rank: int, impl: Any, stages: int, replicas: int) -> None:
    batch = any_shape()
    tensors = [Scale(0.5), torch.tanh, Scale(1.5), torch.tanh]
    tuples = [Scale(0.5), to_rows, from_rows, lambda x: x]
    for layers, shapes in ((tensors, batch), (tuples, [b for b in batch if b[0].shape[:1] != (1,)][:8])):
        for steps in (1, len(shapes) // 2 // replicas):  # within one train_batch, and between them
            m = len(shapes) // replicas // steps
            used = shapes[: m * replicas * steps]
            truth = one_process(layers, summed_squares, used, lr=0.01, steps=steps)
            losses = {
                float(summed_squares(output, y))
                for output, (_, y) in zip(truth.outputs, used[-m * replicas :])
            }
            assert len(losses) > m // 2, "control: the micro-batches are hardly told apart"
            pipeline = make_pipeline(impl, layers, stages, m, loss_fn=summed_squares, lr=0.01)
            data = share(pipeline, used, steps)
            for step in range(steps):
                pipeline.eval_batch(iter(shapes[step : step + m]))  # other shapes between two steps
                assert_close(pipeline.train_batch(data), truth.losses[step], LAW, f"step {step}")
            check_weights(pipeline.weights(), truth, f"{steps} steps")


@pytest.mark.parametrize("stages,replicas", [(2, 1), (4, 1), (2, 2)])
def test_b18_shapes_dtypes_and_tuple_lengths_may_change(
    world: Any, impl: Any, stages: int, replicas: int
) -> None:
    world(changing_shapes, stages * replicas, impl, stages, replicas)


# ------------------------------------------------------------------ B22: the ends of the pipeline read alike


def ten_times(outputs: Tensor, labels: Tensor) -> Tensor:
    return (10 * outputs - labels).abs().sum()


def pairs(count: int = 3) -> list[MicroBatch]:
    return [(torch.tensor([float(i)]).double(), torch.tensor([10.0 * i]).double()) for i in range(count)]


def identity_pipeline(impl: Any, m: int = 2) -> Any:
    return make_pipeline(impl, [Scale(), Scale(), Scale()], 3, m, loss_fn=ten_times, lr=0.0)


class Noting(list):
    """A loader that notes which of its items are read."""

    def __init__(self, items: list[Any]) -> None:
        super().__init__(items)
        self.read: list[int] = []

    def __iter__(self) -> Iterator[Any]:
        for index in range(len(self)):
            self.read.append(index)
            yield self[index]


def repeating(rank: int, impl: Any) -> list[int]:
    from ds_lite.utils import RepeatingLoader

    loader = Noting(pairs())
    data = RepeatingLoader(loader) if rank != 1 else None
    pipeline = identity_pipeline(impl)
    for _ in range(3):
        assert float(pipeline.train_batch(data)) == 0.0
    shifted = iter(pairs() if rank == 0 else pairs()[1:])  # a shuffle that differs pairs foreign labels
    assert float(pipeline.train_batch(shifted)) == 10.0
    served = identity_pipeline(impl)
    served.engine.set_dataloader(pairs())  # no iterator at all: the engine's own loader, for ever
    assert [float(served.engine.train_batch()) for _ in range(3)] == [0.0] * 3
    shuffled = identity_pipeline(impl)
    shuffled.engine.set_dataloader(shuffled.engine.deepspeed_io(pairs(7)))  # shuffled alike on every stage
    assert [float(shuffled.engine.train_batch()) for _ in range(8)] == [0.0] * 8
    return loader.read


def test_b22_the_ends_read_the_same_micro_batches_for_ever(world: Any, impl: Any) -> None:
    assert world(repeating, 3, impl) == [[0, 1, 2, 0, 1, 2], [], [0, 1, 2, 0, 1, 2]]


def fail_on(rank: int, impl: Any, case: str, only_rank: int | None) -> None:
    """A good step first; then data that is bad on every rank, or on one of them."""
    pipeline = identity_pipeline(impl) if torch.distributed.get_world_size() == 3 else None
    if pipeline is None:
        pipeline = make_pipeline(impl, [Scale(), Scale()], 2, 2, loss_fn=ten_times, lr=0.0)
    engine = pipeline.engine
    assert float(engine.train_batch(iter(pairs()))) == 0.0
    here = only_rank in (None, rank)
    if case == "count" and here:
        engine.set_train_batch_size(3 * engine.train_batch_size())
    if case == "other call" and here:
        engine.eval_batch(iter(pairs()))
    good: Iterator[Any] = iter(pairs(9))
    engine.train_batch(BAD[case]() if here and case in BAD else good)


def broken_loader() -> Iterator[Any]:
    yield pairs()[0]
    raise OSError("the file is gone")


def empty_loader() -> Iterator[Any]:
    from ds_lite.utils import RepeatingLoader

    return RepeatingLoader([])


BAD: dict[str, Any] = {
    "ends": lambda: iter(pairs(1)),
    "at once": lambda: iter(()),
    "empty": empty_loader,
    "broken": broken_loader,
    "list": lambda: pairs(),
    "no pair": lambda: iter([(1, 2, 3)] * 2),
}
REFUSED: list[tuple[str, Any, str]] = [
    ("ends", ValueError, r"ended after 1 of 2 micro-batches on stage \d"),
    ("at once", ValueError, r"ended after 0 of 2 micro-batches on stage \d"),
    ("empty", ValueError, "cannot repeat: its loader gives no batch"),
    ("broken", (OSError, RuntimeError), "the file is gone"),
    ("list", TypeError, r"is a list, which starts anew"),
    ("no pair", TypeError, r"micro-batch 0 on stage \d .* is a tuple of length 3"),
]


@pytest.mark.parametrize("case,error,words", REFUSED, ids=[row[0] for row in REFUSED])
def test_b22_bad_data_is_the_same_error_on_every_rank(
    world: Any, impl: Any, case: str, error: Any, words: str
) -> None:
    for nprocs, only_rank in ((3, None), (3, 0), (3, 2), (4, 1)):  # the last one: 2 x 2, one replica's
        if case == "no pair" and only_rank is None:
            continue
        messages = world.raises(error, words, fail_on, nprocs, impl, case, only_rank, deadline=20)
        told = {re.sub(r"^\w+: | on stage \d \(global_rank \d\)", "", message) for message in messages}
        assert len(told) == 1, told


@pytest.mark.parametrize("case,words", [("count", "micro_batches differs"), ("other call", "differs")])
def test_b22_unequal_calls_are_an_error_everywhere(world: Any, impl: Any, case: str, words: str) -> None:
    world.raises(ValueError, words, fail_on, 3, impl, case, 1, deadline=20)
    world.raises(ValueError, words, fail_on, 4, impl, case, 3, deadline=20)


def go_on(rank: int, impl: Any) -> None:
    """Data that ends is found before anything moves: the next step is as if nothing had happened."""
    layers = [linear(INPUTS, HIDDEN, 1), nn.Tanh(), linear(HIDDEN, OUTPUTS, 2)]
    pipeline = make_pipeline(impl, layers, 2, 2)
    batch = make_batch(8)
    truth = one_process(layers, mean_squared, batch, lr=0.1, steps=2)
    data = share(pipeline, batch, steps=2)
    for step in range(2):
        for call in (pipeline.train_batch, pipeline.eval_batch):
            with pytest.raises(ValueError, match="ended after 1 of 2"):
                call(iter(batch[:1]))
        assert_close(pipeline.train_batch(data), truth.losses[step], LAW, f"step {step}")
    check_weights(pipeline.weights(), truth)


def test_b22_training_goes_on_after_data_that_ended(world: Any, impl: Any) -> None:
    world(go_on, 4, impl)
