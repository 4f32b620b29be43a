"""The module in parts, one file each, and who writes them (§9.1 §9.3 §9.4).

In a pipeline a part is a layer, under its global number, and a tied module belongs to the first layer that
uses it, so it is stored once. In any other module a part is what stands below the first number in a name
(`blocks.3`), or below the first word. Names inside are those of `state_dict()`, the same for every layout.
The experts of a layer are parts of their own, one for each rank of an expert group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from torch import nn

from ds_lite.grid import PipelineParallelGrid
from ds_lite.moe.layer import MoE
from ds_lite.moe.spread import SpreadExperts
from ds_lite.pipe.module import PipelineModule
from ds_lite.saving.state import STAGE


@dataclass(frozen=True)
class Part:
    """What shares a file, e.g. label "layer_03", and whether this rank writes it."""

    label: str
    names: tuple[str, ...]
    is_mine: bool


def expert_names(module: nn.Module) -> dict[str, int]:
    """The names of parameters and buffers in experts that were dealt out over ranks, with their ep_size."""
    return {
        f"{prefix}.{name}" if prefix else name: layer.ep_size
        for prefix, layer in module.named_modules()
        if isinstance(layer, (MoE, SpreadExperts)) and layer.ep_size > 1
        for name in layer.state_dict()
        if name.startswith("experts.")
    }


def parts_of(module: nn.Module, names: Sequence[str], grid: PipelineParallelGrid) -> list[Part]:
    """The parts that this rank's stage stores, of the given names; those of experts apart."""
    experts = expert_names(module)
    is_first = grid.ranks(*STAGE)[0] == grid.global_rank
    parts: list[Part] = []
    for label, held in labelled(module, names).items():
        if dense := tuple(name for name in held if name not in experts):
            parts.append(Part(label, dense, is_first))
        for size in sorted({experts[name] for name in held if name in experts}):
            parts.append(_part_of_experts(label, held, experts, grid, size))
    return parts


def _part_of_experts(
    label: str, held: Sequence[str], experts: dict[str, int], grid: PipelineParallelGrid, size: int
) -> Part:
    """The experts of one ep_size that this rank holds; its first copy on the data axis writes them."""
    is_mine = grid.expert(size).data_ranks[0] == grid.global_rank and grid.coordinate("model") == 0
    place = grid.ranks("data", "seq").index(grid.global_rank)
    names = tuple(name for name in held if experts.get(name) == size)
    return Part(f"{label}-experts_{place:02d}_of_{size:02d}", names, is_mine)


def labelled(module: nn.Module, names: Sequence[str]) -> dict[str, list[str]]:
    """The names of each part, by its label.

    What belongs to no layer of a pipeline (a loss with parameters) is stored by every stage that has it, and
    counts from the last one.
    """
    found: dict[str, list[str]] = {}
    for name in names:
        label = _layer_label(module, name) if isinstance(module, PipelineModule) else _top(name)
        if label is not None:
            found.setdefault(label, []).append(name)
    if isinstance(module, PipelineModule):
        return found
    width = _digits(len(found))  # words may differ in case only, numbers make safe file names
    return {f"part_{index:0{width}d}": held for index, held in enumerate(found.values())}


def _digits(count: int) -> int:
    """Enough for the numbers below `count`, and at least two."""
    return max(2, len(str(count - 1)))


def _top(name: str) -> str:
    """The part that a name of an ordinary module belongs to.

    >>> [_top(name) for name in ("model.blocks.3.mlp.0.weight", "model.word.weight", "scale")]
    ['model.blocks.3', 'model', '']
    """
    modules = name.split(".")[:-1]
    for depth, word in enumerate(modules):
        if word.isdecimal():
            return ".".join(modules[: depth + 1])
    return modules[0] if modules else ""


def _layer_label(module: PipelineModule, name: str) -> str | None:
    """The file of a name in a pipeline; None for a tied module that an earlier stage stores."""
    width, first = _digits(module.parts[-1]), name.split(".")[0]
    if first == "tied_modules":
        key = name.split(".")[1]
        tie = next((tie for tie in module.ties() if tie.key == key), None)
        if tie is not None and tie.ranks[0] != module.global_rank:
            return None
        return f"layer_{_first_use(module, key):0{width}d}"
    if first.isdecimal():
        return f"layer_{int(first):0{width}d}"
    return f"stage_{module.stage_id:0{_digits(module.num_stages)}d}"


def _first_use(module: PipelineModule, key: str) -> int:
    """The lowest global number of a layer here that uses a tied module."""
    tied = module.tied_modules[key]
    for local, layer in enumerate(module.forward_funcs):
        if layer is tied or (isinstance(layer, partial) and layer.args and layer.args[0] is tied):
            return module.parts[module.stage_id] + local
    raise AssertionError(f"no layer of stage {module.stage_id} uses the tied module {key!r}")
