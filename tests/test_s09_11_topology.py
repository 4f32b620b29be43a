"""§9.11 ProcessTopology. Guards against: swapped axes, wrong stride, lost ranks, tables of all ranks."""

import json
import pickle
import tracemalloc
from itertools import product
from math import prod
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_lite.topology import PipeDataParallelTopology, PipeModelDataParallelTopology, ProcessTopology

GOLDEN = json.loads((Path(__file__).parent / "golden" / "topology.json").read_text())["cases"]
CUBE = PipeModelDataParallelTopology(num_pp=4, num_mp=2, num_dp=3)


@st.composite
def topologies(draw):
    dims = draw(st.lists(st.integers(1, 5), min_size=1, max_size=5))
    axes = draw(st.permutations(["pipe", "data", "seq", "model", "expert"]))[: len(dims)]
    return ProcessTopology(axes, dims)


@pytest.mark.parametrize("case", GOLDEN, ids=lambda case: "x".join(map(str, case["dims"])))
def test_answers_equal_the_recorded_ones(case):
    topology = ProcessTopology(axes=case["axes"], dims=case["dims"])
    ranks = range(case["world_size"])
    assert topology.world_size() == case["world_size"]
    assert [list(topology.get_coord(rank)) for rank in ranks] == case["coords"]
    assert [topology.get_rank_repr(rank) for rank in ranks] == case["rank_repr"]
    assert [topology.get_rank_repr(rank, omit_axes=[]) for rank in ranks] == case["rank_repr_all"]
    assert topology.get_axis_comm_lists("nowhere") == case["missing_axis_comm_lists"]
    assert topology.get_dim("nowhere") == case["missing_axis_dim"]
    for axis, size in zip(case["axes"], case["dims"], strict=True):
        assert topology.get_dim(axis) == size
        assert topology.get_axis_comm_lists(axis) == case["comm_lists"][axis]
        assert [topology.get_axis_list(axis, index) for index in range(size)] == case["axis_list"][axis]
    for wanted, matches in case["filter_match"]:
        assert topology.filter_match(**wanted) == matches


@pytest.mark.parametrize("case", GOLDEN, ids=lambda case: "x".join(map(str, case["dims"])))
def test_coordinates_and_groups_equal_the_recorded_ones(case, impl):
    axes, dims = case["axes"], case["dims"]
    places = [impl.coordinate(axes, dims, rank) for rank in range(case["world_size"])]
    assert places == [dict(zip(axes, coords, strict=True)) for coords in case["coords"]]
    assert {axis: impl.comm_lists(axes, dims, axis) for axis in axes} == case["comm_lists"]
    assert impl.comm_lists(axes, dims, "nowhere") == []
    for outside in (-1, case["world_size"]):
        with pytest.raises(ValueError):
            impl.coordinate(axes, dims, outside)


def test_the_chapters_24_ranks():
    assert CUBE.get_axis_names() == ["pipe", "data", "model"]
    assert CUBE.get_rank(pipe=2, data=1, model=0) == 14
    assert CUBE.get_axis_comm_lists("data")[:3] == [[0, 2, 4], [1, 3, 5], [6, 8, 10]]
    assert CUBE.filter_match(pipe=1, data=2) == [10, 11]
    assert CUBE.get_axis_list("pipe", 2) == [12, 13, 14, 15, 16, 17]
    assert repr(CUBE.get_coord(14)) == "ProcessCoord(pipe=2, data=1, model=0)"


def test_swapped_axes_give_another_layout():
    swapped = ProcessTopology(axes=["pipe", "model", "data"], dims=[4, 2, 3])
    assert swapped.get_rank(pipe=2, data=1, model=0) != CUBE.get_rank(pipe=2, data=1, model=0)
    assert swapped.get_axis_comm_lists("data") != CUBE.get_axis_comm_lists("data")


def test_pipe_is_outermost_and_tensor_parallel_ranks_are_neighbours():
    assert PipeDataParallelTopology(num_pp=2, num_dp=3).get_axis_comm_lists("data") == [[0, 1, 2], [3, 4, 5]]
    assert CUBE.get_axis_comm_lists("model")[:2] == [[0, 1], [2, 3]]
    assert (CUBE.get_dim("pipe"), CUBE.get_dim("model"), CUBE.get_dim("data")) == (4, 2, 3)


@settings(max_examples=50, deadline=None)  # a busy machine is no failure
@given(topologies())
def test_coordinates_and_ranks_are_inverse(topology):
    coords = [topology.get_coord(rank) for rank in range(topology.world_size())]
    assert [topology.get_rank(**coord._asdict()) for coord in coords] == list(range(topology.world_size()))
    assert [tuple(coord) for coord in coords] == list(product(*map(range, topology.dims)))


@settings(max_examples=50, deadline=None)
@given(topologies())
def test_comm_lists_partition_the_ranks_and_differ_in_one_axis_only(topology):
    for axis in topology.axes:
        groups = topology.get_axis_comm_lists(axis)
        assert sorted(rank for group in groups for rank in group) == list(range(topology.world_size()))
        for group in groups:
            coords = [topology.get_coord(rank)._asdict() for rank in group]
            assert [coord.pop(axis) for coord in coords] == list(range(topology.get_dim(axis)))
            assert all(coord == coords[0] for coord in coords)


