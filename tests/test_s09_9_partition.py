"""§9.9.3 Partitioning. Guards against: empty stages, lost layers, numpy integers, a rewritten regex."""

import json
import time
from itertools import pairwise, product
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_lite.pipe.partition import partition_balanced, partition_layers, partition_uniform

GOLDEN = json.loads((Path(__file__).parent / "golden" / "partition.json").read_text())["cases"]
NAMES = ["Embed", "Norm", "Block", "Block", "Norm", "Head"]
COUNTS = [40, 1, 20, 20, 1, 40]


def loads(weights, bounds):
    return [sum(weights[start:end]) for start, end in pairwise(bounds)]


def assert_covers(bounds, num_items, num_parts):
    """Every item in one part, in order, no part empty, plain integers."""
    assert len(bounds) == num_parts + 1 and (bounds[0], bounds[-1]) == (0, num_items)
    assert all(start < end for start, end in pairwise(bounds))
    assert all(type(bound) is int for bound in bounds)


def computed(impl, case):
    if case["kind"] == "uniform":
        return impl.partition("uniform", [1] * case["num_items"], case["num_parts"])
    return impl.partition("parameters", case["weights"], case["num_parts"])


def items_of(case):
    return case["num_items"] if case["kind"] == "uniform" else len(case["weights"])


def test_bounds_equal_the_recorded_ones_where_there_are_enough_items(impl):
    cases = [case for case in GOLDEN if items_of(case) >= case["num_parts"]]
    assert len(cases) >= 30
    for case in cases:
        assert computed(impl, case) == case["bounds"], case


def test_recorded_empty_parts_are_refused_here(impl):
    words = r"num_parts=4 exceeds num_items=3.*choose at most 3 stages \(§9.9.3\)"
    cases = [case for case in GOLDEN if items_of(case) < case["num_parts"]]
    assert cases
    for case in cases:
        with pytest.raises(ValueError, match=words if impl.name == "ds_lite" else None):
            computed(impl, case)


@pytest.mark.parametrize(
    "weights,num_parts,bounds",
    [
        ([1] * 6, 3, [0, 2, 4, 6]),
        ([10, 1, 1, 1, 1, 10], 3, [0, 1, 5, 6]),
        ([0, 1, 1, 1, 1, 0], 2, [0, 3, 6]),
        ([0, 1, 1, 1, 1, 0], 4, [0, 2, 3, 4, 6]),
        ([5, 1, 1, 1], 2, [0, 1, 4]),
        (list(range(1, 10)), 3, [0, 5, 7, 9]),
        ([0, 0, 1, 1, 1, 1, 1, 0], 3, [0, 4, 6, 8]),
        ([50, 12, 12, 12, 12, 50], 4, [0, 1, 3, 5, 6]),
        ([1] * 5, 4, [0, 2, 3, 4, 5]),  # field report B24
    ],
)
def test_balanced_bounds_of_the_chapter(weights, num_parts, bounds, impl):
    assert impl.partition("parameters", weights, num_parts) == bounds


def test_uniform_parts_differ_by_at_most_one_and_the_longer_come_first():
    for num_items, num_parts in product(range(1, 25), range(1, 25)):
        if num_items >= num_parts:
            bounds = partition_uniform(num_items, num_parts)
            assert_covers(bounds, num_items, num_parts)
            sizes = loads([1] * num_items, bounds)
            assert sizes == sorted(sizes, reverse=True) and sizes[0] - sizes[-1] <= 1


