"""§9.16 What to take away: the chapter's seven points, each with a number that this engine gives now.

Question: which of the seven can you show on your own machine, and with which command?

Run time: about 10 s on two cores.   python chapters/ch16_what_to_take_away.py

You will see one line of evidence for each point, and the chapter that runs the whole of it on several
processes.

Chapter against source: the sixth point is put too shortly. DeepSpeed's Ulysses makes four exchanges a layer:
query, key, value, and the output on the way back; here the first three travel as one. And Domino does not put
a sum off until backward: forward waits for its sums one half of the batch later, and backward for its own.
"""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import nn

from ds_lite import comm
from ds_lite.domino import DominoTransformer
from ds_lite.explain import explain
from ds_lite.launch import run
from ds_lite.moe.gating import load_balancing_loss
from ds_lite.moe.queues import expert_capacity
from ds_lite.mpu import FAMILIES
from ds_lite.pipe import LayerSpec
from ds_lite.pipe.engine import PipelineEngine
from ds_lite.sections import find
from ds_lite.sequence.layer import DistributedAttention
from ds_lite.tensor_parallel.auto_tp import AutoTP
from ds_lite.tensor_parallel.fused_qkv import replace_policies, strided_copy
from ds_lite.toy import GPT, Shape

SHAPE = Shape(width=64, num_heads=4, num_blocks=4, context=16)
CONFIG = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}


def main() -> None:
    print("Seven points. Predict for each: what would you run to convince somebody?")
    zero_is_data_parallel()
    layers_wait_to_be_built()
    instructions_lead_to_lines()
    experts_need_a_loss_and_a_capacity()
    three_functions_cut_a_model()
    exchanges_and_sums()
    another_library_takes_part()
    print("\nThe end of the chapter. Lab: python -m ds_lite lab 2 --nproc 4; all of it: make test")


def point(number: int, text: str, *sections: str) -> None:
    """The chapter's point, and where to run it."""
    print(f"\n{number} {text}")
    for section in map(find, sections):
        print(f"  §{section.number:<5} python {section.chapter}")


def zero_is_data_parallel() -> None:
    point(1, "ZeRO is data parallelism; 3D training also cuts layers and tensors.", "9.1", "9.3")
    for stage in (0, 1):
        said = explain({**CONFIG, "zero_optimization": {"stage": stage}}, 8, GPT(SHAPE))
        (held,) = (said.stored or {}).values()
        print(f"  ZeRO-{stage} on 8 ranks: parameters {held.parameters:,} bytes, AdamW {held.state:,}")
    print("  weights stay whole on each rank, and so does every activation: that is what the other axes cut")


def layers_wait_to_be_built() -> None:
    point(2, "PipelineModule takes descriptions; each stage builds its own layers only.", "9.9")
    built: list[int] = []

    class Counted(nn.Linear):
        def __init__(self, number: int) -> None:
            super().__init__(4, 4)
            built.append(number)

    specs, before = [LayerSpec(Counted, number) for number in range(8)], len(built)
    for spec in specs[:4]:
        spec.build()
    print(f"  8 LayerSpecs: {before} layers exist; after stage 0 of 2 has built its own: {built}")


def instructions_lead_to_lines() -> None:
    point(3, "A rank that hangs stands in one of ten instructions; each is one method.", "9.10", "9.2")
    names = sorted(kind.__name__ for kind in PipelineEngine._INSTRUCTION_MAP)
    print(
        f"  {len(names)} instructions, from {names[0]} to {names[-1]}; _exec_instruction calls their methods"
    )
    print("  python -m ds_lite hang FOLDER says who stands where, and who waits for whom")


def experts_need_a_loss_and_a_capacity() -> None:
    point(4, "Mixtures need l_aux, and a capacity that fits.", "9.4", "9.12")
    even, all_to_one = torch.full((64, 4), 0.25), torch.eye(4)[torch.zeros(64, dtype=torch.long)]
    for name, gates, counts in (("even", even, [16] * 4), ("all to one", all_to_one, [64, 0, 0, 0])):
        print(f"  l_aux of 4 experts, {name}: {load_balancing_loss(gates, torch.tensor(counts)):.1f}")
    sizes = [expert_capacity(64, 4, capacity_factor=factor, min_capacity=4) for factor in (1.0, 1.25, 2.0)]
    print(f"  places of an expert for 64 tokens, factor 1.0, 1.25, 2.0: {sizes}")


def three_functions_cut_a_model() -> None:
    point(5, "AutoTP is tp_parser, replace_policies and strided_copy.", "9.13")
    (_, summed), *_ = AutoTP.tp_parser(GPT(SHAPE))
    print(f"  tp_parser, of the toy GPT: {', '.join(summed)} are summed over the ranks")
    print(f"  replace_policies: {sum(map(len, replace_policies.values()))} fused weights are known by class")
    rows = strided_copy(torch.arange(24), ((0, 4), (8, 12), (16, 20)))
    print(f"  strided_copy, rank 0 of 2 of [q|k|v]: {rows.tolist()}")


def exchanges_and_sums() -> None:
    point(6, "Ulysses exchanges tokens for heads; Domino hides sums under the other half.", "9.14", "9.15")
    (exchanged, plain, halves), _ = run(on_two_ranks, 2)
    print(f"  exchanges of a layer, forward and backward: {exchanged}, for q k v together and for the output")
    print(
        f"  sums of a layer: {plain[0]}, {plain[1]:,} bytes; in two halves: {halves[0]}, {halves[1]:,} bytes"
    )


def on_two_ranks() -> tuple[int, tuple[int, int], tuple[int, int]]:
    """Exchanges of DistributedAttention; sums and bytes of a layer, whole and in two halves."""
    group = comm.new_group([0, 1], "seq")
    attend = DistributedAttention(lambda q, k, v: (q @ k.mT).softmax(-1) @ v, group)
    with comm.record() as ledger:
        attend(*torch.ones(3, 1, 6, 4, 2).requires_grad_(), batch_dim_idx=0).sum().backward()
    exchanged = ledger.total(operation="all_to_all").calls
    return exchanged, sums(group, parts=1), sums(group, parts=2)


def sums(group: comm.ProcessGroup, parts: int) -> tuple[int, int]:
    mpu = SimpleNamespace(
        get_tensor_model_parallel_group=lambda: group, get_tensor_model_parallel_world_size=lambda: 2
    )
    sizes = {"hidden_size": 8, "num_attention_heads": 2, "ffn_hidden_size": 16, "num_layers": 1}
    draw = {"init_method": nn.init.normal_, "output_layer_init_method": nn.init.normal_}
    config = SimpleNamespace(**sizes, **draw, params_dtype=torch.float32, perform_initialization=True)
    model = DominoTransformer(config, mpu, None, parts=parts)
    with comm.record() as ledger:
        model(torch.ones(5, 2, 8).requires_grad_()).sum().backward()
    total = ledger.total(operation="all_reduce")
    return total.calls, total.sent


def another_library_takes_part() -> None:
    point(7, "The largest models train with Megatron and DeepSpeed together, by way of an mpu.", "9.7")
    print(f"  it answers for {', '.join(FAMILIES)}: " + ", ".join(FAMILIES["model"][:2]) + " ...")


if __name__ == "__main__":
    main()
