"""What every layer of a tensor-parallel region does once: join a group and keep a part (§9.3)."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn
from torch.nn import functional as F

from ds_lite import comm
from ds_lite.comm import ProcessGroup
from ds_lite.dealing import Ranges
from ds_lite.grid import PipelineParallelGrid
from ds_lite.tags import Cut, cut, cut_of
from ds_lite.tensor_parallel.kinds import is_conv1d
from ds_lite.tensor_parallel.overlap import linear_overlapped

Dealing = Callable[[int], Ranges]  # how a dimension is dealt over so many ranks


class ShardedLayer(nn.Module):
    """A layer made from a whole module: it joins a group once, and keeps a part of the parameters then.

    Raises: TypeError for a module that is not of `module_type`. On joining, ValueError if this process is not
    in the group, if the dimension cannot be dealt over its ranks, or if a parameter that is shared
    with another layer was cut in another way.
    """

    module_type: type[nn.Module] = nn.Linear  # or a Conv1D, which keeps its weight the other way round

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.is_transposed = is_conv1d(module) and self.module_type is nn.Linear
        is_right = isinstance(module, self.module_type) or self.is_transposed
        if not is_right or not isinstance(module.weight, nn.Parameter):
            raise TypeError(
                f"{type(self).__name__} is made from a whole {self.module_type.__name__} with a weight, got "
                f"{type(module).__name__}; copy its weights into one first (§9.3)"
            )
        self.weight = module.weight
        self.bias: nn.Parameter | None = getattr(module, "bias", None)
        self.group: ProcessGroup | None = None
        self.ranges: Ranges = ()
        self.place = ""
        self.overlaps = False  # tp_overlap_comm

    def bind(self, grid: PipelineParallelGrid) -> None:
        """Join the grid's tensor-parallel group; does nothing on a layer that has a group."""
        if self.group is None:
            self.join(grid.group("model"))

    def join(self, group: ProcessGroup) -> None:
        """Keep this rank's part of every parameter that is cut, and tag all of them."""
        if comm.get_rank(group) < 0:
            raise ValueError(
                f"process {comm.get_rank()} is not in the group it got; pass the tensor-parallel group that "
                f"it belongs to (§9.3)"
            )
        self.ranges = self._take_part(group)
        self.group = group
        self.place = f"rank {comm.get_rank(group)} of {comm.get_world_size(group)}, "

    def _take_part(self, group: ProcessGroup) -> Ranges:
        raise NotImplementedError

    def product(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x times the weight that is here.

        Shapes: x (..., in) -> (..., out), what this rank holds of each.
        """
        return self.linear(x, self.weight.T if self.is_transposed else self.weight, bias)

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """F.linear; a layer that overlaps computes the gradients of weight and bias beside the sum of x's."""
        return (linear_overlapped if self.overlaps else F.linear)(x, weight, bias)

    @property
    def in_features(self) -> int:
        """How many input columns are here."""
        return int(self.weight.shape[self.in_dim])

    @property
    def out_features(self) -> int:
        """How many output columns are here."""
        return int(self.weight.shape[self.out_dim])

    @property
    def out_dim(self) -> int:
        """The dim of the weight along which its output columns lie."""
        return 1 if self.is_transposed else 0

    @property
    def in_dim(self) -> int:
        """The dim of the weight along which its input columns lie."""
        return 1 - self.out_dim

    @property
    def whole_shape(self) -> tuple[int, ...]:
        """The shape of the weight before it was cut."""
        how = cut_of(self.weight)
        return tuple(self.weight.shape) if how is None else how.whole_shape(self.weight.shape)

    def extra_repr(self) -> str:
        shapes = f"weight {tuple(self.weight.shape)} of {self.whole_shape}"
        return f"{self.place}{shapes}, bias={self.bias is not None}"


def cut_once(parameter: nn.Parameter, how: Cut) -> None:
    """Cut a parameter; one that another layer cut in the same way, as a tied head may, stays as it is."""
    before = cut_of(parameter)
    if before is None and how.whole_shape(parameter.shape) != tuple(parameter.shape):
        raise ValueError(
            f"the ranges {how.ranges} do not cover dim {how.dim} of a parameter of shape "
            f"{tuple(parameter.shape)}; check num_heads and the head width (§9.3)"
        )
    if before is None:
        cut(parameter, how)
    elif before != how:
        raise ValueError(
            f"a parameter shared by two layers was cut along dim {before.dim} at {before.ranges} and now "
            f"along dim {how.dim} at {how.ranges}; cut both alike over one group, or share nothing (§9.3)"
        )
