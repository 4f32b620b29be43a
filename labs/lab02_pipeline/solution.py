"""Lab 2, one way to do it. Compare it with yours after yours passes.

Legend: S stages, m micro-batches, s a stage, i a micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from ds_lite.pipe.instructions import (
    BackwardPass,
    BufferOpInstruction,
    ForwardPass,
    LoadMicroBatch,
    RecvActivation,
    RecvGrad,
    SendActivation,
    SendGrad,
)
from ds_lite.pipe.schedule import TrainSchedule

PREDICTIONS: dict[str, Any] = {
    # 4 stages, 8 micro-batches, a forward and a backward take one tick each
    "ticks": 22,  # until every stage is done
    "bubble_of_total": 3 / 11,  # idle time / all time, the chapter's ratio
    "bubble_of_ideal": 3 / 8,  # idle time / the time without any bubble, the ratio other texts quote
    "peak_buffers": [4, 3, 2, 1],  # micro-batches in flight on stages 0, 1, 2, 3, as a list
    "peak_buffers_gpipe": [8, 8, 8, 8],  # the same when all forwards come first, then all backwards
    # training: 2 stages, 4 micro-batches on each replica
    "activations_sent": 4,  # messages in one step from a rank of stage 0 to stage 1
    "gradients_sent": 4,  # messages in one step from a rank of stage 1 to stage 0
}

Command = tuple[type[BufferOpInstruction], int]  # what to do, for which micro-batch


def stream(num_micro_batches: int, num_stages: int, stage_id: int) -> list[list[Command]]:
    """What one stage does under 1F1B: one list a tick, 2(m + S - 1) ticks, an empty list where it is idle.

    forward  of micro-batch i on stage s runs at tick   s + 2i
    backward of micro-batch i on stage s runs at tick   2S - 1 - s + 2i

    A stage receives in the tick in which it needs something, and sends in the tick after the one that made
    it. In a tick that can hold a forward the order is SendGrad, RecvActivation, LoadMicroBatch, ForwardPass;
    in one that can hold a backward it is RecvGrad, SendActivation, BackwardPass. The first stage loads the
    inputs, the last one the labels. The first stage has nobody before it, the last one nobody behind.
    """
    forwards = {stage_id + 2 * i: i for i in range(num_micro_batches)}  # tick -> micro-batch
    backwards = {2 * num_stages - 1 - stage_id + 2 * i: i for i in range(num_micro_batches)}
    is_first, is_last = stage_id == 0, stage_id == num_stages - 1
    ticks: list[list[Command]] = []
    for tick in range(2 * (num_micro_batches + num_stages - 1)):
        step: list[Command] = []
        if tick - 1 in backwards and not is_first:
            step.append((SendGrad, backwards[tick - 1]))
        if tick in forwards:
            if not is_first:
                step.append((RecvActivation, forwards[tick]))
            if is_first or is_last:
                step.append((LoadMicroBatch, forwards[tick]))
            step.append((ForwardPass, forwards[tick]))
        if tick in backwards and not is_last:
            step.append((RecvGrad, backwards[tick]))
        if tick - 1 in forwards and not is_last:
            step.append((SendActivation, forwards[tick - 1]))
        if tick in backwards:
            step.append((BackwardPass, backwards[tick]))
        ticks.append(step)
    return ticks


def run_stage(
    commands: list[list[Command]],
    num_micro_batches: int,
    *,
    is_last: bool,
    forward: Callable[[int, Tensor | None], Tensor],
    backward: Callable[[int, Tensor, Tensor | None], tuple[Tensor | None, dict[str, Tensor]]],
    send_activation: Callable[[int, Tensor], None],
    recv_activation: Callable[[int], Tensor],
    send_gradient: Callable[[int, Tensor], None],
    recv_gradient: Callable[[int], Tensor],
) -> dict[str, Tensor]:
    """Carry out a stage's stream; return its gradients, summed over the micro-batches.

    forward(i, x) -> y             this stage's layers. The first stage passes x=None: it has its own inputs.
                                   On the last stage y is the mean loss of micro-batch i.
    backward(i, y, gradient)       gradient is the one of y; None on the last stage, which starts from a loss.
        -> (gradient of x, {name: gradient})   of this micro-batch alone, nothing is added up for you

    `LoadMicroBatch` needs no work here. The result must be the gradient of the mean loss over all m.
    """
    inputs: dict[int, Tensor] = {}  # everything in flight, by micro-batch
    outputs: dict[int, Tensor] = {}
    arrived: dict[int, Tensor] = {}
    leaving: dict[int, Tensor | None] = {}
    sums: dict[str, Tensor] = {}
    for kind, i in (command for step in commands for command in step):
        if kind is RecvActivation:
            inputs[i] = recv_activation(i)
        elif kind is ForwardPass:
            y = forward(i, inputs.pop(i, None))
            outputs[i] = y / num_micro_batches if is_last else y  # the mean over m, divided once
        elif kind is SendActivation:
            send_activation(i, outputs[i])
        elif kind is RecvGrad:
            arrived[i] = recv_gradient(i)
        elif kind is BackwardPass:
            leaving[i], gradients = backward(i, outputs.pop(i), arrived.pop(i, None))
            for name, gradient in gradients.items():
                sums[name] = sums[name] + gradient if name in sums else gradient
        elif kind is SendGrad:
            send_gradient(i, leaving.pop(i))
    return sums


# The words in which `pytest --impl` asks for this stream.


def train_steps(num_micro_batches: int, num_stages: int, stage_id: int) -> list[list[str]]:
    """The stream in the words of tests/adapters; buffers are used in turn."""
    buffers = TrainSchedule(num_micro_batches, num_stages, stage_id).num_pipe_buffers()
    ticks = stream(num_micro_batches, num_stages, stage_id)
    words = [[f"{kind.__name__}({i % buffers})" for kind, i in commands] for commands in ticks]
    words[-1] += ["ReduceTiedGrads", "ReduceGrads", "OptimizerStep"]
    return words
