"""What attention in chunks costs and saves: bytes and seconds beside attention in one piece (§9.14.2).

    python labs/bench/fpdt.py                   # a few minutes on one core
    python labs/bench/fpdt.py --quick

One process, one thread, float32, forward and backward of causal attention. "math" is torch's attention with
a matrix of scores, "kernel" torch's own choice; "chunks" is `chunked_attention`, "plain chunks" the same
without the kernel, as where there is none, "stored chunks" with a host store. A round runs every contestant
once, a ratio is formed inside its round, and medians are reported. Gradients are compared first.

Then how bytes and seconds grow with the tokens in chunks of one size, eight at the smallest length: the
slope between two axes in logarithms. Bytes are to be linear, 1; seconds are those of attention itself and
tend to 2. Bytes are the largest sum of storages that forward and backward made and still held, by
`tests/meter.py`; what lies in the host store is among them here, where the host is the device.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from statistics import median
from time import perf_counter
from types import SimpleNamespace
from typing import Annotated, Any
from unittest import mock

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
os.environ.setdefault("DS_ACCELERATOR", "cpu")

import torch  # noqa: E402
import typer  # noqa: E402
from meter import LiveStorages  # noqa: E402
from torch import Tensor  # noqa: E402
from torch.nn import functional as F  # noqa: E402
from torch.nn.attention import SDPBackend, sdpa_kernel  # noqa: E402

from ds_lite.sequence import pair  # noqa: E402
from ds_lite.sequence.chunked import chunked_attention  # noqa: E402
from ds_lite.sequence.fpdt_layer import FPDT_Attention  # noqa: E402
from ds_lite.sequence.host_store import HostStore  # noqa: E402

HEADS, WIDTH, CHUNKS = 2, 64, 8
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


def no_kernel() -> AbstractContextManager[Any]:
    return mock.patch.object(pair, "HAS_CPU_KERNEL", False)


def in_one_piece(context: Callable[[], AbstractContextManager[Any]]) -> Attention:
    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with context():
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    return attention


def in_chunks(chunks: int, *, is_stored: bool = False) -> Attention:
    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        store = HostStore() if is_stored else None
        return chunked_attention(q, k, v, chunks=chunks, is_causal=True, store=store)

    return attention


def passes(
    attention: Attention, inputs: list[Tensor], *, has_kernel: bool = True
) -> Callable[[], list[Tensor]]:
    """Forward and backward; returns the gradients."""
    upstream = torch.randn(inputs[0].shape, generator=torch.Generator().manual_seed(1))

    def run() -> list[Tensor]:
        with nullcontext() if has_kernel else no_kernel():
            return list(torch.autograd.grad(attention(*inputs), inputs, upstream))

    return run


def make_inputs(tokens: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(1, HEADS, tokens, WIDTH, generator=generator, requires_grad=True) for _ in "qkv"]


def seconds(run: Callable[[], Any]) -> float:
    start = perf_counter()
    run()
    return perf_counter() - start


def peak_bytes(run: Callable[[], Any]) -> int:
    with LiveStorages() as meter:
        run()
    return meter.peak


def ratios(tokens: int, rounds: int) -> dict[str, float]:
    """Every contestant against the first one: bytes, seconds, and the largest difference of a gradient."""
    inputs = make_inputs(tokens)
    runs = {
        "math": passes(in_one_piece(lambda: sdpa_kernel(SDPBackend.MATH)), inputs),
        "kernel": passes(in_one_piece(nullcontext), inputs),
        "chunks": passes(in_chunks(CHUNKS), inputs),
        "plain chunks": passes(in_chunks(CHUNKS), inputs, has_kernel=False),
        "stored chunks": passes(in_chunks(CHUNKS, is_stored=True), inputs),
    }
    truth, peaks = runs["math"](), {name: peak_bytes(run) for name, run in runs.items()}
    table = [{name: seconds(run) for name, run in runs.items()} for _ in range(rounds)]
    found = {"math MB": peaks["math"] / 1e6, "math s": median(row["math"] for row in table)}
    for name in list(runs)[1:]:
        pairs = zip(runs[name](), truth, strict=True)
        found[f"{name}: gradients off by"] = max(float((a - b).abs().max()) for a, b in pairs)
        found[f"{name} / math, bytes"] = peaks[name] / peaks["math"]
        found[f"{name} / math, seconds"] = median(row[name] / row["math"] for row in table)
    return found


def make_layer(chunk_size: int) -> FPDT_Attention:
    config = SimpleNamespace(
        hidden_size=HEADS * WIDTH, num_attention_heads=HEADS, num_key_value_heads=HEADS, kv_channels=WIDTH
    )
    first = torch.randn(3 * HEADS * WIDTH, HEADS * WIDTH, requires_grad=True)
    second = torch.randn(HEADS * WIDTH, HEADS * WIDTH, requires_grad=True)
    return FPDT_Attention(config, first, None, second, None, None, chunk_size=chunk_size)


def layer_pass(tokens: int, chunk_size: int) -> Callable[[], Any]:
    """FPDT_Attention with its store, forward and backward."""
    layer, hidden = make_layer(chunk_size), torch.randn(tokens, 1, HEADS * WIDTH, requires_grad=True)
    wanted = [hidden, layer.qkv_linear_weight, layer.qkv_dense_weight]

    def run() -> None:
        out, _ = layer(hidden)
        torch.autograd.grad(out.sum(), wanted)

    return run


def growth(sizes: list[int], chunk_size: int, rounds: int) -> dict[str, float]:
    """Slopes of peak bytes and of seconds over the tokens, from the first size to the last."""
    octaves, found = math.log(sizes[-1] / sizes[0]), {}
    for name, has_kernel in (("chunks", True), ("plain chunks", False)):
        runs = [passes(in_chunks(n // chunk_size), make_inputs(n), has_kernel=has_kernel) for n in sizes]
        found |= _slopes(name, runs, octaves, rounds)
    return found | _slopes("FPDT_Attention", [layer_pass(n, chunk_size) for n in sizes], octaves, rounds)


def _slopes(name: str, runs: list[Callable[[], Any]], octaves: float, rounds: int) -> dict[str, float]:
    peaks = [peak_bytes(run) for run in runs]
    best = [min(seconds(run) for _ in range(rounds)) for run in (runs[0], runs[-1])]
    return {
        f"{name}: slope of bytes": math.log(peaks[-1] / peaks[0]) / octaves,
        f"{name}: slope of seconds": math.log(best[-1] / best[0]) / octaves,
        f"{name}: MB": peaks[-1] / 1e6,
    }


def main(
    quick: Annotated[bool, typer.Option(help="Fewer rounds and fewer tokens.")] = False,
    path: Annotated[Path | None, typer.Option("--json", help="Where to write the table.")] = None,
) -> None:
    torch.set_num_threads(1)
    tokens, rounds = (1024, 3) if quick else (4096, 9)
    sizes = [512, 1024, 2048] if quick else [2048, 4096, 8192, 16384]
    chunk_size = sizes[0] // CHUNKS
    table = {
        f"{tokens} tokens in {CHUNKS} chunks": ratios(tokens, rounds),
        f"{sizes[0]} to {sizes[-1]} tokens in chunks of {chunk_size}": growth(sizes, chunk_size, 2),
    }
    for name, row in table.items():
        print(name, *(f"{key}: {value:.3g}" for key, value in row.items()), sep="\n  ")
    if path is not None:
        path.write_text(json.dumps(table, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
