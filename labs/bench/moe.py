"""What a mixture of experts costs beyond its matrix products: ds_lite and DeepSpeed (§9.4 §9.12).

    python labs/bench/moe.py                    # a minute or two on one core
    python labs/bench/moe.py --quick

One process, one thread, forward and backward of one layer. "bare" are the six matrix products of an expert
for the rows that the gate kept, and nothing else; their results are thrown away. "experts" are the caller's
modules alone on the same rows, forward and backward, with biases, ReLU and gradients that are kept: what no
mixture can go below. A round runs every contestant once, a ratio is formed
inside its round, and medians are reported. DeepSpeed takes part if this Python has it.

Then how seconds and bytes grow with the tokens: the slope between two axes in logarithms, 1 for linear. Bytes
are the largest sum of storages that a forward made and still held, by `tests/meter.py`.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Annotated, Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
os.environ.setdefault("DS_ACCELERATOR", "cpu")

import torch  # noqa: E402
import typer  # noqa: E402
from meter import LiveStorages  # noqa: E402
from torch import Tensor, nn  # noqa: E402

from ds_lite.moe.layer import MoE  # noqa: E402

WIDTH, TIMES, CHOICES, FACTOR = 256, 4, 2, 1.25
Step = Callable[[], Any]


def expert() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, TIMES * WIDTH), nn.ReLU(), nn.Linear(TIMES * WIDTH, WIDTH))


def make_ours(experts: int, *, drop_tokens: bool = True) -> MoE:
    torch.manual_seed(0)
    options = {"capacity_factor": FACTOR, "top2_2nd_expert_sampling": False, "drop_tokens": drop_tokens}
    return MoE(WIDTH, expert(), experts, k=CHOICES, **options)


def training_step(layer: nn.Module, x: Tensor) -> Step:
    """Forward and backward; l_aux belongs to the loss, the rest of it sends a gradient that is ready."""
    gradients = [torch.randn(x.shape), torch.tensor(0.01)]

    def step() -> None:
        y, l_aux, _ = layer(x)
        torch.autograd.backward([y, l_aux], gradients)
        layer.zero_grad(set_to_none=True)
        x.grad = None

    return step


def bare_step(layer: MoE, x: Tensor) -> Step:
    """The products alone, on the rows of each expert that the gate keeps."""
    flat = x.detach()
    routing = layer.gate.route(layer.gate.scores(flat))
    kept = routing.expert[routing.kept]
    widths = torch.bincount(kept, minlength=layer.num_experts).tolist()
    up, down = torch.randn(TIMES * WIDTH, WIDTH), torch.randn(WIDTH, TIMES * WIDTH)
    work = [(torch.randn(n, WIDTH), torch.randn(n, WIDTH), torch.randn(n, TIMES * WIDTH)) for n in widths]

    def step() -> None:
        for rows, gradient, hidden in work:
            rows @ up.T, hidden @ down.T  # forward
            gradient @ down, gradient.T @ hidden  # backward of the second layer
            hidden @ up, hidden.T @ rows  # and of the first

    return step


def experts_step(layer: MoE, x: Tensor) -> Step:
    """The expert modules on as many rows, without a gate and without moving tokens."""
    routing = layer.gate.route(layer.gate.scores(x.detach()))
    widths = torch.bincount(routing.expert[routing.kept], minlength=layer.num_experts).tolist()
    rows = [torch.randn(n, WIDTH, requires_grad=True) for n in widths]
    gradients = [torch.randn(n, WIDTH) for n in widths]

    def step() -> None:
        outputs = [expert(piece) for expert, piece in zip(layer.experts.values(), rows, strict=True)]
        torch.autograd.backward(outputs, gradients)
        layer.zero_grad(set_to_none=True)
        for piece in rows:
            piece.grad = None

    return step


def make_theirs(experts: int) -> nn.Module | None:
    """DeepSpeed's layer, on one rank; None where it is not installed."""
    try:
        import deepspeed
        from deepspeed.moe.layer import MoE as Theirs
    except ImportError:
        return None
    if not torch.distributed.is_initialized():
        store = torch.distributed.HashStore()
        torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
        deepspeed.init_distributed("gloo")
    torch.manual_seed(0)
    options = {"capacity_factor": FACTOR, "top2_2nd_expert_sampling": False}
    layer = Theirs(WIDTH, expert(), experts, k=CHOICES, **options)
    layer.set_deepspeed_parallelism()
    return layer


def seconds(step: Step) -> float:
    start = perf_counter()
    step()
    return perf_counter() - start


def ratios(experts: int, tokens: int, rounds: int) -> dict[str, float]:
    """Medians: seconds of each contestant, and ratios within a round."""
    x = torch.randn(tokens, WIDTH, requires_grad=True)
    ours = make_ours(experts)
    steps = {
        "bare": bare_step(ours, x),
        "experts": experts_step(ours, x),
        "ds_lite": training_step(ours, x),
    }
    if (theirs := make_theirs(experts)) is not None:
        steps["deepspeed"] = training_step(theirs, x)
    for step in steps.values():
        step()
    table = [{name: seconds(step) for name, step in steps.items()} for _ in range(rounds)]
    found = {f"{name} s": median(row[name] for row in table) for name in steps}
    for below, above in (("bare", "experts"), ("bare", "ds_lite"), ("experts", "ds_lite")):
        found[f"{above} / {below}"] = median(row[above] / row[below] for row in table)
    if "deepspeed" in steps:
        found["ds_lite / deepspeed"] = median(row["ds_lite"] / row["deepspeed"] for row in table)
    return found


def growth(experts: int, sizes: list[int], rounds: int) -> dict[str, float]:
    """Slopes of seconds and of peak bytes over the tokens, in logarithms, from the first size to the last."""
    best, peaks = [], []
    for tokens in sizes:
        layer, x = make_ours(experts), torch.randn(tokens, WIDTH, requires_grad=True)
        step = training_step(layer, x)
        step()
        best.append(min(seconds(step) for _ in range(rounds)))
        with LiveStorages() as meter:
            layer(x)
        seen = sum(p.numel() * p.element_size() for p in layer.parameters())  # the products read all of them
        peaks.append(meter.peak - seen)
    octaves = math.log(sizes[-1] / sizes[0])
    return {
        "slope of seconds": math.log(best[-1] / best[0]) / octaves,
        "slope of bytes": math.log(peaks[-1] / peaks[0]) / octaves,
        "bytes a token": peaks[-1] / sizes[-1],
    }


def main(
    quick: Annotated[bool, typer.Option(help="Fewer rounds and fewer tokens.")] = False,
    path: Annotated[Path | None, typer.Option("--json", help="Where to write the table.")] = None,
) -> None:
    torch.set_num_threads(1)
    rounds, sizes = (5, [512, 2048]) if quick else (25, [1024, 4096, 16384])
    table = {
        f"{experts} experts": {**ratios(experts, 2048, rounds), **growth(experts, sizes, max(3, rounds // 5))}
        for experts in (8, 64)
    }
    for name, row in table.items():
        print(name, *(f"{key}: {value:.3f}" for key, value in row.items()), sep="\n  ")
    if path is not None:
        path.write_text(json.dumps(table, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
