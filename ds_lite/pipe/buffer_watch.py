"""§9.10 What one stage's buffers hold while a schedule is played, and who breaks the rules.

A micro-batch moves into a buffer when it is loaded or received and leaves it with the last instruction
that needs it: SendGrad on a stage that sends gradients, else BackwardPass; in a forward-only stream
SendActivation, else ForwardPass. Until then nobody else may write there. Its activation is *live* from
the forward to the backward.
"""

from collections import Counter
from collections.abc import Sequence

from ds_lite.pipe.instructions import (
    BackwardPass,
    ForwardPass,
    LoadMicroBatch,
    PipeInstruction,
    RecvActivation,
    RecvGrad,
    SendActivation,
    SendGrad,
)

Role = type[PipeInstruction]

_BUFFER_ROLES: tuple[Role, ...] = (
    LoadMicroBatch,
    ForwardPass,
    BackwardPass,
    SendActivation,
    RecvActivation,
    SendGrad,
    RecvGrad,
)
_WRITERS: tuple[Role, ...] = (LoadMicroBatch, RecvActivation, ForwardPass)
_NEEDS: dict[Role, tuple[Role, ...]] = {
    ForwardPass: (LoadMicroBatch, RecvActivation),
    BackwardPass: (ForwardPass, RecvGrad),
    SendActivation: (ForwardPass,),
    SendGrad: (BackwardPass,),
}


def role_of(instruction_type: Role) -> Role:
    """The instruction a class stands for: itself, or the buffer operation it was derived from.

    >>> class MyForward(ForwardPass): pass
    >>> role_of(MyForward).__name__
    'ForwardPass'
    """
    return next((base for base in instruction_type.__mro__ if base in _BUFFER_ROLES), instruction_type)


class BufferWatch:
    """Follows one stage: which micro-batch is in which buffer, how many are live, what went wrong.

    A stream need not carry micro-batch numbers. Loads and forwards are then counted, a received
    activation has the number of its message, and the other instructions mean the micro-batch in their
    buffer.

    >>> watch = BufferWatch(0, [LoadMicroBatch(0), ForwardPass(0), LoadMicroBatch(0), BackwardPass(0)])
    >>> for instruction in watch.stream: _ = watch.see(instruction)
    >>> watch.violations[0]
    'stage 0 LoadMicroBatch(buffer_id=0) overwrites buffer 0 while micro-batch 0 is live in it'
    """

    def __init__(self, stage: int, stream: Sequence[PipeInstruction]) -> None:
        self.stage = stage
        self.stream = stream
        self.peak = 0
        self.violations: list[str] = []
        self._roles = {role_of(type(instruction)) for instruction in stream}
        self._last_use = self._first_present(SendGrad, BackwardPass, SendActivation, ForwardPass)
        self._end_of_life = self._first_present(BackwardPass, SendActivation, ForwardPass)
        self._holder: dict[int, int] = {}  # buffer -> micro-batch in it
        self._live: set[int] = set()  # micro-batches whose forward is done and whose backward is not
        self._done: dict[Role, set[int]] = {role: set() for role in _BUFFER_ROLES}
        self._count: Counter[Role] = Counter()

    def see(self, instruction: PipeInstruction, arriving: int | None = None) -> int | None:
        """Note an instruction that ran and return its micro-batch; `arriving` is that of a message."""
        role = role_of(type(instruction))
        if role not in self._done:
            return None
        buffer_id: int = getattr(instruction, "buffer_id")  # noqa: B009  (the base class has no buffer)
        micro_batch_id = self._identify(instruction, role, buffer_id, arriving)
        if micro_batch_id is None:
            self._blame(instruction, f"finds no micro-batch in buffer {buffer_id}")
            return None
        if role in _WRITERS:
            self._enter(instruction, buffer_id, micro_batch_id)
        elif buffer_id not in self._holder:
            self._blame(instruction, f"finds no micro-batch in buffer {buffer_id}")
        elif self._holder[buffer_id] != micro_batch_id:
            self._blame(instruction, f"finds micro-batch {self._holder[buffer_id]} in buffer {buffer_id}")
        for need in _NEEDS.get(role, ()):
            if need in self._roles and micro_batch_id not in self._done[need]:
                self._blame(instruction, f"runs before the {need.__name__} of micro-batch {micro_batch_id}")
        self._done[role].add(micro_batch_id)
        self._count[role] += 1
        self._age(role, buffer_id, micro_batch_id)
        return micro_batch_id

    def _first_present(self, *roles: Role) -> Role | None:
        return next((role for role in roles if role in self._roles), None)

    def _identify(
        self, instruction: PipeInstruction, role: Role, buffer_id: int, arriving: int | None
    ) -> int | None:
        micro_batch_id: int | None = getattr(instruction, "micro_batch_id", None)
        if micro_batch_id is not None:
            return micro_batch_id
        if role is RecvActivation and arriving is not None:
            return arriving
        if role is ForwardPass and buffer_id in self._holder:
            return self._holder[buffer_id]
        return self._count[role] if role in _WRITERS else self._holder.get(buffer_id)

    def _enter(self, instruction: PipeInstruction, buffer_id: int, micro_batch_id: int) -> None:
        holder = self._holder.get(buffer_id, micro_batch_id)
        if holder != micro_batch_id:
            self._blame(
                instruction, f"overwrites buffer {buffer_id} while micro-batch {holder} is live in it"
            )
        self._holder[buffer_id] = micro_batch_id

    def _age(self, role: Role, buffer_id: int, micro_batch_id: int) -> None:
        if role is ForwardPass:
            self._live.add(micro_batch_id)
            self.peak = max(self.peak, len(self._live))
        if role is self._end_of_life:
            self._live.discard(micro_batch_id)
        if role is self._last_use and self._holder.get(buffer_id) == micro_batch_id:
            del self._holder[buffer_id]

    def _blame(self, instruction: PipeInstruction, what: str) -> None:
        self.violations.append(f"stage {self.stage} {instruction!r} {what}")
