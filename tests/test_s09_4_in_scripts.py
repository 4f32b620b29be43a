"""§9.4 MoE layers as scripts use them: noise, config keys, optimizers made early, the toy GPT.

Guards against: noise that depends on the layout or comes again otherwise in a recomputed layer, keys that do
nothing, an optimizer that still holds the experts of other ranks, an engine made twice that mixes experts.
"""

from __future__ import annotations

import copy
from typing import Any, TypeVar

import pytest
import torch
from adapters.ds_lite import Pipeline, merge_equal
from oracles import one_process
from rings import everyday
from shard_checks import pattern
from tolerance import EXACT, LAW, assert_close, differs
from torch import Tensor, nn

from ds_lite import toy_moe
from ds_lite.moe.layer import MoE, moe_layers
from ds_lite.moe.utils import (
    configure_moe_param_groups,
    has_moe_layers,
    is_moe_param,
    is_moe_param_group,
    split_params_into_different_moe_groups_for_optimizer,
)
from ds_lite.tags import tags_of, whole
from ds_lite.toy_layers import Shape
from ds_lite.toy_text import MicroBatch
from ds_lite.zero import ShardedBucket

Module = TypeVar("Module", bound=nn.Module)

# ------------------------------------------------------------------------------- noise, whatever the layout

SMALL = Shape(width=6, num_heads=2, num_blocks=2, context=5, vocabulary=11)
STEPS, LR = 2, 0.3
F64 = torch.float64
NOISY = {"k1": {"k": 1, "capacity_factor": 0.8}, "k2": {"k": 2, "capacity_factor": 0.8}}


def tokens_of(count: int) -> list[MicroBatch]:
    generator = torch.Generator().manual_seed(4)
    inputs, labels = (torch.randint(SMALL.vocabulary, (count, 2, 5), generator=generator) for _ in range(2))
    return list(zip(inputs, labels, strict=True))


