"""What it costs to hold the logits of one tile only: the tiled loss beside the plain one (§9.14).

    python labs/bench/tiled.py                    # T = 8192, V = 32000: 4 GB of memory, some minutes
    python labs/bench/tiled.py --quick            # T = 1024, V = 4000

One process, one thread, float32, forward and backward of a linear head and its cross entropy. A round runs
every contestant once, a ratio is formed inside its round, and medians are reported. "plain" is
`F.cross_entropy` of all logits. Peak bytes are the storages that were alive at one time, weights, gradients
and all, by `tests/meter.py`; what one operation uses inside itself is not seen there, but in the peak of
the process, which a child of its own reports for each contestant.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Annotated, Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import torch  # noqa: E402
import typer  # noqa: E402
from meter import LiveStorages, vm_hwm_bytes  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402

from ds_lite.sequence.tiled import TiledFusedLogitsLoss, tiled_loss  # noqa: E402

WIDTH, TILES = 256, 16
Step = Callable[[], Tensor]


def plain(head: nn.Module, x: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(head(x).flatten(0, -2), labels.flatten())


def fused(head: nn.Module, x: Tensor, labels: Tensor) -> Tensor:
    return TiledFusedLogitsLoss.apply(plain, head, x, labels, None, TILES)


def tiled(head: nn.Module, x: Tensor, labels: Tensor) -> Tensor:
    return tiled_loss(head, x, labels, tiles=TILES)


CONTESTANTS = {"plain": plain, "tiled_loss": tiled, "TiledFusedLogitsLoss": fused}


def training_step(name: str, tokens: int, vocabulary: int) -> Step:
    """Forward and backward of one contestant on inputs that are the same for all; returns the loss."""
    torch.manual_seed(0)
    head, x = nn.Linear(WIDTH, vocabulary, bias=False), torch.randn(1, tokens, WIDTH, requires_grad=True)
    labels = torch.randint(vocabulary, (1, tokens))

    def step() -> Tensor:
        head.zero_grad(set_to_none=True)
        x.grad = None
        loss = CONTESTANTS[name](head, x, labels)
        loss.backward()
        return torch.stack([loss.detach(), head.weight.grad.norm(), x.grad.norm()])

    return step


def seconds(step: Step) -> float:
    start = perf_counter()
    step()
    return perf_counter() - start


def time_ratios(tokens: int, vocabulary: int, rounds: int) -> dict[str, float]:
    """Median seconds of each contestant, and the ratio to "plain" within a round."""
    steps = {name: training_step(name, tokens, vocabulary) for name in CONTESTANTS}
    numbers = {name: step() for name, step in steps.items()}
    for name in steps:
        torch.testing.assert_close(numbers[name], numbers["plain"], rtol=1e-4, atol=1e-4)
    table = [{name: seconds(step) for name, step in steps.items()} for _ in range(rounds)]
    found = {f"{name} s": median(row[name] for row in table) for name in steps}
    for name in list(steps)[1:]:
        found[f"time of {name} / plain"] = median(row[name] / row["plain"] for row in table)
    return found


def peak_ratios(tokens: int, vocabulary: int) -> dict[str, float]:
    """Peak of live storages, and of the process beyond what it had before; over those of "plain"."""
    found: dict[str, float] = {}
    with get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        peaks = {name: pool.apply(peaks_of, (name, tokens, vocabulary)) for name in CONTESTANTS}
    for name, (live, process) in peaks.items():
        found[f"{name} live MB"] = live / 1e6
        if name == "plain":
            continue
        found[f"live bytes of {name} / plain"] = live / peaks["plain"][0]
        found[f"process bytes of {name} / plain"] = process / peaks["plain"][1]
    return found


def peaks_of(name: str, tokens: int, vocabulary: int) -> tuple[int, int]:
    """Runs in a process of its own."""
    torch.set_num_threads(1)
    training_step(name, 2 * TILES, 64)()  # what torch allocates once
    before = vm_hwm_bytes()
    with LiveStorages() as meter:
        training_step(name, tokens, vocabulary)()
    return meter.peak, vm_hwm_bytes() - before


def main(
    quick: Annotated[bool, typer.Option(help="A short sequence and a small vocabulary.")] = False,
    rounds: Annotated[int, typer.Option(min=1, help="Interleaved repetitions.")] = 7,
    path: Annotated[Path | None, typer.Option("--json", help="Where to write the table.")] = None,
) -> None:
    torch.set_num_threads(1)
    tokens, vocabulary = (1024, 4000) if quick else (8192, 32000)
    table: dict[str, Any] = {**peak_ratios(tokens, vocabulary), **time_ratios(tokens, vocabulary, rounds)}
    print(f"T={tokens} V={vocabulary} H={WIDTH}, {TILES} tiles, {rounds} rounds")
    print(*(f"  {key}: {value:.3f}" for key, value in table.items()), sep="\n")
    if path is not None:
        path.write_text(json.dumps(table, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
