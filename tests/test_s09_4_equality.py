"""§9.4 Expert parallelism beside pipeline, data and tensor parallelism and ZeRO, against one process.

Guards against: tokens at the wrong expert, an expert's gradient divided by its copies or not at all, a gate
that sees its own slice of the tokens only, an expert counted twice in the norm or sharded over ranks that
hold another one, an l_aux that is lost between stages.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from mixture import Mixture, MixtureBlock, OnStream
from oracles import Layer, MicroBatch, Truth, one_process, split_micro_batches
from rings import everyday
from tolerance import LAW, assert_close, differs
from torch import nn

from ds_lite import toy_layers as toy

VOCABULARY, CONTEXT, BATCH, WIDTH, EXPERTS = 7, 5, 2, 6, 4
MICRO_BATCHES, STEPS, LR = 2, 2, 0.5
SEED = 7  # one expert gets no token at all: its gradient is zero, not missing
SHAPE = toy.Shape(WIDTH, 2, 1, CONTEXT, VOCABULARY, qk_norm=True)  # without, no key bias learns


@dataclass(frozen=True)
class Case:
    """One layout and its options; `cut` says that the experts are cut over the model axis."""

    ep: int
    dp: int
    tp: int = 1
    pp: int = 1
    zero: int = 0
    drop: bool = True
    cut: bool = False
    interval: int = 0
    data_first: bool = False

    @property
    def world_size(self) -> int:
        return self.pp * self.dp * self.tp

    @property
    def num_micro_batches(self) -> int:
        return MICRO_BATCHES

    def __str__(self) -> str:
        return " ".join(f"{name}={value}" for name, value in vars(self).items() if value)


def make_layers(drop: bool) -> list[Layer]:
    """Five layers with two mixtures; no weight is small, no bias zero, no expert like another."""

    def mixture(k: int, **options: Any) -> MixtureBlock:
        limits = {"capacity_factor": 0.8, "min_capacity": 1, "drop_tokens": drop}
        return MixtureBlock(Mixture(WIDTH, toy.MLP(SHAPE), EXPERTS, k=k, **limits, **options))

    with torch.random.fork_rng():
        torch.manual_seed(SEED)
        layers: list[Layer] = [
            toy.Embedding(SHAPE),
            toy.Block(SHAPE),
            mixture(2),
            mixture(1, use_residual=True),
            OnStream(toy.linear(WIDTH, VOCABULARY)),
        ]
        for layer in layers:
            assert isinstance(layer, nn.Module)
            for name, parameter in layer.double().named_parameters():
                nn.init.normal_(parameter, mean=1.0 if "norm" in name and "weight" in name else 0.0, std=0.4)
    return layers


def make_batch(count: int) -> list[MicroBatch]:
    generator = torch.Generator().manual_seed(8)
    inputs, labels = (
        torch.randint(VOCABULARY, (count, BATCH, CONTEXT), generator=generator) for _ in range(2)
    )
    return list(zip(inputs.unbind(), labels.unbind(), strict=True))


def loss_fn(outputs: tuple[torch.Tensor, torch.Tensor], labels: torch.Tensor) -> torch.Tensor:
    logits, l_aux = outputs
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()) + 0.05 * l_aux


def truths(case: Case) -> tuple[Truth, Truth]:
    """One process after one step and after all of them; computed once, for all ranks."""
    layers, count = make_layers(case.drop), MICRO_BATCHES * case.dp
    batch = make_batch(count * STEPS)
    return tuple(  # type: ignore[return-value]
        one_process(layers, loss_fn, batch[: count * steps], lr=LR, steps=steps) for steps in (1, STEPS)
    )


def make(impl: Any, case: Case) -> Any:
    return impl.make_pipeline(
        make_layers(case.drop),
        num_stages=case.pp,
        loss_fn=loss_fn,
        num_micro_batches=MICRO_BATCHES,
        micro_batch_size=BATCH,
        lr=LR,
        config={
            "zero_optimization": {"stage": case.zero},
            "use_data_before_expert_parallelism": case.data_first,
        },
        module={"partition_method": "uniform", "activation_checkpoint_interval": case.interval},
        tensor_parallel=case.tp,
        expert_parallel=case.ep,
        expert_tensor_parallel=case.cut,
    )


def check(impl: Any, case: Case, first: Truth, last: Truth) -> None:
    """Gradients of one batch, then the loss and norm of two steps, then the weights."""
    batch = make_batch(MICRO_BATCHES * case.dp * STEPS)
    pipeline = make(impl, case)

    def mine() -> Iterator[MicroBatch]:
        part = {"replica": pipeline.replica, "num_replicas": case.dp, "steps": STEPS}
        return iter(split_micro_batches(batch, **part))

    loss = pipeline.compute_gradients(mine())
    assert_close(loss, first.loss, LAW, f"{case}: loss of the first batch")
    gradients = pipeline.gradients()
    assert sorted(gradients) == sorted(first.grads), f"{case}: other parameters than one process has"
    idle = [name for name, gradient in first.grads.items() if not gradient.any()]
    assert len(idle) == 4 and all("3.mixture.experts.1." in name for name in idle), f"no gradient: {idle}"
    for name, gradient in first.grads.items():
        assert_close(gradients[name], gradient, LAW, f"{case}: gradient of {name}")
    pipeline.clear_gradients()
    before, data = pipeline.weights(), mine()
    for step in range(STEPS):
        loss = pipeline.train_batch(data)
        assert_close(loss, last.losses[step], LAW, f"{case}: loss of step {step}")
        assert_close(pipeline.norm(), last.norms[step], LAW, f"{case}: norm of step {step}")
    after = pipeline.weights()
    for name, weight in last.weights.items():
        assert_close(before[name], last.before[name], LAW, f"{case}: initial {name}")
        assert name in idle or differs(after[name], before[name]), f"{case}: {name} did not move"
        assert_close(after[name], weight, LAW, f"{case}: {name} after {STEPS} steps")


def check_all(rank: int, impl: Any, cases: list[tuple[Case, Truth, Truth]]) -> None:
    for case, first, last in cases:
        check(impl, case, first, last)


WORLDS = {
    "dp2": [Case(1, 2, zero=2), Case(2, 2), Case(2, 2, zero=2, drop=False), Case(2, 2, zero=1, interval=1)],
    "tp2": [Case(1, 1, 2, zero=1)],
    "dp4": [Case(2, 4, zero=2), Case(4, 4, zero=1, drop=False), Case(2, 4, data_first=True)],
    "dp2-tp2": [Case(2, 2, 2, zero=1), Case(1, 2, 2, zero=2), Case(2, 2, 2, zero=2, drop=False, cut=True)],
    "pp2-dp2": [Case(2, 2, pp=2, zero=2), Case(1, 2, pp=2, drop=False), Case(2, 2, pp=2, interval=1)],
    "8 ranks": [Case(2, 2, 2, 2, zero=1), Case(4, 4, 2), Case(2, 4, 2, zero=2, drop=False)],
}


NAMED = [pytest.param(cases, id=name) for name, cases in WORLDS.items()]


@pytest.mark.parametrize("cases", everyday(NAMED, lambda name: name not in ("8 ranks", "dp4")))
def test_experts_on_several_ranks_equal_one_process(world: Any, impl: Any, cases: list[Case]) -> None:
    world(check_all, cases[0].world_size, impl, [(case, *truths(case)) for case in cases], deadline=120.0)


def every_case() -> list[Case]:
    """ep x dp x tp x pp x ZeRO x dropping, up to eight ranks."""
    axes = itertools.product((1, 2, 4), (1, 2, 4), (1, 2), (1, 2), (0, 1, 2), (True, False))
    return [
        Case(ep, dp, tp, pp, zero, drop)
        for ep, dp, tp, pp, zero, drop in axes
        if dp % ep == 0 and 1 < dp * tp * pp <= 8
    ]


def by_world_size(cases: list[Case], at_most: int = 8) -> list[Any]:
    groups: dict[int, list[Case]] = {}
    for case in cases:
        groups.setdefault(case.world_size, []).append(case)
    return [
        pytest.param(group[start : start + at_most], id=f"{size}ranks-{start // at_most}")
        for size, group in sorted(groups.items())
        for start in range(0, len(group), at_most)
    ]


@pytest.mark.full
@pytest.mark.parametrize("cases", by_world_size(every_case()))
def test_experts_equal_one_process_in_the_full_cross(world: Any, impl: Any, cases: list[Case]) -> None:
    world(check_all, cases[0].world_size, impl, [(case, *truths(case)) for case in cases], deadline=240.0)
