"""Which ranks a rank talks to, and the reduction table with their numbers (§9.7 §9.1).

Groups are named as the ledger names them: `data*seq` is one group over both axes, and where one of them has
a single rank it is the other one's group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ds_lite.expert_groups import expert_rank_lists
from ds_lite.explain.legal import Job
from ds_lite.tags import Tags
from ds_lite.topology import ProcessTopology

AXES = ("pipe", "data", "seq", "model")


@dataclass(frozen=True)
class Group:
    """Some ranks of which one is meant; `axis` is the ledger's name, empty for a rank alone."""

    axis: str
    ranks: tuple[int, ...]
    place: int

    @property
    def size(self) -> int:
        return len(self.ranks)


@dataclass(frozen=True)
class Reduction:
    """One row of the reduction table: what happens to the gradients of one kind of parameter.

    `sums` are the groups that the gradient is summed over, in this order; `counted_by` are the ranks that
    count these elements in the norm, each its shard with ZeRO.
    """

    kind: str
    sums: tuple[tuple[str, tuple[int, ...]], ...]
    divisor: int
    shards: tuple[int, ...]
    counted_by: tuple[int, ...]


class Place:
    """One rank of a job."""

    def __init__(self, job: Job, rank: int) -> None:
        self.job, self.rank, self._topology = job, rank, job.topology
        self.coordinates = coordinates(job.topology, rank)

    def group(self, *axes: str) -> Group:
        """My group over some axes."""
        real = [axis for axis in axes if self.job.size(axis) > 1]
        fixed = {name: at for name, at in self.coordinates.items() if name not in real}
        known = {name: at for name, at in fixed.items() if self._topology.get_dim(name)}
        ranks = tuple(self._topology.filter_match(**known))
        return Group("*".join(real), ranks, ranks.index(self.rank))

    def expert(self, ep_size: int) -> Group:
        """The ranks that hold the experts together and exchange tokens."""
        return self._of_experts(ep_size)[0]

    def expert_data(self, ep_size: int) -> Group:
        """The ranks that hold the same experts as I do."""
        return self._of_experts(ep_size)[1]

    def _of_experts(self, ep_size: int) -> tuple[Group, Group]:
        first = self.job.config.use_data_before_expert_parallelism
        both = expert_rank_lists([list(self.group("data", "seq").ranks)], ep_size, data_first=first)
        own = [next(tuple(ranks) for ranks in lists if self.rank in ranks) for lists in both]
        places = [ranks.index(self.rank) for ranks in own]
        replicas = self.group("data", "seq").axis
        names = ["expert" if len(own[0]) > 1 else "", "expert-data" if len(own[1]) > 1 else ""]
        if len(own[0]) == 1:
            names[1] = replicas
        experts, copies = (Group(*one) for one in zip(names, own, places, strict=True))
        return experts, copies

    def tie(self, key: str) -> Group | None:
        """The ranks of the stages that share a tied module; None if this rank's stage has no part in it."""
        assert self.job.stages is not None
        stages = self.job.stages.stages_of_tie(key)
        mine = self.coordinates["pipe"]
        if mine not in stages:
            return None
        column = self.group("pipe").ranks
        ranks = tuple(column[stage] for stage in stages)
        return Group("tied" if len(ranks) > 1 else "", ranks, stages.index(mine))

    def data(self, tags: Tags) -> Group:
        """The ranks over which gradients with these tags are averaged."""
        return self.expert_data(tags.ep_size) if tags.owner == "expert" else self.group("data", "seq")

    def reduction(self, kind: str, tags: Tags) -> Reduction:
        """The row of the table for one kind of parameter."""
        sums = []
        tie = self.tie(tags.tied) if tags.tied is not None else None
        if tie is not None:
            sums.append(("stages", tie.ranks))
        if tags.model == "partial":
            sums.append(("model", self.group("model").ranks))
        data = self.data(tags)
        sums.append(("expert-data" if tags.owner == "expert" else "data x seq", data.ranks))
        stage = self.job.config.zero_optimization.stage
        return Reduction(
            kind,
            tuple(sums),
            self.job.size("data") * self.job.size("seq"),
            data.ranks if stage else (),
            self._counting(tags, tie),
        )

    def _counting(self, tags: Tags, tie: Group | None) -> tuple[int, ...]:
        """The lowest stage of a tie, the lowest model rank of a copy, of replicas the first or all shards."""
        owner = self.rank if tie is None else tie.ranks[0]
        if tags.model != "sharded":
            owner = min(Place(self.job, owner).group("model").ranks)
        ranks = Place(self.job, owner).data(tags).ranks
        return ranks if self.job.config.zero_optimization.stage else ranks[:1]


def coordinates(topology: ProcessTopology, rank: int) -> dict[str, int]:
    """Where a rank is on each of the four axes; 0 on one that is missing."""
    coord = topology.get_coord(rank)
    return {axis: int(getattr(coord, axis, 0)) for axis in AXES}


def groups_of(place: Place) -> dict[str, tuple[int, ...]]:
    """The groups of a rank by name: the axes, their products, experts, ties."""
    job = place.job
    named: dict[str, tuple[int, ...]] = {axis: place.group(axis).ranks for axis in AXES}
    named["data x seq"] = place.group("data", "seq").ranks
    named["pipe x model"] = place.group("pipe", "model").ranks
    for size in job.ep_sizes:
        of = f" of {size}" if len(job.ep_sizes) > 1 else ""
        named[f"expert{of}"] = place.expert(size).ranks
        named[f"expert-data{of}"] = place.expert_data(size).ranks
    for key in sorted(job.stages.ties) if job.stages is not None else ():
        tie = place.tie(key)
        if tie is not None and tie.size > 1:
            named[f"tie {key!r}"] = tie.ranks
    return named


def reductions_of(place: Place, kinds: Sequence[Tags] | None) -> list[Reduction]:
    """The table's rows for the kinds of parameters that this rank has; without them, for all there can be."""
    if kinds is None:
        kinds = _possible(place)
    keys = {tags.tied for tags in kinds} - {None}
    order = {"sharded": 0, "full": 1, "partial": 2}
    found = sorted(set(kinds), key=lambda t: (t.owner, order[t.model], t.tied or "", t.ep_size))
    return [place.reduction(name_of(tags, has_key=len(keys) > 1), tags) for tags in found]


def name_of(tags: Tags, *, has_key: bool) -> str:
    """Tags in words; with the key of a tie where there are several."""
    key = f" {tags.tied}" if has_key else ""
    return f"{tags.owner} {tags.model}" + (f" tied{key}" if tags.tied is not None else "")


def _possible(place: Place) -> list[Tags]:
    job = place.job
    kinds = [Tags()]
    if job.size("model") > 1:
        kinds += [Tags(model="sharded"), Tags(model="partial")]
    for size in job.ep_sizes:
        kinds.append(Tags("expert", "sharded" if job.size("model") > 1 else "full", ep_size=size))
    if job.stages is not None:
        kinds += [Tags(tied=key) for key in job.stages.ties if place.tie(key) is not None]
    return kinds
