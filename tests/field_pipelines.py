"""What the field reports of §9.9 share: small float64 pipelines and their comparison with one process.

No bias is zero, no two samples are alike, all sizes differ: what is special hides faults.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from oracles import MicroBatch, Tied, Truth, one_process, split_micro_batches
from tolerance import LAW, assert_close, differs
from torch import Tensor, nn

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


class Gate(nn.Module):
    """A layer of its own, so that stages hold more than the tie."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH).double()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(x)


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
