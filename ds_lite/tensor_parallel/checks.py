"""What must hold of numbers and of dropout where a block is cut (§9.13)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import nn

from ds_lite.tensor_parallel.attention import changed_attributes
from ds_lite.tensor_parallel.heads import HEAD_WIDTH
from ds_lite.tensor_parallel.kinds import holds_linears
from ds_lite.tensor_parallel.placing import Placer, Region
from ds_lite.tensor_parallel.reading import Flow


def check_numbers(placer: Placer, block: str, flow: Flow, regions: Sequence[Region]) -> None:
    """What the cut changes must be a size in the code and nothing else, and what has to change must be
    told.

    Raises: ValueError otherwise.
    """

    def path(inner: str) -> str:
        return f"{block}.{inner}".strip(".")

    attentions = [one for one in placer.attentions if any(one.name == r.around for r in regions)]
    changed, wholes = _features(flow, path), set[int]()
    for one in attentions:
        heads = one.heads
        holding = {name: part for name, part in _inside(placer, one.name) if holds_linears(part)}
        changed |= changed_attributes(holding, heads)
        wholes |= {heads.query, heads.kv, heads.query * heads.width, heads.kv * heads.width} - {1}
    if wrong := sorted({path(number) for number in flow.numbers} & changed):
        raise ValueError(
            f"the code computes with {', '.join(wrong)}, which has to become the number of this "
            f"rank's heads or columns; use another attribute for what is no size (§9.13)"
        )
    for size in sorted({path(size) for size in flow.sizes} - changed):
        owner, _, name = size.rpartition(".")
        if _value_of(placer, owner, name) in wholes and name not in HEAD_WIDTH:
            raise ValueError(
                f"the code of {block or 'the model'} folds heads by "
                f"{size}={_value_of(placer, owner, name)}, which AutoTP does not change; keep the number as "
                "num_heads on the attention (§9.13)"
            )


def _features(flow: Flow, path: Callable[[str], str]) -> set[str]:
    """The numbers of columns that cut layers tell."""
    cut = [path(layer) for layer in (*flow.openers, *flow.closers)]
    return {f"{layer}.{name}" for layer in cut for name in ("in_features", "out_features", "nf", "nx")}


def _value_of(placer: Placer, owner: str, name: str) -> Any:
    """An attribute of a module, or of its configuration."""
    module, _, last = owner.rpartition(".")
    if owner in placer.modules:
        return getattr(placer.modules[owner], name, None)
    return getattr(getattr(placer.modules.get(module), last, None), name, None)


def check_dropout(placer: Placer, block: str, regions: Sequence[Region]) -> None:
    """Ranks whose parts differ in width would draw different numbers of random numbers in a region.

    Raises: ValueError for an uneven deal in a block that drops elements.
    """
    uneven = [
        name
        for region in regions
        for name in [*region.openers, region.closer]
        if len({placer.placed[name].width(rank) for rank in range(placer.ranks)}) > 1
    ]
    dropping = _what_drops(placer.modules[block]) if uneven else None
    if dropping:
        raise ValueError(
            f"{uneven[0]} is dealt unevenly over {placer.ranks} ranks, and {block or 'the model'} drops "
            f"elements ({dropping}): the ranks would draw different random numbers, and what they hold "
            "in common would differ from then on; set it to 0, or choose a degree that divides the "
            "heads and columns (§9.13)"
        )


def _inside(placer: Placer, name: str) -> Iterator[tuple[str, nn.Module]]:
    for inner, module in placer.modules[name].named_modules():
        yield f"{name}.{inner}".strip("."), module


def _what_drops(block: nn.Module) -> str | None:
    """A dropout that is not zero, as name and value."""
    for name, module in block.named_modules():
        if isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0:
            return f"{name}.p={module.p}"
        for key, value in vars(module).items():
            if "drop" in key and isinstance(value, float) and value > 0:
                return f"{name}.{key}={value}".lstrip(".")
    return None
