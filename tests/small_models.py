"""Small float64 models for the reports of the field, and the one comparison most of them end in.

No bias is zero, no two samples are alike, sizes differ: what is special hides faults.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from oracles import Layer, MicroBatch, Truth, one_process, split_micro_batches
from tolerance import LAW, assert_close, differs
from torch import Tensor, nn

INPUTS, HIDDEN, OUTPUTS, SAMPLES = 5, 4, 3, 2


def linear(inputs: int, outputs: int, seed: int) -> nn.Linear:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        layer = nn.Linear(inputs, outputs, dtype=torch.float64)
        nn.init.normal_(layer.bias, std=0.4)
    return layer


class Scale(nn.Module):
    """y = weight * x for any shape and dtype; the result has the dtype of x."""

    def __init__(self, weight: float = 1.0, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([weight], dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.weight).to(x.dtype).view_as(x)


def mean_squared(outputs: Tensor, labels: Tensor) -> Tensor:
    return (outputs.double() - labels).square().mean()


def mean_distance(outputs: Tensor, labels: Tensor) -> Tensor:
    """With x = 0 and no bias this is exactly the label, whatever the weights."""
    return (outputs - labels).abs().mean()


def make_batch(count: int, *, samples: int = SAMPLES, seed: int = 1) -> list[MicroBatch]:
    """`count` micro-batches for layers from INPUTS to OUTPUTS."""
    generator = torch.Generator().manual_seed(seed)

    def normal(width: int) -> Tensor:
        return torch.randn(samples, width, generator=generator, dtype=torch.float64)

    return [(normal(INPUTS), normal(OUTPUTS)) for _ in range(count)]


def constant_batch(values: Sequence[float], dtype: torch.dtype = torch.float64) -> list[MicroBatch]:
    """x = 0 and y = value: one micro-batch for each loss that is wanted under `mean_distance`."""
    x = torch.zeros(SAMPLES, 1, dtype=dtype)
    return [(x, torch.full((SAMPLES, 1), value, dtype=dtype)) for value in values]


def make_pipeline(impl: Any, layers: Sequence[Layer], stages: int, m: int, **options: Any) -> Any:
    """A pipeline cut uniformly; `zero` and `clip` are short for their config keys."""
    config = {"zero_optimization": {"stage": options.pop("zero", 0)}}
    config["gradient_clipping"] = options.pop("clip", 0.0)
    options.setdefault("loss_fn", mean_squared)
    module = {"partition_method": "uniform", **options.pop("module", {})}
    return impl.make_pipeline(
        layers, num_stages=stages, num_micro_batches=m, config=config, module=module, **options
    )


def share(pipeline: Any, batch: Sequence[MicroBatch], steps: int = 1) -> Iterator[MicroBatch]:
    """This replica's micro-batches of `steps` global batches."""
    part = {"replica": pipeline.replica, "num_replicas": pipeline.num_replicas}
    return iter(split_micro_batches(batch, steps=steps, **part))


def train_and_compare(
    impl: Any,
    layers: Sequence[Layer],
    stages: int,
    m: int,
    *,
    replicas: int = 1,
    steps: int = 2,
    batch: Sequence[MicroBatch] | None = None,
    loss_fn: Callable[[Any, Any], Any] = mean_squared,
    lr: float = 0.1,
    optimizer: str = "SGD",
    zero: int = 0,
    clip: float = 0.0,
    msg: str = "",
) -> Truth:
    """Losses, norms and weights of `steps` steps against one process; returns what that one computed."""
    batch = batch or make_batch(m * replicas * steps)

    def first_loss(outputs: Any, labels: Any) -> Tensor:
        loss = loss_fn(outputs, labels)
        return loss[0] if isinstance(loss, tuple) else loss

    truth = one_process(layers, first_loss, batch, lr=lr, optimizer=optimizer, clip=clip or None, steps=steps)
    pipeline = make_pipeline(
        impl, layers, stages, m, loss_fn=loss_fn, lr=lr, optimizer=optimizer, zero=zero, clip=clip
    )
    data = share(pipeline, batch, steps)
    for step in range(steps):
        loss = pipeline.train_batch(data)
        loss = loss[0] if isinstance(loss, tuple) else loss
        assert_close(loss, truth.losses[step], LAW, f"{msg}: loss of step {step}")
        assert_close(pipeline.norm(), truth.norms[step], LAW, f"{msg}: norm of step {step}")
    check_weights(pipeline.weights(), truth, msg)
    return truth


def check_weights(weights: dict[str, Tensor], truth: Truth, msg: str = "") -> None:
    """Every weight is that of one process; control: something has moved."""
    assert sorted(weights) == sorted(truth.weights), msg
    assert any(differs(weight, truth.before[name]) for name, weight in truth.weights.items()), msg
    for name, weight in truth.weights.items():
        assert_close(weights[name], weight, LAW, f"{msg}: {name}")
