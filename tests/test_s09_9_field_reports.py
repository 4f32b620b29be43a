"""§9.9 Field reports B25 and A09: ties and initial weights, each with its whole kind.

Guards against: tied copies that drift, are averaged or counted twice, ties whose collectives wait for each
other, initial weights that depend on the split, a stage that builds more than its own layers."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from adapters.ds_lite import Pipeline, merge_equal
from field_pipelines import BATCH, F64, WIDTH, Gate, assert_gradients, floats, mine_of, squares
from meter import LiveStorages
from oracles import Tied, one_process
from tolerance import EXACT, LAW, assert_close, differs
from torch import Tensor, nn

import ds_lite
from ds_lite import comm
from ds_lite.pipe.module import LayerSpec, PipelineModule, TiedLayerSpec

# ------------------------------------------------------------------------------------------------- B25


class Scale(nn.Module):
    """y = w x with a scalar w."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(2.0, dtype=F64))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x


def _scalar_tie(rank: int, impl: Any, num_stages: int) -> None:
    scale = Scale()
    pipeline = impl.make_pipeline(
        [Tied("w", scale), Tied("w", scale)], num_stages=num_stages, loss_fn=None, num_micro_batches=1
    )
    one = torch.tensor([1.0], dtype=F64)
    with comm.record() as ledger:
        loss = pipeline.compute_gradients(iter([(one, one)]))
    assert float(loss) == 4.0
    # w used twice: 2 w x. Not their mean, 2, and not the sum taken twice, 8.
    assert float(pipeline.gradients()["tied_modules.w.weight"]) == 4.0
    if impl.name == "ds_lite":  # whose ledger it is
        assert ledger.total(axis="tied").calls == (1 if num_stages > 1 else 0)


@pytest.mark.parametrize("num_stages", [1, 2])
def test_b25a_and_d_the_gradient_of_a_tie_is_the_sum_of_both_uses(
    world: Any, impl: Any, num_stages: int
) -> None:
    world(_scalar_tie, num_stages, impl, num_stages)


