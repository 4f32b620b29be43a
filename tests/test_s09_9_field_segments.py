"""§9.9 Field report B12: activation checkpointing of segments, with its whole kind.

Guards against: a graph cut where the input needs no gradient, a setter that nobody reads, other dropout
masks in the second forward."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import pytest
import torch
from field_pipelines import VOCABULARY, WIDTH, floats, mine_of, seeded, squares, token_ids
from oracles import MicroBatch, one_process
from tolerance import EXACT, LAW, assert_close, differs
from torch import Tensor, nn

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
