"""THE reduction rules: who is summed over whom, divided by what, counted how often (§9.1 §9.3).

Each parameter carries three independent tags, and nothing else decides:

    owner   dense      gradients are summed over the data axis (x seq) and divided by its size
            expert     summed over the expert-data group, divided by the same number
    model   sharded    this rank holds a piece; nothing more to sum
            full       replicated, and the gradient is already complete on each rank
            partial    replicated, and each rank holds a part of the gradient: summed over the model axis
    tied    key        also summed over the stages that use it, before the data reduction

A gradient that is missing on one rank counts as zero. It stays None only if it is None on every rank;
the flags that decide this travel at the end of the buffer they belong to.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor, nn

from ds_lite import comm
from ds_lite.comm import ProcessGroup

MAX_BUCKET_ELEMENTS = 2**25  # 128 MiB of float32: large enough to be efficient, small beside a model


@dataclass(frozen=True)
class Tags:
    """How one parameter's gradient is reduced; see the module's table."""

    owner: Literal["dense", "expert"] = "dense"
    model: Literal["sharded", "full", "partial"] = "full"
    tied: str | None = None


def tags_of(parameter: nn.Parameter) -> Tags:
    """The tags of a parameter; dense, full and not tied unless a layer said otherwise."""
    tags: Tags = getattr(parameter, "_ds_lite_tags", Tags())
    return tags


def tag(parameter: nn.Parameter, **changes: str) -> None:
    """Change some of a parameter's tags, e.g. `tag(weight, tied="embedding")`."""
    parameter._ds_lite_tags = replace(tags_of(parameter), **changes)  # type: ignore[attr-defined, arg-type]


# ------------------------------------------------------------------------------------------ buckets


