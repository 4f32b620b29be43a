"""One rank of one engine under `pipeline.py`: build it, then make one step whenever a line says so.

Four engines train the same sixteen blocks on the same micro-batches with the same SGD. Each function below
builds one of them and returns its step: forward, backward, optimizer, and the mean loss where the engine puts
it (None on the other ranks). Between steps a worker blocks on its standard input and costs nothing.

Shapes: B micro-batch, T tokens, H width, N heads, D head width.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from itertools import cycle
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

Step = Callable[[], "float | None"]

LEARNING_RATE = 0.1  # large enough that three steps tell a wrong gradient from a right one


@dataclass(frozen=True)
class Task:
    """What one worker is: its engine, its place, and the sizes of the model."""

    engine: str
    rank: int
    world_size: int
    folder: str
    num_micro_batches: int = 16
    num_blocks: int = 16
    width: int = 128
    num_heads: int = 4
    tokens: int = 128
    micro_batch_size: int = 4

    @property
    def shape(self) -> tuple[int, int, int]:
        """Of what enters and leaves every block: (B, T, H)."""
        return self.micro_batch_size, self.tokens, self.width


class Block(nn.Module):
    """One pre-norm transformer block; its weights depend on its index alone, in every engine."""

    def __init__(self, index: int, width: int, num_heads: int) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(index)
            self.num_heads = num_heads
            self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
            self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
            self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        # (B, T, 3H) -> three times (B, N, T, D)
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        heads = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(heads.transpose(1, 2).flatten(-2))  # (B, N, T, D) -> (B, T, H)
        return x + self.down(F.gelu(self.up(self.norm2(x))))


def micro_batches(task: Task) -> list[tuple[Tensor, Tensor]]:
    """The m pairs (inputs, labels) of every step, equal in every engine."""
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(2, task.num_micro_batches, *task.shape, generator=generator)
    return list(zip(x, y))


def blocks(task: Task, *, first: int = 0, count: int | None = None) -> nn.Sequential:
    """Consecutive blocks of the model, all of them by default."""
    count = task.num_blocks if count is None else count
    return nn.Sequential(*(Block(first + i, task.width, task.num_heads) for i in range(count)))


# ------------------------------------------------------------------------------------------- engines


def one_process(task: Task) -> Step:
    """Plain PyTorch: the m micro-batches one after another."""
    model, data, m = blocks(task), micro_batches(task), task.num_micro_batches
    optimizer = torch.optim.SGD(model.parameters(), LEARNING_RATE)

    def step() -> float:
        losses = []
        for inputs, labels in data:
            loss = F.mse_loss(model(inputs), labels)
            (loss / m).backward()
            losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
        return float(torch.stack(losses).mean())

    return step


def ds_lite(task: Task) -> Step:
    """ds_lite's pipeline engine, with its trace on, as its launcher starts it."""
    import ds_lite as dl  # only these workers have to have it

    dl.init_distributed(
        "gloo", verbose=False, trace_dir=task.folder, trace_limit=120.0, **_meeting_place(task)
    )
    specs = [dl.LayerSpec(Block, i, task.width, task.num_heads) for i in range(task.num_blocks)]
    model = dl.PipelineModule(
        specs, num_stages=task.world_size, loss_fn=F.mse_loss, partition_method="uniform"
    )
    engine, *_ = dl.initialize(model=model, optimizer=_sgd, config=_config(task))
    data = cycle(micro_batches(task))
    return lambda: float(engine.train_batch(data))


