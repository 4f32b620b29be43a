"""The optimizer's state by parameter name and whole, whatever the layout that holds it (§9.1 §9.3).

What an optimizer steps may be a parameter, its float32 master, or a piece of either in a ZeRO shard, and the
parameter itself may be cut over the model axis. Saved is what one process would hold, by parameter name:

    master      the value that is stepped, where the parameter is its rounding
    elements    tensors with an entry for each element: momentum, variances
    numbers     what stands for the whole parameter: the count of steps

A parameter that never had a gradient has neither elements nor numbers, and none are made up.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ds_lite import comm
from ds_lite.buckets import Bucket, Piece
from ds_lite.saving.files import plain
from ds_lite.saving.groups import Group, groups_of, groups_of_a_stage
from ds_lite.tags import cut_of, whole
from ds_lite.zero import ShardedBucket

# torch.optim keeps these as one number a parameter, also where the parameter is one number itself.
_NUMBERS = ("step", "mu_product", "eta", "mu")


@dataclass(frozen=True)
class Place:
    """A trainable parameter, and what this rank's optimizer steps of it; None: a data peer does all of it."""

    parameter: nn.Parameter
    bucket: Bucket
    piece: Piece | None

    @property
    def has_master(self) -> bool:
        return self.bucket.dtype != self.parameter.dtype

    @property
    def is_part(self) -> bool:
        """Whether the optimizer sees another shape than that of the whole parameter."""
        how = cut_of(self.parameter)
        is_cut = how is not None and len(how.ranges) > 1
        return is_cut or (self.piece is not None and self.piece.target.shape != self.parameter.shape)


@dataclass
class Sheet:
    """What one rank's optimizer holds, or the union over a stage. `elements` are dtypes, by name and key."""

    groups: list[Group] = field(default_factory=list)
    elements: dict[str, dict[str, torch.dtype]] = field(default_factory=dict)
    numbers: dict[str, dict[str, Any]] = field(default_factory=dict)


def places_of(module: nn.Module, buckets: Iterable[Bucket]) -> dict[str, Place]:
    """By name, every parameter that was trainable when the engine was made.

    Raises: ValueError for one that is not in the module, or not any more.
    """
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    places: dict[str, Place] = {}
    for bucket in buckets:
        pieces = {piece.index: piece for piece in bucket.pieces}
        for index, parameter in enumerate(bucket.parameters):
            if id(parameter) not in names:
                raise ValueError(
                    f"the engine trains a parameter of shape {tuple(parameter.shape)} that is not in the "
                    f"module, so it has no name in a checkpoint; put it there before initialize, and change "
                    f"values in place, not the Parameter object (§9.1)"
                )
            places[names[id(parameter)]] = Place(parameter, bucket, pieces.get(index))
    return places


def names_of_targets(places: Mapping[str, Place]) -> dict[int, str]:
    """By the id of what the optimizer steps, the name of the parameter it stands for."""
    return {id(place.piece.target): name for name, place in places.items() if place.piece is not None}


# ------------------------------------------------------------------------------------------------ saving


def describe(optimizer: torch.optim.Optimizer | None, places: dict[str, Place]) -> Sheet:
    """What this rank would have to save.

    Raises: ValueError for state that belongs to no parameter, that cannot be stored, or that has no meaning
    apart from the shape in which this rank holds the parameter.
    """
    sheet = Sheet()
    if optimizer is None:
        return sheet
    names = names_of_targets(places)
    sheet.groups = groups_of(optimizer, names)
    for target, state in optimizer.state.items():
        if id(target) in names:
            _describe_one(sheet, names[id(target)], places[names[id(target)]], state)
        elif state:
            what = f"a tensor of shape {tuple(target.shape)}" if isinstance(target, Tensor) else repr(target)
            raise ValueError(
                f"optimizer {type(optimizer).__name__} keeps state for {what}, which is no parameter of the "
                f"module, so it has no name to be saved under; give it parameters of the module only (§9.1)"
            )
    return sheet


def _describe_one(sheet: Sheet, name: str, place: Place, state: dict[str, Any]) -> None:
    assert place.piece is not None
    shape = place.piece.target.shape
    for key, value in state.items():
        if isinstance(value, Tensor) and value.shape == shape and (value.dim() or key not in _NUMBERS):
            sheet.elements.setdefault(name, {})[key] = value.dtype
            continue
        if _needs_whole(value) and place.is_part:
            raise ValueError(f"{_no_parts(name, key, value)} to save it (§9.1)")
        sheet.numbers.setdefault(name, {})[key] = plain(value, f"optimizer.state[{name!r}][{key!r}]")


