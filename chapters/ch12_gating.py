"""§9.12 The parameters of a mixture: capacity, random token selection, l_aux, the exchange.

Question: an expert is full; who is dropped, what does the loss say of it, and how do tokens come back?

Run time: about 10 s on two cores.   python chapters/ch12_gating.py

You will see capacities to check by hand, what a capacity factor drops and what it wastes, which positions
lose without random selection, three tokens whose l_aux is below 1, and an exchange that undoes itself.

Chapter against source: C is never below min_capacity, and counts each choice: 2 T/E * factor for top-2.
Random selection is on already, and for top-1 only; without it DeepSpeed keeps the tokens that a sort of equal
numbers happens to put first, here the first come. l_aux does not lie in [1, infinity): see 4.

Legend: T tokens, E experts, K choices of a token, C capacity.
"""

from __future__ import annotations

import torch

from ds_lite import comm
from ds_lite.launch import run
from ds_lite.moe.dispatch import _AllToAll
from ds_lite.moe.gating import load_balancing_loss, route_top1, route_topk
from ds_lite.moe.noise import Purpose, TokenNoise
from ds_lite.moe.queues import expert_capacity

T, E, ROUNDS = 64, 4, 200
CHOSEN = torch.tensor([1, 1, 1, 1, 0, 0, 0, 0])
PULL = torch.tensor([1.0, 0.5, 0.0, 0.0])  # expert 0 is liked best


def main() -> None:
    capacities()
    what_a_factor_costs()
    which_positions_lose()
    the_loss_by_hand()
    there_and_back()
    print("\nNext: chapters/ch13_auto_tp.py   Lab: python -m ds_lite lab 2 --nproc 4")


def capacities() -> None:
    print("1 Predict: 10 tokens, 4 experts, factor 1.0, top-1: how many slots has an expert?\n")
    print("factor   top-1  top-2   at least 4: top-1")
    for factor in (1.0, 1.25, 2.0):
        sizes = [expert_capacity(10, 4, capacity_factor=factor, min_capacity=0, choices=k) for k in (1, 2)]
        floor = expert_capacity(10, 4, capacity_factor=factor, min_capacity=4)
        print(f"{factor:>6}   {sizes[0]:>5}  {sizes[1]:>5}   {floor:>17}")
    print("C = max(ceil(K T/E factor), min_capacity); T are the tokens of this rank")


def what_a_factor_costs() -> None:
    print(
        f"\n2 {ROUNDS} micro-batches of T={T} for E={E} experts, top-1. Predict: what does factor 1.0 drop?\n"
    )
    wanted = torch.cat(scores()).argmax(dim=1).bincount() / (ROUNDS * T)
    print(
        "wanted: " + ", ".join(f"{share:.1%}" for share in wanted) + "; with equal shares 1.0 drops nothing"
    )
    print("factor   slots   dropped   empty slots   C, the largest")
    for factor in (0.5, 1.0, 1.25, 2.0, None):
        found = [top1(logits, factor) for logits in scores()]
        dropped = sum(int(routing.dropped.sum()) for routing in found) / (ROUNDS * T)
        slots = sum(routing.capacity * E for routing in found)
        empty = 1 - sum(int(routing.kept.sum()) for routing in found) / slots
        largest = max(routing.capacity for routing in found)
        name = "all" if factor is None else factor
        print(f"{name:>6}   {slots / ROUNDS:>5.0f}   {dropped:>7.1%}   {empty:>11.1%}   {largest:>14}")
    print("all: drop_tokens=False, as many slots as the busiest expert needs. In ds_lite no slot is stored:")
    print("only the rows that are kept move and are multiplied")


