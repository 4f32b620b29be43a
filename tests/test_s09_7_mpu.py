"""§9.7 The mpu protocol both ways: our grid on foreign groups, and our names for foreign libraries.

Guards against: groups over the wrong axis or made twice, a coordinate taken from the global rank, a wrong
order of look-up, an mpu that lies on one rank, cut parameters reduced as if they were copies."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from foreign_mpu import make_mpu, members
from torch import nn

from ds_lite import comm
from ds_lite.agreement import raise_together
from ds_lite.foreign_tags import adopt_tags
from ds_lite.grid import PipelineParallelGrid
from ds_lite.mpu import FAMILIES, MpuGrid, mpu_fault
from ds_lite.tags import Tags, tags_of
from ds_lite.topology import ProcessTopology

WORDS = ("rank", "world_size", "group")
AXIS = {"data": "dp", "seq": "cp", "model": "tp", "pipe": "pp"}  # our word for an axis, and Megatron's
NEEDED = [("pipe",), ("data",), ("seq",), ("model",), ("data", "seq"), ("pipe", "model")]
NEEDED += [("data", "seq", "model")]
LAYOUTS: list[tuple[str, str, dict[str, int]]] = [
    ("core", "tp-cp-dp-pp", {"tp": 2, "dp": 2}),
    ("core", "dp-tp-cp-pp", {"tp": 2, "dp": 2}),
    ("core", "tp-cp-dp-pp", {"cp": 2, "dp": 2}),
    ("core", "dp-cp-tp-pp", {"tp": 2, "cp": 2}),
    ("sequence", "cp-dp-tp-pp", {"cp": 2, "dp": 2}),
    ("sequence", "tp-cp-dp-pp", {"cp": 4}),
    ("slice", "pp-dp-tp-cp", {"tp": 2, "dp": 2}),
    ("slice", "tp-cp-dp-pp", {"dp": 4}),
    ("minimum", "dp-tp-cp-pp", {"tp": 2, "dp": 2}),
    ("minimum", "tp-cp-dp-pp", {"tp": 4}),
]
# Of SEMANTICS 2.5, with the axes each speaks about.
NAMES = {
    "data_parallel": ("data",),
    "model_parallel": ("pipe", "model"),
    "tensor_model_parallel": ("model",),
    "slice_parallel": ("model",),
    "pipeline_model_parallel": ("pipe",),
    "pipe_parallel": ("pipe",),
    "sequence_parallel": ("seq",),
    "sequence_data_parallel": ("data", "seq"),
}


def _failing() -> Any:
    raise AssertionError("data parallel group is not initialized")


def _say(value: Any) -> Any:
    return lambda: value


def check_grid(grid: Any, rank: int, order: str, sizes: dict[str, int]) -> int:
    """Sizes, coordinates, members and sums of every group; returns how many were without rank 0."""
    sizes = {"tp": 1, "cp": 1, "dp": 1, "pp": 1, **sizes}
    without_zero = 0
    for axes in NEEDED:
        lists = members(order, sizes, tuple(AXIS[axis] for axis in axes))
        mine = next(ranks for ranks in lists if rank in ranks)
        assert grid.ranks(*axes) == mine == dist.get_process_group_ranks(grid.group(*axes)), axes
        assert grid.size(*axes) == len(mine), axes
        if len(axes) == 1:
            assert grid.coordinate(*axes) == mine.index(rank), axes
        value = torch.tensor([2.0**rank], dtype=torch.float64)
        comm.all_reduce(value, group=grid.group(*axes))
        assert value.item() == sum(2.0**member for member in mine), axes
        without_zero += len(mine) > 1 and 0 not in mine
    return without_zero


def check_names(mpu: Any, grid: Any) -> None:
    """Every name of the protocol is there and says what the grid says."""
    for family, axes in NAMES.items():
        group = getattr(mpu, f"get_{family}_group")()
        assert dist.get_process_group_ranks(group) == grid.ranks(*axes), family
        assert getattr(mpu, f"get_{family}_world_size")() == grid.size(*axes), family
        assert getattr(mpu, f"get_{family}_rank")() == grid.ranks(*axes).index(dist.get_rank()), family
    assert mpu.get_data_parallel_group_ranks() == grid.ranks("data")
    # DeepSpeed reads the batch arithmetic differently when this name exists.
    assert not hasattr(mpu, "initialize_sequence_parallel")


# --------------------------------------------------------------------------- a grid on foreign groups


def _foreign_groups(rank: int) -> int:
    without_zero = 0
    for names, order, sizes in LAYOUTS:
        mpu = make_mpu(order, names=names, **sizes)
        before = dist.get_pg_count()
        grid = MpuGrid(mpu)
        assert dist.get_pg_count() - before <= 1, "only the group of this rank alone is ours"
        without_zero += check_grid(grid, rank, order, sizes)
        check_names(grid, grid)
        tensor = FAMILIES["model"] if names != "core" else ("tensor_model_parallel",)
        family = next(family for family in tensor if hasattr(mpu, f"get_{family}_rank"))
        if sizes.get("tp", 1) > 1:
            assert grid.group("model") is getattr(mpu, f"get_{family}_group")()
        if sizes.get("dp", 1) > 1:
            assert grid.group("data") is mpu.get_data_parallel_group()
        assert grid.get_stage_id() == 0 and grid.stage_to_global(0) == rank
        assert grid.get_global_rank() == rank and f"data={grid.coordinate('data')}" in grid.place
    return without_zero


def test_the_grid_takes_its_groups_from_any_mpu(world: Any) -> None:
    counts = world(_foreign_groups, 4)
    assert counts[0] == 0 and min(counts[1:]) >= 5  # groups that do not hold rank 0 were among them


def _lookup_order(rank: int) -> None:
    """Each step adds a name that goes before the others; all of them have groups of their own."""
    mpu = make_mpu(names="minimum", tp=2, dp=2)
    assert MpuGrid(mpu).group("model") is mpu.get_model_parallel_group()
    for names, family in (("slice", "slice_parallel"), ("core", "tensor_model_parallel")):
        newer = make_mpu(names=names, tp=2, dp=2)
        for word in WORDS:
            setattr(mpu, f"get_{family}_{word}", getattr(newer, f"get_{family}_{word}"))
        assert MpuGrid(mpu).group("model") is getattr(newer, f"get_{family}_group")()
    del mpu.get_tensor_model_parallel_group  # half a family is passed over
    assert MpuGrid(mpu).group("model") is mpu.get_slice_parallel_group()


def test_tensor_goes_before_slice_before_model(world: Any) -> None:
    world(_lookup_order, 4)


def _nones(rank: int) -> None:
    """An mpu without groups: None is the world for all replicas, and nobody else on an axis of one."""
    words = {"get_data_parallel_rank": rank, "get_data_parallel_world_size": dist.get_world_size()}
    words |= {"get_model_parallel_rank": 0, "get_model_parallel_world_size": 1}
    words |= {"get_data_parallel_group": None, "get_model_parallel_group": None}
    grid = MpuGrid(SimpleNamespace(**{name: _say(value) for name, value in words.items()}))
    check_grid(grid, rank, "tp-cp-dp-pp", {"dp": dist.get_world_size()})


@pytest.mark.parametrize("nprocs", [1, 3])
def test_a_group_may_be_none_where_its_size_says_which(world: Any, nprocs: int) -> None:
    world(_nones, nprocs)


def _three_axes(rank: int) -> None:
    order, sizes = "cp-tp-dp-pp", {"tp": 2, "cp": 2, "dp": 2}
    core = make_mpu(order, **sizes)
    grid = MpuGrid(core)
    check_grid(grid, rank, order, sizes)
    assert grid.group("data", "seq") is core.get_data_parallel_group(with_context_parallel=True)
    sequence = make_mpu(order, names="sequence", **sizes)
    assert MpuGrid(sequence).group("data", "seq") is sequence.get_sequence_data_parallel_group()
    del sequence.get_sequence_data_parallel_group  # now the grid has to make it
    check_grid(MpuGrid(sequence), rank, order, sizes)


def test_data_and_sequence_together_are_taken_or_made(world: Any) -> None:
    world(_three_axes, 8)


def _numbered_backwards(rank: int) -> None:
    mpu = make_mpu("tp-cp-dp-pp", tp=2, dp=2, backwards=True)
    grid = MpuGrid(mpu)
    assert grid.ranks("model") == [[1, 0], [1, 0], [3, 2], [3, 2]][rank]
    assert grid.coordinate("model") == 1 - rank % 2 == mpu.get_tensor_model_parallel_rank()
    assert grid.coordinate("data") == 1 - rank // 2


def test_coordinates_are_those_of_the_group_not_of_the_global_rank(world: Any) -> None:
    world(_numbered_backwards, 4)


def _round_trip(rank: int) -> None:
    """Our own grid is an mpu, also for our own code; so is the grid that stands on one."""
    for axes, dims in ((["pipe", "data", "model"], [1, 2, 2]), (["model", "data"], [2, 2])):
        ours = PipelineParallelGrid(ProcessTopology(axes, dims))
        check_names(ours, ours)
        for grid in (MpuGrid(ours), MpuGrid(MpuGrid(ours))):
            assert grid.group("model") is ours.group("model") and grid.group("data") is ours.group("data")
            check_names(grid, ours)
    with pytest.raises(ValueError, match=r"no topology.*\(§9.7\)$"):
        grid.topology()
    with pytest.raises(ValueError, match=r"stage_id=1 .*'data': 2.*\(§9.7\)$"):
        grid.stage_to_global(1)


def test_our_grid_is_an_mpu_for_our_own_code(world: Any) -> None:
    world(_round_trip, 4)


class _Consumer:
    """How Megatron and DeepSpeed use an mpu: by these names only, and nothing of ours."""

    def __init__(self, mpu: Any) -> None:
        names = ("tensor_model", "slice", "model")  # in this order: DeepSpeed's utils/bwc.py
        prefix = next(f"get_{name}_parallel_" for name in names if hasattr(mpu, f"get_{name}_parallel_rank"))
        self.tensor_group = getattr(mpu, prefix + "group")()
        self.first_rank = dist.get_process_group_ranks(self.tensor_group)[0]
        self.micro_batches = 8 // mpu.get_data_parallel_world_size()
        self.is_last_stage = (
            mpu.get_pipeline_model_parallel_rank() == mpu.get_pipeline_model_parallel_world_size() - 1
        )
        self.overflow_group = mpu.get_model_parallel_group()


def _consumed(rank: int) -> None:
    grid = PipelineParallelGrid(ProcessTopology(["pipe", "model"], [2, 2]))
    consumer = _Consumer(grid)
    value = torch.tensor([2.0**rank], dtype=torch.float64)
    dist.all_reduce(value, group=consumer.tensor_group)
    assert value.item() == [3.0, 3.0, 12.0, 12.0][rank] and consumer.first_rank == rank // 2 * 2
    assert consumer.is_last_stage == (rank >= 2) and consumer.micro_batches == 8
    dist.all_reduce(value, group=consumer.overflow_group)
    assert value.item() == 30.0  # all four: pipe x tensor


def test_a_library_that_knows_megatrons_names_only_can_use_our_grid(world: Any) -> None:
    world(_consumed, 4)


# ----------------------------------------------------------------------------------------- bad input


# What a good mpu (tp=2, dp=2) says otherwise, on which ranks, and what every rank raises then.
TP, DP, ALL = "tensor_model_parallel", "data_parallel", [0, 1, 2, 3]
NO_DATA: dict[str, Any] = {f"get_{DP}_{word}": None for word in WORDS}
PIPE = {"get_pipeline_model_parallel_world_size": _say(2)}
LIES: dict[str, tuple[dict[str, Any], list[int], str]] = {
    "no group": ({f"get_{TP}_group": None}, ALL, rf"has no get_{TP}_group; for the model axis .* or model_p"),
    "no data": (NO_DATA, [2], rf"a module, has no get_{DP}_world_size, get_{DP}_rank, get_{DP}_group; for"),
    "early": (
        {f"get_{DP}_rank": _failing},
        [3],
        r"rank\(\) failed with AssertionError: data .*; make the mpu's",
    ),
    "pipeline": (PIPE, ALL, r"get_pipe\w+_world_size\(\) is 2, but the model is not a PipelineModule: the"),
    "not whole": ({f"get_{DP}_rank": _say(0.5)}, [1], rf"get_{DP}_rank\(\) is 0.5; return an integer"),
    "rank": (
        {f"get_{TP}_rank": _say(0)},
        [1],
        rf"_group\(\) is \[0, 1\] on rank 1, but get_{TP}_rank\(\) is 0",
    ),
    "size": (
        {f"get_{DP}_world_size": _say(4)},
        ALL,
        rf"is \[\d, \d\] on.* get_{DP}_world_size\(\) is 4; the",
    ),
    "names": (
        {"get_slice_parallel_rank": _say(5)},
        [2],
        rf"is 5 but mpu.get_{TP}_rank\(\) is 0; both.* model",
    ),
    "outside": (
        {f"get_{DP}_group": _say(-100)},
        [1, 2],
        rf"get_{DP}_group\(\) is -100, which torch.*this rank",
    ),
    "none": (
        {f"get_{DP}_group": _say(None)},
        [3],
        rf"get_{DP}_group\(\) is None, which torch.* does not know",
    ),
    "no mpu": ({}, [], r"an? int, has no get_data_parallel_world_size"),
}


def _lying(rank: int, lie: str) -> None:
    mpu = make_mpu("tp-cp-dp-pp", tp=2, dp=2)
    changes, on, _ = LIES[lie]
    vars(mpu).update(changes if rank in on else {})
    MpuGrid(mpu if changes else 3)


@pytest.mark.parametrize("lie", LIES)
def test_an_mpu_that_lies_on_one_rank_is_refused_on_all(world: Any, lie: str) -> None:
    match = LIES[lie][-1]
    world.raises(TypeError if "has no" in match else ValueError, match + r".*\(§9.7\)$", _lying, 4, lie)


def _mixed(rank: int, how: str) -> None:
    """Each family is right in itself; together they are no mesh."""
    mpu = make_mpu("tp-cp-dp-pp", names="minimum", tp=2, dp=2)
    data = make_mpu("tp-cp-dp-pp", names="minimum", dp=4) if how == "product" else mpu
    source = "model_parallel" if how == "same axis" else DP
    changes = {f"get_{DP}_{word}": getattr(data, f"get_{source}_{word}") for word in WORDS}
    MpuGrid(SimpleNamespace(**{**vars(mpu), **changes}))


@pytest.mark.parametrize(
    "how,match",
    [
        (
            "product",
            r"get_data_parallel_world_size\(\)=4 \* .*=1 \* get_model_p.*=2 = 8 in a world of 4.*§9.7",
        ),
        (
            "same axis",
            r"get_data_parallel_group\(\) over data is \[0, 1\] on rank 0, but \[.*\] share its other",
        ),
    ],
)
def test_families_that_make_no_mesh_are_refused_in_the_same_words(world: Any, how: str, match: str) -> None:
    assert len(set(world.raises(ValueError, match, _mixed, 4, how))) == 1


def _sizes_by_rank(rank: int) -> None:
    names = {"names": "minimum"}
    tensor, data = make_mpu(tp=4, **names), make_mpu(dp=4, **names)
    MpuGrid(tensor if rank < 2 else data)


def test_ranks_that_see_other_sizes_are_refused(world: Any) -> None:
    match = r"{'data': 4, .*'model': 1} on rank 2 and {'data': 1, .*'model': 4} on rank 0; .*\(§9.7\)$"
    world.raises(ValueError, match, _sizes_by_rank, 4)


# -------------------------------------------------------------------------- beside a PipelineModule


def _agreeing(rank: int) -> None:
    for axes in (["pipe", "data"], ["pipe", "model"], ["data", "model"], ["data", "seq"]):
        sizes = {AXIS[axis]: 2 for axis in axes}
        grid = PipelineParallelGrid(ProcessTopology(axes, [2, 2]))
        assert mpu_fault(grid, grid) is None
        for names in ("core", "sequence", "slice"):
            if "cp" not in sizes or names != "slice":
                assert mpu_fault(make_mpu(names=names, **sizes), grid) is None, (names, sizes)
        little = SimpleNamespace(get_data_parallel_world_size=_say(grid.size("data")))
        assert mpu_fault(little, grid) is None


def test_an_mpu_of_the_same_layout_is_no_fault(world: Any) -> None:
    world(_agreeing, 4)


# Beside pipe=2 x data=2: order, second axis and names of an mpu with pp=2; what rank 2 hears; the fault.
GRID_SAYS = r".* but the PipelineModule's grid says .*; pass an mpu of the same layout, or none"
CP = {"get_context_parallel_world_size": _say(2)}
CONTRADICTIONS: dict[str, tuple[str, dict[str, Any], str]] = {
    "sizes": (
        "tp-cp-dp-pp tp core",
        {},
        r"get_(data|tensor_model)_parallel_world_size\(\) is \d" + GRID_SAYS,
    ),
    "order": ("tp-cp-pp-dp dp core", {}, r"get_(data|pipe)\w+_(rank|group)\(\) is" + GRID_SAYS),
    "slice": ("tp-cp-pp-dp dp slice", {}, r"get_(data|pipe)_parallel_(rank|group)\(\) is" + GRID_SAYS),
    "one rank": ("tp-cp-dp-pp dp core", CP, r"get_context_parallel_world_size\(\) is 2" + GRID_SAYS),
    "early": (
        "tp-cp-dp-pp dp core",
        {f"get_{DP}_group": _failing},
        rf"get_{DP}_group\(\) failed with Assert",
    ),
}


def _contradicting(rank: int, name: str) -> None:
    layout, changes, _ = CONTRADICTIONS[name]
    order, other, names = layout.split()
    grid = PipelineParallelGrid(ProcessTopology(["pipe", "data"], [2, 2]))
    mpu = make_mpu(order, names=names, **{"pp": 2, other: 2})
    vars(mpu).update(changes if rank == 2 else {})
    raise_together(mpu_fault(mpu, grid))


@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_an_mpu_that_contradicts_a_pipeline_is_refused_on_all_ranks(world: Any, name: str) -> None:
    world.raises(ValueError, CONTRADICTIONS[name][-1] + r".*\(§9.7\)$", _contradicting, 4, name)


def _members_only(rank: int) -> None:
    """Sizes and ranks agree on every rank, but the data groups join other ranks: 0 with 3, 1 with 2."""
    grid = PipelineParallelGrid(ProcessTopology(["data", "model"], [2, 2]))
    groups = [dist.new_group(ranks) for ranks in ([0, 3], [1, 2])]
    mpu = make_mpu(dp=2, tp=2)
    assert mpu_fault(mpu, grid) is None
    mpu.get_data_parallel_group = _say(groups[rank in (1, 2)])  # type: ignore[attr-defined]
    fault = mpu_fault(mpu, grid)
    assert f"get_data_parallel_group() is {[[0, 3], [1, 2]][rank in (1, 2)]} but the Pipe" in str(fault)
    assert "has no name of the protocol" in str(mpu_fault({"mpu": 1}, grid))


def test_the_members_of_a_group_are_compared_not_only_its_size(world: Any) -> None:
    world(_members_only, 4)


# ------------------------------------------------------------------------------ the marks of parameters


def test_megatrons_marks_become_tags() -> None:
    model = nn.ModuleDict({"a": nn.Linear(2, 2), "q_layernorm": nn.LayerNorm(2), "b": nn.Linear(2, 2)})
    a, b = model["a"], model["b"]
    a.weight.tensor_model_parallel, a.bias.tensor_model_parallel = True, False
    b.weight.model_parallel, b.bias.sequence_parallel = True, True
    b.weight.allreduce, a.weight.allreduce = False, True
    adopt_tags(model)
    tags = {name: tags_of(parameter) for name, parameter in model.named_parameters()}
    assert tags["a.weight"] == Tags(model="sharded") and tags["a.bias"] == Tags()
    assert tags["b.weight"] == Tags(owner="expert", model="sharded")
    assert tags["b.bias"] == Tags(model="partial") and tags["q_layernorm.weight"] == Tags()
    model.config = SimpleNamespace(qk_layernorm=True)
    adopt_tags(model)  # a second time changes nothing but what is new
    assert tags_of(model["q_layernorm"].weight) == Tags(model="partial") and tags_of(a.bias) == Tags()
    a.weight.sequence_parallel = True
    with pytest.raises(ValueError, match=r"a.weight is marked tensor_model_parallel and seq.*\(§9.7\)$"):
        adopt_tags(model)


def test_a_model_that_nobody_cut_has_no_partial_norms() -> None:
    model = nn.ModuleDict({"q_layernorm": nn.LayerNorm(2)})
    model.config = SimpleNamespace(qk_layernorm=True)
    adopt_tags(model)
    assert tags_of(model["q_layernorm"].weight) == Tags()
