"""§9.3 Public reports A03, A04, A07, B13, B31, B39 with their numbers, and mistakes in a layout.

Guards against: a replicated gradient counted once a rank, tensor-parallel ranks with different data, an
optimizer that steps tensors nobody uses, ZeRO-2 that forgets a micro-batch, a batch triple made with the
world size.
"""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
from oracles import Layer
from small_models import INPUTS, OUTPUTS, linear, make_batch, mean_squared
from test_s09_3_three_axes import Case, check, make, make_layers, truths
from test_s09_3_three_axes import make_batch as make_tokens
from tolerance import LAW, assert_close, differs
from torch import Tensor, nn

import ds_lite
from ds_lite import comm, toy
from ds_lite.pipe import PipelineModule
from ds_lite.tags import Cut, cut
from ds_lite.tensor_parallel import LinearAllreduce, LinearLayer, leave

TP2 = {"tensor_parallel": {"tp_size": 2}}


def settings(**changes: Any) -> dict[str, Any]:
    sgd = {"type": "SGD", "params": {"lr": 0.1}}
    return {"train_micro_batch_size_per_gpu": 2, "optimizer": sgd, **changes}


def start(model: nn.Module, **changes: Any) -> Any:
    optimizer = changes.pop("given", None)
    config = settings(**changes)
    if optimizer is not None:
        del config["optimizer"]
    return ds_lite.initialize(model=model, optimizer=optimizer, config=config)[0]


def number(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float64)


# --------------------------------------------------------------------------------- A07: one norm, one input


class ThreeFourTwelve(nn.Module):
    """A replicated gradient of 3, and shards with 4 and 12."""

    def __init__(self) -> None:
        super().__init__()
        self.whole = nn.Parameter(torch.ones(1, dtype=torch.float64))
        self.parts = nn.Parameter(torch.ones(2, dtype=torch.float64))

    def bind(self, grid: Any) -> None:
        self.group = grid.group("model")
        cut(self.parts, Cut(0, (((0, 1),), ((1, 2),)), self.group))

    def forward(self, x: Tensor) -> Tensor:
        slope = (4.0, 12.0)[comm.get_rank(self.group)]
        return x * (3 * self.whole + leave(slope * self.parts, self.group))


def norm_of_three_kinds(rank: int) -> None:
    for zero, clip in itertools.product((0, 1, 2), (0.0, 6.5)):
        engine = start(ThreeFourTwelve(), zero_optimization={"stage": zero}, gradient_clipping=clip, **TP2)
        engine.backward(engine(torch.ones(2, 1).double()).mean())
        full = {name: engine.gradients.full(name) for name in ("whole", "parts")}
        assert full["whole"].tolist() == [3.0] and full["parts"].tolist() == [4.0, 12.0]
        engine.step()
        norm = number(engine.get_global_grad_norm())
        assert_close(norm, number(13.0), LAW, "once a rank gives 13.342")
        rate = 0.1 * (6.5 / (13 + 1e-6) if clip else 1.0)
        assert_close(engine.module.whole.detach(), number(1 - 3 * rate).view(1), LAW, f"{clip}")


@pytest.mark.parametrize("nprocs", [2, 4])
def test_a07_a_replicated_gradient_counts_once_in_the_norm(world: Any, nprocs: int) -> None:
    world(norm_of_three_kinds, nprocs)


class Cuttable(nn.Sequential):
    """Column, activation, row: whole in one process."""

    def __init__(self) -> None:
        up, down = linear(INPUTS, 6, 1), linear(6, OUTPUTS, 2)
        super().__init__(LinearLayer(up), nn.Tanh(), LinearAllreduce(down))


def other_data_on_one_rank(rank: int, kind: str, odd: int) -> None:
    x, y = make_batch(1)[0]
    if rank == odd:
        x = x + 1e-9
    if kind == "engine":
        start(Cuttable(), **TP2)(x)
    else:
        stages = 2 if kind == "two stages" else 1
        layers = [*Cuttable(), nn.Identity()]
        model = PipelineModule(layers, num_stages=stages, loss_fn=mean_squared, partition_method="uniform")
        labels = y + 1e-9 if kind == "labels" and rank == odd else y
        inputs = x if kind != "labels" else make_batch(1)[0][0]
        start(model, **TP2).train_batch(iter([(inputs, labels)]))


