"""§9.6 What to use when, and all axes at once: one model in every layout, from a JSON config alone.

Question: stages, replicas, parts of a sequence, parts of a layer, experts: which, and do they fit together?

Run time: about 30 s on two cores.   python chapters/ch06_every_layout.py   (needs transformers)

You will see a decision table from bytes, operations and links, in place of the chapter's lost one, with a
reason for each axis; then three layouts of eight processes that equal one, and who adds up what.

Chapter against source: DeepSpeed cannot combine these: its pipelines refuse ZeRO-2 and an mpu, and neither
AutoTP nor Ulysses works inside of a PipelineModule. Here no axis sees the others (§9.3, §9.7).
"""

from __future__ import annotations

import json
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import ds_lite
from ds_lite import choosing, comm
from ds_lite.launch import run
from ds_lite.pipe import PipelineModule
from ds_lite.tags import tags_of

SAMPLES, TOKENS, MICRO_BATCHES, VOCABULARY = 2, 10, 4, 48
BASE = {
    "train_micro_batch_size_per_gpu": SAMPLES,
    "gradient_accumulation_steps": MICRO_BATCHES,
    "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
}
TENSOR = {"tensor_parallel": {"autotp_size": 2}}
EXPERTS = {"expert_parallel": {"enabled": True, "autoep_size": 2}}
# 8 GPUs a node, 72 GiB, half of 989e12 operations a second, 450e9 and 50e9 bytes a second (H100, NVLink, NDR)
MACHINE = choosing.Machine(8, 72 * 2**30, 500e12, 450e9, 50e9)
LLAMA = choosing.Model("Llama 7B", 4096, 11008, 32, 32, 32, 32000)
LARGE = choosing.Model("Llama 70B", 8192, 28672, 80, 64, 8, 128256)
HUGE = choosing.Model("Llama 405B", 16384, 53248, 128, 128, 8, 128256)
MIXTURE = choosing.Model("Mixtral 8x7B", 4096, 14336, 32, 32, 8, 32000, experts=8, choices=2)
JOBS = [(LLAMA, 8, 4096, 256), (LLAMA, 64, 131072, 64), (LARGE, 64, 8192, 512), (LARGE, 512, 8192, 512)]
JOBS += [(MIXTURE, 64, 4096, 512), (HUGE, 1024, 8192, 1024)]  # GPUs, tokens, sequences a step
LAYOUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "pp2 x dp2 x tp2, ZeRO-1": ("Llama", {**TENSOR, "zero_optimization": {"stage": 1}}),
    "pp2 x sp2 x tp2": ("Llama", {**TENSOR, "sequence_parallel_size": 2}),
    "pp2 x sp2 x tp2, ep2": ("Mixtral", {**TENSOR, **EXPERTS, "sequence_parallel_size": 2}),
}


def main() -> None:
    what_to_use_when()
    print("\n2 Three layouts of eight processes. Predict: which of them change the loss?\n")
    ranks = run(in_layouts, 8, [(json.dumps({**BASE, **more}), family) for family, more in LAYOUTS.values()])
    for number, (name, (family, _)) in enumerate(LAYOUTS.items()):
        found = [rank[number] for rank in ranks]
        apart, count = max(rank["apart"] for rank in found), sum(rank["compared"] for rank in found)
        word = "equal" if apart < 1e-5 else f"{apart:.1e} apart"
        print(f"{family:<8}{name:<26}loss {found[0]['loss']:.4f}   {count} gradients on 8 ranks: {word}")
    print("(the models compute norms in float32, so equal means to 1e-5 here; the tests go to 1e-10)")
    who_sums_with_whom(ranks[5][2])
    print("\nNext: chapters/ch07_megatron.py   Lab: python -m ds_lite lab 2 --nproc 4")


def what_to_use_when() -> None:
    print("1 The simplest layout within 3 % of the fastest that fits. Predict: which models need stages?\n")
    for model, world, tokens, sequences in JOBS:
        best = choosing.choose(model, world, MACHINE, tokens, sequences)
        size = f"{best.memory / 2**30:.0f} GiB, busy {best.compute / best.seconds:.0%}"
        print(f"{model.name:<13}{world:>5} GPUs, T={tokens:<7} {best.layout!s:<48}{size}")
        for axis, words in choosing.reasons(best, model, MACHINE, tokens, sequences).items():
            print(f"{'':<25}without {axis}: {words}")
    print("(no time is hidden under another; ZeRO-3, which ds_lite refuses, is left out)")


