"""§9.10.2 The ten instructions a pipeline schedule is written in.

An instruction is data: it says what one stage does next and to which buffer. A schedule yields them, the
engine looks up the method that belongs to their type, the simulator plays them on a virtual clock.
Nobody subclasses behaviour into them.

    on a buffer      LoadMicroBatch  ForwardPass  BackwardPass
                     SendActivation  RecvActivation  SendGrad  RecvGrad
    once per batch   ReduceTiedGrads  ReduceGrads  OptimizerStep
"""

from typing import Any


class PipeInstruction:
    """One thing a stage does; each keyword is an attribute and an entry of `kwargs`.

    Two instructions are equal when their type and their keywords are.

    >>> OptimizerStep()
    OptimizerStep()
    >>> PipeInstruction(color="red").color
    'red'

    Source: §9.10.2; DeepSpeed `runtime/pipe/schedule.py::PipeInstruction` @ edaa7221.
    """

    def __init__(self, **kwargs: Any) -> None:
        vars(self).update(kwargs)

    @property
    def name(self) -> str:
        """The class name, the word that traces and tables print."""
        return type(self).__name__

    @property
    def kwargs(self) -> dict[str, Any]:
        """The keywords the engine calls its method with, as a fresh dict."""
        return dict(vars(self))

    def __repr__(self) -> str:
        return f"{self.name}({', '.join(f'{key}={value!r}' for key, value in vars(self).items())})"

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and vars(self) == vars(other)

    def __hash__(self) -> int:
        return hash((type(self), frozenset(vars(self).items())))


class BufferOpInstruction(PipeInstruction):
    """An instruction on one pipeline buffer, for one micro-batch where the schedule says which.

    The buffer number repeats (id modulo buffers), so the micro-batch number travels beside it: traces,
    pictures and the random numbers of a layer need it. A schedule that leaves it out keeps it out of
    `kwargs` as well.

    >>> ForwardPass(0)
    ForwardPass(buffer_id=0)
    >>> ForwardPass(buffer_id=1, micro_batch_id=5).kwargs
    {'buffer_id': 1, 'micro_batch_id': 5}
    >>> ForwardPass(0).micro_batch_id is None
    True

    Source: §9.10.2; DeepSpeed `runtime/pipe/schedule.py::BufferOpInstruction` @ edaa7221.
    Differs: DeepSpeed's instructions carry the buffer only.
    """

    micro_batch_id: int | None = None  # overridden on the instance when the schedule knows it

    def __init__(self, buffer_id: int, micro_batch_id: int | None = None, **kwargs: Any) -> None:
        self.buffer_id = buffer_id
        if micro_batch_id is not None:
            self.micro_batch_id = micro_batch_id
        if kwargs:
            vars(self).update(kwargs)


class OptimizerStep(PipeInstruction):
    """Unscale, agree on overflow, clip, step, zero the gradients: roughly `optimizer.step()`."""


class ReduceGrads(PipeInstruction):
    """Average this stage's gradients over its data-parallel ranks, once per batch."""


class ReduceTiedGrads(PipeInstruction):
    """Sum the gradients of tied modules over the stages that use them, once per batch."""


class LoadMicroBatch(BufferOpInstruction):
    """Take one micro-batch: `buffers["inputs"][id] = next(data)`; the last stage keeps its labels."""


class ForwardPass(BufferOpInstruction):
    """Run the local layers: `buffers["outputs"][id] = layers(buffers["inputs"][id])`."""


class BackwardPass(BufferOpInstruction):
    """Differentiate the local layers: `outputs.backward(gradient)`; the last stage starts from its loss."""


class SendActivation(BufferOpInstruction):
    """Give the outputs of a buffer to the next stage, which meets it with RecvActivation."""


class RecvActivation(BufferOpInstruction):
    """Take the inputs of a buffer from the previous stage, which meets it with SendActivation."""


class SendGrad(BufferOpInstruction):
    """Give the gradient of a buffer's inputs to the previous stage, which meets it with RecvGrad."""


class RecvGrad(BufferOpInstruction):
    """Take the gradient of a buffer's outputs from the next stage, which meets it with SendGrad."""
