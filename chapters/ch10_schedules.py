"""§9.10 Schedules and instructions.

Question: what does each stage do when, and what do you see when it hangs?

Run time: about 20 s on two cores.   python chapters/ch10_schedules.py

You will see two streams of instructions side by side, 1F1B and GPipe with the same bubble and different
memory, an order of messages that stands still, and the hang table of a job in which one process stopped.

Chapter against source: `_exec_schedule` is two loops, over steps and over the commands in them, and it
calls the method with the command's kwargs. DeepSpeed since 0.19 has a fourth schedule and an eleventh
instruction.

Legend: S stages, m micro-batches, s a stage.
"""

from __future__ import annotations

import time
from collections import Counter

import torch
from torch import nn

import ds_lite
from ds_lite.launch import JobFailed, run
from ds_lite.pipe import LayerSpec, PipelineModule
from ds_lite.pipe.instructions import (
    BackwardPass,
    ForwardPass,
    RecvActivation,
    RecvGrad,
    SendActivation,
    SendGrad,
)
from ds_lite.pipe.schedule import GPipeSchedule, InferenceSchedule, TrainSchedule
from ds_lite.pipe.simulate import simulate, simulate_streams
from ds_lite.pipe.timeline import timeline_text


def main() -> None:
    two_streams()
    the_same_bubble_less_memory()
    forwards_only()
    an_order_that_stands_still()
    reading_a_hang()
    print("\nNext: chapters/ch11_topology.py   Lab: python -m ds_lite lab 2 --nproc 4")


def two_streams() -> None:
    print("1 Predict: in which tick does stage 1 send its first gradient?\n")
    left, right = (list(TrainSchedule(micro_batches=3, stages=2, stage_id=s)) for s in range(2))
    print(f"tick  {'stage 0':<42}stage 1")
    for tick, (mine, other) in enumerate(zip(left, right, strict=True)):
        print(f"{tick:>4}  {words(mine):<42}{words(other)}".rstrip())
    counts = Counter(instruction.name for step in left for instruction in step)
    print("stage 0 in numbers: " + ", ".join(f"{count} {name}" for name, count in counts.items()))


def words(step: list) -> str:
    """SendActivation of micro-batch 1 as SA1, and so on."""
    letters = {"ReduceTiedGrads": "RT", "ReduceGrads": "RD", "OptimizerStep": "OS", "LoadMicroBatch": "L"}
    shown = []
    for one in step:
        short = letters.get(one.name) or "".join(c for c in one.name.replace("Pass", "") if c.isupper())
        shown.append(f"{short}{getattr(one, 'micro_batch_id', '')}")
    return " ".join(shown) or "."


def the_same_bubble_less_memory() -> None:
    print("\n2 Predict: GPipe runs all forwards first. Is its bubble larger, or its memory?\n")
    print(timeline_text(GPipeSchedule, num_stages=4, num_micro_batches=8))
    print("\n m   bubble of both   micro-batches in flight: 1F1B    GPipe")
    for m in (2, 4, 8, 32):
        ours, gpipe = simulate(TrainSchedule, 4, m), simulate(GPipeSchedule, 4, m)
        assert ours.bubble_of_total == gpipe.bubble_of_total
        peaks = [",".join(map(str, one.peak_live_buffers)) for one in (ours, gpipe)]
        print(f"{m:>2}   {ours.bubble_of_total:.4f}           {'':<13}{peaks[0]:>16}    {peaks[1]}")
    print("1F1B does not shrink the bubble, it shrinks the memory: min(S-s, m) instead of m.")


def forwards_only() -> None:
    print("\n3 Evaluation is a wave: m + S - 1 ticks, two buffers a stage.\n")
    print(timeline_text(InferenceSchedule, num_stages=3, num_micro_batches=4).rsplit("\n", 1)[0])


def an_order_that_stands_still() -> None:
    print("\n4 Predict: two stages send to each other first, and a send waits for its receive. Who moves?\n")
    stage_0 = [
        ForwardPass(0, 0),
        SendActivation(0, 0),
        ForwardPass(1, 1),
        SendActivation(1, 1),
        RecvGrad(0, 0),
    ]
    stage_1 = [
        RecvActivation(0, 0),
        ForwardPass(0, 0),
        BackwardPass(0, 0),
        SendGrad(0, 0),
        RecvActivation(1, 1),
    ]
    for sends in ("rendezvous", "buffered"):
        played = simulate_streams([stage_0, stage_1], sends=sends)
        print(f"{sends}: " + ("runs through" if played.deadlock is None else "stands still"))
        for wait in () if played.deadlock is None else played.deadlock.core:
            print(f"  {wait}")


def reading_a_hang() -> None:
    print("\n5 A job of two stages in which one process stops. Which rank would you look at?\n")
    try:
        run(stuck_job, 2, limit_s=5.0)
    except JobFailed as failure:
        print("\n".join(line.rstrip() for line in str(failure).splitlines()))
    print(
        "\nRead it so: a rank in RecvGrad or RecvActivation waits for its peer, so go to the peer's row.\n"
        "The rank in ForwardPass waits for nobody: it stopped there, in its layers, at the micro-batch shown."
    )


class StopsAt(nn.Linear):
    """A layer that never returns from its third forward, like a kernel or a data loader that hangs."""

    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls == 3:
            time.sleep(600)
        return super().forward(x)


def stuck_job() -> None:
    """One rank: a pipeline of two linear layers, the second of which stops."""
    layers = [LayerSpec(nn.Linear, 4, 4), LayerSpec(StopsAt, 4, 4)]
    model = PipelineModule(layers, num_stages=2, loss_fn=nn.functional.mse_loss)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 4,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
    }
    engine, *_ = ds_lite.initialize(model=model, config=config)
    engine.train_batch(iter([(torch.ones(2, 4), torch.zeros(2, 4))] * 4))


if __name__ == "__main__":
    main()
