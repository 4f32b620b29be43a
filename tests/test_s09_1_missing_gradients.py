"""§9.1 A parameter that some ranks do not use. Guards against: a gradient that is missing on one replica
and therefore averaged nowhere, or only over those that have one; a None that becomes zeros, which an
optimizer with weight decay takes for a gradient."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from oracles import MicroBatch, one_process
from small_models import HIDDEN, INPUTS, OUTPUTS, check_weights, linear, make_batch, mean_squared, share
from small_models import make_pipeline as small_pipeline
from tolerance import LAW, assert_close, differs
from torch import Tensor, nn

STEPS, MICRO_BATCHES = 2, 2


class Switch(nn.Module):
    """The sign of the first input chooses one of two layers; a third is never chosen."""

    def __init__(self) -> None:
        super().__init__()
        self.minus, self.plus, self.never = (linear(INPUTS, HIDDEN, seed) for seed in (1, 2, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.plus(x) if x[0, 0] > 0 else self.minus(x)


def one_sign_a_replica(replicas: int) -> list[MicroBatch]:
    """The first replica sees only negative first inputs, the others only positive ones; in every step."""
    batch = make_batch(MICRO_BATCHES * replicas * STEPS)
    for index, (x, _) in enumerate(batch):
        is_first = index % (MICRO_BATCHES * replicas) < MICRO_BATCHES
        x[0, 0] = -x[0, 0].abs() if is_first else x[0, 0].abs()
    return batch


def check(rank: int, impl: Any, stages: int, replicas: int) -> None:
    layers: list[Any] = [Switch(), nn.Tanh(), linear(HIDDEN, OUTPUTS, 4)]
    batch = one_sign_a_replica(replicas)
    for zero in impl.zero_stages:
        options = {"lr": 1e-3, "optimizer": "AdamW"}
        truth = one_process(layers, mean_squared, batch, steps=STEPS, **options)
        first = one_process(layers, mean_squared, batch[: MICRO_BATCHES * replicas], **options)
        pipeline = small_pipeline(impl, layers, stages, MICRO_BATCHES, zero=zero, **options)
        pipeline.compute_gradients(share(pipeline, batch, STEPS))
        gradients = pipeline.gradients()
        for name, gradient in first.grads.items():
            if "never" in name:
                assert gradient is None and gradients[name] is None, f"zero={zero}: gradient of {name}"
            else:
                assert differs(gradient, torch.zeros_like(gradient)), f"control: {name} was used"
                assert_close(gradients[name], gradient, LAW, f"zero={zero}: gradient of {name}")
        pipeline.clear_gradients()
        data = share(pipeline, batch, STEPS)
        for _ in range(STEPS):
            pipeline.train_batch(data)
        check_weights(pipeline.weights(), truth, f"zero={zero}")


@pytest.mark.parametrize("stages,replicas", [(1, 2), (2, 2), (1, 3)], ids=["pp1-dp2", "pp2-dp2", "pp1-dp3"])
def test_a_missing_gradient_counts_as_zero_unless_all_miss_it(
    world: Any, impl: Any, stages: int, replicas: int
) -> None:
    world(check, stages * replicas, impl, stages, replicas)