def _needs_whole(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0


def _no_parts(name: str, key: str, value: Tensor) -> str:
    return (
        f"the optimizer's state {key!r} of {name} has shape {tuple(value.shape)}, not the parameter's, so it "
        f"cannot be cut or joined; keep {name} whole (ZeRO stage 0, no tensor parallelism)"
    )


def merged(sheets: Sequence[Sheet]) -> Sheet:
    """The union over the ranks of a stage; where ranks hold the same, the lowest is taken."""
    union = Sheet(groups_of_a_stage(sheet.groups for sheet in sheets))
    for sheet in sheets:
        for name, kinds in sheet.elements.items():
            union.elements[name] = {**kinds, **union.elements.get(name, {})}
        for name, numbers in sheet.numbers.items():
            union.numbers[name] = {**numbers, **union.numbers.get(name, {})}
    return union


def whole_state(
    optimizer: torch.optim.Optimizer, place: Place, kinds: dict[str, torch.dtype], *, keep: bool
) -> dict[str, Any]:
    """Master and elementwise state of one parameter as one process would hold them, on the CPU.

    Communication: per tensor one all-reduce over the data axis under ZeRO, and one all-gather over the model
    axis for a parameter that was cut; so all ranks of a stage call it, and those that `keep` get the result.
    """
    if not keep and cut_of(place.parameter) is None and not isinstance(place.bucket, ShardedBucket):
        return {}  # the writer has it all
    target = place.piece.target if place.piece is not None else None
    state = optimizer.state.get(target, {}) if target is not None else {}
    elements: dict[str, Tensor] = {}
    for key, dtype in sorted(kinds.items()):
        joined = _joined(place, state.get(key), dtype)
        if keep:
            elements[key] = joined.cpu()
    content: dict[str, Any] = {"elements": elements}
    if place.has_master:
        master = _joined(place, None if target is None else target.detach(), place.bucket.dtype)
        if keep:
            content["master"] = master.cpu()
    return content


def _joined(place: Place, mine: Tensor | None, dtype: torch.dtype) -> Tensor:
    """The whole tensor from this rank's piece and its peers'."""
    parameter = place.parameter
    local = torch.zeros(parameter.numel(), dtype=dtype, device=parameter.device)
    if mine is not None and place.piece is not None:
        local[place.piece.start : place.piece.stop] = mine.reshape(-1)
    if isinstance(place.bucket, ShardedBucket) and local.numel():
        # Each byte comes from one rank and is zero on the others, so the sum is exact for every dtype.
        comm.all_reduce(local.view(torch.uint8), group=place.bucket.route.data)
    return whole(parameter, local.view(parameter.shape))


# ----------------------------------------------------------------------------------------------- loading


def part_of(parameter: Tensor, value: Tensor) -> Tensor:
    """What this rank keeps of a whole value of the parameter."""
    how = cut_of(parameter)  # type: ignore[arg-type]
    return value if how is None else how.take(value, comm.get_rank(how.group))


def own_piece(place: Place, value: Tensor) -> Tensor:
    """What this rank's optimizer steps of a whole value, in the shape in which it steps it."""
    assert place.piece is not None
    local = part_of(place.parameter, value).reshape(-1)
    return local[place.piece.start : place.piece.stop].view(place.piece.target.shape)


@torch.no_grad()
def set_target(place: Place, value: Tensor) -> None:
    """Let the optimizer go on from this value: the master or the shard, where it steps not the parameter."""
    if place.piece is not None:
        place.piece.target.copy_(own_piece(place, value))


@torch.no_grad()
def set_state(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], name: str, place: Place, saved: dict[str, Any]
) -> None:
    """Give the optimizer its state for what it steps of one parameter of `group`, in place of what it had.

    Raises: ValueError for state that only a whole parameter can have.
    """
    assert place.piece is not None
    target = place.piece.target
    state: dict[str, Any] = {}
    for key, value in saved["elements"].items():
        dtype = target.dtype if value.is_floating_point() else value.dtype
        state[key] = torch.empty_like(target, dtype=dtype).copy_(own_piece(place, value))
    for key, value in saved["numbers"].items():
        if _needs_whole(value) and place.is_part:
            raise ValueError(f"{_no_parts(name, key, value)} to load it (§9.1)")
        if isinstance(value, Tensor):  # torch keeps the count of steps on the CPU unless the step runs there
            is_on_host = key == "step" and not group.get("capturable") and not group.get("fused")
            value = value.to("cpu" if is_on_host else target.device, copy=True)
        state[key] = value
    optimizer.state.pop(target, None)
    if state:
        optimizer.state[target] = state


@torch.no_grad()
def follow_parameters(places: Iterable[Place]) -> None:
    """After somebody has changed parameters: masters and shards take their values, in the old storage."""
    places = list(places)
    for bucket in {id(place.bucket): place.bucket for place in places}.values():
        bucket.follow()
    for place in places:
        if (piece := place.piece) is not None and piece.target is not place.parameter:
            mine = place.parameter.detach().reshape(-1)[piece.start : piece.stop]
            piece.target.copy_(mine.view(piece.target.shape))


def is_master_of(place: Place, master: Tensor) -> bool:
    """Whether the parameter, as far as this rank steps it, is the rounding of a saved master."""
    assert place.piece is not None
    mine = place.parameter.detach().reshape(-1)[place.piece.start : place.piece.stop]
    rounded = own_piece(place, master).reshape(-1).to(mine.dtype)
    return torch.equal(mine.cpu(), rounded.cpu())
