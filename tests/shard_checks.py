"""What tests of sharded layers share: groups of neighbours and of strangers, and gradients made whole.

The oracle is always the whole module in this very process.
"""

from __future__ import annotations

import torch
from small_models import linear
from tolerance import LAW, assert_close
from torch import Tensor, nn

from ds_lite import comm
from ds_lite.comm import ProcessGroup
from ds_lite.tags import cut_of, tags_of

__all__ = ["Axes", "completed", "compare_gradients", "groups_of", "linear", "my_group", "pattern", "shake"]

NEIGHBOURS = [[0, 1], [2, 3]]
STRIDES = [[0, 2], [1, 3]]


def my_group(lists: list[list[int]], axis: str = "model") -> ProcessGroup:
    """The group that this rank is in; every rank of the world makes all of them."""
    groups = [comm.new_group(ranks, axis) for ranks in lists]
    return next(group for group, ranks in zip(groups, lists, strict=True) if comm.get_rank() in ranks)


def groups_of() -> list[ProcessGroup]:
    """Four ranks as 2x2: this rank's pair of neighbours, and its pair across. Half of them lack rank 0."""
    return [my_group(NEIGHBOURS), my_group(STRIDES)]


class Axes:
    """As much of a grid as `bind` asks for."""

    def __init__(self, **groups: ProcessGroup) -> None:
        self._groups = groups

    def group(self, axis: str) -> ProcessGroup:
        return self._groups[axis]


def pattern(*shape: int, seed: int = 0) -> Tensor:
    """Normal numbers that depend on shape and seed only."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def completed(parameter: nn.Parameter, group: ProcessGroup) -> Tensor:
    """The gradient of the whole parameter, by the parameter's tags."""
    assert parameter.grad is not None
    how, tags = cut_of(parameter), tags_of(parameter)
    assert (how is not None) == (tags.model == "sharded"), "a cut and its tag belong together"
    if how is not None:
        return how.gather(parameter.grad)
    total = parameter.grad.clone()
    if tags.model == "partial":
        comm.all_reduce(total, group=group)
    return total


def compare_gradients(
    parameters: dict[str, nn.Parameter],
    expected: dict[str, nn.Parameter],
    group: ProcessGroup,
    msg: str = "",
) -> None:
    """Every gradient, made whole, is that of the whole module."""
    assert list(parameters) == list(expected), msg
    for name, parameter in parameters.items():
        assert_close(completed(parameter, group), expected[name].grad, LAW, f"{msg}: gradient of {name}")


@torch.no_grad()
def shake(parameters: dict[str, nn.Parameter]) -> None:
    """Move every weight by a number of order 0.3, so that nothing is one, zero or small."""
    for index, parameter in enumerate(parameters.values()):
        parameter.add_(0.3 * pattern(*parameter.shape, seed=index))