class Inner(nn.Module):
    """A tied layer whose parameters have dotted names."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH).double()

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x))


def without_bias(module: nn.Module, x: Tensor) -> Tensor:
    return x @ module.linear.weight


def inner(key: str, forward_fn: Callable[..., Tensor] | None = None) -> TiedLayerSpec:
    attributes = ["linear.weight", "linear.bias"]
    return TiedLayerSpec(key, Inner, forward_fn=forward_fn, tied_weight_attr=attributes)


def oracle_layers(specs: list[Any], weights: dict[str, Tensor]) -> list[Any]:
    """Plain layers for these specs, one module a tied key, with the given weights."""
    shared: dict[str, nn.Module] = {}
    layers: list[Any] = []
    for index, spec in enumerate(specs):
        if isinstance(spec, TiedLayerSpec):
            module = shared.setdefault(spec.key, spec.build())
            prefix = f"tied_modules.{spec.key}"
            layers.append(Tied(spec.key, module, spec.forward_fn))
        else:
            module, prefix = spec.build(), str(index)
            layers.append(module)
        module.load_state_dict({name: weights[f"{prefix}.{name}"] for name in module.state_dict()})
    return layers


def check_ties(specs: list[Any], num_stages: int, what: str, *, seed: int, zero: int = 0) -> None:
    """Five AdamW steps with weight decay: copies equal bit by bit after every step, and to one process."""
    torch.manual_seed(seed)
    num_replicas = torch.distributed.get_world_size() // num_stages
    model = PipelineModule(specs, num_stages=num_stages, loss_fn=squares, partition_method="uniform")
    engine, *_ = ds_lite.initialize(
        model=model,
        config={
            "train_micro_batch_size_per_gpu": BATCH,
            "gradient_accumulation_steps": 2,
            "zero_optimization": {"stage": zero},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "eps": 1e-8, "weight_decay": 0.1}},
        },
    )
    pipeline = Pipeline(engine)
    batch = floats(5 * 2 * num_replicas)
    start = pipeline.weights()  # merge_equal: copies on different stages are equal bit by bit
    layers = oracle_layers(specs, start)
    first = one_process(layers, squares, batch[: 2 * num_replicas], lr=1e-3)
    adamw = partial(torch.optim.AdamW, weight_decay=0.1, eps=1e-8)
    truth = one_process(layers, squares, batch, lr=1e-3, optimizer=adamw, steps=5)
    pipeline.compute_gradients(mine_of(pipeline, batch[: 2 * num_replicas]))
    assert_gradients(pipeline, first, what)
    pipeline.clear_gradients()
    data = mine_of(pipeline, batch, steps=5)
    for step in range(5):
        assert_close(pipeline.train_batch(data), truth.losses[step], LAW, f"{what}: loss of step {step}")
        assert_close(pipeline.norm(), truth.norms[step], LAW, f"{what}: norm of step {step}")
        after = pipeline.weights()
    for name, weight in truth.weights.items():
        assert differs(weight, start[name]), f"{what}: {name} did not move"
        assert_close(after[name], weight, LAW, f"{what}: {name} after 5 steps")


def _opposite_orders(rank: int, num_stages: int) -> None:
    check_ties([inner("a"), inner("b"), inner("b"), inner("a")], num_stages, "a b | b a", seed=4)
    plain = LayerSpec(Gate)
    check_ties(
        [inner("b"), plain, inner("a"), inner("a"), inner("b"), plain], num_stages, "b a | a b", seed=4
    )


@pytest.mark.parametrize("nprocs", [2, 4])
def test_b25b_keys_in_opposite_order_on_two_stages_do_not_hang(world: Any, nprocs: int) -> None:
    world(_opposite_orders, nprocs, 2, deadline=30)


def _other_seeds(rank: int, zero: int) -> None:
    drawn = torch.manual_seed(100 + rank).initial_seed()
    seeds: list[Any] = [None] * torch.distributed.get_world_size()
    comm.all_gather_object(seeds, drawn)
    assert len(set(seeds)) == len(seeds), "control: every rank starts from another seed"
    check_ties([inner("a"), LayerSpec(Gate), inner("a")], 2, "other seeds", seed=100 + rank, zero=zero)


@pytest.mark.parametrize("nprocs,zero", [(2, 0), (4, 0), (4, 1)])
def test_b25c_stages_seeded_differently_start_equal_and_stay_equal(
    world: Any, nprocs: int, zero: int
) -> None:
    world(_other_seeds, nprocs, zero)


def _same_stage(rank: int) -> None:
    specs = [inner("a"), LayerSpec(Gate), inner("a"), LayerSpec(Gate), LayerSpec(Gate), LayerSpec(Gate)]
    with comm.record() as ledger:
        check_ties(specs, 2, "both users on stage 0", seed=4)
    assert ledger.total(axis="tied").calls == 0


def test_b25d_users_on_one_stage_need_no_communication(world: Any) -> None:
    world(_same_stage, 2)


def _three_users(rank: int) -> None:
    gate = LayerSpec(Gate)
    check_ties([inner("a"), gate, inner("a"), gate, inner("a"), gate], 3, "three users", seed=4)
    mixed = [inner("b"), inner("a"), inner("a", without_bias), gate, inner("a", without_bias), inner("b")]
    check_ties(mixed, 3, "bias used on one stage only", seed=4)
    check_ties([gate, gate, inner("a"), inner("a"), inner("a"), gate], 3, "without stage 0", seed=4)


def test_b25e_three_users_over_three_stages(world: Any) -> None:
    world(_three_users, 3, deadline=30)


# ------------------------------------------------------------------------------------------------- A09

BUILT: list[int] = []  # numbers of the layers that this process built for good


class Drawn(nn.Module):
    """Draws from all three generators."""

    def __init__(self, number: int, width: int = WIDTH) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        noise = torch.from_numpy(np.random.standard_normal(width)) + random.random()
        self.noise = nn.Parameter(noise.to(self.linear.weight.dtype))
        if self.linear.weight.device.type != "meta":
            BUILT.append(number)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + self.noise


def recipe(width: int = WIDTH) -> list[Any]:
    """Eight layers of equal shapes; the tied one is also at both ends, and one is no module."""
    plain = [LayerSpec(Drawn, number, width) for number in range(1, 6)]
    tied = TiedLayerSpec("drawn", Drawn, 0, width, tied_weight_attr=["linear.weight", "noise"])
    return [tied, *plain[:3], torch.tanh, *plain[3:], tied]


def generators() -> tuple[Any, ...]:
    return torch.get_rng_state().tolist(), np.random.get_state()[1].tolist(), random.getstate()


def draws() -> tuple[float, float, float]:
    return torch.rand(1).item(), float(np.random.rand()), random.random()


def _build(num_stages: int, method: str, seed_layers: bool, base_seed: int = 1234) -> dict[str, Tensor]:
    """The full state dict, put together from all ranks; ranks that share a name must agree bit by bit."""
    model = PipelineModule(
        recipe(),
        num_stages=num_stages,
        seed_layers=seed_layers,
        base_seed=base_seed,
        partition_method=method,
    )
    return merge_equal(model.state_dict())


def _same_weights(rank: int) -> None:
    for seed_layers in (True, False):
        splits = {}
        for num_stages, method in itertools.product((1, 2, 4), ("uniform", "parameters", "type:drawn")):
            for set_seed in (torch.manual_seed, np.random.seed, random.seed):
                set_seed(21)
            before = generators()
            splits[num_stages, method] = _build(num_stages, method, seed_layers)
            if seed_layers:
                assert generators() == before
            rest: list[Any] = [None] * 4
            comm.all_gather_object(rest, draws())
            assert len(set(rest)) == 1, f"ranks draw differently after building: {rest}"
            assert splits.setdefault(("draws", seed_layers), rest[0]) == rest[0], "draws depend on the split"
        first = splits[1, "uniform"]
        assert len(first) == 18  # five layers and the tie, three tensors each
        for key, state in splits.items():
            if "draws" in key:
                continue
            assert sorted(state) == sorted(first), key
            for name, tensor in first.items():
                assert_close(state[name], tensor, EXACT, f"{key}: {name}")
        for kind in ("linear.weight", "linear.bias", "noise"):
            alike = [tensor for name, tensor in first.items() if name.endswith(kind)]
            assert len(alike) == 6
            assert all(differs(a, b) for a, b in itertools.combinations(alike, 2)), f"twin layers: {kind}"
    assert differs(_build(2, "uniform", True, 1235)["3.noise"], _build(2, "uniform", True)["3.noise"])


def test_a09_initial_weights_do_not_depend_on_the_split(world: Any) -> None:
    world(_same_weights, 4)


def _two_models(rank: int) -> None:
    torch.manual_seed(21)
    a, b = _build(2, "uniform", False), _build(2, "uniform", False)
    assert all(differs(a[name], b[name]) for name in a), "two models of one program are twins"


def test_a09_two_models_without_seeds_of_their_own_differ(world: Any) -> None:
    world(_two_models, 2)


def _replicas(rank: int) -> None:
    torch.manual_seed(rank)
    model = PipelineModule(recipe(), num_stages=2, loss_fn=squares)
    alone: list[Any] = [None] * 4
    comm.all_gather_object(alone, next(model.parameters()).detach())
    assert differs(alone[0], alone[1]), "control: seeded by rank, the replicas start apart"
    config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    ds_lite.initialize(model=model, config=config)
    merged = merge_equal(model.state_dict())
    assert len(merged) == 18


def test_a09_replicas_are_equal_bit_by_bit(world: Any) -> None:
    world(_replicas, 4)


def _own_layers_only(rank: int) -> tuple[list[int], list[int]]:
    BUILT.clear()
    model = PipelineModule(recipe(), num_stages=4, partition_method="uniform")
    return model.parts, list(BUILT)


def test_a09_a_stage_builds_its_own_layers_only(world: Any) -> None:
    results = world(_own_layers_only, 4)
    assert [parts for parts, _ in results] == [[0, 2, 4, 6, 8]] * 4
    assert [built for _, built in results] == [[0, 1], [2, 3], [4], [5, 0]]


def _memory(rank: int, method: str) -> None:
    width = 64
    layer = 4 * (width * width + 2 * width)  # bytes of one layer in float32
    watched = LiveStorages(min_bytes=4 * width)
    with watched:
        model = PipelineModule(recipe(width), num_stages=4, partition_method=method)
    stage = sum(p.numel() * p.element_size() for p in model.parameters())
    assert watched.current == stage
    # The stage plus one layer; below three layers is what the whole model, six, could never meet.
    small = 8 * 4 * width  # vectors that live while noise is drawn in float64 and converted
    assert stage <= watched.peak <= stage + layer + small, (watched.peak, stage, layer)
    assert watched.peak < 3.2 * layer < 6 * layer


@pytest.mark.parametrize("method", ["uniform", "parameters", "type:drawn"])
def test_a09_building_takes_the_memory_of_the_stage_and_one_layer(world: Any, method: str) -> None:
    world(_memory, 4, method)
