"""Lab 2, your part: predict, then write `stream` and `run_stage`. README.md has the steps.

Legend: S stages, m micro-batches, s a stage, i a micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from ds_lite.pipe.instructions import (  # noqa: F401  (you will need all of them)
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

# Step 1. Write down what you expect before you look. A wrong guess costs nothing.
PREDICTIONS: dict[str, Any] = {
    # 4 stages, 8 micro-batches, a forward and a backward take one tick each
    "ticks": None,  # until every stage is done
    "bubble_of_total": None,  # idle time / all time, the chapter's ratio
    "bubble_of_ideal": None,  # idle time / the time without any bubble, the ratio other texts quote
    "peak_buffers": None,  # micro-batches in flight on stages 0, 1, 2, 3, as a list
    "peak_buffers_gpipe": None,  # the same when all forwards come first, then all backwards
    # training: 2 stages, 4 micro-batches on each replica
    "activations_sent": None,  # messages in one step from a rank of stage 0 to stage 1
    "gradients_sent": None,  # messages in one step from a rank of stage 1 to stage 0
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

    >>> stream(1, 2, 1)  # doctest: +SKIP
    [[], [(RecvActivation, 0), (LoadMicroBatch, 0), (ForwardPass, 0)], [(BackwardPass, 0)], [(SendGrad, 0)]]
    """
    raise NotImplementedError(
        "Lab 2, step 5a: write stream() in student.py, about 12 lines: note for each tick which "
        "micro-batch goes forward and which backward, by the two formulas; then go through the ticks"
    )


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
    raise NotImplementedError(
        "Lab 2, step 5b: write run_stage() in student.py, about 16 lines: one loop over the commands; "
        "keep what is in flight in dictionaries by micro-batch"
    )


# Nothing to write from here on: the words in which `pytest --impl` asks for your stream.


def train_steps(num_micro_batches: int, num_stages: int, stage_id: int) -> list[list[str]]:
    """Your stream in the words of tests/adapters; buffers are used in turn."""
    buffers = TrainSchedule(num_micro_batches, num_stages, stage_id).num_pipe_buffers()
    ticks = stream(num_micro_batches, num_stages, stage_id)
    words = [[f"{kind.__name__}({i % buffers})" for kind, i in commands] for commands in ticks]
    words[-1] += ["ReduceTiedGrads", "ReduceGrads", "OptimizerStep"]
    return words
