"""Lab 1, steps 5a and 5b: the learner's coordinates and groups against ProcessTopology. Pure, no processes.

A wrong answer is compared with the answers of well-known misunderstandings, and the hint names the idea.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import product
from math import prod
from typing import Any

from _lab import Hint

from ds_lite.topology import ProcessTopology

Mesh = tuple[list[str], list[int]]  # axes and dims
Table = list[dict[str, int]]  # coordinates, by rank

TYPICAL: Mesh = (["pipe", "data", "model"], [4, 3, 2])  # the chapter's 24 ranks; no two sizes are equal


def meshes(largest: int = 3) -> Iterator[Mesh]:
    """A typical case before the small and odd ones: up to three axes of sizes up to `largest`, then four."""
    yield TYPICAL
    names = ["pipe", "data", "model"]
    for count in (1, 2, 3):
        for dims in product(range(1, largest + 1), repeat=count):
            yield names[:count], list(dims)
    yield ["data", "pipe"], [2, 3]
    yield ["pipe", "data", "seq", "model"], [2, 3, 2, 2]


def written(mesh: Mesh) -> str:
    """A mesh in words, e.g. "pipe=4 data=3 model=2"."""
    return " ".join(f"{axis}={dim}" for axis, dim in zip(*mesh))


# -------------------------------------------------------------------------------------- 5a: coordinates


def check_coordinate(coordinate: Callable[..., dict[str, int]]) -> int:
    """Every rank of every mesh, and two outside each. Returns the number of ranks.

    Raises: Hint at the first difference.
    """
    compared = 0
    for axes, dims in meshes():
        topology = ProcessTopology(axes, dims)
        ranks = range(topology.world_size())
        mine = [_well_formed(coordinate([*axes], [*dims], rank), (axes, dims), rank) for rank in ranks]
        real = [topology.get_coord(rank)._asdict() for rank in ranks]
        if mine != real:
            raise Hint(f"{_about_coordinates(mine, real, (axes, dims))} (seen with {written((axes, dims))})")
        for outside in (topology.world_size(), -1):
            _refused(coordinate, (axes, dims), outside)
        compared += len(ranks)
    return compared


def _well_formed(place: Any, mesh: Mesh, rank: int) -> dict[str, int]:
    if not isinstance(place, dict) or set(place) != set(mesh[0]):
        raise Hint(
            f"coordinate({mesh[0]}, {mesh[1]}, {rank}) returns {place!r}; it is to be a dictionary with one "
            f"coordinate for each axis, such as {{'pipe': 1, 'data': 2}}"
        )
    return place


def _about_coordinates(mine: Table, real: Table, mesh: Mesh) -> str:
    axes, dims = mesh
    size = len(dims)
    after = [prod(dims[i + 1 :]) for i in range(size)]
    if mine == _digits(mesh, [prod(dims[:i]) for i in range(size)]):
        return (
            "your first axis is the fastest: rank 1 is the neighbour of rank 0 on it. Ranks are numbered "
            "row-major, so that rank 1 is the neighbour on the LAST axis, as the last digit of a number is "
            "the one that changes first"
        )
    if mine == _digits(mesh, [prod(dims[i:]) for i in range(size)]):
        return (
            "an axis counts its own size into its stride. From one place on an axis to the next you pass "
            "the ranks of all axes AFTER it, and no others; the last axis has stride 1"
        )
    if mine == _digits(mesh, [*dims[1:], 1]):
        return (
            "the stride of an axis is only the size of the next one. From one place to the next you pass the "
            "ranks of all axes after it: multiply all of their sizes"
        )
    if mine == [dict(zip(axes, (rank // stride for stride in after))) for rank in range(len(real))]:
        return (
            "coordinates grow beyond the size of their axis: rank // stride goes on counting when the axes "
            "outside have moved one place. A coordinate is a digit, it starts again at 0 after size - 1"
        )
    rank = next(rank for rank in range(len(real)) if mine[rank] != real[rank])
    terms = " + ".join(f"{place}*{stride}" for place, stride in zip(real[rank].values(), after))
    return f"rank {rank} stands at {real[rank]} and not at {mine[rank]}: {rank} = {terms}"


def _digits(mesh: Mesh, strides: Sequence[int]) -> Table:
    axes, dims = mesh
    return [
        {axis: rank // stride % dim for axis, stride, dim in zip(axes, strides, dims)}
        for rank in range(prod(dims))
    ]


def _refused(coordinate: Callable[..., dict[str, int]], mesh: Mesh, rank: int) -> None:
    try:
        place = coordinate([*mesh[0]], [*mesh[1]], rank)
    except ValueError:
        return
    raise Hint(
        f"rank {rank} gets the place {place} in a world of {prod(mesh[1])} ranks, 0 to {prod(mesh[1]) - 1}. "
        f"A rank outside must raise ValueError: a job started with too many processes would otherwise have "
        f"two of them at one place, and compute something"
    )


# ------------------------------------------------------------------------------------------- 5b: groups


def check_comm_lists(comm_lists: Callable[..., list[list[int]]]) -> int:
    """Every axis of every mesh, and one that is missing. Returns the number of groups.

    Raises: Hint at the first difference.
    """
    compared = 0
    for axes, dims in meshes():
        topology = ProcessTopology(axes, dims)
        for axis in [*axes[1:], axes[0]]:  # an axis in the middle shows most
            mine, real = comm_lists([*axes], [*dims], axis), topology.get_axis_comm_lists(axis)
            if mine != real:
                about = _about_groups(mine, real, axis, topology)
                raise Hint(f"{about} (seen with {written((axes, dims))}, axis {axis})")
            compared += len(real)
        if (found := comm_lists([*axes], [*dims], "nowhere")) != []:
            raise Hint(
                f"an axis that is not in the mesh gives {found!r}; nobody talks along it, so there are no "
                f"groups: an empty list"
            )
    return compared


def _about_groups(mine: Any, real: list[list[int]], axis: str, topology: ProcessTopology) -> str:
    size, world = topology.get_dim(axis), topology.world_size()
    if isinstance(mine, list) and mine and all(isinstance(rank, int) for rank in mine):
        return (
            f"you return one list of ranks, {mine}, and {len(real)} groups talk along this axis at the same "
            f"time: one list for each place on the other axes, a list of lists"
        )
    if not isinstance(mine, list) or not all(isinstance(group, list) for group in mine):
        return f"you return {_short(mine)}; it is to be a list of lists of ranks"
    if mine == [topology.get_axis_list(axis, place) for place in range(size)]:
        return (
            "the members of your groups agree on the axis and differ on the others; it is the other way "
            "round: those who talk along an axis differ on this axis alone"
        )
    if mine == [list(range(first, first + size)) for first in range(0, world, size)]:
        return (
            "your groups are runs of consecutive ranks. That is right for the innermost axis only; on any "
            "other axis the members are a stride apart, and consecutive ranks belong to different groups"
        )
    if len(mine) < len(real) and all(group in real for group in mine):
        return (
            f"you return {len(mine)} of {len(real)} groups: one for each place on the other axes, not only "
            f"for those that hold rank 0"
        )
    if sorted(map(sorted, mine)) == sorted(real):
        return (
            "the groups are right, their order is not. Every process makes the groups in one and the same "
            "order, or they wait for each other: groups by their first member, members by their coordinate "
            "on the axis, which is also their rank inside the group"
        )
    return f"the groups are {_short(real)} and not {_short(mine)}: members differ on the axis alone"


def _short(value: Any) -> str:
    text = repr(value).replace(" ", "")
    return text if len(text) <= 60 else f"{text[:57]}..."
