"""A job that is told to stand still, for `test_s09_10_hang_dir.py`; a script for the launcher.

It waits for the file `phaseN` in the folder `marks`, N counted from 0, which holds the name of a fault; the
rank at fault leaves the mark `struckN` and holds until the file `overN` lies there. Then the next phase.

    sleep     the last rank's layer does not return from the forward of micro-batch 2
    absent    the last rank does not call train_batch, as if it got no data
    save      rank 0 alone calls save_checkpoint
    slow      nothing goes wrong, but it takes long enough to be looked at
    swapped   stage 0 sends micro-batch 2 behind the receive of its gradient; from this one nobody comes back
"""

from __future__ import annotations

import argparse
import itertools
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from hang_job import BATCH, MICRO_BATCHES, WIDTH
from torch import Tensor, nn

import ds_lite
from ds_lite import comm
from ds_lite.pipe import LayerSpec, PipelineModule
from ds_lite.pipe.instructions import PipeInstruction, RecvGrad, SendActivation
from ds_lite.pipe.schedule import TrainSchedule

KEPT_BACK = 2  # in `swapped`
SLOW_S, SLOW_BATCHES = 0.05, 8


class Layer(nn.Linear):
    """Calls `before` with the number of the micro-batch, for this batch only."""

    before: Any = None
    calls = 0

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        if self.before is not None:
            self.before(self.calls % MICRO_BATCHES)
        self.calls += 1
        return super().forward(x)


class Swapped(TrainSchedule):
    """The send of one micro-batch stands behind the receive of its gradient."""

    def steps(self) -> Iterator[list[PipeInstruction]]:
        kept: list[PipeInstruction] = []
        for step in super().steps():
            changed: list[PipeInstruction] = []
            for one in step:
                is_kept = isinstance(one, SendActivation) and one.micro_batch_id == KEPT_BACK
                (kept if is_kept else changed).append(one)
                if isinstance(one, RecvGrad) and one.micro_batch_id == KEPT_BACK:
                    changed += kept
            yield changed


def make_engine(num_stages: int) -> Any:
    model = PipelineModule(
        [LayerSpec(Layer) for _ in range(4)],
        num_stages=num_stages,
        loss_fn=nn.functional.mse_loss,
        partition_method="uniform",
    )
    config = {
        "train_micro_batch_size_per_gpu": BATCH,
        "gradient_accumulation_steps": MICRO_BATCHES,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
    }
    return ds_lite.initialize(model=model, config=config)[0]


def wait_for(path: Path) -> None:
    while not path.exists():
        time.sleep(0.02)


class Phases:
    """The engine of this rank, and what it is told to do with it."""

    def __init__(self, engine: Any, marks: Path) -> None:
        self.engine, self.marks, self.number = engine, marks, 0
        self.layers = [layer for layer in engine.module.modules() if isinstance(layer, Layer)]
        self.data = itertools.repeat((torch.ones(BATCH, WIDTH), torch.zeros(BATCH, WIDTH)))
        self.is_last = comm.get_rank() == comm.get_world_size() - 1

    def train(self, before: Any = None) -> None:
        for layer in self.layers:
            layer.before, layer.calls = before, 0
        self.engine.train_batch(self.data)

    def hold(self) -> None:
        (self.marks / f"struck{self.number}").touch()
        wait_for(self.marks / f"over{self.number}")

    def sleep(self) -> None:
        def before(micro_batch_id: int) -> None:
            if self.is_last and micro_batch_id == 2:
                self.hold()

        self.train(before)

    def absent(self) -> None:
        if self.is_last:
            self.hold()
        self.train()

    def save(self) -> None:
        if comm.get_rank() != 0:
            self.hold()
        self.engine.save_checkpoint(self.marks / "checkpoint")

    def slow(self) -> None:
        (self.marks / f"struck{self.number}").touch()
        for _ in range(SLOW_BATCHES):
            self.train(lambda micro_batch_id: time.sleep(SLOW_S))

    def swapped(self) -> None:
        if self.engine.is_first_stage():
            self.engine._train_schedule = lambda: Swapped(MICRO_BATCHES, self.engine.num_stages, 0)
        (self.marks / f"struck{self.number}").touch()
        self.train()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--stages", type=int)
    parser.add_argument("--marks", type=Path)
    args = parser.parse_args()
    ds_lite.init_distributed()
    (args.marks / f"pid{comm.get_rank()}").write_text(str(os.getpid()))
    phases = Phases(make_engine(args.stages), args.marks)
    phases.train()
    while True:
        wait_for(args.marks / f"phase{phases.number}")
        getattr(phases, (args.marks / f"phase{phases.number}").read_text())()
        phases.number += 1


if __name__ == "__main__":
    main()
