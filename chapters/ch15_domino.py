"""§9.15 Domino: tensor parallelism whose sums run while another part of the batch is computed.

Question: two sums a layer stop every rank, forward and backward; what can be done while they run?

Run time: about 15 s on two cores.   python chapters/ch15_domino.py

You will see which sum backward needs, the order in which sums are started and waited for with and without
Domino, the same bytes in other messages, and a model that takes part by one word in its config.

Chapter against source: it is not the column layer's forward that is summed, but the row layer's; and that sum
is waited for in the same forward, before the residual is added, not in backward. What backward waits for is
the sum of its own, of the column layer's input gradient.
"""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import Tensor, nn

import ds_lite
from ds_lite import comm, toy
from ds_lite.domino import DominoTransformer
from ds_lite.domino.lanes import Lanes
from ds_lite.launch import run

A = B = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
WIDTH, TOKENS, BATCH = 16, 6, 4
CONFIG = {"train_micro_batch_size_per_gpu": 4, "optimizer": {"type": "SGD", "params": {"lr": 0.5}}}


def main() -> None:
    which_sums()
    what_starts_when()
    one_word()
    print("\nNext: chapters/ch16_what_to_take_away.py   Bench: labs/bench/domino.py   Lab: ds-lite lab 2")


def which_sums() -> None:
    print("1 y = x A B on two ranks, A by columns, B by rows, x = (1, 1). Predict: what is summed?\n")
    x = torch.ones(1, 2)
    parts = [x @ A[:, r : r + 1] @ B[r : r + 1] for r in range(2)]
    grads = [torch.ones(1, 2) @ B[r : r + 1].T @ A[:, r : r + 1].T for r in range(2)]
    for what, each in (("y", parts), ("dL/dx", grads)):
        rows = [row[0].tolist() for row in (*each, each[0] + each[1])]
        print(f"{what:<6} rank 0 {rows[0]}  rank 1 {rows[1]}  sum {rows[2]}")
    print("forward sums what the rows gave, backward what the columns' inputs need: two sums each a layer")


def stack(group: comm.ProcessGroup, parts: int, *, intra: bool = False) -> DominoTransformer:
    mpu = SimpleNamespace(
        get_tensor_model_parallel_group=lambda: group,
        get_tensor_model_parallel_world_size=lambda: comm.get_world_size(group),
    )
    config = SimpleNamespace(
        hidden_size=WIDTH,
        num_attention_heads=4,
        ffn_hidden_size=32,
        num_layers=1,
        params_dtype=torch.float64,
        perform_initialization=True,
        init_method=lambda weight: nn.init.normal_(weight, std=0.2),
        output_layer_init_method=lambda weight: nn.init.normal_(weight, std=0.2),
        domino_intra_layer_overlap=intra,
    )
    torch.manual_seed(5)
    return DominoTransformer(config, mpu, None, parts=parts)


def watch(model: DominoTransformer, lanes: Lanes) -> None:
    """Note each linear layer when it is computed, forward and backward, and for which part of the batch."""
    for name in ("query_key_value", "dense", "linear_fc1", "linear_fc2"):
        calls: list[int] = []

        def noted(
            module: nn.Module, args: object, output: tuple, name: str = name, calls: list = calls
        ) -> None:
            part = len(calls)
            calls.append(part)
            lanes.note(f"part {part} {name}")
            output[0].register_hook(lambda gradient: lanes.note(f"part {part} {name} backward"))

        getattr(model.layers[0], name).register_forward_hook(noted)


def one_layer(parts: int) -> tuple[list[str], int, int, Tensor]:
    """What one layer did in order, messages, bytes sent, and its output."""
    group = comm.new_group([0, 1], "model")
    model, lanes = stack(group, parts), Lanes()
    watch(model, lanes)
    x = torch.randn(TOKENS, BATCH, WIDTH, generator=torch.Generator().manual_seed(6), dtype=torch.float64)
    with comm.record() as ledger, lanes.recording():
        y = model(x.requires_grad_())
        y.square().sum().backward()
    total = ledger.total(operation="all_reduce")
    return lanes.order(), total.calls, total.sent, y.detach()


def what_starts_when() -> None:
    print("\n2 One layer, two halves of a batch. Predict: what is computed while a sum is under way?\n")
    plain, domino = run(one_layer, 2, 1)[0], run(one_layer, 2, 2)[0]
    print(f"{'computed':<34}sums")
    for line in domino[0]:
        print(line if line.startswith("part") else f"{'':<34}{line}")
    gaps = {"one part": between(plain[0]), "two parts": between(domino[0])}
    print("\nlinear layers between the start of a sum and the wait for it, in this order:")
    for name, counts in gaps.items():
        print(f"  {name:<11}{counts}")
    print(f"messages {plain[1]} and {domino[1]}, bytes sent {plain[2]:,} and {domino[2]:,}")
    print(f"the output is the same: {(plain[3] - domino[3]).abs().max().item() < 1e-10}")


def between(order: list[str]) -> list[int]:
    starts = {
        line.removeprefix("start "): place for place, line in enumerate(order) if line.startswith("start")
    }
    return [
        sum(line.startswith("part") for line in order[place : order.index(f"wait {name}")])
        for name, place in starts.items()
    ]


def one_word() -> None:
    print('\n3 The toy GPT, "tensor_parallel": {"autotp_size": 2, "domino": true}. Predict: what changes?\n')
    losses = {name: run(train, 2, name == "domino")[0] for name in ("classic", "domino")}
    print("step          classic           domino")
    for step, (classic, domino) in enumerate(zip(losses["classic"][0], losses["domino"][0])):
        print(f"{step:>4} {classic:>16.10f} {domino:>16.10f}")
    print(f"all-reduces of a step: {losses['classic'][1]} and {losses['domino'][1]}")


def train(domino: bool) -> tuple[list[float], int]:
    model = toy.GPT(toy.Shape(width=12, num_heads=3, num_blocks=2, context=6, vocabulary=11)).double()
    config = {**CONFIG, "tensor_parallel": {"autotp_size": 2, "domino": domino}}
    engine = ds_lite.initialize(model=model, config=config)[0]
    tokens, losses, calls = torch.arange(28).view(4, 7) % 11, [], 0
    for _ in range(3):
        with comm.record() as ledger:
            loss = toy.loss_fn(engine(tokens[:, :-1]), tokens[:, 1:])
            engine.backward(loss)
        engine.step()
        losses.append(loss.item())
        calls = ledger.total(axis="model", operation="all_reduce").calls
    return losses, calls


if __name__ == "__main__":
    main()
