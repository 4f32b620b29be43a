"""§9.11 ProcessTopology.

Question: which process am I, and with whom do I talk?

Run time: about 10 s on two cores.   python chapters/ch11_topology.py

You will see the chapter's 24 ranks as coordinates and as groups, the same arithmetic on a million ranks,
and four processes that send a tensor to the next stage by its number.

Chapter against source: `get_axis_comm_lists("data")` is a list of lists, one for each place on the other
axes, not "all ranks along data"; there is no expert axis in a topology; `send` and `recv` reach
neighbours only.

Legend: p pipe, d data, m model.
"""

from __future__ import annotations

import torch

import ds_lite
from ds_lite import PipelineParallelGrid, ProcessTopology, comm
from ds_lite.launch import run
from ds_lite.pipe import p2p


def main() -> None:
    twenty_four_ranks()
    groups_along_an_axis()
    a_million_ranks()
    stages_that_talk()
    print("\nNext: chapters/ch12_gating.py   Lab: python -m ds_lite lab 1 --nproc 4")


def twenty_four_ranks() -> None:
    print("1 Predict: 24 ranks as pipe=4, data=3, model=2, the last axis fastest. Which rank is (2, 1, 0)?\n")
    topology = ProcessTopology(axes=["pipe", "data", "model"], dims=[4, 3, 2])
    print(
        f"get_rank(pipe=2, data=1, model=0)  {topology.get_rank(pipe=2, data=1, model=0)} = 2*(3*2) + 1*2 + 0"
    )
    print(f"get_coord(14)                      {tuple(topology.get_coord(14))}")
    print(f"filter_match(pipe=1, data=2)       {topology.filter_match(pipe=1, data=2)}")
    print(f"get_axis_list('pipe', 2)           {topology.get_axis_list('pipe', 2)}")
    print("\n         " + "    ".join(f"data={d}  " for d in range(3)).rstrip())
    for stage in range(4):
        pairs = [topology.filter_match(pipe=stage, data=d) for d in range(3)]
        print(f"stage {stage}  " + "    ".join(f"{a:>2} {b:>2}   " for a, b in pairs).rstrip())


def groups_along_an_axis() -> None:
    print("\n2 Predict: how many data-parallel groups do the 24 ranks form, and how large are they?\n")
    topology = ProcessTopology(axes=["pipe", "data", "model"], dims=[4, 3, 2])
    for axis in topology.get_axis_names():
        lists = topology.get_axis_comm_lists(axis)
        distance = lists[0][1] - lists[0][0]
        print(
            f"{axis:<6} {len(lists):>2} groups of {len(lists[0])}, neighbours {distance} apart: "
            f"{' '.join(str(ranks).replace(' ', '') for ranks in lists[:3])} ..."
        )
    print("tensor-parallel ranks are neighbours, so the axis that talks most stays inside a node")


def a_million_ranks() -> None:
    print("\n3 A topology is arithmetic, not a table: a million ranks cost nothing to hold.\n")
    huge = ProcessTopology(axes=["pipe", "data", "model"], dims=[64, 2048, 8])
    rank = huge.get_rank(pipe=63, data=2047, model=7)
    print(f"{huge.world_size():,} ranks; the last is {rank:,} at {tuple(huge.get_coord(rank))}")


def stages_that_talk() -> None:
    print("\n4 Predict: four processes as pipe=2 x data=2; what do ranks 2 and 3 receive?\n")
    for rank, (place, peers, got) in enumerate(run(talk, 4)):
        heard = "sent its own number" if got is None else f"received {got}"
        print(f"rank {rank}  {place}  pipe group {peers['pipe']}  data group {peers['data']}  {heard}")
    refused = run(talk_too_far, 3)
    print(f"\nThree stages, and stage 0 sends to stage 0: {refused[0]}")


def talk() -> tuple[str, dict[str, list[int]], float | None]:
    """One rank of a 2 x 2 grid: stage 0 sends its rank number to stage 1."""
    grid = PipelineParallelGrid(ProcessTopology(axes=["pipe", "data"], dims=[2, 2]))
    p2p.init_process_groups(grid)
    peers = {axis: grid.ranks(axis) for axis in ("pipe", "data")}
    device = comm.device_of_this_rank()
    if grid.get_stage_id() == 0:
        p2p.send(torch.tensor([float(grid.global_rank)], device=device), dest_stage=1)
        return grid.place, peers, None
    landing = torch.empty(1, device=device)
    p2p.recv(landing, src_stage=0)
    return grid.place, peers, landing.item()


def talk_too_far() -> str:
    """One rank of three stages: what a send to a stage that is no neighbour says."""
    grid = ds_lite.PipelineParallelGrid(ProcessTopology(axes=["pipe"], dims=[3]))
    try:
        p2p.send(torch.zeros(1), dest_stage=grid.get_stage_id(), grid=grid)
    except ValueError as error:
        return str(error)
    return "sent"


if __name__ == "__main__":
    main()
