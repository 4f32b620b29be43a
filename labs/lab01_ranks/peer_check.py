"""Lab 1, steps 5c and 5d: the neighbour on an axis, and the links between nodes. Pure, no processes.

The truth is ds_lite's ProcessTopology; a wrong answer is compared with those of well-known misunderstandings.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations
from typing import Any

from _lab import Hint
from rank_check import TYPICAL, Mesh, meshes, written

from ds_lite.topology import ProcessTopology

Links = dict[tuple[int, int], list[list[int]]]  # pair of nodes -> the groups with members on both


# ---------------------------------------------------------------------------------------- 5c: neighbours


def true_neighbour(topology: ProcessTopology, rank: int, axis: str, step: int) -> int:
    """By coordinates, without any list."""
    place = topology.get_coord(rank)._asdict()
    place[axis] = (place[axis] + step) % topology.get_dim(axis)
    return topology.get_rank(**place)


def check_neighbour(neighbour: Callable[..., int]) -> int:
    """Every rank on every axis, one place on, one back and two on. Returns the number of answers.

    Raises: Hint at the first difference.
    """
    compared = 0
    for axes, dims in meshes():
        topology = ProcessTopology(axes, dims)
        for axis in [*axes[1:], axes[0]]:
            for step in (1, -1, 2):
                ranks = range(topology.world_size())
                mine = [neighbour([*axes], [*dims], rank, axis, step) for rank in ranks]
                real = [true_neighbour(topology, rank, axis, step) for rank in ranks]
                if mine != real:
                    about = _about_neighbours(mine, real, axis, step, topology)
                    raise Hint(f"{about} (seen with {written((axes, dims))}, axis {axis}, step {step})")
                compared += len(ranks)
    return compared


def _about_neighbours(
    mine: list[Any], real: list[int], axis: str, step: int, topology: ProcessTopology
) -> str:
    size, world = topology.get_dim(axis), len(real)
    places = [getattr(topology.get_coord(rank), axis) for rank in range(world)]
    if mine == [(place + step) % size for place in places]:
        return (
            "you return the place inside the group, and send() and broadcast() want the global rank. The two "
            "agree only in the group that holds rank 0 and its neighbours, so this works until there is a "
            "second group"
        )
    if mine == [(rank + step) % world for rank in range(world)] or mine == [r + step for r in range(world)]:
        return (
            "you count in ranks, and the axis counts in strides: the next rank is the next place on the "
            "innermost axis only"
        )
    ends = [rank for rank in range(world) if not 0 <= places[rank] + step < size]
    if all(mine[rank] == real[rank] for rank in range(world) if rank not in ends):
        rank = next(rank for rank in ends if mine[rank] != real[rank])
        return (
            f"only the ends of the axis are wrong: after {rank} you come to {mine[rank]}. An axis is a ring "
            f"within its own group: from the last place it goes on to the first, rank {real[rank]}, and "
            f"never into the next group or out of the world"
        )
    rank = next(rank for rank in range(world) if mine[rank] != real[rank])
    return (
        f"from rank {rank} you come to {mine[rank]}, and {step} place(s) on stands {real[rank]}: only the "
        f"coordinate on the axis changes"
    )


# --------------------------------------------------------------------------------------------- 5d: links


def true_links(mesh: Mesh, axis: str, ranks_per_node: int) -> Links:
    """From ds_lite's groups."""
    return _links(mesh, axis, lambda rank: rank // ranks_per_node)


def check_shared_links(shared_links: Callable[..., Links]) -> int:
    """Every axis of every mesh on nodes of several sizes. Returns the number of answers.

    Raises: Hint at the first difference.
    """
    compared = 0
    cube: Mesh = (["pipe", "data", "model"], [2, 2, 2])
    for mesh, sizes in [(cube, (4, 2)), (TYPICAL, (8, 6, 4)), *((one, (1, 2, 3, 4)) for one in meshes())]:
        for axis in mesh[0]:
            for ranks_per_node in sizes:
                mine = shared_links([*mesh[0]], [*mesh[1]], axis, ranks_per_node)
                if mine != (real := true_links(mesh, axis, ranks_per_node)):
                    about = _about_links(mine, real, mesh, axis, ranks_per_node)
                    seen = f"{written(mesh)}, axis {axis}, nodes of {ranks_per_node}"
                    raise Hint(f"{about} (seen with {seen})")
                compared += 1
    return compared


def _links(
    mesh: Mesh,
    axis: str,
    node_of: Callable[[int], int],
    pairs: Callable[[list[int]], Any] = lambda nodes: combinations(nodes, 2),
) -> Links:
    found: Links = {}
    for group in ProcessTopology(*mesh).get_axis_comm_lists(axis):
        for pair in pairs(sorted({node_of(rank) for rank in group})):
            found.setdefault(pair, []).append(group)
    return found


def _about_links(mine: Any, real: Links, mesh: Mesh, axis: str, ranks_per_node: int) -> str:
    world = ProcessTopology(*mesh).world_size()
    if text := _about_form(mine):
        return text
    if mine == _links(mesh, axis, lambda rank: rank % ranks_per_node):
        return (
            "your node is the place of a rank inside its node (rank % G). Nodes hold consecutive ranks: "
            "0 to G-1 are on node 0, the next G on node 1"
        )
    if mine == _links(mesh, axis, lambda rank: rank // max(1, world // ranks_per_node)):
        return (
            "you divide the ranks by the number of nodes; G is how many ranks one node holds, so the node of "
            "a rank is how often G fits into it"
        )
    if any(len(groups) != len({tuple(group) for group in groups}) for groups in mine.values()):
        return _TWICE
    lists = ProcessTopology(*mesh).get_axis_comm_lists(axis)
    if mine == {} and len(lists[0]) > 1 and lists[0][1] - lists[0][0] < ranks_per_node:
        return (
            "you say that the axis stays inside its nodes, because its neighbours are less than G apart. "
            f"But {next(iter(real.values()))[0]} has members on nodes {next(iter(real))}: look at the nodes "
            f"of all members, not at the distance of two"
        )
    if all(pair in real and mine[pair] == real[pair] for pair in mine) and len(mine) < len(real):
        pair = next(pair for pair in real if pair not in mine)
        return (
            f"nodes {pair} are missing: {real[pair][0]} has members on more than two nodes, and in an "
            f"all-to-all each of these sends to each other one, so every pair of them counts"
        )
    pair = next(pair for pair in [*real, *mine] if mine.get(pair) != real.get(pair))
    return f"nodes {pair} are shared by {real.get(pair, 'no group')}, and you say {mine.get(pair, 'none')}"


_TWICE = (
    "a group stands more than once on a link: however many of its members are on the two nodes, it is one "
    "group that talks over it"
)


def _about_form(mine: Any) -> str:
    """What is wrong with an answer whatever the mesh; "" if nothing is."""
    pairs = isinstance(mine, dict) and all(isinstance(pair, tuple) and len(pair) == 2 for pair in mine)
    if not pairs or not all(isinstance(groups, list) for groups in mine.values()):
        return f"you return {mine!r}; it is to be a dictionary such as {{(0, 1): [[0, 2], [1, 3]]}}"
    if any(a == b for a, b in mine):
        return (
            "you list a link from a node to itself. What stays inside a node goes over no link between "
            "nodes, and costs nobody else anything there"
        )
    if any(a > b for a, b in mine):
        return "a link between nodes 0 and 1 is one link, whoever sends: write its pair as (a, b) with a < b"
    if not all(mine.values()):
        return "a pair of nodes that no group joins has no entry, not an empty one"
    return ""