def torch_1f1b(task: Task) -> Step:
    """torch.distributed.pipelining with static shapes; the loss stays on the last stage."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    dist.init_process_group("gloo", **_meeting_place(task))
    share = task.num_blocks // task.world_size
    model = blocks(task, first=task.rank * share, count=share)
    arriving = torch.empty(task.shape, requires_grad=task.rank > 0)
    leaving = torch.empty(task.shape, requires_grad=True)
    stage = PipelineStage(
        model, task.rank, task.world_size, torch.device("cpu"), input_args=arriving, output_args=leaving
    )
    schedule = Schedule1F1B(stage, task.num_micro_batches, loss_fn=F.mse_loss)
    optimizer = _sgd(model.parameters())
    x, y = (torch.cat(parts) for parts in zip(*micro_batches(task)))

    def step() -> float | None:
        losses: list[Tensor] = []
        inputs = (x,) if task.rank == 0 else ()
        if task.rank == task.world_size - 1:
            schedule.step(*inputs, target=y, losses=losses)
        else:
            schedule.step(*inputs)
        optimizer.step()
        optimizer.zero_grad()
        return float(torch.stack(losses).mean()) if losses else None

    return step


def deepspeed(task: Task) -> Step:
    """DeepSpeed's pipeline engine on its CPU accelerator."""
    os.environ |= {"DS_ACCELERATOR": "cpu", "LOCAL_RANK": str(task.rank), "LOCAL_SIZE": str(task.world_size)}
    os.environ |= {"RANK": str(task.rank), "WORLD_SIZE": str(task.world_size)}
    import deepspeed as ds  # only these workers have to have it
    from deepspeed.pipe import LayerSpec, PipelineModule

    dist.init_process_group("gloo", **_meeting_place(task))
    ds.init_distributed("gloo", auto_mpi_discovery=False, dist_init_required=False)
    specs = [LayerSpec(Block, i, task.width, task.num_heads) for i in range(task.num_blocks)]
    model = PipelineModule(specs, num_stages=task.world_size, loss_fn=F.mse_loss, partition_method="uniform")
    parameters = list(model.parameters())
    engine, *_ = ds.initialize(
        model=model, optimizer=_sgd(parameters), model_parameters=parameters, config=_config(task)
    )
    data = cycle(micro_batches(task))
    return lambda: float(engine.train_batch(data))


ENGINES = {engine.__name__: engine for engine in (one_process, ds_lite, torch_1f1b, deepspeed)}


def _sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, LEARNING_RATE)


def _meeting_place(task: Task) -> dict[str, Any]:
    """A file in place of a port."""
    store = f"file://{task.folder}/store"
    return {"init_method": store, "rank": task.rank, "world_size": task.world_size}


def _config(task: Task) -> dict[str, Any]:
    """The ds_config of both engines that read one."""
    return {
        "train_micro_batch_size_per_gpu": task.micro_batch_size,
        "gradient_accumulation_steps": task.num_micro_batches,
        "gradient_clipping": 0.0,
        "steps_per_print": 10**9,
    }


# -------------------------------------------------------------------------------------- conversation


def tracing_cost(step: Step) -> dict[str, float]:
    """How many events ds_lite's trace takes down in one step, and the seconds that each costs."""
    from ds_lite import trace

    row, repeats = trace.current(), 2000
    row.forget_events()
    step()
    events = len(row.events())
    start = perf_counter()
    for _ in range(repeats):
        row.begin("ForwardPass", 0, 1)
        row.end()
    return {"events": events, "seconds": (perf_counter() - start) / repeats}


def main(task: Task) -> None:
    """Say when ready, then answer each line of standard input with one line of JSON."""
    answers = _take_standard_output()
    torch.set_num_threads(1)
    step = ENGINES[task.engine](task)
    _answer(answers, ready=True)
    for line in sys.stdin:
        if line.strip() == "step":
            _answer(answers, loss=step())
        else:
            _answer(answers, **tracing_cost(step))


def _take_standard_output() -> Any:
    """The pipe for answers; whatever a library prints goes to the log instead."""
    pipe = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    return pipe


def _answer(pipe: Any, **values: Any) -> None:
    pipe.write(json.dumps(values) + "\n")


if __name__ == "__main__":
    main(Task(**json.loads(sys.argv[1])))
