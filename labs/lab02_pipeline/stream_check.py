"""Lab 2, part A: is the learner's stream the 1F1B stream? If not, which idea is missing? Pure, no processes.

Legend: S stages, m micro-batches, s a stage, i a micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from _lab import Hint

from ds_lite.pipe.instructions import (
    BackwardPass,
    BufferOpInstruction,
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
from ds_lite.pipe.schedule import PipeSchedule, TrainSchedule
from ds_lite.pipe.simulate import simulate

Command = tuple[type[BufferOpInstruction], int]  # what to do, for which micro-batch
Stream = list[list[Command]]  # one list a tick
StreamFunction = Callable[[int, int, int], Stream]  # (m, S, s)

_ORDER = "forward slot: SendGrad, RecvActivation, load, pass; backward slot: RecvGrad, SendActivation, pass"
_WHY_MISSING = {
    SendGrad: "stage {other} then waits in RecvGrad for ever; send a gradient to stage s-1 in the tick after "
    "the backward that made it",
    RecvGrad: "a stage that is not the last starts its backward from the gradient that stage s+1 sends; "
    "receive it in the tick of the backward",
    SendActivation: "stage {other} then waits in RecvActivation for ever; send an output to stage s+1 in the "
    "tick after the forward that made it",
    RecvActivation: "a stage that is not the first computes on what stage s-1 sends; receive it in the tick "
    "of the forward",
    LoadMicroBatch: "the first stage loads the inputs and the last one the labels, before the forward",
    ForwardPass: "each of the m micro-batches goes forward once",
    BackwardPass: "each of the m micro-batches goes backward once",
}


def as_schedule(stream: StreamFunction) -> type[PipeSchedule]:
    """The learner's stream as a schedule class, which the simulator and the engine can run."""

    class LearnersSchedule(PipeSchedule):
        def steps(self) -> Iterator[list[PipeInstruction]]:
            ticks = stream(self.micro_batches, self.stages, self.stage_id)
            for tick, commands in enumerate(ticks):
                step: list[PipeInstruction] = [kind(self._buffer(i), i) for kind, i in commands]
                if tick == len(ticks) - 1:
                    step += [ReduceTiedGrads(), ReduceGrads(), OptimizerStep()]
                yield step

        def num_pipe_buffers(self) -> int:
            return TrainSchedule(self.micro_batches, self.stages, self.stage_id).num_pipe_buffers()

    return LearnersSchedule


def check_stream(stream: StreamFunction, largest: int = 8) -> int:
    """Compare with the real schedule for all S and m up to `largest`; returns the number of streams.

    Raises: Hint at the first difference, a typical case before the small and odd ones.
    """
    sizes = [(S, m) for S in range(1, largest + 1) for m in range(1, largest + 1)]
    for S, m in [(4, 8), *sizes]:
        mine = [_well_formed(stream(m, S, s), S, m, s) for s in range(S)]
        real = [_real(m, S, s) for s in range(S)]
        if mine != real:
            raise Hint(f"{_diagnosis(mine, real, S, m, stream)} (seen with S={S}, m={m})")
    return sum(S for S, _ in sizes)


def _real(m: int, S: int, s: int) -> Stream:
    return [
        [(type(one), one.micro_batch_id) for one in step if isinstance(one, BufferOpInstruction)]
        for step in TrainSchedule(m, S, s)
    ]


def _well_formed(ticks: Stream, S: int, m: int, s: int) -> Stream:
    where = f"stream(num_micro_batches={m}, num_stages={S}, stage_id={s})"
    if not isinstance(ticks, list) or not all(isinstance(step, list) for step in ticks):
        raise Hint(f"{where} must return a list with one list a tick; an idle tick is an empty list")
    for step in ticks:
        for command in step:
            is_pair = isinstance(command, tuple) and len(command) == 2 and isinstance(command[1], int)
            if not is_pair or not (
                isinstance(command[0], type) and issubclass(command[0], BufferOpInstruction)
            ):
                raise Hint(f"{where}: {command!r} is not a pair such as (ForwardPass, 0)")
            if not 0 <= command[1] < m:
                raise Hint(
                    f"{where}: {command[0].__name__} of micro-batch {command[1]}; there are only 0..{m - 1}"
                )
    return ticks


