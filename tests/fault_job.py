"""A job in which one rank goes wrong in one instruction, for `test_s09_10_faults.py`; a body for a world and
a script for the launchers.

Two stages of two replicas train two batches. The fault strikes in the second one: in an instruction for a
micro-batch on micro-batch 2, else when the instruction comes.

    kill, stop      SIGKILL, SIGSTOP
    raise           an exception in the instruction
    loss, data      an exception in the loss function, in the iterator
    fewer           this rank's schedule has one micro-batch fewer
    shape           this rank's layer has another width than that of its replica
    full            the disk is full while this rank saves; before, the checkpoint "good" was saved
    corrupt         a file of the checkpoint "good" is damaged before it is loaded
"""

from __future__ import annotations

import argparse
import itertools
import os
import resource
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import ds_lite
from ds_lite import comm
from ds_lite.pipe import LayerSpec, PipelineModule
from ds_lite.pipe import instructions as pipe
from ds_lite.pipe.schedule import TrainSchedule

STAGES, RANKS, WIDTH, BATCH, MICRO_BATCHES, STRUCK = 2, 4, 4, 3, 4, 2
FIRST = ("SendActivation", "RecvGrad")  # the others are shown on the last stage
INSTRUCTIONS = [
    *(
        "LoadMicroBatch",
        "ForwardPass",
        "SendActivation",
        "RecvActivation",
        "BackwardPass",
        "SendGrad",
        "RecvGrad",
    ),
    *("ReduceTiedGrads", "ReduceGrads", "OptimizerStep"),
]


@dataclass(frozen=True)
class Fault:
    kind: str
    instruction: str = ""

    @property
    def rank(self) -> int:
        """Whose it is: of the last stage, or the first where only that one has the instruction."""
        if self.kind in ("shape", "full"):
            return {"shape": 1, "full": 2}[self.kind]
        return 0 if self.instruction in FIRST or self.kind == "data" else RANKS - 1


class Job:
    """What one rank does; `marks` is a folder for process ids and the moment of the fault."""

    def __init__(self, fault: Fault, marks: Path) -> None:
        self.fault, self.marks, self.calls = fault, marks, 0
        self.is_mine = comm.get_rank() == fault.rank
        (marks / f"pid{comm.get_rank()}").write_text(str(os.getpid()))

    def strike(self, do: Callable[[], Any]) -> None:
        draft = self.marks / "striking"  # complete before it gets its name
        draft.write_text(str(time.time()))
        draft.replace(self.marks / "struck")
        do()

    def fail(self) -> None:
        raise KeyError(f"a fault: {self.fault.kind}")

    def run(self) -> int:
        engine = self.engine()
        data = self.data()
        engine.train_batch(data)
        if self.fault.kind in ("full", "corrupt"):
            getattr(self, self.fault.kind)(engine)
        if self.is_mine and self.fault.instruction:
            self.wrap(engine)
        if self.is_mine and self.fault.kind == "fewer":
            engine._train_schedule = self.shorter
        engine.train_batch(data)
        return int(engine.global_steps)

    def engine(self) -> Any:
        width = WIDTH - 1 if self.fault.kind == "shape" and self.is_mine else WIDTH
        layers = [LayerSpec(nn.Linear, WIDTH, WIDTH), LayerSpec(nn.Linear, WIDTH, width)]
        layers += [LayerSpec(nn.Linear, WIDTH, WIDTH), LayerSpec(nn.Linear, WIDTH, WIDTH)]
        model = PipelineModule(layers, num_stages=STAGES, loss_fn=self.loss, partition_method="uniform")
        config = {
            "train_micro_batch_size_per_gpu": BATCH,
            "gradient_accumulation_steps": MICRO_BATCHES,
            "optimizer": {"type": "AdamW", "params": {"lr": 0.1}},
        }
        if width != WIDTH:
            self.strike(lambda: None)
        engine: Any = ds_lite.initialize(model=model, config=config)[0]
        return engine

    def loss(self, outputs: Tensor, labels: Tensor) -> Tensor:
        self.calls += 1
        if self.fault.kind == "loss" and self.is_mine and self.calls == MICRO_BATCHES + STRUCK + 1:
            self.strike(self.fail)
        return nn.functional.mse_loss(outputs, labels)

    def data(self) -> Iterator[Any]:
        for number in itertools.count():
            if self.fault.kind == "data" and self.is_mine and number == MICRO_BATCHES + STRUCK:
                self.strike(self.fail)
            yield torch.ones(BATCH, WIDTH), torch.zeros(BATCH, WIDTH)

    def wrap(self, engine: Any) -> None:
        """From now on the fault strikes inside the instruction."""
        ways = {
            "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
            "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
            "raise": self.fail,
        }
        kind = getattr(pipe, self.fault.instruction)
        right = engine._INSTRUCTION_MAP[kind]
        wanted = STRUCK if issubclass(kind, pipe.BufferOpInstruction) else 0
        seen = itertools.count()

        def struck(self_: Any, **kwargs: Any) -> None:
            if next(seen) == wanted:
                self.strike(ways[self.fault.kind])
            right(self_, **kwargs)

        engine._INSTRUCTION_MAP = {**engine._INSTRUCTION_MAP, kind: struck}

    def shorter(self) -> TrainSchedule:
        self.strike(lambda: None)
        return TrainSchedule(MICRO_BATCHES - 1, STAGES, STAGES - 1)

    def full(self, engine: Any) -> None:
        folder = str(self.marks / "saved")
        engine.save_checkpoint(folder, "good")
        if self.is_mine:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # so that writing fails, as on a full disk
            resource.setrlimit(resource.RLIMIT_FSIZE, (200, resource.RLIM_INFINITY))
            self.strike(lambda: None)
        try:
            engine.save_checkpoint(folder, "next")
        finally:
            if self.is_mine:
                resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)

    def corrupt(self, engine: Any) -> None:
        folder = self.marks / "saved"
        engine.save_checkpoint(str(folder), "good")
        comm.barrier()
        if self.is_mine:
            (file,) = (folder / "good").glob("layer_02-model_states.pt")
            data = bytearray(file.read_bytes())
            data[len(data) // 2] ^= 0xFF
            file.write_bytes(bytes(data))
            self.strike(lambda: None)
        comm.barrier()
        engine.load_checkpoint(str(folder), "good")


def body(rank: int, fault: Fault, marks: str) -> int:
    return Job(fault, Path(marks)).run()


def loads(rank: int, marks: str) -> tuple[int, float]:
    """The step and a weight of the checkpoint that was good."""
    engine = Job(Fault(""), Path(marks)).engine()
    engine.load_checkpoint(str(Path(marks) / "saved"), "good")
    return engine.global_steps, float(sum(p.sum() for p in engine.module.parameters()))


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("kind", "instruction", "marks", "trace"):
        parser.add_argument(f"--{name}", default="")
    parser.add_argument("--limit", type=float)
    args = parser.parse_args()
    ds_lite.init_distributed(trace_dir=args.trace or None, trace_limit=args.limit, verbose=False)
    Job(Fault(args.kind, args.instruction), Path(args.marks)).run()


if __name__ == "__main__":
    main()
