"""§9.10.1 Schedules: the order in which one stage loads, computes and talks.

A schedule is made for one stage and yields lists of instructions, one list a tick. There is no clock
between stages: ticks line up only because every send stands in the same tick as the receive it meets.
All of 1F1B follows from two lines:

    forward  of micro-batch i on stage s runs at tick   s + 2i
    backward of micro-batch i on stage s runs at tick   2S - 1 - s + 2i

The two have opposite parity: a stage forwards on every second tick and goes backward on the ticks
between. There are 2(m + S - 1) ticks and a stage computes in 2m of them. From the forward of a
micro-batch up to its backward stage s runs S - s forwards, the first included, so at most min(S - s, m)
activations wait there.

Legend: S stages, m micro-batches, s this stage, i a micro-batch.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from functools import cached_property

from ds_lite.pipe.instructions import (
    BackwardPass,
    ForwardPass,
    LoadMicroBatch,
    OptimizerStep,
    PipeInstruction,
    RecvActivation,
    RecvGrad,
    ReduceGrads,
    ReduceTiedGrads,
    SendActivation,
    SendGrad,
)

Step = list[PipeInstruction]


def forward_tick(stage_id: int, micro_batch_id: int) -> int:
    """Tick of a forward pass under 1F1B: stage s starts s ticks late, then takes every second tick.

    >>> [forward_tick(2, i) for i in range(4)]
    [2, 4, 6, 8]

    Source: §9.10.1.
    """
    return stage_id + 2 * micro_batch_id


def backward_tick(num_stages: int, stage_id: int, micro_batch_id: int) -> int:
    """Tick of a backward pass under 1F1B: the last stage turns round at once, the others hear of it in turn.

    >>> [backward_tick(4, stage, 0) for stage in range(4)]
    [7, 6, 5, 4]

    Source: §9.10.1.
    """
    return 2 * num_stages - 1 - stage_id + 2 * micro_batch_id


class PipeSchedule(ABC):
    """What one stage does with `micro_batches` micro-batches; iterate over it to get its ticks.

    Raises: ValueError unless micro_batches >= 1, stages >= 1 and 0 <= stage_id < stages.

    >>> for step in DataParallelSchedule(micro_batches=1, stages=1, stage_id=0):
    ...     print([instruction.name for instruction in step])
    ['LoadMicroBatch', 'ForwardPass', 'BackwardPass', 'ReduceGrads', 'OptimizerStep']

    Source: §9.10.1; DeepSpeed `runtime/pipe/schedule.py::PipeSchedule` @ edaa7221.
    """

    def __init__(self, micro_batches: int, stages: int, stage_id: int) -> None:
        for name, value in (("micro_batches", micro_batches), ("stages", stages)):
            if not isinstance(value, int) or value < 1:
                raise ValueError(
                    f"{name}={value!r} is not a positive integer; a pipeline needs at least one, "
                    f"choose {name} >= 1 (§9.10)"
                )
        if not isinstance(stage_id, int) or not 0 <= stage_id < stages:
            raise ValueError(
                f"stage_id={stage_id!r} is not one of the {stages} stages; stages count from 0, "
                f"choose 0 to {stages - 1} (§9.10)"
            )
        self.micro_batches = micro_batches
        self.stages = stages
        self.stage_id = stage_id
        self.prev_stage = stage_id - 1
        self.next_stage = stage_id + 1

    @abstractmethod
    def steps(self) -> Iterator[Step]:
        """Yield the instructions of each tick, an empty list for a tick without work."""

    @abstractmethod
    def num_pipe_buffers(self) -> int:
        """How many buffers the engine has to set aside for this stage."""

    @property
    def stage(self) -> int:
        """The stage this schedule is for."""
        return self.stage_id

    @property
    def num_stages(self) -> int:
        """Stages in the pipeline."""
        return self.stages

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches in one batch."""
        return self.micro_batches

    @cached_property  # asked several times a tick
    def is_first_stage(self) -> bool:
        """True on the stage that reads the inputs."""
        return self.stage_id == 0

    @cached_property
    def is_last_stage(self) -> bool:
        """True on the stage that reads the labels and computes the loss."""
        return self.stage_id == self.stages - 1

    def __iter__(self) -> Iterator[Step]:
        return iter(self.steps())

    @cached_property
    def _ids(self) -> range:
        return range(self.micro_batches)

    @cached_property
    def _num_buffers(self) -> int:
        return self.num_pipe_buffers()

    def _buffer(self, micro_batch_id: int) -> int:
        return micro_batch_id % self._num_buffers


