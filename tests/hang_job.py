"""A job in which one rank goes wrong in mid-step, for `test_s09_10_hang.py`; a body for a world and a script.

The fault sits in a layer of the last stage and strikes in the second step, in the forward of micro-batch 2.
"""

from __future__ import annotations

import argparse
import itertools
import os
import signal
import time
from pathlib import Path

import torch
from torch import Tensor, nn

import ds_lite
from ds_lite import comm
from ds_lite.pipe import LayerSpec, PipelineModule

WIDTH, BATCH, MICRO_BATCHES, FAULTY_MICRO_BATCH = 4, 3, 4, 2


class Layer(nn.Linear):
    """Well-behaved on every rank but `faulty_rank`."""

    def __init__(self, faulty_rank: int, fault: str, marks: str) -> None:
        super().__init__(WIDTH, WIDTH)
        self.faulty_rank, self.fault, self.marks, self.calls = faulty_rank, fault, marks, 0

    def forward(self, x: Tensor) -> Tensor:
        if self.calls == MICRO_BATCHES + FAULTY_MICRO_BATCH and comm.get_rank() == self.faulty_rank:
            draft = Path(self.marks) / "striking"  # complete before it gets its name
            draft.write_text(str(time.time()))
            draft.replace(Path(self.marks) / "struck")
            go_wrong(self.fault)
        self.calls += 1
        return super().forward(x)


def go_wrong(fault: str) -> None:
    if fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "raise":
        raise KeyError("a fault in a layer")
    if fault == "sleep":
        time.sleep(600)


def train(num_stages: int, faulty_rank: int, fault: str, marks: str) -> int:
    """Two steps; leaves this process's id in the folder `marks`, and the moment of the fault."""
    (Path(marks) / f"pid{comm.get_rank()}").write_text(str(os.getpid()))
    layers = [LayerSpec(Layer, -1, "", marks) for _ in range(3)]
    model = PipelineModule(
        [*layers, LayerSpec(Layer, faulty_rank, fault, marks)],
        num_stages=num_stages,
        loss_fn=nn.functional.mse_loss,
        partition_method="uniform",
    )
    config = {
        "train_micro_batch_size_per_gpu": BATCH,
        "gradient_accumulation_steps": MICRO_BATCHES,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
    }
    engine, *_ = ds_lite.initialize(model=model, config=config)
    data = itertools.repeat((torch.ones(BATCH, WIDTH), torch.zeros(BATCH, WIDTH)))
    for _ in range(2):
        engine.train_batch(data)
    return engine.global_steps


def body(rank: int, num_stages: int, faulty_rank: int, fault: str, marks: str) -> int:
    return train(num_stages, faulty_rank, fault, marks)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--stages", type=int)
    parser.add_argument("--faulty-rank", type=int)
    parser.add_argument("--fault")
    parser.add_argument("--marks")
    parser.add_argument("--trace")
    args = parser.parse_args()
    ds_lite.init_distributed(trace_dir=args.trace)
    train(args.stages, args.faulty_rank, args.fault, args.marks)


if __name__ == "__main__":
    main()