@settings(max_examples=50, deadline=None)
@given(topologies(), st.data())
def test_filter_match_equals_a_search_through_all_ranks(topology, data):
    axes = data.draw(st.lists(st.sampled_from(topology.axes), unique=True))
    wanted = {axis: data.draw(st.integers(-1, topology.get_dim(axis))) for axis in axes}
    truth = [
        rank
        for rank in range(topology.world_size())
        if all(getattr(topology.get_coord(rank), axis) == index for axis, index in wanted.items())
    ]
    assert topology.filter_match(**wanted) == truth


@settings(max_examples=50, deadline=None)
@given(topologies(), st.data())
def test_rank_names_tell_ranks_apart_by_the_axes_they_keep(topology, data):
    omitted = data.draw(st.lists(st.sampled_from(topology.axes), unique=True))
    names = {topology.get_rank_repr(rank, omit_axes=omitted) for rank in range(topology.world_size())}
    assert len(names) == prod(topology.get_dim(axis) for axis in topology.axes if axis not in omitted)


def test_rank_names_take_other_separators():
    assert CUBE.get_rank_repr(13, omit_axes=["data"], inner_sep="", outer_sep=".") == "pipe02.model01"
    assert ProcessTopology(["model"], [128]).get_rank_repr(100) == "model_100"


def test_a_million_ranks_cost_no_memory():
    tracemalloc.start()
    topology = ProcessTopology(axes=["pipe", "data", "seq", "model"], dims=[25, 1000, 5, 8])
    coord = topology.get_coord(999_999)
    rank = topology.get_rank(**coord._asdict())
    corner = topology.filter_match(pipe=24, data=999, seq=4)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert (topology.world_size(), tuple(coord), rank) == (1_000_000, (24, 999, 4, 7), 999_999)
    assert corner == list(range(999_992, 1_000_000))
    assert peak < 100_000


def test_equal_layouts_are_equal_and_survive_pickling():
    plain = ProcessTopology(axes=["pipe", "data", "model"], dims=[4, 3, 2])
    assert plain == CUBE and hash(plain) == hash(CUBE) and plain.get_coord(7) == CUBE.get_coord(7)
    assert plain != ProcessTopology(axes=["pipe", "data", "model"], dims=[4, 2, 3])
    assert pickle.loads(pickle.dumps(CUBE)) == CUBE
    assert repr(CUBE) == "ProcessTopology(axes=['pipe', 'data', 'model'], dims=[4, 3, 2])"


def test_the_lists_a_caller_gave_are_not_kept():
    dims = [2, 3]
    topology = ProcessTopology(["pipe", "data"], dims)
    dims[0] = 9
    topology.get_axis_names().clear()
    assert (topology.world_size(), topology.get_axis_names()) == (6, ["pipe", "data"])


@pytest.mark.parametrize(
    "ask,message",
    [
        (lambda: CUBE.get_rank(pipe=1, data=1), r"lacks \['model'\].*use filter_match.*\(§9.11\)"),
        (
            lambda: CUBE.get_rank(pipe=1, data=1, model=0, seq=0),
            r"unknown axis 'seq'.*\['pipe', 'data', 'model'\]",
        ),
        (lambda: CUBE.get_rank(pipe=4, data=1, model=0), r"pipe=4 is outside axis 'pipe' of size 4.*0 to 3"),
        (lambda: CUBE.get_rank(pipe=0, data=-1, model=0), r"data=-1 is outside"),
        (lambda: CUBE.get_coord(24), r"rank=24 is outside the world of 24 ranks.*0 to 23"),
        (lambda: CUBE.get_coord(-1), r"rank=-1 is outside"),
        (lambda: CUBE.get_rank_repr(24), r"rank=24 is outside"),
        (lambda: CUBE.filter_match(row=1), r"unknown axis 'row'"),
        (lambda: CUBE.get_axis_list("row", 1), r"unknown axis 'row'"),
    ],
)
def test_questions_without_an_answer_are_refused(ask, message):
    with pytest.raises(ValueError, match=message):
        ask()


@pytest.mark.parametrize(
    "axes,dims,message",
    [
        (["a", "b"], [2], r"do not pair up"),
        ([], [], r"do not pair up"),
        ("ab", [2, 2], r"do not pair up"),
        (["a", "a"], [2, 2], r"repeats a name"),
        (["a b"], [2], r"axis 'a b' cannot name a coordinate"),
        (["class"], [2], r"axis 'class' cannot name"),
        (["_a"], [2], r"axis '_a' cannot name"),
        (["a"], [0], r"dim 0 of axis 'a' is not a positive integer.*choose an integer >= 1"),
        (["a"], [-2], r"dim -2 of axis 'a'"),
        (["a"], [2.0], r"dim 2.0 of axis 'a'"),
        (["a"], ["2"], r"dim '2' of axis 'a'"),
    ],
)
def test_impossible_topologies_are_refused(axes, dims, message):
    with pytest.raises(ValueError, match=message):
        ProcessTopology(axes=axes, dims=dims)