def which_positions_lose() -> None:
    print("\n3 Factor 1.0. Predict: which quarter of the positions is dropped most, with and without RTS?\n")
    print("who stays at a full expert            quarter 1       2       3       4")
    quarters = {
        "the first, top-1 without RTS": [top1(logits, 1.0) for logits in scores()],
        "a random choice, top-1 with RTS": [top1(z, 1.0, selection(i)) for i, z in enumerate(scores())],
        "the likeliest, top-k with 'probs'": [topk(logits) for logits in scores()],
    }
    for name, found in quarters.items():
        lost = torch.stack([routing.dropped.any(dim=1) for routing in found]).double().mean(dim=0)
        print(f"{name:<36}" + "".join(f"{share:>8.1%}" for share in lost.view(4, -1).mean(dim=1).tolist()))
    print("first come, first served takes the experts from the end; the other two treat all positions alike")


def the_loss_by_hand() -> None:
    print("\n4 l_aux = E * sum over experts of mean(gate) * mean(chosen). Predict: can it be below 1?\n")
    cases = {
        "all alike": [[0.5, 0.5]] * 4,
        "collapsed": [[1.0, 0.0]] * 4,
        "three tokens": [[0.51, 0.49], [0.51, 0.49], [0.0, 1.0]],
        "the least for E=2": [[0.5 + 1e-9, 0.5 - 1e-9]] * 3 + [[0.0, 1.0]],
    }
    for name, rows in cases.items():
        gates = torch.tensor(rows, dtype=torch.float64)
        chosen = torch.bincount(gates.argmax(dim=1), minlength=2)
        products = " + ".join(
            f"{gate:.3f} * {share:.3f}"
            for gate, share in zip(gates.mean(dim=0).tolist(), (chosen / len(gates)).tolist(), strict=True)
        )
        print(f"{name:<18} 2 ({products}) = {float(load_balancing_loss(gates, chosen)):.3f}")
    gates = torch.cat([0.2 * torch.eye(4) + 1e-6, 0.2 * torch.ones(4, 4)], dim=1)
    print(f"E=8, four tokens that barely choose four experts: {load_balancing_loss(gates, CHOSEN):.3f}")
    print("two experts have 7/8 to 2; E have at most E, and the more they are, the closer to 0 it may come")


def there_and_back() -> None:
    print("\n5 Two ranks exchange rows, two for rank 0 and one for rank 1. Predict: what does backward do?\n")
    for rank, (before, after, gradient) in enumerate(run(exchange, 2)):
        print(f"rank {rank}: {before} -> {after}, gradient of 1, 2, ... back: {gradient}")
    print("backward is the exchange the other way, so every row meets its own gradient again")


def scores() -> list[torch.Tensor]:
    """Logits (T, E) of the same micro-batches whenever it is called."""
    generator = torch.Generator().manual_seed(12)
    return [torch.randn(T, E, generator=generator, dtype=torch.float64) + PULL for _ in range(ROUNDS)]


def top1(logits: torch.Tensor, factor: float | None, noise: torch.Tensor | None = None):
    settings = {"capacity_factor": factor or 1.0, "min_capacity": 0, "drop_tokens": factor is not None}
    return route_top1(logits, selection_noise=noise, **settings)


def topk(logits: torch.Tensor):
    return route_topk(logits, 1, capacity_factor=1.0, min_capacity=0, drop_policy="probs")


def selection(step: int) -> torch.Tensor:
    """A number for each token: a function of seed, step, layer and token, so a step can be run again."""
    noise = TokenNoise(seed=7, step=step, layer=0, tokens=torch.arange(T))
    return noise.uniform(Purpose.TOKEN_SELECTION, 1, torch.float64).squeeze(1)


def exchange() -> tuple[list[int], list[int], list[int]]:
    rank = comm.get_rank()
    rows = torch.tensor([[10.0 * rank], [10.0 * rank + 1], [10.0 * rank + 2]], requires_grad=True)
    group = comm.new_group([0, 1], "expert")
    received = [2, 2] if rank == 0 else [1, 1]
    out = _AllToAll.apply(group, rows, [2, 1], received)
    out.backward(torch.arange(1.0, len(out) + 1).unsqueeze(1))
    return tuple([int(x) for x in tensor.flatten().tolist()] for tensor in (rows, out, rows.grad))


if __name__ == "__main__":
    main()