def make(family: str) -> nn.Module:
    """The same small model everywhere."""
    import transformers

    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "vocab_size": VOCABULARY}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2}
    more = {"num_local_experts": 4, "output_router_logits": True, "router_aux_loss_coef": 0.1}
    config = getattr(transformers, f"{family}Config")(**sizes | (more if family == "Mixtral" else {}))
    torch.manual_seed(0)
    model: nn.Module = getattr(transformers, f"{family}ForCausalLM")(config)
    if family == "Mixtral":
        model.set_experts_implementation("eager")  # type: ignore[operator]
    return model.double()


def batches(count: int) -> list[dict[str, Tensor]]:
    ids = torch.randint(VOCABULARY, (count, SAMPLES, TOKENS), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": x, "labels": x} for x in ids]


def one_process(family: str, count: int) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients of all micro-batches, one after another."""
    model, total = make(family), 0.0
    for batch in batches(count):
        outputs: Any = model(batch["input_ids"], use_cache=False)
        loss = F.cross_entropy(outputs.logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())
        loss = loss + (0.1 * outputs.aux_loss if family == "Mixtral" else 0)
        (loss / count).backward()
        total += float(loss.detach()) / count
    return total, {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}


def in_layouts(rows: list[tuple[str, str]]) -> list[dict[str, Any]]:
    return [in_layout(*row) for row in rows]


def in_layout(config: str, family: str) -> dict[str, Any]:
    """What one rank finds: the model, `from_model` and a JSON config are all there is."""
    pipeline = PipelineModule.from_model(make(family), num_stages=2)
    engine = ds_lite.initialize(model=pipeline, config=json.loads(config))[0]
    replica, replicas = engine.grid.get_data_parallel_rank(), engine.grid.get_data_parallel_world_size()
    with comm.record() as ledger:
        loss = engine.compute_gradients(iter(batches(MICRO_BATCHES * replicas)[MICRO_BATCHES * replica :]))
    whole_loss, wanted = one_process(family, MICRO_BATCHES * replicas)
    apart, compared = abs(float(loss) - whole_loss), 0
    for name, _ in pipeline.named_parameters():
        gradient, there = engine.gradients.full(name), pipeline.original_name(name)
        stack, is_expert, rest = there.partition(".experts.experts.")  # by number here, stacked in the model
        truth = wanted[f"{stack}.experts.{rest[2:]}"][int(rest[0])] if is_expert else wanted[there]
        apart, compared = max(apart, float((gradient - truth).abs().max())), compared + 1
    found = {"loss": float(loss), "apart": apart, "compared": compared, "sums": sums_of(engine)}
    return found | {"sent": {axis: ledger.total(axis=axis).sent for axis, _, _ in ledger.rows}}


def sums_of(engine: Any) -> list[str]:
    """For each kind of parameter: who holds parts of it, who adds up its gradients."""
    grid, seen = engine.grid, {}
    for parameter in engine.module.parameters():
        tags = tags_of(parameter)
        ranks = grid.expert(tags.ep_size).data_ranks if tags.ep_size else grid.ranks("data", "seq")
        place = "sharded over" if tags.model == "sharded" else "whole on"
        seen[f"{tags.owner:<8}{place:<14}{grid.ranks('model')!s:<9}summed over {list(ranks)}"] = None
    return sorted(seen)


def who_sums_with_whom(found: dict[str, Any]) -> None:
    print("\n3 The last layout. Rank 5 is on stage 1: with whom does it add up an expert's gradient?\n")
    print(*found["sums"], "(its exchange has brought an expert all tokens of the sequence)", sep="\n")
    print("\n  Bytes that rank 5 sends in a step along each axis. Predict: which axis is the busiest?\n")
    print("\n".join(f"{axis:<10}{found['sent'][axis]:>9,}" for axis in ("model", "seq", "expert", "pipe")))


if __name__ == "__main__":
    main()
