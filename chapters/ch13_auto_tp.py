"""§9.13 AutoTP: a model that knows nothing of tensor parallelism is cut by reading its code.

Question: which weights may be cut, along which side, and where inside a weight that holds three?

Run time: about 20 s on two cores.   python chapters/ch13_auto_tp.py   (part 3 needs transformers)

You will see a fused weight cut right and wrong with the attention of both, the plan of four architectures
side by side, the same layers under names that say nothing, and a cut GPT that trains like the whole one.

Chapter against source: in DeepSpeed strided_copy serves inference kernels and cuts equal thirds; here it cuts
every packing. DeepSpeed's tp_parser takes the linear before each norm as row-parallel, plus a list of names;
here the code of forward is followed.
"""

from __future__ import annotations

import torch
from torch import nn

import ds_lite
from ds_lite import comm, toy
from ds_lite.launch import run
from ds_lite.tensor_parallel.empty_model import empty_model
from ds_lite.tensor_parallel.fused_qkv import FusedLayout, Heads, strided_copy
from ds_lite.tensor_parallel.policy import make_plan

HEADS = Heads(query=4, kv=4, width=2)
MODELS = ("LlamaForCausalLM", "GPT2LMHeadModel", "GPTNeoXForCausalLM", "FalconForCausalLM")
CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "SGD", "params": {"lr": 0.5}},
    "tensor_parallel": {"autotp_size": 2},
}


def main() -> None:
    where_the_heads_lie()
    right_and_wrong()
    four_architectures()
    names_play_no_part()
    two_ranks_train()
    print("\nNext: the lab, python -m ds_lite lab 2 --nproc 4")


def where_the_heads_lie() -> None:
    print("1 24 rows hold q, k and v of 4 heads, 2 rows each. Predict: which rows has rank 0 of 2?\n")
    for name, layout in {"GPT-2": FusedLayout(), "Bloom, GPT-NeoX": FusedLayout(blocks=None)}.items():
        mine = [row for start, stop in layout.rows(HEADS, 2)[0] for row in range(start, stop)]
        print(f"{name:<16} {layout.describe():<22} {mine}")
    print("as one block it would be rows 0 to 11 for all: right for Bloom alone")


def right_and_wrong() -> None:
    print("\n2 One token's attention output, 4 heads of 2 columns; ranks 0 and 1 side by side:\n")
    generator = torch.Generator().manual_seed(9)
    x, weight = (torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in ((3, 8), (8, 24)))
    whole = attention(x @ weight, heads=4)
    cuts = {"heads, then ranks": FusedLayout().rows(HEADS, 2), "one block": (((0, 12),), ((12, 24),))}
    print(f"{'not cut':<18} {whole[0].numpy().round(2)}")
    for name, ranges in cuts.items():
        parts = [attention(x @ strided_copy(weight, rows, dim=1), heads=2) for rows in ranges]
        joined = torch.cat(parts, dim=1)
        print(f"{name:<18} {joined[0].numpy().round(2)}  off by {float((joined - whole).abs().max()):.2g}")
    print("no shape is wrong and nothing complains: rank 0 takes queries for keys")


def four_architectures() -> None:
    print("\n3 Four architectures. Predict: what is summed over the ranks in each block?\n")
    plans = {name: make_plan(empty_model(name), 2) for name in MODELS}
    for kind, what in (("row", "summed"), ("column", "cut"), ("shared", "cut, and k v kept by all")):
        print(f"{what}:")
        for name, plan in plans.items():
            rows = dict.fromkeys(row.split(".", 3)[-1] for row in plan.names(kind) if ".0." in row)
            print(f"  {name:<20}{', '.join(rows) or '-'}")
    total, kept = plans["LlamaForCausalLM"].shares(empty_model("LlamaForCausalLM"))
    print(f"Llama 7B: of {total:,} parameters each of 2 ranks holds {kept[0]:,}")
    print("python -m ds_lite autotp LlamaForCausalLM --tp 2 prints every line and its reason")


class Block(nn.Module):
    """An attention without names."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads = 4
        self.a, self.b, self.c, self.d = (nn.Linear(8, 8) for _ in range(4))
        self.gate, self.norm = nn.Linear(8, 8), nn.LayerNorm(8)

    def forward(self, x):
        q, k, v = (layer(x).unflatten(-1, (-1, 2)).transpose(1, 2) for layer in (self.d, self.b, self.c))
        mixed = (q @ k.transpose(-1, -2)).softmax(-1) @ v
        return self.norm(x + torch.sigmoid(self.gate(x)) * self.a(mixed.transpose(1, 2).flatten(2)))


def names_play_no_part() -> None:
    print("\n4 Nobody's names: d, b and c feed heads, a the residual. Predict: what becomes of gate?\n")
    block = Block()
    for name, kind, _, after, reason in make_plan(block, 2).rows(block):
        print(f"{name:<5} {kind:<7} {after:<4} {reason}")


def two_ranks_train() -> None:
    print("\n5 The toy GPT, on two ranks and on one. Predict: how many all-reduces has a block?\n")
    (alone,), (first, second) = run(train, 1), run(train, 2)
    print("step       one process     two ranks")
    for step, (one, two) in enumerate(zip(alone[0], first[0], strict=True)):
        print(f"{step:>4} {one:>15.10f} {two:>13.10f}")
    print(
        f"all-reduces in 2 blocks: {first[1]} forward, {first[2]} backward; one process: {alone[1]}, "
        f"{alone[2]}"
    )
    print(
        f"query weight on rank 0: {first[3]} of {alone[3]}; every rank the same loss: {first[0] == second[0]}"
    )


def train() -> tuple[list[float], int, int, tuple[int, ...]]:
    model = toy.GPT(toy.Shape(width=12, num_heads=3, num_blocks=2, context=6, vocabulary=11)).double()
    degree = {"tensor_parallel": {"autotp_size": comm.get_world_size()}}
    engine = ds_lite.initialize(model=model, config={**CONFIG, **degree})[0]
    tokens, losses = torch.arange(14).view(2, 7) % 11, []
    for _ in range(3):
        with comm.record() as forward:
            loss = toy.loss_fn(engine(tokens[:, :-1]), tokens[:, 1:])
        with comm.record() as backward:
            engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    calls = [ledger.total(axis="model").calls for ledger in (forward, backward)]
    return losses, *calls, tuple(model.blocks[0].attention.query.weight.shape)


def attention(qkv: torch.Tensor, heads: int) -> torch.Tensor:
    q, k, v = (part.reshape(3, heads, 2).transpose(0, 1) for part in qkv.chunk(3, dim=1))
    return ((q @ k.transpose(1, 2)).softmax(dim=-1) @ v).transpose(0, 1).flatten(1)


if __name__ == "__main__":
    main()
