"""§9.10 PipelineEngine against one process. Guards against: a loss divided twice or never, a tie that is not
summed or summed twice, gradients that leak between steps, a norm that counts a replica, a shard that misses
its update, a buffer that is reused too early."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from equality import check_equality
from oracles import MicroBatch, Tied, Truth, one_process, split_micro_batches
from rings import everyday
from tolerance import FP32, assert_close, differs
from torch import Tensor, nn

VOCABULARY, WIDTH, TOKENS, BATCH = 11, 6, 5, 3  # all different


@dataclass(frozen=True)
class Case:
    """One layout and its options; `kind` is what travels between stages."""

    num_stages: int
    num_micro_batches: int
    num_replicas: int
    tied: bool = False
    clip: float = 0.0
    interval: int = 0
    zero: int = 0
    kind: str = "tensor"
    optimizer: str = "SGD"

    @property
    def lr(self) -> float:
        return 1e-3 if self.optimizer == "AdamW" else 0.1

    def __str__(self) -> str:
        return " ".join(f"{name}={value}" for name, value in vars(self).items() if value)


class Block(nn.Module):
    """A residual block with biases; passes a mask and a float that needs no gradient along."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, 7)
        self.outer = nn.Linear(7, WIDTH)
        self.scale = scale

    def forward(self, x: Any) -> Any:
        hidden, rest = (x[1], x) if isinstance(x, tuple) else (x, None)
        hidden = hidden + self.scale * self.outer(torch.tanh(self.inner(hidden)))
        if rest is None:
            return hidden
        rotary, _, mask, ids = rest
        return rotary, hidden * rotary.cos().unsqueeze(-1) + mask.unsqueeze(-1) * 0.1, mask, ids


class ToTuple(nn.Module):
    """(hidden) -> (rotary float without gradient, hidden, bool mask, int64 ids)."""

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        rotary = torch.linspace(0, 1, TOKENS, dtype=hidden.dtype).expand(hidden.shape[:2]).contiguous()
        return rotary, hidden, rotary > 0.4, torch.arange(TOKENS)


class FromTuple(nn.Module):
    def forward(self, x: tuple[Tensor, ...]) -> Tensor:
        return x[1] + x[3].unsqueeze(-1) * 0.01


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.project(hidden)


def as_head(embedding: nn.Module, hidden: Tensor) -> Tensor:
    return hidden @ embedding.weight.t()


def make_layers(case: Case) -> list[Any]:
    """Five to nine layers, the same on every rank; float64, no bias is zero."""
    with torch.random.fork_rng():
        torch.manual_seed(7)
        embedding = nn.Embedding(VOCABULARY, WIDTH)
        blocks: list[Any] = [Block(0.5 + 0.1 * index) for index in range(3)]
        if case.kind == "tuple":
            blocks = [ToTuple(), *blocks, FromTuple()]
        layers: list[Any] = [embedding, *blocks, nn.LayerNorm(WIDTH), Head()]
        if case.tied:
            layers = [Tied("word", embedding), *blocks, nn.LayerNorm(WIDTH), Tied("word", embedding, as_head)]
        for layer in layers:
            module = layer.module if isinstance(layer, Tied) else layer
            for parameter in module.parameters() if isinstance(module, nn.Module) else ():
                nn.init.normal_(parameter, std=0.4)
            if isinstance(module, nn.Module):
                module.double()
    return layers


def make_batch(count: int, steps: int) -> list[MicroBatch]:
    """`steps` global batches of `count` micro-batches, no two samples alike."""
    generator = torch.Generator().manual_seed(3)

    def ids() -> Tensor:
        return torch.randint(VOCABULARY, (BATCH, TOKENS), generator=generator)

    return [(ids(), ids()) for _ in range(count * steps)]


