"""The mpu protocol from the other side: a grid on the process groups of another library (§9.7).

Megatron's functions get_{family}_rank, _world_size and _group say who shares an axis with this rank. Any
object with these names will do; Megatron-Core's is a module, `megatron.core.parallel_state`.

    axis    families, the first that has all three names counts        must be there
    data    data_parallel                                              yes
    model   tensor_model_parallel, slice_parallel, model_parallel      one of them
    seq     sequence_parallel, context_parallel                        no: nobody cuts the sequence
    pipe    pipeline_model_parallel, pipe_parallel                     no: one stage

Our own grid offers all of these families but context_parallel to other libraries.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch.distributed as dist

from ds_lite import comm
from ds_lite.agreement import raise_together
from ds_lite.comm import ProcessGroup
from ds_lite.grid import PipelineParallelGrid
from ds_lite.topology import ProcessTopology

FAMILIES: dict[str, tuple[str, ...]] = {
    "data": ("data_parallel",),
    "seq": ("sequence_parallel", "context_parallel"),
    "model": ("tensor_model_parallel", "slice_parallel", "model_parallel"),
    "pipe": ("pipeline_model_parallel", "pipe_parallel"),
}
_AXES = ("data", "seq", "model")  # of an mpu whose groups we take: it has one stage
_PAIR = ("data", "seq")
_WORDS = ("world_size", "rank", "group")


@dataclass(frozen=True)
class Answer:
    """What an mpu says of one axis on one rank; `ranks` are the members of the group, in its order."""

    family: str
    size: int
    rank: int
    ranks: list[int]
    group: ProcessGroup | None = None  # None: this rank alone


Answers = dict[tuple[str, ...], Answer]  # by axis; by ("data", "seq") too if the mpu has such a group


class MpuGrid(PipelineParallelGrid):
    """The grid of a model that is not a PipelineModule, on the groups that `mpu` made.

    No group is made where the mpu has one. Data, seq and model together are the whole world.

    Communication: gathers the members of all groups, once. Every rank calls it at the same point.
    Raises: on every rank, TypeError for names that are missing; ValueError if the mpu contradicts itself,
    was not initialised, or has a pipeline.

    Source: §9.7; DeepSpeed `utils/bwc.py` @ 0.19.8; Megatron-Core `parallel_state.py` @ 0.16.1.
    Differs: DeepSpeed believes an mpu and looks up each name alone, so rank and group may come from different
    families; an `initialize_sequence_parallel` changes nothing here.
    """

    def __init__(self, mpu: Any) -> None:
        self.mpu = mpu
        self.global_rank, self.world_size = comm.get_rank(), comm.get_world_size()
        answers: Answers = {}
        error: TypeError | ValueError | None = None
        try:
            answers = _ask_everything(mpu, self.world_size)
        except (TypeError, ValueError) as refusal:
            error = refusal
        raise_together(error)
        table: list[Any] = [None] * self.world_size
        comm.all_gather_object(table, {axes: replace(a, group=None) for axes, a in answers.items()})
        self._places = [{axis: said[axis,].rank for axis in _AXES} for said in table]
        self._coord = self._places[self.global_rank]
        self._experts = {}
        self._sizes = {axis: answers[axis,].size for axis in _AXES}
        if fault := self._layout_fault(table):
            raise fault  # on all ranks, because all know the whole table
        self._groups = {axes: a.group for axes, a in answers.items() if a.group is not None and a.size > 1}
        self._complete()

    def _layout_fault(self, table: Sequence[Answers]) -> ValueError | None:
        """Whether the answers of all ranks make one mesh."""
        sizes = [{"*".join(axes): answer.size for axes, answer in said.items()} for said in table]
        if odd := next((rank for rank, mine in enumerate(sizes) if mine != sizes[0]), 0):
            return ValueError(
                f"mpu's groups have the sizes {sizes[odd]} on rank {odd} and {sizes[0]} on rank 0; all ranks "
                f"see the same sizes, correct the mpu (§9.7)"
            )
        for rank, said in enumerate(table):
            for axes, answer in said.items():
                expected = self._sharing(rank, axes)
                if sorted(answer.ranks) != expected:
                    return ValueError(
                        f"mpu.get_{answer.family}_group() over {'*'.join(axes)} is {answer.ranks} on rank "
                        f"{rank}, but {expected} share its other coordinates; correct the mpu (§9.7)"
                    )
        return None

    def _complete(self) -> None:
        """Add what the mpu has no group for, on every rank in one order."""
        self._groups[()] = comm.new_group_of_one()
        everything, world = self._cut_axes(_AXES), dist.group.WORLD
        assert world is not None
        self._groups.setdefault(everything, world)
        if (pair := self._cut_axes(_PAIR)) not in self._groups:
            for ranks in self.rank_lists(pair):
                group = comm.new_group(ranks, "data*seq")
                if self.global_rank in ranks:
                    self._groups[pair] = group

    def _cut_axes(self, axes: Sequence[str]) -> tuple[str, ...]:
        """Those of `axes` that have more than one rank."""
        return tuple(axis for axis in _AXES if axis in axes and self._sizes[axis] > 1)

    def _sharing(self, rank: int, axes: Sequence[str]) -> list[int]:
        """The ranks that differ from `rank` on these axes only."""
        fixed = [axis for axis in _AXES if axis not in axes]
        mine = self._places[rank]
        return [r for r, place in enumerate(self._places) if all(place[axis] == mine[axis] for axis in fixed)]

    def rank_lists(self, axes: Sequence[str]) -> list[list[int]]:
        lists = [self._sharing(rank, axes) for rank in range(self.world_size)]
        return [ranks for rank, ranks in enumerate(lists) if ranks[0] == rank]

    def _alone(self) -> ProcessGroup:
        return self._groups[()]

    def size(self, *axes: str) -> int:
        if axes == ("expert",):
            return self.expert().size
        return prod(self._sizes[axis] for axis in self._cut_axes(axes))

    def group(self, *axes: str) -> ProcessGroup:
        return self.expert().group if axes == ("expert",) else self._groups[self._cut_axes(axes)]

    def ranks(self, *axes: str) -> list[int]:
        """The global ranks of my group over these axes, in the group's order."""
        return dist.get_process_group_ranks(self.group(*axes))

    def topology(self) -> ProcessTopology:
        raise ValueError(
            "the ranks of an mpu need not lie row-major, so it has no topology; ask coordinate() or ranks() "
            "(§9.7)"
        )

    def stage_to_global(self, stage_id: int, **kwargs: int) -> int:
        place = {**self._coord, **kwargs}
        if stage_id != 0 or place not in self._places:
            raise ValueError(
                f"no rank is at stage_id={stage_id} {kwargs}; the grid of an mpu has stage 0 and the axes "
                f"{self._sizes} (§9.7)"
            )
        return self._places.index(place)


