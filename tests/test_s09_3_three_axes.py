"""§9.3 Pipeline x data x tensor parallelism and ZeRO against one process.

Guards against: a replicated gradient that is summed over the model axis or a partial one that is not, a
replica counted in the norm, a shard of another layout, a full gradient that ZeRO-2 overwrites, a head cut in
the middle.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from equality import check_equality
from oracles import Layer, MicroBatch, Tied, Truth, one_process
from rings import everyday
from torch import nn

from ds_lite import toy_layers as toy

VOCABULARY, CONTEXT, BATCH, HEADS, HEAD_WIDTH, BLOCKS = 19, 5, 2, 8, 3, 4
STEPS = 3


@dataclass(frozen=True)
class Case:
    """One layout and its options."""

    pp: int
    dp: int
    tp: int
    zero: int = 0
    clip: float = 0.0
    tied: bool = False
    optimizer: str = "SGD"
    m: int = 3
    interval: int = 0

    @property
    def world_size(self) -> int:
        return self.pp * self.dp * self.tp

    @property
    def num_micro_batches(self) -> int:
        return self.m

    @property
    def lr(self) -> float:
        return 1e-3 if self.optimizer == "AdamW" else 1.0

    def __str__(self) -> str:
        return " ".join(f"{name}={value}" for name, value in vars(self).items() if value)


def make_layers(case: Case) -> list[Layer]:
    """Eight layers with grouped heads where the degree allows it; no weight is small, no bias zero."""
    kv_heads = 2 if case.tp in (1, 2, 4, 8) else HEADS  # 4 and 8 ranks share the two kv heads
    shape = toy.Shape(HEADS * HEAD_WIDTH, HEADS, BLOCKS, CONTEXT, VOCABULARY, kv_heads, qk_norm=True)
    with torch.random.fork_rng():
        torch.manual_seed(11)
        table = toy.Embedding(shape)
        inner = [toy.Positions(shape), *(toy.Block(shape) for _ in range(BLOCKS)), nn.LayerNorm(shape.width)]
        layers: list[Layer] = [table, *inner, toy.linear(shape.width, VOCABULARY)]
        if case.tied:
            layers = [Tied("word", table), *inner, Tied("word", table, toy.head)]
        for layer in layers:
            module = layer.module if isinstance(layer, Tied) else layer
            for parameter in module.double().parameters():
                nn.init.normal_(parameter, std=0.3)
    return layers


def make_batch(count: int) -> list[MicroBatch]:
    generator = torch.Generator().manual_seed(3)
    shape = (count, BATCH, CONTEXT)
    inputs, labels = (torch.randint(VOCABULARY, shape, generator=generator) for _ in range(2))
    return list(zip(inputs.unbind(), labels.unbind(), strict=True))


def loss_fn(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def make(impl: Any, case: Case, layers: list[Layer], config: dict[str, Any] | None = None) -> Any:
    return impl.make_pipeline(
        layers,
        num_stages=case.pp,
        loss_fn=loss_fn,
        num_micro_batches=case.m,
        micro_batch_size=BATCH,
        lr=case.lr,
        optimizer=case.optimizer,
        config={
            "gradient_clipping": case.clip,
            "zero_optimization": {"stage": case.zero},
            **(config or {}),
        },
        module={"activation_checkpoint_interval": case.interval, "partition_method": "uniform"},
        tensor_parallel=case.tp,
    )


def truths(case: Case) -> tuple[Truth, Truth]:
    """One process after one step and after all of them; computed once, for all ranks."""
    layers, count = make_layers(case), case.m * case.dp
    batch = make_batch(count * STEPS)

    def truth(steps: int) -> Truth:
        options = {"lr": case.lr, "optimizer": case.optimizer, "clip": case.clip or None, "steps": steps}
        return one_process(layers, loss_fn, batch[: count * steps], **options)

    return truth(1), truth(STEPS)


def check(impl: Any, case: Case, first: Truth, last: Truth) -> None:
    """Gradients of one batch, then the loss and norm of three steps, then the weights."""
    assert torch.distributed.get_world_size() == case.world_size
    batch = make_batch(case.m * case.dp * STEPS)
    pipeline = make(impl, case, make_layers(case))
    assert pipeline.num_replicas == case.dp
    check_equality(pipeline, batch, first, last, str(case))


def check_all(rank: int, impl: Any, cases: list[tuple[Case, Truth, Truth]]) -> None:
    for case, first, last in cases:
        check(impl, case, first, last)


LAYOUTS = [Case(pp, dp, tp) for pp, dp, tp in itertools.product(range(1, 9), repeat=3) if pp * dp * tp <= 8]
OPTIONS: dict[str, tuple[Any, ...]] = {
    "zero": (0, 1, 2),
    "clip": (0.0, 0.5),
    "tied": (False, True),
    "optimizer": ("SGD", "AdamW"),
}
CASES_PER_WORLD = 8


def every_case() -> list[Case]:
    rows = [dict(zip(OPTIONS, row, strict=True)) for row in itertools.product(*OPTIONS.values())]
    return [replace(layout, **row) for layout in LAYOUTS for row in rows]


def small_cases() -> list[Case]:
    """Every case of up to four ranks, and two on every axis."""
    return [case for case in every_case() if case.world_size <= 4 or case.pp == case.dp == case.tp == 2]


def twos() -> list[Case]:
    """One or two ranks on every axis: what two cores run in half a minute."""
    return [case for case in small_cases() if 1 < case.world_size and max(case.pp, case.dp, case.tp) == 2]


def pairwise_cover(cases: list[Case]) -> list[Case]:
    """Few of the cases, in which every two factors, sizes of axes too, meet in all their values; greedy."""
    names = ["pp", "dp", "tp", *OPTIONS]

    def pairs(case: Case) -> set[Any]:
        values = [(name, getattr(case, name)) for name in names]
        return set(itertools.combinations(values, 2))

    left = {case: pairs(case) for case in cases}
    open_pairs: set[Any] = set().union(*left.values())
    chosen = []
    while open_pairs:
        best = max(left, key=lambda case: len(left[case] & open_pairs))
        chosen.append(best)
        open_pairs -= left.pop(best)
    return chosen


def by_world_size(cases: list[Case], name: str = "") -> list[Any]:
    """Cases of one world size run in one world, a few at a time."""
    groups: dict[int, list[Case]] = {}
    for case in cases:
        groups.setdefault(case.world_size, []).append(case)
    return [
        pytest.param(
            group[start : start + CASES_PER_WORLD], id=f"{name}{size}ranks-{start // CASES_PER_WORLD}"
        )
        for size, group in sorted(groups.items())
        for start in range(0, len(group), CASES_PER_WORLD)
    ]


COVERS = by_world_size(pairwise_cover(twos())) + by_world_size(pairwise_cover(small_cases()), "larger-")


@pytest.mark.parametrize("cases", everyday(COVERS, lambda name: "larger" not in name))
def test_three_axes_equal_one_process(world: Any, impl: Any, cases: list[Case]) -> None:
    with_truths = [(case, *truths(case)) for case in cases]
    world(check_all, cases[0].world_size, impl, with_truths, deadline=240.0)


SMALL = {
    "tp2": [Case(1, 1, 2), Case(1, 1, 2, zero=2, clip=0.5, tied=True)],
    "dp2": [Case(1, 2, 1, zero=2), Case(1, 2, 1, zero=1, clip=0.5, optimizer="AdamW")],
    "pp2-dp2": [Case(2, 2, 1, zero=2, tied=True), Case(2, 2, 1, zero=1, tied=True, interval=2)],
    "dp2-tp2": [Case(1, 2, 2, zero=2, clip=0.5), Case(1, 2, 2, zero=1, interval=1)],
    "three": [Case(3, 1, 1, zero=1, tied=True, clip=0.5), Case(1, 1, 3, zero=2), Case(1, 3, 1, zero=2)],
}


@pytest.mark.parametrize("cases", [pytest.param(cases, id=name) for name, cases in SMALL.items()])
def test_two_ranks_on_an_axis_equal_one_process(world: Any, impl: Any, cases: list[Case]) -> None:
    world(check_all, cases[0].world_size, impl, [(case, *truths(case)) for case in cases])


@pytest.mark.full
@pytest.mark.parametrize("cases", by_world_size(every_case()))
def test_three_axes_equal_one_process_in_the_full_cross(world: Any, impl: Any, cases: list[Case]) -> None:
    with_truths = [(case, *truths(case)) for case in cases]
    world(check_all, cases[0].world_size, impl, with_truths, deadline=240.0)


def test_the_cover_and_the_cross_are_whole() -> None:
    assert len(LAYOUTS) == 38 and len(every_case()) == 38 * 24
    for small in (small_cases(), twos()):
        cover = pairwise_cover(small)
        for one, other in itertools.combinations(["pp", "dp", "tp", *OPTIONS], 2):
            pairs = [
                {(getattr(case, one), getattr(case, other)) for case in cases} for cases in (cover, small)
            ]
            assert pairs[0] == pairs[1], f"{one} and {other} do not meet in all their values"
        assert any(case.world_size == 8 for case in cover)
