"""How much communication Domino hides: classic tensor parallelism and Domino on the same layers (§9.15).

    python labs/bench/domino.py                    # six minutes on one core
    python labs/bench/domino.py --quick --json table.json

One process is one of two tensor-parallel ranks. Its link is a process group whose sums take latency plus
bytes over bandwidth and no processor: on a machine with few cores a real link would compete with the
computation it shall hide under. What it gives back is this rank's part alone, which changes no time.

"classic" waits for each sum where it starts, "intra" runs two halves of the batch through one layer at a
time, "inter" through all layers. A round runs each once on the same link, and once without; speeds are
medians of ratios within a round. Exposed is (median step - median step without a link) over the time that the
link is busy, hidden the rest; what "classic" seems to hide, which is nothing, is the error of that estimate.
"""

from __future__ import annotations

import json
import os
import platform
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Annotated, Any
from unittest import mock

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import typer  # noqa: E402
from torch import Tensor, nn  # noqa: E402

from ds_lite import comm  # noqa: E402
from ds_lite.domino import DominoTransformer  # noqa: E402
from ds_lite.tensor_parallel.pending import Pending  # noqa: E402

RANKS, LAYERS, WIDTH, HEADS, TOKENS, BATCH = 2, 4, 512, 8, 128, 8
LATENCY_S = 50e-6
SHARES = (0.0, 0.2, 0.3, 0.45)  # of communication in the classic step
LINK = SimpleNamespace(bytes_per_s=float("inf"), free_at=0.0, busy_s=0.0)


class Delayed(dist._Work):
    """Done when the link has carried it; waiting sleeps."""

    def __init__(self, done_at: float) -> None:
        super().__init__()
        self.done_at = done_at

    def wait(self, timeout: Any = None) -> bool:
        if (left := self.done_at - time.perf_counter()) > 0:  # a sleep of 0 takes 50 microseconds
            time.sleep(left)
        return True


class DelayedGroup(dist.ProcessGroup):
    """One rank's end of a link that carries one message after another."""

    def allreduce(self, tensors: list[Tensor], options: Any) -> Delayed:
        size = sum(x.numel() * x.element_size() for x in tensors)
        took = 0.0 if LINK.bytes_per_s == float("inf") else LATENCY_S + size / LINK.bytes_per_s
        LINK.free_at = max(LINK.free_at, time.perf_counter()) + took
        LINK.busy_s += took
        return Delayed(LINK.free_at)

    def getBackendName(self) -> str:
        return "delayed"


def form_group() -> Any:
    dist.Backend.register_backend(
        "delayed", lambda store, rank, size, timeout: DelayedGroup(rank, size), devices=["cpu"]
    )
    dist.init_process_group("delayed", store=dist.HashStore(), rank=0, world_size=RANKS)
    return dist.group.WORLD


def make(group: Any, *, parts: int, intra: bool = False) -> DominoTransformer:
    mpu = SimpleNamespace(
        get_tensor_model_parallel_group=lambda: group, get_tensor_model_parallel_world_size=lambda: RANKS
    )
    config = SimpleNamespace(
        hidden_size=WIDTH,
        num_attention_heads=HEADS,
        ffn_hidden_size=4 * WIDTH,
        num_layers=LAYERS,
        params_dtype=torch.float32,
        perform_initialization=True,
        init_method=lambda weight: nn.init.normal_(weight, std=0.02),
        output_layer_init_method=lambda weight: nn.init.normal_(weight, std=0.02),
        domino_intra_layer_overlap=intra,
    )
    torch.manual_seed(0)
    return DominoTransformer(config, mpu, None, parts=parts)


def waiting_at_once() -> Any:
    """Classic tensor parallelism: whoever starts a sum waits for it."""
    start = Pending.start

    def started(self: Pending, key: Any, tensor: Tensor, group: Any) -> None:
        start(self, key, tensor, group)
        self._under_way[key][0].wait()

    return mock.patch.object(Pending, "start", started)


def seconds(model: DominoTransformer, x: Tensor, *, is_classic: bool) -> tuple[float, float]:
    """One forward and backward, and how long the link was busy in it."""
    with waiting_at_once() if is_classic else nullcontext():
        LINK.busy_s, LINK.free_at = 0.0, 0.0
        start = time.perf_counter()
        model(x).square().mean().backward()
        spent = time.perf_counter() - start
    model.zero_grad(set_to_none=True)
    return spent, LINK.busy_s


def measure(group: Any, rounds: int) -> dict[str, dict[str, float]]:
    models = {
        "classic": make(group, parts=1),
        "intra": make(group, parts=2, intra=True),
        "inter": make(group, parts=2),
    }
    x = torch.randn(TOKENS, BATCH, WIDTH)
    x.requires_grad_()

    def step(name: str, bytes_per_s: float) -> tuple[float, float]:
        LINK.bytes_per_s = bytes_per_s
        return seconds(models[name], x, is_classic=name == "classic")

    with comm.record() as ledger:
        model = models["classic"]
        model(x).square().mean().backward()
    total = ledger.total(operation="all_reduce")
    size = total.bytes if hasattr(total, "bytes") else total.sent
    for name in models:
        step(name, float("inf"))
    alone = {name: median(step(name, float("inf"))[0] for _ in range(3)) for name in models}
    table: dict[str, dict[str, float]] = {}
    for share in SHARES:
        wanted = share / (1 - share) * alone["classic"] - LATENCY_S * total.calls
        speed = size / wanted if share else float("inf")
        rows = [
            {name: (step(name, speed), step(name, float("inf"))[0]) for name in models} for _ in range(rounds)
        ]
        found = {
            "share of communication": median(row["classic"][0][1] / row["classic"][0][0] for row in rows)
        }
        for name in ("intra", "inter"):
            found[f"classic / {name}"] = median(row["classic"][0][0] / row[name][0][0] for row in rows)
        for name in models if share else ():
            with_link, without = (median(pick(row[name]) for row in rows) for pick in (_with, _without))
            found[f"hidden by {name}"] = 1 - (with_link - without) / rows[0][name][0][1]
        table[f"{share:.0%}"] = found
        for name, value in found.items():
            print(f"link of {share:>4.0%}   {name:<24}{value:>8.3f}", flush=True)
    return table


def _with(one: Any) -> float:
    return float(one[0][0])


def _without(one: Any) -> float:
    return float(one[1])


def main(
    quick: Annotated[bool, typer.Option(help="fewer rounds")] = False,
    path: Annotated[Path | None, typer.Option("--json", help="write the table there")] = None,
) -> None:
    table: dict[str, Any] = {
        "sizes": f"tp={RANKS} layers={LAYERS} H={WIDTH} N={HEADS} T={TOKENS} B={BATCH} float32",
        "versions": f"torch {torch.__version__}, Python {platform.python_version()}",
        **measure(form_group(), rounds=3 if quick else 25),
    }
    dist.destroy_process_group()
    if path is not None:
        path.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
