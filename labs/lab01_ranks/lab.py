"""Lab 1: ranks, groups and the wires between them (§9.11). README.md has the steps; 2, 4 or 8 processes.

    torchrun --nproc-per-node 4 labs/lab01_ranks/lab.py --impl solution
    python -m ds_lite lab 1 --nproc 4 --impl solution
    python labs/lab01_ranks/lab.py        one process: your functions, with hints and a picture, no more

Legend: n ranks in a group, X bytes in a message, G ranks on a node.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import collectives
from _lab import Hint, Lab
from collectives import BANDS, COUNTED_BYTES, Line, in_words
from peer_check import check_neighbour, check_shared_links, true_links, true_neighbour
from pictures import write_bandwidth, write_ranks
from rank_check import check_comm_lists, check_coordinate, written

import ds_lite
from ds_lite import comm
from ds_lite.conformance.bandwidth import FACTORS, grid_of
from ds_lite.topology import ProcessTopology

MESH = {"pipe": 2, "data": 2, "model": 2}  # what part A asks about and draws, outermost axis first
RANKS_PER_NODE = 4  # of part A's mesh
RANK = 5  # whose coordinates are asked for


def main() -> None:
    ds_lite.init_distributed(verbose=False)
    lab = Lab(1, Path(__file__).resolve().parent, unlocks="the mesh and the wires tell you")
    lab.demand_predictions()
    part_a(lab)
    if (world := comm.get_world_size()) not in (2, 4, 8):
        lab.leave(
            f"That was all that {world} process(es) can show; lab 1 goes on with 2, 4 or 8, such as --nproc 4"
        )
    mesh = grid_of(world)
    lines = part_b(lab, mesh)
    part_c(lab, mesh, lines)
    lab.finish()


# ------------------------------------------------------------------------------ A: the functions, drawn


def part_a(lab: Lab) -> None:
    """The learner's four functions against ds_lite, then what they say of one mesh."""
    mesh = (list(MESH), list(MESH.values()))
    lab.heading(f"A  Your ranks: {written(mesh)}, {RANKS_PER_NODE} ranks on a node")
    code = lab.code
    compared = []
    for step, check in (
        ("5a", lambda: check_coordinate(code.coordinate)),
        ("5b", lambda: check_comm_lists(code.comm_lists)),
        ("5c", lambda: check_neighbour(code.neighbour)),
        ("5d", lambda: check_shared_links(code.shared_links)),
    ):
        with lab.step(f"step {step}"):
            compared.append(_on_every_rank(check))
    places, groups, neighbours, links = compared
    lab.say(
        f"equal to ProcessTopology in {places} coordinates, {groups} groups, {neighbours:,} neighbours and "
        f"{links} questions about links"
    )
    for axis in MESH:
        lists = code.comm_lists(*mesh, axis)
        shared = code.shared_links(*mesh, axis, RANKS_PER_NODE)
        where = ", ".join(f"{len(of)} share the link {a}-{b}" for (a, b), of in shared.items())
        shown = "  ".join(",".join(map(str, group)) for group in lists)
        lab.say(f"{axis:<6} {len(lists)} groups of {len(lists[0])}   {shown}   {where or 'inside the nodes'}")
    _rows_of_ranks(lab, mesh)
    _rows_of_links(lab, mesh)
    if lab.is_main:
        lab.say(f"the ranks and their links: {write_ranks(lab.out, code, mesh, RANKS_PER_NODE)}")


def _on_every_rank(check: Callable[[], int]) -> int:
    """An order drawn from a set may be right on one rank and wrong on another: then all hear of it."""
    failed, compared = None, 0
    try:
        compared = check()
    except (Hint, NotImplementedError) as error:
        failed = error
    everyone: list[Any] = [None] * comm.get_world_size()
    comm.all_gather_object(everyone, failed)
    for error in everyone:
        if error is not None:
            raise error
    return compared


def _rows_of_ranks(lab: Lab, mesh: tuple[list[str], list[int]]) -> None:
    code, topology = lab.code, ProcessTopology(*mesh)
    place = list(code.coordinate(*mesh, RANK).values())
    strides = [topology.get_rank(**{a: int(a == axis) for a in mesh[0]}) for axis in mesh[0]]
    lab.row(
        f"coordinates of rank {RANK}",
        place,
        target=f"{RANK} = " + "+".join(f"{c}*{s}" for c, s in zip(topology.get_coord(RANK), strides)),
        passed=place == list(topology.get_coord(RANK)),
        prediction="coordinates_of_5",
    )
    gaps = [lists[0][1] - lists[0][0] for lists in (code.comm_lists(*mesh, axis) for axis in mesh[0])]
    lab.row(
        f"distance on {', '.join(mesh[0])}",
        gaps,
        target="= product of the dims after",
        passed=gaps == strides,
        prediction="distances",
    )
    count, want = len(code.comm_lists(*mesh, "data")), topology.world_size() // topology.get_dim("data")
    lab.row(
        "groups on data", count, target=f"= world/dp = {want}", passed=count == want, prediction="data_groups"
    )
    after, real = code.neighbour(*mesh, RANK, "data", 1), true_neighbour(topology, RANK, "data", 1)
    lab.row(
        f"rank after {RANK} on data",
        after,
        target=f"= {real}, a global rank",
        passed=after == real,
        prediction="next_of_5_on_data",
    )


