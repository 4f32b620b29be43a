"""§9.9 §9.10 Models and options that are legal and seldom tried, each equal to one process.
Guards against: a stage without parameters or gradients, in-place layers, odd tensors between stages, two
engines that disturb each other, an m that is remembered, dropout that depends on the split."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from oracles import one_process
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


def frozen(layer: nn.Module) -> nn.Module:
    return layer.requires_grad_(False)


class Call(nn.Module):
    """A function as a module, to stand inside a Sequential."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Any) -> Any:
        return self.function(x)


def odd_tuple(x: Tensor) -> tuple[Tensor, ...]:
    """A 0-dim, an empty, a bool, an integer, a strided and an expanded tensor, and one twice."""
    turned = x.t()
    return x.sum(), x[:0], x > 0, torch.arange(4), turned, x[:1].expand(3, -1), turned


def from_odd_tuple(parts: tuple[Tensor, ...]) -> Tensor:
    total, empty, mask, numbers, turned, wide, again = parts
    assert empty.shape == (0, HIDDEN) and mask.dtype == torch.bool and numbers.dtype == torch.int64
    return turned.t() * again.t() + mask * total + wide.sum(0) + empty.sum() + numbers


def keep_shape(x: Tensor) -> Tensor:
    return x.t().unsqueeze(0).expand(3, -1, -1)


def undo_keep_shape(x: Tensor) -> Tensor:
    return x.mean(0).t()


def a() -> nn.Module:
    return linear(INPUTS, HIDDEN, 1)


def b() -> nn.Module:
    return linear(HIDDEN, HIDDEN, 2)


def c() -> nn.Module:
    return linear(HIDDEN, OUTPUTS, 3)


MODELS: dict[str, Callable[[], list[Any]]] = {
    "first stage frozen": lambda: [frozen(a()), b(), nn.Tanh(), c()],
    "last stage frozen": lambda: [a(), b(), nn.Tanh(), frozen(c())],
    "middle stages frozen": lambda: [a(), frozen(b()), frozen(b()), c()],
    "only the last stage trains": lambda: [frozen(a()), frozen(b()), frozen(b()), c()],
    "parameters only first": lambda: [linear(INPUTS, OUTPUTS, 1), nn.Tanh(), nn.Softplus(), nn.Identity()],
    "parameters only last": lambda: [nn.Tanh(), nn.Softplus(), nn.Identity(), linear(INPUTS, OUTPUTS, 1)],
    "in place first": lambda: [a(), nn.ReLU(inplace=True), c(), nn.ELU(inplace=True)],
    "expanded and transposed": lambda: [a(), keep_shape, undo_keep_shape, c()],
    "odd tensors": lambda: [a(), odd_tuple, from_odd_tuple, c()],
    "odd tensors at once": lambda: [a(), b(), odd_tuple, nn.Sequential(Call(from_odd_tuple), c())],
    "forty tensors": lambda: [a(), lambda x: tuple(x * i for i in range(40)), sum, c()],
    "one-tuple": lambda: [a(), lambda x: (x,), lambda x: x[0] * 2, c()],
}


def equal_on(rank: int, impl: Any, stages: int, replicas: int, zero: int) -> None:
    for name, make in MODELS.items():
        train_and_compare(impl, make(), stages, 3, replicas=replicas, zero=zero, msg=name)


@pytest.mark.parametrize("stages,replicas,zero", [(4, 1, 0), (2, 2, 1)])
def test_uncommon_models_equal_one_process(
    world: Any, impl: Any, stages: int, replicas: int, zero: int
) -> None:
    world(equal_on, stages * replicas, impl, stages, replicas, zero, deadline=120)


# ------------------------------------------------------------------------------------------------- batches


def two_losses(outputs: Tensor, labels: Any) -> tuple[Tensor, Tensor]:
    return mean_squared(outputs, labels["y"]) + labels["more"][0].mean(), outputs.mean()


def nested_data(rank: int, impl: Any) -> None:
    layers = [Call(lambda x: x[0] + x[1]["b"]), linear(INPUTS, HIDDEN, 1), linear(HIDDEN, OUTPUTS, 2)]
    batch: list[Any] = [((x, {"b": 2 * x}), {"y": y, "more": [y]}) for x, y in make_batch(8)]
    truth = train_and_compare(impl, layers, 2, 2, replicas=2, loss_fn=two_losses, batch=batch)
    pipeline = make_pipeline(impl, layers, 2, 2, loss_fn=two_losses)
    first, second = pipeline.train_batch(share(pipeline, batch, steps=2))
    assert_close(first, truth.losses[0], LAW)
    means = one_process(layers, lambda o, y: o.mean(), batch[:4], lr=0.0)
    assert_close(second, means.loss, LAW, "the second loss, a mean over micro-batches and replicas")


def test_nested_inputs_dict_labels_and_two_losses(world: Any, impl: Any) -> None:
    world(nested_data, 4, impl)


