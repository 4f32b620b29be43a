"""Lab 1, your part: predict, then write four functions about ranks. README.md has the steps.

Legend: an axis has a name and a size (`dim`); G ranks on a node; X bytes in a message.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations  # noqa: F401  (of use in step 5d)
from math import prod  # noqa: F401  (of use in step 5a)
from typing import Any

# Step 1. Write down what you expect before you look. A wrong guess costs nothing.
PREDICTIONS: dict[str, Any] = {
    # 8 ranks as pipe=2, data=2, model=2, the outermost axis first; nodes of 4 ranks each, in order
    "coordinates_of_5": None,  # of rank 5 on pipe, data and model, as a list
    "distances": None,  # between the numbers of two neighbours on pipe, on data, on model, as a list
    "data_groups": None,  # how many groups the data axis has
    "next_of_5_on_data": None,  # the global rank one place after rank 5 on the data axis
    "axes_across_nodes": None,  # axes with a group on more than one node, names as a list
    "axes_across_nodes_of_2": None,  # the same with 2 ranks on a node
    "groups_on_the_link": None,  # how many groups of pipe share the link between node 0 and node 1 (of 4)
    # collectives on X bytes in a group of 2: what a rank sends, as a multiple of X
    "all_reduce_sends": None,
    "reduce_scatter_sends": None,  # X bytes go in, X/2 come out
    "broadcast_sends": None,  # the source
}


def coordinate(axes: Sequence[str], dims: Sequence[int], rank: int) -> dict[str, int]:
    """Where a global rank stands: one coordinate, counted from 0, for each axis.

    Ranks are numbered row-major: the axes come outermost first, the last axis is the fastest. So

        rank = sum over the axes of coordinate * stride

    and the stride of an axis is the product of the sizes of all axes after it.

    Raises: ValueError for a rank that is not in the mesh.

    >>> coordinate(["pipe", "data"], [2, 3], 5)  # doctest: +SKIP
    {'pipe': 1, 'data': 2}
    """
    raise NotImplementedError(
        "Lab 1, step 5a: write coordinate() in student.py, about 4 lines: the stride of each axis, then "
        "its coordinate from rank, stride and size; a rank outside the mesh raises ValueError"
    )


def comm_lists(axes: Sequence[str], dims: Sequence[int], axis: str) -> list[list[int]]:
    """The groups that talk along an axis: one list of global ranks for each place on the other axes.

    The members of a group differ on `axis` alone and stand in the order of their coordinate on it. The
    groups stand in the order of their first members. No such axis, no groups: `[]`.

    >>> comm_lists(["pipe", "data"], [2, 3], "data")  # doctest: +SKIP
    [[0, 1, 2], [3, 4, 5]]
    """
    raise NotImplementedError(
        "Lab 1, step 5b: write comm_lists() in student.py, about 8 lines: go through all ranks in order and "
        "sort them into a dictionary by their coordinates on the other axes"
    )


def neighbour(axes: Sequence[str], dims: Sequence[int], rank: int, axis: str, step: int) -> int:
    """The global rank `step` places after `rank` on `axis`, all other coordinates being equal.

    `step` may be negative. An axis is a ring: after its last place comes its first.

    >>> neighbour(["pipe", "data"], [2, 3], 5, "data", 1)  # doctest: +SKIP
    3
    """
    raise NotImplementedError(
        "Lab 1, step 5c: write neighbour() in student.py, about 3 lines: find the group of this rank among "
        "your comm_lists, its place there, and who stands `step` places on"
    )


def shared_links(
    axes: Sequence[str], dims: Sequence[int], axis: str, ranks_per_node: int
) -> dict[tuple[int, int], list[list[int]]]:
    """Which groups of an axis share the link between two nodes.

    Node 0 holds the first `ranks_per_node` ranks, node 1 the next ones, and so on. For every pair of nodes
    (a, b), a < b, with a group that has members on both: all such groups, in the order of `comm_lists`.
    An axis whose groups all stay inside a node gives `{}`.

    >>> shared_links(["pipe", "data"], [2, 2], "pipe", 2)  # doctest: +SKIP
    {(0, 1): [[0, 2], [1, 3]]}
    """
    raise NotImplementedError(
        "Lab 1, step 5d: write shared_links() in student.py, about 6 lines: for each group the nodes its "
        "members are on, then every pair of these nodes"
    )


# Nothing to write from here on: `coordinate` and `comm_lists` are already the words in which `pytest --impl`
# asks; see tests/adapters.
