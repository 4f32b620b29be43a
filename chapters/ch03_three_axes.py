"""§9.3 3D parallelism: ZeRO x TP x PP.

Question: eight processes cut one model along three axes; who talks to whom, and what may change?

Run time: about 30 s on two cores.   python chapters/ch03_three_axes.py

You will see who shares a group with whom, what a tensor-parallel rank keeps of a layer, what a block costs,
and AdamW with clipping under ZeRO-1 and ZeRO-2 beside the same steps in one process.

Chapter against source: DeepSpeed refuses `tp_size` at the top of `tensor_parallel`, it wants `autotp_size`;
here both are read. Its pipeline engine refuses ZeRO-2. Its own tensor parallelism trains since 2025, so TP
need not come from Megatron. MT-NLG was trained by Microsoft and NVIDIA; BigScience's fork trained BLOOM.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

import ds_lite
from ds_lite import comm, toy
from ds_lite.launch import run
from ds_lite.pipe import PipelineModule
from ds_lite.tags import whole

LAW = 1e-10  # what N processes may differ from one in float64
SHAPE = toy.Shape(width=12, num_heads=3, num_blocks=2, context=10)
PP, DP, TP, M, BATCH, STEPS, SEED = 2, 2, 2, 3, 2, 3, 7
ADAM, CLIP = {"lr": 1e-3, "weight_decay": 0.1}, 0.5
TEXT = torch.randint(0, 256, (500,), generator=torch.Generator().manual_seed(SEED)).byte()
LAYERS = "attention.query", "attention.out", "feed_forward.up", "feed_forward.down"


@dataclass
class Run:
    """Losses and norms of the steps, gradients of the first one, weights after the last, and its traffic."""

    losses: list[float]
    norms: list[float]
    tensors: dict[str, torch.Tensor]
    ledger: comm.Ledger
    row: str = ""  # place, groups and number of parameters
    layers: tuple[str, ...] = ()


def main() -> None:
    by_rank = run(train_twice, PP * DP * TP)
    who_and_what([runs[1] for runs in by_rank])
    what_a_block_costs(by_rank[0], by_rank[DP * TP])
    the_one_law(by_rank)
    print("\nNext: chapters/ch04_mixture_of_experts.py   Lab: python -m ds_lite lab 2 --nproc 4")


def who_and_what(ranks: list[Run]) -> None:
    print(f"1 Predict: pipe={PP} x data={DP} x model={TP}; with whom does rank 5 share each axis?\n")
    whole_model = sum(parameter.numel() for parameter in toy.GPT(SHAPE).parameters())
    print(f"rank  place                   pipe    data    model   parameters, of {whole_model:,}")
    print("\n".join(f"{number:>4}  {rank.row}" for number, rank in enumerate(ranks)))
    print("\n2 Predict: three heads of width 4 on two ranks; how many rows of the query does each keep?\n")
    for number, name in enumerate(LAYERS):
        print(f"{name:<18}" + f"\n{'':<18}".join(rank.layers[number] for rank in ranks[:TP]))
    print("a head is never cut; a bias added after the sum is whole on every rank, and counts once")


def what_a_block_costs(first: dict[int, Run], last: dict[int, Run]) -> None:
    print(f"\n3 Calls of one rank in a step of m={M} micro-batches; each stage has one block.\n")
    print(f"{'':<40}ZeRO-1: stage 0, stage 1   ZeRO-2: stage 0, stage 1")
    for key in (
        ("model", "all_reduce", "ForwardPass"),
        ("model", "all_reduce", "BackwardPass"),
        ("data", "reduce_scatter", "ReduceGrads"),
        ("data", "reduce_scatter", "BackwardPass"),
        ("data", "all_gather", "OptimizerStep"),
    ):
        calls = [stage[zero].ledger.total(*key).calls for zero in (1, 2) for stage in (first, last)]
        print("{:<6} {:<15} {:<17}{:>15} {:>8} {:>17} {:>8}".format(*key, *calls))
    print("a block costs 2 each way; stage 0 adds the embedding's forward, stage 1 the head's backward")


def the_one_law(by_rank: list[dict[int, Run]]) -> None:
    print(f"\n4 The one law: {len(by_rank)} processes compute what one computes, to {LAW:g} in float64.\n")
    truth = one_process()
    print("      loss                          norm before clipping")
    print("step  one process  ZeRO-1  ZeRO-2   one process  ZeRO-1  ZeRO-2")
    for step in range(STEPS):
        three = truth, by_rank[0][1], by_rank[0][2]
        numbers = [one.losses[step] for one in three] + [one.norms[step] for one in three]
        print("{:>4}  {:>11.4f}  {:.4f}  {:.4f}   {:>11.4f}  {:.4f}  {:.4f}".format(step, *numbers))
    for zero in (1, 2):
        found = [pair for runs in by_rank for pair in runs[zero].tensors.items()]
        is_equal = all(float((tensor - truth.tensors[name]).abs().max()) <= LAW for name, tensor in found)
        count = f"{len(dict(found))} of {len(truth.tensors)}"
        print(f"ZeRO-{zero}: {count} gradients and weights, all within {LAW:g}: {is_equal}")


def micro_batches(per_replica: int, replica: int) -> Iterator[toy.MicroBatch]:
    """Distinct ones; every layout sees the same in a step."""
    sizes = {"num_micro_batches": per_replica, "size": BATCH, "context": SHAPE.context}
    return toy.batches(TEXT, replica=replica, **sizes)


def train_twice() -> dict[int, Run]:
    """One rank: the same steps under ZeRO-1 and under ZeRO-2."""
    return {zero: train(zero) for zero in (1, 2)}


def train(zero: int) -> Run:
    options = {"loss_fn": toy.loss_fn, "seed_layers": True, "base_seed": SEED, "partition_method": "uniform"}
    model = PipelineModule(toy.parallel_layer_specs(SHAPE), num_stages=PP, **options).double()
    config = {"train_micro_batch_size_per_gpu": BATCH, "gradient_accumulation_steps": M}
    config |= {"optimizer": {"type": "AdamW", "params": ADAM}, "gradient_clipping": CLIP}
    config |= {"zero_optimization": {"stage": zero}, "tensor_parallel": {"tp_size": TP}}
    engine, *_ = ds_lite.initialize(model=model, config=config)
    grid, gradients, losses, norms = engine.grid, engine.gradients, [], []
    engine.compute_gradients(micro_batches(M, grid.get_data_parallel_rank()))
    tensors = {f"gradient of {name}": gradients.full(name) for name in gradients.names()}
    data = micro_batches(M, grid.get_data_parallel_rank())
    for _ in range(STEPS):
        with comm.record() as ledger:
            losses.append(float(engine.train_batch(data)))
        norms.append(engine.get_global_grad_norm())
    tensors |= {name: whole(parameter) for name, parameter in model.named_parameters()}
    groups = "".join(f"{grid.ranks(axis)!s:<8}" for axis in ("pipe", "data", "model"))
    row = f"{grid.place:<24}{groups}{sum(p.numel() for p in model.parameters()):>10,}"
    block = next(layer for layer in model.modules() if isinstance(layer, toy.Block))
    return Run(losses, norms, tensors, ledger, row, tuple(str(block.get_submodule(name)) for name in LAYERS))


def one_process() -> Run:
    """The same in plain torch: all micro-batches, their mean loss, one backward."""
    model = toy.GPT(SHAPE, seed=SEED).double()
    named, data = model.parameters_by_layer(), micro_batches(M * DP, 0)
    optimizer = torch.optim.AdamW(model.parameters(), **ADAM)
    truth = Run([], [], {}, comm.Ledger())
    for _ in range(STEPS):
        loss = torch.stack([toy.loss_fn(model(x), y) for x, y in [next(data) for _ in range(M * DP)]]).mean()
        loss.backward()
        truth.tensors = truth.tensors or {f"gradient of {name}": p.grad.clone() for name, p in named.items()}
        truth.losses.append(loss.item())
        truth.norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP).item())
        optimizer.step()
        optimizer.zero_grad()
    truth.tensors |= {name: parameter.detach() for name, parameter in named.items()}
    return truth


if __name__ == "__main__":
    main()
