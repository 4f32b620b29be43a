"""Lab 1, one way to do it. Compare it with yours after yours passes.

Legend: an axis has a name and a size (`dim`); G ranks on a node; X bytes in a message.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from math import prod
from typing import Any

PREDICTIONS: dict[str, Any] = {
    # 8 ranks as pipe=2, data=2, model=2, the outermost axis first; nodes of 4 ranks each, in order
    "coordinates_of_5": [1, 0, 1],  # of rank 5 on pipe, data and model, as a list
    "distances": [4, 2, 1],  # between the numbers of two neighbours on pipe, on data, on model, as a list
    "data_groups": 4,  # how many groups the data axis has
    "next_of_5_on_data": 7,  # the global rank one place after rank 5 on the data axis
    "axes_across_nodes": ["pipe"],  # axes with a group on more than one node, names as a list
    "axes_across_nodes_of_2": ["pipe", "data"],  # the same with 2 ranks on a node
    "groups_on_the_link": 4,  # how many groups of pipe share the link between node 0 and node 1 (of 4)
    # collectives on X bytes in a group of 2: what a rank sends, as a multiple of X
    "all_reduce_sends": 1.0,
    "reduce_scatter_sends": 0.5,  # X bytes go in, X/2 come out
    "broadcast_sends": 1.0,  # the source
}


def coordinate(axes: Sequence[str], dims: Sequence[int], rank: int) -> dict[str, int]:
    """Where a global rank stands: one coordinate, counted from 0, for each axis.

    Ranks are numbered row-major: the axes come outermost first, the last axis is the fastest. So

        rank = sum over the axes of coordinate * stride

    and the stride of an axis is the product of the sizes of all axes after it.

    Raises: ValueError for a rank that is not in the mesh.
    """
    if not 0 <= rank < prod(dims):
        raise ValueError(f"rank={rank} is outside a mesh of {prod(dims)} ranks, 0 to {prod(dims) - 1}")
    strides = [prod(dims[i + 1 :]) for i in range(len(dims))]
    return {axis: rank // stride % dim for axis, stride, dim in zip(axes, strides, dims)}


def comm_lists(axes: Sequence[str], dims: Sequence[int], axis: str) -> list[list[int]]:
    """The groups that talk along an axis: one list of global ranks for each place on the other axes.

    The members of a group differ on `axis` alone and stand in the order of their coordinate on it. The
    groups stand in the order of their first members. No such axis, no groups: `[]`.
    """
    if axis not in axes:
        return []
    groups: dict[tuple[int, ...], list[int]] = {}
    for rank in range(prod(dims)):
        place = coordinate(axes, dims, rank)
        others = tuple(place[name] for name in axes if name != axis)
        groups.setdefault(others, []).append(rank)
    return list(groups.values())


def neighbour(axes: Sequence[str], dims: Sequence[int], rank: int, axis: str, step: int) -> int:
    """The global rank `step` places after `rank` on `axis`, all other coordinates being equal.

    `step` may be negative. An axis is a ring: after its last place comes its first.
    """
    group = next(ranks for ranks in comm_lists(axes, dims, axis) if rank in ranks)
    place = group.index(rank) + step
    return group[place % len(group)]


def shared_links(
    axes: Sequence[str], dims: Sequence[int], axis: str, ranks_per_node: int
) -> dict[tuple[int, int], list[list[int]]]:
    """Which groups of an axis share the link between two nodes.

    Node 0 holds the first `ranks_per_node` ranks, node 1 the next ones, and so on. For every pair of nodes
    (a, b), a < b, with a group that has members on both: all such groups, in the order of `comm_lists`.
    An axis whose groups all stay inside a node gives `{}`.
    """
    links: dict[tuple[int, int], list[list[int]]] = {}
    for group in comm_lists(axes, dims, axis):
        nodes = sorted({rank // ranks_per_node for rank in group})
        for pair in combinations(nodes, 2):
            links.setdefault(pair, []).append(group)
    return links


# `coordinate` and `comm_lists` are already the words in which `pytest --impl` asks; see tests/adapters.
