"""§9.2 The pipeline engine.

Question: what does cutting a model into stages cost, and what may it change?

Run time: about 15 s on two cores.   python chapters/ch02_pipeline_engine.py

You will see the bubble formula hold on a virtual clock, both ways to quote it, what longer backwards
change (nothing) and what uneven stages change (a lot), and then a GPT on two processes compute what it
computes on one.

Chapter against source: every stage is said to need the data iterator; only the first and the last one
read it. The formula is for equal stages under GPipe or 1F1B; other schedules have other bubbles.

Legend: S stages, m micro-batches.
"""

from __future__ import annotations

import torch

import ds_lite
from ds_lite import comm, toy
from ds_lite.launch import run
from ds_lite.pipe import PipelineModule
from ds_lite.pipe.schedule import TrainSchedule
from ds_lite.pipe.simulate import simulate
from ds_lite.pipe.timeline import timeline_text

LAW = 1e-10  # what N processes may differ from one in float64
SHAPE = toy.Shape(width=12, num_heads=2, num_blocks=3, context=10)
NUM_STAGES, NUM_MICRO_BATCHES, SEED = 2, 4, 7


def main() -> None:
    the_picture()
    the_formula()
    what_moves_the_bubble()
    two_stages_equal_one_process()
    print("\nNext: chapters/ch03_three_axes.py   Lab: python -m ds_lite lab 2 --nproc 4")


def the_picture() -> None:
    print("1 Predict: of 4 stages and 8 micro-batches, how many ticks is stage 0 idle?\n")
    print(timeline_text(TrainSchedule, num_stages=4, num_micro_batches=8))


def the_formula() -> None:
    print("\n2 The bubble is (S-1)/(m+S-1) of the whole time; others quote (S-1)/m, idle over ideal time.\n")
    print(" S   m   formula  simulated   idle/ideal")
    for S, m in ((2, 4), (4, 4), (4, 8), (4, 32), (8, 8)):
        clock = simulate(TrainSchedule, S, m)
        formula = (S - 1) / (m + S - 1)
        print(
            f"{S:>2}  {m:>2}   {formula:.4f}   {clock.bubble_of_total:.4f}      {clock.bubble_of_ideal:.4f}"
        )


def what_moves_the_bubble() -> None:
    print(
        "\n3 Predict: S=4, m=8: what becomes of the bubble if a backward takes twice as long as a forward?\n"
    )
    even = simulate(TrainSchedule, 4, 8, forward=1, backward=2)
    print(f"backward twice as long       {even.bubble_of_total:.4f}   the ratio stays")
    slow = simulate(TrainSchedule, 4, 8, forward=[1, 1, 1, 2], backward=[2, 2, 2, 4])
    print(
        f"the last stage twice as slow {slow.bubble_of_total:.4f}   everybody waits for it: cut evenly (9.9)"
    )


def two_stages_equal_one_process() -> None:
    print(
        f"\n4 The one law: {NUM_STAGES} processes give the loss and gradients of one, "
        f"to {LAW:g} in float64.\n"
    )
    results = run(pipelined, NUM_STAGES)
    loss, gradients = one_process()
    found: dict[str, torch.Tensor] = {}
    for stage, (stage_loss, stage_gradients) in enumerate(results):
        print(f"stage {stage} holds {len(stage_gradients):>2} parameter tensors, loss {stage_loss:.3f}")
        found |= stage_gradients
    gap = max(float((found[name] - gradients[name]).abs().max()) for name in gradients)
    print(f"one process  {len(gradients):>2} parameter tensors, loss {loss:.3f}")
    print(f"every gradient is there: {set(found) == set(gradients)}; all equal within {LAW:g}: {gap <= LAW}")
    print("the embedding is on both stages, tied to the output: so the two numbers add up to one more")


def micro_batches() -> list[toy.MicroBatch]:
    """Distinct ones; the same on every rank and in every layout."""
    data = torch.randint(0, 256, (500,), generator=torch.Generator().manual_seed(SEED)).byte()
    return [
        toy.micro_batch(data, seed=SEED, step=0, index=i, size=2, context=SHAPE.context)
        for i in range(NUM_MICRO_BATCHES)
    ]


def pipelined() -> tuple[float, dict[str, torch.Tensor]]:
    """One rank of the pipeline: what `train_batch` does, without the optimizer step."""
    model = PipelineModule(
        toy.layer_specs(SHAPE), num_stages=NUM_STAGES, loss_fn=toy.loss_fn, seed_layers=True, base_seed=SEED
    )
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": NUM_MICRO_BATCHES,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
    }
    engine, *_ = ds_lite.initialize(model=model.double(), config=config)
    loss = engine.compute_gradients(iter(micro_batches()))
    assert comm.get_world_size() == NUM_STAGES
    return float(loss), {name: engine.gradients.full(name).cpu() for name in engine.gradients.names()}


def one_process() -> tuple[float, dict[str, torch.Tensor]]:
    """The same model without any engine: mean loss over the micro-batches, one backward."""
    model = toy.GPT(SHAPE, seed=SEED).double()
    losses = [toy.loss_fn(model(inputs), labels) for inputs, labels in micro_batches()]
    loss = torch.stack(losses).mean()
    loss.backward()
    return float(loss.detach()), {name: p.grad for name, p in model.parameters_by_layer().items()}


if __name__ == "__main__":
    main()
