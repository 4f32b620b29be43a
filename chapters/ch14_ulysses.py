"""§9.14 Ulysses and ALST: tokens become heads for the time of an attention, and long sequences go in tiles.

Question: what travels when a sequence is spread, what must be done before it is cut, what is left to save?

Run time: about 15 s on two cores.   python chapters/ch14_ulysses.py

You will see the shapes on both sides of each exchange, the volumes of three ways to spread a sequence, labels
and means that are right and wrong, and the bytes that wait for backward: plain, tiled, chunked, offloaded.

Chapter against source: DeepSpeed makes four exchanges an attention, three before (q, k, v) and one after;
the first three are one message here. ALST and FPDT are two works in two files: ALST, with tiled MLP and loss,
is `runtime/sequence_parallel/ulysses_sp.py`; `sequence/fpdt_layer.py` is FPDT's chunked attention.
`auto_sp.py` belongs to neither, and DeepSpeed's `initialize` never calls it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ds_lite import comm
from ds_lite.checkpointing import checkpoint
from ds_lite.launch import run
from ds_lite.sequence.chunked import chunked_attention
from ds_lite.sequence.data import shard_batch, shift_labels
from ds_lite.sequence.host_store import HostStore
from ds_lite.sequence.layer import DistributedAttention
from ds_lite.sequence.offload import checkpoint_to_host
from ds_lite.sequence.tiled import tiled, tiled_loss

RANKS, BATCH, TOKENS, HEADS, WIDTH = 4, 2, 1024, 8, 64
LENGTHS, MODEL, VOCABULARY, PIECES, KIB = (512, 1024, 2048, 4096), 64, 2048, 8, 1024


def main() -> None:
    two_exchanges()
    three_ways()
    before_the_cut()
    what_waits_for_backward()
    print("\nNext: chapters/ch15_domino.py   Lab: python -m ds_lite lab 2 --nproc 4")


def two_exchanges() -> None:
    print(f"1 {TOKENS} tokens, {HEADS} heads, {RANKS} ranks. Predict: which shape does the attention see?\n")
    shapes, sent, calls = run(one_attention, RANKS)[1]
    for name, shape in shapes.items():
        print(f"{name:<28}{shape}")
    print(f"rank 1 sends {sent:,} elements, in {calls} collectives")
    whole = BATCH * TOKENS * HEADS * WIDTH
    print(f"4 B T H (sp-1)/sp^2 = {4 * whole * (RANKS - 1) // RANKS**2:,}, and as many in backward")


def one_attention() -> tuple[dict[str, list[int]], int, int]:
    shapes: dict[str, list[int]] = {}

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        shapes["all tokens, some heads"] = list(q.shape)
        out = F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), is_causal=True)
        return out.transpose(1, 2)

    group = comm.new_group(list(range(RANKS)), "seq")
    layer = DistributedAttention(attention, group, scatter_idx=2, gather_idx=1)
    q, k, v = torch.randn(3, BATCH, TOKENS // RANKS, HEADS, WIDTH)
    shapes["q, k and v of a rank"] = list(q.shape)
    layer(q, k, v, 0)  # the first call also compares the ranks' shapes
    with comm.record() as ledger:
        shapes["what it gives"] = list(layer(q, k, v, 0).shape)
    total = ledger.total(operation="all_to_all")
    return shapes, total.sent // q.element_size(), total.calls


def three_ways() -> None:
    print("\n2 Elements that a rank sends in the forward of a layer, in units of B T H. Predict: which of")
    print("  them shrink when ranks are added?\n")
    ways: dict[str, Callable[[int], float]] = {
        "Ulysses, two exchanges": lambda p: 4 * (p - 1) / p**2,
        "ring, keys and values": lambda p: 2 * (p - 1) / p,
        "Megatron, two gathers and scatters": lambda p: 4 * (p - 1) / p,
    }
    print(f"{'ranks':<36}" + "".join(f"{p:>8}" for p in (2, 4, 8, 16)))
    for name, volume in ways.items():
        print(f"{name:<36}" + "".join(f"{volume(p):>8.3f}" for p in (2, 4, 8, 16)))
    print("Ulysses needs a head for each rank; the ring does not, and hides its sends behind attention")


def before_the_cut() -> None:
    print("\n3 Tokens 1 to 8 on two ranks. Predict: what shall token 4 be followed by?\n")
    ids = torch.arange(1, 9).unsqueeze(0)
    shards = [shard_batch({"input_ids": ids, "labels": ids}, sp_rank=r, sp_size=2) for r in range(2)]
    late = [shift_labels(half)[0].tolist() for half in ids.split(4, dim=1)]
    right = [shard["shift_labels"][0].tolist() for shard in shards]
    print(f"shifted, then cut:   {right[0]} {right[1]}")
    print(f"cut, then shifted:   {late[0]} {late[1]}   -100 is no label")
    print(f"positions of rank 1: {shards[1]['position_ids'][0].tolist()}")
    losses = [torch.tensor([1.0, 2.0, 3.0]), torch.tensor([10.0])]
    means, tokens = sum(loss.mean().item() for loss in losses) / 2, torch.cat(losses).mean().item()
    print(f"losses 1 2 3 and 10: the mean of the ranks' means is {means}, that of the tokens {tokens}")


def kept_kib(forward: Callable[[], Tensor], inputs: list[Tensor], store: HostStore) -> tuple[int, int]:
    """KiB on the device and in host memory that a forward keeps for backward beside its inputs."""
    sizes: dict[int, int] = {}

    def pack(x: Tensor) -> Tensor:
        sizes[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        out = forward()
    on_host = store.bytes_now if out.requires_grad else 0  # while the graph lives
    known = {x.untyped_storage().data_ptr() for x in inputs}
    kept = sum(size for place, size in sizes.items() if place not in known)
    return (kept - on_host if kept else 0) // KIB, on_host // KIB


def kept_by(tokens: int) -> dict[str, tuple[int, int]]:
    q, k, v = (torch.randn(1, 4, tokens, 16, requires_grad=True) for _ in range(3))
    x, labels = torch.randn(1, tokens, MODEL, requires_grad=True), torch.zeros(1, tokens, dtype=torch.long)
    mlp = nn.Sequential(nn.Linear(MODEL, 4 * MODEL), nn.GELU(), nn.Linear(4 * MODEL, MODEL))
    head, store = nn.Linear(MODEL, VOCABULARY, bias=False), HostStore()
    chunks = {"chunks": PIECES, "is_causal": True}
    forwards: dict[str, Callable[[], Tensor]] = {
        "attention written out": lambda: (q @ k.mT).softmax(-1) @ v,
        "  in 8 chunks": lambda: chunked_attention(q, k, v, **chunks),
        "  and offloaded": lambda: chunked_attention(q, k, v, store=store, **chunks),
        "MLP": lambda: mlp(x),
        "  in 8 tiles": lambda: tiled(mlp, x, PIECES),
        "logits and loss": lambda: F.cross_entropy(head(x)[0], labels[0]),
        "  tiled": lambda: tiled_loss(head, x, labels, tiles=PIECES),
        "a layer's checkpoint": lambda: checkpoint(mlp, x * 1),
        "  offloaded": lambda: checkpoint_to_host(mlp, x * 1, store=store),
    }
    inputs = [q, k, v, x, *mlp.parameters(), *head.parameters()]
    return {name: kept_kib(forward, inputs, store) for name, forward in forwards.items()}


def what_waits_for_backward() -> None:
    print("\n4 KiB kept from forward to backward, beside the inputs. Predict: where is a square left?\n")
    columns = [kept_by(tokens) for tokens in LENGTHS]
    print(f"{'tokens':<24}" + "".join(f"{tokens:>9,}" for tokens in LENGTHS) + "  on the host, last")
    for name in columns[0]:
        print(f"{name:<24}" + "".join(f"{column[name][0]:>9,}" for column in columns), end="")
        print(f"{columns[-1][name][1]:>19,}" if "offloaded" in name else "")


if __name__ == "__main__":
    main()