class Bucket:
    """Parameters of one dtype whose gradients are reduced together, over one group, in one message.

    Gradients are copied into a flat buffer only while they are reduced; afterwards each `.grad` is a view
    of the reduced buffer.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], group: ProcessGroup, divisor: int) -> None:
        self.parameters, self.group, self.divisor = list(parameters), group, divisor
        self.sizes = [parameter.numel() for parameter in self.parameters]

    def reduce(self) -> None:
        """Sum over the group and divide.

        Communication: one all-reduce of the bucket plus one element per parameter.
        """
        if comm.get_world_size(self.group) == 1:
            return
        flat = torch.cat([*self.flat_gradients(), self.presence()])
        comm.all_reduce(flat, group=self.group)
        *pieces, seen = flat.split([*self.sizes, len(self.sizes)])
        if self.divisor != 1:
            flat.div_(self.divisor)
        for parameter, piece, has_gradient in zip(self.parameters, pieces, seen.tolist(), strict=True):
            parameter.grad = piece.view_as(parameter) if has_gradient > 0 else None

    def flat_gradients(self) -> list[Tensor]:
        """One 1-D gradient per parameter, zeros for a missing one."""
        return [
            torch.zeros(p.numel(), dtype=p.dtype, device=p.device)
            if p.grad is None
            else (p.grad.to_dense() if p.grad.is_sparse else p.grad).reshape(-1)
            for p in self.parameters
        ]

    def presence(self) -> Tensor:
        """One element per parameter: 1 if this rank has a gradient for it."""
        flags = [float(parameter.grad is not None) for parameter in self.parameters]
        return torch.tensor(flags, dtype=self.parameters[0].dtype, device=self.parameters[0].device)

    def owned(self, is_owner: Callable[[nn.Parameter], bool]) -> list[Tensor]:
        """The gradients that this rank counts in the norm: those it owns among its replicas."""
        if comm.get_rank(self.group) != 0:
            return []
        return [p.grad for p in self.parameters if p.grad is not None and is_owner(p)]

    def scale_(self, factor: Tensor) -> None:
        """Multiply every gradient held here."""
        for parameter in self.parameters:
            if parameter.grad is not None:
                parameter.grad.mul_(factor.to(parameter.grad.dtype))

    def full(self, parameter: nn.Parameter) -> Tensor | None:
        """The whole gradient of one parameter."""
        return None if parameter.grad is None else parameter.grad.detach().clone()

    def clear(self) -> None:
        """Drop the gradients."""
        for parameter in self.parameters:
            parameter.grad = None


def group_by_kind(
    parameters: Iterable[nn.Parameter], max_elements: int = MAX_BUCKET_ELEMENTS
) -> list[list[nn.Parameter]]:
    """Cut parameters into runs that may share one flat buffer: same dtype, device and tags, bounded size."""
    runs: list[list[nn.Parameter]] = []
    open_runs: dict[tuple[object, ...], tuple[list[nn.Parameter], int]] = {}
    for parameter in parameters:
        kind = (parameter.dtype, parameter.device, tags_of(parameter))
        run, filled = open_runs.get(kind, ([], 0))
        if not run or filled + parameter.numel() > max_elements:
            run, filled = [], 0
            runs.append(run)
        run.append(parameter)
        open_runs[kind] = (run, filled + parameter.numel())
    return runs


# ---------------------------------------------------------------------------------------- gradients


@dataclass(frozen=True)
class Tie:
    """One tied key on this rank: the ranks that share it at equal other coordinates, lowest stage first."""

    key: str
    ranks: tuple[int, ...]
    group: ProcessGroup


class Gradients:
    """Reduce, norm, clip and clear the gradients of one engine, by the tags of its parameters.

    `buckets` together hold every trainable parameter once; `zero.py` brings buckets that keep shards.
    """

    def __init__(
        self, named: Iterable[tuple[str, nn.Parameter]], buckets: Sequence[Bucket], ties: Sequence[Tie]
    ) -> None:
        self._parameters = {name: parameter for name, parameter in named if parameter.requires_grad}
        self._bucket_of = {id(p): bucket for bucket in buckets for p in bucket.parameters}
        self.buckets = list(buckets)
        missing = [name for name, p in self._parameters.items() if id(p) not in self._bucket_of]
        assert not missing, f"parameters in no bucket: {missing}"
        self._ties = {tie.key: tie for tie in ties}
        shared = [p for p in self._parameters.values() if self._is_shared(p)]
        shared.sort(key=lambda p: str(tags_of(p).tied))  # stages may meet the keys in different orders
        self._tie_buckets = [
            Bucket(run, self._ties[str(tags_of(run[0]).tied)].group, divisor=1)
            for run in group_by_kind(shared)
        ]

    def _is_shared(self, parameter: nn.Parameter) -> bool:
        return tags_of(parameter).tied in self._ties

    def _is_owner(self, parameter: nn.Parameter) -> bool:
        """The lowest stage of a tie owns it; anything else is owned where it is."""
        tie = self._ties.get(str(tags_of(parameter).tied))
        return tie is None or tie.ranks[0] == comm.get_rank()

    def names(self) -> list[str]:
        """The trainable parameters of this rank, by their names in the module."""
        return list(self._parameters)

    def sum_tied(self) -> None:
        """Sum each tied module's gradients over the stages that use it; keys in sorted order everywhere."""
        for bucket in self._tie_buckets:
            bucket.reduce()

    def reduce(self) -> None:
        """Average over the data axis: summed there, divided by its size."""
        for bucket in self.buckets:
            bucket.reduce()

    def norm(self) -> Tensor:
        """The 2-norm over all parameters of all ranks, each element counted once; float64, 0-dim.

        Communication: one all-reduce of one number over the world.
        """
        owned = [gradient for bucket in self.buckets for gradient in bucket.owned(self._is_owner)]
        device = next((p.device for p in self._parameters.values()), torch.device("cpu"))
        square = torch.zeros((), dtype=torch.float64, device=device)
        for dtype in {gradient.dtype for gradient in owned}:
            alike = [gradient for gradient in owned if gradient.dtype == dtype]
            square += torch.nn.utils.get_total_norm(alike).double().square()
        comm.all_reduce(square)
        return square.sqrt()

    def clip(self, max_norm: float, norm: Tensor) -> None:
        """Scale all gradients so that their common norm is at most `max_norm`."""
        factor = max_norm / (norm + 1e-6)
        if factor < 1:
            for bucket in self.buckets:
                bucket.scale_(factor)

    def full(self, name: str) -> Tensor | None:
        """The whole gradient of one parameter of this stage; None if no rank had one.

        Communication: an all-gather over the data axis under ZeRO, so all its ranks ask together.
        """
        parameter = self._parameters[name]
        return self._bucket_of[id(parameter)].full(parameter)

    def clear(self) -> None:
        """Forget all gradients, before the next step."""
        for bucket in self.buckets:
            bucket.clear()