def train_noisy(
    rank: int, options: dict[str, Any], pp: int, dp: int, tp: int, ep: int, interval: int, policy: str | None
) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and weights of two steps on four micro-batches each, with every kind of noise on."""
    import ds_lite
    from ds_lite.pipe import PipelineModule

    specs = toy_moe.parallel_moe_layer_specs if tp > 1 else toy_moe.moe_layer_specs
    mixture = toy_moe.Mixture(ep_size=ep, min_capacity=0, **options)
    model = PipelineModule(
        specs(SMALL, mixture),
        num_stages=pp,
        loss_fn=toy_moe.MoELoss(0.1),
        seed_layers=True,
        activation_checkpoint_interval=interval,
    ).double()
    for layer in moe_layers(model):
        layer.gate.noisy_gate_policy = policy
        with torch.no_grad():
            layer.gate.wg.weight.mul_(3.0)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 4 // dp,
        "optimizer": {"type": "SGD", "params": {"lr": LR}},
        "tensor_parallel": {"tp_size": tp},
        "seed": 77,
    }
    engine, *_ = ds_lite.initialize(model=model, config=config)
    replica, m = engine.grid.get_data_parallel_id(), 4 // dp
    batches = tokens_of(4 * STEPS)
    losses = []
    for step in range(STEPS):
        start = 4 * step + replica * m
        losses.append(float(engine.train_batch(iter(batches[start : start + m]))))
    return losses, Pipeline(engine).weights()


LAYOUTS = {
    "recomputed": (1, 1, 1, 1, 1),
    "dp2": (1, 2, 1, 2, 0),
    "pp2": (2, 1, 1, 1, 0),
    "tp2": (1, 1, 2, 1, 0),
}
MORE = {"dp2-tp2": (1, 2, 2, 2, 1)}


POLICIES = [("k1", "RSample"), ("k1", "Jitter"), ("k2", None)]


@pytest.mark.parametrize("name, policy", everyday(POLICIES, lambda case: case[1] != "Jitter"))
def test_noise_does_not_depend_on_the_layout(world: Any, name: str, policy: str | None) -> None:
    """One process and others meet the same noise; a seed of its own and no noise give another result."""
    options = NOISY[name]
    losses, weights = world(train_noisy, 1, options, 1, 1, 1, 1, 0, policy)[0]
    quiet = {**options, "use_rts": False, "top2_2nd_expert_sampling": False}
    assert world(train_noisy, 1, quiet, 1, 1, 1, 1, 0, None)[0][0] != losses
    for layout, (pp, dp, tp, ep, interval) in {**LAYOUTS, **(MORE if name == "k1" else {})}.items():
        results = world(train_noisy, pp * dp * tp, options, pp, dp, tp, ep, interval, policy)
        assert_close(torch.tensor(results[0][0], dtype=F64), torch.tensor(losses, dtype=F64), LAW, layout)
        for parameter, value in weights.items():
            assert_close(results[0][1][parameter], value, LAW, f"{layout}: {parameter}")


# -------------------------------------------------------------------------- plain engines, made in many ways


class Net(nn.Module):
    """A linear layer and a mixture; returns the loss."""

    def __init__(self, ep_size: int, min_capacity: int | None = 0) -> None:
        super().__init__()
        options = {"use_rts": False, "top2_2nd_expert_sampling": False, "min_capacity": min_capacity}
        self.inner = nn.Linear(4, 4)
        self.moe = MoE(4, nn.Linear(4, 4), 4, ep_size, 2, **options)

    def forward(self, x: Tensor) -> Tensor:
        y, l_aux, _ = self.moe(torch.tanh(self.inner(x)))
        return (x + y).square().mean() + 0.1 * l_aux


def make_net(ep_size: int, min_capacity: int | None = 0) -> Net:
    return with_weights(Net(ep_size, min_capacity))


def with_weights(net: Module) -> Module:
    """float64, and every weight drawn anew, so that no two experts are alike."""
    with torch.random.fork_rng():
        torch.manual_seed(3)
        for parameter in net.double().parameters():
            nn.init.normal_(parameter, std=0.6)
    return net


def settings(zero: int = 0, **more: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 6,
        "zero_optimization": {"stage": zero, **more.pop("zero_keys", {})},
        **more,
    }


DATA = [(pattern(6, 4, seed=i), None) for i in range(4)]


def truth_of_net() -> dict[str, Tensor]:
    truth = one_process([make_net(1)], None, DATA, lr=LR, steps=2)
    return {name[2:]: weight for name, weight in truth.weights.items()}


def train_net(engine: Any, steps: int = 2) -> dict[str, Tensor]:
    for step in range(steps):
        engine.backward(engine(DATA[2 * step + engine.grid.get_data_parallel_rank()][0]))
        engine.step()
    return merge_equal({name: whole(p) for name, p in engine.module.named_parameters()})


# ----------------------------------------------------------- replicas that do not do the same in a backward


class Detour(Net):
    """A layer after the mixture that only positive batches take, so one replica may lack its gradient."""

    def __init__(self, ep_size: int) -> None:
        super().__init__(ep_size)
        self.outer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y, l_aux, _ = self.moe(torch.tanh(self.inner(x)))
        y = self.outer(y) if x[0, 0] > 0 else y
        return (x + y).square().mean() + 0.1 * l_aux


def lacks_a_gradient(rank: int, zero: int, expected: dict[str, Tensor]) -> None:
    import ds_lite

    config = settings(zero, zero_keys={"reduce_bucket_size": 20})
    config["optimizer"] = {"type": "SGD", "params": {"lr": LR}}
    engine, *_ = ds_lite.initialize(model=with_weights(Detour(2)), config=config)
    for step in range(2):
        engine.backward(engine(detours()[2 * step + rank][0]))
        engine.step()
    found = merge_equal({name: whole(p) for name, p in engine.module.named_parameters()})
    for name, weight in found.items():
        assert_close(weight, expected[name], LAW, name)


def detours() -> list[MicroBatch]:
    """Only the second replica takes the way over the last layer."""
    data = [(x.clone(), None) for x, _ in DATA]
    for index, (x, _) in enumerate(data):
        x[0, 0] = 1.0 if index % 2 else -1.0
    return data


@pytest.mark.parametrize("zero", [0, 1, 2])
def test_a_replica_may_lack_a_gradient_beside_an_exchange(world: Any, zero: int) -> None:
    truth = one_process([with_weights(Detour(1))], None, detours(), lr=LR, steps=2)
    world(lacks_a_gradient, 2, zero, {name[2:]: weight for name, weight in truth.weights.items()})


class First(nn.Module):
    """The mixture is the first layer, so its input needs no gradient."""

    def __init__(self, ep_size: int, frozen: tuple[str, ...]) -> None:
        super().__init__()
        options = {"use_rts": False, "top2_2nd_expert_sampling": False}
        self.moe, self.out = MoE(4, nn.Linear(4, 4), 4, ep_size, 2, **options), nn.Linear(4, 4)
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(not name.startswith(frozen))

    def forward(self, x: Tensor) -> Tensor:
        y, l_aux, _ = self.moe(x)
        return self.out(y).square().mean() + 0.1 * l_aux


def make_first(ep_size: int, frozen: tuple[str, ...]) -> First:
    return with_weights(First(ep_size, frozen))


def with_frozen_experts(rank: int, frozen: tuple[str, ...], zero: int, expected: dict[str, Tensor]) -> None:
    import ds_lite

    config = {**settings(zero), "optimizer": {"type": "SGD", "params": {"lr": LR}}}
    engine, *_ = ds_lite.initialize(model=make_first(2, frozen), config=config)
    for name, weight in train_net(engine).items():
        assert_close(weight, expected[name], LAW, name)


@pytest.mark.parametrize("zero,gate", [(0, "trained"), (0, "frozen"), (2, "trained"), (2, "frozen")])
def test_the_experts_of_one_rank_may_be_frozen(world: Any, zero: int, gate: str) -> None:
    frozen = ("moe.experts.0.", "moe.experts.1.", *(["moe.gate."] if gate == "frozen" else []))
    truth = one_process([make_first(1, frozen)], None, DATA, lr=LR, steps=2)
    assert differs(truth.weights["0.moe.experts.2.weight"], truth.before["0.moe.experts.2.weight"])
    world(with_frozen_experts, 2, frozen, zero, {name[2:]: w for name, w in truth.weights.items()})


def twice_before_the_step(rank: int, zero: int) -> dict[str, Tensor]:
    """Two backwards of one micro-batch each, at the boundary; the gradient is the sum of both."""
    import ds_lite

    config = {**settings(zero), "optimizer": {"type": "SGD", "params": {"lr": LR}}}
    engine, *_ = ds_lite.initialize(model=make_net(2), config=config)
    for number in (0, 2):
        engine.backward(engine(DATA[number + rank][0]))
    names = [name for name in engine.gradients.names() if "experts" in name]
    return {name: engine.gradients.full(name) for name in names}


@pytest.mark.parametrize("zero", [1, 2])
def test_two_backwards_before_the_step_add_up_for_experts_too(world: Any, zero: int) -> None:
    truth = one_process([make_net(1)], None, DATA, lr=LR)
    for found in world(twice_before_the_step, 2, zero):
        for name, gradient in found.items():
            assert_close(
                gradient, 2 * truth.grads[f"0.{name}"], LAW, name
            )  # one process took the mean of four


def test_two_backwards_of_experts_in_one_buffer_are_refused(world: Any) -> None:
    world.raises(RuntimeError, "with experts on several ranks", twice_before_the_step, 2, 0)


def other_sizes(rank: int) -> None:
    import ds_lite

    ds_lite.initialize(model=make_net(1 + rank), config=settings())


def test_other_ep_sizes_on_another_rank_are_refused(world: Any) -> None:
    world.raises(ValueError, r"have ep_size \[1\], those of rank 1 \[2\]", other_sizes, 2)


@pytest.mark.parametrize("zero", [0, 1, 2])
def test_only_the_experts_of_one_rank_may_be_trained(world: Any, zero: int) -> None:
    frozen = ("moe.experts.2.", "moe.experts.3.", "moe.gate.", "out.")
    truth = one_process([make_first(1, frozen)], None, DATA, lr=LR, steps=2)
    assert differs(truth.weights["0.moe.experts.0.weight"], truth.before["0.moe.experts.0.weight"])
    world(with_frozen_experts, 2, frozen, zero, {name[2:]: w for name, w in truth.weights.items()})


def without_a_graph(rank: int) -> None:
    import ds_lite

    config = {**settings(), "optimizer": {"type": "SGD", "params": {"lr": LR}}}
    engine, *_ = ds_lite.initialize(model=make_net(2), config=config)
    loss = engine(DATA[rank][0])
    engine.backward(loss if rank == 0 else torch.zeros((), dtype=F64))


def test_a_loss_without_graph_is_refused_where_others_wait_for_its_exchange(world: Any) -> None:
    world.raises(ValueError, "the loss of data rank 1 has no graph", without_a_graph, 2)


# -------------------------------------------------------------------------------- optimizers made too early


def with_early_optimizer(rank: int, how: str, zero: int, expected: dict[str, Tensor]) -> None:
    """The optimizer or its groups are made while every rank still has all experts."""
    import ds_lite

    model, config = make_net(2), settings(zero)
    everything = list(model.parameters())
    given: dict[str, Any] = {}
    if how == "optimizer":
        given["optimizer"] = torch.optim.SGD(everything, lr=LR)
    else:
        config["optimizer"] = {"type": "SGD", "params": {"lr": LR}}
        groups = split_params_into_different_moe_groups_for_optimizer({"params": everything, "name": "all"})
        given["model_parameters"] = everything if how == "list" else groups
    engine, optimizer, *_ = ds_lite.initialize(model=model, config=config, **given)
    held = sum(p.numel() for group in optimizer.param_groups for p in group["params"])
    assert held < sum(p.numel() for p in everything), "experts of other ranks are let go"
    for name, weight in train_net(engine).items():
        assert_close(weight, expected[name], LAW, name)


@pytest.mark.parametrize("how", ["optimizer", "list", "groups"])
def test_an_optimizer_made_early_lets_other_ranks_experts_go(world: Any, how: str) -> None:
    for zero in (0, 1, 2):
        world(with_early_optimizer, 2, how, zero, truth_of_net())


def made_twice(rank: int, expected: dict[str, Tensor]) -> None:
    import ds_lite

    model, config = make_net(2), settings(optimizer={"type": "SGD", "params": {"lr": LR}})
    ds_lite.initialize(model=model, config=config)
    before = merge_equal({name: p.detach().clone() for name, p in model.named_parameters()})
    engine, *_ = ds_lite.initialize(model=model, config=config)
    after = merge_equal({name: p.detach().clone() for name, p in model.named_parameters()})
    for name, value in before.items():
        assert_close(after[name], value, EXACT, name)
    for name, weight in train_net(engine).items():
        assert_close(weight, expected[name], LAW, name)


def test_a_second_engine_finds_each_expert_where_it_was(world: Any) -> None:
    world(made_twice, 2, truth_of_net())


def whole_buckets(rank: int, threshold: int, zero: int, expected: dict[str, Tensor]) -> bool:
    """Whether the layer stayed out of the sharding; it trains alike."""
    import ds_lite

    config = settings(
        zero,
        optimizer={"type": "SGD", "params": {"lr": LR}},
        zero_keys={"moe_layer_size_threshold": threshold},
    )
    engine, *_ = ds_lite.initialize(model=make_net(2), config=config)
    kinds = {
        (name.startswith("moe."), isinstance(bucket, ShardedBucket))
        for bucket in engine.gradients.buckets
        for name, parameter in engine.module.named_parameters()
        if any(parameter is other for other in bucket.parameters)
    }
    assert (False, True) in kinds and len(kinds) == 2, kinds
    for name, weight in train_net(engine).items():
        assert_close(weight, expected[name], LAW, name)
    return (True, False) in kinds


@pytest.mark.parametrize("zero", [1, 2])
def test_small_moe_layers_stay_out_of_sharding(world: Any, zero: int) -> None:
    size = make_net(1).moe.whole_size
    assert size == 16 + 4 * 20
    for threshold, is_whole in ((0, False), (size, False), (size + 1, True)):
        assert world(whole_buckets, 2, threshold, zero, truth_of_net()) == [is_whole] * 2


def capacities(rank: int) -> list[int]:
    import ds_lite

    found = []
    for own, config in ((None, {"moe_min_capacity": 7}), (2, {"moe_min_capacity": 7}), (None, {})):
        model = make_net(1, own)
        ds_lite.initialize(model=model, config=settings(zero_keys=config))
        found.append(model.moe.gate.min_capacity)
    return found


def test_min_capacity_comes_from_the_layer_or_from_the_config(world: Any) -> None:
    assert world(capacities, 1) == [[7, 2, 4]]
    assert MoE(4, nn.Linear(4, 4)).gate.min_capacity == 4


# ------------------------------------------------------------------------------ what scripts ask and expect


def test_parameters_of_experts_are_told_apart() -> None:
    net = make_net(2)
    of_experts = {name for name, p in net.named_parameters() if is_moe_param(p)}
    assert of_experts == {name for name, _ in net.named_parameters() if name.startswith("moe.experts.")}
    assert has_moe_layers(net) == (True, 4) and has_moe_layers(net.inner) == (False, 0)
    groups = configure_moe_param_groups(net.parameters())
    assert [is_moe_param_group(group) for group in groups] == [False, True]
    assert groups[1]["name"] == "ep_size_2"
    small = split_params_into_different_moe_groups_for_optimizer(
        {"params": list(net.parameters()), "lr": 0.5}, max_group_size=20
    )
    assert [sum(p.numel() for p in group["params"]) for group in small] == [36, 20, 20, 20, 20]
    assert all(group["lr"] == 0.5 for group in small)
    copied = copy.deepcopy(net)
    assert not any(is_moe_param(p) for p in copied.parameters())  # torch forgets it
    copied.moe.tag_parameters()
    assert sum(map(is_moe_param, copied.parameters())) == 8


def test_the_names_of_deepspeed_lead_here() -> None:
    from ds_lite.moe.sharded_moe import TopKGate, _capacity, top1gating, top2gating, topkgating
    from ds_lite.moe.sharded_moe import _AllToAll as theirs

    from ds_lite.moe import experts, layer, mappings, utils
    from ds_lite.moe.dispatch import _AllToAll

    assert theirs is _AllToAll and all(map(callable, (TopKGate, top1gating, top2gating, topkgating)))
    assert _capacity(torch.zeros(10, 4), 1.25, 0) == 4
    assert callable(layer.MoE) and callable(experts.Experts) and callable(mappings.drop_tokens)
    assert callable(utils.split_params_into_different_moe_groups_for_optimizer)


def test_a_layer_without_ranks_is_the_whole_layer() -> None:
    layer = make_net(4).moe
    assert layer.experts.numbers == [0, 1, 2, 3] and "experts [0, 1, 2, 3] of 4" in repr(layer)
    assert set(layer.state_dict()) == {"gate.wg.weight"} | {
        f"experts.{number}.{name}" for number in range(4) for name in ("weight", "bias")
    }
    assert all(tags_of(p).owner == "dense" for p in layer.parameters())
    x = pattern(2, 3, 4)
    y, l_aux, counts = layer(x, used_token=torch.tensor([[1, 1, 0], [1, 0, 1]]))
    assert y.shape == x.shape and l_aux.dim() == 0 and int(counts.sum()) == 2 * 4
    assert not y[0, 2].any() and not y[1, 1].any() and y[0, 0].any()


# ---------------------------------------------------------------------------------------------------- the toy


def toy_loss(rank: int, pp: int, ep: int, dp: int) -> tuple[float, bool]:
    import ds_lite
    from ds_lite.pipe import PipelineModule

    mixture = toy_moe.Mixture(ep_size=ep, use_rts=False, top2_2nd_expert_sampling=False)
    loss_fn = toy_moe.MoELoss(0.1)
    specs = toy_moe.moe_layer_specs(SMALL, mixture)
    model = PipelineModule(specs, num_stages=pp, loss_fn=loss_fn, seed_layers=True).double()
    plain = toy_moe.MoEGPT(SMALL, mixture).double()
    batches = tokens_of(2)
    expected = sum(loss_fn(plain(x), labels).item() for x, labels in batches) / 2
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2 // dp,
        "optimizer": {"type": "SGD", "params": {"lr": LR}},
    }
    engine, *_ = ds_lite.initialize(model=model, config=config)
    replica = engine.grid.get_data_parallel_id()
    loss = engine.train_batch(iter(batches if dp == 1 else batches[replica : replica + 1]))
    assert_close(loss, torch.tensor(expected, dtype=F64), LAW)
    without = nn.functional.cross_entropy(plain(batches[0][0])[0].flatten(0, 1), batches[0][1].flatten())
    return float(loss), differs(without, loss_fn(plain(batches[0][0]), batches[0][1]))


@pytest.mark.parametrize("pp, ep, dp", [(1, 1, 1), (3, 1, 1), (2, 2, 2)])
def test_the_toy_is_one_model_plain_and_in_a_pipeline(world: Any, pp: int, ep: int, dp: int) -> None:
    for loss, l_aux_counts in world(toy_loss, pp * dp, pp, ep, dp):
        assert 2 < loss < 4 and l_aux_counts