# ------------------------------------------------------------------------------------------ several engines


def alternating(rank: int, impl: Any) -> None:
    """Two models, other stages, other m, steps in turn; then one of them with another batch size."""
    small = [linear(INPUTS, OUTPUTS, 1), nn.Tanh(), nn.Identity(), Scale(2.0)]
    large = [linear(INPUTS, HIDDEN, 2), nn.Tanh(), linear(HIDDEN, HIDDEN, 3), linear(HIDDEN, OUTPUTS, 4)]
    batches = make_batch(12, seed=8), make_batch(24, seed=9)
    counts = (3, 2)
    truths = [
        one_process(layers, mean_squared, batch, lr=0.1, steps=4)
        for layers, batch in zip((small, large), batches)
    ]
    pipelines = [
        make_pipeline(impl, small, 4, counts[0]),
        make_pipeline(impl, large, 2, 3, zero=1 if 1 in impl.zero_stages else 0),
    ]
    data = [share(pipeline, batch, steps=4) for pipeline, batch in zip(pipelines, batches)]
    for step in range(4):
        for pipeline, items, truth in zip(pipelines, data, truths):
            assert_close(pipeline.train_batch(items), truth.losses[step], LAW, f"step {step}")
    for pipeline, truth in zip(pipelines, truths):
        check_weights(pipeline.weights(), truth)


def test_two_engines_in_turn(world: Any, impl: Any) -> None:
    world(alternating, 4, impl)


def growing_batch(rank: int, impl: Any) -> None:
    layers = [linear(INPUTS, HIDDEN, 1), nn.Tanh(), linear(HIDDEN, OUTPUTS, 2)]
    pipeline = make_pipeline(impl, layers, 2, 2, micro_batch_size=2)
    weights = layers
    for step, m in enumerate((2, 5, 1)):
        pipeline.engine.set_train_batch_size(2 * m * pipeline.num_replicas)
        batch = make_batch(m * pipeline.num_replicas, seed=step)
        truth = one_process(weights, mean_squared, batch, lr=0.1)
        assert_close(pipeline.train_batch(share(pipeline, batch)), truth.loss, LAW, f"m={m}")
        check_weights(pipeline.weights(), truth, f"m={m}")
        for index, layer in enumerate(weights):  # the next step starts from here
            if isinstance(layer, nn.Module):
                layer.load_state_dict(
                    {name: truth.weights[f"{index}.{name}"] for name, _ in layer.named_parameters()}
                )
    assert pipeline.engine.global_samples == 2 * (2 + 5 + 1) * pipeline.num_replicas


@pytest.mark.parametrize("nprocs", [2, 4])
def test_the_number_of_micro_batches_may_change_between_steps(world: Any, impl: Any, nprocs: int) -> None:
    world(growing_batch, nprocs, impl)


# --------------------------------------------------------------------------------------------------- dropout


def dropout_layers() -> list[Any]:
    ends = [linear(INPUTS, HIDDEN, 1), nn.Dropout(0.4), linear(HIDDEN, 6, 2), nn.Dropout(0.4)]
    return [*ends, linear(6, OUTPUTS, 3)]


def seeded_dropout(rank: int, impl: Any, stages: int) -> tuple[list[Tensor], dict[str, Tensor]]:
    """The masks are a function of (seed, layer, forward count): the split does not show."""
    results = []
    for interval in (0, 1, 2):
        torch.manual_seed(100 * rank + interval)
        before = torch.get_rng_state()
        options = {"seed_layers": True, "base_seed": 77, "activation_checkpoint_interval": interval}
        pipeline = make_pipeline(impl, dropout_layers(), stages, 3, module=options)
        data = iter(make_batch(6))
        losses = [pipeline.train_batch(data) for _ in range(2)]
        assert torch.equal(torch.get_rng_state(), before), "the global generator moved"
        results.append((losses, pipeline.weights()))
    for losses, weights in results[1:]:
        for left, right in zip([*losses, *weights.values()], [*results[0][0], *results[0][1].values()]):
            assert_close(left, right, LAW, "recomputation draws the same masks")
    off = make_pipeline(impl, [x for x in dropout_layers() if not isinstance(x, nn.Dropout)], stages, 3)
    plain = off.train_batch(iter(make_batch(3)))
    assert differs(plain, results[0][0][0]), "control: dropout does nothing"
    return results[0]


def test_seeded_dropout_does_not_depend_on_the_number_of_stages(world: Any, impl: Any) -> None:
    (losses, weights), *_ = world(seeded_dropout, 1, impl, 1)
    for stages in (2, 3):
        for other_losses, other_weights in world(seeded_dropout, stages, impl, stages):
            assert sorted(other_weights) == sorted(weights)
            for left, right in zip(other_losses, losses, strict=True):
                assert_close(left, right, LAW, f"{stages} stages")
            for name, weight in weights.items():
                assert_close(other_weights[name], weight, LAW, f"{stages} stages: {name}")