@pytest.mark.parametrize(
    "kind,odd,nprocs",
    [("engine", 1, 2), ("engine", 2, 4), ("stage", 1, 2), ("labels", 0, 2), ("two stages", 1, 4)],
)
def test_a07_different_data_is_refused_on_the_first_batch(
    world: Any, kind: str, odd: int, nprocs: int
) -> None:
    peers = r"\[0, 1\]" if odd < 2 else r"\[2, 3\]"
    match = rf"tensor-parallel ranks {peers} got different data in their first batch.*\(§9.3\)"
    world.raises(ValueError, match, other_data_on_one_rank, nprocs, kind, odd)


def same_data(rank: int) -> None:
    """Replicas may differ, and later batches are not compared."""
    engine = start(Cuttable(), **TP2)
    replica = engine.grid.get_data_parallel_rank()
    for index in range(2):
        x, y = make_batch(4)[2 * index + replica]
        engine.backward(mean_squared(engine(x), y))
        engine.step()


def test_a07_replicas_may_have_different_data(world: Any) -> None:
    world(same_data, 4)


# -------------------------------------------------------------------------------- A03: groups and the norm


def two_equal_groups(rank: int) -> None:
    """Two groups with the same options are one group; the norm covers both, and is taken before clipping."""
    for zero in (0, 1, 2):
        weights, norms = [], []
        for split in (False, True):
            model = Cuttable()
            parameters = list(model.parameters())
            groups = [parameters[:1], parameters[1:]] if split else [parameters]
            optimizer = torch.optim.AdamW([{"params": group} for group in groups], lr=1e-3)
            engine = start(
                model, given=optimizer, gradient_clipping=0.1, zero_optimization={"stage": zero}, **TP2
            )
            data = make_batch(6)[engine.grid.get_data_parallel_rank() :: 2]
            for x, y in data:
                engine.backward(mean_squared(engine(x), y))
                engine.step()
                norms.append(engine.get_global_grad_norm())
            weights.append([p.detach().clone() for p in model.parameters()])
        assert norms[:3] == pytest.approx(norms[3:], rel=1e-12) and min(norms) > 0.1
        for one, two in zip(*weights, strict=True):
            assert_close(one, two, LAW, f"zero={zero}")


def test_a03_two_equal_groups_are_one_group(world: Any) -> None:
    world(two_equal_groups, 4)


def clipped_norm(rank: int) -> None:
    for zero in (0, 1, 2):
        engine = start(Cuttable(), gradient_clipping=0.05, zero_optimization={"stage": zero}, **TP2)
        x, y = make_batch(2)[engine.grid.get_data_parallel_rank()]
        engine.backward(mean_squared(engine(x), y))
        norm = engine.gradients.norm()
        engine.gradients.unscale_and_clip(0.05, norm)
        assert float(norm) > 0.06 and 0.0499 < float(engine.gradients.norm()) <= 0.05


def test_a03_the_clipped_norm_is_at_most_the_limit(world: Any) -> None:
    world(clipped_norm, 4)


# ------------------------------------------------------------------------------ A04: the optimizer came first


def optimizer_first(rank: int) -> None:
    """Built from whole parameters, before they are cut: it steps the parts, every one of them."""
    for zero in (0, 1, 2):
        results = []
        for comes_first in (True, False):
            model = Cuttable()
            build = lambda parameters: torch.optim.Adam(parameters, lr=1e-3)  # noqa: E731
            given = build(model.parameters()) if comes_first else build
            engine = start(model, given=given, zero_optimization={"stage": zero}, **TP2)
            before = [p.detach().clone() for p in model.parameters()]
            x, y = make_batch(1)[0]
            engine.backward(mean_squared(engine(x), y))
            engine.step()
            assert all(differs(p.detach(), old) for p, old in zip(model.parameters(), before, strict=True))
            results.append([p.detach() for p in model.parameters()])
        for one, two in zip(*results, strict=True):
            assert_close(one, two, LAW, f"zero={zero}")


def test_a04_an_optimizer_that_came_first_trains_every_part(world: Any) -> None:
    world(optimizer_first, 2)


def stale_optimizer(rank: int, how: str) -> None:
    model = nn.Sequential(linear(INPUTS, 6, 1), nn.Tanh(), linear(6, OUTPUTS, 2))
    if how == "state":
        model = Cuttable()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    if how == "state":
        model(torch.ones(2, INPUTS).double()).sum().backward()
        optimizer.step()
    elif how == "replaced":
        model = copy.deepcopy(model)
    elif how == "layer":
        model[2] = linear(6, OUTPUTS, 3)
    start(model, given=optimizer, **(TP2 if how == "state" else {}))


