"""Which ranks exchange tokens, and which hold copies of the same experts (§9.4 §9.11).

Experts add no axis to the world: inside each (pipe, model) coordinate the (data, seq) ranks are cut into runs
of `ep_size`. With eight of them and ep_size = 2:

    ranks                0 1 | 2 3 | 4 5 | 6 7
    expert groups        {0,1} {2,3} {4,5} {6,7}     each holds all experts once, its ranks exchange tokens
    expert-data groups   {0,2,4,6} {1,3,5,7}         hold the same experts, and add up their gradients

`use_data_before_expert_parallelism` swaps the two: neighbours hold the same experts then.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ds_lite import comm
from ds_lite.comm import ProcessGroup
from ds_lite.layout import check_ep_size

RankLists = list[list[int]]


@dataclass(frozen=True)
class ExpertGroups:
    """This rank's two groups for one ep_size; `coordinate` is its place in the first: which experts it holds.

    Ranks are global and in the order of the groups.
    """

    ranks: tuple[int, ...]
    coordinate: int
    group: ProcessGroup
    data_ranks: tuple[int, ...]
    data_group: ProcessGroup

    @property
    def size(self) -> int:
        """ep_size."""
        return len(self.ranks)


def expert_rank_lists(
    replicas: Sequence[Sequence[int]], ep_size: int, *, data_first: bool = False
) -> tuple[RankLists, RankLists]:
    """The expert groups and the expert-data groups, from the (data, seq) groups of all coordinates.

    Raises: ValueError if ep_size does not divide the ranks of a (data, seq) group.

    >>> expert_rank_lists([[0, 1, 2, 3]], 2)
    ([[0, 1], [2, 3]], [[0, 2], [1, 3]])
    >>> expert_rank_lists([[0, 2], [1, 3]], 2)  # two stages, the data axis outside
    ([[0, 2], [1, 3]], [[0], [2], [1], [3]])
    """
    check_ep_size(ep_size, len(replicas[0]))
    experts: RankLists = []
    copies: RankLists = []
    for ranks in replicas:
        across = len(ranks) // ep_size
        runs = [list(ranks[start : start + ep_size]) for start in range(0, len(ranks), ep_size)]
        strides = [list(ranks[start::ep_size]) for start in range(ep_size)]
        if data_first:
            runs = [list(ranks[start::across]) for start in range(across)]
            strides = [list(ranks[start : start + across]) for start in range(0, len(ranks), across)]
        experts += runs
        copies += strides
    return experts, copies


def make_expert_groups(
    lists: tuple[RankLists, RankLists], alone: ProcessGroup, replicas: ProcessGroup
) -> ExpertGroups:
    """This rank's groups. `alone` serves where a group is this rank, `replicas` where ep_size is 1.

    Communication: creates groups; every rank of the world calls it at the same point with the same lists.
    """
    me = comm.get_rank()
    experts, expert_group = _mine(lists[0], me, "expert", alone, None)
    copies, data_group = _mine(lists[1], me, "expert-data", alone, replicas if len(experts) == 1 else None)
    return ExpertGroups(tuple(experts), experts.index(me), expert_group, tuple(copies), data_group)


def _mine(
    lists: RankLists, me: int, axis: str, alone: ProcessGroup, ready: ProcessGroup | None
) -> tuple[list[int], ProcessGroup]:
    own = next(ranks for ranks in lists if me in ranks)
    if len(own) == 1:
        return own, alone
    if ready is not None:
        return own, ready
    groups = [(ranks, comm.new_group(ranks, axis)) for ranks in lists]
    return next((ranks, group) for ranks, group in groups if me in ranks)
