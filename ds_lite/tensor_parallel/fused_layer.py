"""Projections whose key and value rows ranks share; with queries in it one becomes two parameters (§9.13)."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from ds_lite import comm
from ds_lite.comm import ProcessGroup
from ds_lite.dealing import Range, Ranges
from ds_lite.tags import Cut, cut, cut_of, tag, whole
from ds_lite.tensor_parallel.fused_qkv import FusedLayout, Heads, put_back, strided_copy
from ds_lite.tensor_parallel.regions import enter
from ds_lite.tensor_parallel.sharded import ShardedLayer


class SharedRows(ShardedLayer):
    """A key or value projection, or both in one, that stays whole on every rank; each uses some of its rows.

    Shapes: x (..., in) -> (..., rows of this rank's ranges).
    Communication: backward one all-reduce of x's size.
    Gradient: partial on each rank; the parameters are tagged so.
    Raises: as ShardedLayer.
    """

    def __init__(self, module: nn.Module, ranges: Ranges, group: ProcessGroup) -> None:
        super().__init__(module)
        self._ranges = ranges
        self.join(group)

    def _take_part(self, group: ProcessGroup) -> Ranges:
        for parameter in self.parameters():
            tag(parameter, model="partial")
        return self._ranges

    def forward(self, x: Tensor) -> Tensor:
        x = enter(x, self.group, overlaps=self.overlaps)
        rows = self.ranges[comm.get_rank(self.group)]
        weight = strided_copy(self.weight, rows, self.out_dim)
        bias = None if self.bias is None else strided_copy(self.bias, rows)
        return self.linear(x, weight.T if self.is_transposed else weight, bias)


class SharedQueryKeyValue(ShardedLayer):
    """Query, key and value in one linear layer, for more ranks than key and value heads.

    The query rows are cut (`weight`, `bias`); the key and value rows stay whole on every rank (`kv_weight`,
    `kv_bias`), each rank uses those of its kv head, and their gradients are partial.

    Shapes: x (..., in) -> (..., this rank's rows of the layout).
    Communication: backward one all-reduce of x's size.
    Raises: as ShardedLayer and `deal_heads`.
    """

    def __init__(self, module: nn.Module, layout: FusedLayout, heads: Heads, group: ProcessGroup) -> None:
        super().__init__(module)
        self.layout, self.heads = layout, heads
        self.kv_weight: nn.Parameter
        self.kv_bias: nn.Parameter | None = None
        self.places: list[int] = []  # of this rank's rows, in [query rows here, all key and value rows]
        self.join(group)

    def _take_part(self, group: ProcessGroup) -> Ranges:
        ranks, rank, width = comm.get_world_size(group), comm.get_rank(group), self.heads.width
        query_rows, shared_rows = self._rows_of_kinds()
        dealt = tuple(((a * width, b * width),) for a, b in self.heads.deal(ranks).query)
        for name, dim in self._dims():
            parameter = getattr(self, name)
            shared = nn.Parameter(strided_copy(parameter.detach(), shared_rows, dim), parameter.requires_grad)
            tag(shared, model="partial")
            setattr(self, f"kv_{name}", shared)
            parameter.data = strided_copy(parameter.detach(), query_rows, dim)
            cut(parameter, Cut(dim, dealt, group))
        ranges = self.layout.rows(self.heads, ranks)
        query = _listed(query_rows)
        held = [*(query[place] for place in _listed(dealt[rank])), *_listed(shared_rows)]
        place_of = {row: place for place, row in enumerate(held)}
        self.places = [place_of[row] for row in _listed(ranges[rank])]
        return ranges

    def _dims(self) -> list[tuple[str, int]]:
        """The parameters there are, with the dim of their rows."""
        return [("weight", self.out_dim)] + ([("bias", 0)] if self.bias is not None else [])

    def _rows_of_kinds(self) -> tuple[tuple[Range, ...], tuple[Range, ...]]:
        """The rows of the whole weight that are query rows, and the others."""
        width = self.heads.width
        order = self.layout.order((0, self.heads.query), (0, self.heads.kv))
        rows = [(part == "q", (place * width, (place + 1) * width)) for place, (part, _) in enumerate(order)]
        return tuple(one for is_q, one in rows if is_q), tuple(one for is_q, one in rows if not is_q)

    def forward(self, x: Tensor) -> Tensor:
        x = enter(x, self.group, overlaps=self.overlaps)
        places = torch.tensor(self.places, device=x.device)
        weight = torch.cat([self.weight, self.kv_weight], dim=self.out_dim).index_select(self.out_dim, places)
        bias = None
        if self.bias is not None and self.kv_bias is not None:
            bias = torch.cat([self.bias, self.kv_bias]).index_select(0, places)
        return self.linear(x, weight.T if self.is_transposed else weight, bias)

    def split_parameters(self) -> list[tuple[nn.Parameter, nn.Parameter]]:
        """Each parameter of the module that this layer was made from, and the one that was split from it."""
        return [(getattr(self, name), getattr(self, f"kv_{name}")) for name, _ in self._dims()]

    def whole_parameters(self) -> dict[str, Tensor]:
        """Weight and bias as the module had them that this layer was made from.

        Communication: one all-gather for each.
        """
        rows = self._rows_of_kinds()
        return {
            name: put_back([whole(getattr(self, name)), getattr(self, f"kv_{name}").detach()], rows, dim)
            for name, dim in self._dims()
        }

    def parts_of(self, name: str, tensor: Tensor) -> dict[str, Tensor]:
        """This rank's parts of a whole weight or bias, by the names of the parameters that hold them."""
        dim = self.out_dim if name == "weight" else 0
        query_rows, shared_rows = self._rows_of_kinds()
        how = cut_of(getattr(self, name))
        assert how is not None and self.group is not None
        query = how.take(strided_copy(tensor, query_rows, dim), comm.get_rank(self.group))
        return {name: query, f"kv_{name}": strided_copy(tensor, shared_rows, dim)}


def _listed(ranges: Iterable[Range]) -> list[int]:
    return [row for start, stop in ranges for row in range(start, stop)]
