"""Lab 2, part C: the learner's stream drives ds_lite's engine, which trains a byte-level GPT on real text.

Two stages, times data replicas. The global batch is the same for 2 and for 4 processes.

Legend: S stages, m micro-batches, B sequences in one, T context, H width, V vocabulary.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from _lab import Lab
from stage_run import largest_difference

import ds_lite
from ds_lite import comm, toy
from ds_lite.comm import Ledger
from ds_lite.pipe import PipelineModule
from ds_lite.pipe.schedule import PipeSchedule
from ds_lite.pipe.timeline import Span, kind_of
from ds_lite.trace import Event

NUM_STAGES = 2
GLOBAL_SEQUENCES = 8  # in one step, over all replicas
NUM_MICRO_BATCHES = 4  # on each replica
SEED = 1234
TARGET_LOSS = 2.2  # nats per byte, on text that was not trained on


@dataclass(frozen=True)
class Plan:
    """How long and how large to train."""

    steps: int
    shape: toy.Shape
    text_bytes: int
    validation_batches: int
    measured_steps: int


FULL = Plan(800, toy.Shape(), text_bytes=4_000_000, validation_batches=256, measured_steps=5)
QUICK = Plan(
    3,
    toy.Shape(width=24, num_heads=2, num_blocks=2, context=16),
    text_bytes=200_000,
    validation_batches=4,
    measured_steps=1,
)


@dataclass(frozen=True)
class Measured:
    """What one step showed. Ledger and bubble are of this rank and of all ranks."""

    ledger: Ledger
    events: list[Event]  # of all ranks
    wall_bubble: float


def make_engine(
    plan: Plan, schedule: type[PipeSchedule], *, size: int, dtype: torch.dtype, optimizer: dict[str, Any]
) -> ds_lite.PipelineEngine:
    """The toy GPT on two stages, dispatching the learner's schedule."""
    model = PipelineModule(
        toy.layer_specs(plan.shape),
        num_stages=NUM_STAGES,
        loss_fn=toy.loss_fn,
        seed_layers=True,
        base_seed=SEED,
    )
    model.seed_layers = False  # that was for the weights; seeding each forward too would be for dropout
    config = {
        "train_micro_batch_size_per_gpu": size,
        "gradient_accumulation_steps": NUM_MICRO_BATCHES,
        "gradient_clipping": 1.0,
        **optimizer,
    }
    engine, *_ = ds_lite.initialize(model=model.to(dtype), config=config)
    assert isinstance(engine, ds_lite.PipelineEngine)
    engine._train_schedule = lambda: schedule(engine.micro_batches, engine.num_stages, engine.stage_id)  # type: ignore[method-assign]
    return engine


def gradient_difference(schedule: type[PipeSchedule]) -> float:
    """Largest difference of any gradient to one process, float64, distinct micro-batches on every replica."""
    shape = toy.Shape(width=12, num_heads=2, num_blocks=3, context=10)
    plan = Plan(1, shape, 0, 0, 0)
    engine = make_engine(
        plan,
        schedule,
        size=2,
        dtype=torch.float64,
        optimizer={"optimizer": {"type": "SGD", "params": {"lr": 0.1}}},
    )
    data = torch.randint(0, 256, (997,), generator=torch.Generator().manual_seed(SEED)).byte()
    replicas = engine.grid.get_data_parallel_world_size()
    options = {"size": 2, "context": shape.context}
    engine.compute_gradients(
        toy.batches(
            data, num_micro_batches=NUM_MICRO_BATCHES, replica=engine.grid.get_data_parallel_id(), **options
        )
    )
    mine = {name: engine.gradients.full(name) for name in engine.gradients.names()}
    everyone: list[Any] = [None] * comm.get_world_size()
    comm.all_gather_object(everyone, {name: g.cpu() for name, g in mine.items() if g is not None})
    model = toy.GPT(shape, seed=SEED).double()
    total = replicas * NUM_MICRO_BATCHES
    for index in range(total):
        inputs, labels = toy.micro_batch(data, seed=0, step=0, index=index, **options)
        (toy.loss_fn(model(inputs), labels) / total).backward()
    truth = {name: p.grad for name, p in model.parameters_by_layer().items() if p.grad is not None}
    if set().union(*everyone) != set(truth):
        return float("inf")
    return max(largest_difference(one, {name: truth[name] for name in one}) for one in everyone)