STALE = {
    "replaced": r"holds 4 tensors that are no longer in the model.* 0.weight, 0.bias, 2.weight, 2.bias",
    "layer": r"holds 2 tensors .* parameters 2.weight, 2.bias, which would never train; build the optimizer",
    "state": r"state of shape \(6, 5\) for 0.weight, which was cut to \(3, 5\)",
}


@pytest.mark.parametrize("how", list(STALE))
def test_a04_an_optimizer_of_replaced_parameters_is_refused(world: Any, how: str) -> None:
    world.raises(ValueError, STALE[how], stale_optimizer, 2, how)


def part_of_the_model(rank: int) -> None:
    """Training some parameters only is a choice, not a mistake."""
    model = nn.Sequential(linear(INPUTS, 6, 1), nn.Tanh(), linear(6, OUTPUTS, 2))
    optimizer = torch.optim.SGD(model[2].parameters(), lr=0.1)
    before = [p.detach().clone() for p in model.parameters()]
    engine = start(model, given=optimizer)
    x, y = make_batch(1)[0]
    engine.backward(mean_squared(engine(x), y))
    engine.step()
    moved = [differs(p.detach(), old) for p, old in zip(model.parameters(), before, strict=True)]
    assert moved == [False, False, True, True]


def test_a04_training_a_part_of_the_model_is_allowed(world: Any) -> None:
    world(part_of_the_model, 2)


# ---------------------------------------------------------------- B13: ZeRO-2 and several backwards in a step


def accumulating(rank: int, impl: Any, cases: list[Any]) -> None:
    for case, first, last in cases:
        check(impl, case, first, last)


@pytest.mark.parametrize("zero", [0, 1, 2])
def test_b13_three_backwards_three_steps_at_every_stage(world: Any, impl: Any, zero: int) -> None:
    options = [(False, 0.5), (True, 0.0)] if zero < 2 else itertools.product((False, True), (0.0, 0.5))
    cases = [Case(2, 2, 1, zero=zero, tied=tied, clip=clip, optimizer="Adam") for tied, clip in options]
    world(accumulating, 4, impl, [(case, *truths(case)) for case in cases], deadline=120.0)


def fails_in_one_replica(rank: int, impl: Any, at: int) -> None:
    """One stage of one replica raises in its `at`-th backward; its peers wait in a reduce-scatter."""
    case = Case(2, 2, 1, zero=2, m=4)
    layers: list[Layer] = make_layers(case)
    pipeline = make(impl, case, layers)
    count = itertools.count()

    def hook(gradient: Tensor) -> None:
        if next(count) == at:
            raise ValueError("this gradient is refused")

    if rank == 1:
        next(iter(pipeline.engine.module.parameters())).register_hook(hook)
    pipeline.train_batch(iter(make_tokens(4)))


@pytest.mark.parametrize("at", [0, 1, 3])
def test_b13_a_failure_in_one_replica_is_raised_on_all(world: Any, impl: Any, at: int) -> None:
    world.raises(ValueError, "this gradient is refused", fails_in_one_replica, 4, impl, at, deadline=30.0)


# ---------------------------------------------------------------------- B31, B39: ranks of groups, data ranks


