"""§9.2 §9.10 Play a schedule on a virtual clock: bubble, live buffers, deadlock, without one process.

Every stage runs its instructions in order. Forward and backward take the time they are given, a transfer
takes `transfer`, everything else takes none. What a stage waits for decides the rest:

    rendezvous   a send and its receive wait until both are there, then both last `transfer` (NCCL, large
                 messages); the order of sends and receives matters, and a wrong one stops the pipeline
    buffered     a send returns at once and its message arrives `transfer` later (small messages);
                 only receives wait

Messages match first in, first out per (source stage, destination stage, kind). The instructions are
those the engine runs, so what is scored here is the thing itself, or, through `simulate_streams`, the
order an engine really issued.

Legend: S stages, m micro-batches.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from ds_lite.pipe.instructions import BackwardPass, ForwardPass, PipeInstruction
from ds_lite.pipe.schedule import PipeSchedule
from ds_lite.pipe.timeline import Span
from ds_lite.pipe.virtual_clock import Deadlock, VirtualClock

SENDS = ("rendezvous", "buffered")


@dataclass(frozen=True)
class Simulation:
    """What a run of all stages looked like. Times are in the unit of the given costs.

    A stage is busy while it computes; waiting and transfers are idle. `peak_live_buffers` counts
    micro-batches whose forward is done and whose backward is not; in a stream without backwards, those
    not sent yet.
    """

    end_time: float
    busy: tuple[float, ...]
    idle: tuple[float, ...]
    peak_live_buffers: tuple[int, ...]
    spans: tuple[Span, ...]
    deadlock: Deadlock | None
    unreceived: tuple[str, ...]
    violations: tuple[str, ...]

    @property
    def bubble_of_total(self) -> float:
        """Idle over total time: (S-1)/(m+S-1) for equal stages and free transfers, the chapter's ratio."""
        total = sum(self.busy) + sum(self.idle)
        return sum(self.idle) / total if total else 0.0

    @property
    def bubble_of_ideal(self) -> float:
        """Idle over the time a pipeline without bubble needs: (S-1)/m, the ratio other texts quote."""
        return sum(self.idle) / sum(self.busy) if any(self.busy) else 0.0

    @property
    def is_clean(self) -> bool:
        """True if every stage finished, every message was received and no buffer was misused."""
        return self.deadlock is None and not self.unreceived and not self.violations


def simulate(
    schedule_class: type[PipeSchedule],
    num_stages: int,
    num_micro_batches: int,
    *,
    forward: float | Sequence[float] = 1.0,
    backward: float | Sequence[float] = 1.0,
    transfer: float = 0.0,
    sends: str = "rendezvous",
) -> Simulation:
    """Play one batch of a schedule on all its stages.

    Units: any one unit of time; `forward` and `backward` are a number, or one number per stage.
    Raises: ValueError for a negative cost, a list of costs of another length and an unknown kind of send.

    >>> from ds_lite.pipe.schedule import TrainSchedule
    >>> run = simulate(TrainSchedule, num_stages=4, num_micro_batches=8)
    >>> run.end_time, run.peak_live_buffers, run.deadlock
    (22.0, (4, 3, 2, 1), None)
    >>> round(run.bubble_of_total, 3), run.bubble_of_ideal
    (0.273, 0.375)

    Source: §9.2.
    """
    streams = [
        [instruction for step in schedule_class(num_micro_batches, num_stages, stage) for instruction in step]
        for stage in range(num_stages)
    ]
    return simulate_streams(streams, forward=forward, backward=backward, transfer=transfer, sends=sends)


def simulate_streams(
    streams: Sequence[Sequence[PipeInstruction]],
    *,
    forward: float | Sequence[float] = 1.0,
    backward: float | Sequence[float] = 1.0,
    transfer: float = 0.0,
    sends: str = "rendezvous",
) -> Simulation:
    """Play explicit instructions, one stream per stage, for example the order an engine issued them in.

    Units and Raises: as `simulate`.

    >>> from ds_lite.pipe.instructions import RecvActivation, RecvGrad
    >>> run = simulate_streams([[RecvGrad(0)], [RecvActivation(0)]])
    >>> for wait in run.deadlock.core: print(wait)
    stage 0 RecvGrad(buffer_id=0) waits for stage 1
    stage 1 RecvActivation(buffer_id=0) waits for stage 0

    Source: §9.10.
    """
    if sends not in SENDS:
        raise ValueError(
            f"sends={sends!r} is not a way to send; a run uses one, choose from {list(SENDS)} (§9.10)"
        )
    costs: dict[type[PipeInstruction], list[float]] = {
        ForwardPass: _per_stage("forward", forward, len(streams)),
        BackwardPass: _per_stage("backward", backward, len(streams)),
    }
    _per_stage("transfer", transfer, len(streams))
    clock = VirtualClock(streams, costs, transfer=transfer, is_rendezvous=sends == "rendezvous")
    clock.run()
    return _summary(clock)


def _summary(clock: VirtualClock) -> Simulation:
    end_time = max(clock.now, default=0.0)
    return Simulation(
        end_time=end_time,
        busy=tuple(clock.busy),
        idle=tuple(end_time - busy for busy in clock.busy),
        peak_live_buffers=tuple(watch.peak for watch in clock.watches),
        spans=tuple(sorted(clock.spans, key=lambda span: (span.stage, span.start, span.end))),
        deadlock=clock.deadlock(),
        unreceived=tuple(clock.unreceived()),
        violations=tuple(clock.mismatches + [line for watch in clock.watches for line in watch.violations]),
    )


def _per_stage(name: str, cost: float | Sequence[float], num_stages: int) -> list[float]:
    costs = list(cost) if isinstance(cost, Sequence) else [cost] * num_stages
    if len(costs) != num_stages:
        raise ValueError(
            f"{name} has {len(costs)} costs for {num_stages} stages; each stage needs one, "
            f"give a number or {num_stages} of them (§9.2)"
        )
    if any(not value >= 0 for value in costs):
        raise ValueError(
            f"{name}={cost} holds a negative cost; the clock runs forward, choose costs >= 0 (§9.2)"
        )
    return costs