class TrainSchedule(PipeSchedule):
    """1F1B: as soon as a backward can run it does, so few activations wait.

    >>> TrainSchedule(micro_batches=8, stages=4, stage_id=0).num_pipe_buffers()
    4
    >>> [len(step) for step in TrainSchedule(micro_batches=1, stages=2, stage_id=1)]
    [0, 3, 1, 4]

    Source: §9.10.1; DeepSpeed `runtime/pipe/schedule.py::TrainSchedule` @ edaa7221.
    Differs: the two tick formulas replace the four parity cases; the streams are the same.
    """

    def steps(self) -> Iterator[Step]:
        """Yield 2(m + S - 1) ticks; the last one ends with the reductions and the optimizer."""
        first_forward = forward_tick(self.stage_id, 0)
        first_backward = backward_tick(self.stages, self.stage_id, 0)
        num_ticks = 2 * (self.micro_batches + self.stages - 1)
        for tick in range(num_ticks):
            # the formulas turned round: which micro-batch runs now, and which ran one tick ago
            if (tick - first_forward) % 2 == 0:
                step = self._forward_slot((tick - first_forward) // 2, (tick - 1 - first_backward) // 2)
            else:
                step = self._backward_slot((tick - first_backward) // 2, (tick - 1 - first_forward) // 2)
            if tick == num_ticks - 1:
                step += _closing_steps()
            yield step

    def num_pipe_buffers(self) -> int:
        """Activations that wait at once, min(S - s, m); never below 2, as a send lags behind a receive."""
        return max(2, min(self.stages - self.stage_id, self.micro_batches))

    def _forward_slot(self, current: int, previous: int) -> Step:
        step: Step = []
        if previous in self._ids and not self.is_first_stage:
            step.append(SendGrad(self._buffer(previous), previous))
        if current in self._ids:
            buffer_id = self._buffer(current)
            if not self.is_first_stage:
                step.append(RecvActivation(buffer_id, current))
            if self.is_first_stage or self.is_last_stage:
                step.append(LoadMicroBatch(buffer_id, current))
            step.append(ForwardPass(buffer_id, current))
        return step

    def _backward_slot(self, current: int, previous: int) -> Step:
        # the neighbour's forward slot sends its gradient before it receives, so here the receive comes first
        step: Step = []
        if current in self._ids and not self.is_last_stage:
            step.append(RecvGrad(self._buffer(current), current))
        if previous in self._ids and not self.is_last_stage:
            step.append(SendActivation(self._buffer(previous), previous))
        if current in self._ids:
            step.append(BackwardPass(self._buffer(current), current))
        return step


class InferenceSchedule(PipeSchedule):
    """A wave of forwards: micro-batch i is on stage s at tick s + i.

    >>> [[i.name for i in step] for step in InferenceSchedule(micro_batches=1, stages=2, stage_id=0)]
    [['LoadMicroBatch', 'ForwardPass'], ['SendActivation']]

    Source: §9.10.1; DeepSpeed `runtime/pipe/schedule.py::InferenceSchedule` @ edaa7221.
    """

    def steps(self) -> Iterator[Step]:
        """Yield m + S - 1 ticks."""
        for tick in range(self.micro_batches + self.stages - 1):
            yield _forward_wave(self, tick)

    def num_pipe_buffers(self) -> int:
        """Two: one is computed into while the other is sent."""
        return 2


class GPipeSchedule(PipeSchedule):
    """All forwards, then all backwards: the bubble of 1F1B, but every activation of the batch waits.

    Backwards keep the order of the forwards, so a parameter adds its gradients in the order 1F1B does
    and the two schedules can be compared bit by bit.

    >>> GPipeSchedule(micro_batches=8, stages=4, stage_id=3).num_pipe_buffers()
    8
    >>> len(list(GPipeSchedule(micro_batches=8, stages=4, stage_id=0)))
    22

    Source: §9.2. Goes beyond the chapter's three schedules: it is what 1F1B is measured against.
    """

    def steps(self) -> Iterator[Step]:
        """Yield m + S - 1 ticks of forwards and as many of backwards."""
        half = self.micro_batches + self.stages - 1
        for tick in range(half):
            yield _forward_wave(self, tick)
        for tick in range(half):
            step = self._backward_wave(tick)
            if tick == half - 1:
                step += _closing_steps()
            yield step

    def num_pipe_buffers(self) -> int:
        """One per micro-batch."""
        return self.micro_batches

    def _backward_wave(self, tick: int) -> Step:
        current = tick - (self.stages - 1 - self.stage_id)
        sent: Step = []
        received: Step = []
        if (current - 1) in self._ids and not self.is_first_stage:
            sent.append(SendGrad(self._buffer(current - 1), current - 1))
        if current in self._ids and not self.is_last_stage:
            received.append(RecvGrad(self._buffer(current), current))
        step = _in_meeting_order(self.stage_id, sent, received)
        if current in self._ids:
            step.append(BackwardPass(self._buffer(current), current))
        return step


class DataParallelSchedule(PipeSchedule):
    """One stage holds the whole model: load, forward, backward, m times over one buffer.

    Source: §9.10.1; DeepSpeed `runtime/pipe/schedule.py::DataParallelSchedule` @ edaa7221.
    """

    def steps(self) -> Iterator[Step]:
        """Yield m ticks; nothing is tied across stages, so the last one has no ReduceTiedGrads."""
        for i in range(self.micro_batches):
            step: Step = [LoadMicroBatch(0, i), ForwardPass(0, i), BackwardPass(0, i)]
            if i == self.micro_batches - 1:
                step += [ReduceGrads(), OptimizerStep()]
            yield step

    def num_pipe_buffers(self) -> int:
        """One: each backward follows its forward at once."""
        return 1


def _closing_steps() -> Step:
    return [ReduceTiedGrads(), ReduceGrads(), OptimizerStep()]


def _forward_wave(schedule: PipeSchedule, tick: int) -> Step:
    current = tick - schedule.stage_id
    step: Step = []
    sent: Step = []
    received: Step = []
    if current in schedule._ids and (schedule.is_first_stage or schedule.is_last_stage):
        step.append(LoadMicroBatch(schedule._buffer(current), current))
    if (current - 1) in schedule._ids and not schedule.is_last_stage:
        sent.append(SendActivation(schedule._buffer(current - 1), current - 1))
    if current in schedule._ids and not schedule.is_first_stage:
        received.append(RecvActivation(schedule._buffer(current), current))
    step += _in_meeting_order(schedule.stage_id, sent, received)
    if current in schedule._ids:
        step.append(ForwardPass(schedule._buffer(current), current))
    return step


def _in_meeting_order(stage_id: int, sent: Step, received: Step) -> Step:
    # even stages send first, odd stages receive first: neighbours meet in pairs, not one after another
    return sent + received if stage_id % 2 == 0 else received + sent
