"""From a topology to process groups, and the mpu protocol (§9.7 §9.11).

A grid answers three questions for its rank: where am I on each axis, which group shares each axis with
me, and which global rank sits at another stage with my other coordinates. All groups are made when the
grid is made, on every rank, in one order; those of experts follow once it is known which the layers need. An
axis of size 1 shares a group of this rank alone.
"""

from __future__ import annotations

from collections.abc import Sequence

from ds_lite import comm
from ds_lite.comm import ProcessGroup
from ds_lite.expert_groups import ExpertGroups, expert_rank_lists, make_expert_groups
from ds_lite.topology import PipeDataParallelTopology, ProcessTopology

# The groups every engine may need; a product of axes is one group over all of them.
_GROUPS: tuple[tuple[str, ...], ...] = (
    ("pipe",),
    ("data",),
    ("seq",),
    ("model",),
    ("data", "seq"),
    ("pipe", "model"),
    ("data", "seq", "model"),
)


class PipelineParallelGrid:
    """The process groups of one topology, seen from this rank.

    `topology` defaults to all ranks on the data axis. Any order of the axes pipe, data, seq, model is
    allowed, and any of them may be missing.

    Communication: creates the process groups; every rank of the world calls it at the same point.
    Raises: ValueError if the topology does not have exactly as many ranks as the world, or has an axis
    that is not one of pipe, data, seq, model.

    Source: §9.11; DeepSpeed `runtime/pipe/topology.py::PipelineParallelGrid` @ 0.19.8.
    Differs: no primes are guessed when the topology is missing; ranks alone on an axis make no group.
    """

    def __init__(
        self, topology: ProcessTopology | None = None, process_group: ProcessGroup | None = None
    ) -> None:
        world_size = comm.get_world_size()
        if process_group is not None and comm.get_world_size(process_group) != world_size:
            raise ValueError(
                f"process_group has {comm.get_world_size(process_group)} of the {world_size} ranks; a grid "
                f"is made of the whole world, leave the argument out (§9.11)"
            )
        self._topology = (
            topology if topology is not None else PipeDataParallelTopology(num_pp=1, num_dp=world_size)
        )
        self._check(world_size)
        self.global_rank = comm.get_rank()
        self.world_size = world_size
        self._coord = dict(
            zip(self._topology.get_axis_names(), self._topology.get_coord(self.global_rank), strict=True)
        )
        self._group_of_one = comm.new_group_of_one()
        self._ranks: dict[tuple[str, ...], list[int]] = {}
        self._groups: dict[tuple[str, ...], ProcessGroup] = {}
        self._experts: dict[int, ExpertGroups] = {}
        for axes in _GROUPS:
            self._make_group(axes)

    def _check(self, world_size: int) -> None:
        names = self._topology.get_axis_names()
        if unknown := [name for name in names if name not in ("pipe", "data", "seq", "model")]:
            raise ValueError(f"unknown axes {unknown}; a grid knows pipe, data, seq and model (§9.11)")
        if self._topology.world_size() != world_size:
            sizes = " * ".join(f"{name}={self._topology.get_dim(name)}" for name in names)
            raise ValueError(
                f"the topology {sizes} = {self._topology.world_size()} ranks does not fit a world of "
                f"{world_size}; start {self._topology.world_size()} processes or change an axis (§9.11)"
            )

    def _make_group(self, axes: tuple[str, ...]) -> None:
        """One group per combination of the other axes; the same order on every rank."""
        real = tuple(axis for axis in axes if self.size(axis) > 1)
        if real != axes and real in self._groups:
            self._ranks[axes], self._groups[axes] = self._ranks[real], self._groups[real]
        elif not real:
            self._ranks[axes], self._groups[axes] = [self.global_rank], self._group_of_one
        else:
            for ranks in self.rank_lists(axes):
                group = comm.new_group(ranks, "*".join(axes))
                if self.global_rank in ranks:
                    self._ranks[axes], self._groups[axes] = ranks, group

    def rank_lists(self, axes: Sequence[str]) -> list[list[int]]:
        """The global ranks of every group over `axes`: one list per combination of the other coordinates."""
        fixed = [name for name in self._topology.get_axis_names() if name not in axes]
        lists: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.world_size):
            coord = self._topology.get_coord(rank)
            lists.setdefault(tuple(getattr(coord, name) for name in fixed), []).append(rank)
        return list(lists.values())

    def stage_group(self, stages: Sequence[int]) -> tuple[list[int], ProcessGroup | None]:
        """My ranks and group over some stages at my other coordinates; None if I am in no such group.

        Communication: creates groups; every rank calls it with the same stages at the same point.
        """
        mine: tuple[list[int], ProcessGroup | None] = ([], None)
        for column in self.rank_lists(("pipe",)):
            ranks = [column[stage] for stage in sorted(stages)]
            group = comm.new_group(ranks, "tied")
            if self.global_rank in ranks:
                mine = (ranks, group)
        return mine

    def make_expert_groups(self, ep_sizes: Sequence[int], *, data_first: bool = False) -> None:
        """Cut the (data, seq) ranks into expert groups, for each size that has none yet; see `expert`.

        Communication: creates groups; every rank calls it with the same sizes at the same point.
        Raises: ValueError, before any group is made, for a size that does not divide the data x seq ranks.
        """
        replicas = self.rank_lists(("data", "seq"))
        missing = sorted(set(ep_sizes) - set(self._experts))
        lists = {size: expert_rank_lists(replicas, size, data_first=data_first) for size in missing}
        for size, both in lists.items():
            self._experts[size] = make_expert_groups(both, self._alone(), self.group("data", "seq"))

    def _alone(self) -> ProcessGroup:
        return self._group_of_one

    # ------------------------------------------------------------------------ coordinates and groups

    def size(self, *axes: str) -> int:
        """How many ranks share the product of these axes; an axis that is missing has one."""
        if axes == ("expert",):
            return self.expert().size
        product = 1
        for axis in axes:
            product *= max(1, self._topology.get_dim(axis))
        return product

    def coordinate(self, axis: str) -> int:
        """My coordinate on an axis; 0 on one that is missing."""
        return self.expert().coordinate if axis == "expert" else int(self._coord.get(axis, 0))

    def group(self, *axes: str) -> ProcessGroup:
        """My group over these axes (see `ranks` for its members)."""
        return self.expert().group if axes == ("expert",) else self._groups[axes]

    def ranks(self, *axes: str) -> list[int]:
        """The global ranks of my group over these axes, ascending."""
        return list(self.expert().ranks) if axes == ("expert",) else self._ranks[axes]

    def expert(self, ep_size: int | None = None) -> ExpertGroups:
        """My expert group and expert-data group; without `ep_size` those of the only size there is.

        The axis "expert" of `size`, `coordinate`, `group` and `ranks` is the group of the only size.
        """
        if ep_size is None and len(self._experts) == 1:
            ep_size = next(iter(self._experts))
        if ep_size not in self._experts:
            raise ValueError(
                f"ep_size={ep_size} has no expert groups here, only {sorted(self._experts)} have; groups are "
                f"made in initialize for the MoE layers of the model, or by make_expert_groups (§9.4)"
            )
        return self._experts[ep_size]

    @property
    def exchanges_tokens(self) -> bool:
        """Whether some layer of the model, on whatever stage, has experts on several ranks."""
        return any(size > 1 for size in self._experts)

    @property
    def place(self) -> str:
        """My coordinates in words, e.g. "pipe=1 data=0"."""
        return " ".join(f"{axis}={index}" for axis, index in self._coord.items())

    def topology(self) -> ProcessTopology:
        return self._topology

    def get_global_rank(self) -> int:
        return self.global_rank

    # ---------------------------------------------------------------------------------- pipeline axis

    def get_stage_id(self) -> int:
        return self.coordinate("pipe")

    def get_data_parallel_id(self) -> int:
        return self.coordinate("data")

    def stage_to_global(self, stage_id: int, **kwargs: int) -> int:
        """The global rank at `stage_id` with my other coordinates, or with those given."""
        coord = {**self._coord, **kwargs}
        if "pipe" in self._coord:
            coord["pipe"] = stage_id
        elif stage_id != 0:
            raise ValueError(
                f"stage_id={stage_id} in a topology without a pipe axis; only stage 0 exists (§9.11)"
            )
        return self._topology.get_rank(**coord)

    def get_pipe_parallel_rank(self) -> int:
        return self.coordinate("pipe")

    def get_pipe_parallel_world_size(self) -> int:
        return self.size("pipe")

    def get_pipe_parallel_group(self) -> ProcessGroup:
        return self.group("pipe")

    get_pipeline_model_parallel_rank = get_pipe_parallel_rank
    get_pipeline_model_parallel_world_size = get_pipe_parallel_world_size
    get_pipeline_model_parallel_group = get_pipe_parallel_group

    # -------------------------------------------------------------------------------------- data axis

    def get_data_parallel_rank(self) -> int:
        return self.coordinate("data")

    def get_data_parallel_world_size(self) -> int:
        return self.size("data")

    def get_data_parallel_group(self) -> ProcessGroup:
        return self.group("data")

    def get_data_parallel_group_ranks(self) -> list[int]:
        return self.ranks("data")

    # ------------------------------------------------- "model" in DeepSpeed's grid means pipe x tensor

    def get_model_parallel_rank(self) -> int:
        return self.ranks("pipe", "model").index(self.global_rank)

    def get_model_parallel_world_size(self) -> int:
        return self.size("pipe", "model")

    def get_model_parallel_group(self) -> ProcessGroup:
        return self.group("pipe", "model")

    # ------------------------------------------------------------------------------------ tensor axis

    def get_slice_parallel_rank(self) -> int:
        return self.coordinate("model")

    def get_slice_parallel_world_size(self) -> int:
        return self.size("model")

    def get_slice_parallel_group(self) -> ProcessGroup:
        return self.group("model")

    get_tensor_model_parallel_rank = get_slice_parallel_rank
    get_tensor_model_parallel_world_size = get_slice_parallel_world_size
    get_tensor_model_parallel_group = get_slice_parallel_group

    # ---------------------------------------------------------------------------------- sequence axis

    def get_sequence_parallel_rank(self) -> int:
        return self.coordinate("seq")

    def get_sequence_parallel_world_size(self) -> int:
        return self.size("seq")

    def get_sequence_parallel_group(self) -> ProcessGroup:
        return self.group("seq")

    def get_sequence_data_parallel_rank(self) -> int:
        return self.ranks("data", "seq").index(self.global_rank)

    def get_sequence_data_parallel_world_size(self) -> int:
        return self.size("data", "seq")

    def get_sequence_data_parallel_group(self) -> ProcessGroup:
        return self.group("data", "seq")