@settings(deadline=None)
@given(st.lists(st.integers(0, 20), min_size=1, max_size=10), st.data())
def test_balanced_parts_cover_all_items_and_are_never_worse_than_uniform_on_equal_weights(weights, data):
    num_parts = data.draw(st.integers(1, len(weights)))
    assert_covers(partition_balanced(weights, num_parts), len(weights), num_parts)
    equal = [1] * len(weights)
    assert max(loads(equal, partition_balanced(equal, num_parts))) == -(-len(weights) // num_parts)


def test_42_equal_layers_fill_16_stages_with_two_or_three_each():  # field report B24
    assert set(loads([1] * 42, partition_balanced([1] * 42, 16))) == {2, 3}


def test_uniform_bounds_of_the_field_report():  # field report B24
    assert partition_uniform(7, 3) == [0, 3, 5, 7]
    assert partition_uniform(7, 4) == [0, 2, 4, 6, 7]


def test_a_type_regex_spreads_the_layers_it_finds(impl):  # field report B24
    hits = [0, 1, 0, 1, 1, 1, 1, 0, 0, 1, 0]
    names = [
        ("TransformerLayer" if place % 2 else "EmbedLayer") if hit else "Lambda"
        for place, hit in enumerate(hits)
    ]
    bounds = impl.partition("type:embed|transformer", names, 4)
    assert_covers(bounds, 11, 4)
    assert max(loads(hits, bounds)) == 2


def test_each_method_chooses_its_weights(impl):
    assert impl.partition("uniform", NAMES, 2) == [0, 3, 6]
    assert impl.partition("parameters", [90, 1, 20, 20, 1, 40], 2) == [0, 1, 6]
    assert impl.partition("type:block", NAMES, 2) == [0, 3, 6]


@pytest.mark.parametrize("method", ["Uniform", "PARAMETERS", "Type:BLOCK", "TYPE:block"])
def test_upper_and_lower_case_of_a_method_are_the_same(method):
    name, colon, regex = method.partition(":")
    assert partition_layers(method, NAMES, COUNTS, 2) == partition_layers(
        name.lower() + colon + regex, NAMES, COUNTS, 2
    )


def test_the_regex_keeps_its_case(impl):
    assert impl.partition(r"type:\D", ["1", "2", "3", "Layer", "Layer"], 2) == [0, 4, 5]
    assert impl.partition(r"type:\d", ["1", "2", "3", "Layer", "Layer"], 3) == [0, 1, 2, 5]


def test_the_regex_keeps_a_second_colon(impl):
    assert impl.partition("type:(?:block)", NAMES, 2) == [0, 3, 6]
    with pytest.raises(ValueError, match=r"'type:norm:2' matches no layer"):
        impl.partition("type:norm:2", NAMES, 2)


def test_parameters_are_only_counted_when_they_are_needed():
    def count():
        calls.append(1)
        return COUNTS

    calls = []
    partition_layers("uniform", NAMES, count, 2)
    partition_layers("type:norm", NAMES, count, 2)
    assert not calls
    assert partition_layers("parameters", NAMES, count, 2) == partition_layers("parameters", NAMES, COUNTS, 2)
    assert len(calls) == 1


@pytest.mark.parametrize("counts", [[0] * 6, [0, 0, 5, 0, 0, 5], [7, 0, 0, 0, 0, 0]])
def test_layers_without_parameters_still_go_to_some_stage(counts, impl):  # field report B24
    for num_parts in range(1, 7):
        assert_covers(impl.partition("parameters", counts, num_parts), 6, num_parts)


@pytest.mark.parametrize(
    "method,num_parts,message",
    [
        ("uniform", 7, r"num_parts=7 exceeds num_items=6.*choose at most 6 stages"),
        ("parameters", 7, r"num_parts=7 exceeds num_items=6"),
        ("type:block", 7, r"num_parts=7 exceeds num_items=6"),
        ("uniform", 0, r"num_parts=0 is below 1"),
        ("type:attention", 2, r"'type:attention' matches no layer.*\['Block', 'Embed', 'Head', 'Norm'\]"),
        ("type:", 2, r"'type:' matches no layer"),
        ("type:(block", 2, r"'type:\(block' holds an invalid regex.*escape"),
        ("type", 2, r"'type' lacks a regex; write 'type:REGEX'"),
        ("profile", 2, r"'profile' is not available.*'uniform', 'parameters', 'type:REGEX'"),
        ("paramters", 2, r"'paramters' is unknown.*did you mean 'parameters'\?"),
        ("typ:block", 2, r"'typ:block' is unknown.*did you mean 'type:block'\?"),
        (
            "zigzag",
            2,
            r"'zigzag' is unknown; choose one of \['uniform', 'parameters', 'type:REGEX'\] \(§9.9.3\)",
        ),
        (None, 2, r"partition_method=None is not a string"),
    ],
)
def test_impossible_requests_are_refused(method, num_parts, message):
    with pytest.raises(ValueError, match=message):
        partition_layers(method, NAMES, COUNTS, num_parts)


def test_balanced_parts_are_grown_from_the_front_and_not_searched_for():
    assert partition_balanced([2, 3, 5, 1, 6], 4) == [0, 2, 3, 4, 5]  # difference 5
    better = [0, 1, 2, 4, 5]
    assert max(loads([2, 3, 5, 1, 6], better)) - min(loads([2, 3, 5, 1, 6], better)) == 4


def test_negative_weights_are_refused():
    with pytest.raises(ValueError, match=r"weights\[1\]=-2 is negative"):
        partition_balanced([1, -2, 3], 2)


def test_two_hundred_layers_on_sixteen_stages_take_under_a_second():
    start = time.process_time()
    bounds = partition_balanced([1 + place % 7 for place in range(200)], 16)
    assert time.process_time() - start < 1.0
    assert_covers(bounds, 200, 16)