def _diagnosis(mine: list[Stream], real: list[Stream], S: int, m: int, stream: StreamFunction) -> str:
    """The most basic difference first: ticks of passes, number of ticks, what is missing, where, order."""
    for s in range(S):
        if text := _about_forwards(_ticks(mine[s], ForwardPass), s, m):
            return text
    for s in range(S):
        if text := _about_backwards(_ticks(mine[s], BackwardPass), S, s, m):
            return text
    for s in range(S):
        if len(mine[s]) != len(real[s]):
            return (
                f"stage {s} has {len(mine[s])} ticks; the last backward, of micro-batch m-1 on stage 0, "
                f"ends at tick 2(m+S-1), and all stages have as many: {len(real[s])}"
            )
    for s in range(S):
        if text := _about_transfers(mine[s], real[s], s):
            return text
    return _about_order(mine, real, S, m, stream)


def _ticks(stream: Stream, wanted: type[BufferOpInstruction]) -> dict[int, int]:
    return {i: tick for tick, step in enumerate(stream) for kind, i in step if kind is wanted}


def _about_forwards(ticks: dict[int, int], s: int, m: int) -> str | None:
    want = {i: s + 2 * i for i in range(m)}
    if ticks == want:
        return None
    if len(ticks) < m:
        return f"stage {s} runs only {len(ticks)} of {m} forwards; {_WHY_MISSING[ForwardPass]}"
    if ticks == {i: s + i for i in range(m)}:
        return (
            f"stage {s} runs a forward on every tick; a stage takes every second tick, so that a backward "
            "fits between two forwards: that is what 1F1B means"
        )
    if ticks == {i: 2 * i for i in range(m)}:
        return (
            f"stage {s} starts at tick 0, but its first activation arrives only after s ticks; "
            f"stage s starts s ticks late"
        )
    return (
        f"stage {s} runs its forwards at ticks {_list(ticks)}, and not at {_list(want)}; stage s starts s "
        "ticks late and takes every second tick: s + 2i"
    )


def _about_backwards(ticks: dict[int, int], S: int, s: int, m: int) -> str | None:
    want = {i: 2 * S - 1 - s + 2 * i for i in range(m)}
    if ticks == want:
        return None
    late = {tick - want[i] for i, tick in ticks.items()}  # of those that fit into the stream
    if len(late) == 1 and (d := late.pop()) % 2:
        return (
            f"on stage {s} the backward tick is {abs(d)} too {'late' if d > 0 else 'early'}, the tick of a "
            "forward; the last stage turns round at once, so its backward comes in the tick after its "
            "forward, and each stage before hears of it one tick later"
        )
    if len({tick - want[i] for i, tick in ticks.items()}) == 1 and ticks != {i: want[i] for i in ticks}:
        in_flight = (ticks[0] - s + 1) // 2
        return (
            f"the warm-up of stage {s} is {in_flight} forwards deep before its first backward, and should be "
            f"S-s = {S - s}: the first gradient is back at stage s after S-s forwards, not sooner and not "
            f"later"
        )
    if len(ticks) < m:
        return f"stage {s} runs only {len(ticks)} of {m} backwards; {_WHY_MISSING[BackwardPass]}"
    return (
        f"stage {s} runs its backwards at ticks {_list(ticks)}, and not at {_list(want)}: the formula is "
        f"2S - 1 - s + 2i"
    )


def _about_transfers(mine: Stream, real: Stream, s: int) -> str | None:
    for kind, why in _WHY_MISSING.items():
        have, want = _ticks(mine, kind), _ticks(real, kind)
        other = s - 1 if kind is SendGrad else s + 1
        if want and not have:
            return f"stage {s} never does {kind.__name__}: {why.format(other=other)}"
        if have and not want:
            return (
                f"stage {s} does {kind.__name__}, but it has no neighbour on that side, or no use for data: "
                f"the first and the last stage differ"
            )
        if have != want:
            i = next(i for i in {**want, **have} if have.get(i) != want.get(i))
            return (
                f"stage {s}: {kind.__name__} of micro-batch {i} stands at tick {have.get(i, 'none')}, and "
                f"not at {want.get(i, 'none')}: {why.format(other=other)}"
            )
    return None


def _about_order(mine: list[Stream], real: list[Stream], S: int, m: int, stream: StreamFunction) -> str:
    s, tick = next((s, t) for s in range(S) for t in range(len(real[s])) if mine[s][t] != real[s][t])
    text = f"tick {tick} of stage {s} has the right instructions in another order ({_ORDER})"
    stuck = simulate(as_schedule(stream), S, m, sends="rendezvous").deadlock
    return f"{text}; where a send waits for its receive this stands still: {stuck}" if stuck else text


def _list(ticks: dict[int, int]) -> Sequence[int]:
    return [ticks[i] for i in sorted(ticks)]