def _rows_of_links(lab: Lab, mesh: tuple[list[str], list[int]]) -> None:
    for ranks, key in ((RANKS_PER_NODE, "axes_across_nodes"), (2, "axes_across_nodes_of_2")):
        mine = [axis for axis in mesh[0] if lab.code.shared_links(*mesh, axis, ranks)]
        real = [axis for axis in mesh[0] if true_links(mesh, axis, ranks)]
        lab.row(
            f"axes across nodes of {ranks}",
            mine,
            target=f"= {','.join(real)}",
            passed=mine == real,
            prediction=key,
        )
    axis = mesh[0][0]
    found = len(lab.code.shared_links(*mesh, axis, RANKS_PER_NODE).get((0, 1), []))
    real = len(true_links(mesh, axis, RANKS_PER_NODE).get((0, 1), []))
    lab.row(
        f"{axis} groups on the link 0-1",
        found,
        target=f"= {real}",
        passed=found == real,
        prediction="groups_on_the_link",
    )


# --------------------------------------------------------------------- B: what arrives, what leaves a rank


def part_b(lab: Lab, mesh: dict[str, int]) -> list[Line]:
    """Six collectives over groups from the learner's lists: values exact, bytes by the formulas."""
    lab.heading(f"B  Six collectives on {written((list(mesh), list(mesh.values())))}, over your groups")
    lines = collectives.make_lines(lab.code, mesh)
    wrong = [f"{name} on {line.axis}" for line in lines for name in collectives.wrong_values(lab.code, line)]
    counted = collectives.count(lines)
    everyone: list[Any] = [None] * comm.get_world_size()
    comm.all_gather_object(everyone, (wrong, counted))
    wrong = sorted({name for of_rank, _ in everyone for name in of_rank})
    lab.say(
        f"{len(FACTORS)} collectives on each of {len(lines)} axes: "
        + (f"wrong are {', '.join(wrong)}" if wrong else "each rank holds what it should")
    )
    lab.row("wrong values after a collective", len(wrong), target="= 0, EXACT", passed=not wrong)
    calls = {sum(one.calls for one in of_rank) for _, of_rank in everyone}
    expected = len(FACTORS) * len(lines)
    lab.row(
        "calls in each rank's ledger",
        sorted(calls),
        target=f"= {len(FACTORS)} x {len(lines)} axes = {expected}",
        passed=calls == {expected},
    )
    _rows_of_bytes(lab, [one for _, of_rank in everyone for one in of_rank])
    return lines


_FORMULAS = {
    "all_reduce": "2(n-1)/n*X",
    "reduce_scatter": "(n-1)/n*X",
    "all_gather": "(n-1)/n*X",
    "all_to_all": "(n-1)/n*X",
    "broadcast": "X, at the source",
    "send_recv": "X, at the sender",
}


def _rows_of_bytes(lab: Lab, counted: list[collectives.Sent]) -> None:
    """The most that a rank sent; every rank on every axis is compared."""
    X, sizes = COUNTED_BYTES, sorted({one.ranks for one in counted})
    lab.say(f"X = {in_words(X)}; n = {' and '.join(map(str, sizes))}; all_gather's X is the whole output")
    for operation, formula in _FORMULAS.items():
        own = [one for one in counted if one.operation == operation]
        most = [max(one.sent for one in own if one.ranks == n) for n in sizes]
        lab.row(
            f"bytes of {operation}, n={','.join(map(str, sizes))}",
            "  ".join(f"{sent:,}" for sent in most),
            target=f"= {formula}",
            passed=all(one.sent == one.formula for one in own),
        )
    for operation in ("all_reduce", "reduce_scatter", "broadcast"):
        ratio = max(one.sent for one in counted if one.operation == operation and one.ranks == 2) / X
        lab.row(
            f"{operation}, n=2: sent / X",
            ratio,
            target=f"= {FACTORS[operation](2):g}",
            passed=ratio == FACTORS[operation](2),
            prediction=f"{operation}_sends",
        )


# ------------------------------------------------------------------------------------ C: how long it takes


def part_c(lab: Lab, mesh: dict[str, int], lines: list[Line]) -> None:
    """Times and bus bandwidth by axis and size: promised only where every rank has a GPU of its own."""
    world = comm.get_world_size()
    per_node = int(os.environ.get("LOCAL_WORLD_SIZE", world))
    lab.heading(f"C  How long they take: {world} processes, {per_node} on a node")
    rates = collectives.measure(lines, quick=lab.quick)
    lab.say(collectives.rates_text(rates))
    largest = max(rate.size for rate in rates)
    on_gpus = comm.device_of_this_rank().type == "cuda"
    for line in lines:
        of, axis = line.mesh, line.axis
        crosses = bool(lab.code.shared_links(list(of), list(of.values()), axis, per_node))
        low, high = BANDS[crosses]
        bus = next(r.bus for r in rates if (r.axis, r.operation, r.size) == (axis, "all_reduce", largest))
        lab.row(
            f"GB/s, {in_words(largest)} all_reduce, {axis}",
            bus,
            target=f"{low:g}-{high:g}" if on_gpus else "on GPUs a band",
            passed=low <= bus <= high if on_gpus and not lab.quick else None,
        )
    lab.settings = {
        "mesh": mesh,
        "ranks_per_node": per_node,
        "counted_bytes": COUNTED_BYTES,
        "rates": [asdict(rate) for rate in rates],
    }
    if lab.is_main:
        lab.say(f"bus bandwidth by axis and size: {write_bandwidth(lab.out, rates)}")


if __name__ == "__main__":
    main()
