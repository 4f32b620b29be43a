"""The truth: one process, plain torch, nothing of the library under test.

All dp*m micro-batches run one after another, their losses are averaged, autograd does the rest. Every
parallel path must give the same losses, gradients, norm and weights.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

MicroBatch = tuple[Any, Any]  # (inputs, labels); inputs is one tensor or a tuple of tensors
Layer = Callable[[Any], Any]  # a module or a function of one argument
Names = Callable[[int, str], str]
OptimizerFactory = Callable[..., torch.optim.Optimizer]  # (parameters, lr=...)


@dataclass(frozen=True)
class Tied:
    """A layer that shares `module` with every other layer of the same key.

    `forward(module, x)` says how this place uses it; None calls the module.
    """

    key: str
    module: nn.Module
    forward: Callable[[nn.Module, Any], Any] | None = None

    def __call__(self, x: Any) -> Any:
        return self.module(x) if self.forward is None else self.forward(self.module, x)


@dataclass
class Truth:
    """What one process computed. Gradients and norm are before clipping."""

    losses: list[Tensor] = field(default_factory=list)  # mean loss, one a step
    norms: list[Tensor] = field(default_factory=list)  # one a step
    outputs: list[Any] = field(default_factory=list)  # of the last layer, one a micro-batch of the last step
    grads: dict[str, Tensor | None] = field(default_factory=dict)  # of the last step; None: not in the graph
    before: dict[str, Tensor] = field(default_factory=dict)  # the weights at the start
    weights: dict[str, Tensor] = field(default_factory=dict)  # the weights after the last step

    @property
    def loss(self) -> Tensor:
        return self.losses[-1]

    @property
    def norm(self) -> Tensor:
        return self.norms[-1]


def one_process(
    layers: Sequence[Layer],
    loss_fn: Callable[[Any, Any], Tensor] | None,
    micro_batches: Sequence[MicroBatch],
    *,
    lr: float,
    optimizer: str | OptimizerFactory = "SGD",
    clip: float | None = None,
    steps: int = 1,
    name_of: Names = "{}.{}".format,
) -> Truth:
    """Train `steps` steps on equal runs of the micro-batches; the caller's layers stay as they are.

    Names: `name_of(layer index, name)`, by default `3.weight`; a tied module counts once, under
    `tied_modules.{key}.{name}`. `optimizer` is a class name of torch.optim or a factory. Without
    `loss_fn` the last layer's output is the loss.
    """
    layers = copy.deepcopy(list(layers))  # in one go, so that shared modules stay shared
    named = _parameters(layers, name_of)
    trained = {name: parameter for name, parameter in named.items() if parameter.requires_grad}
    factory = getattr(torch.optim, optimizer) if isinstance(optimizer, str) else optimizer
    stepper = factory(list(trained.values()), lr=lr)
    truth = Truth(before={name: parameter.detach().clone() for name, parameter in named.items()})
    for batch in _runs(micro_batches, steps):
        truth.outputs = []
        losses = []
        for inputs, labels in batch:
            x = inputs
            for layer in layers:
                x = layer(x)
            truth.outputs.append(x)
            losses.append(x if loss_fn is None else loss_fn(x, labels))
        loss = torch.stack(losses).mean()
        stepper.zero_grad()
        loss.backward()
        present = [p.grad for p in trained.values() if p.grad is not None]
        truth.losses.append(loss.detach())
        truth.norms.append(torch.stack([grad.square().sum() for grad in present]).sum().sqrt())
        truth.grads = {name: None if p.grad is None else p.grad.clone() for name, p in trained.items()}
        if clip is not None:
            nn.utils.clip_grad_norm_(list(trained.values()), clip)
        stepper.step()
    truth.outputs = [_detached(output) for output in truth.outputs]
    truth.weights = {name: parameter.detach().clone() for name, parameter in named.items()}
    return truth


def split_micro_batches(
    micro_batches: Sequence[MicroBatch], *, replica: int, num_replicas: int, steps: int = 1
) -> list[MicroBatch]:
    """The micro-batches of one data-parallel replica: r*m to r*m+m-1 of each step, in order.

    >>> split_micro_batches([(i, i) for i in range(6)], replica=1, num_replicas=2)
    [(3, 3), (4, 4), (5, 5)]
    """
    mine: list[MicroBatch] = []
    for batch in _runs(micro_batches, steps):
        mine += _runs(batch, num_replicas)[replica]
    return mine


def _runs(items: Sequence[MicroBatch], count: int) -> list[Sequence[MicroBatch]]:
    size, rest = divmod(len(items), count)
    assert size and not rest, f"{len(items)} micro-batches cannot be dealt into {count} equal runs"
    return [items[start : start + size] for start in range(0, len(items), size)]


def _parameters(layers: Sequence[Layer], name_of: Names) -> dict[str, nn.Parameter]:
    named: dict[str, nn.Parameter] = {}
    tied: dict[str, nn.Module] = {}
    for index, layer in enumerate(layers):
        if isinstance(layer, Tied):
            first = tied.setdefault(layer.key, layer.module)
            assert first is layer.module, f"layer {index}: key {layer.key!r} is tied to two different modules"
            for name, parameter in layer.module.named_parameters():
                named[f"tied_modules.{layer.key}.{name}"] = parameter
        elif isinstance(layer, nn.Module):
            for name, parameter in layer.named_parameters():
                named[name_of(index, name)] = parameter
    assert len({id(p) for p in named.values()}) == len(named), (
        "a parameter has two names: say Tied(key, module)"
    )
    return named


def _detached(x: Any) -> Any:
    return tuple(_detached(part) for part in x) if isinstance(x, tuple) else x.detach()
