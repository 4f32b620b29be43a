"""One rank of one engine under `zero.py`: build it, then make one step whenever a line says so.

Four engines train the same blocks on the same micro-batches with the same AdamW: one process, and two
replicas with divided optimizer states in ds_lite, in torch and in DeepSpeed. Each function below builds one
of them and returns its step: forward, backward, optimizer, and this rank's mean loss. `held` does not train
for time: it counts the bytes that ds_lite holds under ZeRO 0, 1 and 2.

Shapes: B micro-batch, T tokens, H width.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from pipeline_worker import Step, Task, _answer, _meeting_place, _take_standard_output, blocks, micro_batches
from torch import Tensor

REPLICAS = 2  # of every engine but one process, which does the work of both
LEARNING_RATE = 1e-4
BUCKET = 2**21  # elements reduced in one message: the model has eight times as many, so buckets matter
SMALL_BUCKET = 2**18  # in `held`: gloo's copy of a bucket and autograd's of a weight shall weigh little


def my_micro_batches(task: Task, replica: int, replicas: int = REPLICAS) -> list[tuple[Tensor, Tensor]]:
    """The m pairs of one replica; all replicas together have what one process has."""
    m = task.num_micro_batches
    return micro_batches(replace(task, num_micro_batches=m * replicas))[replica * m : (replica + 1) * m]


# ------------------------------------------------------------------------------------------- engines


def one_process(task: Task) -> Step:
    """Plain PyTorch: the micro-batches of all replicas one after another."""
    model = blocks(task)
    optimizer = _adamw(model.parameters())
    data = [pair for replica in range(REPLICAS) for pair in my_micro_batches(task, replica)]

    def step() -> float:
        losses = []
        for inputs, labels in data:
            loss = F.mse_loss(model(inputs), labels)
            (loss / len(data)).backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
        return sum(losses) / len(losses)

    return step


def torch_zero(task: Task) -> Step:
    """DistributedDataParallel and ZeroRedundancyOptimizer, both with their faster options."""
    from torch.distributed.optim import ZeroRedundancyOptimizer
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group("gloo", **_meeting_place(task))
    megabytes = BUCKET * 4 / 2**20
    model = DistributedDataParallel(blocks(task), bucket_cap_mb=megabytes, gradient_as_bucket_view=True)
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), torch.optim.AdamW, parameters_as_bucket_view=True, lr=LEARNING_RATE
    )
    data = my_micro_batches(task, task.rank)

    def step() -> float:
        losses = []
        for number, (inputs, labels) in enumerate(data, start=1):
            with nullcontext() if number == len(data) else model.no_sync():
                loss = F.mse_loss(model(inputs), labels)
                (loss / len(data)).backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
        return sum(losses) / len(losses)

    return step


def ds_lite(task: Task) -> Step:
    """ds_lite's engine with ZeRO-1, with its trace on, as its launcher starts it."""
    import ds_lite as dl  # only these workers have to have it

    dl.init_distributed(
        "gloo", verbose=False, trace_dir=task.folder, trace_limit=120.0, **_meeting_place(task)
    )
    engine, *_ = dl.initialize(model=blocks(task), optimizer=_adamw, config=_config(task, stage=1))
    return _three_calls(engine, my_micro_batches(task, task.rank))


def deepspeed(task: Task) -> Step:
    """DeepSpeed's engine with ZeRO-1 on its CPU accelerator."""
    os.environ |= {"DS_ACCELERATOR": "cpu", "LOCAL_RANK": str(task.rank), "LOCAL_SIZE": str(task.world_size)}
    os.environ |= {"RANK": str(task.rank), "WORLD_SIZE": str(task.world_size)}
    import deepspeed as ds  # only these workers have to have it

    dist.init_process_group("gloo", **_meeting_place(task))
    ds.init_distributed("gloo", auto_mpi_discovery=False, dist_init_required=False)
    model = blocks(task)
    engine, *_ = ds.initialize(
        model=model, optimizer=_adamw(model.parameters()), config=_config(task, stage=1)
    )
    return _three_calls(engine, my_micro_batches(task, task.rank))


def _three_calls(engine: Any, data: list[tuple[Tensor, Tensor]]) -> Step:
    """forward, backward, step: both engines are called alike."""

    def step() -> float:
        losses = []
        for inputs, labels in data:
            loss = F.mse_loss(engine(inputs), labels)
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        return sum(losses) / len(losses)

    return step


def _adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=LEARNING_RATE)


def _config(task: Task, stage: int, bucket: int = BUCKET) -> dict[str, Any]:
    """The ds_config of both engines that read one."""
    return {
        "train_micro_batch_size_per_gpu": task.micro_batch_size,
        "gradient_accumulation_steps": task.num_micro_batches,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": stage, "reduce_bucket_size": bucket},
        "steps_per_print": 10**9,
    }


# -------------------------------------------------------------------------------------------- memory


def held(task: Task) -> Callable[[], list[dict[str, int]]]:
    """Bytes under ZeRO 0, 1, 2: after a step, and at most in the next one's backwards."""
    import ds_lite as dl

    dl.init_distributed("gloo", verbose=False, **_meeting_place(task))
    small = replace(task, num_micro_batches=2, micro_batch_size=1, tokens=4)  # activations weigh nothing
    return lambda: [_bytes_held(small, stage) for stage in (0, 1, 2)]


def _bytes_held(task: Task, stage: int) -> dict[str, int]:
    sys.path.append(str(Path(__file__).parents[2] / "tests"))
    from meter import LiveStorages  # the one instrument for memory

    import ds_lite as dl

    data = my_micro_batches(task, task.rank, task.world_size)
    with LiveStorages(min_bytes=2**16) as meter:  # parameters and buckets, not activations
        model = blocks(task)
        count = sum(parameter.numel() for parameter in model.parameters())
        engine, *_ = dl.initialize(model=model, optimizer=_adamw, config=_config(task, stage, SMALL_BUCKET))
        _three_calls(engine, data)()
        after = meter.current
        meter.reset_peak()
        for inputs, labels in data:
            engine.backward(F.mse_loss(engine(inputs), labels))
            peak = meter.peak  # before the optimizer, whose scratch is its own
            engine.step()
    return {"stage": stage, "parameters": count, "after": after, "peak": peak}


# -------------------------------------------------------------------------------------- conversation


ENGINES: dict[str, Callable[[Task], Callable[[], Any]]] = {
    engine.__name__: engine for engine in (one_process, ds_lite, torch_zero, deepspeed, held)
}


def main(task: Task) -> None:
    """Say when ready, then answer each line of standard input with one line of JSON."""
    answers = _take_standard_output()
    torch.set_num_threads(1)
    step = ENGINES[task.engine](task)
    _answer(answers, ready=True)
    for line in sys.stdin:
        _answer(answers, **{"loss" if line.strip() == "step" else "held": step()})


if __name__ == "__main__":
    main(Task(**json.loads(sys.argv[1])))
