"""Lab 2, part B: a small problem with a known answer, and the callables that run_stage() works with.

The toy GPT in float64. The callables watch how they are used: what mixes up micro-batches becomes a hint.

Legend: S stages, m micro-batches, i a micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from _lab import Hint
from stream_check import StreamFunction
from torch import Tensor

from ds_lite import toy
from ds_lite.pipe.partition import partition_uniform

Gradients = dict[str, Tensor]
SHAPE = toy.Shape(width=12, num_heads=2, num_blocks=3, context=10)
SIZE = 2


class Link(Protocol):
    """How a stage reaches its neighbours: `what` is "activation" or "gradient"."""

    def made(self, what: str, stage_id: int, i: int) -> None: ...

    def send(self, what: str, i: int, tensor: Tensor, to: int) -> None: ...

    def recv(self, what: str, i: int, source: int) -> Tensor: ...


@dataclass
class Problem:
    """A model, its micro-batches and the truth of one process."""

    model: toy.GPT
    micro_batches: list[toy.MicroBatch]
    losses: list[float]
    parts: list[Gradients]  # of each micro-batch alone
    truth: Gradients

    def stage(self, stage_id: int, num_stages: int) -> tuple[list[Callable[[Tensor], Tensor]], Gradients]:
        """The layers of one stage, and the parameters it uses by name."""
        model = self.model
        layers: list[tuple[str, Any]] = [("tied_modules.embed", model.embedding), ("1", model.positions)]
        layers += [(str(index), block) for index, block in enumerate(model.blocks, start=2)]
        layers += [(str(len(layers)), model.norm), ("tied_modules.embed", _Head(model.embedding))]
        bounds = partition_uniform(len(layers), num_stages)
        mine = layers[bounds[stage_id] : bounds[stage_id + 1]]
        named = {f"{name}.{inner}": p for name, layer in mine for inner, p in layer.named_parameters()}
        return [layer for _, layer in mine], named


class _Head(torch.nn.Module):
    """The embedding read the other way round, as a layer."""

    def __init__(self, embedding: toy.Embedding) -> None:
        super().__init__()
        self.weight = embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.T


def make_problem(num_micro_batches: int, device: torch.device) -> Problem:
    """m distinct micro-batches, and what one process finds for them, in float64."""
    model = toy.GPT(SHAPE, seed=2).to(device, torch.float64)
    data = torch.randint(0, 256, (997,), generator=torch.Generator().manual_seed(2)).byte()
    micro_batches = [
        tuple(
            part.to(device) for part in toy.micro_batch(data, seed=2, step=0, index=i, size=SIZE, context=10)
        )
        for i in range(num_micro_batches)
    ]
    named = model.parameters_by_layer()
    losses, parts = [], []
    for inputs, labels in micro_batches:
        loss = toy.loss_fn(model(inputs), labels)
        losses.append(loss.item())
        parts.append(dict(zip(named, torch.autograd.grad(loss, list(named.values())))))
    truth = {name: torch.stack([part[name] for part in parts]).mean(0) for name in named}
    return Problem(model, micro_batches, losses, parts, truth)


class StageWork:
    """The callables handed to run_stage() on one stage; they watch how they are used."""

    def __init__(self, problem: Problem, stage_id: int, num_stages: int, link: Link) -> None:
        self.problem, self.stage_id, self.num_stages, self.link = problem, stage_id, num_stages, link
        self.is_first, self.is_last = stage_id == 0, stage_id == num_stages - 1
        self.layers, self.named = problem.stage(stage_id, num_stages)
        self.received: dict[int, Tensor] = {}
        self.outputs: dict[int, Tensor] = {}
        self.arrived: dict[int, Tensor] = {}
        self.peak_live = 0

    def run(self, run_stage: Callable[..., Gradients], stream: StreamFunction) -> Gradients:
        m = len(self.problem.micro_batches)
        sums = run_stage(
            stream(m, self.num_stages, self.stage_id),
            m,
            is_last=self.is_last,
            forward=self.forward,
            backward=self.backward,
            send_activation=lambda i, y: self._send("activation", i, y, self.stage_id + 1),
            recv_activation=self.recv_activation,
            send_gradient=lambda i, gradient: self._send("gradient", i, gradient, self.stage_id - 1),
            recv_gradient=self.recv_gradient,
        )
        if self.outputs:
            raise Hint(f"stage {self.stage_id} never ran backward for micro-batches {sorted(self.outputs)}")
        if not isinstance(sums, dict):
            raise Hint(
                f"run_stage() returned {type(sums).__name__}; return the summed gradients, {{name: tensor}}"
            )
        return sums

    def forward(self, i: int, x: Tensor | None) -> Tensor:
        inputs, labels = self.problem.micro_batches[i]
        if self.is_first:
            y = inputs
        else:
            if x is None or x is not self.received.get(i):
                raise Hint(
                    f"stage {self.stage_id}: forward({i}, x) got an x that recv_activation({i}) did not "
                    "return; keep one x per micro-batch until its forward"
                )
            y = x
        for layer in self.layers:
            y = layer(y)
        if self.is_last:
            y = toy.loss_fn(y, labels)
        self.outputs[i] = y
        self.link.made("activation", self.stage_id, i)
        self.peak_live = max(self.peak_live, len(self.outputs))
        return y

    def backward(self, i: int, y: Tensor, gradient: Tensor | None) -> tuple[Tensor | None, Gradients]:
        if i not in self.outputs:
            raise Hint(
                f"stage {self.stage_id}: backward({i}, ...) without a forward of micro-batch {i} before it"
            )
        self._check_pair(i, y, gradient)
        del self.outputs[i]
        self.arrived.pop(i, None)
        inner = [] if self.is_first else [self.received.pop(i)]
        found = torch.autograd.grad(y, [*inner, *self.named.values()], gradient)
        gradients = dict(zip(self.named, found[len(inner) :]))
        self.link.made("gradient", self.stage_id, i)
        return (found[0] if inner else None), gradients

    def _check_pair(self, i: int, y: Tensor, gradient: Tensor | None) -> None:
        """One micro-batch at a time: its own output, its own gradient."""
        if self.is_last:
            losses = self.problem.losses
            others = [loss / d for j, loss in enumerate(losses) if j != i for d in (1, len(losses))]
            if any(abs(y.item() - other) < 1e-12 for other in others):
                raise Hint(f"backward({i}, y) on the last stage got the loss of another micro-batch; {_KEEP}")
            return
        if gradient is None:
            raise Hint(
                f"backward({i}, y, None) on stage {self.stage_id}: only the last stage starts from a loss; "
                f"the others continue the gradient that recv_gradient({i}) returned"
            )
        if gradient is not self.arrived.get(i):
            raise Hint(
                f"stage {self.stage_id}: backward({i}, ...) got the gradient of another micro-batch; {_KEEP}"
            )
        if any(y is output for j, output in self.outputs.items() if j != i):
            raise Hint(
                f"stage {self.stage_id}: backward({i}, y) got the output of another micro-batch; {_KEEP}"
            )

    def recv_activation(self, i: int) -> Tensor:
        self.received[i] = self.link.recv("activation", i, self.stage_id - 1).requires_grad_()
        return self.received[i]

    def recv_gradient(self, i: int) -> Tensor:
        self.arrived[i] = self.link.recv("gradient", i, self.stage_id + 1)
        return self.arrived[i]

    def _send(self, what: str, i: int, tensor: Tensor, to: int) -> None:
        if not isinstance(tensor, Tensor):
            raise Hint(
                f"stage {self.stage_id} sends {tensor!r} as {what} of micro-batch {i}; it must be a tensor"
            )
        made = self.outputs.get(i) if what == "activation" else None
        if made is not None and not torch.equal(made.detach(), tensor.detach()):
            raise Hint(
                f"stage {self.stage_id} sends something else than forward({i}, x) returned; only the loss is "
                f"divided by m, once, on the last stage alone"
            )
        self.link.send(what, i, tensor.detach().contiguous(), to)


_KEEP = "several micro-batches are in flight, so keep one entry per micro-batch, not one variable"
