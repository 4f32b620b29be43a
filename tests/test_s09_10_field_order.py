"""§9.10 Public report B21: the order that an engine really issues, played again under sends that wait.
Guards against: a hang with m < S or long messages, a buffer too many, the loss of another micro-batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from meter import live_micro_batches
from oracles import one_process
from small_models import (
    INPUTS,
    OUTPUTS,
    Scale,
    check_weights,
    linear,
    make_batch,
    make_pipeline,
    mean_squared,
)
from tolerance import LAW, assert_close

STAGES = 4
COUNTS = (1, 2, 3, 4, 9)


def long_messages(count: int) -> list[Any]:
    """4 MiB each: more than any socket takes in before somebody reads."""
    generator = torch.Generator().manual_seed(0)
    return [
        (torch.randn(512, 1024, generator=generator, dtype=torch.float64), torch.full((1,), 0.1 * i).double())
        for i in range(count)
    ]


def long_layers() -> list[Any]:
    return [Scale(0.5), Scale(1.5), Scale(-0.7), Scale(1.1)]


def issued(engine: Any) -> list[tuple[str, int]]:
    """(instruction, micro-batch) in the order in which this rank ran them."""
    from ds_lite.pipe import instructions

    events = engine.trace.events()
    return [(e.instruction, e.micro_batch_id) for e in events if hasattr(instructions, e.instruction)]


def planned(schedule: Any) -> list[tuple[str, int]]:
    stream = [command for step in schedule for command in step]
    ids = [getattr(command, "micro_batch_id", None) for command in stream]
    return [(command.name, -1 if at is None else at) for command, at in zip(stream, ids)]


def peak_live(stream: Sequence[tuple[str, int]]) -> int:
    short = {"ForwardPass": "F", "BackwardPass": "B"}
    return live_micro_batches((short[name], at) for name, at in stream if name in short)


def run_and_record(rank: int, impl: Any) -> dict[int, list[tuple[str, int]]]:
    """One step for each m, equal to one process; what this stage issued."""
    from ds_lite.pipe.schedule import TrainSchedule

    streams = {}
    for m in COUNTS:
        batch = long_messages(m)
        truth = one_process(long_layers(), mean_squared, batch, lr=0.1)
        pipeline = make_pipeline(impl, long_layers(), STAGES, m)
        pipeline.engine.trace.forget_events()
        assert_close(pipeline.train_batch(iter(batch)), truth.loss, LAW, f"m={m}")
        streams[m] = issued(pipeline.engine)
        check_weights(pipeline.weights(), truth, f"m={m}")
        assert streams[m] == planned(TrainSchedule(m, STAGES, rank))
        assert peak_live(streams[m]) == min(STAGES - rank, m), f"m={m}"
    return streams


def test_b21_the_issued_order_does_not_deadlock_when_sends_wait(world: Any, impl: Any) -> None:
    from ds_lite.pipe import instructions
    from ds_lite.pipe.schedule import TrainSchedule
    from ds_lite.pipe.simulate import simulate_streams

    def instruction(name: str, micro_batch_id: int, buffers: int) -> Any:
        kind = getattr(instructions, name)
        if not issubclass(kind, instructions.BufferOpInstruction):
            return kind()
        return kind(micro_batch_id % buffers, micro_batch_id=micro_batch_id)

    by_rank = world(run_and_record, STAGES, impl, deadline=120)
    for m in COUNTS:
        buffers = [TrainSchedule(m, STAGES, stage).num_pipe_buffers() for stage in range(STAGES)]
        streams = [
            [instruction(name, at, count) for name, at in of_rank[m]]
            for of_rank, count in zip(by_rank, buffers, strict=True)
        ]
        for sends in ("rendezvous", "buffered"):
            played = simulate_streams(streams, sends=sends)
            assert played.is_clean, (
                f"m={m} {sends}: {played.deadlock} {played.unreceived} {played.violations}"
            )
            assert played.peak_live_buffers == tuple(min(STAGES - stage, m) for stage in range(STAGES))
        eager = next(at for at, command in enumerate(streams[0]) if command.name == "RecvGrad")
        streams[0].insert(0, streams[0].pop(eager))  # control: stage 0 waits for a gradient first
        assert simulate_streams(streams, sends="rendezvous").deadlock is not None


def gpipe(rank: int, impl: Any) -> None:
    """All forwards before the first backward: each micro-batch needs a buffer and a loss of its own."""
    from ds_lite.pipe.engine import PipelineEngine
    from ds_lite.pipe.schedule import GPipeSchedule, PipeSchedule

    class GPipeEngine(PipelineEngine):
        def _train_schedule(self) -> PipeSchedule:
            return GPipeSchedule(self.micro_batches, self.num_stages, self.stage_id)

    layers = [linear(INPUTS, 4, 1), torch.nn.Tanh(), linear(4, 6, 2), linear(6, OUTPUTS, 3)]
    for m in (1, 3, 5):
        batch = make_batch(2 * m)
        truth = one_process(layers, mean_squared, batch, lr=0.1, steps=2)
        pipeline = make_pipeline(impl, layers, STAGES, m)
        base = pipeline.engine
        pipeline.engine = GPipeEngine(base.module, base.grid, base.config, base.optimizer)
        pipeline.engine.trace.forget_events()
        data = iter(batch)
        for step in range(2):
            assert_close(pipeline.train_batch(data), truth.losses[step], LAW, f"m={m} step {step}")
        check_weights(pipeline.weights(), truth, f"m={m}")
        stream = issued(pipeline.engine)
        half = planned(GPipeSchedule(m, STAGES, rank))
        assert stream == half + half
        assert peak_live(half) == m  # control: where 1F1B holds min(S - s, m)
        loss = pipeline.eval_batch(iter(batch[:m]))
        assert torch.isfinite(loss)


def test_b21_a_gpipe_engine_differentiates_each_micro_batch_with_its_own_loss(world: Any, impl: Any) -> None:
    world(gpipe, STAGES, impl)


def every_rank_has_the_same_micro_batches(rank: int, impl: Any) -> list[int]:
    pipeline = make_pipeline(impl, long_layers(), STAGES, 3)
    loads = []

    def noting() -> Iterator[Any]:
        for index, micro_batch in enumerate(long_messages(3)):
            loads.append(index)
            yield micro_batch

    pipeline.train_batch(noting())
    dist.barrier()
    return loads


@pytest.mark.parametrize("nprocs", [STAGES])
def test_b21_only_the_ends_load(world: Any, impl: Any, nprocs: int) -> None:
    first, *middle, last = world(every_rank_has_the_same_micro_batches, nprocs, impl)
    assert first == last == [0, 1, 2]
    assert middle == [[], []]
