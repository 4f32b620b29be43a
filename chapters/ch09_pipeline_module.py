"""§9.9 PipelineModule.

Question: how does a list of layers become stages, and what if two stages share a weight?

Run time: about 15 s on two cores.   python chapters/ch09_pipeline_module.py

You will see that each process builds its own layers only, what the three ways to cut a list do with the
same model, and that a tied weight gets the sum of what its two users found.

Chapter against source: the default cut is `parameters`, not `uniform`; a fourth value, `profile`, is
parsed and refused. Tied gradients are summed once a batch, in the closing step before ReduceGrads, not
during backward.

Legend: S stages, P parameters.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

import ds_lite
from ds_lite import comm, toy
from ds_lite.launch import run
from ds_lite.pipe import LayerSpec, PipelineModule
from ds_lite.pipe.building import layer_name, parameter_count
from ds_lite.pipe.partition import partition_layers

SHAPE = toy.Shape(width=12, num_heads=2, num_blocks=4, context=10)
SEED = 9


class Counted(nn.Linear):
    """A layer that says when it is built for real."""

    built = 0

    def __init__(self, width: int) -> None:
        super().__init__(width, width)
        if self.weight.device.type != "meta":  # not for a look at its size
            Counted.built += 1


def main() -> None:
    who_builds_what()
    three_ways_to_cut()
    a_tie_adds_gradients()
    print("\nNext: chapters/ch10_schedules.py   Lab: python -m ds_lite lab 2 --nproc 4")


def who_builds_what() -> None:
    print("1 Predict: 6 LayerSpecs of 110 parameters on 2 stages; how many layers does each process build?\n")
    spec = LayerSpec(Counted, 10)
    print(f"a LayerSpec is a recipe: {spec}; layers built so far: {Counted.built}")
    for stage, (built, held) in enumerate(run(build_six, 2)):
        print(f"stage {stage} built {built} layers and holds {held} of {6 * 110} parameters")


def build_six() -> tuple[int, int]:
    """One rank: build, then count what was built and what is held."""
    model = PipelineModule([LayerSpec(Counted, 10) for _ in range(6)], num_stages=2)
    return Counted.built, sum(p.numel() for p in model.parameters())


def three_ways_to_cut() -> None:
    print("\n2 Predict: which cut of the GPT below is the most even in parameters?\n")
    specs = toy.layer_specs(toy.Shape())
    names, counts = [layer_name(spec) for spec in specs], [parameter_count(spec) for spec in specs]
    for index, (name, count) in enumerate(zip(names, counts, strict=True)):
        print(f"layer {index}  {name:<10} {count:>8,}")
    print("\nmethod         S  bounds            parameters per stage")
    for method in ("uniform", "parameters", "type:block"):
        for num_stages in (2, 4):
            bounds = partition_layers(method, names, counts, num_stages)
            loads = [sum(counts[a:b]) for a, b in zip(bounds, bounds[1:], strict=False)]
            shown = " ".join(f"{load:>7,}" for load in loads)
            print(f"{method:<13} {num_stages:>2}  {str(bounds).replace(' ', ''):<16}  {shown}")
    print("the embedding counts on both ends: it is tied, and each end holds a copy")


def a_tie_adds_gradients() -> None:
    print(
        "\n3 The embedding reads bytes on stage 0 and writes logits on stage 1: two gradients, one weight.\n"
    )
    lookup, output = gradients_apart()
    print(f"one process, used as embedding only  |gradient| {lookup.norm():.4f}")
    print(f"one process, used as head only       |gradient| {output.norm():.4f}")
    print(f"one process, their sum               |gradient| {(lookup + output).norm():.4f}")
    for stage, (ranks, gradient, is_equal) in enumerate(run(tied_gradient, 2)):
        gap = float((gradient - lookup - output).abs().max())
        print(
            f"stage {stage}: tied with ranks {ranks}, copies equal at the start: {is_equal}; "
            f"after ReduceTiedGrads the sum: {gap <= 1e-10}"
        )


def batch() -> toy.MicroBatch:
    data = torch.randint(0, 256, (200,), generator=torch.Generator().manual_seed(SEED)).byte()
    return toy.micro_batch(data, seed=SEED, step=0, index=0, size=2, context=SHAPE.context)


def gradients_apart() -> tuple[torch.Tensor, torch.Tensor]:
    """The two uses of the table as if they were two weights."""
    model = toy.GPT(SHAPE, seed=SEED).double()
    inputs, labels = batch()
    table = model.embedding.weight.detach()
    lookup, output = table.clone().requires_grad_(), table.clone().requires_grad_()
    x = model.positions(F.embedding(inputs, lookup))
    for block in model.blocks:
        x = block(x)
    toy.loss_fn(F.linear(model.norm(x), output), labels).backward()
    assert lookup.grad is not None and output.grad is not None
    return lookup.grad, output.grad


def tied_gradient() -> tuple[list[int], torch.Tensor, bool]:
    """One rank: who shares the embedding, its reduced gradient, and whether the copies were equal."""
    model = PipelineModule(
        toy.layer_specs(SHAPE), num_stages=2, loss_fn=toy.loss_fn, seed_layers=True, base_seed=SEED
    )
    config = {"train_batch_size": 2, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    engine, *_ = ds_lite.initialize(model=model.double(), config=config)
    weight = model.tied_modules["embed"].weight.detach()
    copies = torch.empty(2 * len(weight), weight.shape[1], dtype=weight.dtype, device=weight.device)
    comm.all_gather_into_tensor(copies, weight)
    engine.compute_gradients(iter([batch()]))
    gradient = engine.gradients.full("tied_modules.embed.weight").cpu()
    return list(model.ties()[0].ranks), gradient, bool(torch.equal(*copies.chunk(2)))


if __name__ == "__main__":
    main()
