"""§9.1 Why ZeRO is not enough.

Question: what does each kind of parallelism divide, and what does it send in return?

Run time: about 15 s on two cores.   python chapters/ch01_why_not_zero_alone.py

You will see the bytes that a rank holds under ZeRO, by formula and in a running engine, then the bytes that
data, pipeline and tensor parallelism send, by formula and in the ledger, and last the formulas at full size.

Chapter against source: ZeRO-1 moves no more than plain data parallelism, and neither does ZeRO-2 with one
micro-batch a step; the all-gathers that slow links cannot carry are those of ZeRO-3. ZeRO-3 is on paper only
here. DeepSpeed's pipeline takes ZeRO 0 and 1; here 2 as well, at m reduce-scatters a step.

Legend: P parameters in n tensors, dp replicas, tp tensor-parallel ranks, m micro-batches of a rank, B
sequences in one, T tokens, H width, L blocks. Every number is float32, the optimizer is Adam.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

import ds_lite
from ds_lite import comm, toy
from ds_lite.launch import run
from ds_lite.pipe import PipelineModule

SHAPE = toy.Shape(width=32, num_heads=4, num_blocks=2, context=16)
RANKS, M, BATCH = 2, 3, 2
ZERO = {"ZeRO-0": 0, "ZeRO-1": 1, "ZeRO-2": 2}
COUNTS = [parameter.numel() for parameter in toy.GPT(SHAPE).parameters()]
P, N = sum(COUNTS), len(COUNTS)


def main() -> None:
    bytes_on_paper()
    found = run(measure, RANKS)
    bytes_in_the_engine(found[0])
    traffic_in_the_ledger(found)
    traffic_at_full_size()
    print("\nNext: chapters/ch02_pipeline_engine.py   Lab: python -m ds_lite lab 2 --nproc 4")


def bytes_held(stage: int, P: float, dp: int) -> list[float]:
    """By formula: stage 1 divides the last, stage 2 and stage 3 one more each."""
    return [size / (dp if stage >= first else 1) for size, first in ((4 * P, 3), (4 * P, 2), (8 * P, 1))]


def bytes_on_paper() -> None:
    print("1 Predict: 7 billion parameters on 64 ranks. How many GB does each hold under ZeRO 0, 1, 2, 3?\n")
    print("GB a rank   dp=1     dp=8    dp=64")
    formulas = "4P + 4P + 8P", "4P + 4P + 8P/dp", "4P + (4P + 8P)/dp", "(4P + 4P + 8P)/dp"
    for stage, formula in enumerate(formulas):
        sizes = "  ".join(f"{sum(bytes_held(stage, 7e9, dp)) / 1e9:7.2f}" for dp in (1, 8, 64))
        print(f"ZeRO-{stage}   {sizes}   {formula}")
    print("activations are in no row: each rank computes every layer, whole, under each of them")


def bytes_in_the_engine(found: dict[str, Train]) -> None:
    print(f"\n2 A GPT of P={P:,} in n={N} tensors on {RANKS} ranks, in the second step, at the most.\n")
    print(f"{'':<6}{'parameters':>20}{'gradients':>20}{'states of Adam':>20}")
    print(f"{'':<6}" + f"{'formula':>10}{'held':>10}" * 3)
    for name, stage in ZERO.items():
        parameters, gradients, states = bytes_held(stage, P, RANKS)
        bucket = found[name].bucket if stage == 2 else 0
        pairs = zip((parameters, gradients + 4 * N + bucket, states), found[name].held, strict=True)
        print(f"{name:<6}" + "".join(f"{formula:>10,.0f}{held:>10,}" for formula, held in pairs))
    print(f"gradients carry n flags (is there one?); ZeRO-2 has one full bucket besides, {bucket:,} bytes")


def traffic_in_the_ledger(found: list[dict[str, Train]]) -> None:
    print(f"\n3 Predict: a step of m={M} micro-batches, {RANKS} ranks. Which traffic grows with the batch?\n")
    activations = M * 4 * BATCH * SHAPE.context * SHAPE.width
    blocks = (2 * SHAPE.num_blocks + 1) * activations
    rows = [
        ("ZeRO-0", "data", "all_reduce", "ReduceGrads", 4 * (P + N), "2(dp-1)/dp 4(P+n)"),
        ("ZeRO-1", "data", "reduce_scatter", "ReduceGrads", 4 * P // 2, "(dp-1)/dp 4P"),
        ("ZeRO-1", "data", "all_gather", "OptimizerStep", 4 * P // 2, "(dp-1)/dp 4P"),
        ("ZeRO-2", "data", "reduce_scatter", "BackwardPass", M * 4 * P // 2, "m (dp-1)/dp 4P"),
        ("stages", "pipe", "send", "SendActivation", activations, "m 4BTH"),
        ("stages", "pipe", "send", "SendGrad", activations, "m 4BTH"),
        ("tensor", "model", "all_reduce", "ForwardPass", blocks, "m (2L+1) 2(tp-1)/tp 4BTH"),
        ("tensor", "model", "all_reduce", "BackwardPass", blocks, "m (2L+1) 2(tp-1)/tp 4BTH"),
    ]
    print(f"{'':<8}{'operation':<16}{'during':<16}calls    ledger   formula, bytes a rank")
    for layout, axis, operation, during, size, formula in rows:
        mine = found[during == "SendGrad"][layout]  # it is the last stage that sends gradients
        total = mine.ledger.total(axis, operation, during)
        numbers = f"{total.calls:>5} {total.sent:>9,} {size:>9,}"
        print(f"{layout:<8}{operation:<16}{during:<16}{numbers} = {formula}")
    print("what has m in its formula; 2L+1 is two a block, and one of the embedding or of the head")


def traffic_at_full_size() -> None:
    print("\n4 The same formulas for P=7e9, L=32, T=H=4096, B=1, m=16, eight ranks on the axis.\n")
    P, L, m, activation = 7e9, 32, 16, 4 * 4096 * 4096
    sizes = {"ZeRO-1": 2 * 7 / 8 * 4 * P, "ZeRO-2": (m + 1) * 7 / 8 * 4 * P}
    sizes |= {"ZeRO-3": 3 * m * 7 / 8 * 4 * P}  # two all-gathers and a reduce-scatter, each micro-batch
    sizes |= {"stages": 2 * m * activation, "tensor": m * 4 * L * 2 * 7 / 8 * activation}
    for name, size in sizes.items():
        print(f"{name:<8}{size / 1e9:7.1f} GB a rank and step")
    print("so tensor-parallel ranks share a node, and stages may lie across slow links (9.3)")


@dataclass(frozen=True)
class Train:
    """Of one rank: the traffic of a step, and the bytes that it holds in the next."""

    ledger: comm.Ledger
    held: tuple[int, int, int]  # parameters, gradients at their most, states
    bucket: int  # bytes of the largest one


def measure() -> dict[str, Train]:
    """One rank: the same GPT under three ZeRO stages, on two stages, and on two tensor-parallel ranks."""
    return {layout: train(layout) for layout in (*ZERO, "stages", "tensor")}


def train(layout: str) -> Train:
    specs = toy.parallel_layer_specs(SHAPE) if layout == "tensor" else toy.layer_specs(SHAPE)
    model = PipelineModule(specs, num_stages=RANKS if layout == "stages" else 1, loss_fn=toy.loss_fn)
    config = {
        "train_micro_batch_size_per_gpu": BATCH,
        "gradient_accumulation_steps": M,
        "zero_optimization": {"stage": ZERO.get(layout, 0), "reduce_bucket_size": 13 * SHAPE.width**2},
        "optimizer": {"type": "Adam", "params": {"lr": 1e-3}},
        "tensor_parallel": {"tp_size": RANKS if layout == "tensor" else 1},
    }
    engine, optimizer, *_ = ds_lite.initialize(model=model, config=config)
    data = toy.batches(torch.arange(500).byte(), num_micro_batches=M, size=BATCH, context=SHAPE.context)
    with comm.record() as ledger:
        engine.train_batch(data)
    peaks, buckets = [0], engine.gradients.buckets

    def look(_: torch.Tensor) -> None:
        tensors = [t for bucket in buckets for t in (bucket.buffer, getattr(bucket, "incoming", None))]
        peaks.append(sum(tensor.nbytes for tensor in tensors if tensor is not None))

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(look)
    engine.train_batch(data)
    states = [v.nbytes for state in optimizer.state.values() for v in state.values() if v.dim()]
    held = sum(parameter.nbytes for parameter in model.parameters()), max(peaks), sum(states)
    return Train(ledger, held, max(4 * (bucket.count + len(bucket.parameters)) for bucket in buckets))


if __name__ == "__main__":
    main()