def numbers_of_a_layout(rank: int, tp: int, stages: int) -> tuple[int, int, int]:
    layers = [*Cuttable(), nn.Identity()]
    model = PipelineModule(layers, num_stages=stages, loss_fn=mean_squared, partition_method="uniform")
    config = settings(train_batch_size=16, tensor_parallel={"tp_size": tp})
    engine = ds_lite.initialize(model=model, config=config)[0]
    grid = engine.grid
    for axis, size in (("pipe", stages), ("model", tp), ("data", comm.get_world_size() // stages // tp)):
        group = grid.group(axis)
        assert comm.get_world_size(group) == size and comm.get_rank(group) == grid.coordinate(axis)
        ranks = [comm.get_global_rank(group, index) for index in range(size)]
        assert ranks == grid.ranks(axis) and rank in ranks
    assert grid.ranks("model") == [rank - rank % tp + index for index in range(tp)], (
        "tensor ranks: neighbours"
    )
    assert [grid.stage_to_global(stage) for stage in range(stages)] == grid.ranks("pipe")
    return engine.gradient_accumulation_steps(), grid.get_data_parallel_world_size(), grid.get_stage_id()


@pytest.mark.parametrize("tp,stages,nprocs", [(2, 1, 4), (2, 2, 4), (2, 2, 8), (1, 2, 4)])
def test_b39_only_data_ranks_multiply(world: Any, tp: int, stages: int, nprocs: int) -> None:
    """train 16, micro 2: with two replicas 4 steps; the world size would give fewer."""
    replicas = nprocs // tp // stages
    results = world(numbers_of_a_layout, nprocs, tp, stages)
    assert {(steps, size) for steps, size, _ in results} == {(8 // replicas, replicas)}
    assert [stage for *_, stage in results] == [rank // (nprocs // stages) for rank in range(nprocs)]


# -------------------------------------------------------------------------------------------- bad layouts

GPT6 = toy.Shape(width=12, num_heads=6, num_blocks=2, context=4, vocabulary=19, num_kv_heads=3)


def gpt(stages: int, **changes: Any) -> Any:
    layers = toy.parallel_layer_specs(GPT6)
    # The last stage has no attention: it must hear what the others refuse.
    model = PipelineModule(layers, num_stages=stages, loss_fn=toy.loss_fn, seed_layers=True)
    return start(model, **changes)


def refused_layout(rank: int, name: str) -> None:
    tp = {number: {"tensor_parallel": {"tp_size": number}} for number in (2, 3, 4, 8)}
    given = ds_lite.PipeModelDataParallelTopology(num_pp=1, num_mp=2, num_dp=comm.get_world_size() // 2)
    {
        "more ranks than heads": lambda: gpt(1, **tp[8]),
        "inside a kv group": lambda: gpt(1, **tp[4]),
        "inside a kv group, elsewhere": lambda: gpt(2, **tp[4]),
        "not divisible": lambda: gpt(1, **tp[3]),
        "not divisible by both": lambda: gpt(2, **tp[4]),
        "nothing to cut": lambda: start(nn.Sequential(linear(INPUTS, OUTPUTS, 1)), **tp[2]),
        "other topology": lambda: start(
            PipelineModule([*Cuttable()], topology=given, loss_fn=mean_squared), **tp[4]
        ),
        "two spellings": lambda: start(Cuttable(), tensor_parallel={"tp_size": 2, "autotp_size": 4}),
        "replicas": lambda: start(Cuttable(), data_parallel_size=4, **tp[2]),
    }[name]()


REFUSED = {
    "more ranks than heads": (r"8.*num_heads=6|num_heads=6.*8|8.*6 query heads", 8),
    "inside a kv group": (r"3.*4|4.*3", 4),
    "inside a kv group, elsewhere": (r"3.*4|4.*3", 8),
    "not divisible": (r"world size 4 is not divisible by 1 stages \* 3 tensor-parallel ranks", 4),
    "not divisible by both": (r"world size 4 is not divisible by 2 stages \* 4 tensor-parallel ranks", 4),
    "nothing to cut": (r"tensor_parallel asks for 2 ranks, but no layer of the model is cut", 2),
    "other topology": (r"tensor_parallel asks for 4 ranks and the PipelineModule's topology has model=2", 4),
    "two spellings": (r"tp_size=2, .*autotp_size=4 contradict each other", 4),
    "replicas": (r"data_parallel_size=4 in the config, but the ranks form 2 replicas", 4),
}


@pytest.mark.parametrize("name", list(REFUSED))
def test_a_layout_that_cannot_be_is_refused_on_every_rank(world: Any, name: str) -> None:
    match, nprocs = REFUSED[name]
    messages = world.raises(ValueError, match, refused_layout, nprocs, name)
    assert len(set(messages)) == 1 and "(§9" in messages[0]


def stage_3_is_refused(rank: int, pipeline: bool) -> None:
    model: nn.Module = Cuttable()
    if pipeline:
        model = PipelineModule([*Cuttable()], num_stages=2, loss_fn=mean_squared, partition_method="uniform")
    start(model, zero_optimization={"stage": 3})


@pytest.mark.parametrize("pipeline", [False, True])
def test_zero_3_is_refused_with_reason_and_remedy(world: Any, pipeline: bool) -> None:
    match = r"stage=3 is refused: it would gather every parameter .*; write 0, 1 or 2 \(§9.3\)"
    world.raises(ValueError, match, stage_3_is_refused, 2, pipeline)
