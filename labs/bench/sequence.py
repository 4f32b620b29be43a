"""What the exchange around an attention costs: one for q, k and v, three, and DeepSpeed's (§9.14).

    python labs/bench/sequence.py                    # a minute on two cores
    python labs/bench/sequence.py --quick --json table.json

Two ranks share a sequence of T tokens, forward and backward of one attention. "one exchange" is ds_lite's
DistributedAttention; "three exchanges" sends q, k and v one after another by ds_lite's single_all_to_all;
DeepSpeed's takes part if this Python has it. Once with an attention that only adds the three, so that the
exchange alone is measured, and once with a causal one. A round runs each contestant once, a barrier before
each; the slower rank counts; a ratio is formed inside its round, and medians are reported.

Then the bytes of activations that a rank of 1, 2 and 4 keeps from forward to backward in a GPT whose
sequences are spread by the config alone, against one rank's: 1/sp.
"""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Annotated, Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "chapters")]
os.environ.setdefault("DS_ACCELERATOR", "cpu")

import torch  # noqa: E402
import typer  # noqa: E402
from ch05_long_contexts import kept_bytes  # noqa: E402
from torch import Tensor  # noqa: E402
from torch.nn import functional as F  # noqa: E402

import ds_lite  # noqa: E402
from ds_lite import comm, toy  # noqa: E402
from ds_lite.launch import run  # noqa: E402
from ds_lite.sequence.layer import DistributedAttention, single_all_to_all  # noqa: E402

BATCH, TOKENS, HEADS, WIDTH, RANKS = 1, 2048, 16, 64, 2
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
Layer = Callable[[Tensor, Tensor, Tensor], Tensor]


def identity(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """As little as can be computed of all three, so that each has a gradient."""
    return (q + k).add_(v)


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


def contestants(attention: Attention) -> dict[str, Layer]:
    """Layers (B, T/sp, N, D) -> the same, on the group of all ranks."""
    group = comm.new_group(list(range(RANKS)), "seq")
    ours = DistributedAttention(attention, group, 2, 1)

    def three(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        there = [single_all_to_all(x, 2, 1, 0, group) for x in (q, k, v)]
        return single_all_to_all(attention(*there).contiguous(), 1, 2, 0, group)

    layers: dict[str, Layer] = {"one exchange": lambda q, k, v: ours(q, k, v, 0), "three exchanges": three}
    try:
        import deepspeed
        from deepspeed.sequence.layer import DistributedAttention as Theirs
    except ImportError:
        return layers
    deepspeed.init_distributed("gloo")
    theirs = Theirs(attention, group, 2, 1)
    return {**layers, "deepspeed": lambda q, k, v: theirs(q, k, v, 0)}


def seconds(layer: Layer, inputs: list[Tensor], gradient: Tensor) -> float:
    """One forward and backward, on the slower of the ranks."""
    comm.barrier()
    start = perf_counter()
    torch.autograd.backward(layer(*inputs), gradient)
    spent = torch.tensor(perf_counter() - start, dtype=torch.float64)
    for x in inputs:
        x.grad = None
    comm.all_reduce(spent, op=comm.ReduceOp.MAX)
    return spent.item()


def exchange(kind: str, rounds: int) -> dict[str, float]:
    """Medians: seconds of each contestant, and its ratio to one exchange within a round."""
    torch.manual_seed(comm.get_rank())
    shape = (BATCH, TOKENS // RANKS, HEADS, WIDTH)
    inputs = [torch.randn(shape, requires_grad=True) for _ in range(3)]
    gradient = torch.randn(shape)
    layers = contestants(identity if kind == "exchange alone" else causal)
    results = {name: layer(*inputs) for name, layer in layers.items()}
    for name, y in results.items():
        assert torch.equal(y, results["one exchange"]), f"{name} computes something else"
    for layer in layers.values():
        seconds(layer, inputs, gradient)
    table = [
        {name: seconds(layer, inputs, gradient) for name, layer in layers.items()} for _ in range(rounds)
    ]
    found = {f"{name} s": median(row[name] for row in table) for name in layers}
    for name in list(layers)[1:]:
        found[f"one exchange / {name}"] = median(row["one exchange"] / row[name] for row in table)
    return found


def activations(tokens: int) -> int:
    """Bytes that a rank's forward keeps for backward."""
    shape = toy.Shape(width=96, num_heads=4, num_blocks=2, context=tokens, vocabulary=64)
    sp = comm.get_world_size()
    config = {"train_micro_batch_size_per_gpu": 1, "sequence_parallel_size": sp}
    engine = ds_lite.initialize(model=toy.GPT(shape), config=config)[0]
    ids = torch.zeros(1, tokens, dtype=torch.long)
    engine(ids)
    return kept_bytes(lambda: engine(ids), tuple(engine.module.parameters()))


def main(
    quick: Annotated[bool, typer.Option(help="fewer rounds")] = False,
    path: Annotated[Path | None, typer.Option("--json", help="write the table there")] = None,
) -> None:
    rounds = 7 if quick else 41
    table: dict[str, Any] = {
        "sizes": f"sp={RANKS} B={BATCH} T={TOKENS} N={HEADS} D={WIDTH} float32, gloo",
        "versions": f"torch {torch.__version__}, Python {platform.python_version()}",
        "command": "python labs/bench/sequence.py" + (" --quick" if quick else ""),
    }
    for kind in ("exchange alone", "with attention"):
        table[kind] = run(exchange, RANKS, kind, rounds)[0]
        for name, value in table[kind].items():
            print(f"{kind:<16} {name:<32} {value:.4f}", flush=True)
    alone = run(activations, 1, 1024)[0]
    table["activations of one rank, bytes"] = alone
    for sp in (2, 4):
        part = table[f"activations, sp={sp}, of one rank's"] = run(activations, sp, 1024)[0] / alone
        print(f"activations of a rank, sp={sp}: {part:.3f} of one's")
    if path is not None:
        path.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
