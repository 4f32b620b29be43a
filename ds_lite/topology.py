"""§9.11 ProcessTopology: which rank sits where in a grid of named axes.

Ranks are numbered row-major, the first axis slowest, so a rank is a number in a mixed base and its
coordinates are the digits: rank = sum of coordinate times stride. Every answer here is that one
sentence; no table of ranks is kept.

Legend: an axis has a name and a size (`dim`), its stride is the product of the sizes after it.
"""

from collections import namedtuple
from collections.abc import Iterable, Sequence
from functools import cache
from keyword import iskeyword
from math import prod
from typing import Any


class ProcessTopology:
    """A row-major grid of ranks with named axes.

    Raises: ValueError for axes that are empty, repeated or no identifiers, for sizes that are no
    integers >= 1, and when the two lists differ in length.

    >>> topology = ProcessTopology(axes=["pipe", "data"], dims=[2, 3])
    >>> topology.get_rank(pipe=1, data=0)
    3
    >>> topology.get_coord(5)
    ProcessCoord(pipe=1, data=2)

    Source: §9.11; DeepSpeed `runtime/pipe/topology.py::ProcessTopology` @ edaa7221.
    Differs: DeepSpeed holds a dictionary of all ranks and searches it.
    """

    def __init__(self, axes: Sequence[str], dims: Sequence[int]) -> None:
        _check_axes(axes, dims)
        self.axes: list[str] = list(axes)
        self.dims: list[int] = list(dims)
        self._strides = [prod(dims[place + 1 :]) for place in range(len(dims))]

    @property
    def ProcessCoord(self) -> Any:  # the spelling of DeepSpeed's attribute
        """The namedtuple type of this topology's coordinates."""
        return _coord_type(tuple(self.axes))

    def world_size(self) -> int:
        """Number of ranks, the product of all sizes.

        >>> PipeModelDataParallelTopology(num_pp=4, num_mp=2, num_dp=3).world_size()
        24
        """
        return prod(self.dims)

    def get_axis_names(self) -> list[str]:
        """Axis names, outermost first."""
        return list(self.axes)

    def get_dim(self, axis: str) -> int:
        """Size of an axis, 0 if there is none of that name.

        >>> PipeDataParallelTopology(num_pp=2, num_dp=3).get_dim("model")
        0
        """
        return self.dims[self.axes.index(axis)] if axis in self.axes else 0

    def get_rank(self, **coords: int) -> int:
        """The rank at a full set of coordinates.

        Raises: ValueError for a missing or unknown axis and for a coordinate outside its axis.

        >>> PipeModelDataParallelTopology(num_pp=4, num_mp=2, num_dp=3).get_rank(pipe=2, data=1, model=0)
        14
        """
        self._check_known(coords)
        missing = [axis for axis in self.axes if axis not in coords]
        if missing:
            raise ValueError(
                f"get_rank({_written(coords)}) lacks {missing}; one rank needs a coordinate on every axis of "
                f"{self.axes}; add it, or use filter_match for all ranks that fit (§9.11)"
            )
        for axis, dim in zip(self.axes, self.dims, strict=True):
            if coords[axis] not in range(dim):
                raise ValueError(
                    f"{axis}={coords[axis]!r} is outside axis {axis!r} of size {dim}; "
                    f"choose an integer from 0 to {dim - 1} (§9.11)"
                )
        return sum(coords[axis] * stride for axis, stride in zip(self.axes, self._strides, strict=True))

    def get_coord(self, rank: int) -> Any:
        """The coordinates of a rank, as a namedtuple `ProcessCoord`.

        Raises: ValueError for a rank outside the world.

        >>> PipeModelDataParallelTopology(num_pp=4, num_mp=2, num_dp=3).get_coord(14)
        ProcessCoord(pipe=2, data=1, model=0)
        """
        if rank not in range(self.world_size()):
            raise ValueError(
                f"rank={rank!r} is outside the world of {self.world_size()} ranks that {self!r} describes; "
                f"choose an integer from 0 to {self.world_size() - 1} (§9.11)"
            )
        digits = zip(self._strides, self.dims, strict=True)
        return self.ProcessCoord(*(rank // stride % dim for stride, dim in digits))

    def get_rank_repr(
        self,
        rank: int,
        omit_axes: Iterable[str] = ("data", "pipe"),
        inner_sep: str = "_",
        outer_sep: str = "-",
    ) -> str:
        """The coordinates of a rank as part of a file name, without the omitted axes.

        >>> PipeModelDataParallelTopology(num_pp=4, num_mp=2, num_dp=3).get_rank_repr(13)
        'model_01'
        """
        omitted = frozenset(omit_axes)
        coord = zip(self.axes, self.get_coord(rank), strict=True)
        return outer_sep.join(f"{axis}{inner_sep}{index:02d}" for axis, index in coord if axis not in omitted)

    def get_axis_comm_lists(self, axis: str) -> list[list[int]]:
        """The groups that talk along an axis: ranks that differ in nothing else. No such axis, no groups.

        >>> PipeDataParallelTopology(num_pp=2, num_dp=3).get_axis_comm_lists("data")
        [[0, 1, 2], [3, 4, 5]]
        """
        if axis not in self.axes:
            return []
        place = self.axes.index(axis)
        reach = self._strides[place] * self.dims[place]  # one past the last member, counted from the first
        return [
            list(range(first, first + reach, self._strides[place])) for first in self.get_axis_list(axis, 0)
        ]

    def filter_match(self, **coords: int) -> list[int]:
        """All ranks with the given coordinates, ascending; none if a coordinate is outside its axis.

        Raises: ValueError for an unknown axis.

        >>> PipeModelDataParallelTopology(num_pp=4, num_mp=2, num_dp=3).filter_match(pipe=1, data=2)
        [10, 11]
        """
        self._check_known(coords)
        ranks = [0]
        for axis, dim, stride in zip(self.axes, self.dims, self._strides, strict=True):
            wanted = range(dim) if axis not in coords else [c for c in (coords[axis],) if c in range(dim)]
            ranks = [rank + index * stride for rank in ranks for index in wanted]
        return ranks

    def get_axis_list(self, axis: str, idx: int) -> list[int]:
        """All ranks at one place of an axis, ascending.

        >>> PipeDataParallelTopology(num_pp=2, num_dp=3).get_axis_list("pipe", 1)
        [3, 4, 5]
        """
        return self.filter_match(**{axis: idx})

    def __repr__(self) -> str:
        return f"ProcessTopology(axes={self.axes}, dims={self.dims})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ProcessTopology) and (self.axes, self.dims) == (other.axes, other.dims)

    def __hash__(self) -> int:
        return hash((tuple(self.axes), tuple(self.dims)))

    def _check_known(self, coords: dict[str, int]) -> None:
        unknown = [axis for axis in coords if axis not in self.axes]
        if unknown:
            raise ValueError(
                f"unknown axis {unknown[0]!r}; this topology has {self.axes}, name one of them (§9.11)"
            )


class PipeDataParallelTopology(ProcessTopology):
    """Pipeline stages outside, data replicas inside: gradients, the larger traffic, stay between neighbours.

    >>> PipeDataParallelTopology(num_pp=2, num_dp=2).get_coord(1)
    ProcessCoord(pipe=0, data=1)

    Source: §9.11; DeepSpeed `runtime/pipe/topology.py::PipeDataParallelTopology` @ edaa7221.
    """

    def __init__(self, num_pp: int, num_dp: int) -> None:
        super().__init__(axes=["pipe", "data"], dims=[num_pp, num_dp])


class PipeModelDataParallelTopology(ProcessTopology):
    """The three axes of 3D parallelism; tensor-parallel ranks, which talk in every layer, are neighbours.

    >>> PipeModelDataParallelTopology(num_pp=2, num_mp=2, num_dp=2).get_axis_comm_lists("model")
    [[0, 1], [2, 3], [4, 5], [6, 7]]

    Source: §9.11; DeepSpeed `runtime/pipe/topology.py::PipeModelDataParallelTopology` @ edaa7221.
    """

    def __init__(self, num_pp: int, num_mp: int, num_dp: int) -> None:
        super().__init__(axes=["pipe", "data", "model"], dims=[num_pp, num_dp, num_mp])


@cache  # one type for equal axes, so that coordinates of two topologies compare and a topology can be pickled
def _coord_type(axes: tuple[str, ...]) -> Any:
    return namedtuple("ProcessCoord", axes)  # type: ignore[misc]


def _check_axes(axes: Sequence[str], dims: Sequence[int]) -> None:
    if isinstance(axes, str) or not axes or len(axes) != len(dims):
        raise ValueError(
            f"axes={axes!r} and dims={dims!r} do not pair up; a topology is two lists of equal length, "
            f"at least 1; give each axis one size (§9.11)"
        )
    for axis in axes:
        if not isinstance(axis, str) or not axis.isidentifier() or iskeyword(axis) or axis.startswith("_"):
            raise ValueError(
                f"axis {axis!r} cannot name a coordinate; axes are used as keywords, "
                f"choose a plain word such as 'pipe' (§9.11)"
            )
    if len(set(axes)) != len(axes):
        raise ValueError(
            f"axes={list(axes)} repeats a name; a coordinate must be unambiguous, rename one (§9.11)"
        )
    for axis, dim in zip(axes, dims, strict=True):
        if not isinstance(dim, int) or isinstance(dim, bool) or dim < 1:
            raise ValueError(
                f"dim {dim!r} of axis {axis!r} is not a positive integer; an unused axis has size 1, "
                f"choose an integer >= 1 (§9.11)"
            )


def _written(coords: dict[str, int]) -> str:
    return ", ".join(f"{axis}={index}" for axis, index in coords.items())