class Training:
    """One run on real text, with its progress line."""

    def __init__(self, lab: Lab, plan: Plan, schedule: type[PipeSchedule]) -> None:
        self.lab, self.plan = lab, plan
        self.size = GLOBAL_SEQUENCES * NUM_STAGES // (NUM_MICRO_BATCHES * comm.get_world_size())
        recipe = {
            "optimizer": {
                "type": "AdamW",
                "params": {"lr": 3e-3, "betas": [0.9, 0.95], "weight_decay": 0.1, "fused": True},
            },
            "scheduler": {
                "type": "WarmupCosineLR",
                "params": {
                    "warmup_num_steps": max(1, plan.steps // 10),
                    "warmup_type": "linear",  # the default, log, is at half the rate after ten steps
                    "total_num_steps": plan.steps,
                    "cos_min_ratio": 0.05,
                },
            },
        }
        self.engine = make_engine(plan, schedule, size=self.size, dtype=torch.float32, optimizer=recipe)
        self.replicas = self.engine.grid.get_data_parallel_world_size()
        self.text = toy.load_text(plan.text_bytes)
        self.batches = self._batches(self.text.train)

    def _batches(self, data: torch.Tensor) -> Iterator[toy.MicroBatch]:
        return toy.batches(
            data,
            num_micro_batches=NUM_MICRO_BATCHES,
            size=self.size,
            context=self.plan.shape.context,
            replica=self.engine.grid.get_data_parallel_id(),
            seed=SEED,
        )

    def run(self) -> None:
        """Train, and say every tenth of the way how it goes."""
        started, losses = time.monotonic(), []
        bytes_a_step = GLOBAL_SEQUENCES * self.plan.shape.context
        for step in range(1, self.plan.steps + 1):
            losses.append(self.engine.train_batch(self.batches).item())
            seconds = time.monotonic() - started
            is_tenth = step % max(1, self.plan.steps // 10) == 0
            if is_tenth or (sys.stdout.isatty() and step % 10 == 0):
                recent = statistics.fmean(losses[-50:])
                left = seconds / step * (self.plan.steps - step)
                self._progress(
                    f"step {step:>4} of {self.plan.steps}   loss {recent:.3f} nats/byte   "
                    f"{step * bytes_a_step / seconds:>6,.0f} tokens/s   eta {left:>3.0f} s",
                    stays=is_tenth,
                )

    def _progress(self, text: str, *, stays: bool) -> None:
        if self.lab.is_main:
            print(f"\r{text}" if sys.stdout.isatty() else text, end="\n" if stays else "", flush=True)

    def validation_loss(self) -> float:
        """Nats per byte on the validation text, the same sequences for every layout."""
        count = self.plan.validation_batches
        batches = toy.batches(
            self.text.validation,
            num_micro_batches=count,
            size=self.size,
            context=self.plan.shape.context,
            replica=self.engine.grid.get_data_parallel_id(),
            seed=SEED + 1,
        )
        return float(self.engine.eval_batch(batches, num_micro_batches=count))

    def measure(self) -> Measured:
        """A few more steps under the ledger and the trace; the one with the median bubble."""
        seen = [self._measured_step() for _ in range(self.plan.measured_steps)]
        return sorted(seen, key=lambda one: one.wall_bubble)[len(seen) // 2]

    def _measured_step(self) -> Measured:
        comm.barrier()
        self.engine.trace.forget_events()
        with comm.record() as ledger, _device_time(self.engine):
            self.engine.train_batch(self.batches)
        everyone: list[Any] = [None] * comm.get_world_size()
        comm.all_gather_object(everyone, self.engine.trace.events())
        stages = NUM_STAGES
        for rank, events in enumerate(everyone):  # without a trace folder the events do not know their rank
            place = rank * stages // len(everyone)
            everyone[rank] = [
                Event(rank, place, e.instruction, e.micro_batch_id, e.start, e.end) for e in events
            ]
        events = [event for of_rank in everyone for event in of_rank]
        return Measured(ledger, events, _wall_bubble(events, len(everyone)))


@contextmanager
def _device_time(engine: ds_lite.PipelineEngine) -> Iterator[None]:
    """On a GPU an instruction ends when its kernels do; costs overlap, so only in measured steps."""
    if engine.device.type != "cuda":
        yield
        return
    end = engine.trace.end

    def end_when_done() -> None:
        torch.cuda.synchronize()
        end()

    engine.trace.end = end_when_done  # type: ignore[method-assign]
    try:
        yield
    finally:
        engine.trace.end = end  # type: ignore[method-assign]


def passes(events: Sequence[Event]) -> list[Event]:
    """Only the forward and backward passes."""
    return [event for event in events if event.instruction in ("ForwardPass", "BackwardPass")]


def _wall_bubble(events: Sequence[Event], num_ranks: int) -> float:
    """Idle over total time, from the first pass of any rank to the last: everything that is not a pass."""
    computing = passes(events)
    length = max(event.end for event in computing) - min(event.start for event in computing)
    return 1 - sum(event.end - event.start for event in computing) / (num_ranks * length)


def peak_live(events: Sequence[Event], num_ranks: int) -> list[int]:
    """Per stage: most micro-batches whose forward was done and whose backward was not, on any replica."""
    peaks = [0] * NUM_STAGES
    for rank in range(num_ranks):
        live = 0
        mine = [event for event in passes(events) if event.rank == rank]
        for event in sorted(mine, key=lambda one: one.start):
            live += 1 if event.instruction == "ForwardPass" else -1
            peaks[event.stage_id] = max(peaks[event.stage_id], live)
    return peaks


def spans(events: Sequence[Event]) -> list[Span]:
    """A row a rank, in milliseconds, for the picture."""
    start = min(event.start for event in events)
    return [
        Span(
            event.rank,
            event.instruction,
            kind_of(event.instruction),
            event.micro_batch_id if event.micro_batch_id >= 0 else None,
            1e3 * (event.start - start),
            1e3 * (event.end - start),
        )
        for event in events
        if event.instruction not in ("LoadData", "ShareLoss")
    ]