# ----------------------------------------------------------------------------------------- asking an mpu


def _offers(mpu: Any, name: str) -> bool:
    return callable(getattr(mpu, name, None))


def _missing(mpu: Any, family: str) -> list[str]:
    return [name for word in _WORDS if not _offers(mpu, name := f"get_{family}_{word}")]


def _ask(mpu: Any, name: str, **kwargs: bool) -> Any:
    try:
        return getattr(mpu, name)(**kwargs)
    except Exception as error:  # whatever a library raises before its groups are there; Megatron asserts
        raise ValueError(
            f"mpu.{name}() failed with {type(error).__name__}: {error}; make the mpu's groups on every rank "
            f"before ds_lite.initialize (§9.7)"
        ) from error


def _ask_number(mpu: Any, name: str) -> int:
    said = _ask(mpu, name)
    try:
        return operator.index(said)
    except TypeError:
        raise ValueError(f"mpu.{name}() is {said!r}; return an integer (§9.7)") from None


def _ask_group(mpu: Any, name: str, size: int, **kwargs: bool) -> tuple[ProcessGroup | None, list[int]]:
    """A group and its members. A None means nobody else to some libraries, and the world to torch."""
    group = _ask(mpu, name, **kwargs)
    if group is None and size == 1:
        return None, [comm.get_rank()]
    if group is None and size == comm.get_world_size():
        group = dist.group.WORLD
    if isinstance(group, ProcessGroup):  # outside its groups torch hands a rank a number
        with suppress(Exception):  # one that was destroyed
            return group, dist.get_process_group_ranks(group)
    raise ValueError(
        f"mpu.{name}() is {group!r}, which torch.distributed does not know as a group of this rank; return "
        f"the group that this rank is in (§9.7)"
    )


def _ask_everything(mpu: Any, world_size: int) -> Answers:
    """All axes, checked as far as one rank can."""
    for family in FAMILIES["pipe"]:
        if _offers(mpu, name := f"get_{family}_world_size") and (stages := _ask_number(mpu, name)) != 1:
            raise ValueError(
                f"mpu.{name}() is {stages}, but the model is not a PipelineModule: the stages of another "
                f"library's pipeline cannot be driven from here; pass a PipelineModule, or an mpu with one "
                f"stage (§9.7)"
            )
    answers: Answers = {(axis,): _ask_axis(mpu, axis) for axis in _AXES}
    product = prod(answer.size for answer in answers.values())
    if product != world_size:
        words = " * ".join(f"get_{a.family}_world_size()={a.size}" for a in answers.values())
        raise ValueError(
            f"mpu says {words} = {product} in a world of {world_size} ranks; the axes multiply to the world: "
            f"correct the mpu, or add the names of the axis that is missing (§9.7)"
        )
    if answers["data",].size > 1 and answers["seq",].size > 1:
        answers.update(_ask_pair(mpu, answers["data",].size * answers["seq",].size))
    return answers


