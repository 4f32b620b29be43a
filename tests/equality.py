"""The comparison at the centre of the suite: a pipeline against one process, on every rank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from oracles import MicroBatch, Truth, split_micro_batches
from tolerance import LAW, assert_close, differs


def check_equality(pipeline: Any, batch: Sequence[MicroBatch], first: Truth, last: Truth, msg: str) -> None:
    """Gradients of the first batch, then loss and norm of each step, then the weights.

    `first` is what one process computed in the first step, `last` in all of them; `batch` holds the
    micro-batches of all steps. Controls: every gradient is unlike zero, every weight moved.
    """
    steps = len(last.losses)

    def mine() -> Iterator[MicroBatch]:
        part = {"replica": pipeline.replica, "num_replicas": pipeline.num_replicas, "steps": steps}
        return iter(split_micro_batches(batch, **part))

    loss = pipeline.compute_gradients(mine())
    assert_close(loss, first.loss, LAW, f"{msg}: loss of the first batch")
    gradients = pipeline.gradients()
    assert sorted(gradients) == sorted(first.grads), f"{msg}: other parameters than one process has"
    for name, gradient in first.grads.items():
        assert differs(gradient, torch.zeros_like(gradient)), f"{name} has no gradient to compare"
        assert_close(gradients[name], gradient, LAW, f"{msg}: gradient of {name}")
    pipeline.clear_gradients()

    before = pipeline.weights()
    data = mine()
    for step in range(steps):
        loss = pipeline.train_batch(data)
        assert_close(loss, last.losses[step], LAW, f"{msg}: loss of step {step}")
        assert_close(pipeline.norm(), last.norms[step], LAW, f"{msg}: norm of step {step}")
    after = pipeline.weights()
    for name, weight in last.weights.items():
        assert_close(before[name], last.before[name], LAW, f"{msg}: initial {name}")
        assert differs(after[name], before[name]), f"{msg}: {name} did not move"
        assert_close(after[name], weight, LAW, f"{msg}: {name} after {steps} steps")
