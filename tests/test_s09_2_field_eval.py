"""§9.2 Public report B19: evaluation with its own size and count, and training afterwards.
Guards against: the training's count in the schedule or the mean, traces of an evaluation in what follows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import torch
from small_models import (
    HIDDEN,
    INPUTS,
    OUTPUTS,
    Scale,
    constant_batch,
    linear,
    make_batch,
    make_pipeline,
    mean_distance,
    share,
)
from tolerance import EXACT, assert_close, differs
from torch import Tensor, nn


class Counted:
    """An iterator that knows how many items were taken from it."""

    def __init__(self, items: Iterable[Any]) -> None:
        self.items, self.taken = iter(items), 0

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        item = next(self.items)
        self.taken += 1
        return item


def evaluate_to_three(rank: int, impl: Any) -> None:
    pipeline = make_pipeline(impl, [Scale(0.5), Scale(2.0)], 2, 2, loss_fn=mean_distance)
    batch = constant_batch([1.0, 2.0, 6.0])
    for extra in ({}, {"return_logits": True}, {"bcast_loss": False}, {"reduce_output": None}):
        result = pipeline.engine.eval_batch(iter(batch), num_micro_batches=3, **extra)
        if "return_logits" in extra:
            result, logits = result
            assert (logits is None) == (rank == 0)
            assert logits is None or torch.equal(logits, torch.zeros_like(batch[0][0]))
        if "reduce_output" in extra:
            assert [float(loss) for loss in result] == [1.0, 2.0, 6.0]
        elif "bcast_loss" in extra and rank == 0:
            assert result is None
        else:
            assert_close(result, torch.tensor(3.0, dtype=torch.float64), EXACT, str(extra))
    assert pipeline.engine.eval_batch(iter(batch), compute_loss=False) is None
    two = make_pipeline(impl, [Scale(), Scale()], 2, 2, loss_fn=lambda o, y: (mean_distance(o, y), y.sum()))
    mean, summed = two.engine.eval_batch(iter(batch), num_micro_batches=3)
    assert (float(mean), float(summed)) == (3.0, 6.0)


def test_b19_eval_takes_its_own_count(world: Any, impl: Any) -> None:
    world(evaluate_to_three, 2, impl)


def training_state(engine: Any, data: Counted) -> dict[str, Any]:
    numbers = engine.global_steps, engine.micro_steps, engine.global_samples, engine.skipped_steps
    optimizer = [value for state in engine.optimizer.state.values() for value in state.values()]
    return {
        "weights": [parameter.detach().clone() for parameter in engine.module.parameters()],
        "gradients": [p.grad if p.grad is None else p.grad.clone() for p in engine.module.parameters()],
        "optimizer": [torch.as_tensor(value).clone() for value in optimizer],
        "rng": torch.get_rng_state(),
        "modes": [module.training for module in engine.module.modules()],
        "numbers": (*numbers, *engine.get_lr(), engine.get_global_grad_norm(), data.taken),
    }


def assert_same_state(after: dict[str, Any], before: dict[str, Any]) -> None:
    for key, value in before.items():
        if isinstance(value, list):
            for left, right in zip(after[key], value, strict=True):
                same = torch.equal(left, right) if isinstance(left, Tensor) else left is right
                assert same, f"{key} changed"
        else:
            assert torch.equal(after[key], value) if key == "rng" else after[key] == value, f"{key} changed"


EVALUATIONS: list[tuple[int, int, dict[str, Any]]] = [  # micro-batches, samples in each, further arguments
    (3, 8, {}),
    (1, 1, {"return_logits": True}),
    (4, 3, {"reduce_output": None}),
    (2, 5, {"compute_loss": False}),
]


def with_and_without(rank: int, impl: Any, zero: int, seed_layers: bool) -> None:
    """The same training twice, in which the second evaluates between all steps."""
    layers = [linear(INPUTS, HIDDEN, 1), nn.Dropout(0.5), linear(HIDDEN, 6, 2), nn.Dropout(0.5)]
    layers.append(linear(6, OUTPUTS, 3))

    def run(evaluates: bool, *, disturbed: bool = False) -> tuple[list[Tensor], dict[str, Tensor]]:
        torch.manual_seed(4)
        pipeline = make_pipeline(
            impl, layers, 2, 2, optimizer="AdamW", lr=1e-3, zero=zero, module={"seed_layers": seed_layers}
        )
        engine = pipeline.engine
        data = Counted(share(pipeline, make_batch(24), steps=6))
        losses = []
        torch.manual_seed(5)
        for step in range(4):
            if evaluates:
                pipeline.compute_gradients(Counted(share(pipeline, make_batch(4))))
                torch.manual_seed(6 + step)
                before = training_state(engine, data)
                for count, samples, extra in EVALUATIONS:
                    once, twice = (
                        engine.eval_batch(
                            Counted(make_batch(count, samples=samples)), num_micro_batches=count, **extra
                        )
                        for _ in range(2)
                    )
                    assert_close(torch.as_tensor(flat(once)), torch.as_tensor(flat(twice)), EXACT, "again")
                assert_same_state(training_state(engine, data), before)
                pipeline.clear_gradients()
            torch.manual_seed(6 + step + disturbed)
            engine.module.micro_offset = 2 * step  # compute_gradients above counted its forwards
            losses.append(pipeline.train_batch(data))
        assert data.taken == 8
        return losses, pipeline.weights()

    def flat(result: Any) -> list[float]:
        if isinstance(result, (tuple, list)):
            return [number for part in result for number in flat(part)]
        return [] if result is None else torch.as_tensor(result).double().flatten().tolist()

    losses, weights = run(False)
    again, same = run(True)
    for left, right in zip([*again, *same.values()], [*losses, *weights.values()], strict=True):
        assert_close(left, right, EXACT, "training with evaluations between")
    if not seed_layers:
        assert differs(run(False, disturbed=True)[0][0], losses[0]), "control: dropout does nothing"


@pytest.mark.parametrize("nprocs,zero,seed_layers", [(2, 0, False), (2, 0, True), (4, 1, False)])
def test_b19_training_is_bit_equal_with_evaluations_between(
    world: Any, impl: Any, nprocs: int, zero: int, seed_layers: bool
) -> None:
    world(with_and_without, nprocs, impl, zero, seed_layers)
