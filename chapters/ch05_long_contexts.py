"""§9.5 Sequence parallelism: what a long context costs, and what of it more ranks take away.

Question: at 32K, 128K, 1M tokens, what grows with the tokens, what with their square, and what does one line
in the config change?

Run time: about 15 s on two cores.   python chapters/ch05_long_contexts.py

You will see the bytes that each part of a model keeps from forward to backward as its sequence grows, the
same sequence on one, two and four ranks, and a model that trains the same whether it is spread or not.

Chapter against source: the T x T matrix is what an attention written out keeps; one by a memory-efficient
kernel keeps nothing of it, so at long contexts logits and activations fill the card first. And in DeepSpeed
the key `sequence_parallel_size` makes groups only: attention, batch and loss stay the script's to change.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import ds_lite
from ds_lite import toy
from ds_lite.launch import run

HEADS, WIDTH, VOCABULARY = 4, 64, 2048
KIB = 1024
SHAPE = toy.Shape(width=48, num_heads=4, num_blocks=2, context=512, vocabulary=64)
Ranks = dict[int, list[tuple[int, list[float], int]]]  # by sp, of each rank: bytes kept, losses, parameters
CONFIG = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "SGD", "params": {"lr": 0.5}}}


def main() -> None:
    what_grows()
    how_far_one_card_goes()
    one_line(what_ranks_take_away())
    print("\nNext: chapters/ch14_ulysses.py   Lab: python -m ds_lite lab 2 --nproc 4")


def kept_bytes(forward: Callable[[], Tensor], weights: tuple[Tensor, ...] = ()) -> int:
    """Bytes that a forward keeps for its backward, each storage once, without weights."""
    sizes: dict[int, int] = {}
    known = {weight.untyped_storage().data_ptr() for weight in weights}

    def pack(x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        if storage.data_ptr() not in known:
            sizes[storage.data_ptr()] = storage.nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        forward()
    return sum(sizes.values())


def by_hand(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    future = torch.ones(q.shape[-2], q.shape[-2], dtype=torch.bool).triu(1)
    return (q @ k.transpose(-1, -2)).masked_fill(future, -torch.inf).softmax(-1) @ v


def by_kernel(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def parts(tokens: int) -> dict[str, int]:
    """KiB kept by each part of a model for one sequence of float32 numbers."""
    torch.manual_seed(0)
    qkv = [torch.randn(1, HEADS, tokens, WIDTH // HEADS, requires_grad=True) for _ in range(3)]
    x = torch.randn(1, tokens, WIDTH, requires_grad=True)
    mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
    head, labels = nn.Linear(WIDTH, VOCABULARY), torch.zeros(tokens, dtype=torch.long)
    inputs = tuple(qkv), (*mlp.parameters(), x), (*head.parameters(), x)
    return {
        "attention written out": kept_bytes(lambda: by_hand(*qkv), inputs[0]) // KIB,
        "attention by a kernel": kept_bytes(lambda: by_kernel(*qkv), inputs[0]) // KIB,
        "MLP": kept_bytes(lambda: mlp(x), inputs[1]) // KIB,
        "logits and loss": kept_bytes(lambda: F.cross_entropy(head(x)[0], labels), inputs[2]) // KIB,
    }


def what_grows() -> None:
    print("1 KiB kept for backward beside the inputs. Predict: which row grows fourfold per column?\n")
    lengths = (256, 512, 1024, 2048)
    columns = [parts(tokens) for tokens in lengths]
    print(f"{'tokens':<22}" + "".join(f"{tokens:>9,}" for tokens in lengths) + "   per doubling")
    for name in columns[0]:
        row = [column[name] for column in columns]
        print(f"{name:<22}" + "".join(f"{kib:>9,}" for kib in row) + f"{row[-1] / row[-2]:>11.1f} x")


def how_far_one_card_goes() -> None:
    print("\n2 A model of 8B: 32 layers, 32 heads, width 4,096, vocabulary 128,256; bf16, checkpointed.")
    print("  Predict: which of these is the first to fill 80 GiB?\n")
    print(f"{'tokens':>9}{'one T x T matrix':>20}{'logits in float32':>20}{'inputs of 32 layers':>22}")
    for tokens in (32 << 10, 128 << 10, 1 << 20):
        square, logits, inputs = 32 * 2 * tokens**2, 4 * tokens * 128_256, 32 * 2 * tokens * 4096
        row = zip((square, logits, inputs), (16, 16, 18))
        print(f"{tokens:>9,}" + "".join(f"{size / 2**30:>{width},.0f} GiB" for size, width in row))
    print("a matrix for each layer in turn; a kernel makes none of them, tiles make no whole logits (9.14)")


def one_step(sp: int) -> tuple[int, list[float], int]:
    """Three training steps with sp ranks for a sequence."""
    torch.manual_seed(1)
    model = toy.GPT(SHAPE).double()
    engine = ds_lite.initialize(model=model, config={**CONFIG, "sequence_parallel_size": sp})[0]
    tokens, losses = torch.randint(0, 64, (2, 513), generator=torch.Generator().manual_seed(2)), []
    engine(tokens[:, :-1])  # the first call also runs a few tokens whole and spread, to compare
    kept = kept_bytes(lambda: engine(tokens[:, :-1]), tuple(model.parameters()))
    for _ in range(3):
        loss = toy.loss_fn(engine(tokens[:, :-1]), tokens[:, 1:])
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return kept, losses, sum(weight.numel() for weight in model.parameters())


def what_ranks_take_away() -> Ranks:
    print("\n3 512 tokens, on one, two and four ranks. Predict: what does not shrink?\n")
    ranks = {size: run(one_step, size, size) for size in (1, 2, 4)}
    print("\nranks   KiB kept on a rank   of one rank's   parameters on a rank")
    alone = ranks[1][0][0]
    for size, each in ranks.items():
        print(f"{size:>5}{each[0][0] // KIB:>21,}{each[0][0] / alone:>16.2f}{each[0][2]:>23,}")
    print("weights are whole on every rank: that is for ZeRO and the other axes")
    return ranks


def one_line(ranks: Ranks) -> None:
    print('\n4 "sequence_parallel_size": 2. Predict: in which digit do the losses differ?\n')
    print("step     one rank          two ranks         four ranks")
    for step, losses in enumerate(zip(*(each[0][1] for each in ranks.values()))):
        print(f"{step:>4}" + "".join(f"{loss:>18.12f}" for loss in losses))
    truth = ranks[1][0][1]
    largest = max(abs(a - b) for each in ranks.values() for one in each for a, b in zip(one[1], truth))
    print(f"within 1e-10, on every rank: {largest < 1e-10}")


if __name__ == "__main__":
    main()
