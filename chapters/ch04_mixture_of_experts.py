"""§9.4 MoE: expert parallelism.

Question: a layer has more experts than a rank can hold; who holds which, what travels, who keeps them fed?

Run time: about 30 s on two cores.   python chapters/ch04_mixture_of_experts.py

You will see who shares experts with whom, a mixture on four ranks beside one process, the rows that travel
between its ranks, and the same model trained on real text with and without l_aux.

Chapter against source: `zero_optimization` of DeepSpeed has neither `moe_min_capacity` nor
`moe_layer_size_threshold`; here the first is the default min_capacity of layers that set none, and the second
keeps small layers out of ZeRO's shards. The text says that without l_aux experts die within a few steps: they
do in 4, at step 10 every token wants the same one, but some come back to life later.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

import torch

import ds_lite
from ds_lite import comm, toy
from ds_lite.expert_groups import expert_rank_lists
from ds_lite.launch import run
from ds_lite.toy_moe import Mixture, MoEGPT, MoELoss

LAW = 1e-10  # what N processes may differ from one in float64
SHAPE = toy.Shape(width=12, num_heads=3, num_blocks=2, context=10)
MIXTURE = {"num_experts": 4, "k": 2, "drop_tokens": False, "top2_2nd_expert_sampling": False}
RANKS, EP, BATCH, STEPS, CLIP, LOSS = 4, 2, 3, 3, 0.5, MoELoss(0.01)
TEXT = torch.randint(0, 256, (500,), generator=torch.Generator().manual_seed(7)).byte()
READER = toy.Shape(width=32, num_heads=2, num_blocks=1, context=32)
READERS, MOMENTS = 16, (0, 5, 10, 20, 50, 149)  # sequences in a batch; steps to look at


Run = tuple[list[float], list[float], dict[str, torch.Tensor], comm.Ledger | None]  # losses, norms, weights


def main() -> None:
    who_holds_what()
    ranks = run(one_rank, RANKS)
    the_one_law(ranks)
    what_travels([rank[3] for rank in ranks])
    who_keeps_them_fed()
    print("\nNext: chapters/ch07_megatron.py   Lab: python -m ds_lite lab 2 --nproc 4")


def who_holds_what() -> None:
    print("1 Predict: eight experts, ep_size=4, eight ranks; who has the same experts as rank 1?\n")
    print("rank  experts  exchanges tokens with  adds up gradients with")
    groups, copies = expert_rank_lists([range(8)], 4)
    for rank in range(8):
        (peers,), (same,) = ([ranks for ranks in lists if rank in ranks] for lists in (groups, copies))
        first = 2 * peers.index(rank)
        print(f"{rank:>4}  {first}, {first + 1}     {peers!s:<21}  {same}")
    print("experts are no axis of the world: the data ranks are cut into runs of ep_size")


def the_one_law(ranks: list[Run]) -> None:
    print(
        f"\n2 {RANKS} ranks, ep_size={EP}, ZeRO-1. Predict: is an expert's gradient divided by 2 or by 4?\n"
    )
    losses, norms, weights, _ = one_process()
    print("      loss                  norm before clipping")
    print("step  one process  4 ranks  one process  4 ranks")
    for step in range(STEPS):
        mean = sum(rank[0][step] for rank in ranks) / RANKS
        numbers = losses[step], mean, norms[step], ranks[0][1][step]
        print("{:>4}  {:>11.4f}  {:>7.4f}  {:>11.4f}  {:>7.4f}".format(step, *numbers))
    found = [pair for rank in ranks for pair in rank[2].items()]
    is_equal = all(float((value - weights[name]).abs().max()) <= LAW for name, value in found)
    print(f"{len(dict(found))} of {len(weights)} weights, all within {LAW:g}: {is_equal}")
    print("by 4, like all others: the exchange's way back has summed over its two ranks already")


def what_travels(ledgers: list[comm.Ledger]) -> None:
    passes, rows = RANKS * SHAPE.num_blocks, RANKS * SHAPE.num_blocks * 2 * BATCH * SHAPE.context
    print(f"\n3 The last step, all ranks: {rows} choices, none dropped. Predict: the bytes they cost?\n")
    found = [ledger.total("expert", "all_to_all") for ledger in ledgers]
    print(f"{sum(row.calls for row in found)} all-to-alls, {sum(row.payload for row in found):,} bytes")
    print("a row of 8H bytes, also one that stays, goes there, back, and both ways again; E counts go ahead:")
    formula = 4 * rows * 8 * SHAPE.width + passes * 8 * MIXTURE["num_experts"]
    print(f"4 x {rows} x 8H + {passes} x 8E = {formula:,}")


def who_keeps_them_fed() -> None:
    print("\n4 Predict: eight experts, one for each token, 64 places in each; does every expert get some?\n")
    text, idle = toy.load_text(400_000).train, {}
    for coefficient in (0.0, 0.02):
        loads = fed(text, coefficient)
        print(f"loss + {coefficient} l_aux: who wants which expert, of {READERS * READER.context} tokens")
        for step in MOMENTS:
            print(f"step {step:>4}  " + "  ".join(f"{load:>4}" for load in loads[step]))
        idle[coefficient] = sum(load.count(0) for load in loads) / len(loads)
        print(f"experts that nobody wants, mean of {len(loads)} steps: {idle[coefficient]:.2f}\n")
    print(f"with l_aux at most a third as many: {idle[0.02] <= idle[0.0] / 3}")


def fed(text: torch.Tensor, coefficient: float) -> list[list[int]]:
    model, loads = MoEGPT(READER, Mixture(num_experts=8, k=1, capacity_factor=1.0), seed=3), []
    adam = torch.optim.AdamW(model.parameters(), lr=3e-3)
    config = {"train_micro_batch_size_per_gpu": READERS, "steps_per_print": 10**9}
    engine, *_ = ds_lite.initialize(model=model, optimizer=adam, config=config)
    model.blocks[0].moe.register_forward_hook(lambda layer, inputs, out: loads.append(out[2].tolist()))
    data = toy.batches(text, num_micro_batches=1, size=READERS, context=READER.context)
    for inputs, labels in islice(data, MOMENTS[-1] + 1):
        engine.backward(MoELoss(coefficient)(engine(inputs), labels))
        engine.step()
    return loads


def micro_batches(replica: int, replicas: int) -> Iterator[toy.MicroBatch]:
    sizes = {"num_micro_batches": RANKS // replicas, "size": BATCH, "context": SHAPE.context}
    return toy.batches(TEXT, replica=replica, **sizes)


def one_rank() -> Run:
    model = MoEGPT(SHAPE, Mixture(**MIXTURE, ep_size=EP), seed=7).double()
    config = {"train_micro_batch_size_per_gpu": BATCH, "gradient_clipping": CLIP, "steps_per_print": 10**9}
    config |= {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}, "zero_optimization": {"stage": 1}}
    engine, *_ = ds_lite.initialize(model=model, config=config)
    losses, norms = [], []
    for inputs, labels in islice(micro_batches(engine.grid.global_rank, RANKS), STEPS):
        with comm.record() as ledger:
            loss = LOSS(engine(inputs), labels)
            engine.backward(loss)
            engine.step()
        losses.append(loss.item())
        norms.append(engine.get_global_grad_norm())
    return losses, norms, {name: parameter.detach() for name, parameter in model.named_parameters()}, ledger


def one_process() -> Run:
    model, losses, norms = MoEGPT(SHAPE, Mixture(**MIXTURE), seed=7).double(), [], []
    optimizer, data = torch.optim.AdamW(model.parameters(), lr=1e-3), micro_batches(0, 1)
    for _ in range(STEPS):
        loss = torch.stack([LOSS(model(x), y) for x, y in islice(data, RANKS)]).mean()
        loss.backward()
        losses.append(loss.item())
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP).item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, norms, {name: parameter.detach() for name, parameter in model.named_parameters()}, None


if __name__ == "__main__":
    main()
