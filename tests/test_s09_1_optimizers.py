"""§9.1 §9.2 Optimizers on replicas, shards and stages. Guards against: weight decay on a parameter that has
no gradient, options of a group that are lost, a norm for each group, a shard that is empty."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from oracles import one_process
from rings import everyday
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
    train_and_compare,
)
from tolerance import LAW, assert_close, differs
from torch import Tensor, nn


class Idle(nn.Module):
    """Its second parameter never gets a gradient: no optimizer may touch it, whatever the weight decay."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.idle = nn.Parameter(torch.linspace(0.5, 1.5, 7, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


def decay_and_idle(rank: int, impl: Any, stages: int, replicas: int) -> None:
    layers = [Idle(linear(INPUTS, HIDDEN, 1)), nn.Tanh(), Idle(linear(HIDDEN, OUTPUTS, 2)), nn.Identity()]
    for zero in impl.zero_stages:
        for optimizer in ("AdamW", "Adam", "RMSprop", "NAdam"):
            truth = train_and_compare(
                impl, layers, stages, 2, replicas=replicas, zero=zero, optimizer=optimizer, lr=1e-3, steps=3
            )
            for name in ("0.idle", "2.idle"):
                assert truth.grads[name] is None and not differs(truth.weights[name], truth.before[name])
        pipeline = make_pipeline(impl, layers, stages, 2, zero=zero)
        pipeline.compute_gradients(share(pipeline, make_batch(2 * replicas)))
        gradients = pipeline.gradients()
        assert gradients["0.idle"] is None and gradients["0.inner.weight"] is not None


@pytest.mark.parametrize("stages,replicas", everyday([(1, 4), (2, 2), (4, 1)], lambda case: case == (2, 2)))
def test_a_parameter_without_gradient_is_left_alone(
    world: Any, impl: Any, stages: int, replicas: int
) -> None:
    world(decay_and_idle, 4, impl, stages, replicas)


def groups_and_momentum(rank: int, impl: Any) -> None:
    """Biases with another rate and no decay; clipping looks at all groups at once."""
    layers = [linear(INPUTS, HIDDEN, 1), nn.Tanh(), linear(HIDDEN, 6, 2), linear(6, OUTPUTS, 3)]
    batch = make_batch(12)

    def grouped(named: Any) -> torch.optim.Optimizer:
        named = list(named)
        biases = {
            "params": [p for name, p in named if name.endswith("bias")],
            "lr": 0.03,
            "weight_decay": 0.0,
        }
        weights = {"params": [p for name, p in named if not name.endswith("bias")]}
        return torch.optim.SGD([biases, weights], lr=0.2, momentum=0.9, nesterov=True, weight_decay=0.1)

    def of_one_process(parameters: list[nn.Parameter], lr: float) -> torch.optim.Optimizer:
        names = [f"{index}.{end}" for index in (0, 2, 3) for end in ("weight", "bias")]
        return grouped(zip(names, parameters, strict=True))

    options = {"optimizer": of_one_process, "clip": 0.5, "steps": 3}
    truth = one_process(layers, mean_squared, batch, lr=0.0, **options)
    plain = one_process(layers, mean_squared, batch, lr=0.2, clip=0.5, steps=3)
    assert differs(truth.weights["0.bias"], plain.weights["0.bias"]), "control: the groups do nothing"
    for zero in impl.zero_stages:
        pipeline = make_pipeline(impl, layers, 2, 2, zero=zero, clip=0.5, optimizer=grouped)
        data = share(pipeline, batch, steps=3)
        for step in range(3):
            assert_close(pipeline.train_batch(data), truth.losses[step], LAW, f"zero={zero} step {step}")
            assert_close(pipeline.norm(), truth.norms[step], LAW, f"zero={zero} step {step}")
        check_weights(pipeline.weights(), truth, f"zero={zero}")


def test_groups_keep_their_options_and_share_one_norm(world: Any, impl: Any) -> None:
    world(groups_and_momentum, 4, impl)


def tiny_shards(rank: int, impl: Any) -> None:
    """One to three elements on four ranks: most shards are empty or padding."""
    for count in (1, 2, 3):
        layers = [Scale(0.5 + index) for index in range(count)]
        batch = [(x[:, :OUTPUTS], y) for x, y in make_batch(24)]
        options = {"replicas": 4, "steps": 3, "zero": 1, "optimizer": "Adam", "lr": 1e-3, "clip": 0.01}
        train_and_compare(impl, layers, 1, 2, batch=batch, msg=f"{count} elements", **options)


def test_zero_with_fewer_elements_than_ranks(world: Any, impl: Any) -> None:
    world(tiny_shards, 4, impl)
