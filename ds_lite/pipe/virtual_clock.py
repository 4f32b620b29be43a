"""§9.10 The clock under `simulate`: runs every stage until it waits, and finds out who waits for whom.

Each stage has a clock of its own. It runs on until it needs a neighbour that is not there; whoever meets
a waiting stage sets its clock and wakes it. As messages match first in, first out, the result does not
depend on which ready stage is run first.
"""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ds_lite.pipe.buffer_watch import BufferWatch, Role, role_of
from ds_lite.pipe.instructions import PipeInstruction, RecvActivation, RecvGrad, SendActivation, SendGrad
from ds_lite.pipe.timeline import Span, kind_of

# who is met: the distance to the neighbour, and what it has to stand in
_PARTNER: dict[Role, tuple[int, Role]] = {
    SendActivation: (+1, RecvActivation),
    RecvActivation: (-1, SendActivation),
    SendGrad: (-1, RecvGrad),
    RecvGrad: (+1, SendGrad),
}
_SENDERS: tuple[Role, ...] = (SendActivation, SendGrad)


@dataclass(frozen=True)
class Wait:
    """A stage that stands in an instruction for ever, and the neighbour it waits for."""

    stage: int
    instruction: PipeInstruction
    peer: int
    why: str  # what the neighbour does instead, "" if it waits too

    def __str__(self) -> str:
        return f"stage {self.stage} {self.instruction!r} waits for stage {self.peer}{self.why}"


@dataclass(frozen=True)
class Deadlock:
    """The stages that never finish; `core` are the two that block each other, or the one nobody meets."""

    core: tuple[Wait, ...]
    waiting: tuple[Wait, ...]

    def __str__(self) -> str:
        others = [str(wait) for wait in self.waiting if wait not in self.core]
        behind = f"; behind them: {'; '.join(others)}" if others else ""
        return "deadlock: " + "; ".join(map(str, self.core)) + behind


@dataclass
class _Message:
    """A buffered message under way."""

    source: int
    instruction: PipeInstruction
    micro_batch_id: int | None
    sent_at: float