def loss_fn(logits: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


STEPS = 2
CASES_PER_WORLD = 16


def truths(case: Case) -> tuple[Truth, Truth]:
    """One process after one step and after all of them; computed once, for all ranks."""
    layers, count = make_layers(case), case.num_micro_batches * case.num_replicas
    batch = make_batch(count, STEPS)

    def truth(steps: int) -> Truth:
        options = {"lr": case.lr, "optimizer": case.optimizer, "clip": case.clip or None, "steps": steps}
        return one_process(layers, loss_fn, batch[: count * steps], **options)

    return truth(1), truth(STEPS)


def check(impl: Any, case: Case, first: Truth, last: Truth) -> None:
    """One case on all ranks: gradients first, then the loss, norm and weights of two steps."""
    assert torch.distributed.get_world_size() == case.num_stages * case.num_replicas
    batch = make_batch(case.num_micro_batches * case.num_replicas, STEPS)
    pipeline = impl.make_pipeline(
        make_layers(case),
        num_stages=case.num_stages,
        loss_fn=loss_fn,
        num_micro_batches=case.num_micro_batches,
        micro_batch_size=BATCH,
        lr=case.lr,
        optimizer=case.optimizer,
        config={"gradient_clipping": case.clip, "zero_optimization": {"stage": case.zero}},
        module={"activation_checkpoint_interval": case.interval},
    )
    check_equality(pipeline, batch, first, last, str(case))


def check_all(rank: int, impl: Any, cases: list[tuple[Case, Truth, Truth]]) -> None:
    for case, first, last in cases:
        check(impl, case, first, last)


LAYOUTS = [
    Case(num_stages, num_micro_batches, num_replicas)
    for num_stages, num_micro_batches, num_replicas in itertools.product(
        (1, 2, 3, 4), (1, 2, 3, 4, 9), (1, 2)
    )
]
OPTIONS = {
    "tied": (False, True),
    "clip": (0.0, 0.05),
    "interval": (0, 2),
    "zero": (0, 1, 2),
    "kind": ("tensor", "tuple"),
    "optimizer": ("SGD", "AdamW"),
}


def pairwise_cover() -> list[dict[str, Any]]:
    """Few option sets in which every two options meet in every combination of their values; greedy."""
    names = list(OPTIONS)
    rows = [dict(zip(names, row)) for row in itertools.product(*OPTIONS.values())]

    def pairs(row: dict[str, Any]) -> set[Any]:
        return {((a, row[a]), (b, row[b])) for a, b in itertools.combinations(names, 2)}

    open_pairs = set().union(*map(pairs, rows))
    chosen = []
    while open_pairs:
        best = max(rows, key=lambda row: len(pairs(row) & open_pairs))
        chosen.append(best)
        open_pairs -= pairs(best)
    return chosen


def with_options(layout: Case, options: dict[str, Any]) -> Case:
    return Case(layout.num_stages, layout.num_micro_batches, layout.num_replicas, **options)


def by_layout(cases: list[Case]) -> list[Any]:
    """The cases that share a number of stages and of replicas run in one world, one after another."""
    groups: dict[tuple[int, int], list[Case]] = {}
    for case in cases:
        groups.setdefault((case.num_stages, case.num_replicas), []).append(case)
    return [pytest.param(group, id=f"pp{pp}-dp{dp}") for (pp, dp), group in groups.items()]


COVER = pairwise_cover()
# Every layout, and each option set on every (stages, replicas), spread over the numbers of micro-batches.
QUICK = [with_options(layout, COVER[index % len(COVER)]) for index, layout in enumerate(LAYOUTS)] + [
    Case(pp, m, dp, **options)
    for pp, dp in itertools.product((1, 2, 3, 4), (1, 2))
    for options, m in zip(COVER, itertools.cycle((2, 3, 1)))
]
FULL = [
    with_options(layout, dict(zip(OPTIONS, row)))
    for layout in LAYOUTS
    for row in itertools.product(*OPTIONS.values())
]


def test_the_cover_meets_every_pair_of_options() -> None:
    for (a, values_a), (b, values_b) in itertools.combinations(OPTIONS.items(), 2):
        met = {(row[a], row[b]) for row in COVER}
        assert met == set(itertools.product(values_a, values_b)), f"{a} and {b} do not meet in every way"
    assert len(COVER) <= 10


def run_all(world: Any, impl: Any, cases: list[Case]) -> None:
    """A few cases a world: every engine makes process groups, which go, with their threads, at its end."""
    for start in range(0, len(cases), CASES_PER_WORLD):
        some = cases[start : start + CASES_PER_WORLD]
        size = some[0].num_stages * some[0].num_replicas
        world(check_all, size, impl, [(case, *truths(case)) for case in some], deadline=240)


@pytest.mark.parametrize(
    "cases", everyday(by_layout(QUICK), lambda name: name not in ("pp4-dp2", "pp3-dp2", "pp4-dp1"))
)
def test_a_pipeline_equals_one_process(world: Any, impl: Any, cases: list[Case]) -> None:
    run_all(world, impl, cases)


def check_in_float32(rank: int, impl: Any, cases: list[Case]) -> None:
    """Losses, norms and weights of two steps, to the rounding of float32."""
    for case in cases:
        layers = make_layers(case)
        for layer in layers:
            (layer.module if isinstance(layer, Tied) else layer).float()
        m, replicas = case.num_micro_batches, case.num_replicas
        batch = make_batch(m * replicas, STEPS)
        truth = one_process(layers, loss_fn, batch, lr=case.lr, clip=case.clip or None, steps=STEPS)
        pipeline = impl.make_pipeline(
            layers,
            num_stages=case.num_stages,
            loss_fn=loss_fn,
            num_micro_batches=m,
            micro_batch_size=BATCH,
            lr=case.lr,
            config={"gradient_clipping": case.clip, "zero_optimization": {"stage": case.zero}},
        )
        part = {"replica": pipeline.replica, "num_replicas": replicas, "steps": STEPS}
        data = iter(split_micro_batches(batch, **part))
        for step in range(STEPS):
            assert_close(pipeline.train_batch(data), truth.losses[step], FP32, f"{case}: loss of step {step}")
            norm = truth.norms[step].double()
            assert_close(pipeline.norm(), norm, FP32, f"{case}: norm of step {step}")
        for name, weight in pipeline.weights().items():
            assert differs(weight, truth.before[name]), f"control: {name} did not move"
            assert_close(weight, truth.weights[name], FP32, f"{case}: {name}")


TIED_CLIP_ZERO = ((False, 0.0, 1), (True, 0.0, 0), (True, 0.0, 1), (False, 0.05, 0), (True, 0.05, 1))
SINGLE = [
    Case(pp, 3, dp, tied=tied, clip=clip, zero=zero)
    for pp, dp in ((1, 2), (2, 1), (2, 2))
    for tied, clip, zero in TIED_CLIP_ZERO
]


@pytest.mark.parametrize("cases", by_layout(SINGLE))
def test_a_float32_pipeline_equals_one_process(world: Any, impl: Any, cases: list[Case]) -> None:
    """What lives in float32 by design, such as ZeRO's masters, is no excuse here."""
    world(check_in_float32, cases[0].num_stages * cases[0].num_replicas, impl, cases)


@pytest.mark.full
@pytest.mark.parametrize("cases", by_layout(FULL))
def test_a_pipeline_equals_one_process_in_the_full_cross(world: Any, impl: Any, cases: list[Case]) -> None:
    run_all(world, impl, cases)
