"""A plan of who holds what: one line per module, with its reason; data only (§9.13)."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from torch import nn

from ds_lite.dealing import Range, Ranges
from ds_lite.tensor_parallel.fused_qkv import FusedLayout, Heads
from ds_lite.tensor_parallel.kinds import is_conv1d

Kind = Literal["column", "row", "shared", "gathered", "experts", "heads", "partial", "vocabulary", "whole"]


@dataclass(frozen=True)
class Placement:
    """What becomes of one module.

    kind         the module                                    its parameters on each rank
    column       a linear that opens a region                  output columns
    row          a linear that closes it                       input columns, the bias whole
    gathered     a linear whose whole output is needed         output columns
    shared       key and value, with more ranks than kv heads  as column, but some ranks share their rows
    experts      3-D weights of all experts of a layer         the columns between gate and down of each
    heads        a weight with a dimension of heads            its heads
    partial      a norm of each head                           all; each rank has a part of the gradient
    vocabulary   an embedding that is tied to the output       rows of the vocabulary
    whole        anything else                                 all

    `ranges` are the columns of each rank, in the order in which it holds them, along `dim` of the weight. A
    projection of an attention has a `layout`. `held` is how many rows each rank keeps where that is more than
    it uses.
    """

    name: str
    kind: Kind
    reason: str
    dim: int = 0
    ranges: Ranges = ()
    layout: FusedLayout | None = None
    held: tuple[int, ...] = ()

    def width(self, rank: int) -> int:
        """How many columns rank `rank` keeps."""
        return self.held[rank] if self.held else sum(stop - start for start, stop in self.ranges[rank])


@dataclass(frozen=True)
class AttentionHeads:
    """An attention whose modules have to know how many heads are theirs; `name` is the module around them."""

    name: str
    heads: Heads
    query: tuple[Range, ...]
    kv: tuple[Range, ...]


@dataclass
class Plan:
    """All placements for one model and one degree, in the order of its modules.

    `arguments` are those of blocks that enter regions as they are, so that their gradients are partial.
    """

    ranks: int
    placements: list[Placement] = field(default_factory=list)
    attentions: list[AttentionHeads] = field(default_factory=list)
    arguments: dict[str, list[str]] = field(default_factory=dict)

    def __iter__(self) -> Iterator[Placement]:
        return iter(self.placements)

    def of(self, name: str) -> Placement:
        """The placement of a module.

        Raises: KeyError for a module that has none.
        """
        found = next((placement for placement in self.placements if placement.name == name), None)
        if found is None:
            raise KeyError(f"{name} is in no plan; linears, embeddings and modules inside a region are")
        return found

    def heads_around(self, name: str) -> AttentionHeads | None:
        """The attention that a module belongs to."""
        around = [one for one in self.attentions if not one.name or f"{name}.".startswith(f"{one.name}.")]
        return max(around, key=lambda one: len(one.name), default=None)

    def names(self, *kinds: Kind) -> list[str]:
        """The modules of some kinds."""
        return [placement.name for placement in self.placements if placement.kind in kinds]

    def rows(self, model: nn.Module) -> list[tuple[str, str, str, str, str]]:
        """The plan as a table: module, kind, shape before, shape after on each rank, reason."""
        modules = dict(model.named_modules())
        table: list[tuple[str, str, str, str, str]] = []
        for placement in self.placements:
            before = _shape_of(modules[placement.name])
            table.append(
                (
                    placement.name,
                    placement.kind,
                    _text(before),
                    self._after(placement, before),
                    placement.reason,
                )
            )
        return table

    def short_rows(self, model: nn.Module) -> list[tuple[str, str, str, str, str]]:
        """The table with equal lines of repeated blocks as one, e.g. for model.layers.0-31.mlp.up_proj."""
        numbers: dict[tuple[str, ...], list[int]] = {}
        for name, *rest in self.rows(model):
            number = re.search(r"(?:^|\.)(\d+)\.", name)
            place = number.span(1) if number else (0, 0)
            key = (name[: place[0]], name[place[1] :], *rest)
            numbers.setdefault(key, []).extend([int(number[1])] if number else [])
        return [
            (f"{start}{_span(found)}{end}", kind, before, after, reason)
            for (start, end, kind, before, after, reason), found in numbers.items()
        ]

    def shares(self, model: nn.Module) -> tuple[int, list[int]]:
        """Numbers of parameters: of the whole model, and what each rank keeps of them."""
        total = sum(weight.numel() for weight in model.parameters())
        kept = [total] * self.ranks
        seen: set[int] = set()
        modules = dict(model.named_modules())
        for placement in self.placements:
            for key, weight in modules[placement.name].named_parameters(recurse=False):
                if id(weight) in seen or not placement.ranges or (key == "bias" and placement.kind == "row"):
                    continue
                seen.add(id(weight))
                columns = max(stop for mine in placement.ranges for _, stop in mine)
                for rank in range(self.ranks):
                    kept[rank] -= weight.numel() - weight.numel() * placement.width(rank) // max(columns, 1)
        return total, kept

    def _after(self, placement: Placement, before: Sequence[int]) -> str:
        if not placement.ranges:
            return _text(before)
        after = [
            _text([*before[: placement.dim], placement.width(rank), *before[placement.dim + 1 :]])
            for rank in range(self.ranks)
        ]
        counts = {shape: after.count(shape) for shape in after}
        return after[0] if len(counts) == 1 else ", ".join(f"{n} of {shape}" for shape, n in counts.items())


def _span(numbers: list[int]) -> str:
    """Block numbers in short: 0-31, or 0,2,4, or nothing."""
    if not numbers:
        return ""
    first, last = numbers[0], numbers[-1]
    if numbers == list(range(first, last + 1)) and last > first:
        return f"{first}-{last}"
    return ",".join(map(str, numbers))


def _shape_of(module: nn.Module) -> tuple[int, ...]:
    shapes = [tuple(weight.shape) for weight in module.parameters(recurse=False)]
    return max(shapes, key=len, default=())


def _text(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape))


def out_dim(module: nn.Module) -> int:
    """Along which dim of its weight a linear layer keeps its output columns."""
    return 1 if is_conv1d(module) else 0