class VirtualClock:
    """Plays one stream per stage; `run` once, then read the attributes."""

    def __init__(
        self,
        streams: Sequence[Sequence[PipeInstruction]],
        costs: Mapping[Role, Sequence[float]],
        *,
        transfer: float,
        is_rendezvous: bool,
    ) -> None:
        self.now = [0.0 for _ in streams]
        self.busy = [0.0 for _ in streams]
        self.spans: list[Span] = []
        self.mismatches: list[str] = []
        self.watches = [BufferWatch(stage, stream) for stage, stream in enumerate(streams)]
        self._streams = streams
        self._costs = costs
        self._transfer = transfer
        self._meet = self._rendezvous if is_rendezvous else self._mailbox
        self._position = [0 for _ in streams]
        self._is_waiting = [False for _ in streams]
        self._mail: dict[tuple[int, Role], deque[_Message]] = {}  # (destination, what receives it there)
        self._ready = deque(range(len(streams)))

    def run(self) -> None:
        """Run all stages until each has finished or waits for ever."""
        while self._ready:
            stage = self._ready.popleft()
            while (instruction := self._current(stage)) is not None:
                role = role_of(type(instruction))
                if role not in _PARTNER:
                    cost = self._costs[role][stage] if role in self._costs else 0.0
                    self.busy[stage] += cost
                    self._finish(stage, instruction, self.now[stage], self.now[stage] + cost)
                elif not self._meet(stage, instruction, role):
                    self._is_waiting[stage] = True
                    break

    def deadlock(self) -> Deadlock | None:
        """Who still waits after `run`, or None."""
        waits = {wait.stage: wait for wait in self._waits()}
        if not waits:
            return None
        stage = next(iter(waits))
        seen: list[int] = []
        while stage in waits and stage not in seen:
            seen.append(stage)
            stage = waits[stage].peer
        core = seen[seen.index(stage) :] if stage in seen else seen[-1:]
        return Deadlock(tuple(waits[s] for s in sorted(core)), tuple(waits.values()))

    def unreceived(self) -> Iterator[str]:
        """Messages that were sent, or wait to be, and that no stage will take."""
        for (destination, _), box in self._mail.items():
            for message in box:
                sender = f"stage {message.source} {message.instruction!r}"
                yield f"{sender} is never received by stage {destination}"
        for wait in self._waits():
            if wait.why and role_of(type(wait.instruction)) in _SENDERS:
                yield f"stage {wait.stage} {wait.instruction!r} is never received by stage {wait.peer}"

    def _current(self, stage: int) -> PipeInstruction | None:
        stream, position = self._streams[stage], self._position[stage]
        return stream[position] if position < len(stream) else None

    def _exists(self, stage: int) -> bool:
        return 0 <= stage < len(self._streams)

    def _finish(
        self, stage: int, instruction: PipeInstruction, start: float, end: float, arriving: int | None = None
    ) -> int | None:
        micro_batch_id = self.watches[stage].see(instruction, arriving)
        buffer_id = getattr(instruction, "buffer_id", None)
        kind = kind_of(role_of(type(instruction)).__name__)
        self.spans.append(Span(stage, instruction.name, kind, micro_batch_id, start, end, buffer_id))
        self.now[stage] = end
        self._position[stage] += 1
        return micro_batch_id

    def _rendezvous(self, stage: int, instruction: PipeInstruction, role: Role) -> bool:
        """Go on together with the neighbour if it waits in the matching instruction."""
        distance, partner_role = _PARTNER[role]
        peer = stage + distance
        partner = self._current(peer) if self._exists(peer) and self._is_waiting[peer] else None
        if partner is None or role_of(type(partner)) is not partner_role:
            return False
        start = max(self.now[stage], self.now[peer])
        end = start + self._transfer
        source, destination = (stage, peer) if role in _SENDERS else (peer, stage)
        sent, received = (instruction, partner) if role in _SENDERS else (partner, instruction)
        message = _Message(source, sent, self._finish(source, sent, start, end), start)
        self._receive(destination, received, message, start, end)
        self._wake(peer)
        return True

    def _mailbox(self, stage: int, instruction: PipeInstruction, role: Role) -> bool:
        """Leave a message and go on, or take one that is under way."""
        distance, partner_role = _PARTNER[role]
        now = self.now[stage]
        if role in _SENDERS:
            message = _Message(stage, instruction, self._finish(stage, instruction, now, now), now)
            self._mail.setdefault((stage + distance, partner_role), deque()).append(message)
            if self._exists(stage + distance) and self._is_waiting[stage + distance]:
                self._wake(stage + distance)
            return True
        box = self._mail.get((stage, role))
        if not box:
            return False
        message = box.popleft()
        start, end = max(now, message.sent_at), max(now, message.sent_at + self._transfer)
        self._receive(stage, instruction, message, start, end)
        return True

    def _receive(
        self, stage: int, instruction: PipeInstruction, message: _Message, start: float, end: float
    ) -> None:
        received = self._finish(stage, instruction, start, end, message.micro_batch_id)
        if received != message.micro_batch_id:
            self.mismatches.append(
                f"stage {stage} {instruction!r} gets micro-batch {message.micro_batch_id} "
                f"from stage {message.source} {message.instruction!r}"
            )

    def _wake(self, stage: int) -> None:
        self._is_waiting[stage] = False
        self._ready.append(stage)

    def _waits(self) -> Iterator[Wait]:
        for stage in range(len(self._streams)):
            instruction = self._current(stage)
            if instruction is not None:
                peer = stage + _PARTNER[role_of(type(instruction))][0]
                why = "" if self._exists(peer) else ", which does not exist"
                if not why and self._current(peer) is None:
                    why = ", which has finished"
                yield Wait(stage, instruction, peer, why)
