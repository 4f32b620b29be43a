"""§9.4 What users of expert parallelism ran into: B03, B26 to B30, A05, A06, and bad input.

Guards against: gradients that grow with ep_size, tokens that cross stages, groups clipped in silence,
collectives where nobody else is, an auxiliary loss that never reaches the gate.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from mixture import Mixture, MixtureBlock, OnStream
from oracles import one_process, split_micro_batches
from shard_checks import pattern
from small_models import Scale, linear
from tolerance import EXACT, LAW, assert_close, differs
from torch import Tensor, nn
from world import WorldError

from ds_lite import comm
from ds_lite.agreement import RemoteError
from ds_lite.grid import PipelineParallelGrid
from ds_lite.moe.layer import MoE
from ds_lite.topology import PipeModelDataParallelTopology, ProcessTopology

F64 = torch.float64
WIDTH, EXPERTS = 6, 4


def make_moe(ep_size: int = 1, *, k: int = 1, **options: Any) -> MoE:
    """Experts of different weights, no noise."""
    settings = {"use_rts": False, "top2_2nd_expert_sampling": False, "min_capacity": 0, **options}
    with torch.random.fork_rng():
        torch.manual_seed(2)
        layer = MoE(WIDTH, nn.Linear(WIDTH, WIDTH), EXPERTS, ep_size, k, **settings).double()
        for parameter in layer.parameters():
            nn.init.normal_(parameter, std=0.6)
    return layer


# --------------------------------------------------------------------- B03: gradients that grow with ep_size


class Sided(nn.Module):
    """y = moe(x), of which the first column counts; the second column says which expert."""

    def __init__(self, ep_size: int) -> None:
        super().__init__()
        options = {"capacity_factor": 1.0, "min_capacity": 1, "use_rts": False}
        self.moe = MoE(2, Scale(1.0), 2, ep_size, 1, **options).double()
        with torch.no_grad():
            self.moe.gate.wg.weight.copy_(torch.tensor([[0.0, 100.0], [0.0, -100.0]]))

    def forward(self, x: Tensor) -> Tensor:
        return self.moe(x)[0][:, 0].mean()


def gradients_of_b03(rank: int, ep_size: int, stage: int) -> dict[str, float]:
    import ds_lite

    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": stage},
    }
    engine, *_ = ds_lite.initialize(model=Sided(ep_size), config=config)
    x = torch.tensor([[[1.0, 1.0], [2.0, -1.0]], [[3.0, 1.0], [4.0, -1.0]]], dtype=F64)[rank]
    engine.backward(engine(x))
    held = [name for name in engine.gradients.names() if "experts" in name]
    return {name[len("moe.experts.") :]: float(engine.gradients.full(name)) for name in held}


@pytest.mark.parametrize("ep_size, stage", [(1, 0), (2, 0), (2, 1), (2, 2)])
def test_b03_gradients_of_experts_do_not_depend_on_ep_size(world: Any, ep_size: int, stage: int) -> None:
    first, second = world(gradients_of_b03, 2, ep_size, stage)
    assert {**first, **second} == {"0.weight": 1.0, "1.weight": 1.5}
    assert len(first) == len(second) == 2 // ep_size


# -------------------------------------------------------------- B26 to B29: gates, as the layer shows them


def test_b26_a_full_expert_drops_by_position_and_dropped_tokens_give_zeros() -> None:
    layer = make_moe(capacity_factor=1.0)
    with torch.no_grad():
        layer.gate.wg.weight.zero_()[0, 0] = 1.0
    x = pattern(5, WIDTH)
    x[:, 0] = 1.0
    y, l_aux, counts = layer(x)
    assert counts.tolist() == [5, 0, 0, 0] and round(l_aux.item(), 5) == 1.90147
    assert_close(y[:2], 0.4753668864186717 * layer.experts["0"](x[:2]), LAW)
    assert not y[2:].any() and y[:2].any()


@pytest.mark.parametrize("tokens", [0, 1, 3])
@pytest.mark.parametrize("k", [1, 2, 3])
def test_b27_fewer_tokens_than_capacity(tokens: int, k: int) -> None:
    layer = make_moe(k=k, capacity_factor=8.0)
    oracle = Mixture(WIDTH, nn.Linear(WIDTH, WIDTH), EXPERTS, k=k, capacity_factor=8.0).double()
    oracle.load_state_dict(layer.state_dict())
    x = pattern(tokens, WIDTH)
    (y, l_aux, _), (truth, true_l_aux) = layer(x), oracle(x)
    assert_close(y, truth, LAW)
    assert_close(l_aux, true_l_aux, LAW)
    (y.square().sum() + l_aux).backward()
    assert all(parameter.grad is not None for parameter in layer.experts.parameters())


@pytest.mark.parametrize("k, policy", [(1, "RSample"), (1, "Jitter"), (2, None)])
def test_b28_evaluation_repeats_itself_and_leaves_its_input(k: int, policy: str | None) -> None:
    noisy = {"noisy_gate_policy": policy, "use_rts": True, "top2_2nd_expert_sampling": True}
    layer = make_moe(k=k, capacity_factor=0.5, eval_capacity_factor=1.5, **noisy)
    x = 0.1 * pattern(13, WIDTH)
    before = x.clone()
    trained = [layer(x)[0] for _ in range(4)]
    assert any(differs(y, trained[0]) for y in trained[1:])
    layer.eval()
    results = [layer(x)[0] for _ in range(4)]
    quiet = make_moe(k=k, eval_capacity_factor=1.5).eval()
    for y in results:
        assert_close(y, quiet(x)[0], EXACT)
    assert_close(x, before, EXACT)


def test_b29_l_aux_and_counts_of_the_report() -> None:
    layer = MoE(4, nn.Identity(), 3, k=2, min_capacity=0, top2_2nd_expert_sampling=False).double()
    logits = torch.tensor([[0.1, 0.9, 0.2], [0.8, 0.1, 0.3], [0.4, 0.6, 0.5], [0.7, 0.2, 0.1]], dtype=F64)
    with torch.no_grad():
        layer.gate.wg.weight.copy_(logits.T)
    _, l_aux, counts = layer(torch.eye(4, dtype=F64))
    assert counts.tolist() == [2, 3, 3] and round(l_aux.item(), 4) == 1.0761


# ------------------------------------------------------------------------------------------ B30: the groups


def lists_of(rank: int, axes: list[str], dims: list[int], ep_size: int, data_first: bool) -> Any:
    grid = PipelineParallelGrid(ProcessTopology(axes, dims))
    grid.make_expert_groups([ep_size], data_first=data_first)
    groups = grid.expert(ep_size)
    assert comm.get_rank(groups.group) == groups.coordinate == grid.coordinate("expert")
    assert grid.group("expert") is groups.group and grid.size("expert") == ep_size
    total = torch.tensor([2.0**rank])
    comm.all_reduce(total, group=groups.group)
    assert int(total) == sum(2**peer for peer in grid.ranks("expert"))
    return list(groups.ranks), list(groups.data_ranks)


B30 = {
    "a": (["pipe", "data"], [2, 2], [[0, 1], [2, 3]], [[0], [1], [2], [3]]),
    "b": (["data", "pipe"], [2, 2], [[0, 2], [1, 3]], [[0], [1], [2], [3]]),
    "c": (["data"], [4], [[0, 1], [2, 3]], [[0, 2], [1, 3]]),
}


@pytest.mark.parametrize("case", list(B30))
def test_b30_groups_stay_inside_a_stage(world: Any, case: str) -> None:
    axes, dims, experts, copies = B30[case]
    for rank, (mine, same) in enumerate(world(lists_of, 4, axes, dims, 2, False)):
        assert rank in mine and mine in experts and rank in same and same in copies
    if case == "c":
        swapped = world(lists_of, 4, axes, dims, 2, True)
        assert [mine for mine, _ in swapped] == [[0, 2], [1, 3], [0, 2], [1, 3]]
        assert [same for _, same in swapped] == [[0, 1], [0, 1], [2, 3], [2, 3]]


def owned(rank: int) -> list[int]:
    layer = make_moe(2)
    layer.set_deepspeed_parallelism()
    return layer.experts.numbers


def test_b30_neighbours_own_other_experts_and_all_are_owned(world: Any) -> None:
    assert world(owned, 4) == [[0, 1], [2, 3], [0, 1], [2, 3]]


def start(rank: int, num_experts: int, ep_size: int, **config: Any) -> None:
    import ds_lite

    model = nn.Sequential(MoE(WIDTH, nn.Linear(WIDTH, WIDTH), num_experts, ep_size))
    ds_lite.initialize(model=model, config={"train_micro_batch_size_per_gpu": 1, **config})


@pytest.mark.parametrize(
    "num_experts, ep_size, match",
    [
        (3, 2, r"num_experts=3 is not divisible by ep_size=2.*\[1, 3\]"),
        (8, 8, r"ep_size=8 does not divide the 4 data x seq ranks.*\[1, 2, 4\]"),
        (3, 3, r"ep_size=3 does not divide the 4"),
        (4, 0, r"ep_size=0 of an MoE layer"),
    ],
)
def test_b30_sizes_that_do_not_fit_are_refused(
    world: Any, num_experts: int, ep_size: int, match: str
) -> None:
    world.raises(ValueError, match, start, 4, num_experts, ep_size)


# ------------------------------------------------------------------------------------- A05: nobody to talk to


def forwards(rank: int, ep_size: int, drop: bool, counts: tuple[int, int]) -> int:
    layer = make_moe(ep_size, k=2, drop_tokens=drop)
    layer.set_deepspeed_parallelism()
    with comm.record() as ledger:
        for _ in range(counts[rank]):
            layer(pattern(5 + rank, WIDTH))
    return ledger.total().calls


@pytest.mark.parametrize("drop", [True, False])
def test_a05_one_rank_an_expert_group_talks_to_nobody(world: Any, drop: bool) -> None:
    assert world(forwards, 2, 1, drop, (1, 3)) == [0, 0]
    assert world(forwards, 2, 2, drop, (2, 2)) == [8, 8], "control: four collectives a forward"


def test_a05_unequal_calls_end_with_a_table(world: Any) -> None:
    with pytest.raises(WorldError, match="AgreeOnCapacity"):
        world(forwards, 2, 2, True, (1, 2), deadline=4.0)


# ------------------------------------------------------------------------------ A06: an l_aux that is lost


class OnlyAux:
    """A constant main loss, and l_aux times a coefficient."""

    def __init__(self, coefficient: float, main: float = 0.0) -> None:
        self.coefficient, self.main = coefficient, main

    def __call__(self, outputs: Any, labels: Tensor) -> Tensor:
        y, l_aux = outputs
        return self.main * (y - labels).square().mean() + 0 * y.sum() + self.coefficient * l_aux


def a06_layers() -> list[Any]:
    block = MixtureBlock(Mixture(4, linear(4, 4, 1), 4, k=2, drop_tokens=False)).double()
    with torch.random.fork_rng():
        torch.manual_seed(1)
        for parameter in block.parameters():
            nn.init.normal_(parameter, std=0.5)
    return [block, OnStream(linear(4, 3, 2))]


def check_a06(rank: int, impl: Any, loss_fn: OnlyAux, truth: Any, batch: Any) -> None:
    pipeline = impl.make_pipeline(
        a06_layers(),
        num_stages=2,
        loss_fn=loss_fn,
        num_micro_batches=3,
        module={"partition_method": "uniform"},
        expert_parallel=2,
    )
    mine = split_micro_batches(batch, replica=pipeline.replica, num_replicas=2)
    assert_close(pipeline.compute_gradients(iter(mine)), truth.loss, LAW)
    gradients = pipeline.gradients()
    for name, gradient in truth.grads.items():
        assert_close(gradients[name], gradient, LAW, name)


@pytest.mark.parametrize("coefficient, main", [(0.01, 0.0), (0.0, 1.0), (0.01, 1.0)])
def test_a06_l_aux_of_the_first_stage_reaches_the_gate(
    world: Any, impl: Any, coefficient: float, main: float
) -> None:
    batch = [(pattern(5, 4, seed=i), pattern(5, 3, seed=9 + i)) for i in range(6)]
    loss_fn = OnlyAux(coefficient, main)
    truth = one_process(a06_layers(), loss_fn, batch, lr=0.1)
    gate = truth.grads["0.mixture.gate.wg.weight"]
    assert differs(gate, torch.zeros_like(gate))
    world(check_a06, 4, impl, loss_fn, truth, batch)


# ------------------------------------------------------------------------------------------------ bad input

HERE = pytest.mark.parametrize(
    "make, match",
    [
        (lambda: make_moe(k=5), "k=5 choices of 4 experts"),
        (lambda: make_moe(capacity_factor=-1.0), "capacity_factor=-1.0"),
        (lambda: make_moe(eval_capacity_factor=float("nan")), "capacity_factor=nan"),
        (lambda: make_moe(noisy_gate_policy="Gauss"), "noisy_gate_policy='Gauss'"),
        (lambda: make_moe(min_capacity=-2), "min_capacity=-2"),
        (lambda: make_moe(min_capacity=1.5), "min_capacity=1.5"),
        (lambda: make_moe(capacity_factor="1.0"), "capacity_factor='1.0'"),
        (lambda: make_moe(k=2.0), "k=2.0 of an MoE layer"),
        (lambda: make_moe(ep_size="2"), "ep_size='2' of an MoE layer"),
        (lambda: MoE(0, nn.Linear(2, 2)), "hidden_size=0 of an MoE layer"),
        (lambda: MoE(2, nn.Linear(2, 2), num_experts=4.0), "num_experts=4.0 of an MoE layer"),
        (lambda: MoE(2, nn.Linear(2, 2), num_experts=0), "num_experts=0 of an MoE layer"),
        (lambda: MoE(2, None), "expert=None is no module"),  # type: ignore[arg-type]
        (lambda: make_moe()(pattern(1)[0]), r"\(\) at an MoE layer of hidden_size=6"),
        (lambda: make_moe()(pattern(3, 5)), r"\(3, 5\) at an MoE layer of hidden_size=6"),
        (lambda: make_moe()(pattern(3, WIDTH) * float("nan")), "cannot route 3 of 3 tokens"),
        (
            lambda: MoE(WIDTH, nn.Linear(WIDTH, 2), 2, k=1)(torch.ones(2, WIDTH)),
            r"expert 0 made \(\d, 2\) from \(\d, 6\)",
        ),
    ],
)


@HERE
def test_bad_input_is_refused_in_words(make: Any, match: str) -> None:
    with pytest.raises((ValueError, TypeError), match=match) as refusal:
        make()
    assert "§9." in str(refusal.value)


def test_zero_3_is_refused(world: Any) -> None:
    world.raises(ValueError, "stage=3 is refused", start_with_zero_3, 2)


def start_with_zero_3(rank: int) -> None:
    start(rank, 4, 2, zero_optimization={"stage": 3})


def nan_on_one_rank(rank: int) -> None:
    layer = make_moe(2)
    layer.set_deepspeed_parallelism()
    layer(pattern(3, WIDTH) * (float("nan") if rank == 1 else 1.0))


def test_a_nan_on_one_rank_is_named_on_all(world: Any) -> None:
    messages = world.raises(ValueError, "the gate cannot route", nan_on_one_rank, 2)
    assert "tokens of another rank" in messages[0] and "3 of 3 tokens" in messages[1]


def fail_alone(rank: int, width: int, used: int) -> None:
    layer = make_moe(2)
    layer.set_deepspeed_parallelism()
    tokens, sizes = (3, (width, used)) if rank == 1 else (4, (WIDTH, 4))
    layer(torch.ones(tokens, sizes[0], dtype=F64), torch.ones(sizes[1]))


@pytest.mark.parametrize(
    "width, used, match",
    [(5, 3, r"\(3, 5\) at an MoE layer"), (WIDTH, 2, r"used_token of shape \(2,\)")],
    ids=["width", "used_token"],
)
def test_a_rank_that_cannot_route_does_not_keep_the_others_waiting(
    world: Any, width: int, used: int, match: str
) -> None:
    messages = world.raises(
        (ValueError, RemoteError), f"{match}|failed before it could route", fail_alone, 2, width, used
    )
    assert "another rank" in messages[0] and "another rank" not in messages[1]


class Blown(nn.Module):
    """Passes its input on, except in the second forward of the first replica."""

    def __init__(self, is_sound: bool) -> None:
        super().__init__()
        self.calls, self.is_sound = 0, is_sound

    def forward(self, stream: Any) -> Any:
        self.calls += 1
        if self.calls == 2 and not self.is_sound:
            raise KeyError("blown")
        return stream


def blown_replica(rank: int, impl: Any) -> None:
    layers = a06_layers()
    layers.insert(0, Blown(is_sound=rank != 0))
    pipeline = impl.make_pipeline(
        layers,
        num_stages=2,
        loss_fn=OnlyAux(0.01, 1.0),
        num_micro_batches=3,
        module={"partition_method": "uniform"},
        expert_parallel=2,
    )
    pipeline.train_batch(iter([(pattern(3, 4), pattern(3, 3))] * 3))


def test_a_replica_that_fails_beside_an_exchange_says_why_and_leaves(world: Any, impl: Any) -> None:
    """The others wait for it in the middle of the batch: an agreement at its end would never come."""
    with pytest.raises(WorldError, match="rank 0 raised KeyError"):
        world(blown_replica, 4, impl, deadline=30.0)


def uneven(rank: int, k: int, drop: bool, counts: list[int]) -> None:
    """Each rank its own number of tokens: outputs and summed gradients are those of the whole layer."""
    whole = make_moe(2, k=k, drop_tokens=drop)
    layer = copy.deepcopy(whole)
    layer.set_deepspeed_parallelism()
    inputs = [pattern(tokens, WIDTH, seed=i) for i, tokens in enumerate(counts)]
    x = inputs[rank].clone().requires_grad_()
    y, l_aux, _ = layer(x)
    (y.square().sum() + l_aux).backward()
    truths = [whole(one.requires_grad_()) for one in inputs]
    assert_close(y, truths[rank][0], LAW)
    sum(out.square().sum() + aux for out, aux, _ in truths).backward()
    assert_close(x.grad, inputs[rank].grad, LAW)
    for number in layer.experts.numbers:
        mine, theirs = layer.experts[str(number)].weight.grad, whole.experts[str(number)].weight.grad
        assert_close(mine, theirs, LAW, f"expert {number}")


@pytest.mark.parametrize("k, drop", [(1, True), (2, False), (3, True)])
def test_ranks_may_have_other_numbers_of_tokens(world: Any, k: int, drop: bool) -> None:
    for counts in ([7, 3], [5, 0], [0, 1], [0, 0]):
        world(uneven, 2, k, drop, counts)


def cut_experts_unannounced(rank: int) -> None:
    from ds_lite.tensor_parallel import LinearLayer

    layer = MoE(WIDTH, LinearLayer(nn.Linear(WIDTH, WIDTH)), 4, 2)
    grid = PipelineParallelGrid(PipeModelDataParallelTopology(1, 2, 2))
    grid.make_expert_groups([2])
    layer.bind(grid)


def test_experts_of_tensor_parallel_layers_have_to_be_announced(world: Any) -> None:
    world.raises(ValueError, "enable_expert_tensor_parallelism=True", cut_experts_unannounced, 4)


def bound_twice(rank: int) -> None:
    layer = make_moe(2)
    layer.set_deepspeed_parallelism()
    grid = PipelineParallelGrid()
    grid.make_expert_groups([2], data_first=True)
    layer.bind(grid)


def test_a_layer_is_not_dealt_out_twice(world: Any) -> None:
    world.raises(ValueError, "do not call set_deepspeed_parallelism before it", bound_twice, 4)