def _ask_axis(mpu: Any, axis: str) -> Answer:
    families, me = FAMILIES[axis], comm.get_rank()
    begun = [family for family in families if len(_missing(mpu, family)) < len(_WORDS)]
    family = next((family for family in begun if not _missing(mpu, family)), None)
    if family is None:
        if axis == "seq" and not begun:
            return Answer(families[0], 1, 0, [me])
        # `data_parallel` and `model_parallel`, the last of their axes, are the documented minimum.
        names = ", ".join(_missing(mpu, begun[0] if begun else families[-1]))
        raise TypeError(
            f"mpu, a {type(mpu).__name__}, has no {names}; for the {axis} axis it needs rank, world_size and "
            f"group of {' or '.join(families)} (§9.7)"
        )
    size, rank = (_ask_number(mpu, f"get_{family}_{word}") for word in ("world_size", "rank"))
    group, ranks = _ask_group(mpu, f"get_{family}_group", size)
    if len(ranks) != size or me not in ranks or ranks.index(me) != rank:
        raise ValueError(
            f"mpu.get_{family}_group() is {ranks} on rank {me}, but get_{family}_rank() is {rank} and "
            f"get_{family}_world_size() is {size}; the group has that many ranks, this one at that place: "
            f"correct the mpu (§9.7)"
        )
    for other in begun:  # two names for one axis say the same, or one of them means something else
        for word, ours in (("world_size", size), ("rank", rank)):
            if _offers(mpu, name := f"get_{other}_{word}") and (said := _ask_number(mpu, name)) != ours:
                raise ValueError(
                    f"mpu.{name}() is {said} but mpu.get_{family}_{word}() is {ours}; both speak about the "
                    f"{axis} axis, make them equal or leave one out (§9.7)"
                )
    return Answer(family, size, rank, ranks, group)


def _ask_pair(mpu: Any, size: int) -> Answers:
    """The group over data and seq together: DeepSpeed's name for it, or Megatron-Core's argument."""
    family, kwargs = "sequence_data_parallel", {}
    if not _offers(mpu, f"get_{family}_group"):
        family, kwargs = "data_parallel", {"with_context_parallel": True}
        if "with_context_parallel" not in inspect.signature(mpu.get_data_parallel_group).parameters:
            return {}
    group, ranks = _ask_group(mpu, f"get_{family}_group", size, **kwargs)
    return {_PAIR: Answer(family, len(ranks), 0, ranks, group)}


# ------------------------------------------------------------------------- beside a PipelineModule


def mpu_fault(mpu: Any, grid: PipelineParallelGrid) -> ValueError | None:
    """Where an mpu says something else than the grid of a PipelineModule: sizes, ranks, members of groups.

    What an mpu does not say, it does not contradict. `model_parallel` may mean the tensor axis (old Megatron)
    or pipe x tensor (Megatron-Core, DeepSpeed). This is one rank's view, and a wrong mpu may be right on some
    ranks: hand the result to `raise_together`.

    Source: §9.7; DeepSpeed `__init__.py::initialize` @ 0.19.8.
    Differs: DeepSpeed asserts that a PipelineModule comes without an mpu.
    """
    meanings: list[tuple[str, list[tuple[str, ...]]]] = [("sequence_data_parallel", [_PAIR])]
    for axis, families in FAMILIES.items():
        both: list[tuple[str, ...]] = [(axis,), ("pipe", "model")]
        meanings += [(family, both if family == "model_parallel" else both[:1]) for family in families]
    if all(len(_missing(mpu, family)) == len(_WORDS) for family, _ in meanings):
        return ValueError(
            f"mpu, a {type(mpu).__name__}, has no name of the protocol, such as get_data_parallel_rank; pass "
            f"Megatron's parallel_state, a grid, or nothing (§9.7)"
        )
    found: list[tuple[int, str]] = []
    try:
        for family, choices in meanings:
            readings = [list(_family_faults(mpu, grid, family, axes)) for axes in choices]
            found += max(readings) if all(readings) else []  # the reading that goes wrong last
    except ValueError as error:
        return error
    text = f"{min(found)[1]}; pass an mpu of the same layout, or none (§9.7)" if found else None
    return ValueError(text) if text else None


def _family_faults(
    mpu: Any, grid: PipelineParallelGrid, family: str, axes: tuple[str, ...]
) -> Iterator[tuple[int, str]]:
    """What a family says that `grid` does not; sizes come first, they are wrong on all ranks alike."""
    ranks = grid.ranks(*axes)
    ours = (len(ranks), ranks.index(grid.global_rank), ranks)
    for order, (word, expected) in enumerate(zip(_WORDS, ours, strict=True)):
        if not _offers(mpu, name := f"get_{family}_{word}"):
            continue
        said = _ask_group(mpu, name, len(ranks))[1] if word == "group" else _ask_number(mpu, name)
        if said != expected:
            yield order, f"mpu.{name}() is {said} but the PipelineModule's grid says {expected}"
