"""Weights that hold query, key and value in one: how their rows lie, how they are cut and put back (§9.13).

Checkpoints pack the three in several orders, and a cut that takes the wrong one for granted mixes them
without a word:

    [Q | K | V]                     FusedLayout()                    GPT-2, MPT, Phi-3, ChatGLM, Baichuan
    [q k v] for each kv group       FusedLayout(blocks=None)         Bloom, GPT-NeoX, Falcon
    4 blocks of [Q | V | K]         FusedLayout(4, ("q", "v", "k"))  CodeGen
    [gate | up]                     FusedLayout(parts=("gate", "up"))

One idea covers them: a layout orders heads, the whole weight and each rank's part are in the order of the
same layout, and so a cut finds for each head of a rank its place in the whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor, nn

from ds_lite.dealing import HeadDeal, Range, Ranges, deal_heads


@dataclass(frozen=True)
class Heads:
    """The heads of an attention: query heads, key and value heads, and how wide each is.

    A gated MLP counts as one whose heads are its columns: `Heads(columns, columns, 1)`.
    """

    query: int
    kv: int
    width: int

    def deal(self, ranks: int) -> HeadDeal:
        """Which heads each rank computes; see `deal_heads`."""
        return deal_heads(self.query, self.kv, ranks)


@dataclass(frozen=True)
class FusedLayout:
    """The order of the heads in a fused weight: `blocks` blocks, each with its share of every part in turn.

    "q" stands for query heads, every other part for key and value heads. None is one block for each kv head.
    """

    blocks: int | None = 1
    parts: tuple[str, ...] = ("q", "k", "v")

    def order(self, query: Range, kv: Range) -> list[tuple[str, int]]:
        """The rows of a weight with these heads, as (part, head).

        >>> FusedLayout().order((0, 2), (0, 1))
        [('q', 0), ('q', 1), ('k', 0), ('v', 0)]
        >>> FusedLayout(blocks=None).order((0, 2), (0, 2))
        [('q', 0), ('k', 0), ('v', 0), ('q', 1), ('k', 1), ('v', 1)]

        Raises: ValueError if the heads do not fill the blocks evenly.
        """
        blocks = kv[1] - kv[0] if self.blocks is None else self.blocks
        rows = []
        for block in range(blocks):
            for part in self.parts:
                start, stop = query if part == "q" else kv
                share, rest = divmod(stop - start, blocks)
                if rest:
                    raise ValueError(
                        f"{stop - start} heads do not fill {blocks} blocks of a fused weight evenly; choose "
                        f"a tensor-parallel degree that leaves each rank a multiple of {blocks} heads (§9.13)"
                    )
                first = start + block * share
                rows += [(part, head) for head in range(first, first + share)]
        return rows

    def describe(self) -> str:
        """The layout in a few signs, e.g. [q|k|v]."""
        packed = "|".join(self.parts)
        return {1: f"[{packed}]", None: f"[{packed}] per kv head"}.get(
            self.blocks, f"{self.blocks} x [{packed}]"
        )

    def rows(self, heads: Heads, ranks: int) -> Ranges:
        """Each rank's ranges of rows of the whole weight, in the order in which it holds them.

        With fewer kv heads than ranks, the rows of k and v are in several ranks' ranges.

        >>> FusedLayout().rows(Heads(query=2, kv=2, width=2), ranks=2)
        (((0, 2), (4, 6), (8, 10)), ((2, 4), (6, 8), (10, 12)))
        """
        place = {key: row for row, key in enumerate(self.order((0, heads.query), (0, heads.kv)))}
        dealt = heads.deal(ranks)
        return tuple(
            _ranges([place[key] for key in self.order(query, kv)], heads.width)
            for query, kv in zip(dealt.query, dealt.kv, strict=True)
        )

    def held(self, heads: Heads, ranks: int) -> tuple[int, ...]:
        """How many rows each rank keeps if all key and value rows stay on every rank."""
        shared = sum(part != "q" for part in self.parts) * heads.kv * heads.width
        own = [(stop - start) * heads.width * ("q" in self.parts) for start, stop in heads.deal(ranks).query]
        return tuple(rows + shared for rows in own)


def _ranges(places: Sequence[int], width: int) -> tuple[Range, ...]:
    """Places of heads as ranges of rows; neighbours are one range."""
    runs = groupby(enumerate(places), key=lambda pair: pair[1] - pair[0])
    found = [[place for _, place in run] for _, run in runs]
    return tuple((run[0] * width, (run[-1] + 1) * width) for run in found)


def strided_copy(fused: Tensor, rows: Sequence[Range], dim: int = 0) -> Tensor:
    """One rank's part of a fused weight or bias, with storage of its own.

    Shapes: fused (..., all rows, ...) -> (..., rows of the ranges, ...), along `dim`.

    >>> strided_copy(torch.arange(6), ((0, 1), (2, 3), (4, 5))).tolist()  # one head of each of q, k, v
    [0, 2, 4]

    Source: §9.13; DeepSpeed `module_inject/replace_module.py::strided_copy` @ 0.19.8.
    Differs: DeepSpeed's cuts every weight as equal thirds.
    """
    return torch.cat([fused.narrow(dim, start, stop - start) for start, stop in rows], dim=dim)


def put_back(parts: Sequence[Tensor], ranges: Ranges, dim: int = 0) -> Tensor:
    """The whole fused weight from the parts of all ranks: what `strided_copy` took apart, exactly.

    Rows that several ranks hold are taken from the last of them.
    """
    total = max(stop for rows in ranges for _, stop in rows)
    shape = list(parts[0].shape)
    shape[dim] = total
    whole = parts[0].new_empty(shape)
    for part, rows in zip(parts, ranges, strict=True):
        offset = 0
        for start, stop in rows:
            whole.narrow(dim, start, stop - start).copy_(part.narrow(dim, offset, stop - start))
            offset += stop - start
    return whole


# ------------------------------------------------------------------------------------------- who packs how

_ONE, _PER_GROUP = FusedLayout(), FusedLayout(blocks=None)
_GATE_UP = FusedLayout(parts=("gate", "up"))

# What the code of a block cannot show: classes of an attention or MLP, or of the module around it -> how its
# fused weight is packed.
replace_policies: dict[str, dict[str, FusedLayout]] = {
    "attention": {
        **dict.fromkeys(("GPT2Attention", "GPT2Block", "MptAttention", "MptBlock", "MPTBlock"), _ONE),
        **dict.fromkeys(
            ("Phi3Attention", "Phi3DecoderLayer", "GLMBlock", "BaichuanLayer", "QWenBlock"), _ONE
        ),
        **dict.fromkeys(("BloomAttention", "BloomBlock", "GPTNeoXAttention", "GPTNeoXLayer"), _PER_GROUP),
        **dict.fromkeys(("CodeGenAttention", "CodeGenBlock"), FusedLayout(4, ("q", "v", "k"))),
    },
    "mlp": dict.fromkeys(("Phi3MLP", "GlmMLP", "Glm4MLP"), _GATE_UP),
}


def attention_layout(modules: Sequence[nn.Module]) -> FusedLayout | None:
    """How the attention's fused weight is packed, from the modules around it; None for one we do not know."""
    for module in modules:
        name = type(module).__name__
        has_one_kv_head = getattr(module, "multi_query", name.startswith("GPTBigCode"))
        if name in ("FalconAttention", "FalconDecoderLayer"):
            is_new = getattr(module, "new_decoder_architecture", False)
            return _ONE if has_one_kv_head and not is_new else _PER_GROUP
        if name in ("GPTBigCodeAttention", "GPTBigCodeBlock"):
            return _ONE if has_one_kv_head else _PER_GROUP
        if layout := _known(name, "attention"):
            return layout
    return None


def mlp_layout(modules: Sequence[nn.Module]) -> FusedLayout | None:
    """How gate and up are packed in one weight; None for an MLP that we do not know."""
    found = (_known(type(module).__name__, "mlp") for module in modules)
    return next((layout for layout in found if layout), None)


def _known(class_name: str, what: str) -> FusedLayout | None:
    return replace_policies[what].get(class_name)
